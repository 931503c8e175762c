"""Make the objects that a config names (model, data, loss, optimizer, scheduler), and place a
method's stages on a model.

An import string, `module:name`, names the user's own without registering it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import sys
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Sequence

import torch
from torch import nn

from ipu_pipe.config.schema import Config, PipelineConfig
from ipu_pipe.config.sections import OWN, TOKENS, Entry, OptimizerSettings
from ipu_pipe.cut.cutting import Piece
from ipu_pipe.data import DataSource, load_data
from ipu_pipe.errors import BadInput, raise_faults, summarize
from ipu_pipe.job.overrides import Overrides
from ipu_pipe.local.heads import AugLocal, Heads
from ipu_pipe.local.structures import make_blocks
from ipu_pipe.model.loss import (
    Loss,
    LossWeight,
    OwnLoss,
    Take,
    TakePart,
    get_plain_loss,
    make_token_count,
    wrap_loss,
)
from ipu_pipe.model.stages import Partition, partition
from ipu_pipe.refusals import Words
from ipu_pipe.schedule.methods import Method
from ipu_pipe.shipped import MODELS
from ipu_pipe.text import find_nearest, show, suggest
from ipu_pipe.update.optimizer import (
    Groups,
    OptimizerFactory,
    call_factory,
    count_moments,
    make_factory_by_group,
    make_factory_by_name,
    make_factory_of,
    make_placeholder,
    spread_settings,
)
from ipu_pipe.update.rates import SchedulerFactory, scale_for_update_size


def make_model(config: Config) -> nn.Module:
    """Make the config's model, on the CPU in float32."""
    model = call_entry(
        resolve_entry(config.model.entry, "model.entry"), config.model.args, "model.args"
    )
    if not isinstance(model, nn.Module):
        raise BadInput(
            f"model.entry: {config.model.entry}: returned a {type(model).__name__}, must return a "
            f"torch.nn.Module"
        )
    return model


def make_data(config: Config) -> DataSource:
    """Make the config's data source."""
    name = config.data.name
    options = config.data.options()
    if ":" not in name:
        return load_data(name, seed=config.seed, **options)
    source = call_entry(resolve_entry(name, "data.name"), options, "data")
    if not isinstance(source, DataSource):
        raise BadInput(
            f"data.name: {name}: returned a {type(source).__name__}, must return an "
            f"ipu_pipe.data.DataSource"
        )
    return source


def _describe_losses(name: str) -> str:
    """Return what a loss without a colon must be, and the nearest loss of PyTorch."""
    known = ("cross_entropy", OWN)
    functions = [
        loss
        for loss in dir(nn.functional)
        if loss.endswith("_loss") or loss.startswith("binary_cross_entropy")
    ]
    # of a name with dots, such as F.mse_loss, the last part
    near = find_nearest(name.rpartition(".")[2], [*known, *functions])
    hint = (
        f"; did you mean {'torch.nn.functional:' if near in functions else ''}{near}?"
        if near
        else ""
    )
    return f"must be {' or '.join(known)} (the model's own), or an import string module:name{hint}"


def make_loss(config: Config, objects: Overrides) -> Loss:
    """Make the loss of a run, over the part of the model's output that `model.output` names.

    A loss or an output that Python gives as a function counts before the config's. A module's class
    is instantiated. Raise `BadInput` if the loss asks for something that it cannot be given.
    """
    take = objects.output if callable(objects.output) else make_output_selector(config)
    chosen: Any = objects.loss if callable(objects.loss) else None
    if chosen is None and config.loss == OWN:
        return OwnLoss(take)
    if chosen is None and config.loss == "cross_entropy":
        chosen = nn.functional.cross_entropy
    elif chosen is None:
        if ":" not in config.loss:
            raise BadInput(f"loss: {show(config.loss)}: {_describe_losses(config.loss)}")
        chosen = resolve_entry(config.loss, "loss")
        chosen = (
            call_entry(chosen, {}, "loss")
            if inspect.isclass(chosen) and issubclass(chosen, nn.Module)
            else chosen
        )
    return wrap_loss(chosen, take)


def make_loss_weight(weight: LossWeight | str | None, loss: Loss) -> LossWeight | None:
    """Make the weight of microbatches in the mean loss of an update; None if all weigh the same."""
    if weight is None or (callable(weight) and not isinstance(weight, str)):
        return weight
    if weight == TOKENS:
        return make_token_count(get_plain_loss(loss))
    if not isinstance(weight, str) or ":" not in weight:
        script = Words("", "an import string module:name of ")
        why = f"must be tokens, or {script}a function of the labels"
        raise BadInput(f"loss_weight: {show(weight)}: {why}")
    return resolve_entry(weight, "loss_weight")


def make_output_selector(config: Config) -> Take | None:
    """Return what `model.output` takes of a model's output: a field, an element, or a function's
    result; None for all of it.
    """
    output = config.model.output
    if isinstance(output, str) and ":" in output:
        return resolve_entry(output, "model.output")
    return None if output is None else TakePart(output)


def count_config_moments(config: Config) -> int:
    """Return the tensors of a weight's shape that the config's optimizer keeps."""
    # a stage may get any of the optimizers, so the one that keeps most is assumed for all
    return max(count_moments(one.name, one.settings()) for one in config.optimizer.members)


def make_scheduler(config: Config) -> SchedulerFactory:
    """Return the config's torch.optim.lr_scheduler as a function of an optimizer."""
    made_by = resolve_torch_name(config.lr_schedule.name, "lr_schedule.name")
    args = config.lr_schedule.args or {}
    # the optimizer is the first argument
    check_arguments(functools.partial(made_by, None), args, "lr_schedule.args")
    return functools.partial(made_by, **args)


def make_factory(config: Config) -> OptimizerFactory:
    """Return the config's optimizer as a function of parameter groups."""
    chosen = config.optimizer
    if chosen.groups:
        return make_factory_by_group(
            [_make_factory(one, {}, f"optimizer.groups.{i}") for i, one in enumerate(chosen.groups)]
        )
    changes: dict[str, Any] = {}
    # a rate that is left open is advised for the updates as they are
    if chosen.reference_batch_size and chosen.lr is not None:
        size = config.micro_batch_size * config.gradient_accumulation * config.replicas
        changes["lr"], changes["momentum"] = scale_for_update_size(
            chosen.lr, chosen.momentum or 0.0, chosen.reference_batch_size, size
        )
    return _make_factory(chosen, changes, "optimizer")


def _make_factory(
    chosen: OptimizerSettings, changes: Mapping[str, Any], key: str
) -> OptimizerFactory:
    settings = {**chosen.settings(), **changes}
    if chosen.is_other:
        return make_factory_of(resolve_torch_name(chosen.name, f"{key}.name"), settings)
    return make_factory_by_name(chosen.name, **settings)


def apply_settings_by_stage(config: Config, groups: Groups, delays: Sequence[float]) -> None:
    """Write the settings that differ by stage into the parameter groups, of stages with these
    delays in updates (P,).

    Raise `BadInput` for settings that the optimizer refuses.
    """
    for number, member in enumerate(config.optimizer.members):
        key = f"optimizer.groups.{number}" if config.optimizer.groups else "optimizer"
        spread = member.by_stage or {}
        by_stage = spread_settings(spread, delays, f"{key}.by_stage") if spread else []
        for stage, settings in enumerate(by_stage):
            try:  # made of nothing, so that the optimizer checks its settings
                probe = call_factory(
                    _make_factory(member, settings, key), [make_placeholder(stage)]
                ).param_groups[0]
            except (TypeError, ValueError) as error:
                raise BadInput(
                    f"{key}.by_stage: {show(settings)}: stage {stage}: {error}"
                ) from error
            for name in settings:
                if name not in probe:
                    raise BadInput(
                        f"{key}.by_stage.{name}: is not a setting of {member.name}'s parameter "
                        f"groups"
                    )
            for group in groups:
                if group["member"] == number and group["stage"] == stage:
                    # what a group says already stays: no_decay's has a weight_decay of 0
                    group.update({name: probe[name] for name in settings if name not in group})


# ---- import strings


def resolve_torch_name(name: str, key: str) -> Callable[..., Any]:
    """Import what an import string names, or a name in a module of PyTorch with dots alone."""
    # torch.optim.lr_scheduler.StepLR: the last part is the name
    return resolve_entry(name if ":" in name else ":".join(name.rsplit(".", 1)), key)


def resolve_listed(
    value: str | Entry, key: str
) -> tuple[Callable[..., Any], Mapping[str, Any], str]:
    """Return the callable that an element of a config's list `key` names, its arguments, and the
    place to name in a fault.
    """
    entry, args = (value, {}) if isinstance(value, str) else (value.entry, value.args)
    return resolve_entry(entry, key), args, f"{key}.{entry}"


def collect_results(values: Iterable[Any], make: Callable[[Any], Any]) -> list[Any]:
    """Return what `make` gives for each value. Raise `BadInput` with the faults of all."""
    results = []
    faults = []
    for value in values:
        try:
            results.append(make(value))
        except BadInput as error:
            faults += error.lines
    raise_faults(faults)
    return results


def resolve_head(config: PipelineConfig) -> Heads | None:
    """Return what makes a config's auxiliary heads, None for the usual ones."""
    head = config.method_args.head
    if isinstance(head, str):
        return resolve_entry(head, "method_args.head")
    return None if head is None else AugLocal(head.depth, head.pyramid)


def resolve_entry(entry: str, key: str) -> Callable[..., Any]:
    """Import what `module:attribute` names, from the current folder too. Raise `BadInput`, about
    `key`, if there is none.
    """
    place = f"{key}: {show(entry)}"
    module_name, colon, attribute = entry.partition(":")
    if not colon or not module_name or not attribute:
        raise BadInput(
            f"{place}: must be an import string module:name, such as models.resnet:resnet50"
        )
    # a console script, unlike `python -m`, does not look for modules in the current folder
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        # first, as for `python -m`: before an installed module of that name
        sys.path.insert(0, str(Path.cwd()))
    try:
        # a plan may build on the meta device, but a module keeps the tensors of its import
        with torch.device("cpu"):
            value = _import_module(module_name)
    # the user's module may raise anything
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        # otherwise the user's module is there, and misses one that it imports
        if missing and (module_name == missing or module_name.startswith(missing + ".")):
            hint = suggest(missing, _list_modules_beside(missing))
            raise BadInput(
                f"{place}: no module {missing} in the current folder or installed{hint}"
            ) from None
        raise BadInput(
            f"{place}: importing {module_name} fails: {type(error).__name__}: {error}"
        ) from error
    for name in attribute.split("."):
        if not hasattr(value, name):
            near = find_nearest(
                name, [known for known in dir(value) if not known.startswith("_")], 3
            )
            raise BadInput(
                f"{place}: {module_name} has no {name}" + (f", nearest are {near}" if near else "")
            )
        value = getattr(value, name)
    if not callable(value):
        raise BadInput(f"{place}: is a {type(value).__name__}, must be callable")
    function: Callable[..., Any] = value
    return function


def _list_modules_beside(name: str) -> list[str]:
    """Return the modules of the package in which a missing module would be."""
    package_name = name.rpartition(".")[0]
    if not package_name:
        return []
    try:
        # for a hint alone: the package may be what is missing
        package = _import_module(package_name)
    except ImportError:
        return []
    return [
        f"{package_name}.{module.name}"
        for module in pkgutil.iter_modules(getattr(package, "__path__", []))
    ]


def _import_module(name: str) -> Any:
    """Import a module: the user's own, else one of the models that come with the library."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        top = name.partition(".")[0]
        # a module that was found and fails at an import of its own must say so itself
        if top != MODELS or error.name not in (top, name):
            raise
        try:
            # a clone has the models beside the package, a wheel inside it
            return importlib.import_module(f"ipu_pipe.{name}")
        except ModuleNotFoundError as second:
            # one that the library's own model imports is named as it is
            missing = name if second.name == f"ipu_pipe.{name}" else error.name
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing) from None


def check_arguments(function: Callable[..., Any], args: Mapping[str, Any], key: str) -> None:
    """Raise `BadInput` for all keyword arguments that `function` does not take, or misses; `key`
    holds them in the config.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    # some built-in callables have no signature; the call itself will fail
    except (TypeError, ValueError):
        return
    # positional-only parameters cannot be given by name
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    # what goes into **kwargs only the function itself can judge
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    faults = [
        f"{key}.{show(name)}: {show(value)}: unknown argument, allowed are {', '.join(named)}"
        for name, value in args.items()
        if name not in named and not takes_any
    ]
    faults += [
        f"{key}.{name}: missing: must be given"
        for name, parameter in named.items()
        if parameter.default is parameter.empty and name not in args
    ]
    raise_faults(faults)


def explain_wrong_call(function: Any, *names: str) -> str:
    """Return why `function` cannot be called with these positional arguments; "" if it can, or
    nobody knows before the call.
    """
    try:
        inspect.signature(function).bind(*names)
    except TypeError as error:
        return f"{error}: must take ({', '.join(names)})"
    # some built-in callables have no signature
    except ValueError:
        pass
    return ""


def call_entry(function: Callable[..., Any], args: Mapping[str, Any], key: str) -> Any:
    """Return `function(**args)`. Raise `BadInput` if it fails; `key` holds its arguments in the
    config.
    """
    # first, since the call itself would tell of one wrong argument alone
    check_arguments(function, args, key)
    try:
        return function(**args)
    except BadInput as error:
        raise BadInput([f"{key}: {fault}" for fault in error.lines]) from None
    # the user's function may raise anything
    except Exception as error:
        # the messages of these two say enough; of others the type is named, too
        message = str(error) if isinstance(error, (TypeError, ValueError)) else summarize(error)
        raise BadInput(f"{key}: {show(dict(args))}: {message}") from error


# ---- a method's stages on a model


class Placed(NamedTuple):
    """A model placed on devices.

    model: the model that trains, with heads if blocks have losses of their own.
    local_stages: the stages of this process; None: all stages are here.
    placement: the device of each stage; empty: stage s is on device s.
    note: a message about the stages for the user.
    pieces: the stages as pieces of the model, if they are on separate devices.
    """

    model: nn.Module
    partition: Partition
    local_stages: Sequence[int] | None = None
    placement: Sequence[int] = ()
    note: str = ""
    pieces: Sequence[Piece] = ()


def place_whole(
    config: PipelineConfig, method: Method, model: nn.Module, x: Any, take: Take | None
) -> Placed:
    """Place all stages in this process. `x`: one microbatch of input; `take`: the part of the
    model's output that heads stand in for. Raise `BadInput` if the model has no such stages.
    """
    if method.structure is not None:
        return place_blocks(config, method, model, x, take)
    return Placed(model, partition(model, x, config.stages, one_stage=method.one_stage_reason))


def place_blocks(
    config: PipelineConfig,
    method: Method,
    model: nn.Module,
    x: Any,
    take: Take | None,
    count: int | None = None,
    local_block: int | None = None,
) -> Placed:
    """Place blocks with losses of their own. `count`: the required number of blocks; `local_block`:
    the one of this process.
    """
    assert method.structure is not None
    if isinstance(config.stages, dict) and config.stages.get("by") == "time":
        why = (
            "times differ from run to run, and blocks are what is trained: must be flops or "
            "parameters"
        )
        raise BadInput(f"stages.by: time: {why}")
    model, part = make_blocks(
        model,
        x,
        method.structure,
        config.stages,
        config.seed,
        resolve_head(config),
        method.one_stage_reason or "",
        take,
    )
    if count is not None and len(part) != count:
        raise BadInput(
            f"stages: {len(part)} blocks, which need as many processes per replica, got {count}"
        )
    return Placed(model, part, None if local_block is None else [local_block])
