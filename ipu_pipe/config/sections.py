"""The sections of a config that depend on no other: model, data, optimizer, rates, clipping,
evaluation, logs, stages, method.
"""

from __future__ import annotations

import math
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

from pydantic import (
    ConfigDict,
    Field,
    StrictBool,
    field_validator,
    model_serializer,
    model_validator,
)
from typing_extensions import Annotated, Literal

from ipu_pipe.config.values import (
    MOST_STAGES,
    MOST_VERSIONS,
    NUMBER,
    Case,
    Count,
    Decay,
    Delayed,
    Epochs,
    Fraction,
    Integer,
    NonEmpty,
    NotNegative,
    Often,
    PathText,
    Positive,
    Section,
    Share,
    Stages,
    Updates,
    Whole,
    key_fault,
    say_allowed,
    to_number,
)
from ipu_pipe.refusals import NONE
from ipu_pipe.text import find_nearest, show

GIVEN = "(given in Python)"
OPTIMIZERS = "torch.optim."
SCHEDULERS = "torch.optim.lr_scheduler."
# the name of the loss that a model computes itself
OWN = "model"
# the weight of a microbatch that counts its labels
TOKENS = "tokens"
# the default number of traced microbatches of a stage
TRACED = 512
STAGES = "stages"
BY_STAGE = (
    "must be a list of values, one per stage, or {from: a, to: b}, numbers by a stage's "
    "delay, and over: stages if wanted"
)


# classes that are known without torch, whose import a config does not wait for
OPTIMIZER_CLASSES = ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "Rprop", "RMSprop")
SCHEDULER_CLASSES = (
    "LambdaLR",
    "MultiplicativeLR",
    "ExponentialLR",
    "PolynomialLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "OneCycleLR",
)


def validate_name(value: Any, known: Sequence[str], within: str, classes: Sequence[str]) -> Any:
    """Validate the name of one of `known`, of a class in the module `within`, or an import string.
    Raise `ValueError` that names the nearest known name, or of the `classes`.
    """
    if value in known or is_entry(value, within):
        return value
    # by the last part, because all names in torch.optim share the beginning
    near = find_nearest(show(value).rpartition(".")[2], [*known, *classes])
    hint = f"; did you mean {within if near in classes else ''}{near}?" if near else ""
    allowed = f"{', '.join(known)}, a class such as {within}{classes[-1]}, or module:name"
    raise ValueError(f"must be one of {allowed}{hint}")


def is_entry(value: Any, within: str) -> bool:
    """Return whether a text is an import string, or the name of something in the module `within` of
    PyTorch.
    """
    if not isinstance(value, str):
        return False
    # one name of the module: a further dot would lead into another one
    return ":" in value or (value.startswith(within) and value[len(within) :].isidentifier())


def is_by_stage(values: Any) -> bool:
    """Return whether a value is a list, or {from, to, over} with as many numbers at both ends."""
    if not isinstance(values, Mapping):
        return isinstance(values, list) and bool(values)
    if not {"from", "to"} <= set(values) <= {"from", "to", "over"}:
        return False
    # each end may have several numbers, as betas do
    first, last = (
        end if isinstance(end, list) else [end] for end in (values["from"], values["to"])
    )
    are_numbers = None not in map(to_number, (*first, *last))
    return are_numbers and len(first) == len(last) and values.get("over", STAGES) == STAGES


class ModelConfig(Section):
    """`entry`: "module:callable" that makes the model. `args`: its keyword arguments. `output`: the
    part of its output that the loss gets; null: all of it. `compile`: torch.compile each module
    that a process calls as a whole (backend distributed).
    """

    entry: str
    args: Dict[str, Any] = {}
    compile: StrictBool = False
    output: Annotated[
        Union[None, Integer, str], say_allowed("null, a field's name, an index, or module:function")
    ] = None


class DataConfig(Section):
    """Keys that are not listed here are arguments of the data set or callable. `name`: a set of
    ipu_pipe.data or "module:callable" that makes a DataSource. `root`: the folder that contains the
    set's folder. `subset`, `test_subset`: the first samples only. `validation`: training samples
    held out for evaluations, drawn by the seed.
    """

    # the arguments of a data set, which other sections refuse as unknown keys
    model_config = ConfigDict(extra="allow")

    name: str
    root: Optional[PathText] = None
    subset: Optional[Count] = None
    test_subset: Optional[Count] = None
    validation: Annotated[
        Union[
            None,
            Annotated[float, Field(gt=0, lt=1), NUMBER],
            Annotated[int, Field(ge=1, lt=2**53), NUMBER],
        ],
        say_allowed("null, a share between 0 and 1, or a whole number of samples"),
    ] = None

    def options(self) -> Dict[str, Any]:
        """Return all keys that are not null, except the name."""
        return self.model_dump(exclude={"name"}, exclude_none=True)


# the name of an optimizer whose groups have different optimizers
GROUPS = "groups"


# optimizers that are known by a short name -> their settings besides lr and weight_decay
SETTINGS = {
    "sgd": ("momentum", "nesterov"),
    "adam": ("betas", "eps"),
    "adamw": ("betas", "eps"),
}


class OptimizerSettings(Section):
    """An optimizer of torch.optim by its name, and its settings."""

    name: str = "sgd"
    lr: Optional[NotNegative] = None
    momentum: Optional[Share] = None
    nesterov: Optional[StrictBool] = None
    weight_decay: Optional[NotNegative] = None
    betas: Optional[Tuple[Share, Share]] = None
    eps: Optional[Positive] = None
    # null in the manifests of runs that had no such key
    args: Optional[Dict[str, Any]] = None
    by_stage: Optional[Dict[str, Any]] = None

    @field_validator("name", mode="before")
    @classmethod
    def _validate_name(cls, value: Any) -> Any:
        # no optimizers of torch's: a run writes the first, `_name_groups` the second
        if value in (GIVEN, GROUPS):
            return value
        return validate_name(value, tuple(SETTINGS), OPTIMIZERS, OPTIMIZER_CLASSES)

    @field_validator("by_stage")
    @classmethod
    def _validate_by_stage(cls, value: Any) -> Any:
        for key, values in (value or {}).items():
            if not is_by_stage(values):
                raise key_fault(key, values, BY_STAGE)
        return value

    @property
    def is_other(self) -> bool:
        """Whether `name` is none of sgd, adam and adamw."""
        return is_entry(self.name, OPTIMIZERS)

    def list_cases(self) -> Iterator[Case]:
        # such an optimizer has its settings elsewhere: in Python, or in its groups
        if self.name in (GIVEN, GROUPS):
            return
        yield Case(
            self.args and not self.is_other,
            "args",
            f"{self.name} takes its settings beside its name, without args",
        )
        known = SETTINGS.get(self.name, ())
        remedy = f"it has {', '.join(known)}" if known else "put it into optimizer.args"
        why = f"{self.name} has no such key, {remedy}; null leaves it out"
        for key in ("momentum", "nesterov", "betas", "eps"):
            yield Case(getattr(self, key) is not None and key not in known, key, why)
        yield Case(self.nesterov and not self.momentum, "nesterov", "needs a momentum above 0")

    def settings(self) -> Dict[str, Any]:
        """Return the keyword arguments of the torch.optim class."""
        keys = {"lr", "momentum", "nesterov", "weight_decay", "betas", "eps"}
        return {**self.model_dump(include=keys, exclude_none=True), **(self.args or {})}


class OptimizerGroup(OptimizerSettings):
    """Parameters with a separate optimizer. `name`, `lr`, `momentum`, `nesterov`, `weight_decay`,
    `betas`, `eps`, `args` and `by_stage` are as in optimizer. `match`: patterns of their names,
    such as "*embed*"; null: all. `ndim`: their number of dimensions; null: any."""

    match: Optional[List[str]] = None
    ndim: Optional[Whole] = None

    def list_cases(self) -> Iterator[Case]:
        # first: the checks of other settings do not look at such names
        is_optimizer = self.name not in (GIVEN, GROUPS)
        yield Case(not is_optimizer, "name", "must be the name of an optimizer")
        yield from super().list_cases()

    @field_validator("match", mode="before")
    @classmethod
    def _validate_match(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class OptimizerConfig(OptimizerSettings):
    """A torch.optim optimizer. Settings that are null have PyTorch's defaults. `name`: its kind.
    `args`: its other keyword arguments. `lr`: learning rate; null: the rate that the method
    advises, see docs/rules.md, or the default of a class. `momentum`, `nesterov`: of sgd.
    `weight_decay`: decoupled in adamw, else added to the gradient. `betas`, `eps`: of adam and
    adamw. `by_stage`: settings that differ by stage, see docs/loop.md. `no_decay`: parameters
    without weight decay. `reference_batch_size`: samples per update for which lr and momentum were
    chosen; they are scaled to this run's, see docs/rules.md. `groups`: separate optimizers; a
    parameter belongs to the first group that matches it.
    """

    no_decay: Annotated[
        Union[str, List[str]],
        say_allowed("norms_and_biases or a list of name patterns such as *.bias"),
    ] = []
    reference_batch_size: Optional[Count] = None
    groups: List[OptimizerGroup] = []

    @model_validator(mode="before")
    @classmethod
    def _name_groups(cls, value: Any) -> Any:
        """Set the name of an optimizer with groups."""
        if (
            isinstance(value, Mapping)
            and value.get("groups")
            and value.get("name") in (None, GROUPS)
        ):
            # either of the two says it; a config that a run wrote has both
            return {**value, "name": GROUPS}
        return value

    def list_cases(self) -> Iterator[Case]:
        yield from super().list_cases()
        kind = "settings by stage" if self.name == "sgd" else self.name
        unscaled = self.reference_batch_size and (self.name != "sgd" or self.by_stage)
        yield Case(unscaled, "reference_batch_size", f"the scaling is defined on sgd, not {kind}")
        if self.name != GROUPS and not self.groups:
            return
        yield Case(
            not self.groups,
            "groups",
            "must be a list of groups, each with the keys of an optimizer",
        )
        why = "cannot be combined with groups, each of which has its own; null leaves it out"
        for key in OptimizerSettings.model_fields:
            yield Case(getattr(self, key) != (GROUPS if key == "name" else None), key, why)

    @property
    def members(self) -> Sequence[OptimizerSettings]:
        """The optimizers of the groups, or the one for all parameters."""
        return self.groups or [self]

    @property
    def leaves_rate_open(self) -> bool:
        """Whether a member leaves its learning rate to the method."""
        return any(one.lr is None and not one.is_other for one in self.members)

    def fill_rates(self, rates: Iterable[Optional[float]]) -> "OptimizerConfig":
        """Return the same optimizers. Members that leave their learning rate to the method get
        theirs of `rates`, which has one for each member.
        """
        return self._with_rates(
            rate if one.lr is None and not one.is_other else one.lr
            for one, rate in zip(self.members, rates)
        )

    def scale_rate(self, factor: float) -> "OptimizerConfig":
        """Return the same optimizers with their learning rates times `factor`. Rates that are not
        given keep their defaults.
        """
        # None stays None: a default of torch.optim is not known here
        return self._with_rates(one.lr and one.lr * factor for one in self.members)

    def _with_rates(self, rates: Iterable[Optional[float]]) -> "OptimizerConfig":
        """Return the same optimizers, each with its learning rate of `rates`."""
        members: List[Any] = [
            one.model_copy(update={"lr": rate}) for one, rate in zip(self.members, rates)
        ]
        return self.model_copy(update={"groups": members}) if self.groups else members[0]  # type: ignore[no-any-return]


class LrSchedule(Section):
    """The learning rate by update. `name`: the schedule after the warm-up; plateau is torch's
    ReduceLROnPlateau after each evaluation. `args`: its keyword arguments. `metric`: the evaluated
    metric that plateau follows; loss if null. `interval`: when it steps. `warmup_steps`: updates
    over which the rate rises from 0. `milestones`: epochs at which step multiplies the rate.
    `gamma`: the factor. `total_steps`: updates over which cosine and linear fall, and from which T1
    computes K; null: all of the run, which can then not be extended.
    """

    name: str = "constant"
    total_steps: Optional[Updates] = None
    warmup_steps: Whole = 0
    milestones: List[Epochs] = []
    gamma: Positive = 0.1
    args: Optional[Dict[str, Any]] = None
    # null means update
    interval: Optional[Literal["update", "epoch"]] = None
    metric: Optional[str] = None

    @field_validator("name", mode="before")
    @classmethod
    def _validate_name(cls, value: Any) -> Any:
        known = ("constant", "step", "cosine", "linear", "plateau")
        return (
            value if value == GIVEN else validate_name(value, known, SCHEDULERS, SCHEDULER_CLASSES)
        )

    @property
    def is_played(self) -> bool:
        """Whether a torch.optim.lr_scheduler gives the rates."""
        return self.name == GIVEN or is_entry(self.name, SCHEDULERS)

    def list_cases(self) -> Iterator[Case]:
        why = "step needs at least one epoch at which the rate is multiplied by gamma"
        yield Case(self.name == "step" and not self.milestones, "milestones", why)
        remedy = (
            "lr_schedule.args are its settings" if self.is_played else "see docs/configuration.md"
        )
        # key -> whether the schedule has it
        fits = {
            "args": self.is_played or self.name == "plateau",
            "metric": self.name == "plateau",
            "interval": self.is_played,
            "gamma": not self.is_played,
            "warmup_steps": not self.is_played,
            "milestones": self.name == "step",
            "total_steps": self.falls,
        }
        for key, fit in fits.items():
            # not by which keys the config states: one that a run wrote states all
            is_set = getattr(self, key) != LrSchedule.model_fields[key].default
            yield Case(is_set and not fit, key, f"{self.name} has no such key: {remedy}")

    @property
    def falls(self) -> bool:
        """Whether the rate falls over the whole run."""
        return self.name in ("cosine", "linear")

    def scale_updates(self, factor: float) -> "LrSchedule":
        """Return the schedule of a run of as many samples in `factor` times as many updates."""
        total = self.total_steps and math.ceil(self.total_steps * factor)
        warmup = math.ceil(self.warmup_steps * factor)
        return self.model_copy(update={"warmup_steps": warmup, "total_steps": total})


class ClipConfig(Section):
    """Gradient clipping to a `norm`, whose `scope` is: over all stages (`global`, synchronous
    methods), each `stage` alone, or by the newest global norm that all stages know
    (`delayed_global`, asynchronous methods).
    """

    norm: Positive
    scope: Literal["global", "stage", "delayed_global"] = "global"


class EmaConfig(Section):
    """An exponential moving average of the weights, with this `decay` at each update, which
    evaluations use.
    """

    decay: Decay


class EvaluateConfig(Section):
    """Evaluation after each `every` epochs, or each share of one (0: only before and after
    training), or after each `steps` updates, on the first `subset` test samples, or validation
    samples if data.validation is set. `best`: the metric that selects the best checkpoint: loss, or
    one of metrics.
    """

    every: Often = 1
    steps: Optional[Count] = None
    subset: Optional[Count] = None
    best: str = "loss"

    def interval(self, updates_per_epoch: Optional[int]) -> int:
        """Return the updates between two evaluations, 0 for never. For data without epochs `every`
        has no effect.
        """
        if self.steps is not None:
            return self.steps
        return (
            # at least 1: a small share of a short epoch is no update at all, and 0 means never
            max(1, round(self.every * updates_per_epoch)) if self.every and updates_per_epoch else 0
        )


class EarlyStoppingConfig(Section):
    """The run ends after `patience` evaluations in a row whose `metric` is not better than the best
    by more than `min_delta`; `mode`: null: by the metric's name; `restore_best`: the model ends
    with the weights of the best evaluation.
    """

    metric: str = "loss"
    mode: Optional[Literal["min", "max"]] = None
    patience: Count = 3
    min_delta: NotNegative = 0.0
    restore_best: StrictBool = False


class CheckpointConfig(Section):
    """A checkpoint at each evaluation and after each `every` updates; the newest `keep` and the
    best stay. `format`: single, one file of weights, or sharded, where each process writes its own.
    `background`: write a copy in the host's memory while training continues.
    """

    every: Optional[Count] = None
    keep: Count = 2
    format: Literal["single", "sharded"] = "single"
    background: StrictBool = False


class TraceConfig(Section):
    """The updates that are traced, counted through the whole run: from `begin` up to, not
    including, `end`, one in `every`. `end` null: about 512 microbatches of a stage are traced."""

    begin: Whole = 0
    end: Optional[Count] = None
    every: Count = 1

    def list_cases(self) -> Iterator[Case]:
        is_empty = self.end is not None and self.end <= self.begin
        yield Case(is_empty, "end", f"must be greater than begin, {self.begin}, or null")

    def updates(self, accumulate: int) -> range:
        """Return the traced updates, for `accumulate` microbatches per update."""
        # at least one update, however many microbatches it has
        end = (
            self.begin + max(TRACED // accumulate, 1) * self.every if self.end is None else self.end
        )
        return range(self.begin, end, self.every)


class LogConfig(Section):
    """The records of a running run. `every`: updates between two lines of metrics.jsonl.
    `tensorboard`: the same for TensorBoard. `trace`: the updates whose events are recorded; null or
    false: none.
    """

    every: Count = 10
    tensorboard: StrictBool = True
    trace: Optional[TraceConfig] = TraceConfig()

    @field_validator("trace", mode="before")
    @classmethod
    def _convert_bool(cls, value: Any) -> Any:
        # `trace: true` means the section's defaults
        if isinstance(value, bool):
            return {} if value else None
        return value


class Entry(Section):
    """`entry`: "module:callable"; `args`: its keyword arguments."""

    entry: str
    args: Dict[str, Any] = {}


class StageCount(Section):
    """A number of stages, balanced. The run's folder records the cut for resuming. `count`: the
    number of stages. `by`: the cost that is balanced; hardware: time predicted for the config's
    hardware.
    """

    count: Stages
    by: Literal["flops", "parameters", "time", "hardware"] = "flops"


class StageFinest(Section):
    """`finest`: the number of stages over which the weights are spread."""

    finest: Stages


class InitFrom(Section):
    """Initial weights. `path`: a file of weights, a checkpoint's folder, or a run's folder (its
    newest checkpoint). `strict`: the weights must fit the model; false: load those that fit.
    """

    path: PathText
    strict: StrictBool = True

    @model_validator(mode="before")
    @classmethod
    def _expand_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @model_serializer
    def _write_path(self) -> Union[str, Dict[str, Any]]:
        return self.path if self.strict else {"path": self.path, "strict": False}


class Description(Section):
    """An object that was passed from Python in place of a key: its qualified name and settings.
    Optimizers also have the different settings of parameter groups."""

    name: str
    settings: Dict[str, Any] = {}
    groups: List[Dict[str, Any]] = []


Object = Optional[Description]


class Given(Section):
    """Objects that were passed from Python in place of the config's keys. Runs write them; the
    command line cannot use them.
    """

    model: Object = None
    output: Object = None
    data: Object = None
    loss: Object = None
    loss_weight: Object = None
    optimizer: Object = None
    lr_scheduler: Object = None
    metrics: Optional[List[Description]] = None
    callbacks: Optional[List[Description]] = None


# ---- method_args


class T1(Section):
    """Learning rates that are at first lower for larger delays (PipeMare, equation 5).
    `anneal_updates`: K;
    null: from the lr_schedule.
    """

    anneal_updates: Optional[Count] = None


class T2(Section):
    """Discrepancy correction (PipeMare): a backward estimates the weights that its forward read. {}
    has the default decay. `decay`: gamma^D for a delay of D, or `optimal` for the optimum on a
    quadratic; the default is exp(-2).
    """

    # exp(-2) is the 0.135 of PipeMare
    decay: Annotated[
        Union[Literal["optimal"], Decay], say_allowed("a number > 0 and < 1, or optimal", "optimal")
    ] = math.exp(-2)


class Warmup(Section):
    """Synchronous training in the first `epochs` (a fraction is rounded to updates)."""

    epochs: Epochs


class Recompute(Section):
    """Recomputation of activations in `segments` segments of stages; null: the square root of the
    number of stages.
    """

    segments: Optional[Count] = None


class Hogwild(Section):
    """Random delays with an exponential distribution. `max`: the largest, in updates. `mean`: null:
    the stage's delay in the pipeline.
    """

    mean: Annotated[
        Union[None, NotNegative, NonEmpty[NotNegative]],
        say_allowed(f"{NONE}, a number >= 0, or a list of such, one per stage"),
    ] = None
    # an exponential draw has no bound of its own, and each delay keeps a version
    max: Delayed


class ConstantDelay(Section):
    """Every forward reads weights `updates` updates older than those to which its gradient is
    applied.
    """

    updates: Annotated[
        Union[Delayed, NonEmpty[NonEmpty[Annotated[Integer, Field(ge=0, le=MOST_VERSIONS)]]]],
        say_allowed(
            f"an integer from 1 to {MOST_VERSIONS}, or a list of lists, for each stage the delays "
            f"of an update's microbatches, as [[2, 1], [1, 0]], not all 0"
        ),
    ]

    def list_cases(self) -> Iterator[Case]:
        is_zero = isinstance(self.updates, list) and not any(map(any, self.updates))
        yield Case(is_zero, "updates", "must not be 0 for all stages and microbatches")


class SpikeCompensation(Section):
    """SC_kD with k = `scale`, or any `a` and `b` (pipelined backpropagation)."""

    scale: Positive = 1.0
    a: Optional[NotNegative] = None
    b: Optional[NotNegative] = None

    def list_cases(self) -> Iterator[Case]:
        yield Case(
            (self.a is None) != (self.b is None),
            "b" if self.a is None else "a",
            "a and b go together",
        )
        yield Case(self.a is not None and self.scale != 1.0, "scale", "either scale, or a and b")


class WeightPrediction(Section):
    """Linear weight prediction over `scale` times the delay, by the velocity of sgd, the last
    update's difference, or the direction of the step of sgd, adam or adamw (`form`)."""

    form: Literal["velocity", "difference", "optimizer"] = "velocity"
    scale: Positive = 1.0


class GradientShrinking(Section):
    """Gradients times `factor` to the power of the delay."""

    factor: Fraction


class DelayCompensation(Section):
    """Gradients corrected for the updates since the weights that their passes read (DC-ASGD).
    `scale`: lambda. `adaptive`: lambda is divided by the root of a moving mean of squared
    gradients. `decay`: of that mean.
    """

    scale: Positive = 0.04
    adaptive: StrictBool = False
    decay: Share = 0.95


class GapAware(Section):
    """Gradients divided by 1 plus the gap, in mean steps, between the newest weights and those that
    their passes read (Gap-Aware). `decay`: of the moving mean of squared steps.
    """

    decay: Decay = 0.999


class OuterConfig(Section):
    """The outer optimizer of DiLoCo: `name` sgd with `lr`, `momentum`, `nesterov`. `fragments`:
    groups of stages that are synchronized in turn; `offset`: the first. `delay`: steps from taking
    the replicas' weights to the synchronization. `mix`: the share of a replica's own weights
    afterwards.
    """

    name: Literal["sgd"] = "sgd"
    # with Nesterov's momentum of 0.9, the outer optimizer that was best in DiLoCo (Douillard et al.
    # 2023)
    lr: Positive = 0.7
    momentum: Share = 0.9
    nesterov: StrictBool = True
    fragments: Annotated[
        Union[Literal["per_stage"], Stages],
        say_allowed("an integer >= 1, or per_stage", "per_stage"),
    ] = 1
    offset: Whole = 0
    delay: Whole = 0
    mix: Annotated[NotNegative, Field(le=1)] = 0.0

    def list_cases(self) -> Iterator[Case]:
        yield Case(self.nesterov and not self.momentum, "nesterov", "needs a momentum above 0")


class ErrorFeedback(Section):
    """Correction of the previous step by `scale` times its error, which the newest gradient
    shows.
    """

    scale: Positive = 1.0


class HeadLayers(Section):
    """Auxiliary heads with layers like later ones (AugLocal). `depth`: the number of layers in the
    first head; `pyramid`: how far the depth falls towards the last head, from 0 (not at all) to 1
    (to one layer).
    """

    depth: Count
    pyramid: Annotated[NotNegative, Field(le=1)] = 0.5


class MethodArgs(Section):
    """Changes of the method's axes, and its update rules; null: the method's own, or none.
    docs/rules.md has their equations.

    `schedule`: see docs/rules.md. `turn`: steps from the last stage's forward to its backward,
    dataflow only. `stash`: whether backwards read their forward's weights. `hogwild`: random
    delays. `constant_delay`: the same delay everywhere. `recompute`: recomputation of activations
    by the method's own rule. `warmup`: synchronous at first. `t1`: PipeMare's rescheduled rates.
    `t2`: PipeMare's corrected backward. `spike_compensation`, `weight_prediction`,
    `gradient_shrinking`, `error_feedback`, `delay_compensation`, `gap_aware`: a rule. `blocks`: of
    local_chunked: their number, or the names at which they begin. `overlap`: of local_overlapping.
    `layers`: of last_layers: the number of stages that train. `head`: of local methods, see
    docs/local_parallel.md. `block_rates`: of each block: the factor of its learning rate.
    `block_accumulation`: of each block: the number of updates whose gradients make one step.
    `delay_bound`: of randomized_pipedream: the largest delay; null: PipeDream's own. `delays`,
    `order`: of randomized_pipedream, see docs/randomized.md. `nag`: of randomized_pipedream:
    Nesterov's factor. `replicas`: of local_sgd: null: as many as stages. `local_steps`: of
    local_sgd: steps of a replica between two averages. `outer`: of local_sgd: DiLoCo's outer
    optimizer. `split_backward`: of pipedream and pipelined_backprop, see docs/schedules.md. `tied`:
    of methods that stash: holder: several stages may use one weight, see docs/rules.md.
    `activation_limit`: of zb_auto and split backwards: a device's activations, in multiples of
    1F1B's. `file`: of rows: CSV in PyTorch's format.
    """

    schedule: Optional[Literal["1f1b", "1f1b_capped", "dataflow"]] = None
    turn: Optional[Annotated[Integer, Field(ge=0, le=1)]] = None
    stash: Optional[StrictBool] = None
    hogwild: Optional[Hogwild] = None
    constant_delay: Optional[ConstantDelay] = None
    recompute: Optional[Recompute] = None
    warmup: Optional[Warmup] = None
    t1: Optional[T1] = None
    t2: Optional[T2] = None
    spike_compensation: Optional[SpikeCompensation] = None
    weight_prediction: Optional[WeightPrediction] = None
    gradient_shrinking: Optional[GradientShrinking] = None
    error_feedback: Optional[ErrorFeedback] = None
    delay_compensation: Optional[DelayCompensation] = None
    gap_aware: Optional[GapAware] = None
    blocks: Annotated[
        Union[None, Stages, NonEmpty[str]],
        say_allowed(f"{NONE}, an integer from 1 to {MOST_STAGES}, or a list of module names"),
    ] = None
    overlap: Optional[Literal[1]] = None
    layers: Optional[Count] = None
    head: Any = None
    block_rates: Optional[List[Positive]] = None
    block_accumulation: Optional[List[Count]] = None
    delay_bound: Optional[Annotated[Integer, Field(ge=0, le=MOST_VERSIONS)]] = None
    delays: Optional[Literal["uniform", "offsets", "schedule"]] = None
    order: Optional[Literal["random", "schedule"]] = None
    nag: Optional[Positive] = None
    replicas: Optional[Stages] = None
    local_steps: Optional[Count] = None
    outer: Optional[OuterConfig] = None
    split_backward: Optional[StrictBool] = None
    tied: Optional[Literal["holder"]] = None
    activation_limit: Optional[Annotated[Positive, Field(ge=1)]] = None
    file: Optional[Annotated[PathText, Field(min_length=1)]] = None

    @field_validator("head")
    @classmethod
    def _validate_head(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            return HeadLayers.model_validate(value)
        if value is None or isinstance(value, (str, HeadLayers)):
            return value
        raise ValueError("must be an import string module:function, or {depth, pyramid}")
