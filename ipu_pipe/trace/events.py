"""The one event record of all backends, and many of them as columns.

A device's time is its passes and updates, its waits and its communication: on one device no two events overlap, and what lies
between them is the host's own (the rest). A pass begins when its inputs are there and ends before its result is sent:

    wait (peer: who sends, carries: what)  recv (bytes)  forward  send (bytes, peer)   wait  recv  backward  send ...

`wait`: for a message, for room to send the next one, for the data set (carries data, no peer) or for all stages' norms (no peer).
`average`: the gradients of replicas, waiting included. An update is in parts where norms of other stages are asked for in its
middle. A message's `microbatch` is the update's index where it carries norms, losses or shared gradients.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.actions import Kind

UNSPECIFIED, COLLECTIVE = (
    "compute",
    "collective",
)  # of other tools' traces: what was computed, and to whom a message went, is not told
COMPUTE = (*(kind.word for kind in Kind if kind is not Kind.AVERAGE), UNSPECIFIED)
# the host's time for a message, or for an all-reduce
COMMUNICATION = ("send", "recv", Kind.AVERAGE.word, COLLECTIVE)
WAIT = "wait"
OUTSIDE = ("evaluate", "checkpoint", "pause")  # pause: not recorded, by a window of steps or by sampling
KINDS = (*COMPUTE, *COMMUNICATION, WAIT, *OUTSIDE)

# What a message carries, or what is waited for.
PAYLOADS = (
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
PAYLOAD_CODE = {what: code for code, what in enumerate(PAYLOADS)}


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
    def from_rows(cls, events: Iterable[Event]) -> "Events":
        """The columns of `events`."""
        rows = [
            (*e[:2], KIND_CODE[e.kind], *e[3:7], -1 if e.bytes is None else e.bytes, e.peer, PAYLOAD_CODE[e.carries])
            for e in events
        ]
        columns = zip(*rows) if rows else [()] * len(EVENT_TYPES)
        return cls(*(np.array(column, kind) for column, kind in zip(columns, EVENT_TYPES.values())))

    def select(self, chosen: Any) -> "Events":
        """Those that a mask, an order or a slice chooses."""
        return Events(*(column[chosen] for column in self))

    def is_kind(self, *kinds: str) -> NDArray[np.bool_]:
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
            yield Event(stage, device, KINDS[kind], microbatch, start, end, version, held, peer, PAYLOADS[carries])


class Counters(NamedTuple):
    """Counters as columns of one length; `name` holds places in `names`."""

    device: NDArray[np.int32]
    name: NDArray[np.int16]
    time: NDArray[np.int64]
    value: NDArray[np.float64]
    names: Tuple[str, ...]

    @classmethod
    def from_rows(cls, counters: Sequence[Counter]) -> "Counters":
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
    """What is known of a run's devices. `metadata`: see `ipu_pipe.trace.events`; `notes`: what a reader left out, and why."""

    events: Events
    counters: Counters
    metadata: Dict[str, Any]
    notes: Tuple[str, ...] = ()


def find_updates(events: Events, accumulate: int) -> NDArray[np.int64]:
    """The update, of `accumulate` microbatches, that each event belongs to: what is between two updates, to the one before."""
    told = [PAYLOAD_CODE[what] for what in ("shared gradients", "norms", "losses", "weights")]
    by_update = events.is_kind("update", Kind.AVERAGE.word) | np.isin(events.carries, told)
    found = np.where(by_update, events.microbatch, events.microbatch // accumulate)
    return np.where(events.is_kind(*OUTSIDE), events.version - 1, found)


def concatenate_events(parts: Sequence[Events]) -> Events:
    """Several as one, in the order given."""
    if not parts:
        return Events.from_rows([])
    return Events(*(np.concatenate(columns) for columns in zip(*parts)))


def concatenate_counters(parts: Sequence[Counters]) -> Counters:
    """Several as one, each name once."""
    names = tuple(dict.fromkeys(name for part in parts for name in part.names))
    if not parts:
        return Counters.from_rows([])
    renamed = [
        part._replace(name=np.array([names.index(name) for name in part.names], np.int16)[part.name])
        if part.names
        else part
        for part in parts
    ]
    columns = [np.concatenate([part[place] for part in renamed]) for place in range(4)]
    return Counters(columns[0], columns[1], columns[2], columns[3], names)


SCHEMA = 1


class UnitRow(TypedDict):
    """A place where a stage may begin, and what follows up to the next one. FLOPs and bytes of one microbatch; `crossing_bytes`:
    what goes into it from the unit before."""

    name: str
    stage: int
    forward_flops: float
    backward_flops: float
    crossing_bytes: int


class TraceWindow(TypedDict):
    """Which updates are recorded: from `begin` up to, not including, `end`, of them one in `every`."""

    begin: int
    end: int
    every: int


class TraceMetadata(TypedDict, total=False):
    """The keys. `modelled`: times come from the clock, by `why_modelled`, not from a device. `method_args`: as in the config, so
    that the schedule can be made again. `device_of_stage`: of one replica; replica r's devices follow, so many on.
    `planned_utilization`, `planned_bubble_fraction`: of the schedule in unit slots. `step_samples`: of an update."""

    schema: int
    run: str
    method: str
    method_args: Dict[str, Any]
    backend: str
    stages: int
    replicas: int
    microbatches: int
    accumulate: int
    step_samples: int
    device_of_stage: List[int]
    window: TraceWindow
    modelled: bool
    why_modelled: str
    gradients_cross: bool
    planned_utilization: float
    planned_bubble_fraction: float
    units: List[UnitRow]


def refuse_later_schema(metadata: Mapping[str, Any], path: Path) -> None:
    """Refuse (BadInput) a trace that a later ipu_pipe wrote."""
    schema = metadata.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise BadInput(f"{path}: schema: {schema}: this version reads up to {SCHEMA}: use the ipu_pipe that wrote it")


class CounterSeries(NamedTuple):
    """From each of `times` on, what is counted: a curve a category of memory, or the one that has the counter's own name. Not a
    number where nothing was counted yet."""

    name: str  # "memory", or the counter's
    device: int
    times: NDArray[np.int64]  # ns, rising
    values: Dict[str, NDArray[np.float64]]


def build_counter_series(counters: Counters) -> Iterator[CounterSeries]:
    """All of them, those of memory first; of values at one time the last stands."""
    memory = [counters.names.index(name) for name in MEMORY.values() if name in counters.names]
    for places in [memory, *([place] for place in range(len(counters.names)) if place not in memory)]:
        name = "memory" if places is memory else counters.names[places[0]]
        chosen = np.flatnonzero(np.isin(counters.name, places))
        order = chosen[np.argsort(counters.device[chosen], kind="stable")]
        devices, firsts = np.unique(counters.device[order], return_index=True)
        for device, own in zip(devices.tolist(), np.split(order, firsts[1:])):
            of = [own[counters.name[own] == place] for place in places]
            times = np.unique(counters.time[np.concatenate(of)])
            values = {}
            for place, mine in zip(places, of):
                mine = mine[np.argsort(counters.time[mine], kind="stable")]
                last = np.searchsorted(counters.time[mine], times, side="right") - 1  # -1: nothing yet
                if len(mine):
                    values[counters.names[place]] = np.append(counters.value[mine], np.nan)[last]
            yield CounterSeries(name, device, times, values)


FARTHEST_NS = 1 << 60  # of a moment, so that differences and sums of three fit


def build_integer_column(name: str, values: Sequence[Any], kind: Any) -> NDArray[Any]:
    """A column of integers. Raises ValueError for anything else."""
    found = np.array(values) if len(values) else np.zeros(0, np.int64)
    if found.dtype.kind not in "iu" or found.ndim != 1:
        wrong = next((value for value in values if not isinstance(value, int)), "too large")
        raise ValueError(f"{name}: {wrong!r}: must be a whole number")
    limits = np.iinfo(kind)
    if len(found) and not limits.min <= int(found.min()) <= int(found.max()) <= limits.max:
        raise ValueError(f"{name}: {int(np.abs(found).max())}: too large")
    return found.astype(kind)


def build_time_column(name: str, microseconds: Sequence[Any]) -> NDArray[np.int64]:
    """Times written in microseconds. Raises ValueError for anything else."""
    found = np.array(microseconds) if len(microseconds) else np.zeros(0)
    if found.dtype.kind not in "iuf" or found.ndim != 1:
        wrong = next((value for value in microseconds if not isinstance(value, (int, float))), "too large")
        raise ValueError(f"{name}: {wrong!r}: must be a number")
    if not (np.abs(found) < FARTHEST_NS / 1000).all():  # nor what is not a number
        raise ValueError(f"{name}: must be a number of microseconds, below {FARTHEST_NS // 1000:.0e}")
    return np.rint(found.astype(np.float64) * 1000).astype(np.int64)


def check_columns(where: Any, events: Events, counters: Counters) -> None:
    """Refuse (BadInput) columns of which no run can have made a trace."""
    faults = []
    if len(events.start):
        backwards = np.flatnonzero(events.end < events.start)
        if len(backwards):
            faults.append(f"event {int(backwards[0])}: ends before it begins")
        if int(events.device.min()) < 0:
            faults.append("device: below 0")
    for name, times in (("start", events.start), ("end", events.end), ("time", counters.time)):
        if len(times) and not -FARTHEST_NS < int(times.min()) <= int(times.max()) < FARTHEST_NS:
            faults.append(f"{name}: a time too far from 0")
    if len(counters.name) and not 0 <= int(counters.name.min()) <= int(counters.name.max()) < len(counters.names):
        faults.append("counters: a name that is not there")
    if faults:
        raise BadInput([f"{where}: cannot be read as a trace: {fault}" for fault in faults])
