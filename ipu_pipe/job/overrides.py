"""Objects from Python that replace a config's keys, and their descriptions for the run's files."""

from __future__ import annotations

import functools
from typing import Any, Mapping, NamedTuple, Sequence

import torch
from torch import nn

from ipu_pipe.config.schema import Config
from ipu_pipe.config.sections import (
    GIVEN,
    GROUPS,
    DataConfig,
    Description,
    Given,
    LrSchedule,
    OptimizerConfig,
)
from ipu_pipe.data import DataSource
from ipu_pipe.errors import raise_faults
from ipu_pipe.model.loss import Loss, LossWeight
from ipu_pipe.update.optimizer import OptimizersByGroup, list_parts
from ipu_pipe.update.rates import SchedulerFactory

# keys of an optimizer's parameter groups that are not settings
NOT_SETTINGS = ("params", "stage", "member", "initial_lr")
# overrides that do not change any number of a run
FREE = ("metrics", "callbacks")


class Overrides(NamedTuple):
    """The objects that the caller passes to `ipu_pipe.train`, which describes each; None: the config's
    entry is used.
    """

    model: nn.Module | None = None
    data: DataSource | None = None
    loss: Loss | str | None = None
    output: Any = None
    optimizer: Any = None
    lr_scheduler: SchedulerFactory | None = None
    metrics: None | Sequence[Any] | Mapping[str, Any] = None
    callbacks: Sequence[Any] | None = None
    loss_weight: LossWeight | str | None = None

    def require_entries(self, config: Config) -> None:
        """Raise `BadInput` for each object that Python must pass and does not: `config` requires
        it, or its run had it.
        """
        described = {
            key: getattr(config.given, key, None) for key in self._fields if key not in FREE
        }
        missing = [
            key for key, one in described.items() if one is not None and getattr(self, key) is None
        ]
        faults = [
            f"given.{key}: {getattr(described[key], 'name', 'a list')}: the run that wrote this "
            f"had it from Python, and needs"
            f" it again: ipu_pipe.train(config, out, {', '.join(f'{one}=...' for one in missing)})"
            for key in missing
        ]
        for key, name in (("model", config.model.entry), ("data", config.data.name)):
            # a config that says `given` without a description comes from no run
            if name == GIVEN and described[key] is None and getattr(self, key) is None:
                faults.append(
                    f"{key}: missing: must be given, to ipu_pipe.train or ipu_pipe.configure"
                )
        raise_faults(faults)

    def describe_in(self, config: Config) -> Config:
        """Return the config in which the key of each passed object is GIVEN, and its description
        stands in the section `given`.

        A value that a key can have itself (the name of a loss or an output) stays there. The
        optimizer is described when it is made.
        """
        descriptions: dict[str, Any] = {}
        changes: dict[str, Any] = {}
        if self.model is not None:
            descriptions["model"] = Description(name=qualify(type(self.model)))
            changes["model"] = config.model.model_copy(update={"entry": GIVEN, "args": {}})
        if self.output is not None:
            if callable(self.output):
                descriptions["output"] = describe(self.output)
            output = GIVEN if callable(self.output) else self.output
            # a model from Python has replaced the section already
            changes["model"] = changes.get("model", config.model).model_copy(
                update={"output": output}
            )
        if self.data is not None:
            descriptions["data"], changes["data"] = (
                Description(name=qualify(type(self.data))),
                DataConfig(name=GIVEN),
            )
        if isinstance(self.loss, str):
            changes["loss"] = self.loss
        elif self.loss is not None:
            descriptions["loss"], changes["loss"] = describe(self.loss), GIVEN
        if isinstance(self.loss_weight, str):
            changes["loss_weight"] = self.loss_weight
        elif self.loss_weight is not None:
            descriptions["loss_weight"], changes["loss_weight"] = describe(self.loss_weight), GIVEN
        if self.optimizer is not None:
            descriptions["optimizer"] = None
            # the groups that it gets are divided by no_decay; all else is its own
            changes["optimizer"] = OptimizerConfig(
                name=GIVEN, lr=None, no_decay=config.optimizer.no_decay
            )
        if self.lr_scheduler is not None:
            descriptions["lr_scheduler"] = describe(self.lr_scheduler)
            # the interval says after how many updates it is stepped
            changes["lr_schedule"] = LrSchedule(name=GIVEN, interval=config.lr_schedule.interval)
        if self.metrics is not None:
            descriptions["metrics"], changes["metrics"] = _describe_all(self.metrics), [GIVEN]
        if self.callbacks is not None:
            descriptions["callbacks"], changes["callbacks"] = _describe_all(self.callbacks), []
        return (
            describe_given(config, descriptions).model_copy(update=changes) if changes else config
        )


def describe_given(config: Config, descriptions: Mapping[str, Any]) -> Config:
    """Return the config with these descriptions of objects from Python in its section `given`."""
    section = (config.given or Given()).model_copy(update=dict(descriptions))
    return config.model_copy(update={"given": section})


def qualify(value: Any) -> str:
    """Return `module.name` of a function or class, or of an object's class."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def describe(value: Any) -> Description:
    """Describe a function, a partial function or an object by its qualified name and its settings
    (numbers and texts).
    """
    if isinstance(value, functools.partial):
        inner = describe(value.func)
        bound = {f"argument {i}": argument for i, argument in enumerate(value.args)}
        settings = _select_plain({**bound, **value.keywords})
        return inner.model_copy(update={"settings": {**inner.settings, **settings}})
    # what a function or a class has is no setting
    attributes = {} if hasattr(value, "__qualname__") else getattr(value, "__dict__", {})
    public = {
        key: item
        for key, item in attributes.items()
        # the mode of a module is no setting, and private attributes differ between versions of
        # torch
        if key != "training" and not key.startswith("_")
    }
    return Description(name=qualify(value), settings=_select_plain(public))


def describe_optimizer(optimizer: torch.optim.Optimizer) -> Description:
    """Describe an optimizer by its class, its settings, and the different settings of parameter
    groups.

    Settings that are off (None, False) are left out. Each part of an optimizer by group is an entry
    of `groups`.
    """
    if isinstance(optimizer, OptimizersByGroup):
        parts = [describe_optimizer(part).model_dump() for part in list_parts(optimizer)]
        return Description(name=GROUPS, groups=parts)
    usual = _select_plain(optimizer.defaults)
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        settings = _select_plain(
            {key: value for key, value in group.items() if key not in NOT_SETTINGS}
        )
        keys = sorted({*settings, *usual})
        # over the keys of both: a setting that is off in this group only is missing in `settings`
        other = {key: settings.get(key) for key in keys if settings.get(key) != usual.get(key)}
        if other and other not in groups:
            groups.append(other)
    # sorted, because groups are made stage by stage, and a resumed run may have other stages
    return Description(name=qualify(optimizer), settings=usual, groups=sorted(groups, key=str))


def _select_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers, texts and lists among the values, without those that are off (None,
    False).
    """
    plain = {}
    for key, value in values.items():
        # torch allows a tensor as learning rate, which capturable optimizers need to change it
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, (tuple, list)) and all(
            isinstance(one, (bool, int, float, str)) for one in value
        ):
            value = list(value)
        elif not isinstance(value, (int, float, str)):
            continue
        # 0 is a setting, and False is not: both are false
        if value is not False:
            plain[str(key)] = value
    return plain


def _describe_all(values: Sequence[Any] | Mapping[str, Any]) -> list[Description]:
    """Describe each value: a text by itself, others by `describe`; the names of a mapping are
    settings.
    """
    if isinstance(values, Mapping):
        pairs = [(describe(value), name) for name, value in values.items()]
        return [
            one.model_copy(update={"settings": {**one.settings, "called": name}})
            for one, name in pairs
        ]
    return [
        Description(name=value) if isinstance(value, str) else describe(value) for value in values
    ]
