"""Runs in worker processes, several at a time, which end with the process that started them."""

from __future__ import annotations

import os
import signal
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, Callable, Dict, Generator, Mapping, Sequence, Tuple, TypeVar

from ipu_pipe.errors import RunFault, find_user_fault
from ipu_pipe.launcher import end_with

Key = TypeVar("Key")


def run_in_workers(
    work: Callable[..., Dict[str, Any]], arguments: Mapping[Key, Sequence[Any]], jobs: int
) -> Generator[Tuple[Key, Dict[str, Any]], None, None]:
    """Yield (key, `work(*arguments[key])`) as the runs finish, `jobs` at a time.

    A fault of one run ends all, and so does closing the iterator (contextlib.closing): workers that go on would hold up the
    end of this process. A fault of the user's code is raised as its `UserFault`, since not every exception can be pickled.
    """
    with ProcessPoolExecutor(
        min(jobs, len(arguments)), mp_context=get_context("spawn"), initializer=_start, initargs=(os.getpid(),)
    ) as pool:
        waiting: Dict["Future[Dict[str, Any]]", Key] = {
            pool.submit(call_with_picklable_faults, work, values): key for key, values in arguments.items()
        }
        try:
            while waiting:
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    yield waiting.pop(future), future.result()
        except BaseException as error:
            for future in waiting:
                future.cancel()
            for process in list((pool._processes or {}).values()):  # a run in progress is resumed next time
                process.terminate()
            if isinstance(error, BrokenProcessPool):
                raise RunFault("a process that trains one of the runs was killed (out of memory?)") from error
            raise


def _start(parent: int) -> None:
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C the parent ends its workers


def call_with_picklable_faults(work: Callable[..., Dict[str, Any]], arguments: Sequence[Any]) -> Dict[str, Any]:
    """Return `work(*arguments)`; raise a fault of the user's code as `UserFault`, which can be pickled."""
    try:
        return work(*arguments)
    except Exception as error:
        fault = find_user_fault(error)
        if fault is None:
            raise
        raise fault from None
