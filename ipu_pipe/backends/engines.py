"""What trains a job: the emulator in this process, or one stage of it here and the others in processes of their own.

Every process of a run has an engine and calls the same methods in the same order; the main one (rank 0) also writes.
"""

from __future__ import annotations

import contextlib
from typing import Callable, Iterator, List, Mapping, Optional, Tuple, TypeVar

import torch

from ipu_pipe import launched
from ipu_pipe.backends.emulator import Emulator
from ipu_pipe.backends.interface import StepResult
from ipu_pipe.backends.ipu.model import refuse_foreign
from ipu_pipe.errors import BadInput, RunFault, user_fault
from ipu_pipe.job.blame import attributed
from ipu_pipe.job.config import BackendConfig, Config
from ipu_pipe.job.evaluation import evaluate
from ipu_pipe.job.position import Measured
from ipu_pipe.job.record import Job
from ipu_pipe.local.blocks import blocks_of
from ipu_pipe.orphans import end_with_launcher
from ipu_pipe.update import optimizer as update

Result = TypeVar("Result")


class LocalEngine(Engine):
    """The exact emulator."""

    def __init__(self, job: Job, first_update: int) -> None:
        super().__init__(job)
        config = job.config
        self._emulator = Emulator(
            job.model, job.loss, job.part, job.method, job.table, job.optimizer, job.rules, job.example,
            seed=config.seed, clip=(config.clip.norm, config.clip.scope) if config.clip else None,
            allow_nonfinite=config.allow_nonfinite, microbatch=first_update * config.gradient_accumulation,
            replicas=config.replicas,
        )  # fmt: skip

    def step(self, k: int) -> StepResult:
        accumulate = self.job.config.gradient_accumulation
        with attributed(lambda: self._emulator.whereabouts):
            return self._emulator.step(self._microbatches(k * accumulate, (k + 1) * accumulate))

    def advance(self, k: int, read: bool) -> List[StepResult]:
        if not reading_waits(self.job.device):
            return [self.step(k)]
        accumulate = self.job.config.gradient_accumulation
        self._emulator.advance(self._microbatches(k * accumulate, (k + 1) * accumulate))
        return self._emulator.read() if read else []

    def _microbatches(self, first: int, last: int) -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
        for m in range(first, last):
            for replica in range(self.job.config.replicas):
                yield self.job.microbatch(m, replica)

    def evaluate(self) -> List[Measured]:
        with attributed(lambda: f"evaluation before update {self._emulator.update}"):
            return evaluate(self.job)

    def state(self) -> Optional[State]:
        return State(self.job.model.state_dict(), *update.export_state(self.job.optimizer, self.names))

    def report(self) -> Optional[Report]:
        held = update.optimizer_bytes(self.job.optimizer, len(self.job.part))
        return Report(held, [self._emulator.weights.peak_bytes], None, None)

    def close(self) -> None:
        self._emulator.close()
        blocks = blocks_of(self.job.model)
        if blocks is not None:
            blocks.release()


def reading_waits(device: torch.device) -> bool:
    """Whether to read a tensor is to wait for all that the device was asked before."""
    return device.type == "cuda"


def is_distributed() -> bool:
    """Whether a launcher such as torchrun started this process as one of several."""
    return launched.read().is_one_of_several


def is_main() -> bool:
    """Whether this process prints and writes."""
    return launched.read().rank == 0


def check_launch(backend: BackendConfig) -> None:
    """Refuse (BadInput) a backend that the way the process was started does not fit."""
    where = launched.read()
    if where.faults:
        raise BadInput(where.faults)
    if backend.name == "distributed" and not is_distributed():
        raise BadInput(
            "backend.name: distributed: each stage runs in a process of its own: start it with"
            " torchrun --nproc_per_node STAGES tools/train.py CONFIG --set backend.name=distributed"
        )
    if backend.name == "poptorch":
        from ipu_pipe.backends.ipu import engine as poptorch

        poptorch.check_launch(backend, is_distributed())
    if backend.name == "emulator" and where.world > 1:
        raise BadInput(
            "backend.name: emulator: runs in one process: start it without torchrun, or set backend.name=distributed"
        )


def launch(config: Config, asked: Optional[Mapping[str, object]] = None) -> None:
    """Join the other processes of the run, where there are any. Raises BadInput, on each of them, where another one was `asked`
    (option -> value) for something else or has another config."""
    backend = config.backend
    check_launch(backend)
    if is_distributed():  # before it joins: then a launcher that is gone by now has taken the meeting place with it
        end_with_launcher()
    if backend.name == "distributed":
        from ipu_pipe.backends.processes import engine as processes

        processes.start(config, asked or {})
    if backend.name == "poptorch":
        from ipu_pipe.backends.ipu import engine as poptorch

        poptorch.start(backend)
        if is_distributed():  # under poprun it knows only now that it is one of several
            end_with_launcher()


def leave() -> None:
    """When all is done: part from the other processes."""
    if is_distributed():
        from ipu_pipe.backends.processes import engine as processes

        processes.stop()


def on_main(work: Callable[[], Result]) -> Result:
    """`work()` on the main process; its result, or its BadInput, on every one."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return work()
    from ipu_pipe.backends.processes import engine as processes

    return processes.on_all_ranks(work)


@contextlib.contextmanager
def told_once() -> Iterator[None]:
    """Of the processes of a run the first that comes here with a fault or bad input tells it."""
    try:
        yield
    except Exception as error:
        told = error if isinstance(error, (BadInput, RunFault)) else user_fault(error)
        if told is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
            from ipu_pipe.backends.processes import engine as processes

            told.is_told = not processes.is_first_to_tell()
        raise


def make_engine(job: Job, first_update: int) -> Engine:
    """The engine of this process, to go on with update `first_update`."""
    if job.config.backend.name == "poptorch":
        from ipu_pipe.backends.ipu import engine as poptorch

        return poptorch.make(job, first_update)
    refuse_foreign(job.optimizer)
    if job.config.backend.name == "distributed":
        from ipu_pipe.backends.processes.engine import ProcessEngine

        return ProcessEngine(job, first_update)
    return LocalEngine(job, first_update)
