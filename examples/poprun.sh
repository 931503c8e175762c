#!/bin/bash
# Train on IPUs of several hosts, and start again from the newest checkpoint after a fault (not run on hardware):
#   CONFIG=configs/pod/pod64_resnet50_pipelined.yaml HOSTS=host0,host1 PARTITION=p64 SERVER=vipu bash examples/poprun.sh
# REPLICAS and IPUS (of a replica) must be the config's. Arguments go to tools/train.py.
set -uo pipefail

: "${CONFIG:?CONFIG=FILE is missing}" "${HOSTS:?HOSTS=host0,host1 is missing}" "${PARTITION:?is missing}" "${SERVER:?is missing}"
OUT=${OUT:-$PWD/runs/$(basename "$CONFIG" .yaml)}  # on a file system that all hosts share
INSTANCES=${INSTANCES:-2}                          # processes, each of which reads a share of the data
REPLICAS=${REPLICAS:-16}
IPUS=${IPUS:-4}
export MASTER_ADDR=${MASTER_ADDR:-${HOSTS%%,*}} MASTER_PORT=${MASTER_PORT:-29500}

for attempt in 1 2 3 4; do
    poprun --host "$HOSTS" --num-instances "$INSTANCES" --num-replicas "$REPLICAS" --ipus-per-replica "$IPUS" \
        --vipu-partition "$PARTITION" --vipu-server-host "$SERVER" \
        --mpi-local-args="-x MASTER_ADDR -x MASTER_PORT -x PATH -x LD_LIBRARY_PATH -x PYTHONPATH -x OPAL_PREFIX" \
        python tools/train.py "$CONFIG" --out "$OUT" --resume "$@" && exit 0
    code=$?
    [ "$code" -ge 128 ] && exit "$code"  # Ctrl-C, or the queue's signal
    echo "attempt $attempt ended with exit code $code" >&2
done
exit 1
