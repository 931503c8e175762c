"""A model whose forward runs under autocast to bfloat16, whoever calls it: the whole model, a piece of it, a head.

One region around a forward, so that a weight is cast once in it, and none around its backward. What runs by shape runs outside:
autocast knows the operations of devices alone.
"""

from __future__ import annotations

import contextlib
import functools
import types
from typing import Any, ContextManager, Iterator

import torch
from torch import nn

_DEVICE = "_ipu_pipe_autocast"  # of a model: that whose operations are cast


def region(device: str) -> ContextManager[Any]:
    """Inside, operations of a kind of device are cast to bfloat16 where PyTorch holds that for safe."""
    return torch.autocast(device, torch.bfloat16)


def is_cast(model: nn.Module) -> bool:
    """Whether its forward is."""
    return _DEVICE in vars(model)


def casting(model: nn.Module) -> ContextManager[Any]:
    """The region of a model's forward, for what runs a part of that; nothing where it has none."""
    return region(vars(model)[_DEVICE]) if is_cast(model) else contextlib.nullcontext()


def cast(model: nn.Module, device: str) -> None:
    """From now on its forward runs so."""
    own = vars(model).get("forward")

    @functools.wraps(type(model).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with casting(self):
            return own(*args, **kwargs) if own is not None else type(self).forward(self, *args, **kwargs)

    forward.own = own  # type: ignore[attr-defined]
    vars(model).update({_DEVICE: device, "forward": types.MethodType(forward, model)})  # a copy's is the copy's


def uncast(model: nn.Module) -> None:
    """Its forward is its own again."""
    if vars(model).pop(_DEVICE, None) is not None:
        own = vars(model).pop("forward").__func__.own
        vars(model).update({} if own is None else {"forward": own})


@contextlib.contextmanager
def uncast_meanwhile(model: nn.Module) -> Iterator[None]:
    """Inside, its forward is its own."""
    device = vars(model).get(_DEVICE)
    uncast(model)
    try:
        yield
    finally:
        if device is not None:
            cast(model, device)
