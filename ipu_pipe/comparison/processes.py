"""Run the trainings of a comparison in processes that are forked, or one after another.

A forked process has the caller's loop, models and data as they are, without pickling. Two rules
keep the losses those of a sequence, bit for bit, and the processes from waiting for ever:

    as many threads in each process as here     sums are taken in the same order
    no other threads at the fork                a lock that one of them holds would stay locked

    parent    number of a job  ->  [ worker ] ...  ->  what the training gave, or why it failed
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection, wait
from typing import Any, Callable, Iterator, NamedTuple, Sequence, TypeVar

import torch

from ipu_pipe.errors import RunFault
from ipu_pipe.launcher import end_with
from ipu_pipe.model.devices import get_accelerator_name

Job = TypeVar("Job")
Pairs = Iterator["tuple[Job, Any]"]


class Failure(NamedTuple):
    """An exception of a training in another process, and its traceback."""

    error: BaseException
    text: str


def choose_process_count(most: int | None) -> tuple[int, str]:
    """Return how many trainings may run at once, and the reason if only one; `most`: the caller's
    choice, None for as many as the processor has cores.
    """
    if most == 1:
        return 1, "as asked for"
    if sys.platform != "linux":
        return 1, "only Linux forks a process that has used torch"
    if threading.active_count() > 1:
        return 1, "this process has other threads, as a notebook's, so it cannot fork"
    if torch.cuda.is_available() or get_accelerator_name():
        return 1, "trainings would share the accelerator"
    # a container or a batch system may allow fewer cores than the machine has
    cores = len(os.sched_getaffinity(0))
    if torch.get_num_threads() > 1:
        how = "torch.set_num_threads(1), or backend.threads=1 in a config"
        why = f"torch computes in {torch.get_num_threads()} threads"
        return 1, f"{why}; with one ({how}) {cores} would run at once"
    return min(cores, most or cores), "there is one core"


@contextlib.contextmanager
def open_workers(
    count: int, train: Callable[[Job], Any], jobs: Sequence[Job], describe: Callable[[Job], str]
) -> Iterator[Callable[[Iterator[int]], Pairs[Job]]]:
    """Give a function that runs the jobs of some numbers and yields each with what `train` returned,
    in `count` forked processes, which end with the context; 1: here, in order.

    An exception of `train` is raised, with the traceback in its process as the cause. Raise
    `RunFault` with the job's description if a process ends in the midst of it.
    """
    if count == 1:
        yield lambda numbers: ((jobs[number], train(jobs[number])) for number in numbers)
        return
    context: Any = multiprocessing.get_context("fork")
    processes: dict[Connection, Any] = {}
    try:
        for _ in range(count):
            here, there = context.Pipe()
            ends = [*processes, here]
            arguments = (os.getpid(), there, ends, train, jobs)
            processes[here] = context.Process(target=_work, args=arguments)
            processes[here].start()
            # so that the end of the process ends the pipe
            there.close()
        yield lambda numbers: _share(processes, jobs, numbers, describe)
    finally:
        # all are told before the first one is waited for
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.join()


def _share(
    processes: dict[Connection, Any],
    jobs: Sequence[Job],
    numbers: Iterator[int],
    describe: Callable[[Job], str],
) -> Pairs[Job]:
    """Yield (job, result) in the order in which they end."""
    idle = list(processes)
    running: dict[Connection, int] = {}
    while True:
        # a number is taken when its training begins, since a result may make others needless
        while idle and (number := next(numbers, None)) is not None:
            running[idle[-1]] = number
            idle.pop().send(number)
        if not running:
            return
        # whichever ends first, so that no process waits for the result of another
        for connection in wait(list(running)):
            assert isinstance(connection, Connection)
            job = jobs[running.pop(connection)]
            try:
                outcome = connection.recv()
            except (EOFError, OSError):
                # the pipe ends before the exit code is known
                process = processes[connection]
                process.join()
                why = f"its process ended with exit code {process.exitcode}"
                raise RunFault(f"compare: {describe(job)}: {why}") from None
            if isinstance(outcome, Failure):
                # pickling has dropped the traceback, so its text is the cause
                raise outcome.error from RunFault(f"{describe(job)}\n{outcome.text}")
            idle.append(connection)
            yield job, outcome


def _work(
    parent: int,
    connection: Connection,
    ends: list[Connection],
    train: Callable[[Job], Any],
    jobs: Sequence[Job],
) -> None:
    """Run the jobs whose numbers come, until the process `parent` is gone; `ends`: the parent's."""
    # in the midst of a training nothing else would notice it
    end_with(parent)
    # copies of them would keep the pipes open without the parent
    for end in ends:
        end.close()
    # Ctrl-C reaches every process of a terminal; the parent ends the others
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # a handler of the caller's, which the fork copies, might not end this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(EOFError, OSError):
        while True:
            job = jobs[connection.recv()]
            try:
                outcome = train(job)
            except BaseException as error:
                outcome = Failure(_make_portable(error), traceback.format_exc())
            connection.send(outcome)


def _make_portable(error: BaseException) -> BaseException:
    """Return an exception as another process can have it."""
    try:
        # tried both ways: an exception whose constructor takes other arguments pickles, and cannot
        # be read
        copied: BaseException = pickle.loads(pickle.dumps(error))
        return copied
    except Exception:
        return RunFault(f"{type(error).__name__}: {error}")
