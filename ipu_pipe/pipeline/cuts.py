"""The cuts of an open schedule: where each step ends, and which updates have left the pipeline by
then.
"""

from __future__ import annotations

from ipu_pipe.job.record import Job
from ipu_pipe.schedule.actions import Kind

# the first window of batches after a drain, and the widest
NARROWEST = 8
WIDEST = 512


class Cuts:
    """Read the cuts of a job's open schedule, in windows that widen: a slot alone costs as much as
    hundreds at once.
    """

    def __init__(self, job: Job) -> None:
        self._has_pipeline = job.method.history is None
        if job.open_table is not None:
            self._schedule = job.open_table.schedule
        # with local losses no gradient comes back, and the last stage's loss takes as many slots to
        # arrive
        self._margin = len(job.partition) - 1 if job.method.structure is not None else 0
        # of the batches from `_first` on
        self._first = 0
        self._slots: list[int] = []
        self._left: list[int] = []

    def find(self, batch: int) -> int:
        """Return the slot of stage 0's first forward of a batch, 0 if the method has no
        pipeline.
        """
        if not self._has_pipeline:
            return 0
        # the window may move, so the index comes first
        index = self._look_up(batch)
        return self._slots[index]

    def count_left(self, batches: int) -> int:
        """Return the updates that all stages have made before the next batch after `batches`
        enters.
        """
        if not self._has_pipeline:
            return batches
        index = self._look_up(batches)
        return self._left[index]

    def _look_up(self, batch: int) -> int:
        """Return the index of a batch in the window, which moves on to it if it must."""
        if not self._first <= batch < self._first + len(self._slots):
            width = min(max(2 * len(self._slots), NARROWEST), WIDEST)
            accumulate = self._schedule.accumulate
            first = batch * accumulate
            last = (batch + width) * accumulate
            # rows from a file may begin with any microbatch of a batch
            slots = (
                self._schedule.slots(Kind.FORWARD, first, last, slice(0, 1))
                .reshape(width, accumulate)
                .min(axis=1)
            )
            counts = self._schedule.count_before(Kind.UPDATE, slots - self._margin).min(axis=0)
            self._first = batch
            self._slots = slots.tolist()
            self._left = counts.tolist()
        return batch - self._first
