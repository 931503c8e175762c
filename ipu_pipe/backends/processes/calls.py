"""The calls that each rank has made, so that a rank that waits in a call can name the rank that has
not made it.

    rank 0   step 11 | code of the caller's own ................ | step 12
    rank 1   step 11 | step 12, waits ............ deadline | "rank 0 has not called step 12"

A thread publishes a rank's place in the store when it stays there for longer than `PERIOD`: a fast
loop sends nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from typing import Any, Iterator, NamedTuple, Sequence

import torch.distributed as dist

from ipu_pipe.backends.processes.lost_ranks import ANSWER, LostRank, answer_within, is_store_there
from ipu_pipe.launcher import read_launch

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
    `is_shared`: there are other ranks.
    """

    _numbers = itertools.count()

    def __init__(self, is_shared: bool) -> None:
        self._is_shared = is_shared
        self._place = Place()
        self._end = threading.Event()
        if is_shared:
            self._key = f"{CALLS}/{next(self._numbers)}"
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
            wanted = place if place == previous or place.has_failed else None
            previous = place
            if wanted != published:
                if not self._publish(wanted):
                    return
                published = wanted

    def _publish(self, place: Place | None) -> bool:
        """Put the place into the store. Return False if the store does not answer."""
        try:
            if not is_store_there(read_launch()):
                return False
            store: Any = dist.distributed_c10d._get_default_store()
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
            store: Any = dist.distributed_c10d._get_default_store()
            place = json.loads(
                answer_within(ANSWER, lambda: store.get(key) if store.check([key]) else b"null")
            )
        except (RuntimeError, TimeoutError, ValueError):
            return None
        return None if place is None else Place(*place)
