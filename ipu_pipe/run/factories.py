"""Objects made from what a config names: the model, the data, the loss, the optimizer and its scheduler."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable, Dict, Optional, Union

import torch
from torch import nn

from ipu_pipe.config.schema import Config
from ipu_pipe.config.sections import OWN
from ipu_pipe.data import DataSource, load_data
from ipu_pipe.errors import BadInput
from ipu_pipe.job.import_strings import call_entry, check_arguments, resolve_entry
from ipu_pipe.job.placing import make_take
from ipu_pipe.model.loss import Loss, LossOfOutput, OwnLoss, list_requested_fields
from ipu_pipe.update import optimizer as update
from ipu_pipe.update.optimizer import make_factory_of
from ipu_pipe.update.rates import SchedulerFactory, scale_for_update_size


def make_model(config: Config) -> nn.Module:
    """Make the config's model, on the CPU in float32."""
    model = call_entry(resolve_entry(config.model.entry, "model.entry"), config.model.args, "model.args")
    if not isinstance(model, nn.Module):
        raise BadInput(f"model.entry: {config.model.entry}: gave a {type(model).__name__}, must give a torch.nn.Module")
    return model


def make_data(config: Config) -> DataSource:
    """Make the config's data source."""
    options = config.data.options()
    if ":" in config.data.name:
        source = call_entry(resolve_entry(config.data.name, "data.name"), options, "data")
        if not isinstance(source, DataSource):
            raise BadInput(
                f"data.name: {config.data.name}: gave a {type(source).__name__}, must give an ipu_pipe.data.DataSource"
            )
        return source
    return load_data(config.data.name, seed=config.seed, **options)


Output = Union[int, str, Callable[[Any], Any]]  # what of a model's output its loss is of


def make_loss(config: Config, given: Union[Loss, str, None] = None, output: Optional[Output] = None) -> Loss:
    """Make the loss of a run, over the part of the model's output that `model.output` names.

    A loss or an `output` given as a function takes the place of the config's. Raise `BadInput` if the loss asks for something
    that it cannot be given.
    """
    take = output if callable(output) else make_take(config)
    chosen = given if callable(given) else None if config.loss == OWN else make_plain_loss(config)
    if chosen is None:
        return OwnLoss(take)
    asks = list_requested_fields(chosen)
    return chosen if take is None and not asks else LossOfOutput(chosen, take, asks)


def make_plain_loss(config: Config) -> Loss:
    """Return mean cross-entropy, or the config's own loss (outputs, labels) -> scalar; a module class is instantiated."""
    if config.loss == "cross_entropy":
        return nn.functional.cross_entropy
    chosen: Any = resolve_entry(config.loss, "loss")
    if inspect.isclass(chosen) and issubclass(chosen, nn.Module):
        chosen = call_entry(chosen, {}, "loss")
    called: Callable[[Any, Any], torch.Tensor] = chosen
    return called


def make_scheduler(config: Config) -> SchedulerFactory:
    """Return the config's torch.optim.lr_scheduler as a function of an optimizer."""
    name, args = config.lr_schedule.name, config.lr_schedule.args
    made_by = resolve_entry(_entry(name), "lr_schedule.name")
    check_arguments(functools.partial(made_by, None), args or {}, "lr_schedule.args")  # besides the optimizer
    return functools.partial(made_by, **(args or {}))


def _entry(name: str) -> str:
    """Return the import string of an object in a module of PyTorch."""
    return name if ":" in name else ":".join(name.rsplit(".", 1))


def make_factory(config: Config) -> update.OptimizerFactory:
    """Return the config's optimizer as a function of parameter groups."""
    if config.optimizer.is_other:
        return make_factory_of(
            resolve_entry(_entry(config.optimizer.name), "optimizer.name"), config.optimizer.settings()
        )
    settings: Dict[str, Any] = config.optimizer.settings()
    reference = config.optimizer.reference_batch_size
    if reference:
        size = config.micro_batch_size * config.gradient_accumulation * config.replicas
        momentum = settings.get("momentum") or 0.0
        settings["lr"], settings["momentum"] = scale_for_update_size(settings["lr"], momentum, reference, size)
    return update.make_factory_by_name(config.optimizer.name, **settings)
