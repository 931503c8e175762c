"""What every backend is: the record of its functions, its engines, and what these give.

Every process of a run has an engine and calls the same methods in the same order; the main one (rank 0) also writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

import torch
from torch import nn

from ipu_pipe.backends.ranks import are_joined, run_on_main
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
    """How a device with a clock spent the steps that count for throughput, in nanoseconds: in passes and updates, waiting for
    others, on messages where it did nothing else; the span is the whole."""

    busy_ns: int
    wait_ns: int
    communication_ns: int
    span_ns: int


class Report(NamedTuple):
    """What the devices measured: by stage, bytes of optimizer state and greatest bytes of weight versions besides the newest;
    messages sent, (source, target) -> (bytes, messages); events of all ranks; microbatches that these two are of; messages with
    the gradients of shared layers; counters of the trace; busy share of the devices' own schedule, where it is not the job's;
    JSON files of the backend's own, by name; how each device spent the steps of this start that count for throughput; the
    greatest bytes that each device held, by category, and of all at once ("total"), the emulator being one device. None where a
    backend cannot know."""

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
    """One process's part of a run."""

    is_main = True
    updates_per_call = 1  # a device may make several updates in one call: the first of them waits for all

    def __init__(self, job: Job) -> None:
        self.job = job
        self.names = {parameter: name for name, parameter in job.get_trained().items()}

    def step(self, k: int) -> StepResult:
        """Update k. The result is meant for the main process; others may get zeros."""
        raise NotImplementedError

    def advance(self, k: int, read: bool) -> List[StepResult]:
        """Update k, and what was measured since this last told it: where reading would hold a GPU up nothing unless `read`."""
        return [self.step(k)]

    def end(self, done: int, asked: bool) -> int:
        """How many updates the run has, when `done` are: as many as planned, or fewer where the main process has `asked` to end
        it, now or before. Every process calls it then, and ends at the same one: when what is in the pipeline is done."""
        if self.job.schedule.stretch(done - 1)[1] > done:  # it is not empty: told where it is
            return self.job.updates
        return done if run_on_main(lambda: asked) else self.job.updates

    def current_model(self) -> Optional[nn.Module]:
        """Return the model where it holds the newest weights now, None where they are on other devices."""
        return None if are_joined() else self.job.model

    def evaluate(self) -> List[EvaluationResult]:
        """Test loss and metrics with the pipeline drained, of each block that has a loss of its own, the model's own last; the
        same on every process."""
        raise NotImplementedError

    def state(self) -> Optional[CheckpointState]:
        """State for a checkpoint, on the main process, else None."""
        raise NotImplementedError

    def report(self) -> Optional[Report]:
        """At the end, on the main process, else None."""
        raise NotImplementedError

    def profile(self) -> Optional[StageSeconds]:
        """At the end, before `close`: what each stage's passes take, where the devices have no clocks; else None."""
        return None

    def close(self) -> None:
        """Newest weights in the model, nothing left behind."""

    def abort(self) -> None:
        """After a fault: nothing left behind in the user's model, without waiting for anyone."""
        self.close()

    def release_blocks(self) -> None:
        """The model as it was before it was cut into blocks, where it was."""
        blocks = get_blocks(self.job.model)
        if blocks is not None:
            blocks.release()


class Backend(NamedTuple):
    """A row of the table of backends.

    `check_launch`: refuses (BadInput) a launcher that does not fit. `launch(config, asked)`: joins the run's other processes;
    refuses where these were asked for something else. `place`: which stages are here. `faults`: why the job cannot be run, a
    line each. `note`: how the stages will run, where the user should know. `engine(job, first_update)`: this
    process's. `emulates`: all versions of the weights are in this process. `pins_memory`: a GPU's batches may be pinned, since no
    message waits meanwhile. `trains_on`: what trains, where it is not the config's device. `in_flight`: microbatches that each
    stage holds at most, (P,), where the backend has a pipeline of its own; None where the schedule says it.
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
    """Refuse (BadInput) PopTorch's optimizer state on another backend."""
    if any(str(entry).startswith(f"{MARK}:") for state in optimizer.state.values() for entry in state):
        raise BadInput(
            "--resume: the checkpoint's optimizer state is PopTorch's, which backend.name poptorch alone can load: "
            "go on with that, or start anew from its weights (init_from: .../model.safetensors)"
        )
