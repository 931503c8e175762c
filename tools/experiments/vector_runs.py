"""Run PipeDream, randomized PipeDream and LocalSGD on the convex objectives of the randomized
PipeDream paper.

The model is a vector x of d coordinates, split into P equal blocks, one for each stage. Runs with G
learning rates are made
together: x is (d, G), a column for each rate. So a pass is a NumPy product, about 100 times as fast
as the emulator; tests compare the iterates. Schedules, versions, and drawn stages and delays come
from the library's own code.

    PipeDream              microbatch m reads version versions[s, m] of block s and makes version m + 1 of every block
    randomized PipeDream   each block update reads a drawn version of every block and makes a new version of one block
    LocalSGD               each microbatch updates its replica's own x; replicas are averaged after each round

The first two keep all versions of all blocks in `history`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.replay.replays import RandomizedReplays, order_updates
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.methods import resolve_method
from ipu_pipe.schedule.stretches import IntArray
from ipu_pipe.schedule.table import Schedule
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable

# ---- the objectives of the randomized PipeDream paper (G.2), with their data, gradients and optimum
#
# Batches are consecutive slices of the n samples in fixed order, blocks contiguous and equal slices
# of the d coordinates.

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Quadratic:
    """f = ||A x - b||^2 / 2n with batches of `batch_size` rows of A."""

    A: Floats
    b: Floats
    batch_size: int
    noise: float = 0.0  # no gradient noise

    @property
    def dimension(self) -> int:
        """The number of coordinates d."""
        return int(self.A.shape[1])

    @property
    def batches(self) -> int:
        """The number of whole batches in an epoch."""
        return len(self.A) // self.batch_size

    @cached_property
    def _products(self) -> Tuple[Floats, Floats]:
        """Return A_b^T A_b / batch_size, (batches, d, d), and A_b^T b_b / batch_size, (batches, d,
        1).
        """
        rows = self.A[: self.batches * self.batch_size].reshape(self.batches, self.batch_size, -1)
        targets = self.b[: self.batches * self.batch_size].reshape(self.batches, self.batch_size, 1)
        transposed = rows.transpose(0, 2, 1)
        return np.matmul(transposed, rows) / self.batch_size, np.matmul(
            transposed, targets
        ) / self.batch_size

    def compute_gradient(self, x: Floats, batch: int, block: slice = slice(None)) -> Floats:
        """Return the gradient of f_b at the columns of x, for the coordinates of a block: (block,
        G).
        """
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
        """Return the least value of f."""
        best = np.asarray(np.linalg.lstsq(self.A, self.b, rcond=None)[0])
        return float(self.compute_value(best[:, None])[0])


@dataclass(frozen=True)
class Logistic:
    """f = mean log(1 + exp(-z)) for label 1, log(1 + exp(z)) for label 0, z = X w, plus l2/2
    ||w||^2.

    A batch has `batch_size` rows of X. `noise`: the standard deviation of the noise in each
    coordinate of a gradient.
    """

    X: Floats
    y: Floats
    batch_size: int
    l2: float
    noise: float = 0.0

    @property
    def dimension(self) -> int:
        """The number of coordinates d."""
        return int(self.X.shape[1])

    @property
    def batches(self) -> int:
        """The number of whole batches in an epoch."""
        return len(self.X) // self.batch_size

    def compute_gradient(self, x: Floats, batch: int, block: slice = slice(None)) -> Floats:
        """Return the gradient of f_b without noise at the columns of x, for the coordinates of a
        block: (block, G).
        """
        rows = self.X[batch * self.batch_size : (batch + 1) * self.batch_size]
        error = (
            compute_sigmoid(rows @ x)
            - self.y[batch * self.batch_size : (batch + 1) * self.batch_size, None]
        )
        return np.asarray(rows[:, block].T @ error / self.batch_size + self.l2 * x[block])

    def compute_value(self, x: Floats) -> Floats:
        """Return f at the columns of x: (G,)."""
        z = self.X @ x
        losses = np.maximum(z, 0) - z * self.y[:, None] + np.log1p(np.exp(-np.abs(z)))
        return np.asarray(losses.mean(axis=0) + self.l2 / 2 * (x * x).sum(axis=0))

    @cached_property
    def optimum(self) -> float:
        """Return the least value of f, by Newton's method in the span of the samples, in which the
        optimum lies.
        """
        n, kernel = len(self.X), self.X @ self.X.T  # w = X^T a, z = kernel a
        a = np.zeros(n)
        for _ in range(100):
            p = compute_sigmoid(kernel @ a)
            slope = (p - self.y) / n + self.l2 * a  # the gradient is X^T slope
            curvature = (p * (1 - p) / n)[:, None] * kernel + self.l2 * np.eye(n)
            newton_step = np.linalg.solve(curvature, slope)
            a -= newton_step
            if np.abs(newton_step).max() <= 1e-14 * max(np.abs(a).max(), 1.0):
                break
        return float(self.compute_value((self.X.T @ a)[:, None])[0])


Objective = Union[Quadratic, Logistic]


def compute_sigmoid(z: Floats) -> Floats:
    """Return 1 / (1 + exp(-z)) without overflow."""
    small = np.exp(-np.abs(z))
    return np.asarray(np.where(z >= 0, 1.0, small) / (1.0 + small))


def make_random_quadratic(n: int, d: int, batch_size: int, seed: int = 0) -> Quadratic:
    """Draw A standard normal and b = A x* with x* standard normal: f is 0 at the optimum."""
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(n, d))
    return Quadratic(A, A @ rng.normal(size=d), batch_size)


def make_tridiagonal_quadratic(n: int, d: int, batch_size: int, seed: int = 0) -> Quadratic:
    """Draw A = sqrt(n) Q L^T, so that A^T A / n is exactly Nesterov's matrix, 2 on the diagonal and
    -1 beside it, plus 0.01 I.
    """
    rng = np.random.default_rng(seed)
    matrix = (2 + 0.01) * np.eye(d) - np.eye(d, k=1) - np.eye(d, k=-1)
    q, _ = np.linalg.qr(rng.normal(size=(n, d)))
    A = np.sqrt(n) * q @ np.linalg.cholesky(matrix).T
    return Quadratic(A, A @ rng.normal(size=d), batch_size)


def make_logistic_regression(
    n: int, d: int, batch_size: int, l2: float, noise: float, seed: int = 0
) -> Logistic:
    """Draw X and w standard normal, and labels with the probabilities compute_sigmoid(X w)."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d))
    w = rng.normal(size=d)
    y = rng.binomial(1, compute_sigmoid(X @ w)).astype(np.float64)
    return Logistic(X, y, batch_size, l2, noise)


def draw_noise(objective: Objective, count: int, block: int, seed: int) -> Optional[Floats]:
    """Return the noise in the gradients of `count` block updates in their order, (count, block, 1);
    None without noise.
    """
    if not objective.noise:
        return None
    return np.asarray(objective.noise * np.random.default_rng(seed).normal(size=(count, block, 1)))


# ---- the runs

# block updates whose versions are drawn at a time
WINDOW = 4096


class Curve(NamedTuple):
    """The objective over all samples along a run: `values[i]` after `updates[i]` block updates and
    `slots[i]` slots.

    Slots are those of the timeline (of randomized PipeDream: of PipeDream's timeline with as many
    updates). `x` is the last iterate, (d, G). Between microbatches the blocks of an iterate have
    different numbers of updates, as in the paper: those that the stages have made by then.
    """

    updates: IntArray
    slots: IntArray
    values: Floats  # (points, G)
    x: Floats


def make_randomized_source(
    stages: int, microbatches: int, batches: int, args: Mapping[str, Any], seed: int
) -> RandomizedReplays:
    """Return the source of randomized PipeDream's block updates, as many as PipeDream makes; `args`
    are its method_args.
    """
    method = resolve_method("randomized_pipedream", args)
    assert method.history is not None
    table = VersionTable(make_schedule(method, stages, microbatches, 1), method)
    return RandomizedReplays(table, method.history, batches, seed)


def run_pipedream(
    objective: Objective, stages: int, microbatches: int, rates: Floats, seed: int, points: int = 60
) -> Curve:
    """Run PipeDream over its timeline, microbatch after microbatch; the batches repeat in fixed
    order.
    """
    method = resolve_method("pipedream")
    schedule = make_schedule(method, stages, microbatches, 1)
    versions = VersionTable(schedule, method).forward(0, microbatches)
    d, G, block = objective.dimension, len(rates), objective.dimension // stages
    history = np.zeros((microbatches + 1, stages, block, G))  # [v, s]: block s after v updates
    noise = draw_noise_by_pass(objective, schedule, block, seed)
    all_stages = np.arange(stages)
    with np.errstate(over="ignore", invalid="ignore"):
        for m in range(microbatches):
            x = history[versions[:, m], all_stages].reshape(d, G)
            gradient = objective.compute_gradient(x, m % objective.batches).reshape(
                stages, block, G
            )
            if noise is not None:
                gradient = gradient + noise[:, m]
            np.subtract(history[m], rates * gradient, out=history[m + 1])
    return _evaluate(objective, schedule, history, None, points)


def run_randomized(
    objective: Objective,
    sources: Sequence[RandomizedReplays],
    rates: Floats,
    seed: int,
    points: int = 60,
) -> List[Curve]:
    """Run randomized PipeDream from S sources, which say what versions each block update reads and
    what block it updates.

    The sources (of different delay bounds) must draw the same stages and microbatches: their
    gradients are one product. Version v of block s is `history[first_version[s] + v]`, (block, S,
    G).
    """
    P, d, G, S, count = (
        sources[0].stages,
        objective.dimension,
        len(rates),
        len(sources),
        sources[0].count,
    )
    block = d // P
    noise = draw_noise(objective, count, block, seed)
    updates_by_block = sources[0].count_updates(count)
    first_version = np.concatenate([[0], np.cumsum(updates_by_block + 1)[:-1]])
    history = np.zeros((int((updates_by_block + 1).sum()), block, S, G))
    newest = first_version.copy()
    x = np.empty((P, block, S, G))
    x_flat = x.reshape(d, S * G)
    blocks = [slice(s * block, (s + 1) * block) for s in range(P)]
    rate_columns = np.tile(rates, S).reshape(S, G)
    marks, values, next_mark = _spread_marks(count, points), [], 0
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, count, WINDOW):
            windows = [source.window(start, min(start + WINDOW, count)) for source in sources]
            reads = np.stack(
                [(window.forward + first_version[:, None]).T for window in windows], axis=1
            )  # (updates, S, P)
            stages = windows[0].updates.argmax(axis=0).tolist()
            batches = (windows[0].microbatch % objective.batches).tolist()
            for i, (s, batch) in enumerate(zip(stages, batches)):
                if start + i == marks[next_mark]:
                    values.append(_compute_value(objective, history[newest].reshape(d, S * G)))
                    next_mark += 1
                for j in range(S):
                    x[:, :, j] = history[reads[i, j], :, j]
                gradient = objective.compute_gradient(x_flat, batch, blocks[s])
                if noise is not None:
                    gradient += noise[start + i]
                version = newest[s]
                np.subtract(
                    history[version],
                    gradient.reshape(block, S, G) * rate_columns,
                    out=history[version + 1],
                )
                newest[s] = version + 1
    final_x = history[newest].reshape(d, S * G)
    values.append(_compute_value(objective, final_x))
    slots = np.where(marks > 0, 2 * -(-marks // P) + 2 * (P - 1), 0)
    by_source = np.stack(values).reshape(-1, S, G)
    return [Curve(marks, slots, by_source[:, j], final_x.reshape(d, S, G)[:, j]) for j in range(S)]


def run_local_sgd(
    objective: Objective,
    stages: int,
    replicas: int,
    steps: int,
    microbatches: int,
    rates: Floats,
    seed: int,
    slots: Optional[int] = None,
    points: int = 60,
) -> Curve:
    """Run LocalSGD over its timeline of `microbatches` (jobs in the paper), or over the first
    `slots` slots of it.

    `steps`: local steps of a replica in a round. The objective is that of the mean of the replicas,
    within a round too.
    """
    schedule = make_schedule(
        resolve_method("local_sgd", {"local_steps": steps}), stages, microbatches, replicas
    )
    d, G, block = objective.dimension, len(rates), objective.dimension // stages
    noise = draw_noise_by_pass(objective, schedule, block, seed)
    x = np.zeros((replicas, d, G))
    mean = np.zeros((microbatches + 1, d, G))
    with np.errstate(over="ignore", invalid="ignore"):
        for m in range(microbatches):
            replica = m % replicas
            gradient = objective.compute_gradient(x[replica], m % objective.batches)
            if noise is not None:
                gradient = gradient + noise[:, m].reshape(d, 1)
            x[replica] -= rates * gradient
            mean[m + 1] = mean[m] - rates / replicas * gradient
            if (m + 1) % (replicas * steps) == 0:
                x[:] = mean[m + 1] = x.mean(axis=0)
    return _evaluate(
        objective, schedule, mean.reshape(microbatches + 1, stages, block, G), slots, points
    )


def _evaluate(
    objective: Objective, schedule: Schedule, history: Floats, slots: Optional[int], points: int
) -> Curve:
    """Return the curve over the first `slots` slots (None: all) of a timeline. history:
    (microbatches + 1, stages, block, G).
    """
    P, d, G = schedule.stages, objective.dimension, history.shape[-1]
    marks = _spread_marks(schedule.slot_count if slots is None else slots, points)
    ends = schedule.slots(Kind.BACKWARD, 0, schedule.microbatches)
    versions = np.stack(
        [np.searchsorted(ends_of_stage, marks) for ends_of_stage in ends], axis=1
    )  # (points, P)
    iterates = [
        history[version_by_block, np.arange(P)].reshape(d, G) for version_by_block in versions
    ]
    values = np.stack([_compute_value(objective, x) for x in iterates])
    return Curve(versions.sum(axis=1), marks, values, iterates[-1])


def _spread_marks(count: int, points: int) -> IntArray:
    """Return up to `points` + 1 numbers spread evenly from 0 to `count`, both included."""
    return np.unique(np.linspace(0, count, min(points, count) + 1).round().astype(np.int64))


def _compute_value(objective: Objective, x: Floats) -> Floats:
    """Return the objective over all samples by column of x; infinite if a run has diverged."""
    with np.errstate(over="ignore", invalid="ignore"):
        value = objective.compute_value(x)
    return np.where(np.isfinite(value), value, np.inf)


def draw_noise_by_pass(
    objective: Objective, schedule: Schedule, block: int, seed: int
) -> Optional[Floats]:
    """Draw the noise of the block updates in the order of (slot, stage). Return it by stage and
    microbatch: (P, M, block, 1).
    """
    P, M = schedule.stages, schedule.microbatches
    drawn = draw_noise(objective, P * M, block, seed)
    if drawn is None:
        return None
    stage, microbatch = order_updates(schedule)
    noise_by_pass = np.empty((P, M, block, 1))
    noise_by_pass[stage, microbatch] = drawn
    return noise_by_pass


# ---- budgets in slots


def count_microbatches(slots: int, stages: int) -> int:
    """Return the fewest microbatches with which PipeDream's timeline, 2M + 2(P-1) slots, has at
    least `slots`.
    """
    return max(-(-(slots - 2 * (stages - 1)) // 2), 1)


def count_local_sgd_microbatches(slots: int, stages: int, replicas: int, steps: int) -> int:
    """Return the fewest microbatches with which LocalSGD's timeline has at least `slots`."""
    method = resolve_method("local_sgd", {"local_steps": steps})
    low, high = 1, slots
    while low < high:
        middle = (low + high) // 2
        long_enough = make_schedule(method, stages, middle, replicas).slot_count >= slots
        low, high = (low, middle) if long_enough else (middle + 1, high)
    return low
