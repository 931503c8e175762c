"""Lower graphs of ATen operations to functions of jax arrays: one table from operations to
`jax.numpy`.

A function is called while `jax.jit` traces it, so the interpretation of a graph costs nothing in
training. Products have the precision "highest": that of the arrays. Random draws have no entry,
because a compiled program would draw anew from a state of its own (`ipu_pipe.cut.graphs` makes
masks arguments).
"""

from __future__ import annotations

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
    if dims is None:
        return None
    axes = [dims] if isinstance(dims, int) else dims
    return tuple(axis % max(x.ndim, 1) for axis in axes) or None


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
_enter_all({"pow": jnp.power}, "Tensor_Scalar", "Tensor_Tensor", "Scalar")
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
        "sign": jnp.sign,
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
def _clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    return jnp.clip(x, low, high)


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
    names = ("NCHW", "OIHW", "NCHW") if weight.ndim == 4 else ("NCH", "OIH", "NCH")
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
    variance = jnp.var(x, axes, ddof=int(1 if correction is None else correction), keepdims=keepdim)
    return variance, jnp.mean(x, axes, keepdims=keepdim)


@_enter("aten.argmax.default")
def _argmax(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return jnp.argmax(x, dim, keepdims=keepdim)


@_enter("aten.any.default", "aten.any.dim", "aten.any.dims")
def _any(x: Any, dims: Any = None, keepdim: bool = False) -> Any:
    return jnp.any(x, _list_axes(x, dims), keepdims=keepdim)


@_enter("aten.max_pool2d_with_indices.default")
def _max_pool(
    x: Any, size: Any, stride: Any = (), padding: Any = (0, 0), *others: Any
) -> tuple[Any, Any]:
    """Return the maxima and their indices in the flattened image; the first maximum counts."""
    windows, places = _list_windows(x, size, stride or size, padding)
    best = jnp.argmax(windows, axis=-1, keepdims=True)
    places = jnp.broadcast_to(places, windows.shape)
    return (
        jnp.take_along_axis(windows, best, -1)[..., 0],
        jnp.take_along_axis(places, best, -1)[..., 0],
    )


def _list_windows(x: Any, size: Any, stride: Any, padding: Any) -> tuple[Any, Any]:
    """Return the elements of each window, (B, C, H', W', n), -inf outside the image, and their
    indices in it, (H', W', n).
    """
    sizes = [size[0], size[-1]]
    strides = [stride[0], stride[-1]]
    pads = [padding[0], padding[-1]]
    counts = [(n + 2 * p - k) // s + 1 for n, k, s, p in zip(x.shape[-2:], sizes, strides, pads)]
    rows, columns = (
        np.arange(count)[:, None] * s + np.arange(k) - p
        for count, s, k, p in zip(counts, strides, sizes, pads)
    )
    row = np.broadcast_to(rows[:, None, :, None], (*counts, *sizes)).reshape(*counts, -1)
    column = np.broadcast_to(columns[None, :, None, :], (*counts, *sizes)).reshape(*counts, -1)
    height, width = x.shape[-2:]
    is_inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    windows = x[..., row.clip(0, height - 1), column.clip(0, width - 1)]
    return jnp.where(is_inside, windows, -jnp.inf), row * width + column


@_enter("aten.max_pool2d_with_indices_backward.default")
def _differentiate_max_pool(gradient: Any, x: Any, *settings: Any) -> Any:
    places = settings[-1]
    positions = x.shape[-2] * x.shape[-1]
    flat = jnp.zeros((*x.shape[:-2], positions), gradient.dtype)
    batch, channel = np.ogrid[: x.shape[0], : x.shape[1]]
    place = places.reshape(*x.shape[:2], -1)
    at = flat.at[batch[..., None], channel[..., None], place]
    return at.add(gradient.reshape(*x.shape[:2], -1)).reshape(x.shape)


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
        for first in range(0, count, size)
    ]


@_enter("aten.split_with_sizes.default")
def _split_with_sizes(x: Any, sizes: Sequence[int], dim: int = 0) -> list[Any]:
    ends = np.cumsum(sizes).tolist()
    return list(jnp.split(x, ends[:-1], axis=dim))


@_enter("aten.cat.default")
def _cat(parts: Sequence[Any], dim: int = 0) -> Any:
    return jnp.concatenate(parts, dim)


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


@_enter("aten.gather.default")
def _gather(x: Any, dim: int, indices: Any, sparse_grad: bool = False) -> Any:
    return jnp.take_along_axis(x, indices, dim)


@_enter("aten.scatter.value")
def _scatter(x: Any, dim: int, indices: Any, value: Any) -> Any:
    values = jnp.asarray(value, x.dtype)
    return jnp.put_along_axis(x, indices, values, axis=dim, inplace=False)


def _index_at(indices: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(slice(None) if index is None else index for index in indices)


@_enter("aten.index.Tensor", "aten._unsafe_index.Tensor")
def _index(x: Any, indices: Sequence[Any]) -> Any:
    return x[_index_at(indices)]


@_enter("aten.index_put.default", "aten._unsafe_index_put.default")
def _index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    at = x.at[_index_at(indices)]
    return at.add(values) if accumulate else at.set(values)


# ---- graphs


def list_missing(graph: fx.GraphModule) -> list[str]:
    """List the operations of a graph that cannot be lowered, with the module that made each."""
    missing = []
    for node in graph.graph.nodes:
        name = str(node.target)
        is_transposed = (
            name.startswith("aten.convolution") and node.args[-4 + ("backward" not in name)] is True
        )
        is_unknown = (
            node.op == "call_function" and node.target is not operator.getitem and name not in TABLE
        )
        value = node.meta.get("val")
        is_odd = isinstance(value, torch.Tensor) and value.dtype not in DTYPES
        if is_unknown or is_transposed or is_odd:
            what = f"{value.dtype} " if is_odd else "transposed " if is_transposed else ""
            missing.append(f"{find_module(node)} ({what}{name})")
    return list(dict.fromkeys(missing))


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
        return args[0][args[1]]
    result = TABLE[str(node.target)](*args, **keywords)
    value = node.meta.get("val")
    # torch and jax promote types by different rules
    return result.astype(DTYPES[value.dtype]) if isinstance(value, torch.Tensor) else result
