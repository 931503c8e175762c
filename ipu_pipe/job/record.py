"""The job: the validated model, loss, stages, versions and rules that a pipeline trains by; and the
plan of a config's run, which has a length and stops.

ipu_pipe/pipeline/build.py builds a job, ipu_pipe/run/build.py a plan.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np
import torch
from torch import nn
from typing_extensions import Self

from ipu_pipe.config.schema import Config, PipelineConfig
from ipu_pipe.config.sections import GIVEN, Given
from ipu_pipe.cut.cutting import Piece
from ipu_pipe.data import DataSource
from ipu_pipe.data.sources import split_batch
from ipu_pipe.errors import RunFault
from ipu_pipe.hardware.precision import MASTERS, MIXED
from ipu_pipe.job.metrics import Metric
from ipu_pipe.model.batch import map_tensors, require_tensors
from ipu_pipe.model.devices import get_kind
from ipu_pipe.model.loss import LabelRange, Labels, Loss, LossWeight, OwnLoss, get_labels
from ipu_pipe.model.observation import ForwardEffects, Observation
from ipu_pipe.model.precision import ModelPrecision
from ipu_pipe.model.stages import Footprint, Partition
from ipu_pipe.schedule.clock import (
    Costs,
    FloatArray,
    compute_busy_share,
    make_pass_costs,
    time_updates,
)
from ipu_pipe.schedule.methods import METHODS, Method
from ipu_pipe.schedule.table import Schedule
from ipu_pipe.schedule.timelines import OPEN, amortize_utilization, make_schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.text import show
from ipu_pipe.trace.events import SCHEMA
from ipu_pipe.update.apply import UpdateRules

# precision -> dtype of a model's weights; for IPUs the dtype on the host
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
# autocast casts float32 weights in each pass; with masters the weights themselves are bfloat16
DTYPES.update({MIXED: torch.float32, MASTERS: torch.bfloat16})
DTYPES.update(dict.fromkeys(("16.16", "16.32", "32.32"), torch.float32))


# the weights of an update are added up, and each is multiplied by the number of replicas
MOST_WEIGHT = 1e30


class InitialWeights(NamedTuple):
    """The weights that a run loaded from `path` (`init_from`): the number `taken`, the names in the
    file that were `left_out` with the reason, and the model's names that the file lacks (`new`)."""

    path: str
    taken: int
    left_out: dict[str, str]
    new: list[str]


class Length(NamedTuple):
    """The updates of an epoch, None for data without epochs, and those of the run, OPEN for a
    caller's loop.
    """

    per_epoch: int | None = None
    updates: int = OPEN


class ComparedSettings(NamedTuple):
    """Settings of a loop's optimizer that ranks compare: their `names`, and `digest(k)`, a checksum
    of each in update k.
    """

    names: Sequence[str] = ()
    digest: Callable[[int], list[int]] = lambda k: []


@dataclass
class Setup:
    """Model, loss and data on their device, before the model is divided.

    `precision`: the dtypes of weights, inputs and updates. `requested_fields`: keys of the batch
    that the loss takes besides labels. `device_kind`: `ipu`, or the type of the training device.
    `pins_memory`: batches are pinned, so that copying them to a GPU does not wait.
    `label_range`: the range of allowed labels, if the loss has one. `came_evaluating`: whether the
    model came in evaluation mode. `loss_weight`: the weight of a microbatch in the mean loss of an
    update; None if all weigh the same.
    """

    config: PipelineConfig
    model: nn.Module
    loss: Loss
    data: DataSource
    device: torch.device
    precision: ModelPrecision
    requested_fields: tuple[str, ...]
    device_kind: str
    pins_memory: bool
    label_range: LabelRange | None
    came_evaluating: bool
    loss_weight: LossWeight | None

    @property
    def data_name(self) -> str:
        """The class of the data source."""
        # of loaders the data set says more than the class that wraps them
        return type(getattr(self.data, "dataset", self.data)).__name__

    def split_batch(self, batch: Any) -> tuple[Any, Any]:
        """Return a batch of the data as inputs and labels; a model with its own loss has the labels
        among its inputs too.

        Raise `BadInput` if the batch has no such parts.
        """
        return split_batch(
            batch,
            getattr(self.data, "labels", None),
            isinstance(self.loss, OwnLoss),
            self.requested_fields,
        )

    def prepare_batch(self, batch: Any) -> tuple[Any, Any]:
        """Return a batch of the data as inputs and labels on the run's device."""
        return self.move_to_device(*self.split_batch(batch))

    def weigh(self, batch: Any, place: str) -> float:
        """Return the weight of a batch of the data in the mean loss of its update. Raise `RunFault`
        if it cannot be one.

        `place`: the update and the microbatch, for the fault.
        """
        assert self.loss_weight is not None
        value = self.loss_weight(get_labels(self.split_batch(batch)[1]))
        # what float() raises for None, for a text and for a tensor of several numbers
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            # a sum of numbers beyond float32's would not be a number
            if not isinstance(value, bool) and 0 <= float(value) < MOST_WEIGHT:
                return float(value)
        raise RunFault(f"loss_weight: {place}: {show(value)}: must be a finite number >= 0")

    def move_to_device(self, x: Any, y: Any) -> tuple[Any, Any]:
        """Return a microbatch on the run's device, inputs in its precision. Raise `BadInput` if it
        is not made of tensors.
        """
        require_tensors(x, "inputs", by_sample=True)
        labels = y
        if isinstance(y, Labels):
            labels = y.labels
            require_tensors(y.asked, "what the loss takes", by_sample=True)
        # a model that computes its loss itself may have the labels among its inputs only
        if y is not None or not isinstance(self.loss, OwnLoss):
            require_tensors(labels, "labels")
        # the CPU's loss checks labels itself, a GPU's kernel aborts
        if (
            self.label_range is not None
            and get_kind(self.device).is_accelerator
            and getattr(labels, "is_cpu", False)
        ):
            self.label_range.check(labels)
        move = partial(_move, self.device, self.pins_memory)
        return map_tensors(partial(move, self.precision.inputs), x), map_tensors(
            partial(move, self.precision.labels), y
        )

    def get_trained(self) -> dict[str, nn.Parameter]:
        """Return the tensors that an optimizer updates, the weights or their masters, by the names
        of the weights.
        """
        return {name: self.precision.get_trained(p) for name, p in self.model.named_parameters()}


@dataclass
class RunSetup(Setup):
    """The setup of a config's run, as evaluation needs it.

    `metrics`: of evaluations. `initial_weights`: those of `init_from`.
    """

    config: Config
    metrics: tuple[Metric, ...] = ()
    initial_weights: InitialWeights | None = None

    @property
    def data_name(self) -> str:
        """The config's name of the data, or the class of a data source from Python."""
        name = self.config.data.name
        return super().data_name if name == GIVEN else name

    @property
    def validation(self) -> DataSource | None:
        """The source whose test set is the validation set; None if there is none."""
        return getattr(self.data, "validation", None)

    @property
    def watched_split(self) -> str:
        """The set that evaluations during a run use: `validation` if there is one, else `test`."""
        return "test" if self.validation is None else "validation"


@dataclass
class Job(Setup):
    """What a pipeline trains, ready to start. Updates are counted from 0.

    If stages were balanced by measured time, `config` has the names of the modules at which they
    begin.

    `partition`: the stages. `table`: the weight versions that each pass reads. `optimizer`: of the
    stages that this process trains; `full_optimizer`: of all parameters of the model, which is read
    for its groups and never steps. `base_rate`: of which the groups' learning rates are shares, 0
    if each has its own. `updates_per_epoch`: None for data without a length, and in a caller's
    loop; `updates`: of the schedule. `example`: the first microbatch; `observation`: of a training
    pass of it. `note`: a message about the stages. `drains`: the updates after which the schedule
    drains.

    `keeps_whole`: on processes, the whole model is read at evaluations and checkpoints. `folder`:
    for files of every process. On processes, `pieces`: the model cut into its stages. `placement`:
    the device of each stage. `compared`: what ranks compare with each result. `stage_graphs`: of
    the pieces, once a backend that compiles them has traced them (`ipu_pipe.cut.graphs`).

    `traced_updates`: those whose events are recorded. `plateau`: the learning rate that follows
    evaluations, if one does. On processes, `compiles_modules`: torch.compile each module of a
    stage; `saves_shards`: each rank saves its own part of a checkpoint.
    """

    partition: Partition
    method: Method
    schedule: Schedule
    table: VersionTable
    full_optimizer: torch.optim.Optimizer
    optimizer: torch.optim.Optimizer
    rules: UpdateRules
    base_rate: float
    updates_per_epoch: int | None
    updates: int
    example: tuple[Any, Any]
    footprint: Footprint
    observation: Observation
    note: str = ""
    drains: Sequence[int] = ()
    keeps_whole: bool = False
    folder: Path | None = None
    pieces: Sequence[Piece] = ()
    placement: tuple[int, ...] = ()
    compared: ComparedSettings = ComparedSettings()
    stage_graphs: Sequence[Any] = ()
    traced_updates: range = range(0)
    plateau: torch.optim.lr_scheduler.ReduceLROnPlateau | None = None
    compiles_modules: bool = False
    saves_shards: bool = False

    def close(self, updates: int, drains: Sequence[int]) -> Self:
        """Return the job with a schedule that ends after `updates`, and drains after those of
        `drains`.
        """
        N = self.schedule.accumulate
        marks = [k * N for k in drains]  # microbatches
        switch = self.rules.switch * N
        stages = len(self.partition)
        schedule = make_schedule(self.method, stages, updates * N, N, marks, switch)
        table = VersionTable(schedule, self.method, self.config.seed)
        return replace(self, schedule=schedule, table=table, updates=updates, drains=drains)

    @property
    def effects(self) -> ForwardEffects:
        """The side effects of a training forward of a microbatch."""
        return self.observation.effects

    @property
    def global_batch_size(self) -> int:
        """The samples of one update."""
        return self.config.micro_batch_size * self.config.gradient_accumulation * self.replica_count

    @cached_property
    def replica_count(self) -> int:
        """The number of replicas that take turns in the data: of the pipeline, or local SGD's
        own.
        """
        rounds = self.method.rounds
        return self.config.replicas if rounds is None else rounds.replicas or len(self.partition)

    def read_microbatch(self, m: int, replica: int = 0) -> Any:
        """Return microbatch m of a replica as the data source returns it; replicas take turns in an
        epoch's order.
        """
        accumulate = self.config.gradient_accumulation
        # data without a length are one epoch that does not end
        epoch, index = (
            (0, m)
            if self.updates_per_epoch is None
            else divmod(m, self.updates_per_epoch * accumulate)
        )
        return self.data.train_batch(
            epoch, index * self.replica_count + replica, self.config.micro_batch_size
        )

    def weigh_microbatch(self, batch: Any, k: int, m: int, replica: int) -> float:
        """Return the weight of microbatch m of a replica, a batch of the data, in the mean loss of
        update k.
        """
        owner = f" of replica {replica}" if self.replica_count > 1 else ""
        return self.weigh(batch, f"update {k}, microbatch {m}{owner}")

    def list_phases(self) -> list[tuple[str, int, Schedule]]:
        """Return (method, updates, schedule) of the run's phases: warm-up by GPipe (the schedule of
        a batch), the method.
        """
        warm = self.rules.switch
        stages = len(self.partition)
        accumulate = self.schedule.accumulate
        if not warm:
            return [(self.method.name, self.updates, self.schedule)]
        # one batch, since all of a warm-up are alike
        batch = make_schedule(METHODS["gpipe"], stages, accumulate, accumulate)
        # a run may end within its warm-up
        phases = [("gpipe", min(warm, self.updates), batch)]
        if self.updates > warm:
            # counted from the end of the warm-up
            marks = [(k - warm) * accumulate for k in self.drains if k > warm]
            schedule = make_schedule(
                self.method, stages, (self.updates - warm) * accumulate, accumulate, marks
            )
            phases.append((self.method.name, self.updates - warm, schedule))
        return phases

    def play_updates(self, costs: Costs | None, drains: Sequence[int], updates: int) -> FloatArray:
        """Return the time (updates,) at which all stages have made each of the first `updates`
        updates, in the unit of `costs`; None: a pass of a stage takes 1, its slot.

            drains   0          40          80     an evaluation drains the pipeline
            played   |--- 40 ---|--- 40 ---|       a stretch begins when the previous one has ended
        """
        warm = self.rules.switch
        N = self.schedule.accumulate
        # the end of the warm-up is among them, so that a stretch has one method
        marks = sorted({mark for mark in (0, warm, *drains, updates) if mark <= updates})
        played: dict[tuple[str, int], FloatArray] = {}
        ends = [np.zeros(1)]
        for begin, end in zip(marks, marks[1:]):
            # a warm-up runs as in GPipe
            method = METHODS["gpipe"] if end <= warm else self.method
            key = method.name, end - begin
            # stretches between evaluations are mostly of one length, and playing takes long
            if key not in played:
                schedule = make_schedule(method, len(self.partition), key[1] * N, N)
                stretch_costs = costs or make_pass_costs(schedule, self.placement)
                played[key] = time_updates(schedule, stretch_costs, self.placement)
            ends.append(ends[-1][-1] + played[key])
        # without the 0 with which the first stretch began
        return np.concatenate(ends)[1:]

    def describe_phases(self) -> list[dict[str, Any]]:
        """Return the phases with their share of busy slots, including the pipeline's warm-up and
        drain.
        """
        return [
            {
                "method": name,
                "updates": updates,
                "planned_utilization": compute_busy_share(schedule, self.placement),
            }
            for name, updates, schedule in self.list_phases()
        ]

    def compute_planned_utilization(self) -> float:
        """Return the busy share of slots of the whole run, amortized over the times of its phases
        (PipeMare, section 4).
        """
        return amortize_utilization(
            [(phase["updates"], phase["planned_utilization"]) for phase in self.describe_phases()]
        )


@dataclass
class PlannedJob(RunSetup, Job):
    """The run of a config: a job whose length, stops and learning rates are known before it starts.

    `rate(k)`: the learning rate of update k before the update rules. `advice`: a line about the
    learning rate that the method advised. `done`: updates before this start, where the pipeline is
    empty. `used`: the optimizer and the loss, described. `data_fingerprints`: for record.json.
    """

    config: Config
    # a dataclass needs defaults after those of its base
    rate: Callable[[int], float] = lambda k: 0.0
    advice: str = ""
    done: int = 0
    used: Given = Given()
    data_fingerprints: dict[str, Any] | None = None

    def count_epochs(self, done: int) -> float | None:
        """Return `done` updates in epochs; None if the data has no length."""
        return None if self.updates_per_epoch is None else done / self.updates_per_epoch

    @cached_property
    def evaluation_interval(self) -> int:
        """The updates from one evaluation to the next; 0: none before the end."""
        return self.config.evaluate.interval(self.updates_per_epoch)

    @cached_property
    def checkpoint_interval(self) -> int:
        """The updates from one checkpoint to the next, besides those of evaluations; 0: none."""
        return self.config.checkpoint_every

    def plan_pauses(self, done: int) -> tuple[bool, bool]:
        """Return whether to evaluate, and whether to save a checkpoint, when `done` updates are
        done.

        Evaluations come after each `evaluate.every` epochs and at the end, checkpoints after each
        `checkpoint.every` updates and at each evaluation, so that the best weights can be kept.
        """
        evaluation = self.evaluation_interval
        saving = self.checkpoint_interval
        evaluates = done == self.updates or (evaluation > 0 and done % evaluation == 0)
        return evaluates, self.config.checkpoint is not None and (
            evaluates or (saving > 0 and done % saving == 0)
        )


def _move(
    device: torch.device, pins: bool, dtype: torch.dtype, value: torch.Tensor
) -> torch.Tensor:
    if pins and value.device.type == "cpu" and get_kind(device).pins_memory():
        # before pinning, because a conversion makes a new tensor, which would not be pinned
        value = value.to(dtype) if value.is_floating_point() else value
        # from memory that is not pinned a copy would wait all the same
        return value.pin_memory().to(device, non_blocking=True)
    # whole numbers stay what they are: they are labels, or index an embedding
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)


def get_fields(value: Setup, kind: type[Setup]) -> dict[str, Any]:
    """Return the fields of `kind` that `value` has, as they are."""
    return {field.name: getattr(value, field.name) for field in fields(kind)}


def make_trace_metadata(job: Job) -> dict[str, Any]:
    """Return the metadata of a run's trace that depend only on the job."""
    config = job.config
    schedule = job.schedule
    traced = job.traced_updates
    planned = job.compute_planned_utilization()
    return {
        "schema": SCHEMA,
        "run": "" if job.folder is None else job.folder.resolve().name,
        "method": job.method.name,
        "method_args": config.method_args.model_dump(mode="json", exclude_none=True),
        "backend": config.backend.name,
        "stages": len(job.partition),
        "replicas": config.replicas,
        "microbatches": schedule.microbatches,
        "accumulate": schedule.accumulate,
        "step_samples": job.global_batch_size,
        "device_of_stage": list(job.placement),
        "window": {"begin": traced.start, "end": traced.stop, "every": traced.step},
        "gradients_cross": job.method.structure is None,
        "planned_utilization": planned,
        "planned_bubble_fraction": 1 - planned,
        "units": list(job.footprint.units),
    }
