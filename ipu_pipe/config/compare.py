"""Compare two configs: their differences, and the keys that decide a run's numbers (for resuming a
run and for checkpoints).
"""

from __future__ import annotations

import json
from enum import Enum
from typing import Any, Mapping, NamedTuple

from ipu_pipe.config.load import dump_yaml
from ipu_pipe.config.schema import Config
from ipu_pipe.refusals import show_in_config
from ipu_pipe.schedule.methods import METHODS

# not compared here: a run describes an optimizer from Python when it is made
DESCRIBED_LATER = "given.optimizer"


class Role(Enum):
    """The role of a config's key for a resumed run."""

    DECIDES = "the numbers depend on it: it is in every checkpoint's manifest and may not change"
    FIXED = "no number depends on it, but it may not change either"
    GROWS = "how long the run is: may grow"
    FREE = "where it runs and what it writes: may change"


KEYS_BY_ROLE = {
    Role.DECIDES: """
        model data loss loss_weight given init_from seed precision method method_args optimizer
        lr_schedule clip micro_batch_size gradient_accumulation replicas
    """,
    Role.FIXED: "recompute allow_nonfinite stages_per_device ema",
    Role.GROWS: "steps epochs",
    Role.FREE: """
        backend reduction stages hardware evaluate checkpoint log metrics callbacks early_stopping
    """,
}
ROLES = {key: role for role, keys in KEYS_BY_ROLE.items() for key in keys.split()}


def dump_config(config: Config) -> str:
    """Return the resolved config as YAML that loads to the same config."""
    return dump_yaml(config.to_dict())


def flatten(value: Any, key: str = "") -> dict[str, Any]:
    """Return nested mappings as one, with keys `outer.inner`."""
    # an empty mapping is a value of its own: `t2: {}` turns the rule on
    if not isinstance(value, dict) or not value:
        return {key: value}
    flat: dict[str, Any] = {}
    for name, item in value.items():
        flat.update(flatten(item, f"{key}.{name}" if key else str(name)))
    return flat


def list_changes(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
) -> list[tuple[str, Any, Any]]:
    """Return (key, old value, new value) where two results of `flatten` differ; a key that one
    lacks counts as null.
    """
    return [
        (key, old.get(key), new.get(key))
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]


def choose_method_settings(config: Config, name: str) -> dict[str, Any]:
    """Return `method_args` and `stages_per_device` of a config for a method to compare: for its own
    method its own, for another one the defaults, but the head of local losses.
    """
    if name == config.method:
        args = config.method_args.model_dump(exclude_none=True)
        return {"method_args": args, "stages_per_device": config.stages_per_device}
    # every method with blocks can have the same heads, so that the comparison is of the methods
    keys = {"head"} if METHODS[name].structure is not None else set()
    args = config.method_args.model_dump(include=keys, exclude_none=True)
    return {"method_args": args, "stages_per_device": None}


def keep_recorded_choices(old: Config, new: Config) -> Config:
    """Return `new` with the values that a run of `old` chose itself, for keys that `new` leaves
    open.

    Stages: if `new` would measure or plan the same number again, since times differ from one
    measurement to the next. On processes the planner is asked again: there may be others. Blocks
    and replicas: if the method is the same, and learning rates if the optimizers are as many. The
    size of a microbatch, which may be that of a loader's batches.
    """
    changes: dict[str, Any] = {}
    is_same_method = new.method == old.method
    if is_same_method and len(new.optimizer.members) == len(old.optimizer.members):
        rates = [one.lr for one in old.optimizer.members]
        changes["optimizer"] = new.optimizer.fill_rates(rates)
    # by whether it is set: its default is also a value that a user may ask for
    if "micro_batch_size" not in new.model_fields_set:
        changes["micro_batch_size"] = old.micro_batch_size
    # resolved stages are names; a single stage has none to name
    if (isinstance(old.stages, list) or old.stages == 1) and _keeps_stages(old, new):
        changes["stages"] = old.stages
    method = METHODS[new.method]
    for key, is_chosen in (("blocks", method.structure), ("replicas", method.rounds)):
        if is_same_method and is_chosen is not None and getattr(new.method_args, key) is None:
            recorded = {key: getattr(old.method_args, key)}
            changes["method_args"] = new.method_args.model_copy(update=recorded)
    return new.model_copy(update=changes)


def _keeps_stages(old: Config, new: Config) -> bool:
    """Return whether a run of `new` would choose its stages again, and has those of `old` to choose
    from.
    """
    # the first stage begins with the model and has no name
    old_count = len(old.stages) + 1 if isinstance(old.stages, list) else 1
    by = new.stages.get("by") if isinstance(new.stages, dict) else new.stages
    if by in ("time", "hardware") and new.stages["count"] != old_count:
        return False
    may_have_others = new.hardware != old.hardware or new.backend.facts.uses_processes
    return by == "time" or (by in ("auto", "hardware") and not may_have_others)


def find_role(key: str, method: str) -> Role:
    """Return the role of `key`, its sections separated by dots, for a run of `method`.

    If blocks have their own losses, the stages decide which weights each loss trains, so they count
    too.
    """
    top, _, inner = key.partition(".")
    object_key = inner.partition(".")[0]
    if top == "given" and ROLES.get(object_key) is Role.FREE:
        top = object_key
    if top == "stages" and method in METHODS and METHODS[method].structure is not None:
        return Role.DECIDES
    # a key that nobody has classified is refused rather than let through
    return ROLES.get(top, Role.FIXED)


def select_deciding(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a resolved config (plain data) that decide the numbers, flat, with the
    values that JSON gives back.
    """
    method = str(resolved.get("method"))
    values = {
        key: value
        for key, value in flatten(dict(resolved)).items()
        if find_role(key, method) is Role.DECIDES
    }
    # tuples become lists, as in the manifest that these are compared with
    return dict(json.loads(json.dumps(values)))


def compare_deciding(
    saved: Mapping[str, Any], current: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """Return (key, saved value, current value) where two results of `select_deciding` differ.

    A missing key counts as its default: a checkpoint of an earlier version lacks the keys that are
    new.
    """
    # the only keys without a default
    empty: dict[str, Any] = {"model": {"entry": ""}, "data": {"name": ""}}
    defaults = flatten(Config.model_validate(empty).to_dict())
    return list_changes({**defaults, **saved}, {**defaults, **current})


def list_length_dependent(config: Config) -> list[str]:
    """Return the keys that are left open and for which the learning rates therefore depend on how
    long the run is.
    """
    schedule = config.lr_schedule
    t1 = config.method_args.t1
    keys = ["lr_schedule.total_steps"] if schedule.falls and schedule.total_steps is None else []
    has_length = schedule.milestones or schedule.warmup_steps or schedule.total_steps
    if t1 is not None and t1.anneal_updates is None and not has_length:
        keys.append("method_args.t1.anneal_updates")
    return keys


class Changes(NamedTuple):
    """`key: old -> new` of the changes that a resumed run refuses, each with the reason, and of
    those that are free.
    """

    refused: list[str]
    free: list[str]
    # whether the run has more updates than before
    longer: bool


def classify_changes(old: Config, new: Config) -> Changes:
    """Return the differences of `new` from `old` for a resumed run."""
    refused = []
    free = []
    longer = False
    for key, before, after in list_changes(flatten(old.to_dict()), flatten(new.to_dict())):
        if key.startswith(DESCRIBED_LATER):
            continue
        change = f"{key}: {show_in_config(before)} -> {show_in_config(after)}"
        # by the old method: that of `new` is a fault itself if it differs
        role = find_role(key, old.method)
        shrinks = isinstance(before, int) and isinstance(after, int) and after < before
        if role is Role.GROWS and not shrinks:
            free.append(change)
            # beside `steps`, `epochs` does not decide the length
            longer = longer or key == "steps" or new.steps is None
        elif role is Role.FREE:
            free.append(change)
        else:
            why = "may only grow" if role is Role.GROWS else "the config of a run cannot change"
            refused.append(f"{change}: {why}")
    return Changes(refused, free, longer)
