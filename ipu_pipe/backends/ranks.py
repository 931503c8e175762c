"""One of several processes: which one prints and writes, what the first does for all, and who tells a fault."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, List, Optional, TypeVar

import torch.distributed as dist

from ipu_pipe import launched
from ipu_pipe.backends.processes.joining import ANSWER, answer_within, keeper_is_there
from ipu_pipe.errors import BadInput, RunFault, user_fault

Result = TypeVar("Result")


def is_distributed() -> bool:
    """Whether a launcher such as torchrun started this process as one of several."""
    return launched.read().is_one_of_several


def is_main() -> bool:
    """Whether this process prints and writes."""
    return launched.read().rank == 0


def are_joined() -> bool:
    """Whether there is a group of processes that this one has joined."""
    return dist.is_available() and dist.is_initialized()


def on_main(work: Callable[[], Result]) -> Result:
    """`work()` on the main process; its result, or its BadInput, on every one."""
    return on_all_ranks(work) if are_joined() else work()


def on_all_ranks(work: Callable[[], Result]) -> Result:
    """`work` on rank 0, its result or its BadInput on every rank."""
    held: List[Any] = [None]
    if dist.get_rank() == 0:
        try:
            held = [(work(), None)]
        except BadInput as error:
            held = [(None, error.faults)]
    with told_as_lost():
        dist.broadcast_object_list(held, src=0)
    result, faults = held[0]
    if faults:
        raise BadInput(faults)
    return result  # type: ignore[no-any-return]


@contextlib.contextmanager
def told_as_lost(rank: Optional[int] = None) -> Iterator[None]:
    """Raise `RunFault` for what torch.distributed raises when another process has gone or does not answer.

    `rank`: this process's, which is asked of the group if None.
    """
    try:
        yield
    except (RuntimeError, TimeoutError) as error:
        own = dist.get_rank() if rank is None else rank
        raise RunFault(f"rank {own}: another rank is lost, or did not answer within the deadline") from error


@contextlib.contextmanager
def told_once() -> Iterator[None]:
    """Of the processes of a run the first that comes here with a fault or bad input tells it."""
    try:
        yield
    except Exception as error:
        told = error if isinstance(error, (BadInput, RunFault)) else user_fault(error)
        if told is not None and are_joined():
            told.is_told = not is_first_to_tell()
        raise


def is_first_to_tell() -> bool:
    """Whether no other process has told a fault yet. Where the store is gone with its process, or does not answer, every one
    tells."""
    where = launched.read()
    if where.address is not None and not keeper_is_there(where):
        return True
    try:
        store = dist.distributed_c10d._get_default_store()
        return bool(answer_within(ANSWER, lambda: store.add("ipu_pipe/faults", 1)) == 1)
    except Exception:
        return True
