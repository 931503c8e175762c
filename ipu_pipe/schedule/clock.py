"""How long a schedule takes when passes have durations: each stage does its row in order, each pass waits for what it needs."""

from __future__ import annotations

from typing import List, Sequence, Tuple

import numpy as np

from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.table import Schedule


def simulate(
    schedule: Schedule, forward: Sequence[float], backward: Sequence[float], update: Sequence[float], link: float = 0.0
) -> float:
    """Time from the first forward to the end of the last update; durations by stage, `link` of a message."""
    P, count, batch = schedule.stages, schedule.microbatches, schedule.accumulate
    slots = {kind: schedule.slots(kind, 0, count) for kind in (Kind.FORWARD, Kind.BACKWARD)}
    actions: List[Tuple[int, int, int, int]] = []  # slot, kind (forward first within a slot), stage, microbatch
    for order, kind in enumerate((Kind.FORWARD, Kind.BACKWARD)):
        for s in range(P):
            actions += [(slot, order, s, m) for m, slot in enumerate(slots[kind][s].tolist())]
    free = np.zeros(P)
    done = np.zeros((2, P, count))
    for _, order, s, m in sorted(actions):
        needs = 0.0
        if order == 0 and s > 0:
            needs = done[0, s - 1, m] + link
        elif order == 1:
            needs = done[0, s, m] if s == P - 1 or schedule.local else done[1, s + 1, m] + link
        free[s] = max(free[s], needs) + (forward, backward)[order][s]
        done[order, s, m] = free[s]
        if order == 1 and (m + 1) % batch == 0:
            free[s] += update[s]
    return float(free.max())
