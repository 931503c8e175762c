"""Configs written, and two of them compared."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

from ipu_pipe.config.schema import Config
from ipu_pipe.config.yaml_files import dump_yaml
from ipu_pipe.text import show


def dump_config(config: Config) -> str:
    """The resolved config as YAML that loads to the same config."""
    return dump_yaml(config.to_dict())


def keep_recorded_stages(old: Config, new: Config) -> Config:
    """`new` with the stages of `old`, a run's own config, where those are as many as `new` says to measure by time, or what the
    planner chose for the same hardware (on processes it is asked again: there may be others)."""
    by = new.stages.get("by") if isinstance(new.stages, dict) else None
    count = len(old.stages) + 1 if isinstance(old.stages, list) else old.stages
    chosen = new.stages == "auto" or (by in ("time", "hardware") and count == new.stages["count"])
    again = by != "time" and (new.hardware != old.hardware or new.backend.name == "distributed")
    if chosen and not again and (isinstance(old.stages, list) or old.stages == 1):
        return new.model_copy(update={"stages": old.stages})
    return new


def list_changes(old: Config, new: Config) -> List[Tuple[str, Any, Any]]:
    """(key, old value, new value) for every value in which the two differ; a key that one lacks counts as null."""
    a, b = flatten(old.to_dict()), flatten(new.to_dict())
    return [(key, a.get(key), b.get(key)) for key in sorted({*a, *b}) if a.get(key) != b.get(key)]


def describe_changes(old: Config, new: Config) -> List[str]:
    """`key: old -> new` for every value in which the two differ."""
    return [f"{show(key)}: {show(before)} -> {show(after)}" for key, before, after in list_changes(old, new)]


def flatten(value: Any, key: str = "") -> Dict[str, Any]:
    """Nested mappings as one, by `outer.inner` keys."""
    if not isinstance(value, dict) or not value:
        return {key: value}
    found: Dict[str, Any] = {}
    for name, item in value.items():
        found.update(flatten(item, f"{key}.{name}" if key else str(name)))
    return found
