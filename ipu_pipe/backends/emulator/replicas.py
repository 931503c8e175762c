"""Replicas of a pipeline on one model, one after another."""

from __future__ import annotations

from typing import List, Optional, Sequence

import torch
from torch import nn


class Replicas:
    """What replicas of a pipeline do not share: gradients until they are averaged, and buffers (running statistics), of which
    those of the first are the model's."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], count: int) -> None:
        """`parameters`: those that the optimizer trains."""
        self.count = count
        self._parameters = list(parameters)
        self._gradients: List[List[Optional[torch.Tensor]]] = [[None] * len(self._parameters) for _ in range(count)]
        self._places = [(module, name) for module in model.modules() for name in module._buffers]
        own = [module._buffers[name] for module, name in self._places]
        self._buffers = [own] + [[None if b is None else b.clone() for b in own] for _ in range(count - 1)]

    def enter(self, replica: int) -> None:
        """Put a replica's gradients and buffers into the model."""
        for p, gradient in zip(self._parameters, self._gradients[replica]):
            p.grad = gradient
        self._bind(replica)

    def _bind(self, replica: int) -> None:
        for (module, name), buffer in zip(self._places, self._buffers[replica]):
            module._buffers[name] = buffer

    def leave(self, replica: int) -> None:
        """Take them out again."""
        self._gradients[replica] = [p.grad for p in self._parameters]
        self._buffers[replica] = [module._buffers[name] for module, name in self._places]

    def average(self) -> None:
        """The mean of all gradients into the parameters, the first replica's buffers into the model."""
        for i, p in enumerate(self._parameters):
            given = [g for g in (gradients[i] for gradients in self._gradients) if g is not None]
            total = given[0] if given else None
            for g in given[1:]:
                total = total + g  # type: ignore[operator]
            p.grad = None if total is None else total / self.count
        self._gradients = [[None] * len(self._parameters) for _ in range(self.count)]
        self._bind(0)
