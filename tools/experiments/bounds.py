"""The convergence bounds of randomized PipeDream (RPD) and LocalSGD, for given constants.

Each bounds the mean over the iterates of the expected squared norm of the gradient, after K block
updates. RPD makes block updates one by one, each of one of P blocks; one local step on each of R
replicas is P R block updates. The loss is L-smooth and at the start at most `gap` above its least
value.

    RPD         2 P gap / (lr K) + lr P L G^2 + lr^2 L^2 tau^2 G^2
    LocalSGD    2 gap / (lr T) + 4 lr^2 H^2 G^2 L^2 + lr L sigma^2 / R,      T = K / (P R) local steps,      lr <= 1/L

RPD: by smoothness an update of a block drawn out of P lowers the loss by (lr / 2P) |grad f|^2, up
to (lr L^2 / 2P) |x - x_stale|^2 <= (lr L^2 / 2P) (lr tau G)^2 for the stale read and lr^2 L G^2 / 2
for the step; sum and divide (randomized PipeDream paper, theorem 4.1, equation 3). LocalSGD: the
same for the average of the replicas, which drift by at most 2 lr H G between averagings and whose
noise averages out (Yu et al. 2019, theorem 1; randomized PipeDream paper, equation 5). G bounds the
gradient of a block in RPD, and is the root mean square of the whole gradient in LocalSGD.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class ConvergenceBound(NamedTuple):
    """A bound by its parts: the distance from the start, the noise of drawn blocks or batches, and
    stale reads or drift.
    """

    start: float
    noise: float
    staleness: float

    @property
    def total(self) -> float:
        """The sum of the parts."""
        return self.start + self.noise + self.staleness


def bound_rpd(
    lr: float,
    updates: int,
    blocks: int,
    delay: float,
    gap: float,
    smoothness: float,
    block_gradient: float,
) -> ConvergenceBound:
    """Bound RPD after `updates` block updates whose reads are at most `delay` block updates old."""
    L, G = smoothness, block_gradient
    return ConvergenceBound(
        2 * blocks * gap / (lr * updates), lr * blocks * L * G**2, (lr * L * delay * G) ** 2
    )


def bound_rpd_pl(
    lr: float,
    updates: int,
    blocks: int,
    delay: float,
    gap: float,
    smoothness: float,
    block_gradient: float,
    pl: float,
) -> float:
    """Bound f - f* of RPD where |grad f|^2 >= 2 mu (f - f*), mu = `pl` (appendix H).

    It is (1 - lr mu / P)^K gap plus noise and staleness of `bound_rpd` divided by 2 mu.
    """
    general = bound_rpd(lr, updates, blocks, delay, gap, smoothness, block_gradient)
    return float(
        max(1 - lr * pl / blocks, 0.0) ** updates * gap
        + (general.noise + general.staleness) / (2 * pl)
    )


def bound_local_sgd(
    lr: float,
    updates: int,
    blocks: int,
    replicas: int,
    local_steps: int,
    gap: float,
    smoothness: float,
    gradient: float,
    deviation: float,
) -> ConvergenceBound:
    """Bound the averaged model of LocalSGD after `updates` block updates; not-a-number where lr >
    1/L, where nothing is proved.

    `gradient` is the root mean square of a batch's gradient, `deviation` (sigma) is that of its
    difference from the full gradient.
    """
    if lr * smoothness > 1:
        return ConvergenceBound(np.nan, np.nan, np.nan)
    steps = updates / (blocks * replicas)
    return ConvergenceBound(
        2 * gap / (lr * steps),
        lr * smoothness * deviation**2 / replicas,
        (2 * lr * local_steps * gradient * smoothness) ** 2,
    )
