"""Buffers (running statistics) where a replay is of one stage: they move with the replays that update their own stage."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

import torch
from torch import nn

from ipu_pipe.job.user_code import StageWatch


class BuffersOfOneStage:
    """Puts the buffers of all other stages back, as soon as the module that holds them has run in training.

    A forward of the whole model would move the statistics of each stage P times as often as the pipeline it stands for.
    `stage`: that which the next forward is of.
    """

    def __init__(self, model: nn.Module, watch: StageWatch) -> None:
        self.stage, self._watch = 0, watch
        self._held: Dict[nn.Module, List[Any]] = {}
        self._hooks: List[Any] = []
        for module in model.modules():
            if module._buffers:
                self._hooks.append(module.register_forward_pre_hook(self._before))
                self._hooks.append(module.register_forward_hook(self._after))

    def _before(self, module: nn.Module, inputs: Any) -> None:
        if module.training and self._watch.stage != self.stage:
            self._held[module] = [(name, b, _copy(b)) for name, b in module._buffers.items()]

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        for name, buffer, value in self._held.pop(module, ()):
            module._buffers[name] = buffer
            if buffer is not None:
                buffer.data.copy_(value)

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()


def _copy(buffer: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    return None if buffer is None else buffer.detach().clone()
