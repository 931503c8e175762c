"""The emulator as a backend: one process, the whole model."""

from __future__ import annotations

from typing import Any, Iterable, Iterator, List, Optional, Tuple

import torch

from ipu_pipe.backends.emulator.measuring import combine_block_updates
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
from ipu_pipe.model.timing import StageSeconds
from ipu_pipe.update.optimizer import count_state_bytes, export_state


class EmulatorEngine(Engine):
    """The exact emulator."""

    def __init__(self, job: Job, first_update: int) -> None:
        super().__init__(job)
        config, work = job.config, Work.of(job, first_update)
        self._block_updates, self._end = work.block_updates, job.updates
        self._emulator = Emulator(work, job.model, job.part, job.example, config.seed, job.width, job.effects.draws)

    def step(self, k: int) -> StepResult:
        with attribute_faults(lambda: self._emulator.whereabouts):
            done = [self._emulator.step(self._microbatches()) for _ in range(self._block_updates)]
        return combine_block_updates(done, self._block_updates)[0]

    def advance(self, k: int, read: bool) -> List[StepResult]:
        if not reading_waits(self.job.device):
            return [self.step(k)]
        for _ in range(self._block_updates):
            self._emulator.advance(self._microbatches())
        return combine_block_updates(self._emulator.read(), self._block_updates) if read else []

    def _microbatches(self) -> Iterator[Tuple[Any, Any]]:
        """Those of the replays up to the next that updates, each when it is that one's turn."""
        is_done = False
        while not is_done:
            replay = self._emulator.replay
            is_done = len(replay.updates) > 0
            yield self.job.microbatch(replay.microbatch, replay.replica)

    def end(self, done: int, asked: bool) -> int:
        if asked:
            self._end = min(self._end, self.job.count_begun(done - 1))
        return self._end

    def evaluate(self) -> List[EvaluationResult]:
        with attribute_faults(lambda: f"evaluation before update {self._emulator.update}"):
            return evaluate(self.job)

    def state(self) -> Optional[CheckpointState]:
        with self.job.numbers.whole():
            model = self.job.model.state_dict()
        return CheckpointState(model, *export_state(self.job.optimizer, self.names))

    def report(self) -> Optional[Report]:
        state = count_state_bytes(self.job.optimizer, len(self.job.part))
        held = [own + masters for own, masters in zip(state, self.job.count_master_bytes())]
        model, versions = self.job.model, self._emulator.peak_bytes
        trained = [p for p in self.job.get_trained().values() if p.requires_grad]
        peaks = {
            "weights": _bytes([*model.parameters(), *model.buffers()]),
            "versions": versions,
            "gradients": _bytes(trained),  # at each update all are there
            "optimizer": sum(held),
        }
        return Report(held, [versions], None, None, peak_memory=[peaks])

    def profile(self) -> Optional[StageSeconds]:
        return profile(self.job)

    def close(self) -> None:
        self._emulator.close()
        self.release_blocks()


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def reading_waits(device: torch.device) -> bool:
    """Whether to read a tensor is to wait for all that the device was asked before."""
    return device.type == "cuda"


def check_launch(backend: BackendConfig) -> None:
    """Refuse (BadInput) to be one of several processes."""
    if read_launch().world > 1:
        raise BadInput(
            "backend.name: emulator: runs in one process: start it without torchrun, or set backend.name=distributed"
        )


def make(job: Job, first_update: int) -> EmulatorEngine:
    """The engine, to go on with update `first_update`."""
    refuse_poptorch_state(job.optimizer)
    return EmulatorEngine(job, first_update)


BACKEND = Backend(
    check_launch, lambda config, asked: None, place_whole, list_exactness_faults, lambda job: "", make,
    emulates=True, pins_memory=True,
)  # fmt: skip
