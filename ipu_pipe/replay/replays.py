"""Replays, the unit of work of the emulator and the processes: their sources, and the weight
versions that their passes read.

A replay takes one microbatch of one replica through all stages and back. It states the versions
that its passes read on each stage, and the stages that are updated after it. Version v of a stage
is the stage's weights after v of its updates. Gradients accumulate over replays until a replay that
updates stages, which clears them. There are three sources (`Replays`):

    TableReplays         a schedule with its version table    all stages are updated after each N microbatches
    RoundReplays         the steps of replicas (LocalSGD)     each replica updates all its stages after each of its microbatches
    RandomizedReplays    random draws without a pipeline      each replay updates one drawn stage and draws a delay per stage

`ReplayPlan` checks every source: it refuses to read an update that no earlier replay has made.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol, Sequence

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.delays import History
from ipu_pipe.schedule.methods import Reads
from ipu_pipe.schedule.stretches import IntArray
from ipu_pipe.schedule.table import Schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.update.apply import PLAIN, UpdateRules

# the least number of replays that are read ahead
WINDOW = 512


class ReplayWindow(NamedTuple):
    """n consecutive replays on P stages: microbatch and replica of each, the versions that their
    passes read, their updates.

    `backward` is None if backwards read the versions of their forwards. `recompute` is None without
    recomputation. `corrected` marks the forward reads that a rule corrects; None means all.
    """

    microbatch: IntArray  # (n,)
    replica: IntArray  # (n,)
    forward: IntArray  # (P, n)
    backward: IntArray | None  # (P, n)
    recompute: IntArray | None  # (P, n)
    updates: NDArray[np.bool_]  # (P, n)
    corrected: NDArray[np.bool_] | None = None  # (P, n)


class Replays(Protocol):
    """A source of replays, numbered in the order in which they run.

    `count`: the number of replays of the run. `reach`: a version that is superseded is no longer
    read `reach` replays later.
    """

    count: int
    reach: int

    def count_updates(self, number: int) -> IntArray:
        """Return how many updates each stage has had, (P,), before replay `number`."""

    def window(self, first: int, last: int) -> ReplayWindow:
        """Return the replays [first, last)."""


class TableReplays:
    """The replays of a schedule, with the versions of its version table.

    The `replicas` in this process take turns: microbatch 0 of each, microbatch 1 of each, and so
    on. A batch ends with the last microbatch of the last replica.
    """

    def __init__(self, table: VersionTable, replicas: Sequence[int] = (0,)) -> None:
        self._table = table
        self._replicas = np.array(replicas)
        width = len(replicas)
        stages = table.schedule.stages
        accumulate = table.schedule.accumulate
        delay = table.method.delay
        self._width = width
        self._batch = accumulate * width
        self.count = table.schedule.microbatches * width
        # the microbatches in flight and those of unfinished batches, or the greatest delay in
        # updates
        order = table.method.order
        in_flight = stages if order is None else stages * math.ceil(order.activation_limit)
        self.reach = width * (
            2 * (in_flight + accumulate + 1) if delay is None else (delay.greatest + 2) * accumulate
        )
        self._stashes = table.method.backward_reads is Reads.STASHED
        self._recomputes = table.method.segments is not None and table.method.reads_old(stages)

    def count_updates(self, number: int) -> IntArray:
        """Return the updates of each stage (P,) before replay `number`: one for each finished
        batch.
        """
        return np.full(self._table.schedule.stages, number // self._batch)

    def window(self, first: int, last: int) -> ReplayWindow:
        """Return the replays [first, last). Raise `BadInput` if the schedule cannot be replayed."""
        number = np.arange(first, last)
        begin = first // self._width
        # rounded up, so that the last replicas' microbatch is in it
        end = -(-last // self._width)
        # several replicas read the same column of the table
        column = number // self._width - begin if self._width > 1 else slice(None)
        forward, backward = self._table.window(begin, end)
        recompute = self._table.recompute(begin, end)[:, column] if self._recomputes else None
        ends = (number + 1) % self._batch == 0
        return ReplayWindow(
            number // self._width,
            self._replicas[number % self._width],
            forward[:, column],
            None if self._stashes else backward[:, column],
            recompute,
            # a view, because all stages are updated together
            np.broadcast_to(ends, (len(forward), len(ends))),
        )


class RoundReplays:
    """The replays of LocalSGD: within a step replicas take turns, and each reads the newest of its
    own weights.

    A version exists when all replicas have made it.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._stages = schedule.stages
        self._replicas = schedule.accumulate
        self.count = schedule.microbatches
        self.reach = schedule.accumulate

    def count_updates(self, number: int) -> IntArray:
        """Return the updates of each stage (P,) before replay `number`: one for each finished
        step.
        """
        return np.full(self._stages, number // self._replicas)

    def window(self, first: int, last: int) -> ReplayWindow:
        """Return the replays [first, last)."""
        step, replica = np.divmod(np.arange(first, last), self._replicas)
        shape = (self._stages, len(step))
        ends = np.broadcast_to(replica == self._replicas - 1, shape)
        return ReplayWindow(step, replica, np.broadcast_to(step, shape), None, None, ends)


class Views(NamedTuple):
    """The weights that a pass reads on each of P stages: a version and the code of its correction
    (`ipu_pipe.update.apply`).
    """

    versions: IntArray  # (P,)
    codes: IntArray  # (P,)


class Replay(NamedTuple):
    """One replay: the views that its passes read and the stages that it updates; `recompute` is
    None without recomputation.
    """

    microbatch: int
    replica: int
    forward: Views
    backward: Views
    recompute: Views | None
    updates: IntArray


class ReplayPlan:
    """The replays of a source from number `first` on, read ahead in windows, checked, with the
    corrections of the rules.

    Reading a window raises `BadInput` if a pass reads a version that no earlier replay has made.
    """

    def __init__(self, source: Replays, rules: UpdateRules, first: int = 0) -> None:
        self._source = source
        self._rules = rules
        self._start = self._stop = first
        # the updates of each stage before each of the window's replays, (P, n)
        self._updates = source.count_updates(first)[:, None]
        # the views of each pass; both arrays of a view are (P, n)
        self._views: dict[str, Views] = {}

    def _locate(self, number: int) -> int:
        """Return the column of a replay in the window, and move the window on if the replay is
        after it.

        The replays of the current batch stay in the window, because a row may ask for them in
        another order.
        """
        if number >= self._stop:
            source = self._source
            # the past that is kept: a row may go back, and versions are checked against it
            start = max(number - self._source.reach, self._start)
            updates = self._updates[:, start - self._start, None]
            self._start = start
            self._stop = min(number + max(WINDOW, source.reach // 2), source.count)
            # and the future of `reach` replays, in which a version may still be read
            self._window = window = source.window(
                start, min(self._stop + source.reach, source.count)
            )
            # before each replay, so its own updates are left out of the sum
            self._updates = updates + np.cumsum(window.updates, axis=1) - window.updates
            require_made_versions(window, self._updates, start, source.reach)
            self._views = self._correct(window)
            # the passes that may read a version after its update
            self._late_passes: list[str] = [
                name for name in ("forward", "recompute") if name in self._views
            ]
            # a split backward's weight gradient may run after an update
            if window.backward is not None and (window.backward < self._updates).any():
                self._late_passes.append("backward")
            # the oldest version that this replay or a later one reads: drawn delays make versions
            # go up and down
            self._oldest = np.minimum.accumulate(window.forward[:, ::-1], axis=1)[:, ::-1]
        assert self._start <= number < self._stop, (
            f"replay {number} is not one of {self._start} to {self._stop}"
        )
        return number - self._start

    def _correct(self, window: ReplayWindow) -> dict[str, Views]:
        """Return the versions that each pass reads with the codes of their corrections, by name of
        the pass.
        """
        codes = self._rules.encode_forwards(window.forward)
        forward = Views(
            window.forward,
            codes if window.corrected is None else np.where(window.corrected, codes, PLAIN),
        )
        views = {"forward": forward, "backward": forward}
        for name, versions in (("backward", window.backward), ("recompute", window.recompute)):
            if versions is not None:
                views[name] = Views(
                    versions, self._rules.encode_backwards(versions, window.forward)
                )
        return views

    def replay(self, number: int, stages: slice = slice(None)) -> Replay:
        """Return the replay of a number, with its views on these stages."""
        column = self._locate(number)
        window = self._window
        views = {
            name: Views(view.versions[stages, column], view.codes[stages, column])
            for name, view in self._views.items()
        }
        return Replay(
            int(window.microbatch[column]),
            int(window.replica[column]),
            views["forward"],
            views["backward"],
            views.get("recompute"),
            np.flatnonzero(window.updates[:, column]),
        )

    def count_updates(self, number: int) -> IntArray:
        """Return the updates of each stage (P,) before a replay; `number` may be one past the
        last.
        """
        # a run that is resumed at its end has no window
        if number == self._start:
            return self._updates[:, 0]
        return self._updates[:, self._locate(number)]

    def find_oldest(self, number: int) -> IntArray:
        """Return the oldest version of each stage (P,) that replay `number` or a later one reads;
        the greatest int64 if none.
        """
        if number >= self._source.count:
            return np.full(len(self._updates), np.iinfo(np.int64).max)
        return self._oldest[:, self._locate(number)]

    def find_later_reads(self, versions: IntArray, after: int) -> list[set[int]]:
        """Return, per stage, the codes with which passes after replay `after` read `versions` (P,).

        Whole backwards are left out: they read the newest version or the one that is stashed for
        their forward.
        """
        start = self._locate(after) + 1
        stop = start + self._source.reach
        later: list[set[int]] = [set() for _ in versions]
        for name in self._late_passes:
            versions_read, codes = (array[:, start:stop] for array in self._views[name])
            stage_indices, columns = np.nonzero(versions_read == versions[:, None])
            for stage, code in set(
                zip(stage_indices.tolist(), codes[stage_indices, columns].tolist())
            ):
                later[stage].add(code)
        return later


def require_made_versions(window: ReplayWindow, updates: IntArray, first: int, reach: int) -> None:
    """Raise `BadInput` for the first replay of a window that reads a version not yet made or no
    longer stored.

    `updates`: the updates of each stage before each replay, (P, n). `first`: the number of the
    window's first replay.
    """
    # versions older than these are no longer stored
    dropped = np.zeros_like(updates)
    dropped[:, reach:] = updates[:, : max(updates.shape[1] - reach, 0)]
    passes = {
        "forward": window.forward,
        "recomputation": window.recompute,
        "backward": window.backward,
    }
    for name, versions in passes.items():
        if versions is None:
            continue
        oldest = dropped if name == "forward" else window.forward
        wrong = (versions > updates) | (versions < oldest)
        if wrong.any():
            column, stage = (int(i) for i in np.argwhere(wrong.T)[0])
            low = int(oldest[stage, column])
            high = int(updates[stage, column])
            raise BadInput(
                f"replay {first + column}: {name} of microbatch {window.microbatch[column]}, stage "
                f"{stage}: version "
                f"{versions[stage, column]}: must be from {low} to {high}, the updates that "
                f"earlier replays have made"
            )


# ---- replays without a pipeline: randomized PipeDream (Algorithm 1 of the paper)
#
# The global history is x^0, x^1, ...; iteration k changes one block, stage s_k, by a gradient of
# microbatch b_k:
#
#     [1] delays      d_j, independent, uniform on 0..min(tau, k), independent of s_k and b_k
#     [2] stale read  x_hat, block j from iterate k - d_j; with NAG + beta (x_j^(k-d_j) - x_j^(k-d_j-1))
#     [3] draw        s_k and b_k, uniform
#     [4] update      x_s <- x_s - lr * grad_s f_b(x_hat)
#
# Iteration k is replay k: its forward and its backward read the stage versions of x_hat, and it
# updates one stage. All draws are a function of (seed, iteration). After a drain (evaluation,
# checkpoint) no iterate from before it is read.

# iterations that share a generator; the number of updates is stored once per group
GROUP = 4096


class RandomizedReplays:
    """P block updates for each microbatch of a schedule.

    `table`: PipeDream's version table. Its schedule says where the run drains; `history` may also
    take the order and the delays of updates from it. `batches`: the microbatches of an epoch, from
    which each iteration draws one.
    """

    def __init__(self, table: VersionTable, history: History, batches: int, seed: int) -> None:
        self._table = table
        self._history = history
        self._batches = batches
        self._seed = seed
        self._schedule = table.schedule
        self.stages = table.schedule.stages
        self.count = self.stages * self._schedule.microbatches
        self._constant = (
            history.compute_offsets(self.stages) if history.delays == "offsets" else None
        )
        # PipeDream has windows of at most 3P slots with at most P block updates each; extrapolation
        # reads one more iterate
        is_exact = history.delays == "schedule"
        self.reach = 2 + (3 * self.stages**2 if is_exact else history.get_bound(self.stages))
        # the updates of each stage before each group of iterations
        self._updates: dict[int, IntArray] = {0: np.zeros(self.stages, np.int64)}
        # the number of a group and its draws
        self._drawn: tuple[int, NDArray[np.float64]] = (-1, np.zeros((0, 0)))
        # stage and microbatch of the first iterations, if they are not drawn; read further when
        # they are needed
        self._order = np.zeros((2, 0), np.int64)
        self._is_ordered = history.order == "schedule"

    def count_updates(self, number: int) -> IntArray:
        """Return the updates of each stage (P,) before iteration `number`."""
        group, rest = divmod(number, GROUP)
        # on from the nearest group that was counted; a resumed run counts all before it once
        for i in range(max(known for known in self._updates if known <= group), group):
            self._updates[i + 1] = self._updates[i] + self._count_between(
                i * GROUP, (i + 1) * GROUP
            )
        return self._updates[group] + self._count_between(number - rest, number)

    def window(self, first: int, last: int) -> ReplayWindow:
        """Return the iterations [first, last)."""
        stage = self.list_stages(first, last)
        updates = np.arange(self.stages)[:, None] == stage
        replica = np.zeros(len(stage), np.int64)
        microbatch = self.list_microbatches(first, last)
        if self._history.delays == "schedule":
            begin = int(microbatch.min())
            end = int(microbatch.max()) + 1
            versions = self._table.forward(begin, end)[:, microbatch - begin]
            return ReplayWindow(microbatch, replica, versions, None, None, updates)
        low = max(first - self.reach, 0)
        is_updated = np.arange(self.stages)[:, None] == self.list_stages(low, last)
        # the updates of each stage at iterate low, low + 1, ...: (P, n + 1)
        counts = np.concatenate([self.count_updates(low)[:, None], is_updated], axis=1).cumsum(
            axis=1
        )
        iterate = np.arange(first, last) - self.list_delays(first, last) - low  # (P, n)
        versions = np.take_along_axis(counts, iterate, axis=1)
        previous = np.take_along_axis(counts, np.maximum(iterate - 1, 0), axis=1)
        has_changed = None if self._history.nag is None else versions > previous
        return ReplayWindow(microbatch, replica, versions, None, None, updates, has_changed)

    # ---- draws

    def list_stages(self, first: int, last: int) -> IntArray:
        """Return the stages (n,) that the iterations [first, last) update."""
        if self._is_ordered:
            return self._list_ordered(last)[0, first:last]
        return _scale(self._draw(first, last)[-2], self.stages)

    def list_microbatches(self, first: int, last: int) -> IntArray:
        """Return the microbatches (n,) of the iterations [first, last)."""
        if self._is_ordered:
            return self._list_ordered(last)[1, first:last]
        epoch = np.arange(first, last) // self.stages // self._batches
        return epoch * self._batches + _scale(self._draw(first, last)[-1], self._batches)

    def _list_ordered(self, last: int) -> IntArray:
        """Return stage and microbatch (2, n) of at least the first `last` iterations in the
        schedule's order.
        """
        if self._order.shape[1] < min(last, self.count):
            # twice as many each time, because every iteration from the first on is ordered again
            self._order = np.stack(order_updates(self._schedule, 2 * last))
        return self._order

    def list_delays(self, first: int, last: int) -> IntArray:
        """Return the drawn or constant delays (P, n) of the iterations [first, last), in block
        updates.
        """
        number = np.arange(first, last)
        since_drain = number - self._schedule.find_drains(number // self.stages) * self.stages
        if self._constant is not None:
            return np.minimum(self._constant[:, None], since_drain)
        greatest = np.minimum(self._history.get_bound(self.stages), since_drain)
        return _scale(self._draw(first, last)[: self.stages], greatest + 1)

    def _draw(self, first: int, last: int) -> NDArray[np.float64]:
        """Return uniform draws in [0, 1) for the P delays, the stage and the microbatch of each
        iteration, (P + 2, n).
        """
        parts = []
        for group in range(first // GROUP, -(-last // GROUP)):
            if self._drawn[0] != group:
                generator = np.random.default_rng((self._seed, group))
                self._drawn = group, generator.random((GROUP, self.stages + 2)).T
            begin = group * GROUP
            parts.append(self._drawn[1][:, max(first - begin, 0) : last - begin])
        return np.concatenate(parts, axis=1) if parts else np.zeros((self.stages + 2, 0))

    def _count_between(self, first: int, last: int) -> IntArray:
        return np.bincount(self.list_stages(first, last), minlength=self.stages)


class StreamedReplays(RandomizedReplays):
    """Randomized replays of a run whose end is not known: iteration i uses microbatch i instead of
    a drawn one of an epoch.
    """

    def list_microbatches(self, first: int, last: int) -> IntArray:
        return np.arange(first, last)


def order_updates(schedule: Schedule, count: int | None = None) -> tuple[IntArray, IntArray]:
    """Return stage and microbatch of the block updates of a schedule, at least the first `count`
    (all if None), in the order of (slot, stage)."""
    microbatches = schedule.microbatches
    if count is not None:
        microbatches = min(microbatches, -(-count // schedule.stages) + 1)
    # a later microbatch's first backward may come before an earlier one's last
    overlap = 2 * int(schedule.max_in_flight().max()) + 2
    read = min(microbatches + overlap, schedule.microbatches)
    slots = schedule.slots(Kind.BACKWARD, 0, read)
    order = np.argsort(
        slots.T.ravel() * schedule.stages + np.tile(np.arange(schedule.stages), slots.shape[1])
    )
    if read < schedule.microbatches:
        order = order[: microbatches * schedule.stages]
    return order % schedule.stages, order // schedule.stages


def _scale(uniform: NDArray[np.float64], count: object) -> IntArray:
    """Map uniform draws in [0, 1) to integers in [0, count)."""
    return np.minimum(uniform * np.asarray(count), np.asarray(count) - 1).astype(np.int64)
