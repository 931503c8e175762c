"""A group of ranks that stays alive from test to test: starting processes takes longer than most of what they train."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, wait
from typing import Any, Callable, Dict, Iterator, List

import pytest
import torch

from ipu_pipe.errors import end_process
from tests import forked


class RankFailure(AssertionError):
    """A rank raised, ended, or gave no result in time."""


class RankGroup:
    """Processes that are the ranks of one group of gloo. Each runs the functions that `call` names, one after another."""

    def __init__(self, ranks: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._processes: List[Any] = []
        self._pipes: List[Connection] = []
        context = forked.get_fork_server()
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, ranks, self._folder.name, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def call(self, work: Callable[..., Any], *arguments: Any, seconds: float) -> List[Any]:
        """Return the ranks' results of `work(rank, *arguments)`.

        Raise `RankFailure` with the traceback of the first rank that fails: its group is of no use any more, since the
        other ranks wait for its messages.
        """
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((work, arguments)))
        results: Dict[Connection, Any] = {}
        deadline = time.monotonic() + seconds
        while len(results) < len(self._pipes):
            waiting: List[Any] = [pipe for pipe in self._pipes if pipe not in results]
            ready: Any = wait(waiting, max(deadline - time.monotonic(), 0))
            if not ready:
                ranks = [self._pipes.index(pipe) for pipe in waiting]
                raise RankFailure(f"ranks {ranks}: no result within {seconds} s")
            for pipe in ready:
                results[pipe] = self._receive(pipe)
        return [results[pipe] for pipe in self._pipes]

    def _receive(self, pipe: Connection) -> Any:
        rank = self._pipes.index(pipe)
        try:
            is_result, value = pickle.loads(pipe.recv_bytes())
        except EOFError:
            raise RankFailure(f"rank {rank} has ended") from None
        if not is_result:
            raise RankFailure(f"rank {rank} raised:\n{value}")
        return value

    def close(self) -> None:
        """End the ranks."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


class RankGroups:
    """The groups that a test file uses, by their number of ranks. A group that fails is replaced."""

    def __init__(self) -> None:
        self._groups: Dict[int, RankGroup] = {}

    def call(
        self, ranks: int, work: Callable[..., Any], *arguments: Any, seconds: float = 120
    ) -> List[Any]:
        """Return the results of `work(rank, *arguments)` on each rank of a group of `ranks`."""
        if ranks not in self._groups:
            self._groups[ranks] = RankGroup(ranks)
        try:
            return self._groups[ranks].call(work, *arguments, seconds=seconds)
        except BaseException:
            self._groups.pop(ranks).close()
            raise

    def close(self) -> None:
        """End all ranks."""
        for group in self._groups.values():
            group.close()
        self._groups.clear()


@pytest.fixture(scope="module")
def groups() -> Iterator[RankGroups]:
    """Return the groups of ranks of a file."""
    groups = RankGroups()
    yield groups
    groups.close()


def _serve(rank: int, ranks: int, folder: str, pipe: Connection) -> None:
    """Answer calls until the parent closes the pipe."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), OMP_NUM_THREADS="1")
    os.chdir(forked.ROOT)
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    while True:
        try:
            work, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            end_process(0)
        try:
            answer = (True, work(rank, *arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))
