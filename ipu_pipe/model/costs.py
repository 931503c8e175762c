"""What each module costs, by which a number of stages is balanced: FLOPs, parameters, or measured time."""

from __future__ import annotations

import copy
import time
from typing import Any, Dict, List, Set, Tuple

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ipu_pipe.model.observation import Call

COSTS = ("flops", "parameters", "time")


def costs_of(model: nn.Module, calls: List[Call], groups: List[Tuple[Call, List[str]]], by: str) -> List[float]:
    """Cost of each call: of what runs from there to the next one, forward and backward."""
    if by == "flops":
        return [call.flops + call.backward_flops for call in calls]
    if by == "time":
        return [_seconds(call) if call.alone else 0.0 for call in calls]
    owned: Dict[str, float] = {}
    seen: Set[int] = set()
    for call, names in groups:
        for parameter in (model.get_parameter(name) for name in names):
            owned[call.name] = owned.get(call.name, 0.0) + (parameter.numel() if id(parameter) not in seen else 0)
            seen.add(id(parameter))
    return [owned.get(call.name, 0.0) for call in calls]


def _seconds(call: Call, repeats: int = 3) -> float:
    """Least time of a forward and backward of a copy of the module alone, on the inputs it saw."""
    module = copy.deepcopy(call.module)

    def fresh(x: Any) -> Any:  # no leaf of the graph: the module may work in place
        return x.detach().requires_grad_(x.is_floating_point()).clone() if isinstance(x, torch.Tensor) else x

    best = float("inf")
    for _ in range(repeats):
        inputs, keywords = tree_map(fresh, call.inputs)
        _finish_on_gpu()  # what was asked before is not this module's
        start = time.perf_counter()
        output = module(*inputs, **keywords)
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.sum().backward()
        _finish_on_gpu()
        best = min(best, time.perf_counter() - start)
    return best


def _finish_on_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
