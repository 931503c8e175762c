"""Join the process group that a launcher started: within the deadline, and only if all ranks have
the same request.

Rank 0 (or the launcher) keeps a store at MASTER_ADDR:MASTER_PORT.
[1] Rank 0 begins a round. A launcher that restarts its ranks keeps the old entries of the store,
    and no rank can count the restarts, because torchrun counts the failures of each machine
    separately.
[2] Each rank puts its request into the store: config, options, versions.
[3] Each rank waits for all other requests and compares them with its own. Rank 0 announces when it
    has seen all.
[4] Only then the process group is made, because making it would wait silently for a missing rank.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import time
from datetime import timedelta
from typing import Any, Dict, Mapping, NoReturn, Sequence

import torch
import torch.distributed as dist

from ipu_pipe import __version__
from ipu_pipe.backends.processes.lost_ranks import (
    ANSWER,
    WARM_UP,
    Termination,
    answer_within,
    wait_limit,
)
from ipu_pipe.backends.ranks import is_distributed, read_torch_version, report_lost_rank
from ipu_pipe.config.compare import flatten
from ipu_pipe.config.schema import Config
from ipu_pipe.errors import BadInput, RunFault, raise_faults, summarize
from ipu_pipe.job.numerics import set_numerics
from ipu_pipe.launcher import Launch, announce_attempt, read_launch
from ipu_pipe.model.devices import DeviceKind, get_kind
from ipu_pipe.text import list_some

# seconds between two looks at the store
POLL = 0.05
# seconds that rank 0 keeps the store at most for the others to read the fault
LINGER = 2.0
RANKS_MAY_DIFFER = ("data.root", "backend.threads")

# the config's keys, the options and the versions of a rank, as JSON values
Request = Dict[str, Any]


def join(config: Config, options: Mapping[str, object]) -> None:
    """Join the process group (gloo).

    Raise `BadInput` if there is no launcher, or if another rank has another config or other
    options, `RunFault` if a rank is missing at the deadline. For GPUs that exchange messages
    directly, each link has an nccl group besides (`nccl.make_channels`).
    """
    backend = config.backend
    where = read_launch()
    if not is_distributed():
        raise BadInput(
            "backend.name: distributed: each stage runs in a process of its own: start it with"
            " torchrun --nproc_per_node STAGES tools/train.py CONFIG --set backend.name=distributed"
        )
    if not dist.is_available():
        raise BadInput(
            "backend.name: distributed: this PyTorch was built without torch.distributed"
        )
    if read_torch_version() < (2, 4):
        raise BadInput(
            f"backend.name: distributed: needs torch 2.4 or later, this is {torch.__version__}"
        )
    request = make_request(config, options)
    if dist.is_initialized():
        carried = dist.get_backend_config()
        if "cpu:" not in carried:
            remedy = "dist.init_process_group('cpu:gloo,cuda:nccl')"
            raise BadInput(
                f"backend.name: distributed: the process group ({carried}) has no backend for the "
                f"CPU: use {remedy}"
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
    limit = wait_limit(backend.deadline)
    store = wait_for_ranks(where, limit.total_seconds(), request)
    kind = get_kind(backend.device)
    if kind.is_cuda:
        # loading a kernel at its first use would wait for an idle GPU, but a posted receive keeps
        # the GPU busy
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
        set_numerics(backend)
    if kind.is_accelerator:
        _use_device(kind, (where.local_rank or 0) % max(kind.count_devices(), 1))
    try:
        # torch waits for the store without a limit: if rank 0, which keeps it, is stopped, all
        # others would hang
        answer_within(
            limit.total_seconds() + ANSWER,
            lambda: dist.init_process_group(
                "gloo",
                store=dist.PrefixStore("group", store),
                rank=where.rank,
                world_size=where.world,
                timeout=limit,
            ),
        )
    except (RuntimeError, TimeoutError) as error:
        raise RunFault(
            f"rank {where.rank}: another rank is lost, or did not answer within the deadline"
        ) from error
    # a loop of the caller's own ends as any script does: taking down the interpreter around the
    # group's threads would abort about every third run
    atexit.register(_end_group)
    Termination.watch()


def _use_device(kind: DeviceKind, index: int) -> None:
    """Make a device the current one of this rank. Raise `BadInput` if torch cannot."""
    try:
        kind.set_current(index)
    except RuntimeError as error:
        if kind.is_cuda:
            raise
        raise BadInput(
            f"backend.device: {kind.name}: device {index} cannot be used: {summarize(error)}"
        ) from error


def _end_group() -> None:
    """End the process group when the interpreter ends; after an error, wait no longer than a live
    group takes for that.
    """
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError, TimeoutError):
            answer_within(ANSWER, dist.destroy_process_group)


def make_group(ranks: Sequence[int], deadline: float, **how: Any) -> Any:
    """Return a new process group of these ranks. All ranks must call this at once, in the same
    order of groups.

    Raise `RunFault` if another rank does not take part within `deadline` seconds and some more.
    `how`: further arguments of `torch.distributed.new_group`, such as another `timeout` for the
    group's later operations.
    """
    limit = wait_limit(deadline)
    with report_lost_rank():
        # as in `join`, torch waits for the store without a limit
        return answer_within(
            limit.total_seconds() + ANSWER,
            lambda: dist.new_group(list(ranks), **{"timeout": limit, **how}),
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
        Termination.stop_watching()


# ---- requests of the ranks


def make_request(config: Config, options: Mapping[str, object]) -> Request:
    """Return the settings, options and versions that must be equal on every rank."""
    settings = {
        key: value
        for key, value in flatten(config.to_dict()).items()
        if key not in RANKS_MAY_DIFFER
    }
    versions = {"version of ipu_pipe": __version__, "version of torch": str(torch.__version__)}
    texts = {
        key: value if isinstance(value, (bool, type(None))) else str(value)
        for key, value in options.items()
    }
    return dict(json.loads(json.dumps({**versions, **texts, **settings})))


def compare_requests(ours: Request, theirs: Request, rank: int, other: int) -> list[str]:
    """Return a line for each difference between the requests of two ranks, the same lines on
    both.
    """
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
    """Raise `BadInput`, on all ranks of an existing group, if a rank has another request."""
    requests: list[Any] = [None] * dist.get_world_size()
    with report_lost_rank():
        dist.all_gather_object(requests, request)
    for rank, other in enumerate(requests):
        raise_faults(compare_requests(requests[0], other, 0, rank))


# ---- rendezvous in the store


def wait_for_ranks(where: Launch, limit: float, request: Request) -> Any:
    """Return the store of a run when all ranks have come.

    Raise `BadInput` if their requests differ, `RunFault` if a rank is missing after `limit`
    seconds.
    """
    try:
        return answer_within(limit + ANSWER, lambda: _run_rounds(where, limit, request))
    except TimeoutError as error:
        raise RunFault(
            f"rank {where.rank}: rank 0 is at {_format_address(where)} but does not answer within "
            f"{limit:g} s"
        ) from error


def _run_rounds(where: Launch, limit: float, request: Request) -> Any:
    """Wait for all ranks, again after each restart of the launcher's ranks; return the store of the
    last round.
    """
    end = time.monotonic() + limit
    rounds = _open_store(where, limit)
    is_complete = False
    try:
        while not is_complete:
            number = rounds.add("round", 1 if where.rank == 0 else 0)
            store = dist.PrefixStore(str(number), rounds)
            try:
                is_complete = _wait_in_round(
                    rounds, number, store, where, end, limit, {**request, "WORLD_SIZE": where.world}
                )
            except (BadInput, RunFault) as error:
                _end_for_all(store, where, error)
    except (BadInput, RunFault):
        raise
    # torch's store raises this error
    except RuntimeError as error:
        raise RunFault(
            f"{_format_address(where)}: rank 0, which keeps the store there, left before all ranks "
            f"had come"
        ) from error
    announce_attempt(number - 1)
    return store


def _wait_in_round(
    rounds: Any, number: int, store: Any, where: Launch, end: float, limit: float, request: Request
) -> bool:
    """Wait until all ranks have come to round `number`, whose `store` this is; return False if the
    next round has begun.

    Raise `BadInput` if their requests differ, `RunFault` if a rank is missing at the time `end`.
    """
    duplicate = (
        f"RANK: {where.rank}: two processes have it: each of {where.world} must have its own"
    )
    is_first = store.add(f"came/{where.rank}", 1) == 1
    # the entries may be of the round before a restart
    if not is_first or (where.has_agent and store.check(["over"])):
        while where.has_agent and time.monotonic() < end:
            if rounds.add("round", 0) > number:
                return False
            time.sleep(POLL)
        raise BadInput(duplicate)
    store.set(f"asked/{where.rank}", json.dumps(request))
    missing = [rank for rank in range(where.world) if rank != where.rank]
    while missing or not (where.rank == 0 or store.check(["complete"])):
        for rank in list(missing):
            if store.check([f"asked/{rank}"]):
                raise_faults(
                    compare_requests(
                        request, json.loads(store.get(f"asked/{rank}")), where.rank, rank
                    )
                )
                missing.remove(rank)
        if rounds.add("round", 0) > number:
            if where.rank == 0:
                raise BadInput(duplicate)
            return False
        if store.check(["over"]):
            reason = json.loads(store.get("over"))
            raise (
                BadInput(reason["faults"]) if reason["is_input"] else RunFault(reason["faults"][0])
            )
        if time.monotonic() > end:
            missing = missing or [0]
            ranks = f"rank{'s' if len(missing) > 1 else ''} {list_some(missing, 8)}"
            raise RunFault(
                f"rank {where.rank}: {ranks} of {where.world} did not come to "
                f"{_format_address(where)} within {limit:g} s "
                f"(backend.deadline and {WARM_UP:g} more): is it started, with the same "
                f"MASTER_ADDR and MASTER_PORT?"
            )
        if missing or where.rank:
            time.sleep(POLL)
    if where.rank == 0:
        store.set("complete", "")
    return True


def _end_for_all(store: Any, where: Launch, error: BadInput | RunFault) -> NoReturn:
    """Raise `error` on this rank and, through the store, on ranks that still wait; only the first
    rank prints it.
    """
    faults = error.faults if isinstance(error, BadInput) else [str(error)]
    # the store may be gone
    with contextlib.suppress(RuntimeError):
        store.set("over", json.dumps({"faults": faults, "is_input": isinstance(error, BadInput)}))
        error.is_reported = store.add("told", 1) > 1
        store.add("read", 1)
        # the store ends with this process
        if where.rank == 0 and not where.has_agent:
            until = time.monotonic() + LINGER
            present = sum(store.check([f"asked/{rank}"]) for rank in range(where.world))
            while store.add("read", 0) < present and time.monotonic() < until:
                time.sleep(POLL)
    raise error


def _format_address(where: Launch) -> str:
    return f"{where.address}:{where.port} (MASTER_ADDR:MASTER_PORT)"


def _open_store(where: Launch, limit: float) -> Any:
    assert where.address is not None and where.port is not None
    keeps_store = where.rank == 0 and not where.has_agent
    if not keeps_store:
        _wait_for_keeper(where, limit)
    try:
        # try the port first, because torch's message for a port in use has many lines
        if keeps_store:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("", where.port))
                probe.listen(1)
        store = dist.TCPStore(
            where.address,
            where.port,
            where.world,
            keeps_store,
            timedelta(seconds=limit),
            wait_for_workers=False,
        )
    except OSError as error:
        if not keeps_store:
            raise RunFault(
                f"{_format_address(where)}: cannot be joined: {error.strerror or error}"
            ) from error
        raise RunFault(
            f"MASTER_PORT: {where.port}: cannot be used on this machine: "
            f"{error.strerror or error}: another run, or a second"
            " process with RANK 0, may use it"
        ) from error
    except (RuntimeError, ValueError) as error:
        raise RunFault(
            f"{_format_address(where)}: cannot be joined: {' '.join(str(error).split())[:200]}"
        ) from error
    return dist.PrefixStore("ipu_pipe", store)


def _wait_for_keeper(where: Launch, limit: float) -> None:
    """Wait until the port of the store is open."""
    end = time.monotonic() + limit
    while True:
        try:
            left = max(end - time.monotonic(), POLL)
            with socket.create_connection((str(where.address), int(where.port or 0)), timeout=left):
                return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > end:
                reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
                raise RunFault(
                    f"rank {where.rank}: rank 0 did not come to {_format_address(where)} within "
                    f"{limit:g} s "
                    f"(backend.deadline and {WARM_UP:g} more): {reason}"
                ) from error
        time.sleep(4 * POLL)
