"""Convolutions and pools as functions of jax arrays."""

from __future__ import annotations

import math
from typing import Any, Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipu_pipe.backends.xla.operations import PRECISION

# ---- convolutions


def _convolve(
    x: Any,
    weight: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    sizes: Sequence[int | None],
) -> Any:
    """Return the first `sizes` outputs in each dimension of a convolution."""
    spatial = "DHW"[5 - weight.ndim :]
    names = (f"NC{spatial}", f"OI{spatial}", f"NC{spatial}")
    output = lax.conv_general_dilated(
        x,
        weight,
        tuple(stride),
        [(p, p) for p in padding],
        None,
        tuple(dilation),
        names,
        groups,
        precision=PRECISION,
    )
    # an output padding beyond the stride makes room for more
    inside: Any = (..., *map(slice, sizes))
    return output[inside]


def _spread(weight: Any, settings: Sequence[Any]) -> list[Sequence[int]]:
    """Return settings with a number for each dimension: one may stand for all."""
    return [list(one) * (1 if len(one) > 1 else weight.ndim - 2) for one in settings]


def _convolution(x: Any, weight: Any, bias: Any, *settings: Any) -> Any:
    *windows, is_transposed, added, groups = settings
    stride, padding, dilation, added = _spread(weight, [*windows, added])

    def convolve(y: Any) -> Any:
        sizes = x.shape[2:] if is_transposed else (None,) * (weight.ndim - 2)
        return _convolve(y, weight, stride, padding, dilation, groups, sizes)

    if is_transposed:
        sizes = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, added)
        # as torch defines the output of a transposed convolution; `a` is output_padding
        shape = [(n - 1) * s - 2 * p + d * (k - 1) + a + 1 for n, k, s, p, d, a in sizes]
        channels = weight.shape[1] * groups
        y = jnp.zeros((x.shape[0], channels, *shape), x.dtype)
        # a transposed convolution is the transpose of a convolution as a linear map of its input
        y = jax.linear_transpose(convolve, y)(x)[0]
    else:
        y = convolve(x)
    if bias is None:
        return y
    spatial = (1,) * (weight.ndim - 2)
    return y + bias.reshape(1, -1, *spatial)


def _differentiate_convolution(
    gradient: Any, x: Any, weight: Any, bias_sizes: Any, *settings: Any
) -> tuple[Any, Any, Any]:
    *windows, is_transposed, _, groups, mask = settings
    stride, padding, dilation = _spread(weight, windows)
    # a transposed convolution goes from the outputs of a convolution to its inputs
    x, y = (gradient, x) if is_transposed else (x, gradient)

    def convolve(x: Any, weight: Any) -> Any:
        return _convolve(x, weight, stride, padding, dilation, groups, y.shape[2:])

    of_input = of_weight = of_bias = None
    if mask[0] and is_transposed:
        # the gradient of the transpose of a map is the map itself
        of_input = convolve(x, weight)
    elif mask[0]:
        of_input = jax.linear_transpose(lambda x: convolve(x, weight), x)(y)[0]
    if mask[1]:
        of_weight = jax.linear_transpose(lambda w: convolve(x, w), weight)(y)[0]
    if mask[2]:
        of_bias = jnp.sum(gradient, (0, *range(2, gradient.ndim)))
    return of_input, of_weight, of_bias


# ---- pools


def _max_pool(
    x: Any,
    size: Any,
    stride: Any = (),
    padding: Any = (0, 0),
    dilation: Any = (1, 1),
    ceil_mode: bool = False,
) -> tuple[Any, Any]:
    """Return the maxima and their indices in the flattened image; the first maximum counts."""
    height, width = x.shape[-2:]
    settings = [(setting[0], setting[-1]) for setting in (size, stride or size, padding, dilation)]
    counts = [
        _count_windows(n, k, s, p, d, ceil_mode) for n, k, s, p, d in zip(x.shape[-2:], *settings)
    ]
    # the rows and columns that windows read, (H', k) and (W', k), in the padding too
    rows, columns = (
        np.arange(count)[:, None] * s + np.arange(k) * d - p
        for count, k, s, p, d in zip(counts, *settings)
    )
    shape = (*counts, *settings[0])
    row = np.broadcast_to(rows[:, None, :, None], shape).reshape(*counts, -1)
    column = np.broadcast_to(columns[None, :, None, :], shape).reshape(*counts, -1)
    is_inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    # places in the padding read the edge, and are masked below
    row = row.clip(0, height - 1)
    column = column.clip(0, width - 1)
    windows = x[..., row, column]  # (..., H', W', n)
    # padding is never the maximum, as in torch
    best = jnp.argmax(jnp.where(is_inside, windows, -jnp.inf), axis=-1, keepdims=True)
    places = jnp.broadcast_to(row * width + column, windows.shape)
    return (
        jnp.take_along_axis(windows, best, -1)[..., 0],
        jnp.take_along_axis(places, best, -1)[..., 0],
    )


def _count_windows(
    n: int, size: int, stride: int, padding: int, dilation: int, ceil_mode: bool
) -> int:
    """Return the number of windows along a dimension of n elements."""
    rest = n + 2 * padding - dilation * (size - 1) - 1
    if not ceil_mode:
        return rest // stride + 1
    count = -(-rest // stride) + 1
    # a window that begins in the padding behind the image does not count
    return count - ((count - 1) * stride >= n + padding)


def _differentiate_max_pool(gradient: Any, x: Any, *settings: Any) -> Any:
    images = math.prod(x.shape[:-2])
    flat = jnp.zeros((images, x.shape[-2] * x.shape[-1]), gradient.dtype)
    places = settings[-1].reshape(images, math.prod(gradient.shape[-2:]))
    # windows overlap, so that several gradients may fall on one place
    at = flat.at[np.arange(images)[:, None], places]
    return at.add(gradient.reshape(places.shape)).reshape(x.shape)


def _average_pool(
    x: Any,
    size: Any,
    stride: Any = (),
    padding: Any = (0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> Any:
    pads = [(0, 0, 0)] * (x.ndim - 2)
    # batch and channels are not pooled
    strides = [1] * (x.ndim - 2)
    lengths = []
    for i, n in zip((0, -1), x.shape[-2:]):
        k, s, p = size[i], (stride or size)[i], padding[i]
        count = _count_windows(n, k, s, p, 1, ceil_mode)
        # negative where a stride leaves out the last elements, which `lax.pad` then cuts off
        pads.append((p, (count - 1) * s + k - n - p, 0))
        strides.append(s)
        begins = np.arange(count) * s - p
        # torch counts the padding, but not what ceil_mode adds behind it
        ends = np.minimum(begins + k, n + p)
        if not count_include_pad:
            begins, ends = begins.clip(0), ends.clip(None, n)
        lengths.append(ends - begins)
    window = [1] * (x.ndim - 2) + [size[0], size[-1]]
    padded = lax.pad(x, jnp.zeros((), x.dtype), pads)
    sums = lax.reduce_window(padded, 0.0, lax.add, window, strides, "VALID")
    counts = np.outer(*lengths) if divisor is None else divisor
    return sums / jnp.asarray(counts, x.dtype)


def _adaptive_average_pool(x: Any, sizes: Sequence[int]) -> Any:
    """Average windows of unequal sizes, which a matrix for each dimension does."""
    parts = [_average_parts(n, count) for n, count in zip(x.shape[-2:], sizes)]
    matrices = [jnp.asarray(part, x.dtype) for part in parts]
    return jnp.einsum("...hw,ih,jw->...ij", x, *matrices, precision=PRECISION)


def _average_parts(n: int, count: int) -> np.ndarray:
    """Return a matrix (count, n) whose rows average parts of n elements, as torch divides them."""
    parts = np.arange(count)
    begins = parts * n // count
    ends = -(-(parts + 1) * n // count)
    places = np.arange(n)
    is_inside = (places >= begins[:, None]) & (places < ends[:, None])
    return is_inside / (ends - begins)[:, None]


def _differentiate_average_pool(gradient: Any, x: Any, *settings: Any) -> Any:
    return jax.linear_transpose(lambda x: _average_pool(x, *settings), x)(gradient)[0]


def _differentiate_adaptive_average_pool(gradient: Any, x: Any) -> Any:
    sizes = gradient.shape[-2:]
    return jax.linear_transpose(lambda x: _adaptive_average_pool(x, sizes), x)(gradient)[0]


# operation -> function of its arguments
WINDOWS: dict[str, Callable[..., Any]] = {
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _differentiate_convolution,
    "aten.max_pool2d_with_indices.default": _max_pool,
    "aten.max_pool2d_with_indices_backward.default": _differentiate_max_pool,
    "aten.avg_pool2d.default": _average_pool,
    "aten.avg_pool2d_backward.default": _differentiate_average_pool,
    "aten._adaptive_avg_pool2d.default": _adaptive_average_pool,
    "aten._adaptive_avg_pool2d_backward.default": _differentiate_adaptive_average_pool,
}
