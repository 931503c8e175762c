"""The emulator as a backend: one process, the whole model."""

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
    """The exact emulator as an engine: one process, all stages."""

    def __init__(self, job: Job, first_update: int) -> None:
        super().__init__(job)
        config, work = job.config, Work.of(job, first_update)
        self._block_updates, self._end = work.block_updates, job.updates
        self._emulator = Emulator(work, job.model, job.part, job.example, config.seed, job.width, job.effects.draws)

    def step(self, k: int, read: bool = True) -> List[StepResult]:
        with attribute_faults(lambda: self._emulator.place):
            if not does_reading_wait(self.job.device):
                return self._combine([self._emulator.step(self._microbatches()) for _ in range(self._block_updates)])
            for _ in range(self._block_updates):
                self._emulator.advance(self._microbatches())
            return self._combine(self._emulator.read()) if read else []

    def _microbatches(self) -> Iterator[Tuple[Any, Any]]:
        """Yield the microbatches of the replays up to the next that updates, each when its turn has come."""
        is_done = False
        while not is_done:
            replay = self._emulator.replay
            is_done = len(replay.updates) > 0
            yield self.job.microbatch(replay.microbatch, replay.replica)

    def _combine(self, results: Sequence[StepResult]) -> List[StepResult]:
        """Return the results of steps, each of which consists of several updates of single stages where a replay updates one.

        A step's samples are those of one microbatch: its updates stand for the gradients of all P stages of that microbatch.
        """
        count = self._block_updates
        if count == 1:
            return list(results)
        steps = []
        for first in range(0, len(results), count):
            of_step = results[first : first + count]
            shares = [result.accuracy for result in of_step if result.accuracy is not None]
            accuracy = sum(shares) / count if len(shares) == count else None
            steps.append(StepResult(sum(result.loss for result in of_step) / count, accuracy, of_step[0].samples))
        return steps

    def end(self, done: int, asked: bool) -> int:
        if asked:
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
            "gradients": count_bytes(trained),  # at each update all are there
            "optimizer": sum(optimizer),
        }
        return Report(optimizer, [versions], None, None, peak_memory=[peaks])

    def profile(self) -> Optional[StageSeconds]:
        return profile(self.job)

    def close(self) -> None:
        self._emulator.close()
        self.release_blocks()


def does_reading_wait(device: torch.device) -> bool:
    """Return whether reading a tensor waits for all that the device was asked to do before."""
    return device.type == "cuda"


def check_launch(backend: BackendConfig) -> None:
    """Raise `BadInput` if this is one of several processes."""
    if read_launch().world > 1:
        raise BadInput(
            "backend.name: emulator: runs in one process: start it without torchrun, or set backend.name=distributed"
        )


def make(job: Job, first_update: int) -> EmulatorEngine:
    """Return the engine, which goes on with update `first_update`."""
    refuse_poptorch_state(job.optimizer)
    return EmulatorEngine(job, first_update)


BACKEND = Backend(
    check_launch, lambda config, asked: None, place_whole, list_exactness_faults, lambda job: "", make,
    emulates=True, pins_memory=True,
)  # fmt: skip
