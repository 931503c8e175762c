"""Waiting for other ranks: the limit of a wait, the rank to blame when it fails, the calls that each
rank has made, and signals during a wait.

A rank that hangs holds up its neighbors, and they hold up theirs: the first wait that fails may be
for a rank that waits itself. So a rank whose wait failed publishes in the store the ranks that it
waited for, gives the others time to do the same, and follows their waits to a rank that has
published nothing: that one is lost, hangs, or computes for too long.

    rank 0   waits for rank 1 ........ deadline | publishes "1" ... grace ... | 0 waits for 1, 1 for 2: rank 2 is to blame
    rank 1   waits for rank 2 ........... deadline | publishes "2" ... grace ...
    rank 2   hangs
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
from datetime import timedelta
from typing import Any, Callable, Iterator, NamedTuple, Sequence, TypeVar

import torch.distributed as dist

from ipu_pipe.backends import world
from ipu_pipe.errors import RunFault
from ipu_pipe.interrupts import INTERRUPTED
from ipu_pipe.launcher import Launch, read_launch
from ipu_pipe.text import list_some

# All times are in seconds.
# the longest wait, because torch counts in milliseconds
LONGEST = 1e7
# added to the deadline until the first step is done, while ranks load
WARM_UP = 6.0
# between two looks at an nccl message
POLL = 20e-6
# a live store answers within this time
ANSWER = 3.0
# all waiting ranks notice a closed connection within this time
NOTICE = 1.0
# PyTorch's names, new and old: of what returns its flight recorder's records, and of the variable
# with the beginning of a dump's path
DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")
DUMP_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
# prefix of the store's keys: object and rank -> the ranks that it waited for, as JSON
WAITS = "ipu_pipe/waits"
# the rank that keeps the store if the launcher does not
KEEPER = 0

Result = TypeVar("Result")


class LostRank(Exception):
    """The error of a wait: one of `ranks` has ended, or made no progress within `seconds`.

    `dump`: the file with what PyTorch recorded; `wait`: for which message, in words.
    """

    def __init__(self, ranks: Sequence[int], seconds: float, dump: str | None = None) -> None:
        self.ranks = list(ranks)
        self._seconds = seconds
        self._dump = dump
        self.wait = ""
        super().__init__()

    def __str__(self) -> str:
        ranks = self.ranks
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"one of ranks {list_some(ranks, 8)}"
        text = f"{who} is lost, or made no progress within {self._seconds:g} s"
        text += f", while {self.wait}" if self.wait else ""
        recorded = f"; PyTorch's flight recorder is dumped: {self._dump}"
        return text + (recorded if self._dump else "")


# ---- the limit of a wait


def wait_limit(deadline: float, is_warm: bool = False) -> timedelta:
    """Return the limit of a wait: `deadline` seconds, and `WARM_UP` more until the first step is
    done.
    """
    return timedelta(seconds=min(deadline + (0.0 if is_warm else WARM_UP), LONGEST))


def answer_within(seconds: float, ask: Callable[[], Result]) -> Result:
    """Return `ask()`. Raise `TimeoutError` after `seconds`, because torch waits without a limit for
    a store that is stopped.
    """
    results: list[Result] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(ask())
        # kept, because an exception would end the thread without a word to the caller
        except Exception as error:
            errors.append(error)

    # a daemon: the end of the process does not wait for a store that never answers
    thread = threading.Thread(target=run, name="ipu_pipe asking", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]


def wait_for_channel(work: Any, limit: timedelta) -> None:
    """Wait for an nccl message. Raise `RuntimeError` after the limit.

    nccl's own wait does not serve: with a limit it aborts the group, without one it makes the GPU
    wait and not the host.
    """
    end = time.monotonic() + limit.total_seconds()
    while not work.is_completed():
        if time.monotonic() > end:
            raise RuntimeError(f"timed out after {limit.total_seconds():g} s")
        time.sleep(POLL)
    work.wait()


# ---- the rank to blame


@contextlib.contextmanager
def detect_lost_rank(
    ranks: Sequence[int] | None = None,
    limit: timedelta | None = None,
    runs_other_code: bool = False,
) -> Iterator[None]:
    """Raise `LostRank` for any error inside the context, which may call torch.distributed only.

    `ranks`: the global ranks that this one waits for, which may be among them (default: all of its
    pipeline); `limit`: the limit of the wait (default: the process group's). `runs_other_code`: the context
    runs a caller's code, too, so that only errors of torch.distributed count.
    """
    start = time.monotonic()
    try:
        yield
    # it names its cause already; a RuntimeError would be taken for the connection's
    except RunFault:
        raise
    except (RuntimeError, TimeoutError) as error:
        if runs_other_code and not is_connection_error(error):
            raise
        store: Any = world.get_store()
        seconds = (store.timeout if limit is None else limit).total_seconds()
        # by global ranks, as messages to people name them
        here = dist.get_rank()
        others = [r for r in (world.list_names() if ranks is None else ranks) if r != here]
        # the others' waits began a little sooner or later than this one, and may have a longer
        # limit
        is_late = time.monotonic() - start >= seconds
        grace = WARM_UP + seconds / 10 if is_late else NOTICE
        dump = _dump_flight_recorder() if is_late else None
        raise LostRank(_find_culprits(store, others, grace), seconds, dump) from error


def _dump_flight_recorder() -> str | None:
    """Write what PyTorch's flight recorder holds of this rank, and return the file's path; None
    where the recorder is off, holds nothing, or cannot be written. It holds the messages and
    collectives of nccl, and of gloo the collectives.
    """
    import torch._C._distributed_c10d as c10d

    read = next((getattr(c10d, name) for name in DUMPS if hasattr(c10d, name)), None)
    prefix = next((os.environ[name] for name in DUMP_FILES if name in os.environ), None)
    if prefix is None:
        # the port tells apart the jobs of one machine, and is the same for all ranks of a job
        job = f"ipu_pipe-flight-recorder-{os.environ.get('MASTER_PORT', os.getpid())}"
        prefix = os.path.join(tempfile.gettempdir(), job, "rank_")
    path = f"{prefix}{dist.get_rank()}"
    try:
        records = b"" if read is None else read()
        if not records or not pickle.loads(records)["entries"]:
            return None
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "wb") as file:
            file.write(records)
    # what a version of torch may lack is no reason to hide why this rank waited
    except Exception:
        return None
    return path


def is_connection_error(error: Exception) -> bool:
    """Return whether an error is of torch.distributed, and not of the code that has called it."""
    # gloo raises plain RuntimeErrors that begin with its source file
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


def _find_culprits(store: Any, ranks: Sequence[int], grace: float) -> list[int]:
    """Return the ranks that hold up this rank, which waited for `ranks`; several if it is not known
    which of them.

    The other ranks have `grace` seconds to publish the ranks that they wait for.
    """
    here = dist.get_rank()
    where = read_launch()
    waits = {here: list(ranks)}
    try:
        if not is_store_there(where):
            raise TimeoutError
        answer_within(ANSWER, lambda: store.set(_name_waits(here), json.dumps(waits[here])))
        time.sleep(grace)
        queue = list(ranks)
        # the queue grows inside the loop: a breadth-first walk along the waits
        for rank in queue:
            if rank not in waits:
                waits[rank] = answer_within(ANSWER, lambda: _read_waits(store, rank))  # noqa: B023
                queue.extend(waits[rank])
    except (RuntimeError, TimeoutError):
        # without a launcher's store rank 0 keeps it, so that its end explains the silence
        return list(ranks) if where.has_agent else [KEEPER]
    # none if they wait in a circle
    return [rank for rank, waits_for in waits.items() if not waits_for] or list(ranks)


def _read_waits(store: Any, rank: int) -> list[int]:
    """Return the ranks for which a rank waits, as it has published; an empty list if it has
    published nothing.
    """
    key = _name_waits(rank)
    return list(json.loads(store.get(key))) if store.check([key]) else []


def _name_waits(rank: int) -> str:
    """Return the store's key of a rank's waits in its newest object."""
    # after a failure new objects may work in the same group, where the old waits stay
    return f"{WAITS}/{CallRecord.count}/{rank}"


def is_store_there(where: Launch) -> bool:
    """Return whether the store's port is open: a request to a store that is gone makes torch print
    its own stack.
    """
    if where.address is None:
        return True
    try:
        with socket.create_connection((str(where.address), int(where.port or 0)), timeout=ANSWER):
            return True
    except OSError:
        return False


# ---- the calls that each rank has made, so that a rank that waits in a call can name the rank that has not made it
#
#     rank 0   step 11 | code of the caller's own ................ | step 12
#     rank 1   step 11 | step 12, waits ............ deadline | "rank 0 has not called step 12"
#
# A thread publishes a rank's place in the store when it stays there for longer than `PERIOD`: a
# fast loop sends nothing.

# seconds between two looks at this rank's place; a rank to blame is asked after NOTICE seconds at
# the earliest
PERIOD = 0.4
# prefix of the store's keys: object and rank -> place, as JSON
CALLS = "ipu_pipe/calls"
ORDER = "all ranks must call the same methods, in the same order"


class Place(NamedTuple):
    """The place of a rank in its calls: the `number` of the last one, its name, and whether it is
    inside or has failed.
    """

    number: int = 0
    call: str = ""
    is_inside: bool = False
    has_failed: bool = False


class CallRecord:
    """The calls of one object on this rank.

    All ranks make their objects in the same order, by whose numbers they find each other.
    `is_shared`: there are other ranks; `count`: the number of such objects.
    """

    count = 0

    def __init__(self, is_shared: bool) -> None:
        self._is_shared = is_shared
        self._place = Place()
        self._end = threading.Event()
        if is_shared:
            self._key = f"{CALLS}/{CallRecord.count}"
            CallRecord.count += 1
            threading.Thread(target=self._watch, name="ipu_pipe calls", daemon=True).start()

    @contextlib.contextmanager
    def enter(self, call: str) -> Iterator[None]:
        """Record that the code inside the context is the next call, `call`."""
        entered = self._place = Place(self._place.number + 1, call, True)
        try:
            yield
        except BaseException as error:
            # a rank that has given up waiting is still the one that waited there
            if not isinstance(error.__cause__, LostRank):
                self._place = entered._replace(is_inside=False, has_failed=True)
            if self._is_shared:
                # this process may end before the thread looks again
                self._publish(self._place)
            raise
        # in memory alone: the thread publishes what lasts
        self._place = entered._replace(is_inside=False)

    def close(self) -> None:
        """End the thread."""
        self._end.set()

    def explain(self, ranks: Sequence[int]) -> str:
        """Say why this rank, which has failed in its last call, waited for one of `ranks`."""
        here = self._place
        call = self._place.call
        reasons: list[str] = []
        for rank in ranks:
            place = self._read(rank)
            if place is None or place.has_failed:
                reasons += (
                    [] if place is None else [f"rank {rank} has left {place.call} with an error"]
                )
            # a rank in the same call waits as this one does, and is not to blame
            elif place.is_inside and place.call != call:
                reasons.append(f"rank {rank} is in {place.call}")
            elif not place.is_inside and place.number < here.number:
                reasons.append(
                    f"rank {rank} has not called {call} (a longer deadline= waits longer)"
                )
        return "; ".join([*reasons, f"this rank waits in {call}: {ORDER}"])

    def _watch(self) -> None:
        previous: Place | None = None
        published: Place | None = None
        while not self._end.wait(PERIOD):
            place = self._place
            # two looks must agree, so that a fast loop sends nothing; a failure is told at once
            wanted = place if place == previous or place.has_failed else None
            previous = place
            # None too is published, so that others read that this rank moves on
            if wanted != published:
                if not self._publish(wanted):
                    return
                published = wanted

    def _publish(self, place: Place | None) -> bool:
        """Put the place into the store. Return False if the store does not answer."""
        try:
            if not is_store_there(read_launch()):
                return False
            store: Any = world.get_store()
            answer_within(
                ANSWER, lambda: store.set(f"{self._key}/{dist.get_rank()}", json.dumps(place))
            )
        # the group may have ended
        except (RuntimeError, TimeoutError, ValueError):
            return False
        return True

    def _read(self, rank: int) -> Place | None:
        """Return the place that a rank has published, None if it moves on."""
        key = f"{self._key}/{rank}"
        try:
            if not is_store_there(read_launch()):
                return None
            store: Any = world.get_store()
            place = json.loads(
                answer_within(ANSWER, lambda: store.get(key) if store.check([key]) else b"null")
            )
        except (RuntimeError, TimeoutError, ValueError):
            return None
        return None if place is None else Place(*place)


# ---- signals during a wait: Ctrl-C, and SIGTERM, which a launcher sends to all ranks when one has failed
#
# A neighbor of the failed rank notices the failure at its next wait and can name the rank, so every
# rank continues for a moment:
#
#     main thread       a step ...... waits inside torch (C++), where Python's signal handlers do not run
#     SIGTERM           |  is noted, and a byte goes through a pipe
#     watching thread   |  reads it, sleeps, ends the process if it still runs (after Ctrl-C: if it is at the very same place)

# exit code of a process that SIGTERM has ended
TERMINATED = 143


class Termination:
    """The state of SIGTERM, with which the launcher asks this process to end because another one
    has failed.

    `GRACE`: the seconds after which the process ends between two actions. `PATIENCE`: the seconds
    after which it ends anywhere.
    """

    GRACE = 3.0
    PATIENCE = 5.0
    signalled_at: float | None = None
    # signal handler and wake-up descriptor before `watch`
    _previous: tuple[Any, int] | None = None

    @classmethod
    def note_signal(cls, *_: Any) -> None:
        """Note the time of the signal; this is the handler for `signal.signal`."""
        # the first signal counts: a second one does not prolong the grace
        cls.signalled_at = cls.signalled_at or time.monotonic()

    @classmethod
    def check(cls) -> None:
        """End the process if SIGTERM came more than `GRACE` seconds ago."""
        if cls.signalled_at is not None and time.monotonic() - cls.signalled_at > cls.GRACE:
            sys.exit(TERMINATED)

    @classmethod
    def watch(cls) -> None:
        """Install the handler of SIGTERM and the watching thread; do nothing outside the main
        thread.
        """
        # Python installs handlers of signals in the main thread alone
        if cls._previous is not None or threading.current_thread() is not threading.main_thread():
            return
        reader, writer = os.pipe()
        # Python requires it of a wake-up descriptor: a full pipe must not stop the handler
        os.set_blocking(writer, False)
        threading.Thread(
            target=cls._watch_signals, args=(reader,), name="ipu_pipe stopping", daemon=True
        ).start()
        # the wake-up byte is written by C code, which runs although the main thread is inside torch
        cls._previous = (
            signal.signal(signal.SIGTERM, cls.note_signal),
            signal.set_wakeup_fd(writer, warn_on_full_buffer=False),
        )

    @classmethod
    def stop_watching(cls) -> None:
        """Restore the earlier handler of SIGTERM and end the watching thread."""
        if cls._previous is not None:
            handler, descriptor = cls._previous
            signal.signal(signal.SIGTERM, handler)
            # closing the descriptor ends the thread
            os.close(signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False))
            cls._previous = None

    @classmethod
    def _watch_signals(cls, reader: int) -> None:
        while True:
            byte = os.read(reader, 1)
            if not byte:
                os.close(reader)
                return
            if byte[0] == signal.SIGTERM:
                # the main thread may still name the lost rank and end by itself
                time.sleep(cls.PATIENCE)
                if cls._previous is not None:
                    # not sys.exit, which would end this thread alone
                    os._exit(TERMINATED)
            elif byte[0] == signal.SIGINT:
                position = _find_main_thread()
                time.sleep(cls.PATIENCE)
                # a main thread that has moved on handles Ctrl-C by itself
                if cls._previous is not None and _find_main_thread() == position:
                    os._exit(INTERRUPTED)


def _find_main_thread() -> tuple[int, int]:
    """Return the id of the main thread's frame and its current instruction."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return (id(frame), frame.f_lasti) if frame is not None else (0, 0)
