"""FLOPs of operations by the formulas of PyTorch's counter: matrix products, convolutions and
attention, forward and backward.

A multiplication and an addition count as two. torch 2.0 has no counter. There formulas of layers
are used (`count_by_formula`), which leave out attention and functional calls, count 2 per output
for other modules with weights, and count a backward as twice its forward. `HOW` tells which of the
two counted.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator

import torch
from torch import nn

try:
    from torch.utils.flop_counter import FlopCounterMode
except ImportError:  # torch 2.0
    FlopCounterMode = None  # type: ignore[assignment,misc]

HOW = (
    "counted by PyTorch"
    if FlopCounterMode is not None
    else f"by formulas of linear and convolution layers (torch {torch.__version__} has no "
    f"counter): attention and functional "
    "calls are left out, a backward counts twice its forward"
)
# FLOPs of a backward per FLOP of its forward if they are not counted: the gradients of inputs and
# of weights
BACKWARD = 2.0

Formula = Callable[..., Any]
# an operation that is composed of others on the CPU
LINEAR = "linear"


def get_formulas() -> dict[Any, Formula]:
    """Return operation -> formula of its FLOPs from its arguments and `out_val`, its result; empty
    if this PyTorch has no counter."""
    if FlopCounterMode is None:
        return {}
    return dict(
        FlopCounterMode(display=False, custom_mapping=_list_missing_formulas()).flop_registry
    )


def _list_missing_formulas() -> dict[Any, Formula]:
    """Return the formulas of operations that the counter lacks, and of the gradient of a grouped
    convolution's weights, which it counts too high."""
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    recurrent = "mkldnn_rnn_layer"
    by_name: dict[str, Formula] = {
        attention: _count_attention,
        f"{attention}_backward": _count_attention_backward,
        "convolution_backward": _count_convolution_backward,
        recurrent: _count_recurrent,
        f"{recurrent}_backward": _count_recurrent_backward,
        # undivided on devices with a kernel of their own for them, so that a model would be cut
        # elsewhere than on the CPU
        LINEAR: _count_linear,
        f"{LINEAR}_backward": _count_linear_backward,
    }
    for formula in by_name.values():
        # the counter passes tensors, not shapes, to formulas with this mark
        vars(formula)["_get_raw"] = True
    by_operation = {
        getattr(torch.ops.aten, name, None): formula for name, formula in by_name.items()
    }
    return {
        operation: formula for operation, formula in by_operation.items() if operation is not None
    }


def _count_linear(x: Any, weight: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    """Count the product of inputs (..., n) with a weight (m, n)."""
    return int(2 * out_val.numel() * weight.shape[-1])


def _count_linear_backward(
    x: Any, gradient: Any, weight: Any, needed: Any, *rest: Any, **options: Any
) -> int:
    """Count the products for the gradients of the input and of the weight, as far as `needed`."""
    return int(2 * gradient.numel() * weight.shape[-1] * sum(map(bool, needed[:2])))


def _count_attention(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> int:
    """Count the products with keys and values of query (b, h, n, d), key (b, h, m, d), value (b, h,
    m, e).
    """
    batch, heads, length, width = query.shape
    pairs = batch * heads * length * key.shape[-2]
    return int(2 * pairs * (width + value.shape[-1]))


def _count_attention_backward(
    gradient: Any, query: Any, key: Any, value: Any, *rest: Any, **options: Any
) -> int:
    """Count two products for each of the forward's, and the product with keys once more."""
    batch, heads, length, width = query.shape
    pairs = batch * heads * length * key.shape[-2]
    return int(2 * pairs * (3 * width + 2 * value.shape[-1]))


def _count_convolution_backward(
    gradient: Any, x: Any, weight: Any, *rest: Any, **options: Any
) -> int:
    """Count the forward's products once for the input's gradient and once for the weight's, as the
    mask asks for them.
    """
    # rest: sizes of the bias, stride, padding, dilation, transposed, output padding, groups, mask
    transposed = rest[4]
    mask = options.get("output_mask", rest[-1])
    # weight[0]: the products of one number of the output, of the input if transposed
    return int(
        2
        * (x if transposed else gradient).numel()
        * weight[0].numel()
        * (bool(mask[0]) + bool(mask[1]))
    )


def _count_recurrent(
    x: Any, input_weight: Any, state_weight: Any, *rest: Any, **options: Any
) -> int:
    """Count one layer of an LSTM: x (n, b, i), weights of the input and of the previous state."""
    return int(2 * x.shape[0] * x.shape[1] * (input_weight.numel() + state_weight.numel()))


def _count_recurrent_backward(
    x: Any, input_weight: Any, state_weight: Any, *rest: Any, **options: Any
) -> int:
    """Count two products for each of the forward's."""
    return 2 * _count_recurrent(x, input_weight, state_weight)


@contextlib.contextmanager
def separate_attention() -> Iterator[None]:
    """Turn off the fused attention of layers in evaluation without gradients, which the counter
    does not see.
    """
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
