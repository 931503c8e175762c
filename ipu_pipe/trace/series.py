"""Counters as curves: what is counted on a device over time, memory's categories together."""

from __future__ import annotations

from typing import Dict, Iterator, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.trace.events import MEMORY, Counters


class Series(NamedTuple):
    """From each of `times` on, what is counted: a curve a category of memory, or the one that has the counter's own name. Not a
    number where nothing was counted yet."""

    name: str  # "memory", or the counter's
    device: int
    times: NDArray[np.int64]  # ns, rising
    values: Dict[str, NDArray[np.float64]]


def series(counters: Counters) -> Iterator[Series]:
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
            yield Series(name, device, times, values)
