"""YAML file and command-line overrides, or keys from Python -> a frozen, validated `Config`; all faults are reported at once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence, Set, Tuple, Union

from pydantic import ValidationError

from ipu_pipe.config.faults import find_origin, format_faults
from ipu_pipe.config.schema import Config, import_outer
from ipu_pipe.config.sections import GIVEN, StageCount
from ipu_pipe.config.yaml_files import Origins, apply_override, read_yaml
from ipu_pipe.errors import BadInput
from ipu_pipe.schedule import methods
from ipu_pipe.schedule.methods import Method

# at other keys, null means that the key is left out
NULL_MEANS = ("stages", "steps", "clip", "hardware", "init_from", "checkpoint")


def load_config(path: Union[str, Path], overrides: Sequence[str] = ()) -> Config:
    """Return the config in the YAML file `path`, changed by KEY=VALUE `overrides`. Raise `BadInput` with every fault found."""
    origins: Origins = {}
    raw = read_yaml(Path(path), origins)
    faults: List[str] = []
    for text in overrides:
        try:
            apply_override(raw, text, origins)
        except BadInput as error:
            faults += error.faults
    return _validate(raw, origins, str(path), faults)


def load_recorded(path: Path) -> Config:
    """Return the config that a run wrote, also one of an earlier version: keys that are gone changed no number of a run.

    Raise `BadInput` with every fault found.
    """
    raw = read_yaml(path)
    if isinstance(raw.get("log"), dict):
        # the former name of `trace`
        raw["log"].pop("trace_microbatches", None)
    return _validate(raw, {}, str(path), [])


def configure(**keys: Any) -> Config:
    """Return a config with the keys of a config file as arguments. `model` and `data` may be left to `train`.

    Raise `BadInput` with every fault found.
    """
    raw = {"model": {"entry": GIVEN}, "data": {"name": GIVEN}, **keys}
    return _validate(raw, {}, "configure", [])


def resolve_method(name: str, args: Mapping[str, Any] = {}) -> Method:
    """Return the method `name` with its axes changed by `args`: keys of `method_args` in a config, and `stages_per_device`.

    Raise `BadInput` for an unknown name, for values that are not allowed, and for arguments that do not belong to the method.
    """
    method_args = {key: value for key, value in args.items() if key != "stages_per_device"}
    config = configure(method=name, method_args=method_args, stages_per_device=args.get("stages_per_device"))
    return methods.resolve_method(config.method, config.method_settings())


def _validate(raw: Dict[str, Any], origins: Origins, place: str, faults: List[str]) -> Config:
    """Return the config of `raw`. Raise `BadInput` with `faults` and all others, each with the place that its key came from."""

    def put_place(found: Sequence[str]) -> List[str]:
        return [f"{find_origin(fault.partition(':')[0], origins, place)}: {fault}" for fault in found]

    raw = {key: value for key, value in raw.items() if value is not None or key in NULL_MEANS}
    config, faults = None, list(faults)
    wrong: Set[Tuple[str, ...]] = set()  # keys with faults, and the sections that hold them
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        details = error.errors()
        # the types of these keys do not say which section they hold
        forms = {"stages": StageCount, "ipu": import_outer("ipu"), "hardware": import_outer("hardware")}
        faults += format_faults(details, origins, place, Config, forms)
        for detail in details:
            key = tuple(map(str, (*detail["loc"], *filter(None, [detail.get("ctx", {}).get("key")]))))
            wrong |= {key[:1], key[:2]}
    if isinstance(raw.get("hardware"), str):
        faults += _collect(import_outer("read_hardware"), raw["hardware"], f"{find_origin('hardware', origins, place)}: hardware")
    if ("method",) not in wrong:  # also where other keys are wrong
        args = raw.get("method_args", {})
        args = args if isinstance(args, dict) else {}
        args = {key: value for key, value in args.items() if ("method_args", key) not in wrong}
        against = _collect(methods.resolve_method, raw.get("method", "gpipe"), args)
        faults += put_place([re.sub(r"^method_args: ", "method_args.", fault) for fault in against])
    if config is not None and not faults:
        method = methods.resolve_method(config.method, config.method_settings())
        always, of_optimizer = _check_rules(config, method)
        config._optimizer_faults = tuple(put_place(of_optimizer))
        of_backend = import_outer("check_backend")(config, method) if config.backend.name == "poptorch" else []
        faults += put_place([*always, *of_backend])
    if faults or config is None:
        raise BadInput(faults)
    return config


def _collect(check: Any, *args: Any) -> List[str]:
    """Return the faults that a function raises."""
    try:
        check(*args)
    except BadInput as error:
        return error.faults
    return []


def _check_rules(config: Config, method: Method) -> Tuple[List[str], List[str]]:
    """Return why the update rules cannot act with the method, and with the config's optimizer, for which another may be given."""
    from ipu_pipe.update import rules  # imports torch, which reading a config otherwise does not need

    args = config.method_settings()
    # no rule objects to this optimizer
    always = rules.list_conflicts(args, method, "sgd", {"momentum": 0.9})
    faults = [f for one in config.optimizer.members for f in rules.list_conflicts(args, method, one.name, one.settings())]
    return always, [fault for fault in dict.fromkeys(faults) if fault not in always]
