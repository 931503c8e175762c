"""The event record of all backends, its columns, the metadata of a trace, and checks of columns
that were read from a file.

A device's time consists of passes and updates, waits and communication. The events of a device do
not overlap; the host uses the time between them. A pass begins when its inputs have arrived and
ends before its result is sent:

    wait (peer: sender, carries: payload)  recv (bytes)  forward  send (bytes, peer)   wait  recv  backward  send ...

`wait`: for a message, until the next one can be sent, for the data set (carries data, no peer) or
for the norms of all stages (no peer). `average`: the average over the replicas, waiting included.
An update that waits for the norms of other stages has several events. `microbatch` of a message
with norms, losses, weights or shared gradients is the update's index.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, Iterable, Iterator, Mapping, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput, raise_faults
from ipu_pipe.schedule.actions import Kind

# Traces of other tools do not say which pass was computed, nor to whom a message went.
UNSPECIFIED = "compute"
COLLECTIVE = "collective"
COMPUTE = (*(kind.word for kind in Kind if kind is not Kind.AVERAGE), UNSPECIFIED)
# kinds of events in which the host sends or receives, or takes part in an all-reduce
COMMUNICATION = ("send", "recv", Kind.AVERAGE.word, COLLECTIVE)
WAIT = "wait"
# kinds of events between updates; a pause is a range of updates that are not recorded
OUTSIDE = ("evaluate", "checkpoint", "pause")
KINDS = (*COMPUTE, *COMMUNICATION, WAIT, *OUTSIDE)
PAYLOADS = (
    "",
    "activations",
    "recomputed activations",
    "gradients",
    "shared gradients",
    "norms",
    "losses",
    "weights",
    "data",
    "tied gradients",
)
KIND_CODE = {kind: code for code, kind in enumerate(KINDS)}
PAYLOAD_CODE = {payload: code for code, payload in enumerate(PAYLOADS)}
_PAYLOADS_OF_UPDATES = [
    PAYLOAD_CODE[name] for name in ("shared gradients", "norms", "losses", "weights")
]

# Counters of memory: bytes of a device's tensors by category. `versions`: of weights besides those
# in the model; `activations`: stored for backwards; `buffers`: receives posted, and sends not
# known to be through unless they are `activations`.
MEMORY = {
    name: f"{name} (bytes)"
    for name in ("weights", "versions", "gradients", "optimizer", "activations", "buffers")
}
# the name of the counter of PyTorch's allocator of a GPU
ALLOCATED = "allocated (bytes)"

EVENT_TYPES: dict[str, Any] = {
    "stage": np.int32,
    "device": np.int32,
    "kind": np.int8,
    "microbatch": np.int32,
    "start": np.int64,
    "end": np.int64,
    "version": np.int32,
    "bytes": np.int64,
    "peer": np.int32,
    "carries": np.int8,
}
# the greatest time, so that sums and differences of three times fit into int64
FARTHEST_NS = 1 << 60
# the schema of the metadata
SCHEMA = 1


class Event(NamedTuple):
    """An activity of a device for a stage. Times are in nanoseconds; -1, "" or None mean not known
    or not applicable.
    """

    stage: int
    device: int
    kind: str
    # of an update or average: the update's index
    microbatch: int
    start_ns: int
    end_ns: int
    version: int  # of the weights that were read; of an update: the version that it made
    bytes: int | None  # of a message, or that a pass hands on
    peer: int = -1  # the device waited for, sent to or received from
    carries: str = ""  # one of PAYLOADS


class Counter(NamedTuple):
    """A value of a device that is valid from a time on."""

    device: int
    name: str
    time_ns: int
    value: float


class Events(NamedTuple):
    """Events as columns of one length. `kind` and `carries` are indices into KINDS and PAYLOADS;
    unknown bytes are -1.
    """

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
    def from_columns(cls, count: int, **columns: Any) -> "Events":
        """Return `count` events. A column is an array, or one value for all; columns that are not
        given are unknown.
        """
        values = {**dict.fromkeys(EVENT_TYPES, -1), "carries": 0, **columns}
        return cls(
            *(
                # copied: a broadcast value is one number in memory, which cannot be written to
                np.array(np.broadcast_to(np.asarray(values[k], kind), count))
                for k, kind in EVENT_TYPES.items()
            )
        )

    @classmethod
    def from_rows(cls, events: Iterable[Event]) -> "Events":
        """Return the columns of `events`."""
        rows = [
            (
                *e[:2],
                KIND_CODE[e.kind],
                *e[3:7],
                -1 if e.bytes is None else e.bytes,
                e.peer,
                PAYLOAD_CODE[e.carries],
            )
            for e in events
        ]
        return cls.from_columns(len(rows), **dict(zip(EVENT_TYPES, zip(*rows))))

    def select(self, chosen: Any) -> "Events":
        """Return the events that a mask, an array of indices or a slice chooses."""
        return Events(*(column[chosen] for column in self))

    def is_kind(self, *kinds: str) -> NDArray[np.bool_]:
        """Return a mask of the events of these kinds."""
        # a table by code: one look-up for each event, however many kinds there are
        is_chosen_code = np.zeros(len(KINDS), bool)
        is_chosen_code[[KIND_CODE[kind] for kind in kinds]] = True
        return is_chosen_code[self.kind]

    def rows(self) -> Iterator[Event]:
        """Yield one record for each event; slow for many."""
        for s, d, kind, m, start, end, version, size, peer, carries in zip(
            *(column.tolist() for column in self)
        ):
            yield Event(
                s,
                d,
                KINDS[kind],
                m,
                start,
                end,
                version,
                None if size < 0 else size,
                peer,
                PAYLOADS[carries],
            )


class Counters(NamedTuple):
    """Counters as columns of one length."""

    device: NDArray[np.int32]
    name: NDArray[np.object_]  # str
    time: NDArray[np.int64]
    value: NDArray[np.float64]

    @classmethod
    def from_rows(cls, counters: Iterable[Counter]) -> "Counters":
        """Return the columns of `counters`."""
        # zip makes no columns of no counters
        columns = list(zip(*counters)) or [()] * len(cls._fields)
        return cls(
            *(
                np.array(column, kind)
                for column, kind in zip(columns, (np.int32, object, np.int64, np.float64))
            )
        )

    def select(self, chosen: Any) -> "Counters":
        """Return the values that a mask, an array of indices or a slice chooses."""
        return Counters(*(column[chosen] for column in self))

    def rows(self) -> Iterator[Counter]:
        """Yield one record for each value; slow for many."""
        yield from map(Counter, *(column.tolist() for column in self))


class UnitRow(TypedDict):
    """A unit of a model in a trace's metadata: the layers from one possible beginning of a stage to
    the next. FLOPs and bytes of one microbatch; `crossing_bytes`: of its inputs from the previous
    units.
    """

    name: str
    stage: int
    forward_flops: float
    backward_flops: float
    crossing_bytes: int


class Trace(NamedTuple):
    """The events and counters of a run's devices. `metadata`: see `job.record.make_trace_metadata`;
    `notes`: what a reader left out, and why."""

    events: Events
    counters: Counters
    metadata: dict[str, Any]
    notes: tuple[str, ...] = ()


def concatenate_events(parts: Iterable[Events]) -> Events:
    """Concatenate events in the given order."""
    # no events first, so that no parts give empty columns of the right types
    return Events(*map(np.concatenate, zip(Events.from_rows([]), *parts)))


def concatenate_counters(parts: Iterable[Counters]) -> Counters:
    """Concatenate counters in the given order."""
    return Counters(*map(np.concatenate, zip(Counters.from_rows([]), *parts)))


def find_updates(events: Events, accumulate: int) -> NDArray[np.int64]:
    """Return the update, of `accumulate` microbatches, that each event belongs to. Events between
    two updates belong to the earlier one."""
    by_update = events.is_kind(Kind.UPDATE.word, Kind.AVERAGE.word) | np.isin(
        events.carries, _PAYLOADS_OF_UPDATES
    )
    update = np.where(by_update, events.microbatch, events.microbatch // accumulate)
    # version k has been made by update k - 1
    return np.where(events.is_kind(*OUTSIDE), events.version - 1, update)


def group_indices(column: NDArray[Any]) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Yield each value of an integer column in ascending order, with its indices in order. Takes
    O(n log n).
    """
    if not len(column):
        return
    low = int(column.min())
    high = int(column.max())
    # int16 is sorted by counting, which is several times as fast
    keys = (column - low).astype(np.int16) if high - low < 1 << 15 else column
    # stable, so that the events of a device keep their order
    order = np.argsort(keys, kind="stable")
    ordered = column[order]
    edges = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    for indices in np.split(order, edges):
        yield int(column[indices[0]]), indices


class CounterSeries(NamedTuple):
    """Counters of a device as curves, valid from each of `times` on: the categories of memory
    together, any other counter under its own name. NaN before a curve's first value."""

    name: str  # "memory", or the counter's
    device: int
    times: NDArray[np.int64]  # ns, rising
    values: dict[str, NDArray[np.float64]]


def build_counter_series(counters: Counters) -> Iterator[CounterSeries]:
    """Yield all curves, memory first; the last of several values at one time counts."""
    memory = tuple(MEMORY.values())
    others = ((name,) for name in dict.fromkeys(counters.name.tolist()) if name not in memory)
    for names in chain([memory], others):
        named = counters.select(np.isin(counters.name, names))
        for device, indices in group_indices(named.device):
            of_device = named.select(indices)
            times = np.unique(of_device.time)
            values = {}
            for name in names:
                curve = of_device.select(of_device.name == name)
                curve = curve.select(np.argsort(curve.time, kind="stable"))
                # -1 means no value yet, so NaN
                last = np.searchsorted(curve.time, times, side="right") - 1
                if len(curve.time):
                    values[name] = np.append(curve.value, np.nan)[last]
            yield CounterSeries("memory" if names is memory else names[0], device, times, values)


def check_trace(
    where: Any, events: Events, counters: Counters, metadata: Mapping[str, Any]
) -> None:
    """Raise `BadInput` for content that no version of ipu_pipe writes: events that end before they
    begin, negative devices, times too far from 0."""
    schema = metadata.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise BadInput(
            f"{where}: schema: {schema}: this version reads up to {SCHEMA}; use the ipu_pipe that "
            f"wrote it"
        )
    times = (events.start, events.end, counters.time)
    faults = (
        ((events.end < events.start).any(), "an event ends before it begins"),
        ((events.device < 0).any(), "device: below 0"),
        (
            any(((t <= -FARTHEST_NS) | (t >= FARTHEST_NS)).any() for t in times),
            "a time is too far from 0",
        ),
    )
    texts = [
        f"{where}: cannot be read as a trace: {fault}" for is_wrong, fault in faults if is_wrong
    ]
    raise_faults(texts)
