"""The number types of a caller's own model: a run casts it, and gives them back at the end."""

from __future__ import annotations

from typing import Dict, List, Tuple

import torch
from torch import nn


class OwnTypes:
    """The dtypes that a model's parameters and buffers have now."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [(p, p.dtype) for p in model.parameters() if p.is_floating_point()]
        self._buffers: List[Tuple[nn.Module, Dict[str, torch.dtype]]] = [
            (module, {name: b.dtype for name, b in module._buffers.items() if b is not None and b.is_floating_point()})
            for module in model.modules()
        ]

    def give_back(self) -> None:
        """Cast them back in place, values as trained; gradients of another dtype go."""
        for parameter, dtype in self._parameters:
            if parameter.dtype != dtype:
                parameter.grad = None
                parameter.data = parameter.data.to(dtype)
        for module, dtypes in self._buffers:
            for name, dtype in dtypes.items():
                buffer = module._buffers.get(name)
                if buffer is not None:
                    module._buffers[name] = buffer.to(dtype)

    def others(self, dtype: torch.dtype) -> List[str]:
        """Names of the dtypes other than `dtype`, such as float32."""
        held = {own for _, own in self._parameters} - {dtype}
        return sorted(str(own).partition(".")[2] for own in held)
