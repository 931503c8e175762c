"""The characteristic equation of a recurrence, 1 + step L(z) = 0: root radii and stable steps.

Solutions grow as z^t, so a step is stable if all roots lie inside the unit circle. With W and V the
transforms of w and v, v_{t+1} = z V = z G / (z - m) and delta = (1 - gamma) (z - 1) / (z - gamma)
W, so that each read adds to the loop gain L, times the share and the rate of its stage,

    sensitivity z^-D (a z + b (z - m)) / ((z - 1) (z - m))       for a plain read
      the same times 1 + T (1 - 1/z)                             predicted from the last update
      the same times 1 - n (1 - gamma) (z - 1) / (z - gamma)     corrected by delta
      the plain term, and sensitivity z^-D T / (z - m)           predicted from the velocity

The step is a factor of L. Multiplied by the denominators the equation is the papers' characteristic
polynomial, fixed(z) + step per_step(z).

Roots move with the step, and enter or leave the circle |z| = r only where 1 + step L(z) = 0 on it:
where L is real and negative. As z moves along the upper half of the circle, each point where the
imaginary part of L changes sign is such a crossing, at the step -1 / L. From negative to positive a
pair of roots leaves the circle as the step grows through that value, otherwise a pair comes back.
(At the ends, z = r and z = -r, it is a single root.) Counting from the roots of step 0 gives the
number of roots outside for every step. So the stable steps are exact, to rounding, without a search
and also where stability is not monotone. Only two crossings between neighbouring grid angles are
missed; the grid has 16 angles in each half turn of z^delay and 30 a decade towards z = 1.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Iterator, NamedTuple, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.stability.recurrences import DelayedRead, Floats, Recurrence

Complexes = NDArray[np.complex128]
Interval = Tuple[float, float]
# bisections of an angle's bracket, which is a few hundredths of the angle wide
HALVINGS = 48


class Term(NamedTuple):
    """The fraction numerator(z) z^-delay / product of (z - pole); coefficients from the highest
    power down.
    """

    numerator: tuple[float, ...]
    delay: int
    poles: tuple[float, ...]


@dataclass(frozen=True)
class LoopGain:
    """L(z), as a sum of terms."""

    terms: tuple[Term, ...]

    @property
    def poles(self) -> tuple[float, ...]:
        """All poles, each with its highest multiplicity in a term. They are the roots for step 0,
        except roots at z = 0.
        """
        multiplicities: Counter[float] = Counter()
        for term in self.terms:
            # the union of two Counters takes the greater count of each pole
            multiplicities |= Counter(term.poles)
        return tuple(multiplicities.elements())

    @property
    def delay(self) -> int:
        """The longest delay of a term."""
        return max(term.delay for term in self.terms)

    def evaluate(self, radius: Floats, angle: Floats) -> Complexes:
        """Return L at z = radius e^(i angle).

        It is computed from z - 1 without cancellation, because for long delays all crossings are
        close to z = 1.
        """
        radius, angle = np.broadcast_arrays(radius, angle)
        # cos(angle) - 1 = -2 sin(angle / 2)^2, which does not cancel near 0
        half = np.sin(angle / 2)
        z_minus_one = radius - 1 - 2 * radius * half * half + 1j * radius * np.sin(angle)
        total = np.zeros(angle.shape, np.complex128)
        logs = np.log(radius)
        for term in self.terms:
            value = np.polyval(term.numerator, 1 + z_minus_one) * np.exp(
                -term.delay * (logs + 1j * angle)
            )
            for pole in term.poles:
                value = value / (z_minus_one + (1 - pole))
            total += value
        return total

    def expand_polynomial(self) -> tuple[Floats, Floats]:
        """Return (fixed, per_step): coefficients from the highest power down, of equal length,
        without common roots at 0.
        """
        poles = Counter(self.poles)
        longest = self.delay
        # times z^longest, which makes all delays powers of z
        fixed = np.append(np.poly(sorted(poles.elements())), np.zeros(longest))
        per_step = np.zeros_like(fixed)
        for term in self.terms:
            missing = np.poly(sorted((poles - Counter(term.poles)).elements()))
            expanded = np.append(
                np.polymul(term.numerator, missing), np.zeros(longest - term.delay)
            )
            per_step[len(per_step) - len(expanded) :] += expanded
        # roots at 0 are stable for every step
        while fixed[-1] == per_step[-1] == 0:
            fixed = fixed[:-1]
            per_step = per_step[:-1]
        return fixed, per_step


def derive_loop_gain(*stages: Recurrence) -> LoopGain:
    """Return L of a recurrence, or of the stages that share a direction; terms of equal form and
    delay are added up.
    """
    size_by_term: Counter[tuple[tuple[float, ...], int, tuple[float, ...]]] = Counter()
    for stage in stages:
        for read in stage.reads:
            for size, term in _derive_terms(stage, read):
                size_by_term[term] += size * stage.share * stage.rate * read.sensitivity  # type: ignore[assignment]
    terms = [
        Term(tuple(size * c for c in form), delay, poles)
        for (form, delay, poles), size in size_by_term.items()
    ]
    return LoopGain(tuple(term for term in terms if any(term.numerator)))


def _derive_terms(stage: Recurrence, read: DelayedRead) -> Iterator[tuple[float, Term]]:
    """Yield (factor, term) for each term that a read of sensitivity 1 adds to L."""
    m = stage.momentum
    horizon = read.horizon
    n = read.correction
    step = (stage.velocity + stage.gradient, -stage.gradient * m)  # a z + b (z - m)
    if horizon and not read.by_velocity:
        predicted = tuple(np.polymul(step, (1 + horizon, -horizon)).tolist())
        yield 1.0, Term(predicted, read.delay + 1, (1.0, m))
    else:
        yield 1.0, Term(step, read.delay, (1.0, m))
    if horizon and read.by_velocity:
        yield horizon, Term((1.0,), read.delay, (m,))
    if n:
        age = read.delay if read.delta_age is None else read.delta_age
        yield -n * (1 - stage.decay), Term(step, age, (m, stage.decay))


# ---- stable steps


def compute_root_radius(loop: LoopGain, steps: Floats) -> Floats:
    """Return the greatest magnitude of a root for each step, shape as `steps`: below 1 is stable.

    The roots are the eigenvalues of the companion matrix.
    """
    steps = np.asarray(steps, np.float64)
    fixed, per_step = loop.expand_polynomial()
    coefficients = fixed + steps.reshape(-1, 1) * per_step  # (n, degree + 1); the first column is 1
    degree = len(fixed) - 1
    companion = np.zeros((len(coefficients), degree, degree))
    companion[:, 0] = -coefficients[:, 1:]
    companion[:, np.arange(1, degree), np.arange(degree - 1)] = 1
    return np.asarray(np.abs(np.linalg.eigvals(companion)).max(axis=1).reshape(steps.shape))


def find_stable_steps(loop: LoopGain) -> list[Interval]:
    """Return all stable steps above 0, as open intervals in order."""
    return find_steps_within(loop, np.ones(1))[0]


def find_largest_stable_step(loop: LoopGain) -> float:
    """Return the end of the stable interval that begins at 0; 0 if small steps are unstable,
    infinity if all are stable.

    Steps beyond a gap do not count: a flatter direction sees a smaller step, which must be stable
    as well.
    """
    intervals = find_stable_steps(loop)
    return intervals[0][1] if intervals and intervals[0][0] == 0 else 0.0


def find_steps_within(loop: LoopGain, radii: Floats) -> list[list[Interval]]:
    """Return for each radius the steps above 0, as open intervals in order, for which all roots lie
    inside its circle.
    """
    angles = _make_angles(loop.delay)
    imaginary = loop.evaluate(radii[:, None], angles).imag
    rows, steps, changes = _find_crossings(loop, radii, angles, imaginary)
    intervals_by_radius = []
    for row, radius in enumerate(radii):
        is_here = rows == row
        order = np.argsort(steps[is_here], kind="stable")
        edges = [0.0, *steps[is_here][order].tolist(), np.inf]
        at_zero = _count_outside_at_zero(loop, float(radius), imaginary[row, 0])
        outside = at_zero + np.cumsum(np.append(0, changes[is_here][order]))
        intervals_by_radius.append(
            _merge_touching(
                [(a, b) for a, b, n in zip(edges, edges[1:], outside) if n == 0 and b > a]
            )
        )
    return intervals_by_radius


def _make_angles(delay: int) -> Floats:
    towards_one = np.geomspace(1e-9, 1, 271)  # 30 a decade
    return np.unique(
        # 0 and pi are looked at apart: there a single root crosses
        np.concatenate([towards_one, np.linspace(0, np.pi, 16 * (delay + 4) + 1)[1:-1]])
    )


def _count_outside_at_zero(loop: LoopGain, radius: float, imaginary: float) -> int:
    """Count the roots outside the circle for a step just above 0.

    They start at the poles. The pole at 1 is on the unit circle: `imaginary`, of L at the first
    angle, says which way its root moves.
    """
    return sum(abs(p) > radius or (p == radius and imaginary > 0) for p in loop.poles)


def _find_crossings(
    loop: LoopGain, radii: Floats, angles: Floats, imaginary: Floats
) -> tuple[NDArray[np.intp], Floats, NDArray[np.int64]]:
    """Return (row, step, change of the number of roots outside) of each crossing at a step above
    0.
    """
    above = imaginary > 0
    rows, indices = np.nonzero(above[:, 1:] != above[:, :-1])
    low = angles[indices]
    high = angles[indices + 1]
    radius = radii[rows]
    was_above = above[rows, indices]
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        is_below = (loop.evaluate(radius, middle).imag > 0) == was_above
        low = np.where(is_below, middle, low)
        high = np.where(is_below, high, middle)
    gains = [loop.evaluate(radius, (low + high) / 2).real]
    # in pairs: with each root its conjugate crosses on the lower half
    changes = [np.where(was_above, -2, 2)]
    every = np.arange(len(radii))
    for angle, leaves in ((0.0, above[:, 0]), (np.pi, ~above[:, -1])):
        with np.errstate(divide="ignore", invalid="ignore"):
            gain = loop.evaluate(radii, np.full(len(radii), angle)).real
        # no root crosses at a pole
        gains.append(np.where(np.isfinite(gain), gain, 1.0))
        changes.append(np.where(leaves, 1, -1))
    rows = np.concatenate([rows, every, every])
    gain = np.concatenate(gains)
    change = np.concatenate(changes)
    # a step above 0 needs a negative L
    real = gain < 0
    return rows[real], -1 / gain[real], change[real]


def _merge_touching(intervals: list[Interval]) -> list[Interval]:
    """Merge intervals that touch: no root crosses between them."""
    joined: list[Interval] = []
    for low, high in intervals:
        if joined and joined[-1][1] == low:
            joined[-1] = (joined[-1][0], high)
        else:
            joined.append((low, high))
    return joined
