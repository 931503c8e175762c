"""Blocks and the operations that exist on the IPU only; all of them do nothing, or the plain thing, on the CPU."""

from __future__ import annotations

from typing import Any, Optional

import torch

from poptorch import _trace
from poptorch._errors import make_py_error
from poptorch._signatures import follow_api


class Block:
    """Marks the begin of a block: all following operations belong to it."""

    @staticmethod
    @follow_api("Block.start")
    def start(user_id: Optional[str] = None, ipu_id: Optional[int] = None) -> None:
        if _trace.current is not None:
            _trace.current.begin(user_id, ipu_id)


class _BlockHook:
    def __init__(self, user_id: Optional[str], ipu_id: Optional[int]) -> None:
        self._user_id, self._ipu_id = user_id, ipu_id

    def __call__(self, module: Any, inputs: Any) -> None:
        if _trace.current is not None:
            _trace.current.begin(self._user_id, self._ipu_id)


@follow_api("BeginBlock")
def BeginBlock(
    layer_to_call: torch.nn.Module, user_id: str = None, ipu_id: int = None
) -> torch.nn.Module:
    if any(isinstance(hook, _BlockHook) for hook in layer_to_call._forward_pre_hooks.values()):
        raise make_py_error("module has already been assigned to a block.")
    layer_to_call.register_forward_pre_hook(_BlockHook(user_id, ipu_id))
    return layer_to_call


@follow_api("identity_loss", unchecked=["x", "reduction"])
def identity_loss(x: torch.Tensor, reduction: str) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise make_py_error(f"identity_loss takes a tensor, not {type(x)}")
    if reduction not in ("sum", "mean", "none"):
        raise ValueError(f"Unsupported reduction type: {reduction}: it is sum, mean or none")
    loss = {"sum": torch.sum, "mean": torch.mean, "none": torch.clone}[reduction](x)
    if _trace.current is not None:
        _trace.current.mark_loss("identity_loss", loss)
    return loss
