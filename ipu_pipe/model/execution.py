"""The order of execution of a model's modules, seen in a forward of an example, and the parameters that each answers for."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, List, Mapping, Tuple

import torch
from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.model.autocast import is_cast, uncast_meanwhile
from ipu_pipe.model.calling import call
from ipu_pipe.model.nests import copied
from ipu_pipe.model.observation import Call, Observed, count, watch
from ipu_pipe.model.restoring import undisturbed
from ipu_pipe.model.shapes import by_shape, pays, stand_in


def execution(
    model: nn.Module, example: Any, counted: bool = False, values: bool = False
) -> Tuple[List[Call], List[str]]:
    """First runs of all modules in order, and the names of every run (repeats too), seen in one forward: by shape, unless that
    cannot be or `values` are asked for. `counted`: with what each costs, forward and backward.

    In evaluation mode, in which nothing is left to chance (stochastic depth), unless training runs more modules than that.
    """
    seen = _observe(model, example, False, counted, values)
    more = _observe(model, example, True, False, values)
    if set(more.runs) - set(seen.runs):
        seen = _observe(model, example, True, counted, values) if counted else more
    return seen.calls, seen.runs


def _observe(model: nn.Module, example: Any, training: bool, counted: bool, values: bool) -> Observed:
    look = count if counted else watch
    try:
        with uncast_meanwhile(model):
            return _observed(model, example, training, look, values)
    except Exception:  # it may have a block of its own, whose bfloat16 goes on to layers that count on ours
        if not is_cast(model):
            raise
        return _observed(model, example, training, look, values)


def _observed(
    model: nn.Module, example: torch.Tensor, training: bool, look: Callable[..., Observed], values: bool
) -> Observed:
    if not values and pays(model, example):
        try:
            with by_shape(model):
                x = stand_in(example)
                return look(model, x, lambda: _run_quietly(model, x, training))
        except Exception:  # its forward looks at values: what the user's code raises then may be anything
            pass
    return look(model, example, lambda: _run_quietly(model, example, training))


def _run_quietly(model: nn.Module, example: Any, training: bool) -> Any:
    """One forward that leaves buffers, modes and random states as they were.

    BatchNorm stays in evaluation mode: in training it refuses an example of one value a channel.
    """
    with undisturbed(model):
        model.train(training)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.training = False
        return call(model, copied(example))


def refuse_unused(calls: List[Call]) -> None:
    if not any(own.works for own in calls):
        raise BadInput("model: no module of it runs in forward: nothing to divide into stages")


def answering(name: str, at_call: Mapping[str, int]) -> str:
    """The nearest module around `name` (itself included) that runs: it computes with the parameters of `name`."""
    while name not in at_call:
        name = name.rpartition(".")[0]
    return name


def full_name(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def parameters_by_module(model: nn.Module) -> Iterable[Tuple[str, str, nn.Parameter]]:
    """(module name, parameter's own name, parameter), shared ones once for every owner."""
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield module_name, name, parameter


def weight_groups(model: nn.Module, calls: List[Call]) -> List[Tuple[Call, List[str]]]:
    """(module that runs, parameter names) of each weight in the order of execution, a bias joined to the weight before it."""
    order = {own.name: own for own in calls}
    at_call = dict.fromkeys(order, 0)
    owned: Dict[str, List[List[str]]] = {}
    for module, name, _ in parameters_by_module(model):
        groups = owned.setdefault(answering(module, at_call), [])
        if groups and "bias" in name and groups[-1][0].rpartition(".")[0] == module:
            groups[-1].append(full_name(module, name))
        else:
            groups.append([full_name(module, name)])
    return [(own, group) for own in calls for group in owned.get(own.name, [])]
