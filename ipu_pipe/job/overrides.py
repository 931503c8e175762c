"""Objects that Python gave in the place of a config's keys, described so that the run's files say what was used."""

from __future__ import annotations

import functools
from typing import Any, Dict, List, Mapping, Optional, Sequence, Union

import torch
from torch import nn

from ipu_pipe.config.schema import Config
from ipu_pipe.config.sections import GIVEN, DataConfig, Description, Given, LrSchedule, ModelConfig, OptimizerConfig
from ipu_pipe.errors import BadInput

NOT_SETTINGS = ("params", "stage", "initial_lr")


def qualify(value: Any) -> str:
    """`module.name` of a function or class, or of an object's class."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def describe(value: Any) -> Description:
    """A function, a partial one or an object: its qualified name, and the numbers and texts that it was set to."""
    if isinstance(value, functools.partial):
        return Description(name=qualify(value.func), settings=_plain(value.keywords))
    held = {} if hasattr(value, "__qualname__") else getattr(value, "__dict__", {})
    own = {k: v for k, v in held.items() if k != "training"}
    return Description(name=qualify(value), settings=_plain({k: v for k, v in own.items() if not k.startswith("_")}))


def describe_optimizer(optimizer: torch.optim.Optimizer) -> Description:
    """Its class and settings; those of parameter groups that have others. What is off (None, False) is left out."""
    usual = _plain(optimizer.defaults)
    groups: List[Dict[str, Any]] = []
    for group in optimizer.param_groups:
        own = _plain({key: value for key, value in group.items() if key not in NOT_SETTINGS})
        other = {key: own.get(key) for key in sorted({*own, *usual}) if own.get(key) != usual.get(key)}
        if other and other not in groups:
            groups.append(other)
    return Description(name=qualify(optimizer), settings=usual, groups=sorted(groups, key=str))


def _plain(values: Dict[str, Any]) -> Dict[str, Any]:
    found = {}
    for key, value in values.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, (tuple, list)) and all(isinstance(one, (bool, int, float, str)) for one in value):
            value = list(value)
        elif not isinstance(value, (int, float, str)):
            continue
        if value is not False:
            found[str(key)] = value
    return found


def describe_all(values: Union[Sequence[Any], Mapping[str, Any]]) -> List[Description]:
    """Of each: a text is its own name; where a mapping names them, the name is a setting."""
    if isinstance(values, Mapping):
        pairs = [(describe(value), name) for name, value in values.items()]
        return [found.model_copy(update={"settings": {**found.settings, "called": name}}) for found, name in pairs]
    return [Description(name=value) if isinstance(value, str) else describe(value) for value in values]


def describe_overrides(
    config: Config,
    model: Optional[nn.Module],
    data: Any = None,
    loss: Any = None,
    optimizer: Any = None,
    output: Any = None,
    *,
    metrics: Union[None, Sequence[Any], Mapping[str, Any]] = None,
    callbacks: Optional[Sequence[Any]] = None,
    lr_scheduler: Any = None,
) -> Config:
    """The config with descriptions of the objects that are given; the keys that they replace claim nothing. What a key could say
    itself (a loss's name, an output's) it says. The optimizer is described when it is made."""
    given: Dict[str, Any] = {}
    changes: Dict[str, Any] = {}
    if model is not None:
        given["model"], changes["model"] = (
            Description(name=qualify(type(model))),
            ModelConfig(entry=GIVEN, output=config.model.output),
        )
    if output is not None:
        if callable(output):
            given["output"], output = describe(output), GIVEN
        changes["model"] = changes.get("model", config.model).model_copy(update={"output": output})
    if data is not None:
        given["data"], changes["data"] = Description(name=qualify(type(data))), DataConfig(name=GIVEN)
    if isinstance(loss, str):
        changes["loss"] = loss
    elif loss is not None:
        given["loss"], changes["loss"] = describe(loss), GIVEN
    if optimizer is not None:
        given["optimizer"] = None
        changes["optimizer"] = OptimizerConfig(name=GIVEN, lr=None, no_decay=config.optimizer.no_decay)
    if lr_scheduler is not None:
        given["lr_scheduler"] = describe(lr_scheduler)
        changes["lr_schedule"] = LrSchedule(name=GIVEN, interval=config.lr_schedule.interval)
    if metrics is not None:
        given["metrics"], changes["metrics"] = describe_all(metrics), [GIVEN]
    if callbacks is not None:
        given["callbacks"], changes["callbacks"] = describe_all(callbacks), []
    if not changes:
        return config
    return config.model_copy(update={**changes, "given": (config.given or Given()).model_copy(update=given)})


def describe_made_optimizer(config: Config, optimizer: torch.optim.Optimizer) -> Config:
    """The config with the description of the optimizer that a given function made."""
    described = (config.given or Given()).model_copy(update={"optimizer": describe_optimizer(optimizer)})
    return config.model_copy(update={"given": described})


def _names(described: Union[Description, List[Description]]) -> str:
    return described.name if isinstance(described, Description) else ", ".join(one.name for one in described)


def refuse_missing(config: Config, **objects: Any) -> None:
    """Refuse (BadInput) a config of a run to which Python gave what it does not give now."""
    lacking = [key for key, value in objects.items() if value is None and getattr(config.given, key, None) is not None]
    if lacking:
        told = ", ".join(f"given.{key}: {_names(getattr(config.given, key))}" for key in lacking)
        raise BadInput(
            f"{told}: Python gave it to the run that wrote this config, and only Python can again: "
            f"ipu_pipe.train(config, out, {', '.join(f'{key}=...' for key in lacking)})"
        )
