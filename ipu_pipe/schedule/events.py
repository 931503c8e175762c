"""What happened: the one event record, of all backends."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from ipu_pipe.schedule.actions import Kind

ACTIONS = tuple(kind.word for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE))
COMMUNICATION = ("send", "recv", "wait")  # they overlap computation, so they are drawn on a track of their own
KINDS = (*ACTIONS, *COMMUNICATION, "evaluate", "checkpoint")


class Event(NamedTuple):
    """Something that a device did for a stage. Times in nanoseconds; -1 or None: does not apply or not known."""

    stage: int
    device: int
    kind: str
    microbatch: int  # for updates: the update's index
    start_ns: int
    end_ns: int
    version: int  # of the weights read; for updates: made
    bytes: Optional[int]  # that the result takes to the next stage


class Counter(NamedTuple):
    """A device's value from a time on."""

    device: int
    name: str
    time_ns: int
    value: float


Trace = Tuple[List[Event], List[Counter], Dict[str, Any]]
