"""FLOPs of operations by the formulas of PyTorch's own counter: matrix products, convolutions and attention, also those that are
called as functions, forward and backward. A multiplication and an addition are two.

torch 2.0 has no counter: there the layers' own formulas are taken (`by_formula`), which leave out attention and functional calls
and count 2 an output for other modules with weights, and a backward counts twice its forward. `HOW` says which.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator

import torch
from torch import nn

try:
    from torch.utils.flop_counter import FlopCounterMode
except ImportError:  # torch 2.0
    FlopCounterMode = None  # type: ignore[assignment,misc]

HOW = (
    "counted by PyTorch"
    if FlopCounterMode is not None
    else f"by formulas of linear and convolution layers (torch {torch.__version__} has no counter): attention and functional "
    "calls are left out, a backward counts twice its forward"
)
BACKWARD = (
    2.0  # FLOPs of a backward for each of its forward, where they are not counted: gradients of inputs and of weights
)

Formula = Callable[..., Any]


def get_formulas() -> Dict[Any, Formula]:
    """Return operation -> formula of its FLOPs from its arguments and `out_val`, its result; empty if this PyTorch has no
    counter."""
    if FlopCounterMode is None:
        return {}
    return dict(FlopCounterMode(display=False, custom_mapping=_uncounted()).flop_registry)


def _uncounted() -> Dict[Any, Formula]:
    """Return formulas of CPU operations that the counter does not know, and of one that it counts too high: the gradient of
    a convolution's weights in groups."""
    attention, recurrent = "_scaled_dot_product_flash_attention_for_cpu", "mkldnn_rnn_layer"
    by_name: Dict[str, Formula] = {
        attention: _attention,
        f"{attention}_backward": _attention_backward,
        "convolution_backward": _convolution_backward,
        recurrent: _recurrent,
        f"{recurrent}_backward": _recurrent_backward,
    }
    by_operation = {getattr(torch.ops.aten, name, None): formula for name, formula in by_name.items()}
    return {operation: formula for operation, formula in by_operation.items() if operation is not None}


def _attention(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> int:
    """Count the products with keys and with values: query (b, h, n, d), key (b, h, m, d), value (b, h, m, e)."""
    batch, heads, length, width = query.shape
    return int(2 * batch * heads * length * key.shape[-2] * (width + value.shape[-1]))


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> int:
    """Count the products with keys once more, and two for each of the forward's."""
    batch, heads, length, width = query.shape
    return int(2 * batch * heads * length * key.shape[-2] * (3 * width + 2 * value.shape[-1]))


def _convolution_backward(gradient: Any, x: Any, weight: Any, *rest: Any, **options: Any) -> int:
    """Count as many products for the input's gradient as in the forward, and for the weight's; the mask says which are
    wanted."""
    transposed, mask = rest[4], options.get("output_mask", rest[-1])
    return int(2 * (x if transposed else gradient).numel() * weight[0].numel() * (bool(mask[0]) + bool(mask[1])))


def _recurrent(x: Any, into: Any, again: Any, *rest: Any, **options: Any) -> int:
    """Count one layer of an LSTM: x (n, b, i), weights from the input and from the previous state."""
    return int(2 * x.shape[0] * x.shape[1] * (into.numel() + again.numel()))


def _recurrent_backward(x: Any, into: Any, again: Any, *rest: Any, **options: Any) -> int:
    """Count two products for each of the forward's."""
    return 2 * _recurrent(x, into, again)


for _formula in (_attention, _attention_backward, _convolution_backward, _recurrent, _recurrent_backward):
    vars(_formula)["_get_raw"] = True  # they take tensors, not shapes


@contextlib.contextmanager
def separate_attention() -> Iterator[None]:
    """Turn off the fused attention that layers take in evaluation without gradients: the counter sees nothing of it."""
    switches = getattr(torch.backends, "mha", None)
    if switches is None:
        # modules do not take their fast path when gradients are enabled
        with torch.enable_grad():
            yield
        return
    was_enabled = switches.get_fastpath_enabled()
    switches.set_fastpath_enabled(False)
    try:
        yield
    finally:
        switches.set_fastpath_enabled(was_enabled)


def count_by_formula(module: nn.Module, inputs: Any, output: Any) -> float:
    """Return the forward FLOPs of the module's own parameters."""
    weight = getattr(module, "weight", None)
    if not isinstance(output, torch.Tensor) or not isinstance(weight, torch.Tensor):
        return 0.0
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return 2.0 * output.numel() * weight[0].numel()
    if isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        return 2.0 * inputs[0].numel() * weight[0].numel()
    if isinstance(module, nn.Linear):
        return 2.0 * output.numel() * weight.shape[1]
    return 0.0 if isinstance(module, nn.Embedding) else 2.0 * output.numel()
