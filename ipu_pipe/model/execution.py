"""The order of execution of a model's modules, seen in one forward of an example, and the parameters that each answers for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, Mapping, Tuple

import torch
from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.model.buffers import buffers_restored
from ipu_pipe.model.flops import by_formula, metered
from ipu_pipe.model.modes import modes_restored


@dataclass
class Call:
    """A module's first run: its place in the order of execution, what it computes, and the parameters it answers for."""

    name: str
    module: nn.Module
    works: bool  # computes something itself: none of its children runs, or it owns parameters
    alone: bool = True  # none of its children runs
    flops: float = 0.0  # of all that runs from here to the next module's first run
    inputs: Any = ()  # (arguments, keyword arguments)


def execution(model: nn.Module, example: torch.Tensor) -> Tuple[List[Call], List[str]]:
    """First runs of all modules in order, and the names of every run (repeats too), seen in one forward.

    In evaluation mode, in which nothing is left to chance (stochastic depth), unless training runs more modules than that.
    """
    calls, runs = _observe(model, example, training=False)
    more, more_runs = _observe(model, example, training=True)
    return (more, more_runs) if set(more_runs) - set(runs) else (calls, runs)


def _observe(model: nn.Module, example: torch.Tensor, training: bool) -> Tuple[List[Call], List[str]]:
    names = {id(module): name for name, module in model.named_modules()}
    calls: List[Call] = []
    runs: List[str] = []
    seen: Dict[str, Call] = {}

    def before(module: nn.Module, inputs: Any, keywords: Any) -> None:
        name = names[id(module)]
        runs.append(name)
        if meter is not None and calls:
            calls[-1].flops += meter.read()
        if name not in seen:
            own = any(True for _ in module.parameters(recurse=False))
            seen[name] = Call(name, module, own, inputs=(inputs, keywords))
            calls.append(seen[name])

    def after(module: nn.Module, inputs: Any, keywords: Any, output: Any) -> None:
        if meter is None:
            seen[names[id(module)]].flops += by_formula(module, [*inputs, *keywords.values()], output)

    handles = [m.register_forward_pre_hook(before, with_kwargs=True) for m in model.modules()]
    handles += [m.register_forward_hook(after, with_kwargs=True) for m in model.modules()]
    try:
        with torch.no_grad(), metered() as meter:
            _run_quietly(model, example, training)
            if meter is not None and calls:
                calls[-1].flops += meter.read()
    finally:
        for handle in handles:
            handle.remove()
    around = {outer for name in seen for outer in modules_around(name)}
    for call in calls:
        call.alone = call.name not in around
        call.works = call.works or call.alone
    return calls, runs


def modules_around(name: str) -> List[str]:
    """Names of the modules around a module, the model's own ("") and the outermost first."""
    parts = name.split(".") if name else []
    return [".".join(parts[:n]) for n in range(len(parts))]


def _run_quietly(model: nn.Module, example: torch.Tensor, training: bool) -> None:
    """One forward that leaves buffers, modes and random states as they were.

    BatchNorm stays in evaluation mode: in training it refuses an example of one value a channel.
    """
    devices = [example.device] if example.is_cuda else []
    with torch.random.fork_rng(devices=devices), buffers_restored(model), modes_restored(model):
        model.train(training)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.training = False
        model(example)


def refuse_unused(calls: List[Call]) -> None:
    if not any(call.works for call in calls):
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
    order = {call.name: call for call in calls}
    at_call = dict.fromkeys(order, 0)
    owned: Dict[str, List[List[str]]] = {}
    for module, name, _ in parameters_by_module(model):
        groups = owned.setdefault(answering(module, at_call), [])
        if groups and "bias" in name and groups[-1][0].rpartition(".")[0] == module:
            groups[-1].append(full_name(module, name))
        else:
            groups.append([full_name(module, name)])
    return [(call, group) for call in calls for group in owned.get(call.name, [])]
