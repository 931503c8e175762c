"""The objectives of the randomized PipeDream paper (G.2): finite sums over one vector x, with data, gradients and optimum.

Runs with several learning rates go together: x is (d, G), a column for each rate. Batches are consecutive slices of the n samples
in fixed order, blocks contiguous and equal parts of the d coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Optional, Tuple, Union

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Quadratic:
    """f = ||A x - b||^2 / 2n over batches of `size` rows."""

    A: Floats
    b: Floats
    size: int
    noise: float = 0.0  # no gradient noise

    @property
    def dimension(self) -> int:
        """The number of coordinates d."""
        return int(self.A.shape[1])

    @property
    def batches(self) -> int:
        """The number of whole batches in an epoch."""
        return len(self.A) // self.size

    @cached_property
    def _products(self) -> Tuple[Floats, Floats]:
        """Return A_b^T A_b / size, (batches, d, d), and A_b^T b_b / size, (batches, d, 1)."""
        parts = self.A[: self.batches * self.size].reshape(self.batches, self.size, -1)
        targets = self.b[: self.batches * self.size].reshape(self.batches, self.size, 1)
        transposed = parts.transpose(0, 2, 1)
        return np.matmul(transposed, parts) / self.size, np.matmul(transposed, targets) / self.size

    def compute_gradient(self, x: Floats, batch: int, block: slice = slice(None)) -> Floats:
        """Return the gradient of f_b at the columns of x, for the coordinates of a block: (block, G)."""
        squares, moments = self._products
        gradient: Floats = squares[batch, block] @ x
        gradient -= moments[batch, block]
        return gradient

    def compute_value(self, x: Floats) -> Floats:
        """Return f at the columns of x: (G,)."""
        residual = self.A @ x - self.b[:, None]
        return np.asarray((residual * residual).sum(axis=0) / (2 * len(self.A)))

    @cached_property
    def optimum(self) -> float:
        """The least value of f."""
        best = np.asarray(np.linalg.lstsq(self.A, self.b, rcond=None)[0])
        return float(self.compute_value(best[:, None])[0])


@dataclass(frozen=True)
class Logistic:
    """f = mean log(1 + exp(-z)) for label 1, log(1 + exp(z)) for label 0, z = X w, plus l2/2 ||w||^2; batches of `size` rows.

    `noise` is the standard deviation of what is added to each coordinate of a block's gradient.
    """

    X: Floats
    y: Floats
    size: int
    l2: float
    noise: float = 0.0

    @property
    def dimension(self) -> int:
        """The number of coordinates d."""
        return int(self.X.shape[1])

    @property
    def batches(self) -> int:
        """The number of whole batches in an epoch."""
        return len(self.X) // self.size

    def compute_gradient(self, x: Floats, batch: int, block: slice = slice(None)) -> Floats:
        """Return the gradient of f_b without noise at the columns of x, for the coordinates of a block: (block, G)."""
        rows = self.X[batch * self.size : (batch + 1) * self.size]
        error = sigmoid(rows @ x) - self.y[batch * self.size : (batch + 1) * self.size, None]
        return np.asarray(rows[:, block].T @ error / self.size + self.l2 * x[block])

    def compute_value(self, x: Floats) -> Floats:
        """Return f at the columns of x: (G,)."""
        z = self.X @ x
        losses = np.maximum(z, 0) - z * self.y[:, None] + np.log1p(np.exp(-np.abs(z)))
        return np.asarray(losses.mean(axis=0) + self.l2 / 2 * (x * x).sum(axis=0))

    @cached_property
    def optimum(self) -> float:
        """The least value of f, by Newton's method in the span of the samples, in which the optimum lies."""
        n, kernel = len(self.X), self.X @ self.X.T  # w = X^T a, z = kernel a
        a = np.zeros(n)
        for _ in range(100):
            p = sigmoid(kernel @ a)
            slope = (p - self.y) / n + self.l2 * a  # the gradient is X^T slope
            curve = (p * (1 - p) / n)[:, None] * kernel + self.l2 * np.eye(n)
            step = np.linalg.solve(curve, slope)
            a -= step
            if np.abs(step).max() <= 1e-14 * max(np.abs(a).max(), 1.0):
                break
        return float(self.compute_value((self.X.T @ a)[:, None])[0])


Objective = Union[Quadratic, Logistic]


def sigmoid(z: Floats) -> Floats:
    """Return 1 / (1 + exp(-z)) without overflow."""
    small = np.exp(-np.abs(z))
    return np.asarray(np.where(z >= 0, 1.0, small) / (1.0 + small))


def make_random_quadratic(n: int, d: int, size: int, seed: int = 0) -> Quadratic:
    """Draw A standard normal and b = A x* with x* standard normal: f is 0 at the optimum."""
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(n, d))
    return Quadratic(A, A @ rng.normal(size=d), size)


def make_tridiagonal_quadratic(n: int, d: int, size: int, seed: int = 0, shift: float = 0.01) -> Quadratic:
    """Draw A = sqrt(n) Q L^T, so that A^T A / n is exactly Nesterov's matrix, 2 on the diagonal and -1 beside it, plus
    `shift` I."""
    rng = np.random.default_rng(seed)
    matrix = (2 + shift) * np.eye(d) - np.eye(d, k=1) - np.eye(d, k=-1)
    q, _ = np.linalg.qr(rng.normal(size=(n, d)))
    A = np.sqrt(n) * q @ np.linalg.cholesky(matrix).T
    return Quadratic(A, A @ rng.normal(size=d), size)


def make_logistic_regression(n: int, d: int, size: int, l2: float, noise: float, seed: int = 0) -> Logistic:
    """Draw X and w standard normal, and labels with the probabilities sigmoid(X w)."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d))
    w = rng.normal(size=d)
    y = rng.binomial(1, sigmoid(X @ w)).astype(np.float64)
    return Logistic(X, y, size, l2, noise)


def draw_noise(objective: Objective, count: int, block: int, seed: int) -> Optional[Floats]:
    """Draw what is added to the gradients of `count` block updates in their order, (count, block, 1); None without noise."""
    if not objective.noise:
        return None
    drawn = np.random.default_rng(seed).normal(size=(count, block, 1))
    return np.asarray(objective.noise * drawn)
