"""Waiting for other ranks: how long a wait may take, who is to blame when it ends, and SIGTERM while a rank waits.

A launcher sends SIGTERM to all ranks when one has failed. A neighbor of that one notices it at its next wait and can name it, so
a rank goes on for a moment before it ends:

    main thread       a step ...... waits inside torch (C++), where Python's signal handlers do not run
    SIGTERM           |  noted, and a byte goes through a pipe
    watching thread   |  reads it, sleeps, ends the process if it is still there (after Ctrl-C: at the very same place)
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import Any, Callable, Iterator, List, Optional, Tuple, TypeVar, Union

from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.interrupts import INTERRUPTED
from ipu_pipe.job.user_code import attribute_fault

LONGEST = 1e7  # seconds of a wait: torch counts them in milliseconds
WARM_UP = 6.0  # seconds that a wait may take besides the deadline until the first step is done, while ranks load
POLL = 20e-6  # seconds between two looks at a message of nccl
TERMINATED = 143  # exit code of a process that was asked to end

Result = TypeVar("Result")


class LostRank(Exception):
    """Another rank is gone, or made no progress within `seconds`. `who`: its number, or words; None: one of several."""

    def __init__(self, who: Union[int, str, None], seconds: float) -> None:
        who = "another rank" if who is None else f"rank {who}" if isinstance(who, int) else who
        super().__init__(f"{who} is lost, or made no progress within {seconds:g} s")


@contextlib.contextmanager
def detect_lost_rank(who: Union[int, str, None], limit: timedelta) -> Iterator[None]:
    """Raise `LostRank(who)` for what torch.distributed raises in here: nothing else runs in it that could fail."""
    try:
        yield
    except RunFault:
        raise
    except (RuntimeError, TimeoutError) as error:
        raise LostRank(who, limit.total_seconds()) from error


@contextlib.contextmanager
def name_faults(
    rank: int, stage: Callable[[], int], action: Callable[[], str], doing: Callable[[], str]
) -> Iterator[None]:
    """Add rank, stage and action to faults: raise `RunFault` for a lost rank, and let the user's own exceptions pass as they
    are.

    `stage`: the one that acts now; `action`: the letter and number of the current action; `doing`: the same in words, with the
    update.
    """
    try:
        yield
    except (BadInput, RunFault):
        raise
    except LostRank as error:
        raise RunFault(f"rank {rank}, stage {stage()}, action {action()}: {error}") from error
    except Exception as error:
        attribute_fault(error, f"rank {rank}, stage {stage()}, {doing()}")
        raise


def wait_limit(deadline: float, is_warm: bool = False) -> timedelta:
    """Return how long a wait may take: `deadline` seconds, and `WARM_UP` more until the first step is done."""
    return timedelta(seconds=min(deadline + (0.0 if is_warm else WARM_UP), LONGEST))


def answer_within(seconds: float, ask: Callable[[], Result]) -> Result:
    """Return `ask()`. Raise `TimeoutError` after so many seconds: torch waits without a limit for a store that is stopped."""
    results: List[Result] = []
    errors: List[Exception] = []

    def run() -> None:
        try:
            results.append(ask())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="ipu_pipe asking", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]


def wait_for_channel(work: Any, limit: timedelta) -> None:
    """Wait for a message of nccl. Raise `RuntimeError` after the limit.

    nccl's own wait takes no limit: with one it ends the group, without one it makes the GPU wait and not the host.
    """
    end = time.monotonic() + limit.total_seconds()
    while not work.is_completed():
        if time.monotonic() > end:
            raise RuntimeError(f"timed out after {limit.total_seconds():g} s")
        time.sleep(POLL)
    work.wait()


class Termination:
    """SIGTERM from the launcher, which asks this process to end because another one has failed."""

    GRACE = 3.0  # seconds, after which a process that is between two actions ends
    PATIENCE = 5.0  # seconds, after which it ends wherever it is
    asked: Optional[float] = None
    _before: Optional[Tuple[Any, int]] = None  # handler and wake-up descriptor before `watch`

    @classmethod
    def ask(cls, *_: Any) -> None:
        """Note the signal: a handler for `signal.signal`."""
        cls.asked = cls.asked or time.monotonic()

    @classmethod
    def check(cls) -> None:
        """End the process if it was asked to a while ago."""
        if cls.asked is not None and time.monotonic() - cls.asked > cls.GRACE:
            sys.exit(TERMINATED)

    @classmethod
    def watch(cls) -> None:
        """Take over SIGTERM, from the main thread; elsewhere do nothing."""
        if cls._before is not None or threading.current_thread() is not threading.main_thread():
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        threading.Thread(target=cls._wait, args=(reader,), name="ipu_pipe stopping", daemon=True).start()
        cls._before = signal.signal(signal.SIGTERM, cls.ask), signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    @classmethod
    def unwatch(cls) -> None:
        """Give SIGTERM back."""
        if cls._before is not None:
            handler, descriptor = cls._before
            signal.signal(signal.SIGTERM, handler)
            os.close(signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False))  # which ends the thread
            cls._before = None

    @classmethod
    def _wait(cls, reader: int) -> None:
        while True:
            byte = os.read(reader, 1)
            if not byte:
                os.close(reader)
                return
            if byte[0] == signal.SIGTERM:
                time.sleep(cls.PATIENCE)
                if cls._before is not None:
                    os._exit(TERMINATED)
            elif byte[0] == signal.SIGINT:
                place = _find_main_thread()
                time.sleep(cls.PATIENCE)
                if cls._before is not None and _find_main_thread() == place:
                    os._exit(INTERRUPTED)


def _find_main_thread() -> Tuple[int, int]:
    """Return the main thread's frame and the instruction in it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return (id(frame), frame.f_lasti) if frame is not None else (0, 0)
