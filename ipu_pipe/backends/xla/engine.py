"""One job on XLA devices, which one process drives through jax.

The devices hold the newest weights. The model and the optimizer on the host get them when someone
looks: for an evaluation, a checkpoint, a prediction, and at the end.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, Sequence

import jax
import torch

from ipu_pipe.backends.interface import CheckpointState, Engine, Report, StepResult
from ipu_pipe.backends.processes.trace import TraceRecorder
from ipu_pipe.backends.xla.devices import list_devices
from ipu_pipe.backends.xla.player import Player, StagePlayer, make_passes
from ipu_pipe.backends.xla.slots import SlotPlayer, chooses_slots
from ipu_pipe.job.evaluation import (
    BatchReader,
    EvaluationResult,
    compute_outputs,
    enter_evaluation,
    evaluate_batches,
)
from ipu_pipe.job.metrics import Metric
from ipu_pipe.job.record import Job
from ipu_pipe.job.user_code import attribute_faults
from ipu_pipe.model.precision import export_loss
from ipu_pipe.replay.run import Batches, Run
from ipu_pipe.replay.work import Work
from ipu_pipe.schedule.actions import SPLIT_PASSES
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.trace.events import concatenate_events
from ipu_pipe.update.optimizer import export_state


class XlaEngine(Engine):
    """Play all stages on their XLA devices."""

    leaves_weights_stale = True

    def __init__(self, job: Job, first_update: int, table: VersionTable) -> None:
        super().__init__(Run.of(job), Batches.of(job))
        self.job = job
        self._first_update = first_update
        self.newest_model = None
        work = Work.of(self.run, first_update, table)
        devices = list_devices(job.config.backend)
        is_split = job.schedule.passes == SPLIT_PASSES
        placed = [devices[device % len(devices)] for device in job.placement]
        all_passes = make_passes(job.stage_graphs, placed, is_split)
        stages = [StagePlayer(job, work, s, passes) for s, passes in enumerate(all_passes)]
        recorders = [
            TraceRecorder(device, 0, job.traced_updates) for device in range(max(job.placement) + 1)
        ]
        for recorder in recorders:
            recorder.begin_update(first_update)
        player = SlotPlayer if chooses_slots(job, stages) else Player
        self._player: Player = player(job, work, stages, recorders)
        self._is_exported = True

    # ---- updates

    def give(self, k: int, cut: float) -> None:
        self._advance(cut, k + 1)

    def finish(self, batches: int, table: VersionTable) -> None:
        self._advance(float("inf"), batches)

    def _advance(self, cut: float, batches: int) -> None:
        self._is_exported = False
        with attribute_faults(lambda: f"update {self._player.update}, {self._player.doing}"):
            self._player.advance(cut, batches)

    def take(self, k: int) -> StepResult:
        return StepResult(*self._player.take(k))

    def reopen(self, update: int, table: VersionTable, is_loaded: bool = False) -> None:
        if is_loaded:
            for stage in self._player.stages:
                stage.load()
        else:
            self._player.gather()
        self._player.begin(Work.of(self.run, update, table))

    # ---- the host's model

    def _export(self) -> None:
        """Put the newest weights and the optimizer's state into the objects on the host."""
        if not self._is_exported:
            self._player.gather()
            for stage in self._player.stages:
                stage.export()
        self._is_exported = True

    def predict(self, x: Any) -> Any:
        self._export()
        with enter_evaluation(self.job.model):
            return compute_outputs(self.job.model, x)[-1]

    def evaluate(self, batches: BatchReader, metrics: Sequence[Metric]) -> list[EvaluationResult]:
        self._export()
        with attribute_faults(lambda: f"evaluation before update {self._player.update}"):
            return evaluate_batches(self.run.model, self.run.loss, batches(), metrics)

    def load_weights(self, load: Callable[[], None]) -> None:
        self._export()
        load()

    @contextlib.contextmanager
    def hold_whole_model(self, everywhere: bool = True) -> Iterator[None]:
        self._export()
        self.newest_model = self.job.model
        try:
            yield
        finally:
            self.newest_model = None

    def collect_state(self) -> CheckpointState | None:
        self._export()
        # copies, because a checkpoint may be written while training goes on
        model = {name: t.clone() for name, t in self.job.model.state_dict().items()}
        return CheckpointState(
            model, *export_state(self.job.optimizer, self.names), export_loss(self.job.loss)
        )

    # ---- measurements and the end

    def report(self) -> Report | None:
        player = self._player
        player.gather()
        stages = player.stages
        events = None
        if self.job.traced_updates:
            events = concatenate_events([recorder.read_events() for recorder in player.recorders])
        return Report(
            [stage.optimizer.count_bytes() for stage in stages],
            [stage.peak_bytes for stage in stages],
            player.links,
            events,
            (player.update - self._first_update) * self.job.schedule.accumulate,
            peak_memory=self._measure_peaks(),
        )

    def _measure_peaks(self) -> list[dict[str, int]] | None:
        """Return the peak bytes of each device, None if the devices do not count them."""
        devices = {s.passes.device.id: s.passes.device for s in self._player.stages}
        stats = [device.memory_stats() for device in devices.values()]
        if not all(stats):
            return None
        return [{"total": int(one["peak_bytes_in_use"])} for one in stats if one]

    def close(self) -> None:
        self._export()
        self.newest_model = self.job.model
        self.release_blocks()

    def abort(self) -> None:
        # after a fault the arrays may be lost with their device
        with contextlib.suppress(Exception):
            self._export()


def describe(job: Job) -> str:
    """Return a line on the devices of the stages."""
    devices = list_devices(job.config.backend)
    used = min(len(devices), max(job.placement) + 1)
    return (
        f"{len(job.partition)} stages on {used} {devices[0].platform} devices of XLA "
        f"(jax {jax.__version__}, {devices[0].device_kind}), torch {torch.__version__}"
    )
