"""Join the process group that a launcher started; continue only if all ranks have the same request.

torch makes the group, within the deadline. Then every rank compares config, options and versions
with rank 0's.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
from datetime import timedelta
from typing import Any, Dict, Mapping, Sequence

import torch
import torch.distributed as dist

from ipu_pipe import __version__
from ipu_pipe.backends import world
from ipu_pipe.backends.processes.lost_ranks import (
    ANSWER,
    WARM_UP,
    Termination,
    answer_within,
    wait_limit,
)
from ipu_pipe.backends.ranks import (
    gather_by_rank,
    gather_objects,
    gather_over,
    is_distributed,
    read_torch_version,
    report_lost_rank,
)
from ipu_pipe.config.compare import flatten
from ipu_pipe.config.schema import PipelineConfig
from ipu_pipe.errors import BadInput, RunFault, raise_faults, summarize
from ipu_pipe.job.numerics import set_numerics
from ipu_pipe.launcher import Launch, read_launch
from ipu_pipe.model.devices import DeviceKind, get_kind
from ipu_pipe.refusals import Argument, Words

# numbers the times that this process has joined, which all ranks do in the same order
_joins = itertools.count()

RANKS_MAY_DIFFER = ("data.root", "backend.threads")

# the config's keys, the options and the versions of a rank, as JSON values
Request = Dict[str, Any]


def describe_missing_support() -> str:
    """Return why this PyTorch cannot train on processes, '' if it can."""
    if not dist.is_available():
        return "this PyTorch was built without torch.distributed"
    if read_torch_version() < (2, 4):
        return f"needs torch 2.4 or later, this is {torch.__version__}"
    return ""


def join(config: PipelineConfig, options: Mapping[str, object]) -> None:
    """Join the process group (gloo).

    Raise `BadInput` if there is no launcher, or if another rank has another config or other
    options, `RunFault` if a rank is missing at the deadline. For GPUs that exchange messages
    directly, each link has an nccl group besides (`nccl.make_channels`).
    """
    backend = config.backend
    where = read_launch()
    if not is_distributed():
        script = Words("your script", "tools/train.py CONFIG --set backend.name=distributed")
        raise BadInput(
            f"{Argument('backend')}: distributed: each stage runs in a process of its own: start "
            f"it with torchrun --nproc_per_node STAGES {script}"
        )
    missing_support = describe_missing_support()
    if missing_support:
        raise BadInput(f"{Argument('backend')}: distributed: {missing_support}")
    request = make_request(config, options)
    if dist.is_initialized():
        carried = dist.get_backend_config()
        if "cpu:" not in carried:
            remedy = "dist.init_process_group('cpu:gloo,cuda:nccl')"
            raise BadInput(
                f"{Argument('backend')}: distributed: the process group ({carried}) has no "
                f"backend for the CPU: use {remedy}"
            )
        _compare_with_all(request)
        return
    missing = [
        key
        for key, value in (("MASTER_ADDR", where.address), ("MASTER_PORT", where.port))
        if value is None
    ]
    if missing:
        raise BadInput(
            [f"{key}: missing: must be set, as a launcher such as torchrun does" for key in missing]
        )
    kind = get_kind(backend.device)
    if kind.is_cuda:
        # loading a kernel at its first use would wait for an idle GPU, but a posted receive keeps
        # the GPU busy
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
        set_numerics(backend)
    if kind.is_accelerator:
        # more ranks than devices share them
        _use_device(kind, (where.local_rank or 0) % max(kind.count_devices(), 1))
    _meet_all_ranks(where, wait_limit(backend.deadline))
    _compare_with_all(request)
    # a loop of the caller's own ends as any script does: taking down the interpreter around the
    # group's threads would abort about every third run
    atexit.register(_end_group)
    Termination.watch()


def _meet_all_ranks(where: Launch, limit: timedelta) -> None:
    """Make the process group. Raise `RunFault`, with torch's reason, if not all ranks come."""
    seconds = limit.total_seconds()
    try:
        # if rank 0, which keeps the store, is stopped, torch waits for it without a limit
        answer_within(seconds + ANSWER, lambda: _make_default_group(where.attempt, limit))
    # a TimeoutError is an OSError
    except (RuntimeError, ValueError, OSError) as error:
        raise RunFault(
            f"rank {where.rank}: the {where.world} ranks did not meet at {where.address}:"
            f"{where.port} (MASTER_ADDR:MASTER_PORT) within {seconds:g} s (the deadline and "
            f"{WARM_UP:g} more): {summarize(error)}; start every rank, with a RANK of its own and "
            f"the same MASTER_ADDR and MASTER_PORT"
        ) from error


def _make_default_group(attempt: int, limit: timedelta) -> None:
    """Make torch's default group at the launcher's store; `attempt`: the restarts before."""
    store, rank, count = next(dist.rendezvous("env://", timeout=limit))
    # A launcher's store outlives a group and, with some launchers, the processes. Torch gives each
    # default group the same name, so ranks that join again, or are restarted, would find the
    # addresses of the group before.
    own_part = dist.PrefixStore(f"ipu_pipe/{attempt}/{next(_joins)}", store)
    dist.init_process_group("gloo", store=own_part, rank=rank, world_size=count, timeout=limit)


def _use_device(kind: DeviceKind, index: int) -> None:
    """Make a device the current one of this rank. Raise `BadInput` if torch cannot."""
    try:
        kind.set_current(index)
    except RuntimeError as error:
        if kind.is_cuda:
            raise
        raise BadInput(
            f"{Argument('device')}: {kind.name}: device {index} cannot be used: {summarize(error)}"
        ) from error


def _end_group() -> None:
    """End the process group when the interpreter ends; after an error, wait no longer than a live
    group takes for that.
    """
    if dist.is_initialized():
        # the interpreter ends in any case, and another rank may be gone
        with contextlib.suppress(RuntimeError, TimeoutError):
            answer_within(ANSWER, dist.destroy_process_group)


def make_group(ranks: Sequence[int], deadline: float, **how: Any) -> Any:
    """Return a new process group of these ranks. All ranks, or in a column those of the group, must
    call this at once, in the same order of groups.

    Raise `RunFault` if another rank does not take part within `deadline` seconds and some more.
    `how`: further arguments of `torch.distributed.new_group`, such as another `timeout` for the
    group's later operations.
    """
    limit = wait_limit(deadline)
    with report_lost_rank():
        # as in `join`, torch waits for the store without a limit
        return answer_within(
            limit.total_seconds() + ANSWER,
            lambda: world.new_group(ranks, **{"timeout": limit, **how}),
        )


def leave() -> None:
    """Leave the group when all ranks are ready: a rank that ended before the others would close
    their connections.
    """
    if dist.is_initialized():
        with report_lost_rank():
            dist.barrier()
        # Before torch 2.4 (PopTorch's is 2.0.1) gloo's destructor joins a worker while it holds the
        # interpreter's lock, for which that worker may wait: there the group ends with the
        # process (errors.end_process).
        if read_torch_version() >= (2, 4):
            dist.destroy_process_group()
        # last, so that a signal during the wait is still noted
        Termination.stop_watching()


# ---- requests of the ranks


def make_request(config: PipelineConfig, options: Mapping[str, object]) -> Request:
    """Return the settings, options and versions that must be equal on every rank."""
    settings = {
        key: value
        for key, value in flatten(config.to_dict()).items()
        if key not in RANKS_MAY_DIFFER
    }
    versions = {"version of ipu_pipe": __version__, "version of torch": str(torch.__version__)}
    # JSON has no paths and other values of options
    texts = {
        key: value if isinstance(value, (bool, type(None))) else str(value)
        for key, value in options.items()
    }
    return dict(json.loads(json.dumps({**versions, **texts, **settings})))


def compare_requests(ours: Request, theirs: Request, rank: int, other: int) -> list[str]:
    """Return a line for each difference between the requests of two ranks, the same lines on
    both.
    """
    # always the lower rank first, so that both ranks print the same lines
    if other < rank:
        return compare_requests(theirs, ours, other, rank)
    return [
        f"{key}: rank {rank} has {_show(ours, key)}, rank {other} has {_show(theirs, key)}: must "
        f"be the same on all ranks"
        for key in {**ours, **theirs}
        if key not in ours or key not in theirs or ours[key] != theirs[key]
    ]


def _show(request: Request, key: str) -> str:
    return json.dumps(request[key])[:80] if key in request else "nothing"


def _compare_with_all(request: Request) -> None:
    """Raise `BadInput`, on all ranks of an existing group, if a rank has another request, also in
    another column, or another place in its column than the ranks of its data group.
    """
    (first_rank, first), *others = gather_by_rank(request).items()
    for rank, other in others:
        raise_faults(compare_requests(first, other, first_rank, rank))
    group = world.get_data_group()
    if group is None:
        return
    ranks = world.get_world_size()
    place = {
        "process_group: its ranks": ranks,
        "process_group: this rank's number": world.get_rank(),
    }
    (first_rank, first), *others = gather_over(group, place).items()
    faults = [
        f"{fault}: a data_group holds one stage"
        for rank, other in others
        for fault in compare_requests(first, other, first_rank, rank)
    ]
    # another data group may be right
    for faults_there in gather_objects(faults):
        raise_faults(faults_there[:1])
