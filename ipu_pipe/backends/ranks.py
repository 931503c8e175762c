"""The part of one process among several: rank 0 prints, writes and works for all; one rank reports
a fault.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, Sequence, TypeVar

import torch
import torch.distributed as dist

from ipu_pipe.backends.processes.lost_ranks import (
    ANSWER,
    LostRank,
    answer_within,
    detect_lost_rank,
    is_store_there,
)
from ipu_pipe.errors import BadInput, RunFault, find_user_fault
from ipu_pipe.launcher import read_launch

Result = TypeVar("Result")


def is_distributed() -> bool:
    """Return whether a launcher such as torchrun started this process as one of several."""
    return read_launch().is_one_of_several


def read_torch_version() -> tuple[int, ...]:
    """Return (major, minor) of the running torch."""
    return tuple(map(int, torch.__version__.split(".")[:2]))


def is_main() -> bool:
    """Return whether this process prints and writes."""
    return read_launch().rank == 0


def are_joined() -> bool:
    """Return whether there is a process group that this process has joined."""
    return dist.is_available() and dist.is_initialized()


def run_on_main(work: Callable[[], Result]) -> Result:
    """Call `work` on rank 0 alone. Return its result, or raise its `BadInput`, on every rank."""
    if not are_joined():
        return work()
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            outcome = [(work(), [])]
        except BadInput as error:
            outcome = [(None, error.lines)]
    # rank 0 waits for the others
    with report_lost_rank([0] if dist.get_rank() else None):
        dist.broadcast_object_list(outcome, src=0)
    result, faults = outcome[0]
    if faults:
        raise BadInput(faults)
    return result  # type: ignore[no-any-return]


@contextlib.contextmanager
def report_lost_rank(ranks: Sequence[int] | None = None) -> Iterator[None]:
    """Raise `RunFault` instead of torch.distributed's error when another process has ended or does
    not answer.

    `ranks`: the ranks that this process waits for (default: all others).
    """
    try:
        with detect_lost_rank(ranks):
            yield
    except LostRank as error:
        raise RunFault(f"rank {dist.get_rank()}: {error}") from error


@contextlib.contextmanager
def report_once() -> Iterator[None]:
    """Let only the first process that fails inside the context print its fault or bad input."""
    try:
        yield
    except BaseException as error:
        fault = error if isinstance(error, (BadInput, RunFault)) else find_user_fault(error)
        if fault is not None and are_joined():
            fault.is_reported = not _claim_report()
        raise


def _claim_report() -> bool:
    """Return whether this is the first process to report a fault; True if the store that counts
    reports does not answer.
    """
    where = read_launch()
    if not is_store_there(where):
        return True
    try:
        store = dist.distributed_c10d._get_default_store()
        return bool(answer_within(ANSWER, lambda: store.add("ipu_pipe/faults", 1)) == 1)
    except Exception:
        return True
