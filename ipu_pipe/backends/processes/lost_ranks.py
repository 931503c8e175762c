"""Waiting for other ranks: how long a wait may take, which rank is to blame when it fails, and signals during a wait.

A rank that hangs holds up its neighbors, and these theirs: the rank whose wait ends first may have waited for one that waits
itself. So a rank whose wait failed publishes in the store for whom it waited, gives the others time to do so too, and follows
their waits to a rank that has published nothing, which is lost, or hangs, or computes for too long:

    rank 0   waits for rank 1 ........ deadline | publishes "1" ... grace ... | 0 waits for 1, 1 for 2: rank 2 is to blame
    rank 1   waits for rank 2 ........... deadline | publishes "2" ... grace ...
    rank 2   hangs
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple, TypeVar

import torch.distributed as dist

from ipu_pipe.errors import RunFault
from ipu_pipe.interrupts import INTERRUPTED
from ipu_pipe.launcher import Launch, read_launch
from ipu_pipe.text import list_some

LONGEST = 1e7  # seconds of a wait: torch counts them in milliseconds
WARM_UP = 6.0  # seconds that a wait may take besides the deadline until the first step is done, while ranks load
POLL = 20e-6  # seconds between two looks at a message of nccl
ANSWER = 3.0  # seconds in which a store that is there answers
NOTICE = 1.0  # seconds in which all that wait for a rank notice that it has closed its connections
WAITS = "ipu_pipe/waits"  # keys of the store, by rank: for whom it waited, as JSON
KEEPER = 0  # the rank that keeps the store where the launcher does not

Result = TypeVar("Result")


class LostRank(Exception):
    """Another rank, one of `ranks`, is gone, or made no progress within `seconds`."""

    def __init__(self, ranks: Sequence[int], seconds: float) -> None:
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"one of ranks {list_some(list(ranks), 8)}"
        super().__init__(f"{who} is lost, or made no progress within {seconds:g} s")


# ---- how long


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


# ---- who is to blame


@contextlib.contextmanager
def detect_lost_rank(ranks: Optional[Sequence[int]] = None, limit: Optional[timedelta] = None) -> Iterator[None]:
    """Raise `LostRank` for what torch.distributed raises in here: nothing else runs in it that could fail.

    `ranks`: those that this one waits for (default: all others); `limit`: of the wait (default: that of the process group).
    """
    start = time.monotonic()
    try:
        yield
    except RunFault:
        raise
    except (RuntimeError, TimeoutError) as error:
        store: Any = dist.distributed_c10d._get_default_store()
        seconds = (store.timeout if limit is None else limit).total_seconds()
        others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
        # the others' waits began a little sooner or later than this one, and may have a longer limit
        grace = WARM_UP + seconds / 10 if time.monotonic() - start >= seconds else NOTICE
        raise LostRank(_find_culprits(store, others if ranks is None else ranks, grace), seconds) from error


def _find_culprits(store: Any, ranks: Sequence[int], grace: float) -> List[int]:
    """Return the ranks that hold this one up, which waited for `ranks`, when the others had `grace` seconds to say for whom they
    wait: more than one where it cannot be told which."""
    here, where = dist.get_rank(), read_launch()
    waits = {here: list(ranks)}
    try:
        if not is_store_there(where):
            raise TimeoutError
        answer_within(ANSWER, lambda: store.set(f"{WAITS}/{here}", json.dumps(waits[here])))
        time.sleep(grace)
        queue = list(ranks)
        for rank in queue:
            if rank not in waits:
                waits[rank] = answer_within(ANSWER, lambda: _read_waits(store, rank))  # noqa: B023
                queue.extend(waits[rank])
    except (RuntimeError, TimeoutError):
        return list(ranks) if where.has_agent else [KEEPER]
    return [rank for rank, waits_for in waits.items() if not waits_for] or list(ranks)


def _read_waits(store: Any, rank: int) -> List[int]:
    """Return the ranks that a rank has said it waits for, none if it has said nothing."""
    key = f"{WAITS}/{rank}"
    return list(json.loads(store.get(key))) if store.check([key]) else []


def is_store_there(where: Launch) -> bool:
    """Return whether somebody listens where the store is: to ask one that is gone makes torch print its own stack."""
    if where.address is None:
        return True
    try:
        with socket.create_connection((str(where.address), int(where.port or 0)), timeout=ANSWER):
            return True
    except OSError:
        return False


# ---- SIGTERM, which a launcher sends to all ranks when one has failed, and Ctrl-C, while this rank waits for another
#
# A neighbor of the failed rank notices it at its next wait and can name it, so a rank goes on for a moment before it ends:
#
#     main thread       a step ...... waits inside torch (C++), where Python's signal handlers do not run
#     SIGTERM           |  noted, and a byte goes through a pipe
#     watching thread   |  reads it, sleeps, ends the process if it is still there (after Ctrl-C: at the very same place)

TERMINATED = 143  # exit code of a process that was asked to end


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
            # closing it ends the thread
            os.close(signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False))
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
