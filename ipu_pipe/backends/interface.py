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
from ipu_pipe.job.factories import Placed
from ipu_pipe.job.record import Job
from ipu_pipe.local.blocks import get_blocks
from ipu_pipe.model.timing import StageSeconds
from ipu_pipe.schedule.methods import Method
from ipu_pipe.schedule.runs import IntArray
from ipu_pipe.trace.events import Counters, Events


@dataclass(frozen=True)
class StepResult:
    """One update: mean training loss of its microbatches, accuracy (None if that has no meaning), samples.

    `blocks`: loss and accuracy of each block that has a loss of its own, the model's own last; empty if there is one loss.
    """

    loss: float
    accuracy: Optional[float]
    samples: int
    blocks: Tuple[Tuple[float, Optional[float]], ...] = ()


class CheckpointState(NamedTuple):
    """The state of the model and the optimizer for a checkpoint, by unsplit names."""

    model: Dict[str, torch.Tensor]
    optimizer: Dict[str, torch.Tensor]
    plain: Dict[str, Any]


class DeviceTimes(NamedTuple):
    """How a device with a clock spent the steps that count for throughput: in passes and updates (busy), waiting for others,
    and on messages while it did nothing else; `span_ns` is the total."""

    busy_ns: int
    wait_ns: int
    communication_ns: int
    span_ns: int


class Report(NamedTuple):
    """The measurements of the devices; None for what a backend cannot know.

    By stage: `optimizer_bytes` of state, `version_bytes` of weight versions besides the newest, at most. `links`: (source,
    target) -> (bytes, messages) in training, `shared` the same with the gradients of shared layers. `events` and `counters`
    are of all ranks; `microbatches` is how many links and events cover. `utilization`: busy share of the devices' own
    schedule, if that is not the job's. `files`: the backend's own JSON files by name. By device: `times` of the steps of this
    start that count for throughput, `peak_memory` in bytes by category and at once ("total").
    """

    optimizer_bytes: List[int]
    version_bytes: List[int]
    links: Optional[Dict[Tuple[int, int], Tuple[int, int]]]
    events: Optional[Events]
    microbatches: int = 0
    shared: Optional[Dict[Tuple[int, int], Tuple[int, int]]] = None
    counters: Optional[Counters] = None
    utilization: Optional[float] = None
    files: Optional[Dict[str, Any]] = None
    times: Optional[List[DeviceTimes]] = None
    peak_memory: Optional[List[Dict[str, int]]] = None


class Engine:
    """Interface of one process's part of a run.

    `checkpoint_group`: of all processes, if each writes its part of a checkpoint. `updates_per_call`: a device may make
    several updates in one call, of which the first waits for all.
    """

    is_main = True
    checkpoint_group: Any = None
    updates_per_call = 1

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

    def end(self, done: int, stop_requested: bool) -> int:
        """Return the number of updates of the run after `done` of them; fewer than planned if the main process requests a
        stop.

        Every process calls this after each update, and all end at the same one, where the pipeline is empty.
        """
        if self.job.schedule.stretch(done - 1)[1] > done:
            return self.job.updates
        return done if run_on_main(lambda: stop_requested) else self.job.updates

    def current_model(self) -> Optional[nn.Module]:
        """Return the model where it holds the newest weights now, None where they are on other devices."""
        return self.job.model

    def hold_whole_model(self) -> ContextManager[None]:
        """Hold the whole model with the newest weights in every process, in a block where the pipeline is empty."""
        return contextlib.nullcontext()

    def evaluate(self, split: str = "test") -> List[EvaluationResult]:
        """Return the same loss and metrics on every process, of the test or validation set, when the pipeline is drained.

        They are those of each block that has a loss of its own, the model's own last.
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

    `check_launch` raises `BadInput` for a launcher that does not fit. `place` returns the stages, and which are here.
    `faults` returns why a job cannot be run, a line each. `engine(job, first_update)` returns this process's engine.
    `launch(config, asked)` joins the run's other processes, or raises `BadInput` if these were asked for something else.
    `note` returns how the stages will run, if the user should know. `emulates`: all versions of the weights are in this
    process. `pins_memory`: a GPU's batches may be pinned, since no message waits meanwhile. `trains_on`: the device that
    trains, if it is not the config's. `in_flight` gives the microbatches that each stage holds at most, (P,), if the backend
    has a pipeline of its own, else None.
    """

    check_launch: Callable[[BackendConfig], None]
    place: Callable[[Config, Method, nn.Module, torch.Tensor], Placed]
    faults: Callable[[Job], List[str]]
    engine: Callable[[Job, int], Engine]
    launch: Callable[[Config, Mapping[str, object]], None] = lambda config, asked: None
    note: Callable[[Job], str] = lambda job: ""
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
            "resume with that, or start a new run from its weights (init_from: .../model.safetensors)"
        )
