"""Graphcore's launcher: each of the processes that it starts drives some of the replicas. Not run on hardware."""

from __future__ import annotations

import datetime
from typing import Any, Callable, NamedTuple, Optional

import torch.distributed as dist

from ipu_pipe.backends.ipu.placement import is_under_poprun
from ipu_pipe.config.schema import Config
from ipu_pipe.errors import BadInput
from ipu_pipe.launcher import announce_rank, read_launch


class Instance(NamedTuple):
    """This process's share: replicas `first` to `first + replicas`. `base`: makes popdist's options, None without poprun."""

    first: int
    replicas: int
    base: Optional[Callable[[int], Any]] = None


def read_instance(config: Config) -> Instance:
    """Return this process's share of the run. Raises BadInput where poprun started another number of replicas."""
    if not is_under_poprun():
        return Instance(0, config.replicas)
    import popdist
    import popdist.poptorch

    popdist.init()
    local, total = popdist.getNumLocalReplicas(), popdist.getNumTotalReplicas()
    if total != config.replicas:
        raise BadInput(f"replicas: {config.replicas}: poprun started {total} (--num-replicas): must be the same")
    return Instance(
        popdist.getInstanceIndex() * local, local, lambda ipus: popdist.poptorch.Options(ipus_per_replica=ipus)
    )


def join_poprun(deadline: float) -> None:
    """Join poprun's instances in a gloo group too, by which the first one's decisions reach all (not run on hardware).
    MASTER_ADDR and MASTER_PORT say where, 127.0.0.1 and 29500 by default."""
    import popdist

    popdist.init()
    rank, world = popdist.getInstanceIndex(), popdist.getNumInstances()
    announce_rank(rank, world)
    if world > 1 and not dist.is_initialized():
        launch = read_launch()
        where = f"tcp://{launch.address or '127.0.0.1'}:{launch.port or 29500}"
        patience = datetime.timedelta(seconds=max(deadline, 3600.0))  # one compiles while the others wait
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world, timeout=patience)
