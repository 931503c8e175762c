"""Lower graphs of ATen operations to functions of jax arrays: one table from operations to
`jax.numpy`.

A function is called while `jax.jit` traces it, so the interpretation of a graph costs nothing in
training. Products have the precision "highest": that of the arrays. Random draws have no entry,
because a compiled program would draw anew from a state of its own (`ipu_pipe.cut.graphs` makes
masks arguments).
"""

from __future__ import annotations

import math
import operator
from typing import Any, Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import fx

from ipu_pipe.cut.graphs import find_module

DTYPES = {
    torch.float32: jnp.float32,
    torch.float64: jnp.float64,
    torch.int64: jnp.int64,
    torch.int32: jnp.int32,
    torch.uint8: jnp.uint8,
    torch.bool: jnp.bool_,
}
# operation -> function of its arguments
TABLE: dict[str, Callable[..., Any]] = {}
PRECISION = "highest"
# the end of a slice that has none
_END = 2**62


def _enter(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function into the table under the names of operations."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        TABLE.update(dict.fromkeys(names, function))
        return function

    return add


def _enter_all(functions: Mapping[str, Callable[..., Any]], *overloads: str) -> None:
    """Enter functions under their operations' names with each of the overloads."""
    for name, function in functions.items():
        _enter(*(f"aten.{name}.{overload}" for overload in overloads))(function)


def _convert(dtype: torch.dtype | None) -> Any:
    return None if dtype is None else DTYPES[dtype]


def _list_axes(x: Any, dims: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """Return dimensions as axes of an array; None for all, which an empty list means too."""
    if dims is None or x.ndim == 0:
        return None
    axes = [dims] if isinstance(dims, int) else dims
    return tuple(axis % x.ndim for axis in axes) or None


# ---- elementwise


def _scale_second(function: Callable[..., Any]) -> Callable[..., Any]:
    def compute(x: Any, y: Any, alpha: float = 1) -> Any:
        return function(x, y if alpha == 1 else y * alpha)

    return compute


_enter_all({"add": _scale_second(jnp.add), "sub": _scale_second(jnp.subtract)}, "Tensor", "Scalar")
_enter_all(
    {
        "mul": jnp.multiply,
        "div": jnp.true_divide,
        "eq": jnp.equal,
        "ne": jnp.not_equal,
        "ge": jnp.greater_equal,
        "gt": jnp.greater,
        "le": jnp.less_equal,
        "lt": jnp.less,
        "bitwise_and": jnp.bitwise_and,
        "bitwise_or": jnp.bitwise_or,
    },
    "Tensor",
    "Scalar",
)


def _raise(x: Any, exponent: Any) -> Any:
    # of -0 and -inf a root differs from the power
    if isinstance(exponent, float) and abs(exponent) == 0.5:
        return jnp.sqrt(x) if exponent > 0 else 1 / jnp.sqrt(x)
    return jnp.power(x, exponent)


_enter_all({"pow": _raise}, "Tensor_Scalar", "Tensor_Tensor", "Scalar")
_enter_all(
    {
        "maximum": jnp.maximum,
        "minimum": jnp.minimum,
        "logical_and": jnp.logical_and,
        "logical_or": jnp.logical_or,
        "logical_not": jnp.logical_not,
        "bitwise_not": jnp.bitwise_not,
        "exp": jnp.exp,
        "log": jnp.log,
        "sqrt": jnp.sqrt,
        "rsqrt": lambda x: 1 / jnp.sqrt(x),
        "neg": jnp.negative,
        "abs": jnp.abs,
        # the sign of NaN is 0
        "sign": lambda x: jnp.where(x != x, 0, jnp.sign(x)),
        "reciprocal": jnp.reciprocal,
        "sin": jnp.sin,
        "cos": jnp.cos,
        "tanh": jnp.tanh,
        "sigmoid": jax.nn.sigmoid,
        "erf": lax.erf,
        "relu": lambda x: jnp.maximum(x, 0),
    },
    "default",
)


@_enter("aten.clamp.default")
def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    return jnp.clip(x, min, max)


@_enter("aten.where.self")
def _where(condition: Any, x: Any, y: Any) -> Any:
    return jnp.where(condition, x, y)


# ---- products


@_enter("aten.mm.default", "aten.bmm.default")
def _multiply(x: Any, y: Any) -> Any:
    return jnp.matmul(x, y, precision=PRECISION)


def _convolve(
    x: Any,
    weight: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Any:
    spatial = "DHW"[5 - weight.ndim :]
    names = (f"NC{spatial}", f"OI{spatial}", f"NC{spatial}")
    return lax.conv_general_dilated(
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


@_enter("aten.convolution.default")
def _convolution(x: Any, weight: Any, bias: Any, *settings: Any) -> Any:
    stride, padding, dilation, _, _, groups = settings
    y = _convolve(x, weight, stride, padding, dilation, groups)
    if bias is None:
        return y
    spatial = (1,) * (weight.ndim - 2)
    return y + bias.reshape(1, -1, *spatial)


@_enter("aten.convolution_backward.default")
def _differentiate_convolution(
    gradient: Any, x: Any, weight: Any, bias_sizes: Any, *settings: Any
) -> tuple[Any, Any, Any]:
    stride, padding, dilation, _, _, groups, mask = settings

    def convolve(x: Any, weight: Any) -> Any:
        return _convolve(x, weight, stride, padding, dilation, groups)

    of_input = of_weight = of_bias = None
    if mask[0]:
        of_input = jax.linear_transpose(lambda x: convolve(x, weight), x)(gradient)[0]
    if mask[1]:
        of_weight = jax.linear_transpose(lambda w: convolve(x, w), weight)(gradient)[0]
    if mask[2]:
        of_bias = jnp.sum(gradient, (0, *range(2, gradient.ndim)))
    return of_input, of_weight, of_bias


# ---- reductions


@_enter("aten.sum.dim_IntList", "aten.sum.default")
def _sum(x: Any, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.int64)
    return jnp.sum(x, _list_axes(x, dims), _convert(dtype), keepdims=keepdim)


@_enter("aten.mean.dim", "aten.mean.default")
def _mean(x: Any, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    return jnp.mean(x, _list_axes(x, dims), _convert(dtype), keepdims=keepdim)


@_enter("aten.amax.default")
def _amax(x: Any, dims: Any = (), keepdim: bool = False) -> Any:
    return jnp.max(x, _list_axes(x, dims), keepdims=keepdim)


@_enter("aten.var_mean.correction")
def _var_mean(
    x: Any, dims: Any = None, correction: float | None = 1, keepdim: bool = False
) -> tuple[Any, Any]:
    axes = _list_axes(x, dims)
    less: Any = 1 if correction is None else correction
    variance = jnp.var(x, axes, ddof=less, keepdims=keepdim)
    return variance, jnp.mean(x, axes, keepdims=keepdim)


@_enter("aten.argmax.default")
def _argmax(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return jnp.argmax(x, dim if x.ndim else None, keepdims=keepdim)


@_enter("aten.any.default", "aten.any.dim", "aten.any.dims")
def _any(x: Any, dims: Any = None, keepdim: bool = False) -> Any:
    # here an empty list means no dimension
    if dims == []:
        return x.astype(jnp.bool_)
    return jnp.any(x, _list_axes(x, dims), keepdims=keepdim)


@_enter("aten.max_pool2d_with_indices.default")
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
        _count_windows(n, *setting, ceil_mode) for n, *setting in zip((height, width), *settings)
    ]
    rows, columns = (
        np.arange(count)[:, None] * s + np.arange(k) * d - p
        for count, k, s, p, d in zip(counts, *settings)
    )
    shape = (*counts, *settings[0])
    row = np.broadcast_to(rows[:, None, :, None], shape).reshape(*counts, -1)
    column = np.broadcast_to(columns[None, :, None, :], shape).reshape(*counts, -1)
    is_inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    row = row.clip(0, height - 1)
    column = column.clip(0, width - 1)
    windows = x[..., row, column]  # (..., H', W', n)
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


@_enter("aten.max_pool2d_with_indices_backward.default")
def _differentiate_max_pool(gradient: Any, x: Any, *settings: Any) -> Any:
    images = math.prod(x.shape[:-2])
    flat = jnp.zeros((images, x.shape[-2] * x.shape[-1]), gradient.dtype)
    places = settings[-1].reshape(images, math.prod(gradient.shape[-2:]))
    at = flat.at[np.arange(images)[:, None], places]
    return at.add(gradient.reshape(places.shape)).reshape(x.shape)


# ---- shapes

_enter_all(
    {
        "clone": lambda x, memory_format=None: x,
        "alias": lambda x: x,
        "detach": lambda x: x,
        "lift_fresh_copy": lambda x: x,
        "view": jnp.reshape,
        "_unsafe_view": jnp.reshape,
        "reshape": jnp.reshape,
        "permute": jnp.transpose,
    },
    "default",
)


@_enter("aten.transpose.int")
def _transpose(x: Any, first: int, second: int) -> Any:
    return jnp.swapaxes(x, first, second)


@_enter("aten.unsqueeze.default")
def _unsqueeze(x: Any, dim: int) -> Any:
    return jnp.expand_dims(x, dim)


@_enter("aten.squeeze.dim", "aten.squeeze.dims")
def _squeeze(x: Any, dims: Any) -> Any:
    axes = _list_axes(x, dims) or ()
    return jnp.squeeze(x, tuple(axis for axis in axes if x.shape[axis] == 1))


@_enter("aten.expand.default")
def _expand(x: Any, sizes: Sequence[int], implicit: bool = False) -> Any:
    added = len(sizes) - x.ndim
    shape = [x.shape[i - added] if size == -1 else size for i, size in enumerate(sizes)]
    return jnp.broadcast_to(x, shape)


def _slice_at(x: Any, dim: int, start: Any, end: Any, step: int) -> tuple[slice, ...]:
    index = [slice(None)] * x.ndim
    index[dim] = slice(start, None if end is None or end >= _END else end, step)
    return tuple(index)


@_enter("aten.slice.Tensor")
def _slice(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return x[_slice_at(x, dim, start, end, step)]


@_enter("aten.slice_scatter.default")
def _slice_scatter(
    x: Any, y: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    return x.at[_slice_at(x, dim, start, end, step)].set(y)


@_enter("aten.select.int")
def _select(x: Any, dim: int, index: int) -> Any:
    return lax.index_in_dim(x, index, dim, keepdims=False)


@_enter("aten.select_scatter.default")
def _select_scatter(x: Any, y: Any, dim: int, index: int) -> Any:
    at: list[Any] = [slice(None)] * x.ndim
    at[dim] = index
    return x.at[tuple(at)].set(y)


@_enter("aten.split.Tensor")
def _split(x: Any, size: int, dim: int = 0) -> list[Any]:
    count = x.shape[dim]
    return [
        lax.slice_in_dim(x, first, min(first + size, count), axis=dim)
        for first in range(0, max(count, 1), size)
    ]


@_enter("aten.split_with_sizes.default")
def _split_with_sizes(x: Any, sizes: Sequence[int], dim: int = 0) -> list[Any]:
    ends = np.cumsum(sizes).tolist()
    return list(jnp.split(x, ends[:-1], axis=dim))


@_enter("aten.cat.default")
def _cat(parts: Sequence[Any], dim: int = 0) -> Any:
    # tensors of this shape alone may differ in their dimensions
    return jnp.concatenate([part for part in parts if part.shape != (0,)], dim)


@_enter("aten.constant_pad_nd.default")
def _pad(x: Any, pads: Sequence[int], value: float = 0) -> Any:
    widths = [(0, 0)] * (x.ndim - len(pads) // 2)
    widths += [(pads[i], pads[i + 1]) for i in range(len(pads) - 2, -1, -2)]
    fill = jnp.asarray(value, x.dtype)
    return lax.pad(x, fill, [(low, high, 0) for low, high in widths])


# ---- constants and types


@_enter("aten._to_copy.default")
def _to_copy(x: Any, dtype: Any = None, **others: Any) -> Any:
    return x if dtype is None else x.astype(_convert(dtype))


@_enter("prims.convert_element_type.default")
def _convert_element_type(x: Any, dtype: torch.dtype) -> Any:
    return x.astype(_convert(dtype))


@_enter("aten.full.default")
def _full(shape: Sequence[int], value: Any, dtype: Any = None, **others: Any) -> Any:
    return jnp.full(shape, value, _convert(dtype))


@_enter("aten.full_like.default")
def _full_like(x: Any, value: Any, dtype: Any = None, **others: Any) -> Any:
    return jnp.full(x.shape, value, _convert(dtype) or x.dtype)


@_enter("aten.zeros_like.default")
def _zeros_like(x: Any, dtype: Any = None, **others: Any) -> Any:
    return jnp.zeros(x.shape, _convert(dtype) or x.dtype)


@_enter("aten.scalar_tensor.default")
def _scalar_tensor(value: Any, dtype: Any = None, **others: Any) -> Any:
    return jnp.asarray(value, _convert(dtype))


@_enter("aten.arange.start_step")
def _arange(start: Any, end: Any, step: Any = 1, dtype: Any = None, **others: Any) -> Any:
    return jnp.arange(start, end, step, _convert(dtype))


@_enter("prims.iota.default")
def _iota(length: int, start: int = 0, step: int = 1, dtype: Any = None, **others: Any) -> Any:
    return start + step * jnp.arange(length, dtype=_convert(dtype))


# ---- indices


@_enter("aten.embedding.default")
def _embed(weight: Any, indices: Any, *others: Any) -> Any:
    return weight[indices]


def _index_along(dim: int, indices: Any) -> tuple[Any, ...]:
    """Return the place of each of the indices: they may cover a part of the other dimensions."""
    places: list[Any] = list(np.ogrid[tuple(slice(n) for n in indices.shape)])
    places[dim] = indices
    return tuple(places)


@_enter("aten.gather.default")
def _gather(x: Any, dim: int, indices: Any, sparse_grad: bool = False) -> Any:
    return x.at[_index_along(dim, indices)].get(mode="fill")


@_enter("aten.scatter.value")
def _scatter(x: Any, dim: int, indices: Any, value: Any) -> Any:
    return x.at[_index_along(dim, indices)].set(value)


def _index_at(indices: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(slice(None) if index is None else index for index in indices)


@_enter("aten.index.Tensor", "aten._unsafe_index.Tensor")
def _index(x: Any, indices: Sequence[Any]) -> Any:
    return x[_index_at(indices)]


@_enter("aten.index_put.default", "aten._unsafe_index_put.default")
def _index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    if indices[-1].dtype == jnp.bool_:
        # of one number, `list_missing` refuses others
        mask = indices[-1]
        behind = x.ndim - (len(indices) - 1) - mask.ndim
        mask = mask.reshape(mask.shape + (1,) * behind)
        return jnp.where(mask, x + values if accumulate else values, x)
    at = x.at[_index_at(indices)]
    return at.add(values) if accumulate else at.set(values)


# ---- graphs


def list_missing(graph: fx.GraphModule) -> list[str]:
    """List the operations of a graph that cannot be lowered, with the module that made each."""
    missing = []
    for node in graph.graph.nodes:
        fault = _find_fault(node)
        if fault is not None:
            missing.append(f"{find_module(node)} ({fault}{node.target})")
    return list(dict.fromkeys(missing))


def _find_fault(node: fx.Node) -> str | None:
    """Return the reason that an operation cannot be lowered, '' if it is unknown, None if it can
    be.
    """
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.dtype not in DTYPES:
        return f"{value.dtype} "
    if node.op != "call_function" or node.target is operator.getitem:
        return None
    name = str(node.target)
    if name not in TABLE:
        return ""
    if name.startswith("aten.convolution") and node.args[-4 + ("backward" not in name)] is True:
        return "transposed "
    if "index" in name and _reads_mask(node):
        return "truth values in "
    return None


def _reads_mask(node: fx.Node) -> bool:
    """Return whether an operation has truth values as indices, and is not a write of one number."""
    indices: Any = node.args[1]
    *others, last = [None if index is None else index.meta["val"].dtype for index in indices]
    masks = (torch.bool, torch.uint8)
    if last == torch.bool and not any(others) and len(node.args) > 2:
        values: Any = node.args[2]
        return values.meta["val"].ndim > 0
    return last in masks or any(dtype in masks for dtype in others)


def lower(graph: fx.GraphModule) -> Callable[..., list[Any]]:
    """Return the function of jax arrays that a graph describes; None among its results stays."""
    nodes = list(graph.graph.nodes)
    constants = {
        node: np.asarray(getattr(graph, node.target).detach())
        for node in nodes
        if node.op == "get_attr"
    }

    def run(*arguments: Any) -> list[Any]:
        values: dict[fx.Node, Any] = {node: jnp.asarray(x) for node, x in constants.items()}
        rest = iter(arguments)
        for node in nodes:
            if node.op == "placeholder":
                values[node] = next(rest)
            elif node.op == "call_function":
                args, keywords = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = _call(node, args, keywords)
        return list(fx.node.map_arg(nodes[-1].args[0], values.__getitem__))

    return run


def _call(node: fx.Node, args: Any, keywords: Any) -> Any:
    if node.target is operator.getitem:
        result = args[0][args[1]]
    else:
        result = TABLE[str(node.target)](*args, **keywords)
    value = node.meta.get("val")
    # torch and jax promote types by different rules
    return result.astype(DTYPES[value.dtype]) if isinstance(value, torch.Tensor) else result
