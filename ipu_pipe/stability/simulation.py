"""The recurrences carried out, one update after another as their rules say: what their equations are checked against."""

from __future__ import annotations

from typing import Optional

import numpy as np
from numpy.typing import ArrayLike

from ipu_pipe.stability.loops import Floats
from ipu_pipe.stability.recurrences import Read, Recurrence


def simulate(
    *stages: Recurrence, steps: ArrayLike, updates: int, start: float = 1.0, noise: Optional[Floats] = None
) -> Floats:
    """w after each update, shape (updates + 1, *steps.shape): of one recurrence, or of stages that share a direction the sum
    of theirs.

    Everything is at rest at `start` before the first update. `noise` (updates, ...): eta, which gradients are less by.
    Overflows are told by infinities and not-a-numbers.
    """
    step = np.asarray(steps, np.float64)
    weights = [[np.full(step.shape, start * one.share)] for one in stages]
    velocities = [[np.zeros(step.shape)] for _ in stages]
    deltas = [[np.zeros(step.shape)] for _ in stages]

    def seen(stage: int, read: Read, t: int) -> Floats:
        w, own = weights[stage], stages[stage]
        at = max(t - read.delay, 0)
        if read.horizon and read.by_velocity:
            return w[at] - step * own.rate * read.horizon * velocities[stage][at]
        if read.horizon:
            return w[at] + read.horizon * (w[at] - w[max(at - 1, 0)])
        return w[at] - read.correction * deltas[stage][at]

    with np.errstate(over="ignore", invalid="ignore"):
        for t in range(updates):
            whole = np.zeros(step.shape)
            for stage, one in enumerate(stages):
                for read in one.reads:
                    whole = whole + read.sensitivity * seen(stage, read, t)
            if noise is not None:
                whole = whole - noise[t]
            for stage, one in enumerate(stages):
                g = one.share * whole
                v = one.momentum * velocities[stage][t] + g
                w = weights[stage][t] - step * one.rate * (one.velocity * v + one.gradient * g)
                delta = one.decay * deltas[stage][t] + (1 - one.decay) * (w - weights[stage][t])
                velocities[stage].append(v)
                weights[stage].append(w)
                deltas[stage].append(delta)
        return np.sum([np.stack(w) for w in weights], axis=0)


def growth(path: Floats, window: int) -> Floats:
    """The factor an update by which a simulated w grew at the end, over the last two windows: its root radius, nearly.

    path: (updates + 1, ...). Infinite where it overflowed, 0 where it vanished.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        last, before = (np.abs(path[-window:]).max(axis=0), np.abs(path[-2 * window : -window]).max(axis=0))
        factor = (last / before) ** (1 / window)
    return np.where(np.isfinite(last), np.where(before > 0, factor, 0.0), np.inf)


def impulse_response(one: Recurrence, times: int) -> Floats:
    """What a gradient of 1, computed at time 0, adds to the update at each of `times` times, for a step of 1
    (Kosson et al. 2021, Figure 3). It arrives after the delay of the recurrence's first read."""
    v, response = 0.0, []
    for t in range(times):
        g = 1.0 if t == one.reads[0].delay else 0.0
        v = one.momentum * v + g
        response.append(one.velocity * v + one.gradient * g)
    return np.array(response)
