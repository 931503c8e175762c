"""The emulator as a backend: one process runs all stages of the whole model."""

from __future__ import annotations

from typing import Any, Iterator, List, Optional, Sequence, Tuple

import torch

from ipu_pipe.backends.emulator.profiling import profile
from ipu_pipe.backends.emulator.replay import Emulator
from ipu_pipe.backends.interface import Backend, CheckpointState, Engine, Report, StepResult, refuse_poptorch_state
from ipu_pipe.backends.work import Work, list_exactness_faults
from ipu_pipe.config.schema import BackendConfig
from ipu_pipe.errors import BadInput
from ipu_pipe.job.evaluation import EvaluationResult, evaluate
from ipu_pipe.job.placing import place_whole
from ipu_pipe.job.record import Job
from ipu_pipe.job.user_code import attribute_faults
from ipu_pipe.launcher import read_launch
from ipu_pipe.model.batch import count_bytes
from ipu_pipe.model.timing import StageSeconds
from ipu_pipe.update.optimizer import count_state_bytes, export_state


class EmulatorEngine(Engine):
    """Run the exact emulator as an engine."""

    def __init__(self, job: Job, first_update: int) -> None:
        super().__init__(job)
        config, work = job.config, Work.of(job, first_update)
        self._block_updates = work.block_updates
        self._end = job.updates
        self._emulator = Emulator(work, job.model, job.part, job.example, config.seed, job.width, job.effects.draws)

    def step(self, k: int, read: bool = True) -> List[StepResult]:
        with attribute_faults(lambda: self._emulator.place):
            if not reading_synchronizes(self.job.device):
                return self._combine([self._emulator.step(self._microbatches()) for _ in range(self._block_updates)])
            for _ in range(self._block_updates):
                self._emulator.advance(self._microbatches())
            return self._combine(self._emulator.read()) if read else []

    def _microbatches(self) -> Iterator[Tuple[Any, Any]]:
        """Yield lazily, in replay order, the microbatches up to and including the next replay with an update."""
        is_done = False
        while not is_done:
            replay = self._emulator.replay
            is_done = len(replay.updates) > 0
            yield self.job.microbatch(replay.microbatch, replay.replica)

    def _combine(self, results: Sequence[StepResult]) -> List[StepResult]:
        """Return one result per step of the run.

        Randomized methods update one stage per replay. P such updates use the gradients of P stages, as many as other methods
        compute from one microbatch. So they count as one step with the samples of one microbatch and the mean loss and accuracy.
        """
        count = self._block_updates
        if count == 1:
            return list(results)
        steps = []
        for first in range(0, len(results), count):
            step_results = results[first : first + count]
            accuracies = [result.accuracy for result in step_results if result.accuracy is not None]
            accuracy = sum(accuracies) / count if len(accuracies) == count else None
            steps.append(StepResult(sum(result.loss for result in step_results) / count, accuracy, step_results[0].samples))
        return steps

    def end(self, done: int, stop_requested: bool) -> int:
        if stop_requested:
            self._end = min(self._end, self.job.count_begun(done - 1))
        return self._end

    def evaluate(self, split: str = "test") -> List[EvaluationResult]:
        with attribute_faults(lambda: f"evaluation before update {self._emulator.update}"):
            with self.job.rules.hold_averages():
                return evaluate(self.job, split)

    def state(self) -> Optional[CheckpointState]:
        with self.job.numbers.whole():
            model = self.job.model.state_dict()
        with self._emulator.exported():
            return CheckpointState(model, *export_state(self.job.optimizer, self.names))

    def report(self) -> Optional[Report]:
        state = count_state_bytes(self.job.optimizer, len(self.job.part), self._emulator.list_other_states())
        optimizer = [size + masters for size, masters in zip(state, self.job.count_master_bytes())]
        model, versions = self.job.model, self._emulator.peak_bytes
        trained = [p for p in self.job.get_trained().values() if p.requires_grad]
        peaks = {
            "weights": count_bytes([*model.parameters(), *model.buffers()]),
            "versions": versions,
            # each update has all gradients in memory
            "gradients": count_bytes(trained),
            "optimizer": sum(optimizer),
        }
        return Report(optimizer, [versions], None, None, peak_memory=[peaks])

    def profile(self) -> Optional[StageSeconds]:
        return profile(self.job)

    def close(self) -> None:
        self._emulator.close()
        self.release_blocks()


def reading_synchronizes(device: torch.device) -> bool:
    """Return whether reading a tensor waits for all work queued on the device."""
    return device.type == "cuda"


def check_launch(backend: BackendConfig) -> None:
    """Raise `BadInput` if this is one of several processes."""
    if read_launch().world > 1:
        raise BadInput(
            "backend.name: emulator: runs in one process: start it without torchrun, or set backend.name=distributed"
        )


def make(job: Job, first_update: int) -> EmulatorEngine:
    """Return the engine, which continues with update `first_update`."""
    refuse_poptorch_state(job.optimizer)
    return EmulatorEngine(job, first_update)


BACKEND = Backend(
    check_launch=check_launch, place=place_whole, faults=list_exactness_faults, engine=make, emulates=True, pins_memory=True
)
