"""Weights in bfloat16 with float32 masters: passes read the weights, the optimizer changes the masters.

    backward    a weight's gradient, bfloat16, is added to its master's, float32 (`collect`)
    update      the optimizer and the rules change the masters; the weights become their roundings (`write`)
    reading     a corrected version is the rounding of what its correction makes of the masters

BatchNorm stays in float32, weights and running statistics: its weights are their own masters. Other buffers become bfloat16.
"""

from __future__ import annotations

import contextlib
from typing import Dict, Iterable, Iterator, List, Tuple

import torch
from torch import nn

LOW = torch.bfloat16


class Masters:
    """Those of a model, whose weights are rounded here."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        norms = [module.float() for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        own = {id(t) for norm in norms for t in [*norm.parameters(), *norm.buffers()]}
        model.to(device)
        self._of: Dict[nn.Parameter, nn.Parameter] = {}
        for weight in model.parameters():
            if weight.is_floating_point() and id(weight) not in own:
                self._of[weight] = nn.Parameter(weight.detach().float(), weight.requires_grad)
                weight.data = weight.data.to(LOW)
        for module in model.modules():
            if not any(module is norm for norm in norms):
                for name, buffer in module._buffers.items():
                    if buffer is not None and buffer.is_floating_point():
                        module._buffers[name] = buffer.to(LOW)

    def of(self, weight: nn.Parameter) -> nn.Parameter:
        """The master of a weight; itself where it has none."""
        return self._of.get(weight, weight)

    def pairs(self, masters: Iterable[nn.Parameter]) -> List[Tuple[nn.Parameter, nn.Parameter]]:
        """(weight, master) of those of `masters` that are not the weights themselves."""
        weights = {id(master): weight for weight, master in self._of.items()}
        return [(weights[id(master)], master) for master in masters if id(master) in weights]

    @contextlib.contextmanager
    def in_place(self, loads: bool = False) -> Iterator[None]:
        """Inside, the model holds its masters; then their roundings again, new ones where it `loads` something."""
        homes = [weight.data for weight in self._of]
        try:
            for weight, master in self._of.items():
                weight.data = master.data
            yield
        finally:
            for (weight, master), home in zip(self._of.items(), homes):
                if loads:
                    master.data = weight.data  # another one may have been put in its place
                weight.data = master.data.to(LOW) if loads else home

    def take_over(self) -> None:
        """The model holds its masters from now on."""
        for weight, master in self._of.items():
            weight.grad = None
            weight.data = master.data


Pairs = List[Tuple[nn.Parameter, nn.Parameter]]


def collect(pairs: Pairs) -> None:
    """After a backward: the weights' gradients are their masters', added to those that are there."""
    for weight, master in pairs:
        if weight.grad is not None:
            if master.grad is None:
                master.grad = weight.grad.float()
            else:
                master.grad += weight.grad
            weight.grad = None


def write(pairs: Pairs) -> None:
    """After an update: the weights are their masters' roundings."""
    for weight, master in pairs:
        weight.data.copy_(master.data)
