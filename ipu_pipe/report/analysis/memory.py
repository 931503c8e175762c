"""What devices held: bytes over time, and what was alive when they were most."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.report.analysis.device_time import group_places
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.trace.events import MEMORY, Counters, Events

FAR_TOO_MUCH = 2.0**60
MOST_POINTS = 400
MOST_MICROBATCHES = 64
_ENDS = (Kind.BACKWARD.word, Kind.WEIGHT_GRADIENT.word)


class DeviceMemory(NamedTuple):
    """Of a device: the greatest bytes, when (by the trace's clock), of what, and the microbatches under way then; `over_time`:
    from each time on so many bytes, thinned to the greatest of each interval."""

    device: int
    peak_bytes: int
    at_ns: int
    categories: Dict[str, int]
    microbatches: Tuple[int, ...]
    over_time: Tuple[Tuple[int, int], ...]


def measure_memory(counters: Counters, events: Events) -> List[DeviceMemory]:
    """Of each device that has counters of memory."""
    codes = [code for code, name in enumerate(counters.names) if name in MEMORY.values()]
    told = np.flatnonzero(np.isin(counters.name, codes) & (np.abs(counters.value) < FAR_TOO_MUCH))  # nor what is none
    passes = dict(group_places(events.device))
    nothing = np.zeros(0, np.intp)
    return [
        _of_device(device, counters, told[own], events.select(passes.get(device, nothing)))
        for device, own in group_places(counters.device[told])
    ]


def _of_device(device: int, counters: Counters, places: NDArray[np.intp], events: Events) -> DeviceMemory:
    order = places[np.argsort(counters.time[places], kind="stable")]
    time, name, value = counters.time[order], counters.name[order], counters.value[order]
    change = np.zeros(len(value))
    for code in np.unique(name).tolist():
        own = name == code
        change[own] = np.diff(value[own], prepend=0.0)
    total = np.cumsum(change)
    settled = np.append(time[1:] != time[:-1], True)  # of those at one time, all together
    moments, bytes_then = time[settled], np.rint(total[settled]).astype(np.int64)
    peak = int(bytes_then.argmax())
    at = int(moments[peak])
    held = {}
    for code in np.unique(name).tolist():
        own = value[(name == code) & (time <= at)]
        held[counters.names[code]] = int(own[-1]) if len(own) else 0
    held = {category: held[name] for category, name in MEMORY.items() if name in held}
    return DeviceMemory(device, int(bytes_then[peak]), at, held, _under_way(events, at), _thinned(moments, bytes_then))


def _under_way(events: Events, at: int) -> Tuple[int, ...]:
    """Microbatches that a device has begun and not ended."""
    own = events.microbatch >= 0
    begun = own & (events.start <= at) & events.is_kind(Kind.FORWARD.word)
    ended = own & (events.end <= at) & events.is_kind(*_ENDS)
    key = events.stage.astype(np.int64) << 32
    left = np.setdiff1d((key + events.microbatch)[begun], (key + events.microbatch)[ended])
    return tuple(np.unique(left & 0xFFFFFFFF)[:MOST_MICROBATCHES].tolist())


def _thinned(time: NDArray[np.int64], held: NDArray[np.int64]) -> Tuple[Tuple[int, int], ...]:
    if len(time) > MOST_POINTS:
        edges = np.linspace(0, len(time), MOST_POINTS + 1).astype(np.int64)[:-1]
        held = np.maximum.reduceat(held, edges)
        time = time[edges]
    return tuple(zip(time.tolist(), held.tolist()))
