"""Linear regression by SGD whose gradients are some updates old: PipeMare's experiment beside its Lemma 1 (Figure 5(b))."""

from __future__ import annotations

from importlib import util
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput
from ipu_pipe.stability.recurrences import Floats

GONE = 1e12  # a squared weight beyond which a run has diverged


class Regression(NamedTuple):
    """Features x (n, d) and targets y (n,), each of mean 0 and variance 1; `batch`: samples of an update."""

    name: str
    x: Floats
    y: Floats
    batch: int = 32


def regression_set() -> Regression:
    """scikit-learn's diabetes set (442 samples, 10 features), which its package holds. Raises BadInput where that is
    missing."""
    if util.find_spec("sklearn") is None:
        raise BadInput("pipemare_5b: its data come with scikit-learn, which is not installed: pip install scikit-learn")
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True, scaled=False)
    return Regression("diabetes (442 x 10)", (x - x.mean(axis=0)) / x.std(axis=0), (y - y.mean()) / y.std())


def largest_curvature(data: Regression) -> float:
    """The largest eigenvalue of X'X / n, the Hessian of the loss mean (x w - y)^2 / 2."""
    return float(np.linalg.eigvalsh(data.x.T @ data.x / len(data.x)).max())


def losses(data: Regression, steps: Floats, delays: NDArray[np.int64], updates: int, seed: int = 0) -> Floats:
    """The loss over all samples after so many updates from 0, infinity where it diverged: shape (delays, steps).

    All runs see the same batches, drawn with replacement; an update uses the gradient at the weights `delay` updates old.
    """
    rng = np.random.default_rng(seed)
    ring = int(delays.max()) + 1
    history = np.zeros((ring, len(delays), len(steps), data.x.shape[1]))
    w, rows = history[0].copy(), np.arange(len(delays))
    rates = (steps / data.batch)[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        for t in range(updates):
            if t % 1000 == 0:
                chosen = rng.integers(0, len(data.x), (1000, data.batch))
                w[(w * w).sum(axis=2) > GONE] = np.nan
            x, y = data.x[chosen[t % 1000]], data.y[chosen[t % 1000]]
            stale = history[np.maximum(t - delays, 0) % ring, rows]
            w -= rates * ((stale @ x.T - y) @ x)
            history[(t + 1) % ring] = w
        rest = (w @ data.x.T - data.y) ** 2
        found = rest.mean(axis=2) / 2
    return np.where(found < GONE, found, np.inf)
