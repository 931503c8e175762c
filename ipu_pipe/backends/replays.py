"""Replays, the unit of work of emulator and processes: where they come from, and what their passes read.

A replay is one microbatch of one replica through all stages and back: which versions its passes read on each stage, and which
stages are updated when it is done. Version v of a stage is that after v updates of this stage; gradients gather over replays
until one that updates stages, and are gone after it. What yields replays is a source (`Replays`):

    a schedule with its version table    all stages are updated after each N microbatches      TableReplays, here
    the steps of replicas (LocalSGD)     all stages, each replica's own, after each of its     RoundReplays, here
    draws, without a pipeline            one drawn stage a replay, a drawn delay a stage       RandomizedReplays, here

No source is believed: `ReplayPlan` refuses reads of updates that no earlier replay has made.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Protocol, Sequence, Set, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.delays import History
from ipu_pipe.schedule.methods import Reads
from ipu_pipe.schedule.runs import IntArray
from ipu_pipe.schedule.table import Schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.update.apply import PLAIN, UpdateRules

WINDOW = 512  # replays read ahead, at least


class ReplayWindow(NamedTuple):
    """n consecutive replays on P stages: their microbatches and replicas, the versions that their passes read, their updates.

    `backward`: None if it reads what the forward read. `recompute`: None if activations are kept. `corrected`: the forward reads
    that a rule corrects, None for all.
    """

    microbatch: IntArray  # (n,)
    replica: IntArray  # (n,)
    forward: IntArray  # (P, n)
    backward: Optional[IntArray]  # (P, n)
    recompute: Optional[IntArray]  # (P, n)
    updates: NDArray[np.bool_]  # (P, n)
    corrected: Optional[NDArray[np.bool_]] = None  # (P, n)


class Replays(Protocol):
    """A source of replays, which are numbered in the order in which they are done.

    `count`: of the run. `reach`: after so many replays no version is read that is older than the newest now.
    """

    count: int
    reach: int

    def count_updates(self, number: int) -> IntArray:
        """Return how many updates each stage has had, (P,), before replay `number`."""

    def window(self, first: int, last: int) -> ReplayWindow:
        """Return the replays [first, last)."""


class TableReplays:
    """The replays of a schedule, with the versions of its table.

    The `replicas` of the pipeline that are here take turns: microbatch 0 of each, microbatch 1 of each, and so on; a batch ends
    with the last one's.
    """

    def __init__(self, table: VersionTable, replicas: Sequence[int] = (0,)) -> None:
        self._table, self._replicas, width = table, np.array(replicas), len(replicas)
        stages, accumulate, delay = table.schedule.stages, table.schedule.accumulate, table.method.delay
        self._width, self._batch = width, accumulate * width
        self.count = table.schedule.microbatches * width
        # over the microbatches in flight and the batches being gathered, or a delay of so many updates
        self.reach = width * (2 * (stages + accumulate + 1) if delay is None else (delay.greatest + 2) * accumulate)
        self._stashes = table.method.backward_reads is Reads.STASHED
        self._recomputes = table.method.segments is not None and table.method.reads_old(stages)

    def count_updates(self, number: int) -> IntArray:
        """Return one update of every stage for each batch that is done."""
        return np.full(self._table.schedule.stages, number // self._batch)

    def window(self, first: int, last: int) -> ReplayWindow:
        """Return the replays [first, last). Raise `BadInput` if the schedule cannot be replayed."""
        number = np.arange(first, last)
        begin, end = first // self._width, -(-last // self._width)  # microbatches
        column = number // self._width - begin if self._width > 1 else slice(None)
        forward, backward = self._table.window(begin, end)
        recompute = self._table.recompute(begin, end)[:, column] if self._recomputes else None
        ends = (number + 1) % self._batch == 0
        return ReplayWindow(
            number // self._width, self._replicas[number % self._width],
            forward[:, column], None if self._stashes else backward[:, column], recompute,
            np.broadcast_to(ends, (len(forward), len(ends))),
        )  # fmt: skip


class RoundReplays:
    """The replays of LocalSGD: replicas take turns within a step, each with weights of its own, of which it reads the newest.

    A version counts as made when all replicas have it.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._stages, self._replicas = schedule.stages, schedule.accumulate
        self.count, self.reach = schedule.microbatches, schedule.accumulate

    def count_updates(self, number: int) -> IntArray:
        """Return one update of every stage for each step that is done."""
        return np.full(self._stages, number // self._replicas)

    def window(self, first: int, last: int) -> ReplayWindow:
        """Return the replays [first, last)."""
        step, replica = np.divmod(np.arange(first, last), self._replicas)
        shape = (self._stages, len(step))
        ends = np.broadcast_to(replica == self._replicas - 1, shape)
        return ReplayWindow(step, replica, np.broadcast_to(step, shape), None, None, ends)


class Views(NamedTuple):
    """What a pass reads on each of P stages: a version, and the code with which a rule corrects it (`ipu_pipe.update.apply`)."""

    versions: IntArray  # (P,)
    codes: IntArray  # (P,)


class Replay(NamedTuple):
    """One replay: what its passes read, and the stages that are updated when it is done. `recompute`: None if activations are
    kept."""

    microbatch: int
    replica: int
    forward: Views
    backward: Views
    recompute: Optional[Views]
    updates: IntArray


class ReplayPlan:
    """A source's replays from number `first` on, read ahead in windows and checked, with the corrections of the rules.

    Raises `BadInput`, when a window is read, if a pass reads what no earlier replay has made.
    """

    def __init__(self, source: Replays, rules: UpdateRules, first: int = 0) -> None:
        self._source, self._rules = source, rules
        self.count = source.count
        self._start = self._stop = first
        self._updates = source.count_updates(first)[:, None]  # (P, n): of the stages before each replay of the window
        self._views: Dict[str, Views] = {}  # by pass, (P, n) both

    def _locate(self, number: int) -> int:
        """Return the column of a replay in the window, which moves on if need be.

        Those of the same batch stay in the window: a row may have them in another order.
        """
        if number >= self._stop:
            source, start = self._source, max(number - self._source.reach, self._start)
            updates = self._updates[:, start - self._start, None]
            self._start, self._stop = start, min(number + max(WINDOW, source.reach // 2), source.count)
            self._window = window = source.window(start, min(self._stop + source.reach, source.count))
            self._updates = updates + np.cumsum(window.updates, axis=1) - window.updates
            check_reads(window, self._updates, start, source.reach)
            self._views = self._correct(window)
            self._kept: List[str] = [name for name in ("forward", "recompute") if name in self._views]
            if window.backward is not None and (window.backward < self._updates).any():  # weight gradients come later
                self._kept.append("backward")
            # a view goes when no replay to come reads its version; drawn delays make versions go up and down
            self._oldest = np.minimum.accumulate(window.forward[:, ::-1], axis=1)[:, ::-1]
        assert self._start <= number < self._stop, f"replay {number} is not one of {self._start} to {self._stop}"
        return number - self._start

    def _correct(self, window: ReplayWindow) -> Dict[str, Views]:
        """Return the versions that each pass reads, with the codes of their corrections."""
        codes = self._rules.encode_forwards(window.forward)
        forward = Views(window.forward, codes if window.corrected is None else np.where(window.corrected, codes, PLAIN))
        views = {"forward": forward, "backward": forward}
        for name, versions in (("backward", window.backward), ("recompute", window.recompute)):
            if versions is not None:
                views[name] = Views(versions, self._rules.encode_backwards(versions, window.forward))
        return views

    def replay(self, number: int, stages: slice = slice(None)) -> Replay:
        """Return a replay by its number, with what passes read on these stages."""
        at, window = self._locate(number), self._window
        views = {name: Views(view.versions[stages, at], view.codes[stages, at]) for name, view in self._views.items()}
        return Replay(
            int(window.microbatch[at]), int(window.replica[at]), views["forward"], views["backward"],
            views.get("recompute"), np.flatnonzero(window.updates[:, at]),
        )  # fmt: skip

    def count_updates(self, number: int) -> IntArray:
        """Return the updates (P,) that the stages have had before a replay; also at the end of all."""
        # a run resumed at its end reads nothing
        if number == self._start:
            return self._updates[:, 0]
        return self._updates[:, self._locate(number)]

    def find_oldest(self, number: int) -> IntArray:
        """Return the oldest version of each stage (P,) that a replay and those after it read; the greatest number at the end."""
        if number >= self.count:
            return np.full(len(self._updates), np.iinfo(np.int64).max)
        return self._oldest[:, self._locate(number)]

    def find_later_reads(self, versions: IntArray, after: int) -> List[Set[int]]:
        """Return, per stage, the codes with which passes later than replay `after` read `versions` (P,).

        A whole backward reads the newest version or, stashed, what its forward read: it needs none kept for itself.
        """
        start = self._locate(after) + 1
        stop = start + self._source.reach
        later: List[Set[int]] = [set() for _ in versions]
        for name in self._kept:
            read, codes = (array[:, start:stop] for array in self._views[name])
            rows, columns = np.nonzero(read == versions[:, None])
            for stage, code in set(zip(rows.tolist(), codes[rows, columns].tolist())):
                later[stage].add(code)
        return later


def check_reads(window: ReplayWindow, updates: IntArray, first: int, reach: int) -> None:
    """Raise `BadInput` for the first replay of a window, from number `first` on, of which a pass reads what it cannot.

    `updates`: of each stage by the replays before each, (P, n).
    """
    dropped = np.zeros_like(updates)  # versions before these are kept no longer
    dropped[:, reach:] = updates[:, : max(updates.shape[1] - reach, 0)]
    passes = {"forward": window.forward, "recomputation": window.recompute, "backward": window.backward}
    for name, versions in passes.items():
        if versions is None:
            continue
        least = dropped if name == "forward" else window.forward
        wrong = (versions > updates) | (versions < least)
        if wrong.any():
            column, stage = (int(i) for i in np.argwhere(wrong.T)[0])
            low, high = int(least[stage, column]), int(updates[stage, column])
            raise BadInput(
                f"replay {first + column}: {name} of microbatch {window.microbatch[column]}, stage {stage}: version "
                f"{versions[stage, column]}: must be from {low} to {high}, the updates that earlier replays have made"
            )


# ---- replays without a pipeline: randomized PipeDream (the paper of that name, Algorithm 1)
#
# The global history is x^0, x^1, ...; iteration k changes one block, stage s_k, by a gradient of microbatch b_k:
#
#     [1] delays      d_j, each by itself, uniform on 0..min(tau, k); nothing of them depends on s_k or b_k
#     [2] stale read  x_hat, block j from iterate k - d_j; with NAG + beta (x_j^(k-d_j) - x_j^(k-d_j-1))
#     [3] draw        s_k and b_k, uniform
#     [4] update      x_s <- x_s - lr * grad_s f_b(x_hat)
#
# Here iteration k is replay k: it reads, forward and backward, the versions of the stages that x_hat is made of, and updates one.
# All draws are a function of (seed, iteration). Where the run drains (evaluation, checkpoint) no older iterate is read any more.

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
