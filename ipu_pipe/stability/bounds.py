"""What randomized PipeDream (RPD) and LocalSGD are proved to reach, for given constants.

A bound is on the mean over the iterates of the expected squared norm of the gradient. K block updates are the common
measure: RPD makes them one by one, one of P blocks each; a local step of each of R replicas is P R of them. The loss is
L-smooth and at most `gap` above its least value at the start.

    RPD         2 P gap / (lr K) + lr P L G^2 + lr^2 L^2 tau^2 G^2
    LocalSGD    2 gap / (lr T) + 4 lr^2 H^2 G^2 L^2 + lr L sigma^2 / R,      T = K / (P R) local steps,      lr <= 1/L

RPD's: by smoothness an update of a block drawn out of P lowers the loss by (lr / 2P) |grad f|^2, up to (lr L^2 / 2P) |x -
x_stale|^2 <= (lr L^2 / 2P) (lr tau G)^2 for the stale read and lr^2 L G^2 / 2 for the step; sum and divide (randomized
PipeDream paper, theorem 4.1, equation 3). LocalSGD's: the same for the replicas' average, which drift by at most 2 lr H G
between averagings and whose noise averages (Yu et al. 2019, theorem 1; randomized PipeDream paper, equation 5). G bounds a
block's gradient in RPD, the whole gradient's root mean square in LocalSGD.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Bound(NamedTuple):
    """A bound by its parts: what the start leaves, the noise of drawn blocks or batches, and what stale reads or the
    replicas' drift add."""

    start: float
    noise: float
    staleness: float

    @property
    def total(self) -> float:
        """Their sum."""
        return self.start + self.noise + self.staleness


def rpd_bound(
    lr: float, updates: int, blocks: int, delay: float, gap: float, smoothness: float, block_gradient: float
) -> Bound:
    """Of RPD after `updates` block updates, reads up to `delay` block updates old."""
    L, G = smoothness, block_gradient
    return Bound(2 * blocks * gap / (lr * updates), lr * blocks * L * G**2, (lr * L * delay * G) ** 2)


def pipedream_delay(blocks: int) -> int:
    """The delay bound for which RPD stands for PipeDream of so many stages: the greatest of its steady state, P^2 - P/2 (P
    even) or P^2 - (P+1)/2 (proposition 4.1)."""
    return blocks**2 - (blocks + 1) // 2


def rpd_bound_pl(
    lr: float, updates: int, blocks: int, delay: float, gap: float, smoothness: float, block_gradient: float, pl: float
) -> float:
    """Of f - f* after `updates` block updates where |grad f|^2 >= 2 mu (f - f*), mu = `pl` (appendix H): (1 - lr mu / P)^K
    gap, and the noise and staleness of `rpd_bound` over 2 mu."""
    whole = rpd_bound(lr, updates, blocks, delay, gap, smoothness, block_gradient)
    return float(max(1 - lr * pl / blocks, 0.0) ** updates * gap + (whole.noise + whole.staleness) / (2 * pl))


def local_sgd_bound(
    lr: float,
    updates: int,
    blocks: int,
    replicas: int,
    local_steps: int,
    gap: float,
    smoothness: float,
    gradient: float,
    deviation: float,
) -> Bound:
    """Of LocalSGD's averaged model after as many block updates; `gradient`: root mean square of a batch's gradient;
    `deviation`: sigma, of a batch's gradient from the whole. Not-a-number where lr > 1/L, for which it is not proved."""
    if lr * smoothness > 1:
        return Bound(np.nan, np.nan, np.nan)
    steps = updates / (blocks * replicas)
    return Bound(
        2 * gap / (lr * steps),
        lr * smoothness * deviation**2 / replicas,
        (2 * lr * local_steps * gradient * smoothness) ** 2,
    )
