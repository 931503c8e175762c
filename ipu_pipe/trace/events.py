"""The one event record of all backends, and many of them as columns.

A device's time is its passes and updates, its waits and its communication: on one device no two events overlap, and what lies
between them is the host's own (the rest). A pass begins when its inputs are there and ends before its result is sent:

    wait (peer: who sends, carries: what)  recv (bytes)  forward  send (bytes, peer)   wait  recv  backward  send ...

`wait`: for a message, for room to send the next one, for the data set (carries data, no peer) or for all stages' norms (no peer).
`average`: the gradients of replicas, waiting included. An update is in parts where norms of other stages are asked for in its
middle. A message's `microbatch` is the update's index where it carries norms, losses or shared gradients.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.schedule.actions import Kind

UNTOLD, COLLECTIVE = (
    "compute",
    "collective",
)  # of other tools' traces: what was computed, and to whom a message went, is not told
COMPUTE = (*(kind.word for kind in Kind if kind is not Kind.AVERAGE), UNTOLD)
# the host's time for a message, or for an all-reduce
COMMUNICATION = ("send", "recv", Kind.AVERAGE.word, COLLECTIVE)
WAIT = "wait"
OUTSIDE = ("evaluate", "checkpoint", "pause")  # pause: not recorded, by a window of steps or by sampling
KINDS = (*COMPUTE, *COMMUNICATION, WAIT, *OUTSIDE)

# What a message carries, or what is waited for.
CARRIED = (
    "", "activations", "recomputed activations", "gradients", "shared gradients", "norms", "losses", "weights", "data",
    "tied gradients",
)  # fmt: skip


class Event(NamedTuple):
    """Something that a device did for a stage. Times in nanoseconds; -1, "" or None: does not apply or not known."""

    stage: int
    device: int
    kind: str
    microbatch: int  # for updates and averages: the update's index
    start_ns: int
    end_ns: int
    version: int  # of the weights read; for updates: made
    bytes: Optional[int]  # that a pass hands on, or that a message has
    peer: int = -1  # the device waited for, sent to or received from
    carries: str = ""  # what was sent, received or waited for, of CARRIED


class Counter(NamedTuple):
    """A device's value from a time on."""

    device: int
    name: str
    time_ns: int
    value: float


# Names of the counters of memory, bytes that a device's tensors take, by category. `versions`: of weights besides those in the
# model; `activations`: what microbatches in flight keep for their backward; `buffers`: receives posted and what was sent and is
# not known to be through, unless it is in `activations`. ALLOCATED: by PyTorch's allocator of a GPU, whatever for.
MEMORY = {
    name: f"{name} (bytes)" for name in ("weights", "versions", "gradients", "optimizer", "activations", "buffers")
}
ALLOCATED = "allocated (bytes)"

EVENT_TYPES: Dict[str, Any] = {
    "stage": np.int32, "device": np.int32, "kind": np.int8, "microbatch": np.int32, "start": np.int64, "end": np.int64,
    "version": np.int32, "bytes": np.int64, "peer": np.int32, "carries": np.int8,
}  # fmt: skip
COUNTER_TYPES: Dict[str, Any] = {"device": np.int32, "name": np.int16, "time": np.int64, "value": np.float64}
KIND_CODE = {kind: code for code, kind in enumerate(KINDS)}
CARRIED_CODE = {what: code for code, what in enumerate(CARRIED)}


class Events(NamedTuple):
    """Events as columns of one length. `kind` and `carries` hold places in KINDS and CARRIED; bytes not known are -1."""

    stage: NDArray[np.int32]
    device: NDArray[np.int32]
    kind: NDArray[np.int8]
    microbatch: NDArray[np.int32]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    version: NDArray[np.int32]
    bytes: NDArray[np.int64]
    peer: NDArray[np.int32]
    carries: NDArray[np.int8]

    @classmethod
    def of(cls, events: Iterable[Event]) -> "Events":
        """The columns of `events`."""
        rows = [
            (*e[:2], KIND_CODE[e.kind], *e[3:7], -1 if e.bytes is None else e.bytes, e.peer, CARRIED_CODE[e.carries])
            for e in events
        ]
        columns = zip(*rows) if rows else [()] * len(EVENT_TYPES)
        return cls(*(np.array(column, kind) for column, kind in zip(columns, EVENT_TYPES.values())))

    def where(self, chosen: Any) -> "Events":
        """Those that a mask, an order or a slice chooses."""
        return Events(*(column[chosen] for column in self))

    def of_kind(self, *kinds: str) -> NDArray[np.bool_]:
        """Which are of one of these kinds."""
        chosen = np.zeros(len(KINDS), bool)
        chosen[[KIND_CODE[kind] for kind in kinds]] = True
        return chosen[self.kind]

    def rows(self) -> Iterable[Event]:
        """One record each: for few of them."""
        for stage, device, kind, microbatch, start, end, version, size, peer, carries in zip(
            *(c.tolist() for c in self)
        ):
            held = None if size < 0 else size
            yield Event(stage, device, KINDS[kind], microbatch, start, end, version, held, peer, CARRIED[carries])


class Counters(NamedTuple):
    """Counters as columns of one length; `name` holds places in `names`."""

    device: NDArray[np.int32]
    name: NDArray[np.int16]
    time: NDArray[np.int64]
    value: NDArray[np.float64]
    names: Tuple[str, ...]

    @classmethod
    def of(cls, counters: Sequence[Counter]) -> "Counters":
        """The columns of `counters`."""
        names = tuple(dict.fromkeys(counter.name for counter in counters))
        code = {name: place for place, name in enumerate(names)}
        return cls(
            np.array([counter.device for counter in counters], np.int32),
            np.array([code[counter.name] for counter in counters], np.int16),
            np.array([counter.time_ns for counter in counters], np.int64),
            np.array([counter.value for counter in counters], np.float64),
            names,
        )

    def rows(self) -> Iterable[Counter]:
        """One record each: for few of them."""
        for device, name, moment, value in zip(*(column.tolist() for column in self[:4])):
            yield Counter(device, self.names[name], moment, value)


class Trace(NamedTuple):
    """What is known of a run's devices. `metadata`: see `ipu_pipe.trace.metadata`; `notes`: what a reader left out, and why."""

    events: Events
    counters: Counters
    metadata: Dict[str, Any]
    notes: Tuple[str, ...] = ()


def updates_of(events: Events, accumulate: int) -> NDArray[np.int64]:
    """The update, of `accumulate` microbatches, that each event belongs to: what is between two updates, to the one before."""
    told = [CARRIED_CODE[what] for what in ("shared gradients", "norms", "losses", "weights")]
    by_update = events.of_kind("update", Kind.AVERAGE.word) | np.isin(events.carries, told)
    found = np.where(by_update, events.microbatch, events.microbatch // accumulate)
    return np.where(events.of_kind(*OUTSIDE), events.version - 1, found)


def joined(parts: Sequence[Events]) -> Events:
    """Several as one, in the order given."""
    if not parts:
        return Events.of([])
    return Events(*(np.concatenate(columns) for columns in zip(*parts)))


def joined_counters(parts: Sequence[Counters]) -> Counters:
    """Several as one, each name once."""
    names = tuple(dict.fromkeys(name for part in parts for name in part.names))
    if not parts:
        return Counters.of([])
    renamed = [
        part._replace(name=np.array([names.index(name) for name in part.names], np.int16)[part.name])
        if part.names
        else part
        for part in parts
    ]
    columns = [np.concatenate([part[place] for part in renamed]) for place in range(4)]
    return Counters(columns[0], columns[1], columns[2], columns[3], names)
