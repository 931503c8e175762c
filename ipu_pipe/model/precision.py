"""The number types that a run computes in: what it makes of a model, and how the model is given back.

    float32, float64, bfloat16   all of the model is of that type
    bfloat16_mixed               weights stay float32; the model's forward and the loss run under autocast
    bfloat16_masters             weights are bfloat16, with float32 masters (`ipu_pipe.model.masters`)

Autocast lies around the model's own `forward` and the loss, whoever calls them, and so around no backward. Losses are float32.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, ContextManager, Dict, List, Optional, Tuple

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ipu_pipe.model.autocast import cast, region, uncast
from ipu_pipe.model.masters import LOW, Masters
from ipu_pipe.model.outputs import OfOutput, OwnLoss
from ipu_pipe.model.probe import Loss


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
        return sorted(_name(own) for own in held)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).partition(".")[2]


class LossInFloat32:
    """A loss `each` that is a float32 number. `device`: under autocast there; else of the outputs in float32."""

    def __init__(self, each: Callable[..., torch.Tensor], device: Optional[str]) -> None:
        self.each, self._device = each, device

    def __call__(self, output: Any, y: Any, **asked: Any) -> torch.Tensor:
        if self._device is None:
            return self.each(tree_map(_widened, output), y, **asked).float()
        with region(self._device):
            return self.each(output, y, **asked).float()


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype is LOW else value


def plain_loss(loss: Any) -> Any:
    """The loss that was given."""
    return loss.each if isinstance(loss, LossInFloat32) else loss


class Numbers:
    """A run's, on its model, which is made to compute in them here.

    `row`: of hardware.precision.PRECISIONS; `inputs`: of the model; `labels`: where these are no whole numbers. `is_given`: the
    caller's model, whose own types are remembered.
    """

    def __init__(self, model: nn.Module, row: str, dtype: torch.dtype, device: torch.device, is_given: bool) -> None:
        """`dtype`: of the weights."""
        self.row, self.is_given, self._model, self._dtype = row, is_given, model, dtype
        self._own = OwnTypes(model) if is_given else None
        self.masters: Optional[Masters] = None
        self.inputs = self.labels = dtype
        self._autocast: Optional[str] = None
        try:
            if row == "bfloat16_masters":
                self.labels = torch.float32
                self.masters = Masters(model, device)
            else:
                model.to(device, dtype)
            if row == "bfloat16_mixed" and device.type != "meta":
                self._autocast = device.type
                cast(model, device.type)
        except BaseException:
            self.give_back()
            raise

    def loss(self, loss: Loss) -> Loss:
        """A loss of the model's outputs."""
        if self.row not in ("bfloat16_mixed", "bfloat16_masters") or isinstance(loss, OwnLoss):
            return loss
        if isinstance(loss, OfOutput):
            return OfOutput(LossInFloat32(loss.plain, self._autocast), loss.take, loss.asks)
        return LossInFloat32(loss, self._autocast)

    def whole(self, loads: bool = False) -> ContextManager[None]:
        """Inside, the model's weights are in full, to be saved; `loads`: others are put in."""
        return self.masters.in_place(loads) if self.masters is not None else contextlib.nullcontext()

    def trained(self, weight: nn.Parameter) -> nn.Parameter:
        """What an optimizer of this weight changes."""
        return self.masters.of(weight) if self.masters is not None else weight

    @property
    def record(self) -> Dict[str, Optional[str]]:
        """The types of what passes read and compute in, and of what is updated."""
        masters = "float32" if self.masters is not None else None
        computes = "bfloat16" if self._autocast is not None else None
        return {"weights": _name(self._dtype), "autocast": computes, "masters": masters}

    def others(self) -> List[str]:
        """Dtypes that the caller's model had and does not train in."""
        return self._own.others(self._dtype) if self._own is not None and self.row != "bfloat16_masters" else []

    def give_back(self, keep: bool = False) -> None:
        """The model as it was, with the weights as trained; `keep`: in the types that it was trained in."""
        uncast(self._model)
        if not keep and self.masters is not None:
            self.masters.take_over()
        if not keep and self._own is not None:
            self._own.give_back()
