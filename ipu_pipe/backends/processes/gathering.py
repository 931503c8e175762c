"""The whole weights that FSDP2 gathers for the passes of a stage.

    [1] FSDP2 keeps whole weights after a forward: they are dropped when the next pass reads another
        version, and before an update, so that the next gather finds what is in the shards
    [2] gradients are reduced once an update, in its last backward
    [3] a split backward's W leaves gradients in whole weights, which are reduced after it

Stages without FSDP2 have nothing to gather: every call does nothing.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class Gathering:
    """FSDP2's calls for a stage, whose backwards are `accumulate` for each update."""

    def __init__(self, piece: nn.Module, accumulate: int) -> None:
        # torch 2.0.1 has no such class
        named = [m for m in piece.modules() if type(m).__name__.startswith("FSDP")]
        # another class may have such a name, and lacks the method
        self._modules: list[Any] = [m for m in named if callable(getattr(m, "reshard", None))]
        self._accumulate = accumulate
        self._backwards = 0
        # (version, code) of the weights that are gathered
        self._view: tuple[int, int] | None = None
        for module in self._modules:
            # [1] drops them where it must
            module.set_reshard_after_forward(False)

    def begin_pass(self, version: int, code: int) -> None:
        """Drop the whole weights of another view before a pass. [1]"""
        if self._view != (version, code):
            self.drop()
        self._view = version, code

    def drop(self) -> None:
        """Drop the whole weights: their shards change, or have changed. [1]"""
        self._view = None
        for module in self._modules:
            module.reshard()

    def begin_backward(self) -> None:
        """Let the last backward of an update reduce the gradients. [2]"""
        self._backwards += 1
        is_last = self._backwards == self._accumulate
        if is_last:
            self._backwards = 0
        for module in self._modules:
            module.set_requires_gradient_sync(is_last)
            module.set_is_last_backward(is_last)
            module.set_reshard_after_backward(False)

    def reduce_left(self) -> None:
        """Reduce the gradients that W has left, as PyTorch's pipelines do. [3]"""
        for module in self._modules:
            state = module._get_fsdp_state()
            # the root's callback reduces for all modules under it
            if state._is_root:
                state._root_post_backward_final_callback()
