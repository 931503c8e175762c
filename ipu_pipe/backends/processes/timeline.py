"""What one rank did and when, by its clock: events of the updates that are recorded, totals of the steps that are timed.

    | wait | recv | forward | send |    | wait | recv | backward | send |  ...
                                     rest: the host's own time between two events, which do not overlap

A mark is a moment of that clock. On the host it is nanoseconds; on a GPU an event on its stream, since the host only asks for
work there and goes on: such marks are read when the GPU has passed them (`streams`).
"""

from __future__ import annotations

import functools
import time
from collections import deque
from typing import Any, Deque, Dict, List, Optional, Tuple, cast

import numpy as np

from ipu_pipe.backends.interface import DeviceTimes
from ipu_pipe.backends.processes.layout import Layout
from ipu_pipe.backends.processes.streams import StreamClock
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
)
from ipu_pipe.trace.store import TraceWriter

Row = Tuple[int, int, int, int, int, int, int, int]  # kind, microbatch, start, end, version, bytes, peer, carries
ROWS = 4096  # events that are written at once
SECONDS = 1.0  # after which they are written though they are fewer: what a killed run may lose

# place in the totals: 0 busy, 1 waiting, 2 communication, None: not of a step
_TOTAL: Dict[str, Optional[int]] = dict.fromkeys(KIND_CODE, 0)
_TOTAL.update({WAIT: 1, **dict.fromkeys(COMMUNICATION, 2), **dict.fromkeys(OUTSIDE)})


class _Kept:
    """Events and counters of a rank that are not written yet: where there is no file, all."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self.out, self._written = layout, cast(Optional[TraceWriter], None), time.monotonic()
        self._rows: List[Row] = []
        self._counters: List[Counter] = []
        self.add = self._rows.append

    def count(self, name: str, value: float, now: int, _: int = 0) -> None:
        """A value from `now` on."""
        self._counters.append(Counter(self._layout.rank, name, now, value))

    @property
    def is_due(self) -> bool:
        """Whether it is time to write."""
        return len(self._rows) >= ROWS or time.monotonic() - self._written > SECONDS

    def columns(self) -> Events:
        """The events."""
        names = [name for name in EVENT_TYPES if name not in ("stage", "device")]
        table = np.array(self._rows, np.int64).reshape(len(self._rows), len(names)).T
        place = {"stage": self._layout.stage, "device": self._layout.rank}
        return Events.from_columns(len(self._rows), **place, **dict(zip(names, table)))

    def write(self) -> None:
        """All, if there is a file."""
        self._written = time.monotonic()
        if self.out is not None:
            if self._rows:
                self.out.write_events(self.columns())
            self.out.write_counters(Counters.from_rows(self._counters))
            self._rows.clear()
            self._counters.clear()
            self.out.flush()


class Timeline:
    """Of the rank at `layout`. `traced`: the updates that are recorded, here until there is a file; `stream`: a GPU's clock;
    `update`: that at which the rank works."""

    def __init__(self, layout: Layout, traced: range, stream: Optional[StreamClock] = None) -> None:
        self._layout, self._traced, self._stream = layout, traced, stream
        self._kept = _Kept(layout)
        self._unread: Deque[Tuple[Any, Any, Any]] = deque()  # of a GPU: two marks, and what is done when they are read
        self._totals, self._span = [0, 0, 0], 0
        self.update = 0
        self._begun: Any = 0  # mark of the step
        self._stopped: Optional[Any] = None  # mark at which recording stopped
        self.is_recording, self.is_timed = False, False
        self.sent: Dict[int, Tuple[int, int]] = {}  # stage -> bytes, messages of activations and their gradients
        self.shared: Dict[int, Tuple[int, int]] = {}  # and of the gradients of shared layers
        self.mark = time.perf_counter_ns if stream is None else stream.mark

    def at(self, update: int) -> None:
        """From now on the rank works at `update`: what it does until the next one is recorded or not."""
        self.update, before, now = update, self.is_recording, update in self._traced
        self.is_recording = now
        if before and not now:
            self._stopped = self.mark()
        elif now and not before and self._stopped is not None:
            self.add("pause", -1, self._stopped, version=update)
        if before and (not now or self._kept.is_due):
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
        """Something that began at the mark `start` and ends now, of microbatch (or update) `index`; the mark of its end."""
        end = self.mark()
        if self._stream is None:  # as `_keep`, without the call
            if self.is_timed:
                total = _TOTAL[kind]
                if total is not None:
                    self._totals[total] += end - start
            if self.is_recording:
                self._kept.add((KIND_CODE[kind], index, start, end, version, size, peer, PAYLOAD_CODE[carries]))
        else:
            about = (self.is_recording, self.is_timed, kind, (index, version, size, peer, carries))
            self._unread.append((start, end, functools.partial(self._keep, *about)))
        return end

    def _keep(
        self, recorded: bool, timed: bool, kind: str, about: Tuple[int, int, int, int, str], start: int, end: int
    ) -> None:
        if timed:
            total = _TOTAL[kind]
            if total is not None:
                self._totals[total] += end - start
        if recorded:
            index, version, size, peer, carries = about
            self._kept.add((KIND_CODE[kind], index, start, end, version, size, peer, PAYLOAD_CODE[carries]))

    def count(self, name: str, value: float, moment: Any) -> None:
        """A value from the mark `moment` on, where it is recorded."""
        if not self.is_recording:
            return
        if self._stream is None:
            self._kept.count(name, value, moment)
        else:
            self._unread.append((moment, moment, functools.partial(self._kept.count, name, value)))

    def count_message(self, stage: int, is_shared: bool, size: int) -> None:
        """A message sent to `stage`; `is_shared`: with gradients of a shared layer."""
        counted = self.shared if is_shared else self.sent
        total, messages = counted.get(stage, (0, 0))
        counted[stage] = (total + size, messages + 1)

    def begin_step(self, is_timed: bool) -> None:
        """A step of the run begins; `is_timed`: it counts for throughput, and in the totals."""
        self.is_timed, self._begun = is_timed, self.mark()

    def end_step(self) -> None:
        """It ends."""
        if self.is_timed:
            if self._stream is None:
                self._add_span(self._begun, self.mark())
            else:
                self._unread.append((self._begun, self.mark(), self._add_span))
        self.is_timed = False

    def _add_span(self, start: int, end: int) -> None:
        self._span += end - start

    @property
    def times(self) -> DeviceTimes:
        """How the rank spent the steps that were timed."""
        self._read(wait=True)
        return DeviceTimes(self._totals[0], self._totals[1], self._totals[2], self._span)

    def events(self) -> Events:
        """Those that are kept here."""
        self._read(wait=True)
        return self._kept.columns()

    def _read(self, wait: bool) -> None:
        """Take what a GPU has passed; `wait` for all of it."""
        if self._stream is None or not self._unread:
            return
        for start, end, keep in self._stream.passed(self._unread, wait):
            keep(start, end)

    def write_to(self, out: TraceWriter, offset_ns: int) -> None:
        """From now on there is a file; `offset_ns`: as `synchronize` takes it."""
        self._kept.out = out
        out.synchronize(time.perf_counter_ns(), offset_ns)

    def take_up(self, earlier: Trace, shift_ns: int, update: int) -> None:
        """Write first what an earlier start did, `shift_ns` later; a pause from its end to now."""
        out = self._kept.out
        assert out is not None
        events, values = earlier.events, earlier.counters
        events = events._replace(start=events.start + shift_ns, end=events.end + shift_ns)
        out.write_events(events)
        out.write_counters(values._replace(time=values.time + shift_ns))
        end = int(events.end.max())
        if self.is_recording:
            self._keep(True, False, "pause", (-1, update, -1, -1, ""), end, time.perf_counter_ns())
        elif self._stream is None:
            self._stopped = end

    def synchronize(self, offset_ns: int) -> None:
        """With nothing going on: what to add to this rank's clock now to get rank 0's."""
        self._read(wait=True)
        if self._stream is not None:
            self._stream.anchor()
        if self._kept.out is not None:
            self._kept.out.synchronize(time.perf_counter_ns(), offset_ns)

    def flush(self, wait: bool = False) -> None:
        """Write what is kept, if there is a file; of a GPU's what it has passed."""
        self._read(wait)
        self._kept.write()

    def close(self) -> None:
        """Write all, and end the file."""
        self.flush(wait=True)
        if self._kept.out is not None:
            self._kept.out.close()
