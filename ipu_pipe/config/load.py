"""YAML file and command-line overrides, or keys from Python -> a frozen, checked `Config`.

Every fault is told at once, a line each: where the value came from, the key, the value and what is allowed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence, Set, Tuple, Union

from pydantic import ValidationError

from ipu_pipe.config.faults import find_origin, format_faults
from ipu_pipe.config.outer import READ_HARDWARE, check_backend, find_outer, find_sections
from ipu_pipe.config.schema import Config
from ipu_pipe.config.sections import GIVEN, OLD_TRACE, StageCount
from ipu_pipe.config.yaml_files import Origins, apply_override, read_with_origins
from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.methods import Method, resolve_method


def load_config(path: Union[str, Path], overrides: Sequence[str] = ()) -> Config:
    """The config in the YAML file `path`, changed by KEY=VALUE `overrides`. Raises BadInput with every fault found."""
    origins: Origins = {}
    raw = read_with_origins(Path(path), origins)
    faults: List[str] = []
    for text in overrides:
        try:
            apply_override(raw, text, origins)
        except BadInput as error:
            faults += error.faults
    return _validate(raw, origins, str(path), faults)


def load_recorded(path: Path) -> Config:
    """The config that a run wrote, also one of an earlier version: of keys that have gone, what they said changes no number of a
    run. Raises BadInput."""
    raw = read_with_origins(path, {})
    if isinstance(raw.get("log"), dict):
        raw["log"].pop(OLD_TRACE, None)
    return _validate(raw, {}, str(path), [])


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
        faults = faults + format_faults(found, origins, place, Config, {"stages": StageCount, **find_sections()})
        wrong = {str((*detail["loc"], detail.get("ctx", {}).get("key", ""))[0]) for detail in found}
    if isinstance(raw.get("hardware"), str):
        faults = faults + _hardware_faults(raw["hardware"], find_origin("hardware", origins, place))
    if "method" not in wrong:  # also where other keys are wrong: all faults are told at once
        args = raw.get("method_args", {}) if "method_args" not in wrong else {}
        faults = faults + _method_faults(raw.get("method", "gpipe"), args, origins, place)
    if config is not None and not faults:
        method = resolve_method(config.method, config.method_settings())
        faults, own = _rule_faults(config, method, origins, place)
        config._optimizer_faults = tuple(own)
        against = check_backend(config, method)
        faults += _placed(against, origins, place)
    if faults or config is None:
        raise BadInput(faults)
    return config


def _hardware_faults(asked: str, origin: str) -> List[str]:
    """What is wrong with the name, or in the file."""
    try:
        find_outer(READ_HARDWARE)(asked, f"{origin}: hardware")
    except BadInput as error:
        return error.faults
    return []


def _method_faults(name: str, args: Mapping[str, Any], origins: Origins, place: str) -> List[str]:
    """What ipu_pipe.schedule.methods has against the method's name or axes, with the place that each key came from."""
    try:
        resolve_method(name, args)
    except BadInput as error:
        return _placed([re.sub(r"^method_args: ", "method_args.", fault) for fault in error.faults], origins, place)
    return []


def _rule_faults(config: Config, method: Method, origins: Origins, place: str) -> Tuple[List[str], List[str]]:
    """What the update rules have against the method, and against the config's optimizer, in whose place another may be given."""
    from ipu_pipe.update import rules  # holds torch, which reading a config otherwise does not need

    optimizer, args = config.optimizer, config.method_settings()
    always = rules.find_faults(args, method, "sgd", {"momentum": 0.9})  # an optimizer that none of them minds
    own = [f for f in rules.find_faults(args, method, optimizer.name, optimizer.settings()) if f not in always]
    return _placed(always, origins, place), _placed(own, origins, place)


def _placed(faults: Sequence[str], origins: Origins, place: str) -> List[str]:
    """The faults, `key: value: what is allowed`, each after the place that its key came from."""
    return [f"{find_origin(fault.partition(':')[0], origins, place)}: {fault}" for fault in faults]
