"""Gradient descent with old weights on a quadratic, as a record of numbers; the papers' rules are such records.

Along one direction of a loss, of curvature h, an update is

    g      = sum over the reads of their sensitivity times what they see         (sensitivities add up to h)
    v     <- m v + g
    w     <- w - step (a v + b g)
    delta <- gamma delta + (1 - gamma) (w_{t+1} - w_t)

and a read that is D updates old sees, all of them as they were then, one of

    w        w + T (w_t - w_{t-1})        w - step T v        w - n delta

Of several stages each has such a record for its part of the direction, `share` of it (they add up to 1): the reads of all
make one gradient, of which each stage gets its share, and steps by `rate` times the step. `ipu_pipe.stability.simulation`
carries the updates out; `ipu_pipe.stability.loops` has the equation whose roots tell what becomes of them.

Sources: PipeMare (Yang et al. 2021), sections 3 and appendices B, D; Kosson et al. 2021, sections 3.2 to 3.5 and appendix D.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Tuple


class Read(NamedTuple):
    """What a gradient takes from weights that are `delay` updates old: `sensitivity` times them, predicted over `horizon`
    updates (by the velocity, or by the last step), or corrected by `correction` times delta."""

    sensitivity: float
    delay: int
    horizon: float = 0.0
    by_velocity: bool = False
    correction: float = 0.0


class Recurrence(NamedTuple):
    """One stage's updates along a direction: m, a, b and gamma as in the module's head."""

    reads: Tuple[Read, ...]
    momentum: float = 0.0
    velocity: float = 1.0  # a
    gradient: float = 0.0  # b
    decay: float = 0.0  # gamma
    share: float = 1.0
    rate: float = 1.0


def spike(momentum: float, delay: float) -> Tuple[float, float]:
    """(a, b) of spike compensation SC_D: m^D, (1 - m^D) / (1 - m) (Kosson et al. 2021, equation 14)."""
    decayed = momentum**delay
    return decayed, (1 - decayed) / (1 - momentum)


def discrepancy_decay(decay: Optional[float], delay: float) -> float:
    """gamma of T2 for a difference of `delay` updates: decay^(1/delay), or, for None, 1 - 2/(delay + 1), the optimum on a
    quadratic (PipeMare, section 3.2 and equation 14)."""
    return 1 - 2 / (delay + 1) if decay is None else float(decay) ** (1 / delay)


def pipelined(
    delay: int,
    momentum: float = 0.0,
    spike: Tuple[float, float] = (1.0, 0.0),
    horizon: float = 0.0,
    by_velocity: bool = False,
    curvature: float = 1.0,
) -> Recurrence:
    """SGD with momentum and a delay: GDM; with `spike` (a, b) GSC; with `horizon` T LWP; with both their combination, LWP_w
    + GSC or, `by_velocity`, LWP_v + GSC (Kosson et al. 2021, equations 28 to 31). Without momentum PipeMare's plain model
    (equation 1)."""
    return Recurrence((Read(curvature, delay, horizon, by_velocity),), momentum, *spike)


def pipemare(
    forward: int,
    backward: int = 0,
    discrepancy: float = 0.0,
    decay: Optional[float] = None,
    recompute: Optional[Tuple[int, float]] = None,
    curvature: float = 1.0,
    momentum: float = 0.0,
) -> Recurrence:
    """PipeMare's model of passes that read different weights (equation 5): (curvature + Delta) of the `forward` delay,
    -Delta of the `backward` delay. `recompute` (delay, Phi): -(Delta - Phi) of the backward's, -Phi of the recomputation's
    (appendix D.1). `decay` gamma: of T2, which corrects both; None: without."""
    middle, phi = recompute if recompute is not None else (backward, 0.0)

    def corrected(sensitivity: float, delay: int) -> Read:
        return Read(sensitivity, delay, correction=0.0 if decay is None else forward - delay)

    reads = [Read(curvature + discrepancy, forward), corrected(phi - discrepancy, backward), corrected(-phi, middle)]
    return Recurrence(tuple(read for read in reads if read.sensitivity), momentum, decay=decay or 0.0)
