"""The job: one run's model, data, stages, schedule and version table, all checked. `run/build` makes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch
from torch import nn

from ipu_pipe.config.schema import Config
from ipu_pipe.config.sections import GIVEN, Given
from ipu_pipe.data import DataSource
from ipu_pipe.data.batches import LabelRange, split_batch
from ipu_pipe.hardware.precision import MASTERS, MIXED
from ipu_pipe.job.metrics import DEFAULT, Metric
from ipu_pipe.local.blocks import get_blocks
from ipu_pipe.model.asking import Labels, labels_of
from ipu_pipe.model.cutting import Piece
from ipu_pipe.model.nests import mapped, refuse_others, refuse_uneven
from ipu_pipe.model.outputs import OwnLoss
from ipu_pipe.model.precision import Numbers
from ipu_pipe.model.probe import Effects, Footprint, Loss, observe_effects
from ipu_pipe.model.stages import Partition
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.methods import METHODS, Method
from ipu_pipe.schedule.table import Schedule
from ipu_pipe.schedule.timelines import amortize_utilization, make_schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.update import rates as lr
from ipu_pipe.update.apply import UpdateRules
from ipu_pipe.update.groups import Groups

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}  # of a model's weights
DTYPES.update({MIXED: torch.float32, MASTERS: torch.bfloat16})
DTYPES.update(dict.fromkeys(("16.16", "16.32", "32.32"), torch.float32))  # on the host; IPUs get what it says


class Begun(NamedTuple):
    """What a run that begins with the weights at `path` has of them: how many are `taken`, names `left_out` with the reason, and
    those of the model that are `new`."""

    path: str
    taken: int
    left_out: Dict[str, str]
    new: List[str]


@dataclass
class Setup:
    """Model, loss and data of a run on its device: all that evaluation needs."""

    config: Config
    model: nn.Module
    loss: Loss
    data: DataSource
    device: torch.device
    numbers: Numbers  # that the model computes in
    label_range: Optional[LabelRange] = field(default=None, init=False)  # where the loss asks for one
    begun: Optional[Begun] = field(default=None, init=False)  # with weights that need not all fit

    device_kind: str = field(default="cpu", init=False)  # what trains: `ipu`, or the type of the device
    metrics: Tuple[Metric, ...] = field(default=DEFAULT, init=False)  # of evaluations
    asks: Tuple[str, ...] = field(default=(), init=False)  # what the loss takes of the batch besides labels
    pins_memory: bool = field(default=False, init=False)  # what is pinned goes to a GPU without waiting

    @property
    def data_name(self) -> str:
        """The config's name of the data, or the class of what Python gave."""
        given = type(getattr(self.data, "dataset", self.data)).__name__
        return given if self.config.data.name == GIVEN else self.config.data.name

    def parted(self, batch: Any) -> Tuple[Any, Any]:
        """A batch of the data as inputs and labels. The labels of a model that computes its own loss are among the inputs, too.
        Raises BadInput."""
        return split_batch(batch, getattr(self.data, "labels", None), isinstance(self.loss, OwnLoss), self.asks)

    def ready(self, batch: Any) -> Tuple[Any, Any]:
        """A batch of the data as inputs and labels on the run's device. Raises BadInput."""
        return self.to_device(*self.parted(batch))

    def to_device(self, x: Any, y: Any) -> Tuple[Any, Any]:
        """A microbatch on the run's device, inputs in its precision. Raises BadInput."""
        refuse_others(x, "inputs")
        refuse_uneven(x)
        if y is not None or not isinstance(self.loss, OwnLoss):
            refuse_others(labels_of(y), "labels")
        if isinstance(y, Labels):
            refuse_others(y.asked, "what the loss takes")
            refuse_uneven(y.asked)
        # the CPU's loss looks itself, a GPU's kernel aborts
        if self.label_range is not None and self.device.type == "cuda":
            self.label_range.check_on_host(labels_of(y))

        def mover(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
            return lambda value: _move(value, self.device, dtype, self.pins_memory)

        return mapped(mover(self.numbers.inputs), x), mapped(mover(self.numbers.labels), y)

    def trained(self) -> Dict[str, nn.Parameter]:
        """What an optimizer changes, by the names of the model's weights: these, or their masters."""
        return {name: self.numbers.trained(p) for name, p in self.model.named_parameters()}


@dataclass
class Job(Setup):
    """One run, ready to start. Updates are counted from 0 through the whole run; an epoch has `updates_per_epoch`.

    `config` has the names at which stages begin where it was to measure them by time.
    """

    part: Partition
    method: Method
    schedule: Schedule
    table: VersionTable
    groups: Groups  # of the whole model; the optimizer holds those of the stages that this process trains
    optimizer: torch.optim.Optimizer
    rules: UpdateRules
    base_rate: float
    updates_per_epoch: Optional[int]  # None where the data has no length: all is one epoch
    updates: int
    example: Tuple[Any, Any]
    footprint: Footprint
    note: str = ""  # what the user should know of the stages
    done: int = 0  # updates of the run that this one goes on with: the pipeline is empty there
    used: Given = Given()  # the optimizer and the loss, whoever gave them
    played: Optional[Sequence[float]] = None  # rates by update, where a torch.optim.lr_scheduler gives them
    may_stop: bool = False  # whether the run may be asked to end after any update
    may_stop_empty: bool = False  # or where the pipeline is empty anyway
    folder: Optional[Path] = None  # of the run, where every process may write what it did
    read: Optional[Dict[str, Any]] = None  # of the data, for the run's record
    pieces: Sequence[Piece] = ()  # the model cut into its stages, on processes

    @cached_property
    def effects(self) -> Effects:
        """Return what a training forward of a microbatch draws and writes, seen in one."""
        return observe_effects(self.model, self.example[0])

    @property
    def batch(self) -> int:
        """Samples of one update, the global batch size."""
        return self.config.micro_batch_size * self.config.gradient_accumulation * self.width

    @property
    def width(self) -> int:
        """Replicas that take turns in the data: of the pipeline, or those that the method has for itself."""
        rounds = self.method.rounds
        return self.config.replicas if rounds is None else rounds.replicas or len(self.part)

    def master_bytes(self) -> List[int]:
        """Of each stage's masters, where its weights have such."""
        numbers, found = self.numbers, []
        for stage in self.part.stages:
            weights = [self.model.get_parameter(name) for name in stage.parameters]
            masters = [numbers.trained(p) for p in weights if numbers.trained(p) is not p]
            found.append(sum(p.numel() * p.element_size() for p in masters))
        return found

    @property
    def traced(self) -> range:
        """The updates whose events are recorded."""
        chosen = self.config.log.trace
        return range(0) if chosen is None else chosen.updates(self.config.gradient_accumulation)

    def microbatch(self, m: int, replica: int = 0) -> Tuple[Any, Any]:
        """Return microbatch m of a replica of the pipeline as inputs and labels, on the run's device."""
        return self.ready(self.read_microbatch(m, replica))

    def read_microbatch(self, m: int, replica: int = 0) -> Any:
        """Read microbatch m of a replica from the data, as that gives it. Replicas take turns in an epoch's order."""
        accumulate, width = self.config.gradient_accumulation, self.width
        epoch, within = (0, m) if self.updates_per_epoch is None else divmod(m, self.updates_per_epoch * accumulate)
        return self.data.train_batch(epoch, within * width + replica, self.config.micro_batch_size)

    @property
    def averaged(self) -> int:
        """The updates over which the training loss is averaged: of an epoch, or a hundred where there are none."""
        return self.updates_per_epoch or 100

    def epoch(self, done: int) -> Optional[float]:
        """How many epochs `done` updates are; None where the data has no length."""
        return None if self.updates_per_epoch is None else done / self.updates_per_epoch

    def rate(self, k: int) -> float:
        """Learning rate of update k."""
        if self.played is not None:
            return self.played[k]
        return compute_rate(self.config, self.base_rate, k, self.updates, self.updates_per_epoch)

    def done_with(self, k: int) -> int:
        """The updates that the first stage has done when the loss of update k is known: where nothing comes back to it, it must
        not stand still for the last one's."""
        ahead = len(self.part) if get_blocks(self.model) is not None else 0
        return min(k + ahead + 1, self.schedule.stretch(k)[1])

    def begun_with(self, k: int) -> int:
        """The batches that are begun by then, all of which a run does that is asked to end after update k: what is in the
        pipeline comes to its end."""
        if self.method.history is not None:
            return k + 1
        if self.method.rounds is not None:  # replicas must meet first
            return self.schedule.stretch(k)[1]
        last = self.done_with(k) - 1
        first_stage, batch = slice(0, 1), self.schedule.accumulate
        slot = self.schedule.slots(Kind.UPDATE, last, last + 1, first_stage)[0]
        begun = int(self.schedule.count_before(Kind.FORWARD, slot + 1, first_stage)[0, 0])
        return max(-(-begun // batch), last + 1)

    def phase_schedules(self) -> List[Tuple[str, int, Schedule]]:
        """The run in order: (method, updates, schedule) of the warm-up by GPipe, of which one batch stands for all, then of the
        method's own."""
        warm, stages, accumulate = self.rules.switch, len(self.part), self.schedule.accumulate
        if not warm:
            return [(self.method.name, self.updates, self.schedule)]
        batch = make_schedule(METHODS["gpipe"], stages, accumulate, accumulate)
        found = [("gpipe", min(warm, self.updates), batch)]
        if self.updates > warm:
            drains = [k for k in list_drains(self.config, self.updates, self.updates_per_epoch, self.done) if k > warm]
            marks = [(k - warm) * accumulate for k in drains]
            own = make_schedule(self.method, stages, (self.updates - warm) * accumulate, accumulate, marks)
            found.append((self.method.name, self.updates - warm, own))
        return found

    def phases(self) -> List[Dict[str, Any]]:
        """The same with the share of the schedule's slots in which stages are busy, fills and drains included."""
        return [
            {"method": name, "updates": updates, "planned_utilization": schedule.busy_share()}
            for name, updates, schedule in self.phase_schedules()
        ]

    def planned_utilization(self) -> float:
        """Busy share of the schedule's slots of the whole run: with a warm-up amortized over both phases' times (PipeMare,
        section 4)."""
        return amortize_utilization([(phase["updates"], phase["planned_utilization"]) for phase in self.phases()])

    def evaluates_after(self, done: int) -> bool:
        """Whether the test set is evaluated when `done` updates are done: after each `evaluate.every` epochs and at the end."""
        every = self.config.evaluate.interval(self.updates_per_epoch)
        return done == self.updates or (every > 0 and done % every == 0)

    def saves_after(self, done: int) -> bool:
        """Whether a checkpoint is taken when `done` updates are done: after each `checkpoint.every` of them, and at each
        evaluation, so that the best weights are there to keep."""
        every = self.config.checkpoint.every
        return self.evaluates_after(done) or (every is not None and done % every == 0)


def _move(value: torch.Tensor, device: torch.device, dtype: torch.dtype, pins: bool = False) -> torch.Tensor:
    if pins and device.type == "cuda" and value.device.type == "cpu":
        value = value.to(dtype) if value.is_floating_point() else value
        return value.pin_memory().to(device, non_blocking=True)
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)


def compute_rate(config: Config, base: float, k: int, updates: int, per_epoch: Optional[int]) -> float:
    """Learning rate of update k, before the rules. Where stages are drawn, one may have more updates than the run has steps."""
    if config.lr_schedule.falls:
        updates = config.lr_schedule.total_steps or updates
        k = min(k, updates - 1)
    return lr.compute_rate(config.lr_schedule, base, k, updates, per_epoch)


def list_drains(config: Config, updates: int, per_epoch: Optional[int], done: int) -> List[int]:
    """Updates after which the pipeline empties: evaluations and checkpoints before the end, and where the run goes on, which may
    be none of these any more."""
    marks: Set[int] = {done} if 0 < done < updates else set()
    for every in (config.evaluate.interval(per_epoch), config.checkpoint.every or 0):
        if every:
            marks.update(range(every, updates, every))
    return sorted(marks)
