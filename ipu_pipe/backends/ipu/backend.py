"""IPUs by PopTorch as a row of the table of backends (not run on hardware)."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
from typing import Iterator, List, Mapping

import torch.distributed as dist

from ipu_pipe.backends.interface import Backend, Engine
from ipu_pipe.backends.ipu import blocks as ipu_blocks
from ipu_pipe.backends.ipu import model as ipu_model
from ipu_pipe.backends.ipu import options as ipu_options
from ipu_pipe.backends.ipu.engine import PoptorchEngine, instance, is_under_poprun
from ipu_pipe.backends.ipu.options import ModelFacts
from ipu_pipe.backends.ranks import is_distributed
from ipu_pipe.errors import BadInput
from ipu_pipe.job.config import BackendConfig, Config
from ipu_pipe.job.placing import place_whole
from ipu_pipe.job.record import Job


def check_installed() -> None:
    """Refuse (BadInput, one line) to go on without PopTorch."""
    if importlib.util.find_spec("poptorch") is None:
        raise BadInput(f"backend.name: poptorch: {ipu_options.MISSING}")


def check_launch(backend: BackendConfig) -> None:
    """Refuse (BadInput) a launcher that does not fit: torchrun starts blocks, poprun starts replicas."""
    check_installed()
    assert backend.ipu is not None
    if is_under_poprun():
        if backend.ipu.local == "decoupled":
            raise BadInput("backend.ipu.local: decoupled: not under poprun: start it with torchrun, or set fused")
    elif backend.ipu.local == "decoupled" and not is_distributed():
        raise BadInput(
            "backend.ipu.local: decoupled: each block runs in a process of its own: start it with"
            " torchrun --nproc_per_node BLOCKS tools/train.py CONFIG, or set fused"
        )
    elif backend.ipu.local != "decoupled" and is_distributed():
        raise BadInput(
            "backend.name: poptorch: one process drives all IPUs: start it without torchrun (poprun starts several "
            "for replicas)"
        )


def start(config: Config, asked: Mapping[str, object]) -> None:
    """Import PopTorch, with what it and Poplar read from the environment at that time, and join other processes."""
    backend = config.backend
    ipu = backend.ipu
    assert ipu is not None
    if ipu.profile.pvti is not None:
        text = json.dumps({"enable": "true", "directory": ipu.profile.pvti})
        os.environ.setdefault("PVTI_OPTIONS", text)  # libpvti looks at it when it is imported
    if ipu.wait_for_ipu:
        os.environ.setdefault("POPTORCH_WAIT_FOR_IPU", "1")
    try:
        with _stderr_is_a_file():
            import poptorch  # noqa: F401
    except (ImportError, AssertionError, OSError) as error:
        said = " ".join(str(error).split())[:200]
        raise BadInput(
            f"backend.name: poptorch: PopTorch is there but cannot be imported: {said}: source the SDK's enable "
            "scripts, and use its "
            "Python 3.8 and torch 2.0.1"
        ) from error
    if is_under_poprun():
        _join_poprun(backend.deadline)
    elif ipu.local == "decoupled":
        ipu_blocks.start(backend)


@contextlib.contextmanager
def _stderr_is_a_file() -> Iterator[None]:
    """PopTorch, when imported, has crashes told on sys.stderr, which must be a file then; a notebook's is none."""
    held = sys.stderr
    try:
        held.fileno()
    except (AttributeError, OSError, ValueError):
        sys.stderr = sys.__stderr__ or open(os.devnull, "w")  # kept open: a crash is written to it
    try:
        yield
    finally:
        sys.stderr = held


def _join_poprun(deadline: float) -> None:
    """poprun's instances also meet in a gloo group, by which the first one's word goes to all (not run on hardware). MASTER_ADDR
    and MASTER_PORT say where, 127.0.0.1 and 29500 by default."""
    import datetime

    import popdist

    popdist.init()
    rank, world = popdist.getInstanceIndex(), popdist.getNumInstances()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))  # what the rest of the package asks
    if world > 1 and not dist.is_initialized():
        where = f"tcp://{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', '29500')}"
        patience = datetime.timedelta(seconds=max(deadline, 3600.0))  # one compiles while the others wait
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world, timeout=patience)


def _facts(job: Job) -> ModelFacts:
    return ipu_model.facts(job.model, job.part, job.example[0], job.optimizer, job.updates, job.updates_per_epoch)


def faults(job: Job) -> List[str]:
    """Reasons why PopTorch cannot run the job; empty if none is known before compiling."""
    config, facts = job.config, _facts(job)
    local = instance(config).replicas if importlib.util.find_spec("poptorch") is not None else None
    return ipu_options.refuses(config, facts, local if local != config.replicas else None)


def note(job: Job) -> str:
    """How PopTorch will run the stages, for the user."""
    config, stages = job.config, len(job.part)
    ipu = config.backend.ipu
    assert ipu is not None
    if ipu.local == "decoupled":
        return f"{stages} blocks on {stages} IPUs, each in a process of its own; activations go through the hosts"
    place = ipu_options.placement(ipu, stages)
    if not ipu_options.is_pipelined(job.method):
        return f"{stages} stages on {place.ipus} IPUs of each replica, one of which works at a time (ShardedExecution)"
    accumulation = config.gradient_accumulation
    share = accumulation / place.cycles(accumulation)
    return (
        f"{stages} stages on {place.ipus} IPUs of each replica (PipelinedExecution): "
        f"{place.cycles(accumulation)} pipeline cycles "
        f"an update, {share:.1%} of them full"
    )


def make(job: Job, first_update: int) -> Engine:
    """The engine of this process."""
    assert job.config.backend.ipu is not None
    if job.config.backend.ipu.local == "decoupled":
        return ipu_blocks.BlockEngine(job, first_update)
    return PoptorchEngine(job, first_update)


BACKEND = Backend(check_launch, start, place_whole, faults, note, make, trains_on="ipu")
