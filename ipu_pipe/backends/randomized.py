"""Replays without a pipeline: randomized PipeDream (the paper of that name, Algorithm 1).

The global history is x^0, x^1, ...; iteration k changes one block, stage s_k, by a gradient of microbatch b_k:

    [1] delays      d_j, each by itself, uniform on 0..min(tau, k); nothing of them depends on s_k or b_k
    [2] stale read  x_hat, block j from iterate k - d_j; with NAG + beta (x_j^(k-d_j) - x_j^(k-d_j-1))
    [3] draw        s_k and b_k, uniform
    [4] update      x_s <- x_s - lr * grad_s f_b(x_hat)

Here iteration k is replay k: it reads, forward and backward, the versions of the stages that x_hat is made of, and updates one.
All draws are a function of (seed, iteration). Where the run drains (evaluation, checkpoint) no older iterate is read any more.
"""

from __future__ import annotations

from typing import Dict, Optional, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.backends.replays import ReplayWindow
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.delays import History
from ipu_pipe.schedule.runs import IntArray
from ipu_pipe.schedule.table import Schedule
from ipu_pipe.schedule.versions import VersionTable

BLOCK = 4096  # iterations that share a generator, and after each of which the updates made are kept


class RandomizedReplays:
    """P block updates for each microbatch of a schedule.

    `table`: of PipeDream's schedule, which says where the run drains, and the order and the delays of updates if `history` takes
    them from it. `batches`: microbatches of an epoch, of which one is drawn.
    """

    def __init__(self, table: VersionTable, history: History, batches: int, seed: int) -> None:
        self._table, self._history, self._batches, self._seed = table, history, batches, seed
        self._schedule, self.stages = table.schedule, table.schedule.stages
        self.count = self.stages * self._schedule.microbatches
        self._constant = history.constant(self.stages) if history.delays == "offsets" else None
        # PipeDream's windows of at most 3P slots, of P block updates each at most; one more iterate for the extrapolation
        exact = history.delays == "schedule"
        self.reach = 2 + (3 * self.stages**2 if exact else history.bound_for(self.stages))
        self._updates: Dict[int, IntArray] = {0: np.zeros(self.stages, np.int64)}  # by block of iterations
        self._drawn: Tuple[int, NDArray[np.float64]] = (-1, np.zeros((0, 0)))
        self._order: Optional[Tuple[IntArray, IntArray]] = None
        if history.order == "schedule":
            self._order = order_of_updates(self._schedule)

    # --- the source

    def count_updates(self, number: int) -> IntArray:
        """Return the updates of each stage (P,) before iteration `number`."""
        block, rest = divmod(number, BLOCK)
        for i in range(max(known for known in self._updates if known <= block), block):
            self._updates[i + 1] = self._updates[i] + self._count_between(i * BLOCK, (i + 1) * BLOCK)
        return self._updates[block] + self._count_between(number - rest, number)

    def window(self, first: int, last: int) -> ReplayWindow:
        """Return the iterations [first, last)."""
        stage = self.stages_of(first, last)
        updates = np.arange(self.stages)[:, None] == stage
        replica = np.zeros(len(stage), np.int64)
        microbatch = self.microbatches_of(first, last)
        if self._history.delays == "schedule":
            begin, end = int(microbatch.min()), int(microbatch.max()) + 1
            versions = self._table.forward(begin, end)[:, microbatch - begin]
            return ReplayWindow(microbatch, replica, versions, None, None, updates)
        low = max(first - self.reach, 0)
        before = self.stages_of(low, last)
        steps = (np.arange(self.stages)[:, None] == before).astype(np.int64)
        # of each stage at iterate low, low + 1, ...: (P, n + 1)
        counts = np.concatenate([self.count_updates(low)[:, None], steps], axis=1).cumsum(axis=1)
        iterate = np.arange(first, last) - self.delays(first, last) - low  # (P, n)
        versions = np.take_along_axis(counts, iterate, axis=1)
        if self._history.nag is None:
            return ReplayWindow(microbatch, replica, versions, None, None, updates)
        moved = versions > np.take_along_axis(counts, np.maximum(iterate - 1, 0), axis=1)
        return ReplayWindow(microbatch, replica, versions, None, None, updates, moved)

    # --- what is drawn

    def stages_of(self, first: int, last: int) -> IntArray:
        """Return the stages (n,) that the iterations [first, last) update."""
        if self._order is not None:
            return self._order[0][first:last]
        return _index(self._uniform(first, last)[-2], self.stages)

    def microbatches_of(self, first: int, last: int) -> IntArray:
        """Return the microbatches (n,) of the iterations [first, last)."""
        if self._order is not None:
            return self._order[1][first:last]
        epoch = np.arange(first, last) // self.stages // self._batches
        return epoch * self._batches + _index(self._uniform(first, last)[-1], self._batches)

    def delays(self, first: int, last: int) -> IntArray:
        """Return the delays (P, n) of the iterations [first, last), in block updates.

        Those of the schedule are not known here: it gives versions.
        """
        number = np.arange(first, last)
        since = number - self._stretch_begin(number // self.stages) * self.stages
        if self._constant is not None:
            return np.minimum(self._constant[:, None], since)
        most = np.minimum(self._history.bound_for(self.stages), since)
        return _index(self._uniform(first, last)[: self.stages], most + 1)

    def _uniform(self, first: int, last: int) -> NDArray[np.float64]:
        """Return numbers in [0, 1), (P + 2, n): for the delays, the stage and the microbatch."""
        parts = []
        for block in range(first // BLOCK, -(-last // BLOCK)):
            if self._drawn[0] != block:
                generator = np.random.default_rng((self._seed, block))
                self._drawn = block, generator.random((BLOCK, self.stages + 2)).T
            begin = block * BLOCK
            parts.append(self._drawn[1][:, max(first - begin, 0) : last - begin])
        return np.concatenate(parts, axis=1) if parts else np.zeros((self.stages + 2, 0))

    def _count_between(self, first: int, last: int) -> IntArray:
        return np.bincount(self.stages_of(first, last), minlength=self.stages)

    def _stretch_begin(self, step: IntArray) -> IntArray:
        """Return the first microbatch of the stretch between drains in which each of `step` is."""
        begin = np.zeros_like(step)
        for part in self._schedule.stretches:
            inside = (part.first_microbatch <= step) & (step < part.end_microbatch)
            begin[inside] = step[inside] - (step[inside] - part.first_microbatch) % part.microbatches
        return begin


def order_of_updates(schedule: Schedule) -> Tuple[IntArray, IntArray]:
    """Return stage and microbatch of every block update of a schedule, in the order of (slot, stage)."""
    slots = schedule.slots(Kind.BACKWARD, 0, schedule.microbatches)
    order = np.argsort(slots.T.ravel() * schedule.stages + np.tile(np.arange(schedule.stages), slots.shape[1]))
    return order % schedule.stages, order // schedule.stages


def _index(uniform: NDArray[np.float64], count: object) -> IntArray:
    """Return integers in [0, count) for numbers in [0, 1)."""
    return np.minimum(uniform * np.asarray(count), np.asarray(count) - 1).astype(np.int64)
