"""Which keys of a config decide a run's numbers: one table, for resuming a run and for the manifests of its checkpoints."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any, Dict, List, Mapping, NamedTuple, Tuple

from ipu_pipe.config.comparing import flatten, list_changes
from ipu_pipe.config.faults import show_value
from ipu_pipe.config.schema import Config
from ipu_pipe.schedule.methods import METHODS

MADE_LATER = "given.optimizer"  # described when it is made: compared then


class Role(Enum):
    """What a key of the config is to a run that goes on."""

    DECIDES = "the numbers depend on it: stands in every checkpoint's manifest, may not change"
    KEPT = "no number depends on it, may not change either"
    GROWS = "how long the run is: may grow"
    FREE = "where it runs and what it writes: may change"


ROLES: Dict[str, Role] = {
    **dict.fromkeys(("model", "data", "loss", "given", "init_from", "seed", "precision"), Role.DECIDES),
    **dict.fromkeys(("method", "method_args", "optimizer", "lr_schedule", "clip"), Role.DECIDES),
    **dict.fromkeys(("micro_batch_size", "gradient_accumulation", "replicas"), Role.DECIDES),
    **dict.fromkeys(("recompute", "allow_nonfinite"), Role.KEPT),
    **dict.fromkeys(("steps", "epochs"), Role.GROWS),
    **dict.fromkeys(("backend", "stages", "hardware", "evaluate", "checkpoint", "log"), Role.FREE),
    **dict.fromkeys(("metrics", "callbacks", "early_stopping"), Role.FREE),
}


def find_role(key: str, method: str) -> Role:
    """What `key`, its sections parted by dots, is to a run of `method`. Blocks with losses of their own are what is trained:
    there the stages decide."""
    top, _, inner = key.partition(".")
    top = inner.partition(".")[0] if top == "given" and ROLES.get(inner.partition(".")[0]) is Role.FREE else top
    if top == "stages" and method in METHODS and METHODS[method].structure is not None:
        return Role.DECIDES
    return ROLES.get(top, Role.KEPT)


def select_deciding(resolved: Mapping[str, Any]) -> Dict[str, Any]:
    """The keys of a resolved config (plain data) that decide the numbers, flatten, with their values as JSON gives them back."""
    method = str(resolved.get("method"))
    values = {key: value for key, value in flatten(dict(resolved)).items() if find_role(key, method) is Role.DECIDES}
    return dict(json.loads(json.dumps(values)))


def compare_deciding(saved: Mapping[str, Any], own: Mapping[str, Any]) -> List[Tuple[str, Any, Any]]:
    """(key, saved value, this run's) of two results of `deciding` where they differ; a key not there counts as null."""
    said = {key: (saved.get(key), own.get(key)) for key in sorted({*saved, *own})}
    return [
        (key, a, b) for key, (a, b) in said.items() if json.dumps(a, sort_keys=True) != json.dumps(b, sort_keys=True)
    ]


def list_length_dependent(config: Config) -> List[str]:
    """Keys that are not given, for which rates therefore depend on how long the run is."""
    schedule, t1 = config.lr_schedule, config.method_args.t1
    found = ["lr_schedule.total_steps"] if schedule.falls and schedule.total_steps is None else []
    own = schedule.milestones or schedule.warmup_steps or schedule.total_steps
    if t1 is not None and t1.anneal_updates is None and not own:
        found.append("method_args.t1.anneal_updates")
    return found


class Changes(NamedTuple):
    """`key: old -> new` of the keys in which a run would go on otherwise: those that may not change, each with the reason, and
    those that may; `longer`: the run is asked for more updates."""

    refused: List[str]
    free: List[str]
    longer: bool


def classify_changes(old: Config, new: Config) -> Changes:
    """What is different in `new` for a run of `old` that goes on."""
    refused, free, longer = [], [], False
    for key, before, after in list_changes(old, new):
        if key.startswith(MADE_LATER):
            continue
        told, kind = f"{key}: {show_value(before)} -> {show_value(after)}", find_role(key, old.method)
        shrinks = isinstance(before, int) and isinstance(after, int) and after < before
        if kind is Role.GROWS and not shrinks:
            free.append(told)
            longer = longer or key == "steps" or new.steps is None
        elif kind is Role.FREE:
            free.append(told)
        else:
            refused.append(f"{told}: {'may only grow' if kind is Role.GROWS else 'the config of a run cannot change'}")
    return Changes(refused, free, longer)
