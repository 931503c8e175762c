"""The model on the host while its newest weights are on other devices: between two calls nobody may
read old numbers, or write where nothing looks.

    in a call        the engine fills the weights' memory and reads it
    between calls    a weight is one NaN, expanded to its shape: reads find NaN, and torch refuses
                     to write memory that several elements share
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

REMEDY = (
    "the newest weights are not all in this process: use pipe.state_dict(), or "
    "`with pipe.whole_model() as model: ...`"
)


class AbsentWeights:
    """The weights of a model, hidden between calls once `arm` has said which."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tensors: list[torch.Tensor] = []
        self._memory: list[torch.Tensor] = []
        # what stands in for each, between calls
        self._absent: list[torch.Tensor] = []
        # calls inside one another, such as a prediction inside `whole_model`
        self._depth = 0
        self._hooks: list[Any] = []

    def arm(self, hides_memory: bool) -> None:
        """Refuse `model.state_dict()` between calls from now on.

        `hides_memory`: replace weights and buffers by NaN, too; processes hide the weights of other
        ranks themselves.
        """
        tensors = [*self._model.parameters(), *self._model.buffers()] if hides_memory else []
        # whole numbers have no NaN
        self._tensors = [t for t in tensors if t.is_floating_point() and t.numel()]
        self._absent = [_make_absent(tensor) for tensor in self._tensors]
        count = len(list(self._model.parameters()))
        # a module inside that has all parameters is the caller's model, too: Trainer's, within its loss
        self._hooks = [
            module.register_state_dict_pre_hook(self._refuse_state_dict)
            for module in self._model.modules()
            if len(list(module.parameters())) == count
        ]

    def _refuse_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not self._depth:
            raise RuntimeError(f"model.state_dict(): {REMEDY}")

    def show(self) -> None:
        """Put the memory back, for a call."""
        self._depth += 1
        # a call inside another one finds no memory put away, and changes nothing
        for tensor, memory in zip(self._tensors, self._memory):
            tensor.data = memory
        self._memory = []

    def hide(self) -> None:
        """Hide the weights, at the end of a call."""
        self._depth -= 1
        if self._depth:
            return
        # read anew: a call may have given a weight other memory
        self._memory = [tensor.data for tensor in self._tensors]
        for tensor, absent in zip(self._tensors, self._absent):
            tensor.data = absent

    def end(self) -> None:
        """Give the memory back for good."""
        self.show()
        self._tensors = []
        self.hide()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _make_absent(tensor: torch.Tensor) -> torch.Tensor:
    nan = torch.full((), float("nan"), dtype=tensor.dtype, device=tensor.device)
    return nan.expand(tensor.shape)
