"""The interface of a backend: the record of its functions, its engines, and what these return.

Every process of a run has an engine and calls the same methods in the same order; the main one (rank 0) also writes.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Callable, ContextManager, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn

from ipu_pipe.backends.ranks import run_on_main
from ipu_pipe.config.schema import BackendConfig, Config
from ipu_pipe.errors import BadInput
from ipu_pipe.job.evaluation import EvaluationResult
from ipu_pipe.job.placing import Placed
from ipu_pipe.job.record import Job
from ipu_pipe.local.blocks import get_blocks
from ipu_pipe.model.timing import StageSeconds
from ipu_pipe.schedule.methods import Method
from ipu_pipe.schedule.runs import IntArray
from ipu_pipe.trace.events import Counters, Events


@dataclass(frozen=True)
class StepResult:
    """One update: mean training loss of its microbatches, share of right answers (None if that has no meaning), samples.

    `blocks`: loss and accuracy of each block that has a loss of its own, the model's own last; empty where there is one loss.
    """

    loss: float
    accuracy: Optional[float]
    samples: int
    blocks: Tuple[Tuple[float, Optional[float]], ...] = ()


class CheckpointState(NamedTuple):
    """All that a checkpoint holds of the model and the optimizer, by unsplit names."""

    model: Dict[str, torch.Tensor]
    optimizer: Dict[str, torch.Tensor]
    plain: Dict[str, Any]


class DeviceTimes(NamedTuple):
    """How a device with a clock spent the steps that count for throughput: in passes and updates, waiting for others, on messages
    while it did nothing else; `span_ns` is the whole."""

    busy_ns: int
    wait_ns: int
    communication_ns: int
    span_ns: int


class Report(NamedTuple):
    """What the devices measured; None is what a backend cannot know."""

    optimizer_bytes: List[int]  # of state, by stage
    version_bytes: List[int]  # the most of weight versions besides the newest, by stage
    links: Optional[Dict[Tuple[int, int], Tuple[int, int]]]  # (source, target) -> bytes, messages
    events: Optional[Events]  # of all ranks
    microbatches: int = 0  # that links and events are of
    shared: Optional[Dict[Tuple[int, int], Tuple[int, int]]] = None  # as links, with the gradients of shared layers
    counters: Optional[Counters] = None
    utilization: Optional[float] = None  # busy share of the devices' own schedule, if it is not the job's
    files: Optional[Dict[str, Any]] = None  # JSON files of the backend's own, by name
    times: Optional[List[DeviceTimes]] = None  # by device, of the steps of this start that count for throughput
    peak_memory: Optional[List[Dict[str, int]]] = None  # by device, the most bytes by category and at once ("total")


class Engine:
    """One process's part of a run."""

    is_main = True
    checkpoint_group: Any = None  # of all processes, where each writes its part of a checkpoint
    updates_per_call = 1  # a device may make several updates in one call: the first of them waits for all

    def __init__(self, job: Job) -> None:
        self.job = job
        self.names = {parameter: name for name, parameter in job.get_trained().items()}
        self._gradients: Dict[str, torch.Tensor] = {}
        if job.watches_gradients:
            job.rules.observe = self._note_gradients

    def step(self, k: int, read: bool = True) -> List[StepResult]:
        """Carry out update k and return the results since the last call; none unless `read` if reading would hold a GPU up.

        On other processes than the main one they may be empty.
        """
        raise NotImplementedError

    def _note_gradients(self, k: int, stages: Sequence[int]) -> None:
        """Copy the gradients of update k of these stages."""
        trained = [item for s in range(len(self.job.part)) if s in stages for item in self.job.list_trained(s).items()]
        self._gradients = {name: p.grad.detach().cpu().clone() for name, p in trained if p.grad is not None}

    def collect_gradients(self, k: int) -> Dict[str, torch.Tensor]:
        """Return on the main process the gradients of update k, which `step` has done, on the CPU by unsplit names.

        They are those at hand when the optimizer's step begins: before clipping and what rules change in an update (gradient
        shrinking), after delay compensation, which changes those of each microbatch. Only of a job that `watches_gradients`.
        """
        return self._gradients

    def end(self, done: int, asked: bool) -> int:
        """Return how many updates the run has, when `done` are: fewer than planned if the main process has `asked` to end it.

        Every process calls this after each update, and ends at the same one: when what is in the pipeline is done.
        """
        # only where the pipeline is empty
        if self.job.schedule.stretch(done - 1)[1] > done:
            return self.job.updates
        return done if run_on_main(lambda: asked) else self.job.updates

    def current_model(self) -> Optional[nn.Module]:
        """Return the model where it holds the newest weights now, None where they are on other devices."""
        return self.job.model

    def hold_whole_model(self) -> ContextManager[None]:
        """Hold the whole model with the newest weights in every process, in a block where the pipeline is empty."""
        return contextlib.nullcontext()

    def evaluate(self, split: str = "test") -> List[EvaluationResult]:
        """Return loss and metrics on the test or validation set, on every process alike.

        They are those of each block that has a loss of its own, the model's own last.
        The pipeline is drained.
        """
        raise NotImplementedError

    def state(self) -> Optional[CheckpointState]:
        """Return the state for a checkpoint, on the main process, else None."""
        raise NotImplementedError

    def part(self) -> CheckpointState:
        """Return this process's part of the state, on every process, if `checkpoint_group` is there: each writes its own."""
        raise NotImplementedError

    def report(self) -> Optional[Report]:
        """Return what was measured, at the end, on the main process, else None."""
        raise NotImplementedError

    def profile(self) -> Optional[StageSeconds]:
        """Return what each stage's passes take, at the end before `close`; None if the devices have clocks."""
        return None

    def close(self) -> None:
        """Put the newest weights into the model and leave nothing behind."""

    def abort(self) -> None:
        """Leave nothing behind in the user's model after a fault, without waiting for anyone."""
        self.close()

    def release_blocks(self) -> None:
        """Let a model that was cut into blocks train as a whole again."""
        blocks = get_blocks(self.job.model)
        if blocks is not None:
            blocks.release()


class Backend(NamedTuple):
    """A row of the table of backends.

    `check_launch` raises `BadInput` for a launcher that does not fit. `launch(config, asked)` joins the run's other processes, or
    raises `BadInput` if these were asked for something else. `place` returns the stages, and which are here. `faults` returns why
    a job cannot be run, a line each. `note` returns how the stages will run, if the user should know. `engine(job, first_update)`
    returns this process's engine. `emulates`: all versions of the weights are in this process. `pins_memory`: a GPU's batches may
    be pinned, since no message waits meanwhile. `trains_on`: the device that trains, if it is not the config's. `in_flight` gives
    the microbatches that each stage holds at most, (P,), if the backend has a pipeline of its own, else None.
    """

    check_launch: Callable[[BackendConfig], None]
    launch: Callable[[Config, Mapping[str, object]], None]
    place: Callable[[Config, Method, nn.Module, torch.Tensor], Placed]
    faults: Callable[[Job], List[str]]
    note: Callable[[Job], str]
    engine: Callable[[Job, int], Engine]
    emulates: bool = False
    pins_memory: bool = False
    trains_on: Optional[str] = None
    in_flight: Callable[[Job], Optional[IntArray]] = lambda job: None


MARK = "poptorch"  # of the optimizer state that is PopTorch's own


def refuse_poptorch_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise `BadInput` for PopTorch's optimizer state on another backend."""
    if any(str(entry).startswith(f"{MARK}:") for state in optimizer.state.values() for entry in state):
        raise BadInput(
            "--resume: the checkpoint's optimizer state is PopTorch's, which backend.name poptorch alone can load: "
            "go on with that, or start anew from its weights (init_from: .../model.safetensors)"
        )
