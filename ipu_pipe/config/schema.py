"""The schema of a run's config: every key with its type and limits, and the rules between keys of
different sections.

The docstring of a section explains its keys, each as `key`: meaning; the reference of the
documentation site is made from them.
"""

from __future__ import annotations

import importlib
from typing import (
    TYPE_CHECKING,
    Any,
    Dict,
    Iterator,
    List,
    Mapping,
    Optional,
    Tuple,
    TypeVar,
    Union,
)

from pydantic import Field, PrivateAttr, StrictBool, ValidationInfo, field_validator
from typing_extensions import Annotated, Literal

from ipu_pipe.config import sections
from ipu_pipe.config.backend_facts import BACKEND_FACTS, BackendFacts
from ipu_pipe.config.values import (
    DEVICES,
    MOST_STAGES,
    Case,
    Count,
    DeviceName,
    NonEmpty,
    Seconds,
    Section,
    Seed,
    Stages,
    Threads,
    Updates,
    say_allowed,
)
from ipu_pipe.refusals import NONE, Argument, Words, name_key
from ipu_pipe.schedule.methods import METHODS, Reads, Timeline
from ipu_pipe.text import find_nearest, suggest

# Sections and checks of folders above this one, as "module:name", imported when a config needs
# them. A backend has its section and its checks in its own folder; a new backend needs only a
# line here.
OUTER = {
    "ipu": "ipu_pipe.backends.ipu.config:IpuConfig",  # section of backend.ipu
    "hardware": "ipu_pipe.hardware.description:Hardware",
    "check_stages": "ipu_pipe.backends.ipu.unsupported:check_placement",  # (config, method, stages) -> faults
    "check_backend": "ipu_pipe.backends.ipu.unsupported:check_config",  # (config, method) -> "key: value: what is allowed"
    "list_run_faults": "ipu_pipe.backends.ipu.unsupported:list_run_faults",  # (config) -> the same
    "read_hardware": "ipu_pipe.hardware.description:read_hardware",  # (name or file, place in faults); raises BadInput
}


def import_outer(key: str) -> Any:
    """Import and return a section or function of the table `OUTER`."""
    module, _, attribute = OUTER[key].partition(":")
    return getattr(importlib.import_module(module), attribute)


if TYPE_CHECKING:
    CacheFolder = Union[bool, str, None]
else:
    CacheFolder = Annotated[
        Union[None, Literal[False], str], say_allowed("a folder, false or null")
    ]


class BackendConfig(Section):
    """Where a run computes. `name`: on the emulator, on processes, on IPUs, or on XLA devices.
    `device`: such as xpu or npu, see docs/accelerators.md (poptorch has its own). `threads`:
    PyTorch's on the CPU; null: its default. `deadline`: seconds that a process waits for another.
    `deterministic`: on GPUs, slower kernels that always compute the same. `tf32`: on GPUs, faster
    products of 10 bits instead of 23. `platform`: of xla; tt: Tenstorrent; null: cpu. `devices`: of
    xla: how many, see docs/accelerators.md; null: all. `program`: of xla: compile each action or
    each slot, see docs/accelerators.md; null: a slot where that is faster. `cache`: of xla, of
    compiled programs, `false` for none; null: `ipu_pipe/xla` in the user's cache. `ipu`: of
    poptorch.
    """

    name: Literal["emulator", "distributed", "poptorch", "xla"] = "emulator"
    device: DeviceName = "cpu"
    threads: Optional[Threads] = None
    deadline: Seconds = 300.0
    deterministic: StrictBool = True
    tf32: StrictBool = False
    platform: Optional[Literal["cpu", "tpu", "tt"]] = None
    devices: Optional[Count] = None
    program: Optional[Literal["action", "slot"]] = None
    cache: CacheFolder = None
    # validated though it is left out, because poptorch then has the section's defaults
    ipu: Any = Field(default=None, validate_default=True)

    @field_validator("name", mode="before")
    @classmethod
    def _validate_name(cls, value: Any) -> Any:
        """Refuse a kind of device, which users of other libraries expect here."""
        # 1.0: exactly a device's name, since a similar word may be a misspelt backend
        device = find_nearest(value, DEVICES, cutoff=1.0)
        if device:
            why = f"is a device; did you mean {name_key('backend.device')}={device}?"
            raise ValueError(why)
        return value

    @field_validator("ipu", mode="before")
    @classmethod
    def _validate_ipu(cls, value: Any, info: ValidationInfo) -> Any:
        """Validate the section of poptorch, whose keys have defaults if the config has none."""
        # info.data has the fields above that were valid: no name if that was refused
        if value is None and info.data.get("name") == "poptorch":
            value = {}
        if value is None or isinstance(value, Section):
            return value
        return import_outer("ipu").model_validate(value)

    def list_cases(self) -> Iterator[Case]:
        why = (
            f"belongs to {Argument('backend')} poptorch, not {self.name}: "
            f"{Words('leave it out', 'set backend.ipu=null')}"
        )
        # "given": the whole section would hide the reason
        yield Case(self.ipu is not None and self.name != "poptorch", "ipu", why, "given")
        why = f"belongs to {Argument('backend')} xla, not {self.name}: leave it out"
        is_other = not self.facts.counts_devices
        for key in ("platform", "devices", "program", "cache"):
            yield Case(is_other and getattr(self, key) is not None, key, why)
        why = f"belongs to {Argument('device')} cuda, not {self.device}: leave it out"
        is_other = self.device != "cuda"
        yield Case(is_other and not self.deterministic, "deterministic", why)
        yield Case(is_other and self.tf32, "tf32", why)

    @property
    def facts(self) -> BackendFacts:
        """What the backend supports."""
        return BACKEND_FACTS[self.name]


# null, "finest", "auto", a count, names, {count, by} or {finest}
if TYPE_CHECKING:
    StagesValue = Any
else:
    StagesValue = Annotated[
        Union[None, Literal["finest", "auto"], Stages, NonEmpty[str], Dict[str, Any]],
        say_allowed(
            f"{NONE} (the model's own), auto, finest, a whole number from 1 to {MOST_STAGES}, a "
            f"list of module names, {{count, by}} or {{finest}}",
            "auto",
            "finest",
        ),
    ]
Entries = Annotated[
    List[Union[str, sections.Entry]],
    say_allowed(
        "a list of names such as accuracy, or import strings module:name, or of {entry, args}"
    ),
]


AnyConfig = TypeVar("AnyConfig", bound="PipelineConfig")


class PipelineConfig(Section):
    """The keys of a config that its pipeline reads, or what a loop's `Pipeline` is told.

    `method`: the training method, see docs/rules.md. `method_args`: changes of the method, and
    rules against staleness. `stages`: where the model is cut, see docs/configuration.md.
    `stages_per_device`: virtual stages on each device, of schedules that have them; null: the
    method's own number. `loss_weight`: how a microbatch counts in an update's loss: tokens or
    "module:callable" of the labels, see docs/configuration.md; null: all count the same. `backend`:
    where the run computes. `micro_batch_size`: samples of a microbatch; a loader's own if not set.
    `gradient_accumulation`: microbatches per update. `replicas`: copies of the pipeline, each with
    its share of the samples. `reduction`: how processes average the replicas' gradients, see
    docs/processes.md. `clip`: gradient clipping. `ema`: a moving average of the weights, see
    docs/loop.md. `seed`: of weights, order, augmentation and dropout. `precision`: of weights and
    passes; the last three are PopTorch's, in bits of passes and weights. `recompute`: activation
    checkpointing, from each stage's input; the emulator has one microbatch's activations anyway.
    `hardware`: the devices that predictions are made for, see docs/hardware.md. `allow_nonfinite`:
    go on after a loss that is not finite.
    """

    method: str = "gpipe"
    method_args: sections.MethodArgs = sections.MethodArgs()
    stages: StagesValue = None
    stages_per_device: Optional[Count] = None
    loss_weight: Optional[str] = None
    backend: BackendConfig = BackendConfig()
    micro_batch_size: Count = 8
    gradient_accumulation: Count = 1
    replicas: Count = 1
    reduction: Literal["exact", "fast"] = "exact"
    clip: Optional[sections.ClipConfig] = None
    ema: Optional[sections.EmaConfig] = None
    seed: Seed = 0
    precision: Literal[
        "float32", "float64", "bfloat16", "bfloat16_mixed", "16.16", "16.32", "32.32"
    ] = "float32"
    recompute: StrictBool = False
    hardware: Annotated[
        Union[None, str, Dict[str, Any]],
        say_allowed(
            f"{NONE}, a name of configs/hardware, a YAML file such as those there, or a mapping of "
            f"its keys"
        ),
    ] = None
    allow_nonfinite: StrictBool = False

    @field_validator("method")
    @classmethod
    def _validate_method(cls, value: str) -> str:
        if value not in METHODS:
            raise ValueError(f"must be one of {', '.join(METHODS)}{suggest(value, METHODS)}")
        return value

    @field_validator("precision", mode="before")
    @classmethod
    def _convert_precision(cls, value: Any) -> Any:
        """Convert 16.16 to text: without quotes it is a number to YAML."""
        return f"{value:.2f}" if isinstance(value, float) else value

    @field_validator("hardware", mode="before")
    @classmethod
    def _validate_hardware(cls, value: Any) -> Any:
        """Validate a mapping of a file's keys. A name or file is read with the config."""
        if isinstance(value, Mapping):
            # only a file must have a name
            import_outer("hardware").model_validate({"name": "given", **value})
        return value

    @field_validator("stages", mode="before")
    @classmethod
    def _validate_stages(cls, value: Any) -> Any:
        """Validate a mapping, {count, by} or {finest}."""
        if not isinstance(value, Mapping):
            return value
        section: Any = sections.StageFinest if "finest" in value else sections.StageCount
        # as a mapping again, as which the library and a resolved config have it
        return section.model_validate(value).model_dump()

    def list_cases(self) -> Iterator[Case]:
        why = (
            f"belongs to {Argument('backend')} poptorch: must be float32, float64, bfloat16 or "
            f"bfloat16_mixed with {self.backend.name}"
        )
        is_in_bits = self.precision in ("16.16", "16.32", "32.32")
        yield Case(is_in_bits and not self.backend.facts.has_precision_in_bits, "precision", why)
        is_unknown = self.hardware is None and self.leaves_stages_to_planner
        why = "needs to know the devices: set hardware, a name or file"
        yield Case(is_unknown and self.stages != "auto", "stages.by", why, "hardware")
        is_auto = self.stages == "auto" and not self.backend.facts.uses_processes
        yield Case(is_unknown and is_auto, "stages", f"{why}, or processes")
        method = METHODS[self.method]
        args = self.method_args
        if method.is_stale and method.backward_reads is Reads.NEWEST:
            recomputes = self.recompute and not args.recompute and not args.stash
            why = (
                f"cannot be combined with {Argument('recompute', True)}, which recomputes with older "
                "weights than its backward reads"
            )
            delays = args.constant_delay and args.constant_delay.updates
            yield Case(
                recomputes and args.constant_delay, "method_args.constant_delay", why, delays
            )
            why = (
                f"{self.method} must say which weights recompute: "
                f"{Argument('method_args', {'recompute': {}})}"
            )
            yield Case(recomputes and not args.hogwild, "recompute", why)

    @property
    def ipu(self) -> Any:
        """The section `backend.ipu`, which a config for poptorch always has."""
        assert self.backend.ipu is not None
        return self.backend.ipu

    @property
    def recomputes(self) -> bool:
        """Whether backwards recompute their activations: as `recompute` says, or as PopTorch does.

        PopTorch's pipelines recompute unless `backend.ipu.recomputation` says otherwise.
        """
        ipu = self.backend.ipu
        if ipu is None or self.recompute:
            return self.recompute
        if ipu.recomputation == "auto":
            is_split = ipu.local == "decoupled" or self.stages == 1
            return METHODS[self.method].pipeline is not Timeline.SEQUENTIAL and not is_split
        return bool(ipu.recomputation not in ("none", "norm_only"))

    @property
    def leaves_stages_to_planner(self) -> bool:
        """Whether the planner chooses where the stages begin."""
        return self.stages == "auto" or (
            isinstance(self.stages, dict) and self.stages.get("by") == "hardware"
        )

    @property
    def updates_per_call(self) -> int:
        """The updates that a device makes in one call, at one learning rate; 1 but on IPUs."""
        return 1 if self.backend.ipu is None else int(self.backend.ipu.device_iterations)

    def to_dict(self) -> Dict[str, Any]:
        """Return every key with its value, as plain data that YAML and JSON can hold."""
        return self.model_dump(mode="json")

    def method_settings(self) -> Dict[str, Any]:
        """Return the `method_args` and `stages_per_device` that are not null."""
        settings = {**self.method_args.model_dump(), "stages_per_device": self.stages_per_device}
        return {key: value for key, value in settings.items() if value is not None}

    def with_method_args(self: AnyConfig, **changes: Any) -> AnyConfig:
        """Return this config with other `method_args`."""
        return self.model_copy(update={"method_args": self.method_args.model_copy(update=changes)})


class Config(PipelineConfig):
    """A run. The global batch of an update has micro_batch_size x gradient_accumulation x replicas
    samples.

    `model`: the model to train. `data`: the data to train it on. `loss`: cross_entropy,
    "module:callable" of (output, target), or model: the model's own, see docs/data.md.
    `optimizer`: an optimizer of torch.optim. `lr_schedule`: how the learning rate changes.
    `epochs`: passes over the data. `steps`: updates, instead of epochs; null: as many as the epochs
    have. `evaluate`: evaluations while training. `metrics`: of evaluations, see docs/loop.md.
    `callbacks`: the user's code that a run calls, see docs/loop.md. `early_stopping`: when
    evaluations end a run, see docs/loop.md. `checkpoint`: when the run's state is saved; null for
    never. `log`: metrics and traces. `init_from`: weights to begin with. `given`: objects from
    Python, written by the run.
    """

    model: sections.ModelConfig
    data: sections.DataConfig
    loss: str = "cross_entropy"
    optimizer: sections.OptimizerConfig = sections.OptimizerConfig()
    lr_schedule: sections.LrSchedule = sections.LrSchedule()
    epochs: Updates = 1
    steps: Optional[Updates] = None
    evaluate: sections.EvaluateConfig = sections.EvaluateConfig()
    # pydantic copies such a default for each config
    metrics: Entries = ["accuracy"]
    callbacks: Entries = []
    early_stopping: Optional[sections.EarlyStoppingConfig] = None
    checkpoint: Optional[sections.CheckpointConfig] = sections.CheckpointConfig()
    log: sections.LogConfig = sections.LogConfig()
    init_from: Optional[sections.InitFrom] = None
    given: Optional[sections.Given] = None
    # why the update rules cannot act with the config's own optimizer; reported unless Python gives
    # another
    _optimizer_faults: Tuple[str, ...] = PrivateAttr(default=())

    def list_cases(self) -> Iterator[Case]:
        # a config of a run whose optimizer was passed from Python, given to a command
        is_missing = self.optimizer.name == sections.GIVEN and (
            self.given is None or self.given.optimizer is None
        )
        yield Case(
            is_missing, "optimizer.name", "without given.optimizer: must be sgd, adam or adamw"
        )
        yield from super().list_cases()

    def to_dict(self) -> Dict[str, Any]:
        """Return every key with its value, as plain data; what is trained comes first."""
        keys = super().to_dict()
        return {name: keys[name] for name in ("model", "data", *keys)}

    @property
    def checkpoint_every(self) -> int:
        """The updates between two checkpoints, besides those of evaluations; 0 for none."""
        return (self.checkpoint.every or 0) if self.checkpoint is not None else 0

    def optimizer_faults(self) -> Tuple[str, ...]:
        """Return why the update rules cannot act with the config's own optimizer, each with the
        place it comes from.
        """
        return self._optimizer_faults
