"""Load a frozen, validated `Config` from a YAML file and overrides, or from Python keys; report all
faults at once.
"""

from __future__ import annotations

import os
import re
import warnings
from contextlib import suppress
from pathlib import Path
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Type,
    Union,
)

import yaml
from pydantic import ValidationError

from ipu_pipe.config.faults import CALL, format_faults, name_origin
from ipu_pipe.config.schema import AnyConfig, Config, PipelineConfig, import_outer
from ipu_pipe.config.sections import GIVEN, LrSchedule, OptimizerConfig, StageCount
from ipu_pipe.config.values import Section
from ipu_pipe.errors import BadInput, raise_faults
from ipu_pipe.files import read_file
from ipu_pipe.refusals import Language, show_in_config
from ipu_pipe.schedule import methods
from ipu_pipe.schedule.methods import Method
from ipu_pipe.shipped import find_config, find_example, list_configs
from ipu_pipe.text import find_nearest, show

# ---- YAML files: read keys within bounds and record the source of each value; write YAML that
# reads the same
#
# The bounds are far above any config of ours (the largest has 60 values on 4 levels), and a hostile
# file is refused within seconds.

# the most bytes and values of a file (repeated values of an alias count again), nested levels, and
# files that extend one another
MOST_BYTES = 2**18
MOST_VALUES = 50_000
MOST_LEVELS = 50
MOST_FILES = 20
_TOO_LARGE = (
    f"nested deeper than {MOST_LEVELS} levels, or more than {MOST_VALUES} values: no "
    f"config needs that"
)

# key with dots -> the file or option that it came from
Origins = Dict[str, str]

_TAG = "tag:yaml.org,2002:"
# YAML 1.2's plain scalars: 1e-3 is a number; no, on and 2026-01-01 are text; 010 is ten
_SCALARS = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "merge": (r"<<", "<"),
}


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader restricted to plain data with the scalars of YAML 1.2; each key may
    appear once.
    """

    def construct_number(self, node: Any) -> Any:
        text = str(self.construct_scalar(node)).lower()
        if node.tag.endswith("float"):
            return float(text.replace(".inf", "inf").replace(".nan", "nan"))
        # with base 0 Python would refuse 010
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)

    def flatten_mapping(self, node: Any) -> None:
        seen = set()
        for key, _ in node.value:
            # with the tag: 1 and "1" are two keys
            name = (key.tag, str(key.value))
            if name in seen and key.tag != f"{_TAG}merge":
                problem = f"{show(key.value)}: the key appears twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(name)
        super().flatten_mapping(node)  # type: ignore[no-untyped-call]
        # keep each key once (the last wins), because merges of merges would multiply
        node.value = list(
            {(key.tag, str(key.value)): (key, value) for key, value in node.value}.values()
        )


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes all text that a reader of YAML 1.1 or 1.2 would take for another
    type.
    """


# SafeLoader's are those of YAML 1.1, where no and on are bools and 1e-3 is text
_Loader.yaml_implicit_resolvers = {}
for _name, (_form, _first) in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        # PyYAML looks resolvers up by the first character; $ would also fit before a line break
        _class.add_implicit_resolver(f"{_TAG}{_name}", re.compile(rf"^(?:{_form})\Z"), list(_first))
_Loader.yaml_constructors = {
    f"{_TAG}{name}": constructor
    for name, constructor in {
        "null": yaml.SafeLoader.construct_yaml_null,
        "bool": yaml.SafeLoader.construct_yaml_bool,
        "int": _Loader.construct_number,
        "float": _Loader.construct_number,
        "str": yaml.SafeLoader.construct_yaml_str,
        "seq": yaml.SafeLoader.construct_yaml_seq,
        "map": yaml.SafeLoader.construct_yaml_map,
    }.items()
}
# refuse all other tags
_Loader.yaml_constructors[None] = yaml.SafeLoader.construct_undefined


def parse_yaml(text: str, source: str, level: int = 0) -> Any:
    """Return the one document in `text` as plain data. Raise `BadInput` if it is not valid or too
    large.

    `source` names the text in faults; `level` is the depth of its values in a config.
    """
    try:
        parsed = _Loader(text).get_single_data()  # type: ignore[no-untyped-call]
    except yaml.YAMLError as error:
        # a ReaderError, such as of a control character, has a position instead
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else text.count("\n", 0, getattr(error, "position", 0)) + 1
        raise BadInput(
            f"{source}: line {line}: is not valid YAML: {getattr(error, 'problem', None) or error}"
        ) from None
    # such as !!int abc, the escape "\UFFFFFFFF", or a number of 5,000 digits
    except (ValueError, KeyError, OverflowError) as error:
        raise BadInput(f"{source}: is not valid YAML: {error}") from None
    except RecursionError:
        raise BadInput(f"{source}: {_TOO_LARGE}") from None
    # the repeated values of an alias count again
    count = 0
    # a stack, which ends at a bound where an alias contains itself
    unvisited = [(parsed, level)]
    while unvisited:
        value, level = unvisited.pop()
        count += 1
        if level >= MOST_LEVELS or count > MOST_VALUES:
            raise BadInput(f"{source}: {_TOO_LARGE}")
        # an escape such as "\ud800" makes a lone surrogate, which no file can hold
        if isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
            raise BadInput(f"{source}: {show(value)}: contains half a character")
        inner = (
            [*value, *value.values()]
            if isinstance(value, dict)
            else value
            if isinstance(value, list)
            else ()
        )
        unvisited.extend((one, level + 1) for one in inner)
    return parsed


def dump_yaml(value: Any) -> str:
    """Return plain data as YAML that reads as the same data."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


def read_yaml(
    path: Path,
    origins: Optional[Origins] = None,
    find_shipped: Callable[[str], Optional[Path]] = find_example,
) -> Dict[str, Any]:
    """Return the keys of a file merged over the keys of the file that its `extends` names, and fill
    in `origins`. `find_shipped` returns the shipped file of a name, None if there is none.
    """
    origins = {} if origins is None else origins
    merged: Dict[str, Any] = {}
    for file, raw in _read_layers(path, find_shipped):
        note_origin(raw, "", str(file), origins)
        merged = merge_keys(merged, raw)
    return merged


def _read_layers(
    path: Path, find_shipped: Callable[[str], Optional[Path]] = find_example
) -> List[Tuple[Path, Dict[str, Any]]]:
    """Return the files that a file extends, the first extended first, and then the file itself,
    each with its keys. A name that is no file beside the one that extends it is a shipped one's.
    """
    # (file, keys) of `path` and of the files that it extends, in order
    layers: List[Tuple[Path, Dict[str, Any]]] = []
    source = str(path)
    target = path
    for _ in range(MOST_FILES):
        raw = parse_yaml(_read_text(target, source), str(target))
        if not isinstance(raw, dict):
            raise BadInput(
                f"{target}: must be a mapping of keys to values, as in configs/mlp_digits.yaml"
            )
        layers.append((target, raw))
        if "extends" not in raw:
            break
        name = raw.pop("extends")
        source = f"{target}: extends: {show(name)}"
        if not isinstance(name, str) or not name:
            raise BadInput(f"{source}: must be a file name")
        target = target.parent / name
        # not Path.exists, which raises for a name that no file can have: reading it says what is
        # wrong
        if not os.path.exists(target):
            target = find_shipped(name) or target
    else:
        raise BadInput(f"{source}: more than {MOST_FILES} files extend one another, or in a circle")
    return layers[::-1]


def _read_text(path: Path, source: str) -> str:
    """Return a file's text; `source` names it in faults.

    Refuse a pipe or a device without reading it, because that might block or never end.
    """
    try:
        content = read_file(path, MOST_BYTES)
    except FileNotFoundError:
        raise BadInput(f"{source}: no such config file{_suggest_file(path)}") from None
    except OSError as error:
        raise BadInput(f"{source}: cannot be read: {error.strerror or error}") from None
    try:
        # editors on Windows put a byte order mark before the text
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = f"0x{content[error.start]:02x}"
        raise BadInput(
            f"{path}: line {line}: byte {byte} is not UTF-8: save the file as UTF-8"
        ) from None


def _suggest_file(path: Path) -> str:
    """Return the end of a fault that names the nearest file beside a missing one, or the nearest
    example config.
    """
    # by the last part, as a user may forget the folder
    files = {Path(name).name: name for name in list_configs()}
    # such as a name that is too long
    with suppress(OSError, ValueError):
        files.update({file.stem: str(file) for file in path.parent.glob("*.y*ml")})
    near = find_nearest(path.stem, files)
    return f"; did you mean {files[near]}?" if near else ""


def note_origin(value: Any, key: str, origin: str, origins: Origins) -> None:
    """Record that `value` at `key`, and all values inside it, came from `origin`."""
    origins[key] = origin
    if isinstance(value, dict):
        for name, item in value.items():
            note_origin(item, f"{key}.{name}" if key else str(name), origin, origins)


def merge_keys(base: Dict[str, Any], over: Dict[str, Any]) -> Dict[str, Any]:
    """Return `over` on top of `base`: mappings are merged, any other value is replaced."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge_keys(merged[key], value) if both else value
    return merged


def apply_override(raw: Dict[str, Any], text: str, origins: Origins) -> None:
    """Change `raw` in place by `text`, KEY=VALUE, where VALUE is YAML. Raise `BadInput` if it is
    not of that form.
    """
    key, equals, value = text.partition("=")
    names = key.split(".")
    if not equals or not all(names):
        raise BadInput(f"--set: {show(text)}: must be KEY=VALUE, such as optimizer.lr=0.1")
    option = f"--set {show(text)}"
    if len(names) > MOST_LEVELS:
        raise BadInput(f"{option}: {_TOO_LARGE}")
    parsed = parse_yaml(value, option, level=len(names))
    # an empty mapping replaces, where others are merged
    for new in [parsed] if parsed else [None, parsed]:
        keys: Any = new
        for name in reversed(names):
            keys = {name: keys}
        raw.update(merge_keys(raw, keys))
    note_origin(keys[names[0]], names[0], option, origins)


# ---- configs from keys


def load_config(path: Union[str, Path], overrides: Sequence[str] = ()) -> Config:
    """Return the config in the YAML file `path`, or the example of this name, changed by KEY=VALUE
    `overrides`. Raise `BadInput` with every fault found.
    """
    origins: Origins = {}
    raw: Dict[str, Any] = {}
    for file, keys in _read_layers(find_config(str(path))):
        # one layer after the other: a file may also replace what it extends
        layer: Origins = {}
        note_origin(keys, "", str(file), layer)
        raw = _leave_out_replaced(raw, merge_keys(raw, keys), layer, origins)
    # all options are one layer: their order does not matter to what they replace
    changed = dict(raw)
    layer = {}
    faults = [
        fault
        for text in overrides
        for fault in _collect_faults(apply_override, changed, text, layer)
    ]
    raw = _leave_out_replaced(raw, changed, layer, origins)
    return _validate(Config, raw, origins, str(path), faults)


def _leave_out_replaced(
    before: Mapping[str, Any], after: Dict[str, Any], layer: Origins, origins: Origins
) -> Dict[str, Any]:
    """Return the keys `after` a layer, a file or all options, without the keys of `before` that
    belong to what the layer replaces, and warn of them.

    layer: the keys that the layer sets. They stay, and are faults if they do not fit.
    origins: those of `before`, to which the layer's are added.
    """
    left_out: Dict[str, List[str]] = {}
    for path, why in list(_find_replaced(before, after, layer)):
        section = after
        for name in path[:-1]:
            # copy it, because aliases give several keys the same mapping
            section[name] = dict(section[name])
            section = section[name]
        key = ".".join(map(str, path))
        value = show_in_config(section.pop(path[-1]))
        left_out.setdefault(why, []).append(f"{origins[key]}: {key}: {value}")
    for why, values in left_out.items():
        warnings.warn(f"{'; '.join(values)}: left out, because {why}", stacklevel=2)
    origins.update(layer)
    return after


def _find_replaced(
    before: Mapping[str, Any], after: Mapping[str, Any], layer: Origins
) -> Iterator[Tuple[Tuple[str, ...], str]]:
    """Yield each key of `before` that belongs to what a layer replaces, and why it is left out."""
    entries = [_get_section(keys, "model").get("entry") or "" for keys in (before, after)]
    old_module, new_module = (str(entry).partition(":")[0] for entry in entries)
    # models of one module, such as resnet18 and resnet50, share their arguments
    if old_module not in ("", new_module):
        for name in _get_section(_get_section(after, "model"), "args"):
            if f"model.args.{name}" not in layer:
                yield ("model", "args", name), f"model.entry is {show(entries[1])}"
    for section, schema in (("optimizer", OptimizerConfig), ("lr_schedule", LrSchedule)):
        settings = _get_section(after, section)
        # an optimizer has groups, each with a name of its own, or a name
        choices = [key for key in ("groups", "name") if settings.get(key)]
        chosen = [key for key in choices if f"{section}.{key}" in layer]
        if not chosen:
            continue
        is_name = chosen == ["name"]
        why = (
            f"{section}.name is {show(settings['name'])}"
            if is_name
            else f"{section}.groups is given"
        )
        # without one misfit the section may show the next
        while True:
            has_groups = is_name and settings.get("groups")
            misfit = "groups" if has_groups else _find_misfit(schema, settings)
            # none, or one that the layer asks for itself: validation refuses that
            if misfit not in settings or f"{section}.{misfit}" in layer:
                break
            yield (section, misfit), why
            settings = {name: value for name, value in settings.items() if name != misfit}
    method = methods.METHODS.get(str(after.get("method")))
    updates_alone = method is not None and (method.history or method.rounds)
    key = "gradient_accumulation"
    if updates_alone and "method" in layer and key in before and key not in layer:
        yield (key,), f"each microbatch of {after['method']} is an update"


def _get_section(keys: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section, an empty one if there is none."""
    section = keys.get(name)
    return section if isinstance(section, dict) else {}


def _find_misfit(schema: Type[Section], settings: Mapping[str, Any]) -> str:
    """Return the first setting that does not fit the others of its section; "" if none."""
    try:
        schema.model_validate(settings)
    except ValidationError as error:
        detail = error.errors()[0]
        # `key_fault` makes this type; other faults are of a value, which leaving out would hide
        return str(detail["loc"][0]) if detail["type"] == "setting" else ""
    return ""


def load_recorded(path: Path) -> Config:
    """Return the config that a run wrote, also by an earlier version: keys that no longer exist
    changed no number of a run.

    Raise `BadInput` with every fault found.
    """
    raw = read_yaml(path)
    if isinstance(raw.get("log"), dict):
        # the former name of `trace`
        raw["log"].pop("trace_microbatches", None)
    return _validate(Config, raw, {}, str(path), [])


def configure(**keys: Any) -> Config:
    """Return a config with the keys of a config file as arguments. `model` and `data` may be left
    to `train`.

    Raise `BadInput` with every fault found.
    """
    # the two keys without defaults
    raw = {"model": {"entry": GIVEN}, "data": {"name": GIVEN}, **keys}
    return _validate(Config, raw, {}, CALL, [])


def configure_pipeline(**keys: Any) -> PipelineConfig:
    """Return what a pipeline is told, with keys of a config as arguments. Raise `BadInput` with
    every fault found.
    """
    return _validate(PipelineConfig, keys, {}, CALL, [])


def resolve_method(name: str, args: Mapping[str, Any] = {}) -> Method:
    """Return the method `name` with its axes changed by `args`: keys of `method_args` in a config,
    and `stages_per_device`.

    Raise `BadInput` for an unknown name, for values that are not allowed, and for arguments that do
    not belong to the method.
    """
    method_args = dict(args)
    count = method_args.pop("stages_per_device", None)
    config = configure(method=name, method_args=method_args, stages_per_device=count)
    return methods.resolve_method(config.method, config.method_settings())


def _validate(
    kind: Type[AnyConfig],
    raw: Dict[str, Any],
    origins: Origins,
    source: str,
    faults: List[str],
) -> AnyConfig:
    """Return the config of `raw`. Raise `BadInput` with `faults` and all others, each with the file
    or option of its key.
    """

    def add_origin(fault: str) -> str:
        key = Language.CONFIG.say(fault).partition(":")[0]
        return f"{name_origin(key, origins, source)}{fault}"

    # null leaves a key out, where it is not a value of its own
    raw = {key: value for key, value in raw.items() if value is not None or key == "checkpoint"}
    faults = list(faults)
    if isinstance(raw.get("hardware"), str):
        read_hardware = import_outer("read_hardware")
        faults += _collect_faults(read_hardware, raw["hardware"], add_origin("hardware"))
    try:
        config = kind.model_validate(raw)
    except ValidationError as error:
        # the types of these keys do not tell their section
        forms = {
            "stages": StageCount,
            "ipu": import_outer("ipu"),
            "hardware": import_outer("hardware"),
        }
        raise BadInput(
            [*format_faults(error.errors(), origins, source, kind, forms), *faults]
        ) from None
    try:
        conflicts, optimizer_conflicts = _list_method_conflicts(config)
    except BadInput as error:
        raise BadInput([*faults, *map(add_origin, error.lines)]) from None
    raise_faults([*faults, *map(add_origin, conflicts)])
    if isinstance(config, Config):
        # a private attribute can be set though the config is frozen
        config._optimizer_faults = tuple(map(add_origin, optimizer_conflicts))
    return config


def _list_method_conflicts(config: PipelineConfig) -> Tuple[List[str], List[str]]:
    """Return the conflicts of the method's rules with each other and the backend, and those with
    the config's own optimizer, which are kept apart because Python may replace it. Raise `BadInput`
    for arguments that do not belong to the method.
    """
    # imported here because it imports torch, which reading a config otherwise does not need
    from ipu_pipe.update import rules

    settings = config.method_settings()
    method = methods.resolve_method(config.method, settings)
    # every rule supports this optimizer
    conflicts = rules.list_conflicts(settings, method, "sgd", {"momentum": 0.9})
    members = config.optimizer.members if isinstance(config, Config) else ()
    with_own = [
        f
        for one in members
        for f in rules.list_conflicts(settings, method, one.name, one.settings())
    ]
    of_optimizer = [f for f in dict.fromkeys(with_own) if f not in conflicts]
    if config.backend.ipu is not None:
        conflicts = [*conflicts, *import_outer("check_backend")(config, method)]
        if isinstance(config, Config):
            conflicts += import_outer("list_run_faults")(config)
    return conflicts, of_optimizer


def _collect_faults(check: Any, *args: Any) -> List[str]:
    """Return the faults that a function raises."""
    try:
        check(*args)
    except BadInput as error:
        return error.lines
    return []
