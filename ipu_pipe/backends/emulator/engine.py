"""The emulator as a backend: one process runs all stages of the whole model, and times them after
training.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any, Iterator, Sequence

import numpy as np
import torch

from ipu_pipe.backends.emulator.replay import Emulator
from ipu_pipe.backends.interface import Backend, CheckpointState, Engine, Report, StepResult
from ipu_pipe.errors import summarize
from ipu_pipe.job.factories import place_whole
from ipu_pipe.job.user_code import attribute_faults, is_own_exit
from ipu_pipe.model.batch import call_model, clone_tensors, count_bytes, count_samples
from ipu_pipe.model.devices import get_kind
from ipu_pipe.model.flops import BACKWARD
from ipu_pipe.model.loss import compute_losses
from ipu_pipe.model.precision import get_user_loss
from ipu_pipe.model.restoring import restore_function
from ipu_pipe.model.timing import (
    SECONDS_OF_STAGE,
    BestSeconds,
    Clock,
    FloatArray,
    PassSeconds,
    StageSeconds,
    compute_share,
    repeat_until_close,
    time_passes,
)
from ipu_pipe.replay.run import Run
from ipu_pipe.replay.work import Work, list_exactness_faults
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.update.optimizer import count_state_bytes, list_parts

# ---- profile: time each stage's passes and updates after training


def time_stages(run: Run) -> StageSeconds:
    """Return the least times of passes of the run's example, or only the reason if the user's code
    cannot do another pass.

    Weights, buffers, gradients, random states and a loss's own state stay as they are.
    """
    try:
        passes = _time_passes(run)
        updates = _time_updates(run)
    # the user's code may raise anything, also what is no Exception, which must not lose a finished run
    except BaseException as error:
        is_exit = isinstance(error, SystemExit) and is_own_exit(error)
        if is_exit or isinstance(error, KeyboardInterrupt):
            raise
        return StageSeconds((), (), (), f"its stages could not be timed ({summarize(error)})")
    backward = passes.backward
    # a backward includes its recomputation
    if run.method.segments is not None:
        backward = [f + b for f, b in zip(passes.forward, backward)]
    pass_seconds = np.add(passes.forward, backward)
    update_seconds = updates.least[0] / run.table.schedule.accumulate
    # spreads are shares, each of its own time
    excess = np.array(passes.spread) * pass_seconds + updates.spread * update_seconds
    spread = compute_share(excess, pass_seconds + update_seconds)
    # without the number of passes, which depends on how busy the machine was
    note = f"the least of repeated passes of {count_samples(run.example[0])} samples after training"
    return StageSeconds(
        tuple(passes.forward),
        tuple(backward),
        tuple(updates.least[0].tolist()),
        note,
        tuple(spread.tolist()),
    )


def _time_passes(run: Run) -> PassSeconds:
    x, y = run.example
    footprint = run.footprint
    flops = footprint.backward_flops or tuple(BACKWARD * f for f in footprint.forward_flops)

    # clones, because the model and the loss may write to what they get
    def run_forward() -> list[torch.Tensor]:
        return compute_losses(run.loss, call_model(run.model, clone_tensors(x)), clone_tensors(y))

    seconds = SECONDS_OF_STAGE * len(run.partition)
    # a loss may keep a state, with which a training that is still under way goes on
    with restore_function(get_user_loss(run.loss)):
        return time_passes(run.model, run_forward, run.partition.begins, flops, seconds)


def _time_updates(run: Run) -> BestSeconds:
    """Return the time of a step of a copy of the optimizer for each stage, without the update
    rules.

    It is 0 for an optimizer that is not from torch.optim, because a copy of it may share state with
    the original.
    """
    optimizers = list_parts(run.optimizer)
    if not all(type(optimizer).__module__.startswith("torch.optim.") for optimizer in optimizers):
        nothing = np.zeros((1, len(run.partition)))
        return BestSeconds(nothing, nothing[0])
    # a copy, because the timed steps would change the run's state
    copies = copy.deepcopy(optimizers)
    groups_of_copy = [optimizer.param_groups for optimizer in copies]
    for p in (p for groups in groups_of_copy for group in groups for p in group["params"]):
        # an optimizer skips parameters without a gradient
        p.grad = torch.zeros_like(p)
    kind = get_kind(run.device.type)

    def time_steps(read_seconds: Clock) -> FloatArray:
        seconds = np.zeros((1, len(run.partition)))
        for optimizer, groups in zip(copies, groups_of_copy):
            for stage in range(len(run.partition)):
                # the timed part of the step: the groups of one stage
                optimizer.param_groups = [group for group in groups if group["stage"] == stage]
                if any(group["params"] for group in optimizer.param_groups):
                    start = read_seconds()
                    optimizer.step()
                    # the host only queues the step of a GPU
                    kind.synchronize()
                    seconds[0, stage] += read_seconds() - start
        return seconds

    return repeat_until_close(time_steps, kind, SECONDS_OF_STAGE)


# ---- engine and backend


class EmulatorEngine(Engine):
    """Run the exact emulator as an engine: the results are the same whenever an update is made, so
    it is made at once.
    """

    makes_updates_at_once = True

    def __init__(self, run: Run, first_update: int, table: VersionTable) -> None:
        super().__init__(run)
        work = Work.of(run, first_update, table)
        self._block_updates = work.block_updates
        # results that were not taken, and the first update whose result was not read
        self._results: dict[int, StepResult] = {}
        self._unread_update = first_update
        self._emulator = self._make_emulator(work)

    def _make_emulator(self, work: Work) -> Emulator:
        run = self.run
        return Emulator(
            work,
            run.model,
            run.partition,
            run.example,
            run.seed,
            run.replicas,
            run.observation.effects.draws,
        )

    @property
    def update(self) -> int:
        return self._emulator.update // self._block_updates

    def give(self, k: int, cut: float) -> None:
        with attribute_faults(lambda: self._emulator.activity):
            for _ in range(self._block_updates):
                self._emulator.advance(*self._read_batch())
            # a CPU has the results already; for a GPU's the host waits when they are taken
            if not does_reading_synchronize(self.run.device):
                self._keep(self._emulator.read())

    def take(self, k: int) -> StepResult:
        if k not in self._results:
            self._keep(self._emulator.read())
        return self._results.pop(k)

    def _keep(self, results: Sequence[StepResult]) -> None:
        """Keep results until they are taken."""
        for result in self._combine(results):
            self._results[self._unread_update] = result
            self._unread_update += 1

    def finish(self, batches: int, table: VersionTable) -> None:
        self._emulator.end_round(Work.of(self.run, batches, table))

    def reopen(self, update: int, table: VersionTable, is_loaded: bool = False) -> None:
        old = self._emulator
        # the newest weights must be in the parameters, from which the new stores begin
        old.close()
        # replicas with weights of their own go on through the optimizer's state, as through a
        # checkpoint
        with contextlib.nullcontext() if is_loaded else old.export_replicas():
            self._emulator = self._make_emulator(Work.of(self.run, update, table))
        # peaks are of the whole run
        self._emulator.weights.peak_bytes = old.weights.peak_bytes
        self._unread_update = update

    def _read_batch(self) -> tuple[Any, ...]:
        """Return the arguments of the emulator's step: the microbatches up to the next update, and
        any weights.
        """
        source = self.run.batches
        if self.run.loss_weight is None:
            return (self._microbatches(),)
        # the sum of the weights must be known before the first backward
        batches = []
        weights = []
        for replay in self._emulator.list_replays():
            batch = source.read(replay.microbatch, replay.replica)
            batches.append(batch)
            weights.append(source.weigh(batch, self.update, replay.microbatch, replay.replica))
        # moved to the device one by one, when its replay comes
        return map(source.prepare, batches), weights

    def _microbatches(self) -> Iterator[tuple[Any, Any]]:
        """Yield lazily, in replay order, the microbatches up to and including the next replay with
        an update.
        """
        is_done = False
        while not is_done:
            replay = self._emulator.replay
            # asked before the batch is given: running it moves on to the next replay
            is_done = len(replay.updates) > 0
            yield self.run.batches.load(replay.microbatch, replay.replica)

    def _combine(self, results: Sequence[StepResult]) -> list[StepResult]:
        """Return one result per step of the run.

        Randomized methods update one stage per replay. P such updates use the gradients of P
        stages, as many as other methods compute from one microbatch. So they count as one step with
        the samples of one microbatch and the mean loss and accuracy. Updates without weight have no
        loss.
        """
        count = self._block_updates
        if count == 1:
            return list(results)
        steps = []
        for first in range(0, len(results), count):
            step_results = results[first : first + count]
            accuracies = [result.accuracy for result in step_results if result.accuracy is not None]
            accuracy = sum(accuracies) / count if len(accuracies) == count else None
            losses = [result.loss for result in step_results if result.loss is not None]
            loss = sum(losses) / len(losses) if losses else None
            steps.append(StepResult(loss, accuracy, step_results[0].samples))
        return steps

    def collect_state(self) -> CheckpointState | None:
        with self._emulator.export_replicas():
            return super().collect_state()

    def report(self) -> Report | None:
        state = count_state_bytes(
            self.run.optimizer, len(self.run.partition), self._emulator.list_other_states()
        )
        optimizer = [size + masters for size, masters in zip(state, self.run.count_master_bytes())]
        model = self.run.model
        versions = self._emulator.peak_bytes
        trained = [p for p in self.names if p.requires_grad]
        peaks = {
            "weights": count_bytes([*model.parameters(), *model.buffers()]),
            "versions": versions,
            # each update has all gradients in memory
            "gradients": count_bytes(trained),
            "optimizer": sum(optimizer),
        }
        return Report(optimizer, [versions], None, None, peak_memory=[peaks])

    def profile(self) -> StageSeconds | None:
        return time_stages(self.run)

    def keep_newest(self) -> None:
        self._emulator.weights.load_newest()

    def close(self) -> None:
        self._emulator.close()
        self.release_blocks()


def does_reading_synchronize(device: torch.device) -> bool:
    """Return whether reading a tensor waits for all work queued on the device."""
    return get_kind(device).is_accelerator


BACKEND = Backend(place=place_whole, list_faults=list_exactness_faults, make_engine=EmulatorEngine)
