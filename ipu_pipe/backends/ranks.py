"""The part of one process among several: rank 0 prints, writes and works for all; one rank reports
a fault.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, Sequence, TypeVar

import torch
import torch.distributed as dist

from ipu_pipe.backends import world
from ipu_pipe.backends.processes.lost_ranks import (
    ANSWER,
    LostRank,
    answer_within,
    detect_lost_rank,
    is_store_there,
)
from ipu_pipe.errors import BadInput, RunFault, find_user_fault, summarize
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
    """Call `work` on the first rank alone. Return its result on every rank, or raise its error
    there: where it has not run, `BadInput` of the same lines or `RunFault` with the reason.
    """
    if not are_joined():
        return work()
    outcome: list[Any] = [None]
    error: Exception | None = None
    is_first = world.get_rank() == 0
    is_main = is_first and world.get_replica() == 0
    if is_main:
        try:
            outcome = [(work(), [], "")]
        except Exception as raised:
            error = raised
            lines = raised.lines if isinstance(raised, BadInput) else []
            reason = raised if isinstance(raised, RunFault) else find_user_fault(raised)
            # the other ranks wait in the broadcast below, so the fault travels with it
            outcome = [(None, lines, str(reason or summarize(raised)))]
    # rank 0 waits for the others
    with report_lost_rank(None if is_first else [world.name_rank(0)]):
        # columns that are replicas of one another must decide alike
        if is_first:
            world.broadcast_from_first_column(outcome)
        world.broadcast_object_list(outcome, source=0)
    if error is not None:
        raise error
    result, faults, reason = outcome[0]
    if faults:
        raise BadInput(faults)
    if reason:
        fault = RunFault(reason)
        # by the rank that has the traceback
        fault.is_reported = True
        raise fault
    return result  # type: ignore[no-any-return]


@contextlib.contextmanager
def report_lost_rank(ranks: Sequence[int] | None = None) -> Iterator[None]:
    """Raise `RunFault` instead of torch.distributed's error when another process has ended or does
    not answer.

    `ranks`: the global ranks that this process waits for (default: all others of its pipeline).
    """
    try:
        with detect_lost_rank(ranks):
            yield
    except LostRank as error:
        raise RunFault(f"rank {dist.get_rank()}: {error}") from error


def gather_by_rank(value: Any) -> dict[int, Any]:
    """Return the values of the pipeline's ranks, and of those that hold the same stages in other
    columns, by their global rank, on each of them.
    """
    group = world.get_data_group()
    # over the data group first, then over this column: together all ranks
    columns = {dist.get_rank(): value} if group is None else gather_over(group, value)
    return {rank: one for ranks in gather_objects(columns) for rank, one in ranks.items()}


def gather_over(group: Any, value: Any) -> dict[int, Any]:
    """Return the values of the ranks of a process group by their global rank, on each of them."""
    ranks = world.list_global_ranks(group)
    values: list[Any] = [None] * len(ranks)
    with report_lost_rank(ranks):
        dist.all_gather_object(values, value, group=group)
    return dict(zip(ranks, values))


def gather_objects(value: Any) -> list[Any]:
    """Return every rank's value on every rank."""
    values: list[Any] = [None] * world.get_world_size()
    with report_lost_rank():
        world.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def report_once() -> Iterator[None]:
    """Let only the first process that fails inside the context print its fault or bad input."""
    try:
        yield
    except BaseException as error:
        fault = error if isinstance(error, (BadInput, RunFault)) else find_user_fault(error)
        # without a group each process prints its own
        if fault is not None and fault.is_reported is None and are_joined():
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
        store = world.get_store()
        # the store adds for one process after the other, so that a single one gets 1
        return bool(answer_within(ANSWER, lambda: store.add("ipu_pipe/faults", 1)) == 1)
    # a fault that is printed twice is better than one that is lost
    except Exception:
        return True
