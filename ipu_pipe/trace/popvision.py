"""Read PopVision's system trace of an IPU run (*.pvti) by Graphcore's libpva, where that is.

The file's format is Graphcore's own, so nothing else reads it. A host records tracepoints, which are
nested: ours in the channel `ipu_pipe` (updates, evaluations, checkpoints), and those of PopTorch and
PopART in theirs. Ours become events; the others are counted and summed by channel and label.

    PopTorch     |-compile-|        |--execute--|  |--execute--|
    ipu_pipe                       |--update 0--| |--update 1--| |-evaluate-|
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any, Iterator

from ipu_pipe.errors import BadInput
from ipu_pipe.files import open_file
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.trace.events import FARTHEST_NS, OUTSIDE, Counters, Event, Events, Trace, check_trace

PVTI = ".pvti"
CHANNEL = "ipu_pipe"
# device and stage of all IPUs together, as the host sees them
ALL_IPUS = 0
NO_STAGE = -1
_UPDATE = re.compile(r"update (\d{1,9})")
# the most kinds of tracepoints that are listed
MOST_LABELS = 1000


def read_pvti(path: Path) -> Trace:
    """Read a system trace. Raise `BadInput` if it cannot be read or has no tracepoint of ours."""
    try:
        # so that a missing file is told as one, with or without pva
        open_file(path).close()
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        pva = importlib.import_module("pva")
    except ImportError:
        raise BadInput(
            f"{path}: is read by Graphcore's pva, which is not installed: open it with PopVision"
        ) from None
    events: list[Event] = []
    sums: dict[tuple[str, str], list[int]] = {}
    try:
        for channel, label, start, end in _list_tracepoints(pva.openTrace(str(path))):
            counted = sums.setdefault((channel, label), [0, 0, 0])
            counted[0] += 1
            counted[1] += end - start
            counted[2] = max(counted[2], end - start)
            event = _make_event(channel, label, start, end, events[-1].version if events else 0)
            if event is not None:
                events.append(event)
    except (RuntimeError, AttributeError, ValueError, OSError) as error:
        raise BadInput(f"{path}: cannot be read by pva: {error}") from None
    if not events:
        listed = ", ".join(sorted({channel for channel, _ in sums})) or "none"
        raise BadInput(
            f"{path}: has no tracepoints of ipu_pipe, but of: {listed}: open it with PopVision"
        )
    # one label an update would hide the others
    is_ours = [key for key in sums if key[0] == CHANNEL and _UPDATE.fullmatch(key[1])]
    for key in is_ours:
        del sums[key]
    tracepoints = [
        {"channel": channel, "label": label, "count": n, "total_ns": total, "longest_ns": longest}
        for (channel, label), (n, total, longest) in sorted(
            sums.items(), key=lambda item: -item[1][1]
        )
    ]
    metadata = {"backend": "poptorch", "modelled": False, "tracepoints": tracepoints[:MOST_LABELS]}
    trace = Trace(Events.from_rows(events), Counters.from_rows([]), metadata)
    check_trace(path, *trace[:3])
    return trace


def _list_tracepoints(trace: Any) -> Iterator[tuple[str, str, int, int]]:
    """Yield channel, label, start and end (ns) of all tracepoints, outer ones before inner ones."""
    for process in trace.processes:
        for thread in process.threads:
            # reversed, because the next one is taken from the end
            waiting = [*thread.events][::-1]
            while waiting:
                event = waiting.pop()
                waiting += [*event.children()][::-1]
                # microseconds
                start, length = (
                    round(float(value) * 1000) for value in (event.timestamp, event.duration)
                )
                if not abs(start) < FARTHEST_NS or not 0 <= length < FARTHEST_NS:
                    raise ValueError(f"a tracepoint {event.label!r} has no usable time")
                yield str(event.channel), str(event.label), start, start + length


def _make_event(channel: str, label: str, start: int, end: int, version: int) -> Event | None:
    """Return the event of a tracepoint of ours; None for any other one. `version`: of the weights
    before it.
    """
    if channel != CHANNEL:
        return None
    update = _UPDATE.fullmatch(label)
    if update is not None:
        k = int(update.group(1))
        return Event(NO_STAGE, ALL_IPUS, Kind.UPDATE.word, k, start, end, k + 1, None)
    if label in OUTSIDE:
        return Event(NO_STAGE, ALL_IPUS, label, -1, start, end, version, None)
    return None
