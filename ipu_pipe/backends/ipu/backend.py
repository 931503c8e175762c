"""IPUs by PopTorch as a row of the table of backends (not run on hardware)."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import os
import sys
import warnings
from functools import partial
from typing import Any, Mapping

import numpy as np
import torch
import torch.distributed as dist

from ipu_pipe.backends.features import list_lacking
from ipu_pipe.backends.interface import Backend, Engine
from ipu_pipe.backends.ipu.blocks import BlockEngine
from ipu_pipe.backends.ipu.engine import PoptorchEngine
from ipu_pipe.backends.ipu.model_facts import observe_model
from ipu_pipe.backends.ipu.options import IpuOptions
from ipu_pipe.backends.ipu.placement import (
    initialize_popdist,
    is_pipelined,
    is_under_poprun,
    place_stages,
    read_poprun_share,
    round_up_ipus,
)
from ipu_pipe.backends.ipu.sdk import predict_refusals
from ipu_pipe.backends.ipu.unsupported import check_model
from ipu_pipe.backends.ipu.wrapping import copy_body
from ipu_pipe.backends.ranks import is_distributed
from ipu_pipe.config.schema import PipelineConfig
from ipu_pipe.cut.loss_verification import (
    LossStage,
    LossTrial,
    list_foreign_reads,
    takes_output_alone,
)
from ipu_pipe.errors import BadInput, summarize
from ipu_pipe.hardware.memory import make_lockstep_schedule
from ipu_pipe.job.factories import place_whole
from ipu_pipe.job.record import Job
from ipu_pipe.launcher import announce_rank, read_launch
from ipu_pipe.model.randomness import KeyedRandomness
from ipu_pipe.refusals import EMULATOR, Argument, Words, name_key
from ipu_pipe.replay.run import Run
from ipu_pipe.schedule.stretches import IntArray
from ipu_pipe.schedule.versions import VersionTable

# seconds that a process may wait for another one that compiles
COMPILATION = 3600.0
LOCAL = Argument("backend_args.ipu.local")
MISSING = (
    "PopTorch is not installed: it is a wheel inside Graphcore's Poplar SDK 3.4 (not on PyPI), for "
    "Python 3.8 and torch 2.0.1; what runs here is "
    f"{name_key('backend.name')}=emulator{Words('', ' with backend.ipu=null')} and "
    f"{name_key('precision')}=float32"
)


def start(config: PipelineConfig, asked: Mapping[str, object]) -> None:
    """Set the environment variables that PopTorch and Poplar read, import PopTorch, and join other
    processes.

    Raise `BadInput` if PopTorch is missing or the launcher does not fit: torchrun starts blocks,
    poprun replicas.
    """
    ipu = config.ipu
    decoupled = ipu.local == "decoupled"
    if importlib.util.find_spec("poptorch") is None:
        # a plan needs no device
        if asked.get("--dry-run"):
            return
        raise BadInput(f"{Argument('backend')}: poptorch: {MISSING}")
    if decoupled and is_under_poprun():
        raise BadInput(
            f"{LOCAL}: decoupled: not under poprun: start it with torchrun, or set fused"
        )
    if decoupled and not is_distributed():
        script = Words("your script", "tools/train.py CONFIG")
        start_it = f"start it with torchrun --nproc_per_node BLOCKS {script}, or set fused"
        raise BadInput(f"{LOCAL}: decoupled: each block runs in a process of its own: {start_it}")
    if not decoupled and is_distributed() and not is_under_poprun():
        raise BadInput(
            f"{Argument('backend')}: poptorch: one process drives all IPUs: start it without "
            "torchrun (poprun: replicas)"
        )
    # PopTorch's import passes the file of sys.stderr to its crash handler, but a notebook's stderr
    # has no file
    stderr_with_file = sys.__stderr__ or open(os.devnull, "w")
    try:
        with contextlib.redirect_stderr(stderr_with_file):
            import poptorch  # noqa: F401
        # PopTorch's wrapped model passes state_dict's arguments by position
        warnings.filterwarnings("ignore", message="Positional args are being deprecated")
    except (ImportError, AssertionError, OSError) as error:
        raise BadInput(
            f"{Argument('backend')}: poptorch: PopTorch is installed but cannot be imported: "
            f"{summarize(error)}: source the SDK's enable "
            "scripts, and use its Python 3.8 and torch 2.0.1"
        ) from error
    group_arguments: dict[str, Any] = {}
    is_one_of_several = decoupled
    if is_under_poprun():
        group_arguments = _read_poprun_group()
        is_one_of_several = group_arguments["world_size"] > 1
    # a caller may have made the group
    if is_one_of_several and not dist.is_initialized():
        timeout = datetime.timedelta(seconds=max(config.backend.deadline, COMPILATION))
        dist.init_process_group("gloo", timeout=timeout, **group_arguments)


def _read_poprun_group() -> dict[str, Any]:
    """Return the arguments with which poprun's instances join a gloo group, for decisions of the
    first one (not run on hardware).

    The address is MASTER_ADDR:MASTER_PORT, 127.0.0.1:29500 by default.
    """
    import popdist

    initialize_popdist()
    rank = popdist.getInstanceIndex()
    world = popdist.getNumInstances()
    launch = read_launch()
    announce_rank(rank, world)
    address = f"tcp://{launch.address or '127.0.0.1'}:{launch.port or 29500}"
    return {"init_method": address, "rank": rank, "world_size": world}


def list_faults(job: Job) -> list[str]:
    """Return the reasons why PopTorch cannot run the job, one line each; empty if none is known
    before compiling.
    """
    # the trials below need what the job lacks
    if list_lacking(job):
        return []
    return [*check_model(job.config, job.method, observe_model(job)), *_list_foreign_reads(job)]


def _list_foreign_reads(job: Job) -> list[str]:
    """Return the reasons why the loss cannot be computed with the copies of the model that PopTorch
    compiles.
    """
    if takes_output_alone(job.loss):
        return []
    # the hooks of the keyed draws are copied with the model, and must be there before
    randomness = KeyedRandomness(job.model, job.effects.draws, 0, job.device)
    try:
        body = copy_body(job.model)
        stages = [
            LossStage(0, [body], partial(_run_block, body, block)) for block in range(body.losses)
        ]
        trial = LossTrial(job.model, (), job.loss, job.example, randomness)
        place = "PopTorch compiles a copy of the model, in which it cannot read them"
        remedy = f"put the term into the model's output, or use {EMULATOR}"
        return list(dict.fromkeys(list_foreign_reads(trial, stages, place, remedy)))
    finally:
        randomness.remove()


def _run_block(body: Any, block: int, x: torch.Tensor) -> Any:
    """Return the output of one of the blocks with losses of a model's copy."""
    return list(body.run_blocks(x))[block][0]


def note(job: Job) -> str:
    """Describe for the user how PopTorch will run the stages."""
    config = job.config
    stages = len(job.partition)
    if config.ipu.local == "decoupled":
        return (
            f"{stages} blocks on {stages} IPUs, each in a process of its own; activations go "
            f"through the hosts"
        )
    placement = place_stages(config.ipu, stages)
    description = f"{stages} stages on {placement.ipu_count} IPUs of each replica"
    if not is_pipelined(job.method):
        return f"{description}, one of which works at a time (ShardedExecution)"
    accumulation = config.gradient_accumulation
    cycles = placement.count_cycles(config.gradient_accumulation)
    return (
        f"{description} (PipelinedExecution): {cycles} pipeline cycles an update, "
        f"{accumulation / cycles:.1%} of them full"
    )


def make(run: Run, first_update: int, table: VersionTable) -> Engine:
    """Return the engine of this process. Raise `BadInput` if its IPUs are missing, before a
    compilation that may take an hour.
    """
    import poptorch

    options: IpuOptions = run.options
    ipu = options.ipu
    is_block = ipu.local == "decoupled"
    ipus = place_stages(ipu, len(run.partition)).ipu_count
    share = read_poprun_share(options.replicas)
    # PopTorch attaches powers of two
    count = 1 if is_block else round_up_ipus(ipus * share.replicas)
    # by these variables PopTorch takes a simulator, or waits until a device is free
    names = ("POPTORCH_IPU_MODEL", "POPTORCH_WAIT_FOR_IPU")
    needs_none = ipu.is_simulated or any(os.environ.get(n, "0") not in ("", "0") for n in names)
    if not (needs_none or poptorch.ipuHardwareIsAvailable(count)):
        raise BadInput(
            f"{Argument('backend')}: poptorch: this machine has no device of {count} IPUs: take "
            f"fewer stages or replicas (over 64: poprun --num-instances), or compile without one: "
            f"{name_key('backend.ipu.compile_only')}=true "
            f"{name_key('backend.ipu.options.useOfflineIpuTarget')}=2"
        )
    return (BlockEngine if is_block else PoptorchEngine)(run, first_update, table)


def count_in_flight(job: Job) -> IntArray | None:
    """Return the most microbatches in flight on each stage, (P,), None without a pipeline (not run
    on hardware).

    PopTorch counts the stages of one IPU as one stage.
    """
    if not (is_pipelined(job.method) and job.method.flushes):
        return None
    poptorch_stages = place_stages(job.config.ipu, len(job.partition)).poptorch_stages
    accumulate = job.schedule.accumulate
    in_flight = make_lockstep_schedule(
        job.method, len(poptorch_stages), accumulate, accumulate
    ).max_in_flight()
    # each of our stages has the count of the PopTorch stage that it belongs to, (P,)
    return np.repeat(in_flight, [len(stages) for _, stages in poptorch_stages])


BACKEND = Backend(
    launch=start,
    place=place_whole,
    list_faults=list_faults,
    describe=note,
    make_engine=make,
    make_options=IpuOptions.of,
    count_in_flight=count_in_flight,
    predict_refusals=predict_refusals,
)
