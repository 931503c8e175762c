"""Replays, the unit of work of emulator and processes, and where they come from.

A replay is one microbatch of one replica through all stages and back: which versions its passes read on each stage, and which
stages are updated when it is done. Version v of a stage is that after v updates of this stage; gradients gather over replays
until one that updates stages, and are gone after it. What yields replays is a source (`Replays`):

    a schedule with its version table    all stages are updated after each N microbatches      TableReplays, here
    the steps of replicas (LocalSGD)     all stages, each replica's own, after each of its     RoundReplays, here
    draws, without a pipeline            one drawn stage a replay, a drawn delay a stage       ipu_pipe.backends.randomized

No source is believed: `ipu_pipe.backends.reads.ReplayPlan` refuses reads of updates that no earlier replay has made.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Protocol, Sequence

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.schedule.methods import Reads
from ipu_pipe.schedule.table import IntArray, Schedule
from ipu_pipe.schedule.versions import VersionTable


class Window(NamedTuple):
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

    def window(self, first: int, last: int) -> Window:
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

    def window(self, first: int, last: int) -> Window:
        """The replays [first, last). Raises BadInput where the schedule cannot be replayed."""
        number = np.arange(first, last)
        begin, end = first // self._width, -(-last // self._width)  # microbatches
        column = number // self._width - begin if self._width > 1 else slice(None)
        forward, backward = self._table.window(begin, end)
        again = self._table.recompute(begin, end)[:, column] if self._recomputes else None
        ends = (number + 1) % self._batch == 0
        return Window(
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

    def window(self, first: int, last: int) -> Window:
        """The replays [first, last)."""
        step, replica = np.divmod(np.arange(first, last), self._replicas)
        shape = (self._stages, len(step))
        ends = np.broadcast_to(replica == self._replicas - 1, shape)
        return Window(step, replica, np.broadcast_to(step, shape), None, None, ends)
