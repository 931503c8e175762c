"""The group of processes that a launcher started: joining it, and leaving it."""

from __future__ import annotations

import os
from typing import Any, List, Mapping, Sequence

import torch
import torch.distributed as dist

from ipu_pipe.backends.processes.joining import ANSWER, Asked, answer_within, differing, meet, wait_limit, what_is_asked
from ipu_pipe.backends.processes.stopping import Stopping
from ipu_pipe.backends.ranks import is_distributed, report_lost_rank
from ipu_pipe.config.schema import BackendConfig, Config
from ipu_pipe.errors import BadInput
from ipu_pipe.job.numerics import set_numerics
from ipu_pipe.launcher import read_launch


def check_launch(backend: BackendConfig) -> None:
    """Refuse (BadInput) to be started without a launcher."""
    if not is_distributed():
        raise BadInput(
            "backend.name: distributed: each stage runs in a process of its own: start it with"
            " torchrun --nproc_per_node STAGES tools/train.py CONFIG --set backend.name=distributed"
        )


def start(config: Config, options: Mapping[str, object]) -> None:
    """Join the group of processes that the launcher started, by gloo; where GPUs talk to each other, each channel is a group of
    nccl (`_channels`). Raises BadInput where another process has another config or other `options`, RunFault where one does not
    come."""
    backend, where = config.backend, read_launch()
    if not dist.is_available():
        raise BadInput("backend.name: distributed: this PyTorch was built without torch.distributed")
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 4):
        raise BadInput(f"backend.name: distributed: needs torch 2.4 or later, this is {torch.__version__}")
    asked = what_is_asked(config, options)
    if dist.is_initialized():
        _agree(asked)
        return
    missing = [key for key, value in (("MASTER_ADDR", where.address), ("MASTER_PORT", where.port)) if value is None]
    if missing:
        raise BadInput([f"{key}: missing: must be set, as a launcher such as torchrun does" for key in missing])
    limit = wait_limit(backend.deadline)
    store = meet(where, limit.total_seconds(), asked)
    if backend.device == "cuda":
        # a kernel that is loaded when first used waits for an idle GPU, which one with a receive posted is not
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
        set_numerics(backend)
        torch.cuda.set_device((where.local_rank or 0) % max(torch.cuda.device_count(), 1))
    with report_lost_rank(where.rank):
        # torch asks the store without a limit: a rank 0 that keeps it and is stopped would hold all others up for ever
        answer_within(
            limit.total_seconds() + ANSWER,
            lambda: dist.init_process_group(
                "gloo", store=dist.PrefixStore("group", store), rank=where.rank, world_size=where.world, timeout=limit
            ),
        )
    Stopping.watch()


def make_group(ranks: Sequence[int], deadline: float, **how: Any) -> Any:
    """Return a new process group of these ranks. All ranks must call this at once, in the same order of groups.

    Raise `RunFault` if another rank does not take part within `deadline` seconds and some more. `how`: further arguments of
    `torch.distributed.new_group`, among them another `timeout` of what the group does later.
    """
    limit = wait_limit(deadline)
    with report_lost_rank():
        # as in `start`, the store is asked without a limit
        return answer_within(
            limit.total_seconds() + ANSWER, lambda: dist.new_group(list(ranks), **{"timeout": limit, **how})
        )


def _agree(asked: Asked) -> None:
    """Refuse (BadInput, on all ranks) where those of a group that is there already are not asked for the same."""
    held: List[Any] = [None] * dist.get_world_size()
    with report_lost_rank():
        dist.all_gather_object(held, asked)
    faults = next(
        (found for rank, other in enumerate(held) for found in [differing(held[0], other, 0, rank)] if found), []
    )
    if faults:
        raise BadInput(faults)


def stop() -> None:
    """Leave the group, when all are ready to: a process that ends before the others takes its connections with it."""
    if dist.is_initialized():
        with report_lost_rank():
            dist.barrier()
        if _group_can_go():
            dist.destroy_process_group()
        Stopping.rest()


def _group_can_go() -> bool:
    """Whether the group can be taken down in a process that goes on. Before torch 2.4 (PopTorch's is 2.0.1) gloo's destructor
    joins a worker while it holds the interpreter's lock, for which that worker may wait: there the process ends with it, at once
    (errors.end_process)."""
    return tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 4)


def gpus_talk() -> bool:
    """Whether every process has a GPU of its own and nccl is there; else a GPU's tensors go through the host's memory."""
    own = dist.is_nccl_available() and read_launch().local_world <= torch.cuda.device_count()
    found = [own] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return all(found)
