"""Columns made of lists of plain values, checked: what another program wrote may hold anything."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput
from ipu_pipe.trace.events import Counters, Events

FARTHEST_NS = 1 << 60  # of a moment, so that differences and sums of three fit


def whole_numbers(name: str, values: Sequence[Any], kind: Any) -> NDArray[Any]:
    """A column of integers. Raises ValueError for anything else."""
    found = np.array(values) if len(values) else np.zeros(0, np.int64)
    if found.dtype.kind not in "iu" or found.ndim != 1:
        wrong = next((value for value in values if not isinstance(value, int)), "too large")
        raise ValueError(f"{name}: {wrong!r}: must be a whole number")
    limits = np.iinfo(kind)
    if len(found) and not limits.min <= int(found.min()) <= int(found.max()) <= limits.max:
        raise ValueError(f"{name}: {int(np.abs(found).max())}: too large")
    return found.astype(kind)


def nanoseconds(name: str, microseconds: Sequence[Any]) -> NDArray[np.int64]:
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
