"""One schema for a run: YAML file and command-line overrides -> a frozen, checked `Config`.

Every fault is told at once, a line each: where the value came from, the key, the value and what is allowed.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Type, Union

import yaml
from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError, field_validator, model_validator
from typing_extensions import Annotated, Literal

from ipu_pipe.errors import BadInput
from ipu_pipe.methods import resolve_method

Count = Annotated[int, Field(ge=1, strict=True)]
Whole = Annotated[int, Field(ge=0, strict=True)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelConfig(_Section):
    """`entry`: "module:callable" that makes the model; `args`: its keyword arguments."""

    entry: str
    args: Dict[str, Any] = {}


class DataConfig(BaseModel):
    """`name`: a set of ipu_pipe.data or "module:callable" that makes a DataSource. Other keys are passed on to it."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str
    root: Optional[str] = None
    subset: Optional[Count] = None
    test_subset: Optional[Count] = None

    def options(self) -> Dict[str, Any]:
        """All keys but the name, those not given left out."""
        return {key: value for key, value in self.model_dump().items() if key != "name" and value is not None}


class MethodArgs(_Section):
    """Changes of the method's axes, see ipu_pipe.methods."""

    schedule: Optional[Literal["1f1b", "dataflow"]] = None
    turn: Optional[Annotated[int, Field(ge=0, le=1, strict=True)]] = None
    stash: Optional[StrictBool] = None


class BackendConfig(_Section):
    """Where it runs. `threads`: of PyTorch on the CPU, its own default if null."""

    name: Literal["emulator"] = "emulator"
    device: Literal["cpu", "cuda"] = "cpu"
    threads: Optional[Count] = None


class OptimizerConfig(_Section):
    """A torch.optim optimizer. Settings that are null stay PyTorch's own."""

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: NotNegative = 0.05
    momentum: Optional[Share] = None
    nesterov: Optional[StrictBool] = None
    weight_decay: Optional[NotNegative] = None
    betas: Optional[Tuple[Share, Share]] = None
    eps: Optional[Positive] = None
    no_decay: Union[str, List[str]] = []

    @model_validator(mode="after")
    def _fits(self) -> "OptimizerConfig":
        own = ("momentum", "nesterov") if self.name == "sgd" else ("betas", "eps")
        for key in ("momentum", "nesterov", "betas", "eps"):
            if getattr(self, key) is not None and key not in own:
                raise ValueError(
                    f"{key}: {getattr(self, key)}: {self.name} has no such setting, it has {', '.join(own)}"
                )
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov: True: needs a momentum above 0")
        return self

    def settings(self) -> Dict[str, Any]:
        """Keyword arguments of the torch.optim class."""
        given = self.model_dump(exclude={"name", "no_decay"})
        return {key: value for key, value in given.items() if value is not None}


class LrSchedule(_Section):
    """See ipu_pipe.lr. `milestones` in epochs, `warmup_steps` in updates."""

    name: Literal["constant", "step", "cosine", "linear"] = "constant"
    warmup_steps: Whole = 0
    milestones: List[Positive] = []
    gamma: Positive = 0.1


class ClipConfig(_Section):
    """Gradient clipping to a norm, over all stages (`global`) or each `stage` alone."""

    norm: Positive
    scope: Literal["global", "stage"] = "global"


class EvaluateConfig(_Section):
    """Evaluation after each `every` epochs (0: only before and after training), on the first `subset` test samples."""

    every: Whole = 1
    subset: Optional[Count] = None


class CheckpointConfig(_Section):
    """A checkpoint after each `every` updates (null: at each evaluation); the newest `keep` and the best stay."""

    every: Optional[Count] = None
    keep: Count = 2


class LogConfig(_Section):
    """A line of metrics.jsonl after each `every` updates; the first `trace_microbatches` in the trace."""

    every: Count = 10
    tensorboard: StrictBool = True
    trace_microbatches: Count = 512


class StageCount(_Section):
    """A number of stages, balanced by a cost."""

    count: Count
    by: Literal["flops", "parameters", "time"] = "flops"


class StageFinest(_Section):
    """A number of stages over which the weights are spread."""

    finest: Count


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
    replicas: Annotated[int, Field(ge=1, le=1, strict=True)] = 1
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_schedule: LrSchedule = LrSchedule()
    clip: Optional[ClipConfig] = None
    epochs: Count = 1
    steps: Optional[Count] = None
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    seed: Annotated[int, Field(ge=0, strict=True)] = 0
    precision: Literal["float32", "float64", "bfloat16"] = "float32"
    recompute: Literal[False] = False
    hardware: Optional[Dict[str, Any]] = None
    init_from: Optional[str] = None
    allow_nonfinite: StrictBool = False

    @field_validator("stages")
    @classmethod
    def _stages(cls, value: Any) -> Any:
        """None, "finest", a count, names, {count, by} or {finest}."""
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        names = isinstance(value, list) and bool(value) and all(isinstance(name, str) for name in value)
        if value is None or value == "finest" or whole or names:
            return value
        if isinstance(value, Mapping):
            section: Type[_Section] = StageFinest if "finest" in value else StageCount
            return section.model_validate(value).model_dump()
        raise ValueError(
            "must be null (the model's own), finest, a whole number >= 1, a list of module names, {count, by} or {finest}"
        )

    def method_settings(self) -> Dict[str, Any]:
        """`method_args` that are given."""
        return {key: value for key, value in self.method_args.model_dump().items() if value is not None}


# ---- reading


class _Loader(yaml.SafeLoader):
    """YAML as people mean it: 1e-3 is a number, only true and false are booleans, a key stands once."""


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern) for tag, pattern in pairs if tag not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:float")
    ]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
    ),
    list("-+.0123456789"),
)


def _unique_mapping(loader: _Loader, node: yaml.MappingNode) -> Dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]
    for i, key in enumerate(keys):
        if key in keys[:i]:
            mark = node.value[i][0].start_mark
            raise BadInput(f"{mark.name}: line {mark.line + 1}: {key}: the key stands twice")
    return loader.construct_mapping(node)


_Loader.add_constructor("tag:yaml.org,2002:map", _unique_mapping)


def _parse(text: str, place: str) -> Any:
    try:
        loader = _Loader(text)
        loader.name = place
        return loader.get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}:" if mark else ""
        raise BadInput(f"{place}:{line} is no valid YAML: {getattr(error, 'problem', None) or error}") from None


def load_config(path: Union[str, Path], overrides: Sequence[str] = ()) -> Config:
    """The config in the YAML file `path`, changed by KEY=VALUE `overrides`. Raises BadInput with every fault found."""
    origins: Dict[str, str] = {}
    raw = _read(Path(path), origins, ())
    for text in overrides:
        _override(raw, text, origins)
    return _validate(raw, origins, str(path))


def configure(**keys: Any) -> Config:
    """A config from Python: the keys of a config file as arguments. `model` and `data` may be left to `train`."""
    raw = {"model": {"entry": "(given in Python)"}, "data": {"name": "(given in Python)"}, **keys}
    return _validate(raw, {}, "configure")


def _read(path: Path, origins: Dict[str, str], chain: Tuple[Path, ...]) -> Dict[str, Any]:
    if path.resolve() in chain:
        raise BadInput(f"{path}: extends: {path.name}: the files extend one another in a circle")
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise BadInput(f"{path}: no such config file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from None
    raw = _parse(text, str(path))
    if not isinstance(raw, dict):
        raise BadInput(f"{path}: must be a mapping of keys to values, as in configs/mlp_digits.yaml")
    base: Dict[str, Any] = {}
    if "extends" in raw:
        parent = raw.pop("extends")
        if not isinstance(parent, str):
            raise BadInput(f"{path}: extends: {parent}: must be a file name")
        base = _read(path.parent / parent, origins, (*chain, path.resolve()))
    _note(raw, "", str(path), origins)
    return _merge(base, raw)


def _note(value: Any, key: str, origin: str, origins: Dict[str, str]) -> None:
    origins[key] = origin
    if isinstance(value, dict):
        for name, item in value.items():
            _note(item, f"{key}.{name}" if key else str(name), origin, origins)


def _merge(base: Dict[str, Any], over: Dict[str, Any]) -> Dict[str, Any]:
    """`over` on top of `base`: mappings are joined, all else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _override(raw: Dict[str, Any], text: str, origins: Dict[str, str]) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise BadInput(f"--set: {text}: must be KEY=VALUE, such as optimizer.lr=0.1")
    parsed = _parse(value, f"--set {text}")
    section, (*path, last) = raw, key.split(".")
    for name in path:
        if not isinstance(section.get(name), dict):
            section[name] = {}
        section = section[name]
    replaces = isinstance(parsed, dict) and isinstance(section.get(last), dict) and parsed
    section[last] = _merge(section[last], parsed) if replaces else parsed
    _note(parsed, key, f"--set {text}", origins)


# ---- faults


def _validate(raw: Dict[str, Any], origins: Mapping[str, str], place: str) -> Config:
    raw = {
        key: value
        for key, value in raw.items()
        if value is not None or key in ("stages", "steps", "clip", "hardware", "init_from")
    }
    faults = []
    config = None
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        faults = [_fault(detail, origins, place) for detail in error.errors()]
    method, args = raw.get("method", "gpipe"), raw.get("method_args", {})
    try:  # also where other keys are wrong: all faults are told at once
        if isinstance(method, str) and isinstance(args, dict):
            resolve_method(
                method, {key: args[key] for key in ("schedule", "turn", "stash") if key in args} if config else {}
            )
    except BadInput as error:
        faults += [f"{origins.get('method', place)}: {fault}" for fault in error.faults]
    if faults or config is None:
        raise BadInput(faults)
    return config


def _fault(detail: Any, origins: Mapping[str, str], place: str) -> str:
    parts = [
        str(part) for part in detail["loc"] if not str(part).startswith(("function-", "constrained-", "list[", "str"))
    ]
    key = ".".join(parts)
    message, value = detail["msg"], detail.get("input")
    kind = detail["type"]
    if kind == "extra_forbidden":
        message = f"unknown key{_nearest(parts)}"
    elif kind == "missing":
        return f"{_origin(key, origins, place)}: {key}: missing: must be given"
    elif kind == "value_error":
        message = message[len("Value error, ") :]
        if isinstance(value, dict):  # a whole section: the message itself names its key and value
            return f"{_origin(key, origins, place)}: {key}.{message}"
    else:
        message = _allowed(kind, detail.get("ctx", {}), message)
    return f"{_origin(key, origins, place)}: {key}: {value}: {message}"


def _origin(key: str, origins: Mapping[str, str], place: str) -> str:
    while key and key not in origins:
        key = key.rpartition(".")[0]
    return origins.get(key, place) or place


def _allowed(kind: str, context: Mapping[str, Any], message: str) -> str:
    bounds = {
        "greater_than_equal": ">= {ge}",
        "greater_than": "> {gt}",
        "less_than": "< {lt}",
        "less_than_equal": "<= {le}",
    }
    if kind in bounds:
        return "must be " + bounds[kind].format(**context)
    if kind == "literal_error":
        return f"must be {context['expected']}"
    words = {
        "int_type": "must be a whole number",
        "int_parsing": "must be a whole number",
        "int_from_float": "must be a whole number",
        "float_type": "must be a number",
        "float_parsing": "must be a number",
        "finite_number": "must be a finite number",
        "bool_type": "must be true or false",
        "string_type": "must be text",
        "dict_type": "must be a mapping of keys to values",
        "model_type": "must be a mapping of keys to values",
        "list_type": "must be a list",
        "tuple_type": "must be a list",
    }
    return words.get(kind, message[0].lower() + message[1:])


def _nearest(parts: List[str]) -> str:
    section: Any = Config
    for name in parts[:-1]:
        field = section.model_fields.get(name)
        section = _section_of(field.annotation) if field else None
        if section is None:
            return ""
    known = list(section.model_fields)
    near = difflib.get_close_matches(parts[-1], known, 1, 0.5)
    return f", nearest is {near[0]}" if near else f", allowed are {', '.join(known)}"


def _section_of(annotation: Any) -> Any:
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if inspect.isclass(candidate) and issubclass(candidate, BaseModel):
            return candidate
    return None


# ---- writing and comparing


def dump(config: Config) -> str:
    """The resolved config as YAML that loads to the same config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def differences(old: Config, new: Config) -> List[str]:
    """`key: old -> new` for every value in which the two differ."""
    a, b = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    return [f"{key}: {a.get(key)} -> {b.get(key)}" for key in sorted({*a, *b}) if a.get(key) != b.get(key)]


def _flat(value: Any, key: str = "") -> Dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {key: value}
    flat: Dict[str, Any] = {}
    for name, item in value.items():
        flat.update(_flat(item, f"{key}.{name}" if key else str(name)))
    return flat


# ---- import strings


def resolve_entry(entry: str, key: str) -> Callable[..., Any]:
    """What an import string `module:attribute` names, looked for in the current folder too. `key` is for the error."""
    module_name, colon, attribute = entry.partition(":")
    if not colon or not module_name or not attribute:
        raise BadInput(f"{key}: {entry}: must be an import string module:name, such as models.resnet:resnet50")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise BadInput(f"{key}: {entry}: no module {error.name} in the current folder or installed") from None
        raise BadInput(f"{key}: {entry}: importing {module_name} fails: {error}") from error
    except Exception as error:  # whatever the user's module raises
        raise BadInput(f"{key}: {entry}: importing {module_name} fails: {type(error).__name__}: {error}") from error
    found: Any = module
    for name in attribute.split("."):
        if not hasattr(found, name):
            near = difflib.get_close_matches(name, [n for n in dir(found) if not n.startswith("_")], 3)
            raise BadInput(
                f"{key}: {entry}: {module_name} has no {name}" + (f", nearest are {', '.join(near)}" if near else "")
            )
        found = getattr(found, name)
    if not callable(found):
        raise BadInput(f"{key}: {entry}: is a {type(found).__name__}, must be callable")
    called: Callable[..., Any] = found
    return called


def call_entry(function: Callable[..., Any], args: Mapping[str, Any], key: str) -> Any:
    """`function(**args)`; arguments that it does not take or misses are told under `key`."""
    try:
        signature: Optional[inspect.Signature] = inspect.signature(function)
    except (TypeError, ValueError):
        signature = None
    if signature is not None:
        names = list(signature.parameters)
        open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        faults = [
            f"{key}.{name}: {value}: unknown argument, allowed are {', '.join(names)}"
            for name, value in args.items()
            if name not in names and not open_ended
        ]
        faults += [
            f"{key}.{name}: missing: must be given"
            for name, p in signature.parameters.items()
            if p.default is p.empty and name not in args and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        if faults:
            raise BadInput(faults)
    try:
        return function(**args)
    except BadInput as error:
        raise BadInput([f"{key}: {fault}" for fault in error.faults]) from None
    except (TypeError, ValueError) as error:
        raise BadInput(f"{key}: {dict(args)}: {error}") from error
