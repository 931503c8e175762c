"""Replays, the unit of work of emulator and processes, and where they come from.

A replay is one microbatch of one replica through all stages and back: which versions its passes read on each stage, and which
stages are updated when it is done. Version v of a stage is that after v updates of this stage; gradients gather over replays
until one that updates stages, and are gone after it. What yields replays is a source (`Replays`):

    a schedule with its version table    all stages are updated after each N microbatches      TableReplays, here
    the steps of replicas (LocalSGD)     all stages, each replica's own, after each of its     RoundReplays, here
    draws, without a pipeline            one drawn stage a replay, a drawn delay a stage       ipu_pipe.backends.randomized

No source is believed: `ReplayPlan` refuses reads of updates that no earlier replay has made.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Protocol, Sequence, Set

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.methods import Reads
from ipu_pipe.schedule.table import IntArray, Schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.update.apply import PLAIN, UpdateRules

WINDOW = 512  # replays read ahead, at least


class ReplayWindow(NamedTuple):
    """Consecutive replays: of each its microbatch and replica, (n,); the versions that its passes read and the stages that it
    updates, (P, n). `backward`: None where it reads what its forward read. `recompute`: None where activations are kept.
    `corrected`: the reads of forwards that a rule corrects, None for all."""

    microbatch: IntArray
    replica: IntArray
    forward: IntArray
    backward: Optional[IntArray]
    recompute: Optional[IntArray]
    updates: NDArray[np.bool_]
    corrected: Optional[NDArray[np.bool_]] = None


class Replays(Protocol):
    """A source of replays, told apart by number in the order in which they are done. `count`: of the run. `reach`: after so many
    replays no version older than the newest now is read."""

    count: int
    reach: int

    def made(self, number: int) -> IntArray:
        """How many updates the stages have had, (P,), before replay `number`: where a run begins or goes on."""

    def window(self, first: int, last: int) -> ReplayWindow:
        """The replays [first, last)."""


class TableReplays:
    """Those of a schedule, with the versions of its table. The `replicas` of the pipeline that are here take turns: microbatch 0
    of each, microbatch 1 of each, and so on; a batch ends with the last one's."""

    def __init__(self, table: VersionTable, replicas: Sequence[int] = (0,)) -> None:
        self._table, self._replicas, width = table, np.array(replicas), len(replicas)
        stages, accumulate, delay = table.schedule.stages, table.schedule.accumulate, table.method.delay
        self._width, self._batch = width, accumulate * width
        self.count = table.schedule.microbatches * width
        # over the microbatches in flight and the batches being gathered, or a delay of so many updates
        self.reach = width * (2 * (stages + accumulate + 1) if delay is None else (delay.greatest + 2) * accumulate)
        self._stashes = table.method.backward_reads is Reads.STASHED
        self._recomputes = table.method.segments is not None and table.method.reads_old(stages)

    def made(self, number: int) -> IntArray:
        """All stages have had an update for each batch that is done."""
        return np.full(self._table.schedule.stages, number // self._batch)

    def window(self, first: int, last: int) -> ReplayWindow:
        """The replays [first, last). Raises BadInput where the schedule cannot be replayed."""
        number = np.arange(first, last)
        begin, end = first // self._width, -(-last // self._width)  # microbatches
        column = number // self._width - begin if self._width > 1 else slice(None)
        forward, backward = self._table.window(begin, end)
        again = self._table.recompute(begin, end)[:, column] if self._recomputes else None
        ends = (number + 1) % self._batch == 0
        return ReplayWindow(
            number // self._width, self._replicas[number % self._width],
            forward[:, column], None if self._stashes else backward[:, column], again,
            np.broadcast_to(ends, (len(forward), len(ends))),
        )  # fmt: skip


class RoundReplays:
    """Those of LocalSGD: replicas take turns within a step, each with weights of its own, of which all its own updates are read.
    A version is counted as made when all replicas have it."""

    def __init__(self, schedule: Schedule) -> None:
        self._stages, self._replicas = schedule.stages, schedule.accumulate
        self.count, self.reach = schedule.microbatches, schedule.accumulate

    def made(self, number: int) -> IntArray:
        """An update of all stages for each step that is done."""
        return np.full(self._stages, number // self._replicas)

    def window(self, first: int, last: int) -> ReplayWindow:
        """The replays [first, last)."""
        step, replica = np.divmod(np.arange(first, last), self._replicas)
        shape = (self._stages, len(step))
        ends = np.broadcast_to(replica == self._replicas - 1, shape)
        return ReplayWindow(step, replica, np.broadcast_to(step, shape), None, None, ends)


class Views(NamedTuple):
    """What a pass reads: the version and the code of each stage, (P,) both."""

    versions: IntArray
    codes: IntArray

    def on(self, stage: int) -> Views:
        """One stage's, (1,) both."""
        return Views(self.versions[stage : stage + 1], self.codes[stage : stage + 1])


class Replay(NamedTuple):
    """The unit of work: one microbatch of one replica, what its passes read, and the stages that are updated when it is done.
    `recompute`: None where activations are kept."""

    microbatch: int
    replica: int
    forward: Views
    backward: Views
    recompute: Optional[Views]
    updates: IntArray

    def on(self, stage: int) -> Replay:
        """One stage's part."""
        again = self.recompute.on(stage) if self.recompute is not None else None
        own = self.updates[self.updates == stage]
        return Replay(self.microbatch, self.replica, self.forward.on(stage), self.backward.on(stage), again, own)


class ReplayPlan:
    """A source's replays from number `first` on, read ahead, and which views later ones read. Raises BadInput, when they are
    read, where a pass reads what no earlier replay has made."""

    def __init__(self, source: Replays, rules: UpdateRules, first: int = 0) -> None:
        self._source, self._rules = source, rules
        self.count = source.count
        self._start = self._stop = first
        self._made = source.made(first)[:, None]  # (P, n): updates of the stages before each replay of the window
        self._reads: Dict[str, Views] = {}

    def _offset(self, number: int) -> int:
        """Of replay `number` in the window at hand, moved on if need be; the replay before it stays there."""
        if number >= self._stop:
            source, start = self._source, max(number - 1, self._start)
            made = self._made[:, start - self._start, None]
            self._start, self._stop = start, min(number + max(WINDOW, source.reach // 2), source.count)
            self._found = found = source.window(start, min(self._stop + source.reach, source.count))
            self._made = made + np.cumsum(found.updates, axis=1) - found.updates
            check(found, self._made, start, source.reach)
            self._reads = self._corrected(found)
            # a view goes when no replay to come reads its version; drawn delays make versions go up and down
            self._oldest = np.minimum.accumulate(found.forward[:, ::-1], axis=1)[:, ::-1]
        assert self._start <= number < self._stop, f"replay {number} is not of those from {self._start} to {self._stop}"
        return number - self._start

    def _corrected(self, found: ReplayWindow) -> Dict[str, Views]:
        """The versions by pass, with their codes."""
        codes = self._rules.encode_forwards(found.forward)
        forward = Views(found.forward, codes if found.corrected is None else np.where(found.corrected, codes, PLAIN))
        reads = {"forward": forward, "backward": forward}
        for what, versions in (("backward", found.backward), ("recompute", found.recompute)):
            if versions is not None:
                reads[what] = Views(versions, self._rules.encode_backwards(versions, found.forward))
        return reads

    def replay(self, number: int) -> Replay:
        """That of a number."""
        at, found = self._offset(number), self._found
        reads = {what: Views(read.versions[:, at], read.codes[:, at]) for what, read in self._reads.items()}
        passes = reads["forward"], reads["backward"], reads.get("recompute")
        return Replay(int(found.microbatch[at]), int(found.replica[at]), *passes, np.flatnonzero(found.updates[:, at]))

    def made(self, number: int) -> IntArray:
        """The updates (P,) that the stages have had before a replay; also at the end of all."""
        if number == self._start:  # of a run that goes on where it ended there is nothing to be read
            return self._made[:, 0]
        return self._made[:, self._offset(number)]

    def oldest(self, number: int) -> IntArray:
        """Oldest version of each stage that a replay and those after it read, shape (P,); none at the run's end."""
        if number >= self.count:
            return np.full(len(self._made), np.iinfo(np.int64).max)
        return self._oldest[:, self._offset(number)]

    def read_later(self, versions: IntArray, after: int) -> List[Set[int]]:
        """Per stage, the codes with which a forward or recomputation of a replay later than `after` reads its version of
        `versions` (P,).

        A backward reads the newest version or, stashed, what its forward read: it needs none kept for itself.
        """
        start = self._offset(after) + 1
        stop = start + self._source.reach
        codes: List[Set[int]] = [set() for _ in versions]
        for what in ("forward", "recompute") if "recompute" in self._reads else ("forward",):
            read, how = (array[:, start:stop] for array in self._reads[what])
            rows, columns = np.nonzero(read == versions[:, None])
            for stage, code in set(zip(rows.tolist(), how[rows, columns].tolist())):
                codes[stage].add(code)
        return codes


def check(found: ReplayWindow, made: IntArray, first: int, reach: int) -> None:
    """Refuse (BadInput, one line: the first) replays from number `first` on of which a pass reads what it cannot. `made`: updates
    (P, n) by the replays before each."""
    kept = np.zeros_like(made)  # what is as old is kept no longer
    kept[:, reach:] = made[:, : max(made.shape[1] - reach, 0)]
    passes = {"forward": found.forward, "recomputation": found.recompute, "backward": found.backward}
    for what, versions in passes.items():
        if versions is None:
            continue
        least = kept if what == "forward" else found.forward
        wrong = (versions > made) | (versions < least)
        if wrong.any():
            column, stage = (int(i) for i in np.argwhere(wrong.T)[0])
            low, high = int(least[stage, column]), int(made[stage, column])
            raise BadInput(
                f"replay {first + column}: {what} of microbatch {found.microbatch[column]}, stage {stage}: version "
                f"{versions[stage, column]}: must be from {low} to {high}, the updates that earlier replays have made"
            )
