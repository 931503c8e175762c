"""One schema for a run: YAML file and command-line overrides -> a frozen, checked `Config`.

Every fault is told at once, a line each: where the value came from, the key, the value and what is allowed.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple, Type, Union

from pydantic import BaseModel, ConfigDict, PrivateAttr, StrictBool, ValidationError, field_validator, model_validator
from typing_extensions import Annotated, Literal

from ipu_pipe.errors import BadInput
from ipu_pipe.job.config_faults import origin_of, told
from ipu_pipe.job.ipu.config import IpuConfig
from ipu_pipe.job.ipu.refusals import config_faults
from ipu_pipe.job.values import (
    MOST_STAGES,
    Count,
    Delayed,
    Epochs,
    Fraction,
    NotNegative,
    PathText,
    Positive,
    Seconds,
    Seed,
    Share,
    Stages,
    Threads,
    Traced,
    Updates,
    Whole,
)
from ipu_pipe.job.values import Section as _Section
from ipu_pipe.job.values import fault_at as _fault_at
from ipu_pipe.job.values import number as _number
from ipu_pipe.job.values import whole as _whole
from ipu_pipe.job.yaml_files import Origins, override, read_file, write
from ipu_pipe.schedule.methods import METHODS, Reads, resolve_method
from ipu_pipe.shown import shown

GIVEN = "(given in Python)"


class ModelConfig(_Section):
    """`entry`: "module:callable" that makes the model; `args`: its keyword arguments."""

    entry: str
    args: Dict[str, Any] = {}


class DataConfig(BaseModel):
    """`name`: a set of ipu_pipe.data or "module:callable" that makes a DataSource. Other keys are passed on to it."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str
    root: Optional[PathText] = None
    subset: Optional[Count] = None
    test_subset: Optional[Count] = None

    def options(self) -> Dict[str, Any]:
        """All keys but the name, those not given left out."""
        return {key: value for key, value in self.model_dump().items() if key != "name" and value is not None}


class T1(_Section):
    """Learning-rate rescheduling. `anneal_updates`: K, from the lr_schedule if null (see ipu_pipe.update.rules)."""

    anneal_updates: Optional[Count] = None


class T2(_Section):
    """Discrepancy correction. `decay`: D, or `optimal` for the optimum on a quadratic; null is exp(-2)."""

    decay: Any = math.exp(-2)

    @field_validator("decay")
    @classmethod
    def _decay(cls, value: Any) -> Any:
        share = _number(value)
        if value == "optimal" or (share is not None and 0 < share < 1):
            return value if value == "optimal" else share
        raise ValueError("must be a number > 0 and < 1, or optimal")


class Warmup(_Section):
    """Synchronous training in the first `epochs` (a fraction is rounded to updates)."""

    epochs: Epochs


class Recompute(_Section):
    """Activations recomputed in so many segments of stages; the square root of the stages if null."""

    segments: Optional[Count] = None


class Hogwild(_Section):
    """Delays drawn from an exponential distribution over 0..`max` updates, `mean`: of all stages or one each; null: the
    stage's lag in the method's pipeline."""

    mean: Any = None
    max: Annotated[int, _whole(1, 1_000_000)]

    @field_validator("mean")
    @classmethod
    def _mean(cls, value: Any) -> Any:
        given = value if isinstance(value, (list, tuple)) else [value]
        numbers = [_number(item) for item in given]
        if value is None or (numbers and all(number is not None and number >= 0 for number in numbers)):
            return value if value is None else numbers if isinstance(value, (list, tuple)) else numbers[0]
        raise ValueError("must be null, a number >= 0, or a list of such, one a stage")


class ConstantDelay(_Section):
    """Every forward reads weights `updates` older than those to which its gradient is applied."""

    updates: Delayed


class SpikeCompensation(_Section):
    """SC_kD with k = `scale`, or any `a` and `b`."""

    scale: Positive = 1.0
    a: Optional[NotNegative] = None
    b: Optional[NotNegative] = None

    @model_validator(mode="after")
    def _fits(self) -> "SpikeCompensation":
        if (self.a is None) != (self.b is None):
            raise _fault_at(
                "a" if self.a is not None else "b", self.a if self.a is not None else self.b, "a and b go together"
            )
        if self.a is not None and self.scale != 1.0:
            raise _fault_at("scale", self.scale, "either scale, or a and b")
        return self


class WeightPrediction(_Section):
    """Linear weight prediction over `scale` times the lag."""

    form: Literal["velocity", "difference"] = "velocity"
    scale: Positive = 1.0


class GradientShrinking(_Section):
    """Gradients times `factor` to the power of the lag."""

    factor: Fraction


class MethodArgs(_Section):
    """Changes of the method's axes, see schedule.methods, and its update rules, see update.rules. Of local-parallel methods:
    `head`, "module:function" that makes an auxiliary head; `block_rates`, what the learning rate is multiplied by, and
    `block_accumulation`, of how many updates' gradients a step is made, one for each block."""

    schedule: Optional[Literal["1f1b", "dataflow"]] = None
    turn: Optional[Annotated[int, _whole(0, 1)]] = None
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
    blocks: Any = None
    overlap: Any = None
    layers: Any = None
    head: Optional[str] = None
    block_rates: Optional[List[Positive]] = None
    block_accumulation: Optional[List[Count]] = None


class BackendConfig(_Section):
    """Where it runs. `threads`: of PyTorch on the CPU, its own default if null. `deadline`: seconds that a process of several
    waits for another before it gives up. `deterministic`, `tf32`: of GPUs alone, see ipu_pipe.job.determinism. `ipu`: of poptorch
    alone, see ipu_pipe.job.ipu.config."""

    name: Literal["emulator", "distributed", "poptorch"] = "emulator"
    device: Literal["cpu", "cuda"] = "cpu"
    threads: Optional[Threads] = None
    deadline: Seconds = 300.0
    deterministic: StrictBool = True
    tf32: StrictBool = False
    ipu: Optional[IpuConfig] = None

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, value: Any) -> Any:
        """poptorch has its section in full, also where nothing is said."""
        if isinstance(value, Mapping) and value.get("name") == "poptorch" and value.get("ipu") is None:
            return {**value, "ipu": {}}
        return value

    @model_validator(mode="after")
    def _fits(self) -> "BackendConfig":
        if self.ipu is not None and self.name != "poptorch":
            raise _fault_at("ipu", "given", f"belongs to backend.name poptorch, not {self.name}: set backend.ipu=null")
        for key, usual in (("deterministic", True), ("tf32", False)):
            if self.device != "cuda" and getattr(self, key) != usual:
                value = str(not usual).lower()
                raise _fault_at(key, value, f"belongs to backend.device cuda, not {self.device}: leave it out")
        return self


class OptimizerConfig(_Section):
    """A torch.optim optimizer. Settings that are null stay PyTorch's own. `reference_batch_size`: lr and momentum are those
    for updates of so many samples, and are scaled to this run's (see ipu_pipe.update.rules.scaled_for_update_size)."""

    name: str = "sgd"
    lr: Optional[NotNegative] = 0.05
    momentum: Optional[Share] = None
    nesterov: Optional[StrictBool] = None
    weight_decay: Optional[NotNegative] = None
    betas: Optional[Tuple[Share, Share]] = None
    eps: Optional[Positive] = None
    no_decay: Union[str, List[str]] = []
    reference_batch_size: Optional[Count] = None

    @field_validator("name", mode="before")
    @classmethod
    def _name(cls, value: Any) -> Any:
        if isinstance(value, str) and value in ("sgd", "adam", "adamw", GIVEN):
            return value
        raise ValueError("must be sgd, adam or adamw")

    @field_validator("no_decay", mode="before")
    @classmethod
    def _patterns(cls, value: Any) -> Any:
        if isinstance(value, str) or (isinstance(value, list) and all(isinstance(pattern, str) for pattern in value)):
            return value
        raise ValueError("must be norms_and_biases or a list of name patterns such as *.bias")

    @model_validator(mode="after")
    def _fits(self) -> "OptimizerConfig":
        if self.lr is None and self.name != GIVEN:
            raise _fault_at("lr", None, "must be a number >= 0")
        own = ("momentum", "nesterov") if self.name == "sgd" else ("betas", "eps")
        for key in ("momentum", "nesterov", "betas", "eps"):
            if getattr(self, key) is not None and key not in own:
                why = f"{self.name} has no such setting, it has {', '.join(own)}"
                raise _fault_at(key, getattr(self, key), why)
        if self.reference_batch_size and self.name != "sgd":
            raise _fault_at(
                "reference_batch_size", self.reference_batch_size, f"the scaling is defined on sgd, not {self.name}"
            )
        if self.nesterov and not self.momentum:
            raise _fault_at("nesterov", True, "needs a momentum above 0")
        return self

    def settings(self) -> Dict[str, Any]:
        """Keyword arguments of the torch.optim class."""
        given = self.model_dump(exclude={"name", "no_decay", "reference_batch_size"})
        return {key: value for key, value in given.items() if value is not None}


class LrSchedule(_Section):
    """See ipu_pipe.update.rates. `milestones` in epochs, `warmup_steps` in updates."""

    name: Literal["constant", "step", "cosine", "linear"] = "constant"
    warmup_steps: Whole = 0
    milestones: List[Epochs] = []
    gamma: Positive = 0.1

    @model_validator(mode="after")
    def _fits(self) -> "LrSchedule":
        if self.name == "step" and not self.milestones:
            raise _fault_at("milestones", [], "step needs at least one epoch at which the rate is multiplied by gamma")
        if self.name != "step" and self.milestones:
            raise _fault_at("milestones", self.milestones, f"{self.name} has none, only step has")
        return self


class ClipConfig(_Section):
    """Gradient clipping to a norm: over all stages (`global`, synchronous methods), each `stage` alone, or by the newest global
    norm that all stages know (`delayed_global`, asynchronous methods; see ipu_pipe.update.optimizer.DelayedGlobalNorm)."""

    norm: Positive
    scope: Literal["global", "stage", "delayed_global"] = "global"


class EvaluateConfig(_Section):
    """Evaluation after each `every` epochs (0: only before and after training), on the first `subset` test samples."""

    every: Whole = 1
    subset: Optional[Count] = None


class CheckpointConfig(_Section):
    """A checkpoint at each evaluation and after each `every` updates; the newest `keep` and the best stay."""

    every: Optional[Count] = None
    keep: Count = 2


class LogConfig(_Section):
    """A line of metrics.jsonl after each `every` updates; the first `trace_microbatches` in the trace."""

    every: Count = 10
    tensorboard: StrictBool = True
    trace_microbatches: Traced = 512


class StageCount(_Section):
    """A number of stages, balanced by a cost. Times differ from one measurement to the next: the folder of a run holds the
    names of the modules at which its stages begin instead, and a resumed run has those (see `as_recorded`)."""

    count: Stages
    by: Literal["flops", "parameters", "time"] = "flops"


class StageFinest(_Section):
    """A number of stages over which the weights are spread."""

    finest: Stages


class Description(_Section):
    """An object that took the place of a key: its qualified name and settings; of an optimizer also those of parameter groups
    that have others."""

    name: str
    settings: Dict[str, Any] = {}
    groups: List[Dict[str, Any]] = []


class Given(_Section):
    """What Python gave in the place of the config's own; written by a run, and of no use on the command line."""

    model: Optional[Description] = None
    data: Optional[Description] = None
    loss: Optional[Description] = None
    optimizer: Optional[Description] = None


class Config(_Section):
    """A run. README and the classes above say what the keys mean."""

    model: ModelConfig
    data: DataConfig
    method: str = "gpipe"
    method_args: MethodArgs = MethodArgs()
    stages: Any = None
    loss: str = "cross_entropy"
    backend: BackendConfig = BackendConfig()
    micro_batch_size: Count = 8
    gradient_accumulation: Count = 1
    replicas: Count = 1
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_schedule: LrSchedule = LrSchedule()
    clip: Optional[ClipConfig] = None
    epochs: Updates = 1
    steps: Optional[Updates] = None
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    seed: Seed = 0
    precision: Literal["float32", "float64", "bfloat16", "16.16", "16.32", "32.32"] = "float32"
    recompute: StrictBool = False
    hardware: Optional[Dict[str, Any]] = None
    init_from: Optional[PathText] = None
    allow_nonfinite: StrictBool = False
    given: Optional[Given] = None
    # what the update rules have against the config's own optimizer, with places: told if no other one is given
    _optimizer_faults: Tuple[str, ...] = PrivateAttr(default=())

    @field_validator("precision", mode="before")
    @classmethod
    def _precision(cls, value: Any) -> Any:
        """16.16 without quotes is a number to YAML."""
        return f"{value:.2f}" if isinstance(value, float) else value

    @field_validator("hardware", mode="before")
    @classmethod
    def _hardware(cls, value: Any) -> Any:
        if value is not None:
            raise ValueError("nothing reads it yet: must be null")
        return value

    @field_validator("stages")
    @classmethod
    def _stages(cls, value: Any) -> Any:
        """None, "finest", a count, names, {count, by} or {finest}."""
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        names = isinstance(value, list) and bool(value) and all(isinstance(name, str) for name in value)
        if whole and value > MOST_STAGES:
            raise ValueError(f"must be a whole number from 1 to {MOST_STAGES}: a schedule is planned before it starts")
        if value is None or value == "finest" or whole or names:
            return value
        if isinstance(value, Mapping) and ("count" in value or "finest" in value):
            section: Type[_Section] = StageFinest if "finest" in value else StageCount
            return section.model_validate(value).model_dump()
        raise ValueError(
            "must be null (the model's own), finest, a whole number >= 1, a list of module names, {count, by} or {finest}"
        )

    @model_validator(mode="after")
    def _no_optimizer_is_lost(self) -> "Config":
        if self.optimizer.name == GIVEN and (self.given is None or self.given.optimizer is None):
            raise _fault_at("optimizer.name", GIVEN, "without given.optimizer: must be sgd, adam or adamw")
        return self

    @model_validator(mode="after")
    def _recompute_is_said_once(self) -> "Config":
        method = METHODS.get(self.method)
        if not self.recompute or method is None or self.method_args.recompute:
            return self
        reads_newest = method.backward_reads is Reads.NEWEST and method.is_stale and not self.method_args.stash
        if reads_newest and self.method_args.constant_delay:
            why = "not together with recompute: true, which recomputes with a forward's weights: its backward reads newer ones"
            raise _fault_at("method_args.constant_delay", self.method_args.constant_delay.updates, why)
        if reads_newest and not self.method_args.hogwild:
            why = f"with {self.method} the weights of the recomputation matter: set method_args: {{recompute: {{segments: ...}}}}"
            raise _fault_at("recompute", True, why)
        return self

    def to_dict(self) -> Dict[str, Any]:
        """Every key with its value, as plain data that YAML and JSON can hold."""
        return self.model_dump(mode="json")

    def optimizer_faults(self) -> Tuple[str, ...]:
        """What the update rules have against the config's own optimizer, each with the place it comes from."""
        return self._optimizer_faults

    def method_settings(self) -> Dict[str, Any]:
        """`method_args` that are given."""
        return {key: value for key, value in self.method_args.model_dump().items() if value is not None}


# ---- reading


def load_config(path: Union[str, Path], overrides: Sequence[str] = ()) -> Config:
    """The config in the YAML file `path`, changed by KEY=VALUE `overrides`. Raises BadInput with every fault found."""
    origins: Origins = {}
    raw = read_file(Path(path), origins)
    faults: List[str] = []
    for text in overrides:
        try:
            override(raw, text, origins)
        except BadInput as error:
            faults += error.faults
    return _validate(raw, origins, str(path), faults)


def configure(**keys: Any) -> Config:
    """A config from Python: the keys of a config file as arguments. `model` and `data` may be left to `train`."""
    raw = {"model": {"entry": GIVEN}, "data": {"name": GIVEN}, **keys}
    return _validate(raw, {}, "configure", [])


def _validate(raw: Dict[str, Any], origins: Origins, place: str, faults: List[str]) -> Config:
    raw = {
        key: value
        for key, value in raw.items()
        if value is not None or key in ("stages", "steps", "clip", "hardware", "init_from")
    }
    config = None
    wrong: Set[str] = set()
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        found = error.errors()
        # the forms of `stages` are checked one after another, so that its type says none of them
        faults = faults + told(found, origins, place, Config, {"stages": StageCount})
        wrong = {str((*detail["loc"], detail.get("ctx", {}).get("key", ""))[0]) for detail in found}
    if "method" not in wrong:  # also where other keys are wrong: all faults are told at once
        args = raw.get("method_args", {}) if "method_args" not in wrong else {}
        faults = faults + _method_faults(raw.get("method", "gpipe"), args, origins, place)
    if config is not None and not faults:
        faults, own = _rule_faults(config, origins, place)
        config._optimizer_faults = tuple(own)
        against = config_faults(config)
        faults += [f"{origin_of(fault.partition(':')[0], origins, place)}: {fault}" for fault in against]
    if faults or config is None:
        raise BadInput(faults)
    return config


def _method_faults(name: str, args: Mapping[str, Any], origins: Origins, place: str) -> List[str]:
    """What ipu_pipe.schedule.methods has against the method's name or axes, with the place that each key came from."""
    try:
        resolve_method(name, args)
    except BadInput as error:
        found = [re.sub(r"^method_args: ", "method_args.", fault) for fault in error.faults]
        return [f"{origin_of(fault.partition(':')[0], origins, place)}: {fault}" for fault in found]
    return []


def _rule_faults(config: Config, origins: Origins, place: str) -> Tuple[List[str], List[str]]:
    """What the update rules have against the method, and against the config's optimizer, in whose place another may be given."""
    from ipu_pipe.update import rules  # holds torch, which reading a config otherwise does not need

    optimizer, args = config.optimizer, config.method_settings()
    method = resolve_method(config.method, args)
    always = rules.faults(args, method, "sgd", {"momentum": 0.9})  # an optimizer that none of them minds
    own = [f for f in rules.faults(args, method, optimizer.name, optimizer.settings()) if f not in always]
    placed = [[f"{origin_of(fault.partition(':')[0], origins, place)}: {fault}" for fault in f] for f in (always, own)]
    return placed[0], placed[1]


# ---- writing and comparing


def dump(config: Config) -> str:
    """The resolved config as YAML that loads to the same config."""
    return write(config.to_dict())


def as_recorded(old: Config, new: Config) -> Config:
    """`new` with the stages of `old`, a run's own config, where those are as many as `new` says to measure by time."""
    measured = isinstance(new.stages, dict) and new.stages.get("by") == "time"
    if measured and isinstance(old.stages, list) and len(old.stages) + 1 == new.stages["count"]:
        return new.model_copy(update={"stages": old.stages})
    return new


def changed(old: Config, new: Config) -> List[Tuple[str, Any, Any]]:
    """(key, old value, new value) for every value in which the two differ; a key that one lacks counts as null."""
    a, b = flat(old.to_dict()), flat(new.to_dict())
    return [(key, a.get(key), b.get(key)) for key in sorted({*a, *b}) if a.get(key) != b.get(key)]


def differences(old: Config, new: Config) -> List[str]:
    """`key: old -> new` for every value in which the two differ."""
    return [f"{shown(key)}: {shown(before)} -> {shown(after)}" for key, before, after in changed(old, new)]


def flat(value: Any, key: str = "") -> Dict[str, Any]:
    """Nested mappings as one, by `outer.inner` keys."""
    if not isinstance(value, dict) or not value:
        return {key: value}
    found: Dict[str, Any] = {}
    for name, item in value.items():
        found.update(flat(item, f"{key}.{name}" if key else str(name)))
    return found
