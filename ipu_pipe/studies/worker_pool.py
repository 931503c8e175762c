"""Runs in processes of their own, several at a time, which end with the one that started them."""

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


def in_workers(
    work: Callable[..., Dict[str, Any]], runs: Mapping[Key, Sequence[Any]], jobs: int
) -> Generator[Tuple[Key, Dict[str, Any]], None, None]:
    """`work(*arguments)` of each of `runs`, key -> arguments, `jobs` at a time: (key, result) as they finish. A fault of one ends
    all, and so does closing the iterator (contextlib.closing): what is left over would hold up the end of this process. A fault
    of the user's code comes as its UserFault, since not every exception can leave its process."""
    with ProcessPoolExecutor(
        min(jobs, len(runs)), mp_context=get_context("spawn"), initializer=_begin, initargs=(os.getpid(),)
    ) as pool:
        waiting: Dict["Future[Dict[str, Any]]", Key] = {
            pool.submit(_told, work, arguments): key for key, arguments in runs.items()
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


def _begin(parent: int) -> None:
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a Ctrl-C: the parent ends its workers


def _told(work: Callable[..., Dict[str, Any]], arguments: Sequence[Any]) -> Dict[str, Any]:
    try:
        return work(*arguments)
    except Exception as error:
        fault = find_user_fault(error)
        if fault is None:
            raise
        raise fault from None
