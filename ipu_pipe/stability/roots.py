"""Root radii, and the steps for which all roots lie inside a circle.

Roots move with the step, and enter or leave the circle |z| = r only where 1 + step L(z) = 0 on it: where L is real and below
zero. As z goes round the upper half of the circle, each place where the imaginary part of L changes its sign is such a
crossing, of the step -1 / L; if it goes from below to above, a pair of roots leaves the circle as the step grows through
that value, else one comes back in. (At the ends, z = r and z = -r, it is a single root.) Counting from the roots for a step
of 0 one knows for every step how many lie outside. So the steps are exact, to rounding, without a search and also where
stability is not monotone; what is not seen are two crossings between neighbouring points of the grid of angles, 16 in each
half turn of z^delay and 30 a decade towards z = 1.
"""

from __future__ import annotations

from typing import List, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.stability.loops import Floats, Loop

Interval = Tuple[float, float]
HALVINGS = 48  # of an angle's bracket, a few hundredths of the angle wide


def root_radius(loop: Loop, steps: Floats) -> Floats:
    """The greatest magnitude of a root for each step, shape as `steps`: below 1 stable. By the companion matrix's
    eigenvalues."""
    steps = np.asarray(steps, np.float64)
    fixed, per_step = loop.polynomial()
    coefficients = fixed + steps.reshape(-1, 1) * per_step  # (n, degree + 1); the first is 1
    degree = len(fixed) - 1
    companion = np.zeros((len(coefficients), degree, degree))
    companion[:, 0] = -coefficients[:, 1:] / coefficients[:, :1]
    companion[:, np.arange(1, degree), np.arange(degree - 1)] = 1
    return np.asarray(np.abs(np.linalg.eigvals(companion)).max(axis=1).reshape(steps.shape))


def stable_steps(loop: Loop) -> List[Interval]:
    """All stable steps above 0, as open intervals in order."""
    return steps_within(loop, np.ones(1))[0]


def largest_stable_step(loop: Loop) -> float:
    """The end of the stable steps that begin at 0: with curvatures of all sizes up to the greatest, smaller steps stand for
    smaller curvatures, so that these must be stable, too. 0 where small steps are not; infinity where all are."""
    found = stable_steps(loop)
    return found[0][1] if found and found[0][0] == 0 else 0.0


def steps_within(loop: Loop, radii: Floats) -> List[List[Interval]]:
    """For each radius the steps above 0, as open intervals in order, for which all roots lie inside its circle."""
    angles = _angles(loop.delay)
    side = loop.gain(radii[:, None], angles).imag
    rows, steps, changes = _crossings(loop, radii, angles, side)
    found = []
    for row, radius in enumerate(radii):
        own = rows == row
        order = np.argsort(steps[own], kind="stable")
        marks = [0.0, *steps[own][order].tolist(), np.inf]
        outside = _outside_at_first(loop, float(radius), side[row, 0]) + np.cumsum(np.append(0, changes[own][order]))
        found.append(_joined([(a, b) for a, b, n in zip(marks, marks[1:], outside) if n == 0 and b > a]))
    return found


def _angles(delay: int) -> Floats:
    towards_one = np.geomspace(1e-9, 1, 271)
    return np.unique(np.concatenate([towards_one, np.linspace(0, np.pi, 16 * (delay + 4) + 1)[1:-1]]))


def _outside_at_first(loop: Loop, radius: float, side: float) -> int:
    """How many roots lie outside for a step just above 0: the poles, that at 1 on the unit circle by which way it leaves."""
    return sum(abs(p) > radius or (p == radius and side > 0) for p in loop.poles)


def _crossings(
    loop: Loop, radii: Floats, angles: Floats, side: Floats
) -> Tuple[NDArray[np.intp], Floats, NDArray[np.int64]]:
    """(row, step, change of the number of roots outside) of each crossing at a step above 0."""
    above = side > 0
    rows, places = np.nonzero(above[:, 1:] != above[:, :-1])
    low, high, radius, was = angles[places], angles[places + 1], radii[rows], above[rows, places]
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        same = (loop.gain(radius, middle).imag > 0) == was
        low, high = np.where(same, middle, low), np.where(same, high, middle)
    gains = [loop.gain(radius, (low + high) / 2).real]
    changes = [np.where(was, -2, 2)]
    every = np.arange(len(radii))
    for angle, leaves in ((0.0, above[:, 0]), (np.pi, ~above[:, -1])):
        with np.errstate(divide="ignore", invalid="ignore"):
            at = loop.gain(radii, np.full(len(radii), angle)).real
        gains.append(np.where(np.isfinite(at), at, 1.0))  # at a pole no root crosses
        changes.append(np.where(leaves, 1, -1))
    rows, gain, change = np.concatenate([rows, every, every]), np.concatenate(gains), np.concatenate(changes)
    real = gain < 0
    return rows[real], -1 / gain[real], change[real]


def _joined(intervals: List[Interval]) -> List[Interval]:
    """Intervals that touch are one: nothing has crossed between them."""
    found: List[Interval] = []
    for low, high in intervals:
        if found and found[-1][1] == low:
            found[-1] = (found[-1][0], high)
        else:
            found.append((low, high))
    return found
