"""The trace of one rank by its own clock: events of the recorded updates, and totals of the updates
that count for throughput.

    | wait | recv | forward | send |    | wait | recv | backward | send |  ...
                                     events do not overlap; the time between them is the host's own

A mark is a moment of the clock: nanoseconds on the host; on a GPU an event on its stream, because
the host only queues work there and goes on. Marks of a GPU are read after it has passed them:

    host     queues F0 | queues F1 | waits for B0's gradients ......| queues B0
    stream   m  F0  m m   F1   m . . idle . . . . . . . . . . . . . m   B0   m       m: a mark, passed in this order

A rank writes its events to a file during the run. A resumed run continues the file of the earlier
start:

    rank-0.trace    events of updates 0 .. 7 | pause | events of updates 8 ...        resumed from the checkpoint of update 8
"""

from __future__ import annotations

import functools
import os
import time
import weakref
from collections import deque
from pathlib import Path
from typing import Any, Callable, Tuple

import numpy as np
import torch

from ipu_pipe.backends import world
from ipu_pipe.backends.interface import DeviceTimes
from ipu_pipe.errors import BadInput
from ipu_pipe.model.devices import get_kind
from ipu_pipe.trace.events import (
    COMMUNICATION,
    EVENT_TYPES,
    KIND_CODE,
    OUTSIDE,
    PAYLOAD_CODE,
    WAIT,
    Counter,
    Counters,
    Events,
    Trace,
    find_updates,
)
from ipu_pipe.trace.store import SUFFIX, TraceWriter, find_store_files, read_store

# (stage, kind, microbatch, start, end, version, bytes, peer, carries)
Record = Tuple[int, int, int, int, int, int, int, int, int]
# two marks of a GPU, and the function that takes their times
Pending = Tuple[Any, Any, Callable[[int, int], None]]
# events that are written at once
FLUSH_EVENTS = 4096
# seconds after which records are written; a killed run loses no more
FLUSH_SECONDS = 1.0
# a tag above the tags of all messages of the schedule
CLOCK_TAG = (1 << 30) + 1
# round trips of a comparison of two clocks
ROUND_TRIPS = 8

# kind of event -> index in the totals: 0 busy, 1 waiting, 2 communication; None: not a part of an
# update
_TOTAL_INDEX: dict[str, int | None] = dict.fromkeys(KIND_CODE, 0)
_TOTAL_INDEX.update({WAIT: 1, **dict.fromkeys(COMMUNICATION, 2), **dict.fromkeys(OUTSIDE)})


class StreamClock:
    """The clock of the current stream of the current device. (Tested with a double of events; not
    run on a GPU.)

    `event`: makes a timing event; `finish`: waits until the device has nothing to do.
    """

    def __init__(self, event: Callable[[], Any], finish: Callable[[], None]) -> None:
        self._event = event
        self._finish = finish
        self.set_anchor()

    def mark(self) -> Any:
        """Return a mark of the present on the stream."""
        event = self._event()
        event.record()
        return event

    def set_anchor(self) -> None:
        """Wait for the GPU and compare its clock with the host's.

        Later times are measured from here, because `elapsed_time` returns float32 milliseconds,
        inexact for long times.
        """
        self._finish()
        self._anchor = self.mark()
        self._finish()
        # right after the wait: the GPU has just passed the anchor
        self._anchor_ns = time.perf_counter_ns()

    def read(self, pending: deque[Pending], wait: bool) -> None:
        """Remove the pending marks that the GPU has passed, in order, and hand over their times; if
        `wait`, wait for all.
        """
        if wait:
            self._finish()
        last = None
        # the marks of a stream are passed in order, so that the first unfinished one ends the
        # search
        while pending and (wait or pending[0][1].query()):
            start, last, store = pending.popleft()
            store(self._to_ns(start), self._to_ns(last))
        if last is not None:
            # moved on: times from a near anchor lose nothing in float32
            self._anchor_ns = self._to_ns(last)
            self._anchor = last

    def _to_ns(self, mark: Any) -> int:
        return self._anchor_ns + round(self._anchor.elapsed_time(mark) * 1e6)


def make_stream_clock(device: torch.device) -> StreamClock | None:
    """Return the clock of a device's stream; None for the host's clock, by which a device without
    events has the times at which the host went on.
    """
    kind = get_kind(device)
    return StreamClock(kind.make_event, kind.synchronize) if kind.has_events() else None


class TraceRecorder:
    """Record the activities of a rank. `stage`: the stage of the current action; `traced`: the
    updates whose events are recorded; `stream`: the clock of a GPU."""

    def __init__(
        self, rank: int, stage: int, traced: range, stream: StreamClock | None = None
    ) -> None:
        self._rank = rank
        self.stage = stage
        self._traced = traced
        self._stream = stream
        self.mark: Callable[[], Any] = time.perf_counter_ns if stream is None else stream.mark
        self._records: list[Record] = []
        self._counters: list[Counter] = []
        self._pending: deque[Pending] = deque()
        # without a file all records stay in memory
        self._file: TraceWriter | None = None
        self._last_write = time.monotonic()
        self._totals = [0, 0, 0]
        self._span_ns = 0
        self._step_start: Any = 0
        # the mark at which recording stopped
        self._stopped_at: Any | None = None
        self.update = 0
        self.is_recording = False
        self._is_timed = False
        # (source stage, target stage) -> (bytes, messages) of activations and their gradients, and
        # of shared layers' gradients
        self.sent: dict[tuple[int, int], tuple[int, int]] = {}
        self.sent_shared: dict[tuple[int, int], tuple[int, int]] = {}

    def begin_update(self, update: int) -> None:
        """Record from now on if the update is one of `traced`, else stop recording."""
        was_recording = self.is_recording
        is_recording = update in self._traced
        self.update = update
        self.is_recording = is_recording
        if was_recording and not is_recording:
            self._stopped_at = self.mark()
        # the gap shows as a pause, and not as the host's own time
        elif is_recording and not was_recording and self._stopped_at is not None:
            self.add("pause", -1, self._stopped_at, version=update)
        is_due = (
            len(self._records) >= FLUSH_EVENTS
            or time.monotonic() - self._last_write > FLUSH_SECONDS
        )
        # at the end of a recorded stretch all is written, since nothing may follow for long
        if was_recording and (is_due or not is_recording):
            self.flush()

    def add(
        self,
        kind: str,
        index: int,
        start: Any,
        *,
        version: int = -1,
        size: int = -1,
        peer: int = -1,
        carries: str = "",
    ) -> Any:
        """Add an event of microbatch (or update) `index` from the mark `start` to now; return the
        mark of its end.
        """
        end = self.mark()
        # taken now, because a GPU's times come when another stage or update may be current
        details = (
            self.is_recording,
            self._is_timed,
            kind,
            (self.stage, index, version, size, peer, carries),
        )
        if self._stream is None:
            self._store_event(*details, start, end)
        else:
            self._pending.append((start, end, functools.partial(self._store_event, *details)))
        return end

    def _store_event(
        self,
        is_recorded: bool,
        is_timed: bool,
        kind: str,
        details: tuple[int, int, int, int, int, str],
        start: int,
        end: int,
    ) -> None:
        if is_timed:
            index = _TOTAL_INDEX[kind]
            if index is not None:
                self._totals[index] += end - start
        if is_recorded:
            stage, number, version, size, peer, carries = details
            self._records.append(
                (
                    stage,
                    KIND_CODE[kind],
                    number,
                    start,
                    end,
                    version,
                    size,
                    peer,
                    PAYLOAD_CODE[carries],
                )
            )

    def count(self, name: str, value: float, mark: Any) -> None:
        """Record the value that a counter has from a mark on."""
        if not self.is_recording:
            return
        if self._stream is None:
            self._counters.append(Counter(self._rank, name, mark, value))
        else:
            self._pending.append((mark, mark, functools.partial(self._store_counter, name, value)))

    def _store_counter(self, name: str, value: float, now: int, _: int) -> None:
        self._counters.append(Counter(self._rank, name, now, value))

    def count_message(self, source: int, target: int, is_shared: bool, size: int) -> None:
        """Count a message from a stage to another; `is_shared`: it carries gradients of a shared
        layer.
        """
        traffic = self.sent_shared if is_shared else self.sent
        total, messages = traffic.get((source, target), (0, 0))
        traffic[source, target] = (total + size, messages + 1)

    def begin_step(self, is_timed: bool) -> None:
        """Begin a step of the run; `is_timed`: it counts for throughput and in the totals."""
        self._is_timed, self._step_start = is_timed, self.mark()

    def end_step(self) -> None:
        """End the step."""
        if self._is_timed:
            if self._stream is None:
                self._span_ns += self.mark() - self._step_start
            else:
                self._pending.append((self._step_start, self.mark(), self._add_span))
        self._is_timed = False

    def _add_span(self, start: int, end: int) -> None:
        self._span_ns += end - start

    @property
    def times(self) -> DeviceTimes:
        """The times of the rank in the updates that count for throughput."""
        self._read(wait=True)
        return DeviceTimes(self._totals[0], self._totals[1], self._totals[2], self._span_ns)

    def read_events(self) -> Events:
        """Return the events that are in memory."""
        self._read(wait=True)
        return self._make_events()

    def _make_events(self) -> Events:
        count = len(self._records)
        names = [name for name in EVENT_TYPES if name != "device"]
        # reshape keeps the columns where there is no record
        table = np.array(self._records, np.int64).reshape(count, len(names)).T
        return Events.from_columns(count, device=self._rank, **dict(zip(names, table)))

    def _read(self, wait: bool) -> None:
        if self._stream is not None and self._pending:
            self._stream.read(self._pending, wait)

    # ---- the file

    def write_to(self, file: TraceWriter, offset_ns: int) -> None:
        """Write to a file from now on; `offset_ns`: as in `synchronize`."""
        self._file = file
        # reports are made after the end of training, too
        weakref.finalize(self, file.close)
        file.synchronize(time.perf_counter_ns(), offset_ns)

    def continue_trace(self, earlier: Trace, shift_ns: int, update: int) -> None:
        """Write the events of an earlier start first, moved by `shift_ns`, and a pause from its end
        to now.
        """
        assert self._file is not None
        events = earlier.events
        values = earlier.counters
        events = events._replace(start=events.start + shift_ns, end=events.end + shift_ns)
        self._file.write_events(events)
        self._file.write_counters(values._replace(time=values.time + shift_ns))
        end = int(events.end.max())
        if self.is_recording:
            self._store_event(
                True,
                False,
                "pause",
                (self.stage, -1, update, -1, -1, ""),
                end,
                time.perf_counter_ns(),
            )
        elif self._stream is None:
            self._stopped_at = end

    def synchronize(self, offset_ns: int) -> None:
        """Store the offset of this rank's clock: rank 0's clock minus this one, in ns. Nothing may
        be in flight.
        """
        self._read(wait=True)
        if self._stream is not None:
            self._stream.set_anchor()
        if self._file is not None:
            self._file.synchronize(time.perf_counter_ns(), offset_ns)

    def flush(self, wait: bool = False) -> None:
        """Write the events in memory to the file, if there is one; a GPU's events that it has
        passed, or all if `wait`.
        """
        self._read(wait)
        self._last_write = time.monotonic()
        if self._file is not None:
            if self._records:
                self._file.write_events(self._make_events())
            self._file.write_counters(Counters.from_rows(self._counters))
            self._records.clear()
            self._counters.clear()
            self._file.flush()


# ---- one clock for all ranks


def compare_clocks() -> int:
    """Return rank 0's clock minus this rank's clock (ns). All ranks must call this at once.

    Ranks on rank 0's host share its clock. For other ranks the offset is estimated from the
    shortest of several round trips (Cristian's algorithm), with an error of up to half that round
    trip.
    """
    identities: list[str | None] = [None] * world.get_world_size()
    world.all_gather_object(identities, identify_clock())
    offset = 0
    for rank in range(1, world.get_world_size()):
        if identities[rank] is not None and identities[rank] == identities[0]:
            # the same kernel's clock: an estimate would only be less exact
            continue
        if world.get_rank() == 0:
            for _ in range(ROUND_TRIPS):
                world.recv(torch.zeros(1, dtype=torch.int64), rank, CLOCK_TAG)
                world.send(torch.tensor([time.perf_counter_ns()]), rank, CLOCK_TAG)
        elif world.get_rank() == rank:
            offset = min(_ask_clock() for _ in range(ROUND_TRIPS))[1]
    return offset


def identify_clock() -> str | None:
    """Return a text that is equal for two processes exactly if `time.perf_counter_ns` counts from
    the same moment in both.

    Return None if that is not known. On Linux the clock belongs to the running kernel and may be
    shifted in a time namespace.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8") + os.readlink(
            "/proc/self/ns/time"
        )
    except OSError:
        return None


def _ask_clock() -> tuple[int, int]:
    """Return the time of a round trip to rank 0, and the clock offset that it gives."""
    theirs = torch.zeros(1, dtype=torch.int64)
    begin = time.perf_counter_ns()
    world.send(torch.zeros(1, dtype=torch.int64), 0, CLOCK_TAG)
    world.recv(theirs, 0, CLOCK_TAG)
    end = time.perf_counter_ns()
    # as if the ways there and back took equally long
    return end - begin, int(theirs) - (begin + end) // 2


# ---- a run's files


def open_file(
    folder: Path,
    metadata: dict[str, Any],
    recorder: TraceRecorder,
    first_update: int,
    offset_ns: int,
) -> None:
    """Let the recorder write to its file in the folder of a run. All ranks call this at once.

    `metadata`: of the trace. `offset_ns`: rank 0's clock minus this rank's clock. The events of an
    earlier start before `first_update` are moved so that they end where this start begins, because
    its clock may be another one. Its later events are left out.
    """
    rank = recorder._rank
    path = _get_path(folder, rank)
    earlier = _read_earlier(path, metadata, first_update) if first_update else None
    # remove the files of ranks that this start does not have
    if rank == 0:
        for other in {*find_store_files(folder)} - {
            _get_path(folder, r) for r in range(world.get_world_size())
        }:
            other.unlink()
    end = -1 if earlier is None or not len(earlier.events.end) else int(earlier.events.end.max())
    # the end of the earlier start by its rank 0's clock, and the present by this rank 0's clock
    last = torch.tensor([end, time.perf_counter_ns() if rank == 0 else -1])
    # one shift for all ranks: of their latest end to rank 0's present
    world.all_reduce_max(last)
    recorder.write_to(TraceWriter(path, metadata), offset_ns)
    if earlier is not None and end >= 0:
        # in this rank's own clock, as all events in its file
        recorder.continue_trace(earlier, int(last[1] - last[0]) - offset_ns, first_update)


def read_back(folder: Path | None, recorder: TraceRecorder) -> Trace | None:
    """Return this rank's trace so far, by rank 0's clock; None if there is no file."""
    recorder.flush(wait=True)
    return None if folder is None else read_store(_get_path(folder, recorder._rank))


def _get_path(folder: Path, rank: int) -> Path:
    return folder / "trace" / f"rank-{rank}{SUFFIX}"


def _read_earlier(path: Path, metadata: dict[str, Any], first_update: int) -> Trace | None:
    """Return an earlier start's trace of the updates before `first_update`; None if its stages
    differ or its file is missing or damaged."""
    try:
        earlier = read_store(path)
    except BadInput:
        return None
    # numbers of stages, replicas and batches would mean other things
    if any(
        earlier.metadata.get(key) != metadata[key] for key in ("stages", "replicas", "accumulate")
    ):
        return None
    events = earlier.events.select(
        find_updates(earlier.events, metadata["accumulate"]) < first_update
    )
    values = earlier.counters
    # counters have no update, so those up to the last kept event are kept
    chosen = values.time <= (int(events.end.max()) if len(events.end) else 0)
    counters = values._replace(
        device=values.device[chosen],
        name=values.name[chosen],
        time=values.time[chosen],
        value=values.value[chosen],
    )
    return Trace(events, counters, earlier.metadata)
