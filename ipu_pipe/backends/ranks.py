"""One of several processes: which one prints and writes, what rank 0 does for all, and which one reports a fault."""

from __future__ import annotations

import contextlib
import socket
from typing import Any, Callable, Iterator, List, Optional, TypeVar

import torch.distributed as dist

from ipu_pipe.backends.processes.deadlines import answer_within
from ipu_pipe.errors import BadInput, RunFault, find_user_fault
from ipu_pipe.launcher import Launch, read_launch

ANSWER = 3.0  # seconds in which a store that is there answers

Result = TypeVar("Result")


def is_distributed() -> bool:
    """Return whether a launcher such as torchrun started this process as one of several."""
    return read_launch().is_one_of_several


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
    outcome: List[Any] = [None]
    if dist.get_rank() == 0:
        try:
            outcome = [(work(), None)]
        except BadInput as error:
            outcome = [(None, error.faults)]
    with report_lost_rank():
        dist.broadcast_object_list(outcome, src=0)
    result, faults = outcome[0]
    if faults:
        raise BadInput(faults)
    return result  # type: ignore[no-any-return]


@contextlib.contextmanager
def report_lost_rank(rank: Optional[int] = None) -> Iterator[None]:
    """Raise `RunFault` for what torch.distributed raises when another process has gone or does not answer.

    `rank`: this process's, which is asked of the group if None.
    """
    try:
        yield
    except (RuntimeError, TimeoutError) as error:
        here = dist.get_rank() if rank is None else rank
        raise RunFault(f"rank {here}: another rank is lost, or did not answer within the deadline") from error


@contextlib.contextmanager
def report_once() -> Iterator[None]:
    """Let only the first process of a run that fails in here print its fault or bad input."""
    try:
        yield
    except Exception as error:
        fault = error if isinstance(error, (BadInput, RunFault)) else find_user_fault(error)
        if fault is not None and are_joined():
            fault.is_reported = not _claim_report()
        raise


def _claim_report() -> bool:
    """Return whether no other process has reported a fault yet; True if the store that counts them is gone or does not answer."""
    where = read_launch()
    if where.address is not None and not _is_store_there(where):
        return True
    try:
        store = dist.distributed_c10d._get_default_store()
        return bool(answer_within(ANSWER, lambda: store.add("ipu_pipe/faults", 1)) == 1)
    except Exception:
        return True


def _is_store_there(where: Launch) -> bool:
    """Return whether somebody listens where the store is: to ask one that is gone makes torch print its own stack."""
    try:
        with socket.create_connection((str(where.address), int(where.port or 0)), timeout=ANSWER):
            return True
    except OSError:
        return False
