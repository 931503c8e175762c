"""The characteristic equation of a recurrence, 1 + step L(z) = 0: solutions go as z^t, so that all its roots must lie inside
the unit circle.

With W and V the transforms of w and v, v_{t+1} = z V = z G / (z - m) and delta = (1 - gamma) (z - 1) / (z - gamma) W, so that
each read adds to L, times the share and the rate of its stage,

    sensitivity z^-D (a z + b (z - m)) / ((z - 1) (z - m))       for what it reads as it is
      the same times 1 + T (1 - 1/z)                             predicted by the last step
      the same times 1 - n (1 - gamma) (z - 1) / (z - gamma)     corrected by delta
      as it is, and sensitivity z^-D T / (z - m)                 predicted by the velocity

The step appears once, as a factor: multiplied by the denominators this is the papers' characteristic polynomial, fixed(z) +
step per_step(z).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Iterator, NamedTuple, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.stability.recurrences import Read, Recurrence

Floats = NDArray[np.float64]
Complexes = NDArray[np.complex128]


class Term(NamedTuple):
    """numerator(z) z^-delay / product of (z - pole); coefficients from the highest power down."""

    numerator: Tuple[float, ...]
    delay: int
    poles: Tuple[float, ...]


@dataclass(frozen=True)
class Loop:
    """L as a sum of terms."""

    terms: Tuple[Term, ...]

    @property
    def poles(self) -> Tuple[float, ...]:
        """Of all terms together, each as often as in the term that has it most often: the roots for a step of 0, but for z =
        0."""
        together: Counter[float] = Counter()
        for term in self.terms:
            together |= Counter(term.poles)
        return tuple(together.elements())

    @property
    def delay(self) -> int:
        """The longest."""
        return max(term.delay for term in self.terms)

    def gain(self, radius: Floats, angle: Floats) -> Complexes:
        """L at radius e^(i angle); z - 1, in which everything happens for long delays, without cancellation."""
        radius, angle = np.broadcast_arrays(radius, angle)
        half = np.sin(angle / 2)
        less_one = radius - 1 - 2 * radius * half * half + 1j * radius * np.sin(angle)  # z - 1
        total = np.zeros(angle.shape, np.complex128)
        logs = np.log(radius)
        for term in self.terms:
            value = np.polyval(term.numerator, 1 + less_one) * np.exp(-term.delay * (logs + 1j * angle))
            for pole in term.poles:
                value = value / (less_one + (1 - pole))
            total += value
        return total

    def polynomial(self) -> Tuple[Floats, Floats]:
        """(fixed, per_step), coefficients from the highest power down, of equal length; without roots at 0 that both have."""
        poles, longest = Counter(self.poles), self.delay
        fixed = np.append(np.poly(sorted(poles.elements())), np.zeros(longest))
        per_step = np.zeros_like(fixed)
        for term in self.terms:
            missing = np.poly(sorted((poles - Counter(term.poles)).elements()))
            own = np.append(np.polymul(term.numerator, missing), np.zeros(longest - term.delay))
            per_step[len(per_step) - len(own) :] += own
        while fixed[-1] == per_step[-1] == 0:
            fixed, per_step = fixed[:-1], per_step[:-1]
        return fixed, per_step


def loop_of(*recurrences: Recurrence) -> Loop:
    """L of a recurrence, or of the stages that share a direction. Terms of one form and delay are one."""
    together: Counter[Tuple[Tuple[float, ...], int, Tuple[float, ...]]] = Counter()
    for one in recurrences:
        for read in one.reads:
            for size, term in _terms(one, read):
                together[term] += size * one.share * one.rate * read.sensitivity  # type: ignore[assignment]
    terms = [Term(tuple(size * c for c in form), delay, poles) for (form, delay, poles), size in together.items()]
    return Loop(tuple(term for term in terms if any(term.numerator)))


def _terms(one: Recurrence, read: Read) -> Iterator[Tuple[float, Term]]:
    """What a read of sensitivity 1 adds, as (factor, term)."""
    m, horizon, n = one.momentum, read.horizon, read.correction
    step = (one.velocity + one.gradient, -one.gradient * m)  # a z + b (z - m)
    if horizon and not read.by_velocity:
        both = tuple(np.polymul(step, (1 + horizon, -horizon)).tolist())
        yield 1.0, Term(both, read.delay + 1, (1.0, m))
    else:
        yield 1.0, Term(step, read.delay, (1.0, m))
    if horizon and read.by_velocity:
        yield horizon, Term((1.0,), read.delay, (m,))
    if n:
        yield -n * (1 - one.decay), Term(step, read.delay, (m, one.decay))
