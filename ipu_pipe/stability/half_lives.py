"""How fast errors shrink: half-lives, in updates, over a whole range of curvatures.

With curvatures of all sizes from the greatest down to a kappa-th of it, the error along each goes by its own root radius,
and the slowest counts: with one rate for all, the worst over the steps [k / kappa, k] (k: rate times the greatest
curvature). The least such radius is the least circle that holds all roots for some range of steps whose ends are kappa
apart, which `ipu_pipe.stability.roots.steps_within` tells for any circle (Kosson et al. 2021, section 3.5).
"""

from __future__ import annotations

from typing import Callable, Tuple

import numpy as np

from ipu_pipe.stability.loops import Floats, Loop
from ipu_pipe.stability.roots import steps_within

LEAST, MOST = 1e-8, 1 - 1e-4  # 1 - radius: half-lives from 0.08 to 7e7 updates
POINTS, ROUNDS = 16, 4


def half_life(radius: Floats) -> Floats:
    """-ln 2 / ln radius, in updates."""
    return -np.log(2) / np.log(radius)


def widest_ranges(loop: Loop, radii: Floats) -> Floats:
    """For each radius the greatest condition number for which some rate keeps all roots inside; 0 where no step does."""
    return np.array([max((high / low for low, high in found), default=0.0) for found in steps_within(loop, radii)])


def least_half_life(loop: Loop, condition: float) -> float:
    """With the best rate, for a condition number; infinity where no radius up to 1 - 1e-8 will do. To three digits."""
    low, high = np.log(LEAST), np.log(MOST)  # of 1 - radius; `low` will do
    if widest_ranges(loop, np.array([1 - LEAST]))[0] < condition:
        return np.inf
    for _ in range(ROUNDS):
        margins = np.linspace(low, high, POINTS)
        fits = widest_ranges(loop, 1 - np.exp(margins)) >= condition
        best = int(np.nonzero(fits)[0].max(initial=0))
        low, high = margins[best], margins[min(best + 1, POINTS - 1)]
    return float(half_life(1 - np.exp(low)))


def least_half_lives(loop: Loop, conditions: Floats, points: int = 128) -> Floats:
    """As `least_half_life`, for many condition numbers at once: from radii that lie `points` between the extremes, and so
    above the least by up to 16 % (with 128)."""
    radii = 1 - np.geomspace(MOST, LEAST, points)
    widest = np.maximum.accumulate(widest_ranges(loop, radii))
    places = np.searchsorted(widest, conditions)
    return np.append(half_life(radii), np.inf)[places]


def best_momentum(make: Callable[[float], Loop], condition: float) -> Tuple[float, float]:
    """(half-life, momentum) of the momentum in [0, 1 - 1e-6] that has the least half-life: of 25 that lie evenly in log(1 -
    m), then twice of 7 around the best. `make(momentum)` -> the loop."""
    rest = np.linspace(0, np.log(1e-6), 25)  # of 1 - m
    tried = {}
    for _ in range(4):
        for value in rest:
            if value not in tried:
                tried[value] = least_half_life(make(1 - float(np.exp(value))), condition)
        best = min(tried, key=lambda value: tried[value])
        width = abs(rest[1] - rest[0])
        rest = np.clip(np.linspace(best - width, best + width, 7), np.log(1e-6), 0)
    return tried[best], 1 - float(np.exp(best))
