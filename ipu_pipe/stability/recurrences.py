"""Gradient descent with stale weights on a quadratic, as a record of numbers. The rules of the
papers are such records.

Along one direction of a loss, of curvature h, one update is

    g      = sum over the reads of sensitivity * (the weight that the read sees)      (the sensitivities add up to h)
    v     <- m v + g
    w     <- w - step (a v + b g)
    delta <- gamma delta + (1 - gamma) (w_{t+1} - w_t)

A read with a delay of D updates sees, all taken at t - D, one of

    w        w + T (w_t - w_{t-1})        w - step T v        w - n delta

When a direction is spread over several stages, each stage has its own record and a `share` of the
direction (the shares add up to 1). The reads of all stages make one gradient; each stage gets its
share of it and steps by `rate` times the step.

Sources: PipeMare (Yang et al. 2021), section 3 and appendices B and D; Kosson et al. 2021, sections
3.2 to 3.5 and appendix D.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


class DelayedRead(NamedTuple):
    """One read of the weight, `delay` updates old, that enters the gradient `sensitivity` times.

    The weight is predicted over `horizon` updates (from the velocity if `by_velocity`, else from
    the last update), or corrected by `correction` times delta. `delta_age`: how many updates old
    delta is, None for `delay`.
    """

    sensitivity: float
    delay: int
    horizon: float = 0.0
    by_velocity: bool = False
    correction: float = 0.0
    delta_age: int | None = None


class Recurrence(NamedTuple):
    """The updates of one stage along one direction. The module docstring defines the letters."""

    reads: tuple[DelayedRead, ...]
    momentum: float = 0.0  # m
    velocity: float = 1.0  # a
    gradient: float = 0.0  # b
    decay: float = 0.0  # gamma
    share: float = 1.0
    rate: float = 1.0


def compute_spike_coefficients(momentum: float, delay: float) -> tuple[float, float]:
    """Return (a, b) of spike compensation SC_D: m^D and (1 - m^D) / (1 - m) (Kosson et al. 2021,
    equation 14).
    """
    decayed = momentum**delay
    return decayed, (1 - decayed) / (1 - momentum)


def compute_discrepancy_decay(decay: float | None, delay: float) -> float:
    """Return gamma of T2 for forward and backward weights that are `delay` updates apart.

    It is decay^(1/delay), or for None the optimum on a quadratic, 1 - 2/(delay + 1) (PipeMare,
    section 3.2 and equation 14).
    """
    return 1 - 2 / (delay + 1) if decay is None else float(decay) ** (1 / delay)


def make_delayed_sgd(
    delay: int,
    momentum: float = 0.0,
    spike: tuple[float, float] = (1.0, 0.0),
    horizon: float = 0.0,
    by_velocity: bool = False,
    curvature: float = 1.0,
) -> Recurrence:
    """Return SGD with momentum whose gradient is `delay` updates old (Kosson et al. 2021, equations
    28 to 31).

    With the defaults this is GDM; `spike` (a, b) makes it GSC, `horizon` T makes it LWP, both make
    it LWP_w + GSC or, with `by_velocity`, LWP_v + GSC. Without momentum it is PipeMare's plain
    model (its equation 1).
    """
    return Recurrence((DelayedRead(curvature, delay, horizon, by_velocity),), momentum, *spike)


def make_pipemare(
    forward: int,
    backward: int = 0,
    discrepancy: float = 0.0,
    decay: float | None = None,
    recompute: tuple[int, float] | None = None,
    curvature: float = 1.0,
    momentum: float = 0.0,
) -> Recurrence:
    """Return PipeMare's model of a forward and a backward that read different weights (equation 5).

    The read with the `forward` delay has the sensitivity curvature + Delta (`discrepancy`), the one
    with the `backward` delay
    -Delta. With `recompute` = (delay, Phi) the backward has -(Delta - Phi) and the recomputation -Phi (appendix D.1). With
    `decay` (gamma) T2 corrects the last two; None leaves T2 out. Its delta is as old as the weights
    that are read, as in the polynomials of B.4 and D.1 and in training; `read_newest_delta` has the
    rule as it is printed.
    """
    recompute_delay, phi = recompute if recompute is not None else (backward, 0.0)

    def correct(sensitivity: float, delay: int) -> DelayedRead:
        return DelayedRead(sensitivity, delay, correction=0.0 if decay is None else forward - delay)

    reads = [
        DelayedRead(curvature + discrepancy, forward),
        correct(phi - discrepancy, backward),
        correct(-phi, recompute_delay),
    ]
    return Recurrence(
        tuple(read for read in reads if read.sensitivity), momentum, decay=decay or 0.0
    )


def read_newest_delta(recurrence: Recurrence) -> Recurrence:
    """Return the recurrence with T2's rule as section 3.2 prints it: with the newest delta."""
    reads = tuple(read._replace(delta_age=0) for read in recurrence.reads)
    return recurrence._replace(reads=reads)


# ---- the same updates carried out one by one: the characteristic equation is checked against this


def simulate(
    *stages: Recurrence,
    steps: ArrayLike,
    updates: int,
    start: float = 1.0,
    noise: Floats | None = None,
) -> Floats:
    """Return w after each update, shape (updates + 1, *steps.shape); for several stages the sum of
    theirs.

    Before the first update everything is at rest at `start`. `noise`, shape (updates, ...), is
    subtracted from the gradients (PipeMare's eta). Overflow shows as infinity or not-a-number.
    """
    step = np.asarray(steps, np.float64)
    weights = [[np.full(step.shape, start * stage.share)] for stage in stages]
    velocities = [[np.zeros(step.shape)] for _ in stages]
    deltas = [[np.zeros(step.shape)] for _ in stages]

    def read_weight(stage: int, read: DelayedRead, t: int) -> Floats:
        w = weights[stage]
        # everything was at rest before the first update
        at = max(t - read.delay, 0)
        if read.horizon and read.by_velocity:
            # the velocity of the version that is read, not the newest
            return w[at] - step * stages[stage].rate * read.horizon * velocities[stage][at]
        if read.horizon:
            return w[at] + read.horizon * (w[at] - w[max(at - 1, 0)])
        age = read.delay if read.delta_age is None else read.delta_age
        return w[at] - read.correction * deltas[stage][max(t - age, 0)]

    # steps that are not stable overflow, which is their answer
    with np.errstate(over="ignore", invalid="ignore"):
        for t in range(updates):
            gradient = np.zeros(step.shape)
            for s, stage in enumerate(stages):
                for read in stage.reads:
                    # one gradient for all stages, from the reads of all
                    gradient = gradient + read.sensitivity * read_weight(s, read, t)
            if noise is not None:
                gradient = gradient - noise[t]
            for s, stage in enumerate(stages):
                g = stage.share * gradient
                v = stage.momentum * velocities[s][t] + g
                w = weights[s][t] - step * stage.rate * (stage.velocity * v + stage.gradient * g)
                delta = stage.decay * deltas[s][t] + (1 - stage.decay) * (w - weights[s][t])
                velocities[s].append(v)
                weights[s].append(w)
                deltas[s].append(delta)
        return np.sum([np.stack(w) for w in weights], axis=0)
