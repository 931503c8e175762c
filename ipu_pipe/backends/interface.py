"""The interface of a backend: a record of functions (`Backend`), an engine (`Engine`), and the
records that an engine returns.

Every process of a run has an engine and calls the same methods in the same order; the main process
(rank 0) also writes files.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from types import MappingProxyType
from typing import (
    Any,
    Callable,
    Collection,
    ContextManager,
    Iterable,
    Iterator,
    Mapping,
    NamedTuple,
    Sequence,
)

import torch
from torch import nn

from ipu_pipe.config.schema import PipelineConfig
from ipu_pipe.job.evaluation import (
    BatchReader,
    EvaluationResult,
    Metrics,
    compute_outputs,
    enter_evaluation,
    evaluate_batches,
)
from ipu_pipe.job.factories import Placed
from ipu_pipe.job.record import Job
from ipu_pipe.job.user_code import attribute_faults
from ipu_pipe.local.blocks import get_blocks
from ipu_pipe.model.loss import Take
from ipu_pipe.model.precision import export_loss
from ipu_pipe.model.timing import StageSeconds
from ipu_pipe.replay.run import Run
from ipu_pipe.schedule.methods import Method
from ipu_pipe.schedule.stretches import IntArray
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.trace.events import Counters, Events
from ipu_pipe.update.optimizer import export_state


@dataclass(frozen=True)
class StepResult:
    """The result of one update: mean training loss of its microbatches, accuracy (None if
    undefined), number of samples.

    The loss is None if the microbatches have no weight.
    `blocks`: (loss, accuracy) of each block that has a loss of its own, the whole model last; empty
    if there is one loss.
    """

    loss: float | None
    accuracy: float | None
    samples: int
    blocks: tuple[tuple[float | None, float | None], ...] = ()

    @property
    def losses(self) -> tuple[float | None, ...]:
        """The loss of each block, or the one loss."""
        return tuple(loss for loss, _ in self.blocks) or (self.loss,)


class CheckpointState(NamedTuple):
    """The state of the model and the optimizer for a checkpoint, by unsplit names, and that of a
    loss which is a module.
    """

    model: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    plain: dict[str, Any]
    # one for all that have none, which nobody writes to
    loss: Mapping[str, Any] = MappingProxyType({})


class DeviceTimes(NamedTuple):
    """The time of a device in the updates that count for throughput, in ns.

    `busy_ns`: passes and updates. `wait_ns`: waiting for other devices. `communication_ns`:
    messages while the device did nothing else. `span_ns`: the total.
    """

    busy_ns: int
    wait_ns: int
    communication_ns: int
    span_ns: int


class Report(NamedTuple):
    """The measurements of the devices; a field is None if the backend cannot measure it.

    Lists by stage: `optimizer_bytes` is the size of the optimizer's state, `version_bytes` the peak
    size of the weight versions besides the newest. `links` maps (source, target) to (bytes,
    messages) of training; `shared` does so for the gradients of shared layers. `events` and
    `counters` come from all ranks. `microbatches` counts the microbatches that `links` and `events`
    cover. `utilization` is the busy share of the devices' own schedule, if that differs from the
    job's. `files` maps names to the backend's own JSON files. Lists by device: `times` covers the
    updates since this start that count for throughput, `peak_memory` is in bytes by category;
    "total" is the peak of their sum.
    """

    optimizer_bytes: list[int]
    version_bytes: list[int]
    links: dict[tuple[int, int], tuple[int, int]] | None
    events: Events | None
    microbatches: int = 0
    shared: dict[tuple[int, int], tuple[int, int]] | None = None
    counters: Counters | None = None
    utilization: float | None = None
    files: dict[str, Any] | None = None
    times: list[DeviceTimes] | None = None
    peak_memory: list[dict[str, int]] | None = None


class Engine:
    """The interface of one process's part of a run.

    `checkpoint_group`: the process group of all ranks if each rank writes its part of a checkpoint,
    else None. `updates_per_call`: the updates that a device makes in one call; their results all
    arrive with the first. `makes_updates_at_once`: `give` makes its update whole, whatever the cut.
    `is_empty_after_calls`: so does a device's call, which leaves the pipeline empty whatever the
    schedule. `leaves_weights_stale`: between two calls the host's weights are old, and nobody looks at
    them. `has_results`: results are here, not on another process alone. `newest_model`: the model if
    it holds the newest weights now, None if they are on other devices. `names`: trained parameter -> unsplit name.
    """

    is_main = True
    checkpoint_group: Any = None
    updates_per_call = 1
    makes_updates_at_once = False
    is_empty_after_calls = False
    leaves_weights_stale = False
    has_results = True

    def __init__(self, run: Run) -> None:
        self.run = run
        self.newest_model: nn.Module | None = run.model
        # masters, where a precision has some: they are what optimizers know
        get_trained = run.precision.get_trained
        self.names = {get_trained(p): name for name, p in run.model.named_parameters()}
        # of the updates whose results were not taken yet
        self._gradients: dict[int, dict[str, torch.Tensor]] = {}

    @property
    def update(self) -> int:
        """The number of the next update."""
        raise NotImplementedError

    @property
    def stale_values(self) -> Collection[str]:
        """Return the names of the values that forwards change, if the host has old ones."""
        return ()

    def give(self, k: int, cut: float) -> None:
        """Run the actions of slots before `cut`; the batches of the updates up to k are at hand.

        If a call has several updates, those of its first update k make all of them, and all their
        batches are at hand.
        """
        raise NotImplementedError

    def take(self, k: int) -> StepResult:
        """Return the result of update k, which has left the pipeline, on the processes that collect
        results.

        Others get a loss that is not a number. The host waits for a GPU that has not computed it
        yet.
        """
        raise NotImplementedError

    def finish(self, batches: int, table: VersionTable) -> None:
        """Run the pipeline empty: finish this many updates, the last ones by the schedule that is
        still open.

        `table`: that schedule with the drain after them, at which a round of replicas may end.
        There is nothing to do where calls leave the pipeline empty.
        """

    def reopen(self, update: int, table: VersionTable, is_loaded: bool = False) -> None:
        """Begin again with this update, from an empty pipeline, by the schedule of `table` and the
        present weights.

        `is_loaded`: the optimizer's state was loaded, with that of replicas that have weights of
        their own.
        """

    def predict(self, x: Any) -> Any:
        """Return the model's output for inputs, in evaluation mode, on every process; the pipeline
        is empty.
        """
        with self.hold_whole_model(), self.run.rules.hold_averages():
            with enter_evaluation(self.run.model):
                return compute_outputs(self.run.model, x)[-1]

    def load_weights(self, load: Callable[[], None]) -> None:
        """Call `load`, which writes weights into the whole model; the pipeline is empty."""
        load()

    def watch_gradients(self) -> None:
        """Keep the gradients of each update from now on, for `collect_gradients`."""
        self.run.rules.observe = self._note_gradients

    def _note_gradients(self, k: int, stages: Sequence[int]) -> None:
        """Copy the gradients of update k of these stages."""
        trained = [item for s in sorted(stages) for item in self.run.list_trained(s).items()]
        # cloned, because cpu() returns a tensor that is there already as it is
        self._gradients[k] = {
            name: p.grad.detach().cpu().clone() for name, p in trained if p.grad is not None
        }

    def collect_gradients(self, k: int) -> dict[str, torch.Tensor]:
        """Return on the main process the gradients of update k, whose result was taken, on the CPU
        by unsplit names.

        They are the gradients when the optimizer's step begins: before clipping and before rules
        that change an update (gradient shrinking), but after delay compensation, which changes the
        gradients of each microbatch. They are kept since `watch_gradients`.
        """
        return self._gradients.pop(k, {})

    def hold_whole_model(
        self, everywhere: bool = True, masters: bool = False
    ) -> ContextManager[nn.Module | None]:
        """Hold the whole model with the newest weights inside the context, in every process or in
        the main one only. Yield a copy of it if the caller has sharded the model itself.

        `masters`: it has the masters of rounded weights, which may be changed. Every process enters
        it; the pipeline must be empty.
        """
        return self.hold_masters() if masters else contextlib.nullcontext()

    def hold_masters(self) -> ContextManager[None]:
        """Put the masters, if there are any, into the model inside the context, to be changed."""
        return self.run.precision.put_masters_in_place(loads=True)

    def evaluate(self, batches: BatchReader, metrics: Metrics) -> list[EvaluationResult]:
        """Return the loss and metrics over the batches of a set, the same on every process; the
        pipeline must be drained.

        There is one result for each block that has a loss of its own, the whole model last. A
        process reads the batches that it evaluates, or a shard of them.
        """
        run = self.run
        with self.hold_whole_model(), run.rules.hold_averages():
            with attribute_faults(lambda: f"evaluation before update {self.update}"):
                return evaluate_batches(run.model, run.loss, batches(), metrics)

    def collect_state(self) -> CheckpointState | None:
        """Return the state for a checkpoint on the main process, None on others."""
        run = self.run
        # a checkpoint has the exact weights, not the rounded ones
        with self.hold_whole_model(), run.precision.put_masters_in_place():
            model = run.model.state_dict()
        return CheckpointState(
            model, *export_state(run.optimizer, self.names), export_loss(run.loss)
        )

    def collect_part(self, every_replica: bool = False) -> CheckpointState:
        """Return this process's part of the state for a checkpoint; called on every process.

        `every_replica`: otherwise only the first replica's processes have a part. Where one process
        has all, that is its part.
        """
        state = self.collect_state()
        assert state is not None
        return state

    def report(self) -> Report | None:
        """Return the measurements at the end of the run, on the main process; None on others."""
        raise NotImplementedError

    def list_setting_faults(self, groups: Iterable[Mapping[str, Any]]) -> list[str]:
        """Return a fault for each setting in the optimizer's groups with which no update can be
        made.
        """
        return []

    def profile(self) -> StageSeconds | None:
        """Return the time of each stage's passes, at the end of the run before `close`; None if the
        devices have clocks.
        """
        return None

    def close(self) -> None:
        """Put the newest weights into the model and remove all hooks from it."""

    def disconnect(self) -> None:
        """Leave the processes' group; all have closed their engines, and no report follows."""

    def keep_newest(self) -> None:
        """Put the newest weights of this process into the model, without waiting for others: the
        caller's loop has failed.
        """

    def leave(self) -> None:
        """Close the connections to other processes after a fault, so that none of them waits."""

    def abort(self) -> None:
        """Remove all hooks from the user's model after a fault, without waiting for other
        processes.
        """
        self.close()

    def release_blocks(self) -> None:
        """Let a model that was cut into blocks train as a whole again."""
        # blocks that a method does not train were frozen
        blocks = get_blocks(self.run.model)
        if blocks is not None:
            blocks.unfreeze()


class HostModelEngine(Engine):
    """An engine whose devices hold the newest weights.

    The host's model and optimizer get them when somebody looks, for an evaluation, a checkpoint, a
    prediction and at the end, and have them until the next update, which sets `newest_model` to
    None.
    """

    leaves_weights_stale = True

    def copy_to_host(self) -> None:
        """Copy the newest weights and the optimizer's state from the devices to the host."""
        raise NotImplementedError

    def update_host(self) -> None:
        """Let the host's model have the newest weights; do nothing if it has them."""
        if self.newest_model is None:
            self.copy_to_host()
            self.newest_model = self.run.model

    def load_weights(self, load: Callable[[], None]) -> None:
        self.update_host()
        load()

    @contextlib.contextmanager
    def hold_whole_model(self, everywhere: bool = True, masters: bool = False) -> Iterator[None]:
        self.update_host()
        with self.hold_masters() if masters else contextlib.nullcontext():
            yield

    def keep_newest(self) -> None:
        self.update_host()

    def close(self) -> None:
        self.update_host()
        self.release_blocks()


class Backend(NamedTuple):
    """The functions of a backend, one row of the table of backends.

    `place` returns the stages and which of them are here. `list_faults` returns the reasons why a
    job cannot run, one line each. `make_options(job)` returns what `Run.options` is.
    `make_engine(run, first_update, table)` returns this process's engine, which begins
    with this update by the schedule of `table`.
    `launch(config, asked)` joins the run's other processes, or raises `BadInput` if the launcher
    does not fit, or if they were started with other options. `describe` returns a line on how the
    stages will run, '' if there is nothing to say. `count_in_flight` returns the most microbatches
    that each stage holds, (P,), if the backend has a pipeline of its own, else None. `predict_refusals`
    returns what the backend's own compiler would refuse later, one line each. What the
    backend supports is its row in `ipu_pipe.config.backend_facts`.
    """

    place: Callable[[PipelineConfig, Method, nn.Module, torch.Tensor, Take | None], Placed]
    list_faults: Callable[[Job], list[str]]
    make_engine: Callable[[Run, int, VersionTable], Engine]
    make_options: Callable[[Job], Any] = lambda job: None
    launch: Callable[[PipelineConfig, Mapping[str, object]], None] = lambda config, asked: None
    describe: Callable[[Job], str] = lambda job: ""
    count_in_flight: Callable[[Job], IntArray | None] = lambda job: None
    predict_refusals: Callable[[Job], list[str]] = lambda job: []


# the prefix of the entries of an optimizer's state that only PopTorch can load
POPTORCH_PREFIX = "poptorch"
