"""Delays that are no schedule's: their means, and how they are drawn."""

from __future__ import annotations

from typing import Dict, Optional

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.methods import Delay
from ipu_pipe.schedule.runs import IntArray


def mean_delays(delay: Delay, P: int, lags: Optional[IntArray]) -> NDArray[np.float64]:
    """Expectation (P,) of drawn delays: as stated, or else the pipeline's own `lags` (P,).

    Raises BadInput where an exponential distribution over 0..D has none such.
    """
    if delay.mean is None:
        assert lags is not None, "the pipeline's own lags stand for a mean that is not stated"
        means = lags.astype(np.float64)
    elif len(delay.mean) in (1, P):
        means = np.broadcast_to(np.asarray(delay.mean, np.float64), (P,)).copy()
    else:
        raise BadInput(
            f"method_args.hogwild.mean: {list(delay.mean)}: must be one number or one for each of {P} stages"
        )
    if (means > delay.greatest / 2).any():
        raise BadInput(
            f"method_args.hogwild.max: {delay.greatest}: an exponential distribution over 0..max has a mean of at most max/2;"
            f" the greatest mean here is {means.max():g}: max must be at least {2 * means.max():g}"
        )
    return means


class Draws:
    """Delays drawn by (seed, microbatch, stage) from P(d) ~ q^d on 0..D, the exponential distribution in whole updates."""

    BLOCK = 256  # microbatches that share a generator

    def __init__(self, delay: Delay, means: NDArray[np.float64], seed: int) -> None:
        self._seed = seed
        self._thresholds = np.stack([np.cumsum(_exponential(mean, delay.greatest)) for mean in means])
        self._blocks: Dict[int, IntArray] = {}

    def __call__(self, first: int, last: int) -> IntArray:
        """Delays (P, last - first) of the microbatches [first, last)."""
        if last <= first:
            return np.zeros((len(self._thresholds), 0), np.int64)
        blocks = range(first // self.BLOCK, (last - 1) // self.BLOCK + 1)
        joined = np.concatenate([self._block(block) for block in blocks], axis=1)
        start = blocks[0] * self.BLOCK
        return joined[:, first - start : last - start]

    def _block(self, block: int) -> IntArray:
        if block not in self._blocks:
            if len(self._blocks) > 64:
                self._blocks.clear()
            drawn = np.random.default_rng((self._seed, block)).random((self.BLOCK, len(self._thresholds))).T
            rows = [np.searchsorted(row, values, side="right") for row, values in zip(self._thresholds, drawn)]
            self._blocks[block] = np.minimum(np.stack(rows), self._thresholds.shape[1] - 1)
        return self._blocks[block]


def _exponential(mean: float, greatest: int) -> NDArray[np.float64]:
    """Probabilities (D + 1,) of 0..D, proportional to q^d, with this expectation (at most D/2), q by bisection."""
    values = np.arange(greatest + 1)
    low, high = 0.0, 1.0
    for _ in range(200):
        q = (low + high) / 2
        weights = q**values
        low, high = (q, high) if (weights * values).sum() / weights.sum() < mean else (low, q)
    weights = high**values
    return np.asarray(weights / weights.sum())
