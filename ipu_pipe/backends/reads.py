"""What each pass of a microbatch reads, ahead of time: the version table by microbatch, with the rules' corrections."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Set

import numpy as np

from ipu_pipe.schedule.methods import Reads
from ipu_pipe.schedule.table import IntArray
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.update.apply import UpdateRules


class Read(NamedTuple):
    """What a pass reads: the version and the code of each stage, (P,) both."""

    versions: IntArray
    codes: IntArray

    def on(self, stage: int) -> Read:
        """One stage's, (1,) both."""
        return Read(self.versions[stage : stage + 1], self.codes[stage : stage + 1])


class Replay(NamedTuple):
    """The unit of work: one microbatch, and what its passes read. `recompute`: None where activations are kept."""

    microbatch: int
    forward: Read
    backward: Read
    recompute: Optional[Read]

    def on(self, stage: int) -> Replay:
        """One stage's part."""
        again = self.recompute.on(stage) if self.recompute is not None else None
        return Replay(self.microbatch, self.forward.on(stage), self.backward.on(stage), again)


def reach_of(table: VersionTable) -> int:
    """Microbatches after which no version older than the newest now is read: a read reaches back over the microbatches in flight,
    the batches being gathered, and a delay of so many updates."""
    delay, accumulate = table.method.delay, table.schedule.accumulate
    if delay is not None:
        return (delay.greatest + 2) * accumulate
    return 2 * table.schedule.stages + 2 * accumulate + 2


class ReadPlan:
    """The version table by microbatch, read ahead in windows: its replays, and which views later ones read."""

    def __init__(self, table: VersionTable, rules: UpdateRules) -> None:
        schedule = table.schedule
        self._table, self._rules, self._reach = table, rules, reach_of(table)
        self.stages, self.microbatches, self._accumulate = schedule.stages, schedule.microbatches, schedule.accumulate
        self.recomputes = table.method.segments is not None and table.method.reads_old(schedule.stages)
        self._stashes = table.method.backward_reads is Reads.STASHED
        self._start = self._stop = 0
        self._reads: Dict[str, Read] = {}

    def _window(self, microbatch: int) -> int:
        """Offset of `microbatch` in the window at hand, moved on if need be."""
        if not self._start <= microbatch < self._stop:
            self._start = microbatch
            self._stop = min(microbatch + max(512, 2 * self._accumulate), self.microbatches)
            last = min(self._stop + self._reach, self.microbatches)
            forward, backward = self._table.window(self._start, last)
            codes = self._rules.forward_codes(forward)
            self._reads = {"forward": Read(forward, codes)}
            self._reads["backward"] = Read(
                backward, codes if self._stashes else self._rules.backward_codes(backward, forward)
            )
            if self.recomputes:
                again = self._table.recompute(self._start, last)
                self._reads["recompute"] = Read(again, self._rules.backward_codes(again, forward))
            # a view goes when no microbatch to come reads its version; drawn delays make versions go up and down
            self._oldest = np.minimum.accumulate(forward[:, ::-1], axis=1)[:, ::-1]
        return microbatch - self._start

    def replay(self, microbatch: int) -> Replay:
        """That of a microbatch."""
        offset = self._window(microbatch)
        reads = {what: Read(read.versions[:, offset], read.codes[:, offset]) for what, read in self._reads.items()}
        return Replay(microbatch, reads["forward"], reads["backward"], reads.get("recompute"))

    def oldest(self, microbatch: int) -> IntArray:
        """Oldest version of each stage that `microbatch` and those after it read, shape (P,); none at the run's end."""
        if microbatch >= self.microbatches:
            return np.full(len(self._oldest), np.iinfo(np.int64).max)
        offset = self._window(microbatch)
        return self._oldest[:, offset]

    def read_later(self, version: int, after: int) -> List[Set[int]]:
        """Per stage, the codes with which a forward or recomputation of a microbatch later than `after` reads `version`.

        A backward reads the newest version or, stashed, what its forward read: it needs none kept for itself.
        """
        start = self._window(after) + 1
        stop = start + self._reach
        codes: List[Set[int]] = [set() for _ in range(len(self._oldest))]
        for what in ("forward", "recompute") if self.recomputes else ("forward",):
            versions, how = (array[:, start:stop] for array in self._reads[what])
            rows, columns = np.nonzero(versions == version)
            for stage, code in set(zip(rows.tolist(), how[rows, columns].tolist())):
                codes[stage].add(code)
        return codes
