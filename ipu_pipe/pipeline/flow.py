"""The batches of a run on their way through its pipeline, one by one: `Pipeline` and `train` give
them by the same `Flow`.

    give    the next batch enters, and every process runs exactly the actions before the batch after it enters
    take    the results of the updates that have left the pipeline by then
    drain   the stretch of the schedule that has begun is finished, and the next batch begins another one

Nobody knows the end of the run: the schedule is open, and a drain is added to it when it happens.
The schedule names the cut of each step: the slot in which stage 0 begins the next batch.
"""

from __future__ import annotations

import contextlib
import copy
from typing import ContextManager, Iterator

from ipu_pipe.backends.interface import StepResult
from ipu_pipe.backends.table import make_engine
from ipu_pipe.errors import BadInput, Divergence, RunFault
from ipu_pipe.job.record import Job
from ipu_pipe.pipeline.gradients import OwnGradients
from ipu_pipe.pipeline.state import SavedState, cast_entries
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.timelines import open_schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.store.checkpoint import load_weights
from ipu_pipe.update.apply import AVERAGE
from ipu_pipe.update.optimizer import import_state, keeps_elementwise

# Cuts are read in windows that widen, since one slot alone costs as much as hundreds at once: the
# batches of the first window after a drain, and of the widest.
NARROWEST = 8
WIDEST = 512


class Flow:
    """Give the batches of a job to an engine, and take the results of the updates that leave.

    `given`: the number of batches given, of which the first ones were given before this start;
    `left`: the updates whose results were taken; `drains`: the updates after which the pipeline ran
    empty; `table`: the versions of the schedule that runs, whose end is open and which has the
    newest drains.
    """

    def __init__(self, job: Job, given: int = 0) -> None:
        self._job = job
        self.given = self.left = given
        self.drains = [given] if given else []
        self._open()
        self.engine = make_engine(job, given, self.table)
        stepped = [p for group in job.optimizer.param_groups for p in group["params"]]
        self._gradients = OwnGradients(job.model.parameters(), stepped)

    def lend_gradients(self) -> ContextManager[None]:
        """Put the gradients in flight into `p.grad` inside the context; each call of this class does
        so itself.
        """
        return self._gradients.lend()

    def give(self) -> None:
        """Give batch k, and run the actions of slots before batch k + 1 enters."""
        k = self.given
        self.given = k + 1
        with self.lend_gradients():
            self.engine.give(k, self.find_cut(k + 1))

    def take(self) -> Iterator[tuple[int, StepResult]]:
        """Yield the number and the result of each update that has left the pipeline since the last
        call.
        """
        return self._take_before(self.count_left(self.given))

    def find_cut(self, batch: int) -> int:
        """Return the slot of stage 0's first forward of a batch, 0 if the method has no
        pipeline.
        """
        # the window may move, so the index comes first
        index = self._locate(batch)
        return self._slots[index]

    def count_left(self, batches: int) -> int:
        """Return the updates that have left the pipeline when this many batches were given: those
        that all stages have made before the next batch enters.
        """
        if self.engine.is_empty_after_calls:
            return batches
        index = self._locate(batches)
        return self._left_counts[index]

    def _take_before(self, end: int) -> Iterator[tuple[int, StepResult]]:
        for k in range(self.left, end):
            result = self.engine.take(k)
            self.left = k + 1
            yield k, result

    @property
    def is_empty(self) -> bool:
        """Whether no batch was given since the pipeline ran empty."""
        return not self.given or self.drains[-1:] == [self.given]

    def drain(self) -> list[tuple[int, StepResult]]:
        """Run the pipeline empty, unless it is. Return the numbers and results of the updates that
        had not been taken.
        """
        if self.is_empty:
            return []
        self.drains.append(self.given)
        # the engine finishes the row that it has begun; the new schedule says that a round of
        # replicas may end here
        self._open()
        with self.lend_gradients():
            self.engine.finish(self.given, self.table)
            # a list, so that they are taken before the next stretch begins
            updates = list(self._take_before(self.given))
            self.engine.reopen(self.given, self.table)
        return updates

    def finish(self) -> Iterator[tuple[int, StepResult]]:
        """Run the pipeline empty for the last time, within a round of replicas. Yield the updates
        that had not been taken.
        """
        with self.lend_gradients():
            self.engine.finish(self.given, self.table)
            yield from self._take_before(self.given)

    def load(self, saved: SavedState) -> None:
        """Go on from the position of a state, with its weights and the optimizer's entries; the
        pipeline is empty.
        """
        job = self._job
        model = saved.model
        tensors = saved.optimizer
        if job.precision.is_sharded:
            model = job.precision.masters.import_weights(model, job.model)
            tensors = job.precision.masters.import_entries(tensors, job.model)

        def load() -> None:
            with job.precision.put_masters_in_place(loads=True):
                # what other ranks have is of no use here, and what was loaded before is there
                load_weights(job.model, {**job.model.state_dict(), **model}, "state")

        self.engine.load_weights(load)
        trained = job.get_trained()
        names = {parameter: name for name, parameter in trained.items()}
        # nobody moves the average of a frozen weight, which is the weight itself before long
        frozen = {f"{name}/{AVERAGE}" for name, p in trained.items() if not p.requires_grad}
        # copies, because an optimizer changes its state in place
        tensors = {key: value.clone() for key, value in tensors.items() if key not in frozen}
        if keeps_elementwise(job.optimizer):
            # as torch's own `load_state_dict` does
            tensors = cast_entries(tensors, trained)
        import_state(job.optimizer, names, tensors, copy.deepcopy(saved.plain))
        job.rules.forget_compensated()
        self._gradients.forget()
        self.given = self.left = saved.updates
        self.drains = list(saved.drains)
        self._open()
        self.engine.reopen(self.given, self.table, is_loaded=True)

    def leave(self, error: BaseException) -> None:
        """Leave the newest weights in the model after an error, and the other processes, which may
        wait for this one.
        """
        if not isinstance(error, RunFault):
            # a pass may have read older weights; what has failed may fail here again
            with contextlib.suppress(Exception):
                self.engine.keep_newest()
        # bad input and divergence are found by all ranks alike, and Ctrl-C comes to all
        if not isinstance(error, (BadInput, Divergence, KeyboardInterrupt, SystemExit)):
            self.engine.leave()

    def find_end(self, k: int) -> int:
        """Return the number of batches given when update k leaves, after which a run ends that is
        asked to end by it.

        The round of replicas with weights of their own ends too.
        """
        if self._job.method.rounds is not None:
            return self.table.schedule.get_drain_interval(k)[1]
        # update k leaves at the earliest with its own batch
        batches = k + 1
        while self.count_left(batches) <= k:
            batches += 1
        # a run cannot end inside a device's call
        per_call = self.engine.updates_per_call
        return -(-batches // per_call) * per_call

    def _open(self) -> None:
        """Make the versions of a schedule with the newest drains and an open end.

        The drains before the last two are left out, so that a drain costs the same however many
        came before it: no pass after a drain reads what was before it, and the engine that finishes
        a stretch asks for the beginning and the end of that stretch alone.
        """
        job = self._job
        schedule = open_schedule(
            job.method,
            len(job.partition),
            job.schedule.accumulate,
            self.drains[-2:],
            job.rules.switch,
        )
        self.table = VersionTable(schedule, job.method, job.config.seed)
        # the window of cuts: of the batches from `_first` on
        self._first = 0
        self._slots: list[int] = []
        self._left_counts: list[int] = []

    def _locate(self, batch: int) -> int:
        """Return the index of a batch in the window of cuts, which moves on to it if it must."""
        if not self._first <= batch < self._first + len(self._slots):
            width = min(max(2 * len(self._slots), NARROWEST), WIDEST)
            self._first = batch
            self._slots, self._left_counts = self._read_cuts(batch, width)
        return batch - self._first

    def _read_cuts(self, batch: int, width: int) -> tuple[list[int], list[int]]:
        """Return the cuts before `width` batches from `batch` on, and the updates that all stages
        have made before each of them.
        """
        job = self._job
        if job.method.history is not None:
            # no pipeline: each update has left when the next batch enters
            return [0] * width, list(range(batch, batch + width))
        schedule = self.table.schedule
        accumulate = schedule.accumulate
        first_microbatch = batch * accumulate
        end_microbatch = (batch + width) * accumulate
        # rows from a file may begin with any microbatch of a batch
        slots = (
            schedule.slots(Kind.FORWARD, first_microbatch, end_microbatch, slice(0, 1))
            .reshape(width, accumulate)
            .min(axis=1)
        )
        # with local losses no gradient comes back, and the last stage's loss takes as many slots to
        # arrive
        margin = len(job.partition) - 1 if job.method.structure is not None else 0
        counts = schedule.count_before(Kind.UPDATE, slots - margin).min(axis=0)
        return slots.tolist(), counts.tolist()
