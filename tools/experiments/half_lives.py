"""Half-lives of errors over a range of curvatures, and the response of an update to a gradient
(Kosson et al. 2021, section 3.5 and Figure 3).

With curvatures from the greatest down to a kappa-th of it, the error along each direction shrinks by
its own root radius and the slowest counts: with one learning rate, the worst over the steps
[k / kappa, k] (k: rate times greatest curvature). The least such radius is the least circle that
holds all roots for some range of steps whose ends are a factor of kappa apart.
"""

from __future__ import annotations

from typing import Callable

import numpy as np

from ipu_pipe.stability.recurrences import Floats, Recurrence
from ipu_pipe.stability.roots import LoopGain, find_steps_within

# the range of 1 - radius, the gap to the unit circle: half-lives from 0.08 to 7e7 updates
LEAST_GAP = 1e-8
GREATEST_GAP = 1 - 1e-4
POINTS = 16
ROUNDS = 4


def compute_half_life(radius: Floats) -> Floats:
    """Return -ln 2 / ln radius, in updates."""
    return -np.log(2) / np.log(radius)


def find_widest_ranges(loop: LoopGain, radii: Floats) -> Floats:
    """Return for each radius the greatest condition number for which some rate keeps all roots
    inside; 0 if none does.
    """
    return np.array(
        [
            max((high / low for low, high in intervals), default=0.0)
            for intervals in find_steps_within(loop, radii)
        ]
    )


def find_least_half_life(loop: LoopGain, condition: float) -> float:
    """Return the half-life with the best rate for a condition number, to three digits.

    It is infinite if no radius up to 1 - 1e-8 contains all roots.
    """
    # bounds of 1 - radius; `low` always fits
    low = np.log(LEAST_GAP)
    high = np.log(GREATEST_GAP)
    if find_widest_ranges(loop, np.array([1 - LEAST_GAP]))[0] < condition:
        return np.inf
    for _ in range(ROUNDS):
        margins = np.linspace(low, high, POINTS)
        fits = find_widest_ranges(loop, 1 - np.exp(margins)) >= condition
        best = int(np.nonzero(fits)[0].max(initial=0))
        low = margins[best]
        high = margins[min(best + 1, POINTS - 1)]
    return float(compute_half_life(1 - np.exp(low)))


def find_least_half_lives(loop: LoopGain, conditions: Floats, points: int = 128) -> Floats:
    """Return the least half-life for many condition numbers at once, from a ladder of `points`
    radii.

    The ladder's steps make the results up to 16 % too large (with 128 points).
    """
    radii = 1 - np.geomspace(GREATEST_GAP, LEAST_GAP, points)
    widest = np.maximum.accumulate(find_widest_ranges(loop, radii))
    indices = np.searchsorted(widest, conditions)
    return np.append(compute_half_life(radii), np.inf)[indices]


def find_best_momentum(make: Callable[[float], LoopGain], condition: float) -> tuple[float, float]:
    """Return (half-life, momentum) of the best momentum in [0, 1 - 1e-6]; `make` maps a momentum to
    its loop gain.

    Of 25 momenta evenly spaced in log(1 - m) the best is taken, then three times of 7 around the
    best so far.
    """
    # of 1 - m
    log_gaps = np.linspace(0, np.log(1e-6), 25)
    half_lives = {}
    for _ in range(4):
        for log_gap in log_gaps:
            if log_gap not in half_lives:
                half_lives[log_gap] = find_least_half_life(
                    make(1 - float(np.exp(log_gap))), condition
                )
        best = min(half_lives, key=lambda value: half_lives[value])
        width = abs(log_gaps[1] - log_gaps[0])
        log_gaps = np.clip(np.linspace(best - width, best + width, 7), np.log(1e-6), 0)
    return half_lives[best], 1 - float(np.exp(best))


def compute_impulse_response(stage: Recurrence, times: int) -> Floats:
    """Return the contribution of a gradient of 1, computed at time 0, to the update at each of
    `times` times, for a step of 1.

    It arrives after the delay of the first read (Kosson et al. 2021, Figure 3).
    """
    v = 0.0
    response = []
    for t in range(times):
        g = 1.0 if t == stage.reads[0].delay else 0.0
        v = stage.momentum * v + g
        response.append(stage.velocity * v + stage.gradient * g)
    return np.array(response)
