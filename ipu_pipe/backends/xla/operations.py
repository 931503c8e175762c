"""A table from ATen operations to functions of jax arrays; convolutions and pools are in `windows`.

Products have the precision "highest": that of the arrays. Random draws have no entry, because a
compiled program would draw anew from a state of its own (`ipu_pipe.cut.graphs` makes masks
arguments).
"""

from __future__ import annotations

import math
from typing import Any, Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

DTYPES = {
    torch.float32: jnp.float32,
    torch.float64: jnp.float64,
    torch.int64: jnp.int64,
    torch.int32: jnp.int32,
    torch.uint8: jnp.uint8,
    torch.bool: jnp.bool_,
}
# operation -> function of its arguments, a keyword of which has its name in torch
OPERATIONS: dict[str, Callable[..., Any]] = {}
PRECISION = "highest"
# the end of a slice that has none
_END = 2**62


def _enter(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function into the table under the names of operations."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        OPERATIONS.update(dict.fromkeys(names, function))
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
        # factors of 1 are left out, as in `_multiply_unless_one`
        return function(x, y if alpha == 1 else y * alpha)

    return compute


def _multiply_unless_one(x: Any, y: Any) -> Any:
    # torch writes a linear layer as 1 * bias + 1 * product, and not every compiler drops the factors
    return x if isinstance(y, int) and y == 1 else jnp.multiply(x, y)


_enter_all({"add": _scale_second(jnp.add), "sub": _scale_second(jnp.subtract)}, "Tensor", "Scalar")
_enter_all(
    {
        "mul": _multiply_unless_one,
        "div": jnp.true_divide,
        "eq": jnp.equal,
        "ne": jnp.not_equal,
        "ge": jnp.greater_equal,
        "gt": jnp.greater,
        "le": jnp.less_equal,
        "lt": jnp.less,
        "bitwise_and": jnp.bitwise_and,
        "bitwise_or": jnp.bitwise_or,
        "bitwise_xor": jnp.bitwise_xor,
        "fmod": jnp.fmod,
        "remainder": jnp.remainder,
    },
    "Tensor",
    "Scalar",
)


def _to_floating(x: Any) -> Any:
    # torch's sigmoid and erf take integers, too
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)


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
        "logical_xor": jnp.logical_xor,
        "logical_not": jnp.logical_not,
        "bitwise_not": jnp.bitwise_not,
        "exp": jnp.exp,
        "expm1": jnp.expm1,
        "log": jnp.log,
        "log1p": jnp.log1p,
        "log2": jnp.log2,
        "sqrt": jnp.sqrt,
        "rsqrt": lambda x: 1 / jnp.sqrt(x),
        "neg": jnp.negative,
        "abs": jnp.abs,
        # the sign of NaN is 0, that of a truth value itself
        "sign": lambda x: x if x.dtype == bool else jnp.where(x != x, 0, jnp.sign(x)),
        "reciprocal": jnp.reciprocal,
        "sin": jnp.sin,
        "cos": jnp.cos,
        "tan": jnp.tan,
        "atan": jnp.arctan,
        "atan2": jnp.arctan2,
        "sinh": jnp.sinh,
        "cosh": jnp.cosh,
        "floor": jnp.floor,
        "ceil": jnp.ceil,
        "trunc": jnp.trunc,
        "round": jnp.round,
        "isnan": jnp.isnan,
        "isinf": jnp.isinf,
        "tanh": jnp.tanh,
        "sigmoid": lambda x: jax.nn.sigmoid(_to_floating(x)),
        "erf": lambda x: lax.erf(_to_floating(x)),
        "relu": lambda x: jnp.maximum(x, 0),
    },
    "default",
)


@_enter("aten.div.Tensor_mode", "aten.div.Scalar_mode")
def _divide(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "floor":
        # as torch, floor_divide of integers stays an integer
        return jnp.floor_divide(x, y)
    quotient = jnp.true_divide(x, y)
    return quotient if rounding_mode is None else jnp.trunc(quotient)


@_enter("aten.leaky_relu.default")
def _leak(x: Any, slope: float = 0.01) -> Any:
    return jnp.where(x > 0, x, x * slope)


@_enter("aten.elu.default")
def _elu(x: Any, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    return jnp.where(x > 0, x * scale, jnp.expm1(x * input_scale) * (alpha * scale))


@_enter("aten.hardtanh.default")
def _hardtanh(x: Any, low: float = -1, high: float = 1) -> Any:
    return jnp.clip(x, low, high)


@_enter("aten.clamp.default", "aten.clamp.Tensor")
def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    return jnp.clip(x, min, max)


@_enter("aten.where.self")
def _where(condition: Any, x: Any, y: Any) -> Any:
    return jnp.where(condition, x, y)


# ---- products


@_enter("aten.mm.default", "aten.bmm.default")
def _multiply(x: Any, y: Any) -> Any:
    return jnp.matmul(x, y, precision=PRECISION)


# ---- reductions


@_enter("aten.sum.dim_IntList", "aten.sum.default")
def _sum(x: Any, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    if x.dtype == jnp.bool_:
        # torch adds up truth values in int64
        x = x.astype(jnp.int64)
    return jnp.sum(x, _list_axes(x, dims), _convert(dtype), keepdims=keepdim)


@_enter("aten.mean.dim", "aten.mean.default")
def _mean(x: Any, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    return jnp.mean(x, _list_axes(x, dims), _convert(dtype), keepdims=keepdim)


@_enter("aten.amax.default", "aten.max.default")
def _amax(x: Any, dims: Any = (), keepdim: bool = False) -> Any:
    return jnp.max(x, _list_axes(x, dims), keepdims=keepdim)


@_enter("aten.amin.default", "aten.min.default")
def _amin(x: Any, dims: Any = (), keepdim: bool = False) -> Any:
    return jnp.min(x, _list_axes(x, dims), keepdims=keepdim)


@_enter("aten.max.dim")
def _max(x: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    return _amax(x, dim, keepdim), _argmax(x, dim, keepdim)


@_enter("aten.min.dim")
def _min(x: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    return _amin(x, dim, keepdim), jnp.argmin(x, dim if x.ndim else None, keepdims=keepdim)


@_enter("aten.linalg_vector_norm.default")
def _norm(
    x: Any, order: float = 2, dims: Any = None, keepdim: bool = False, dtype: Any = None
) -> Any:
    size = jnp.abs(x if dtype is None else x.astype(_convert(dtype)))
    if math.isinf(order):
        return (_amax if order > 0 else _amin)(size, dims, keepdim)
    if order == 0:
        # order 0 counts the elements that are not 0
        return _sum(size != 0, dims, keepdim)
    return _raise(_sum(_raise(size, order), dims, keepdim), 1 / order)


@_enter("aten.cumsum.default")
def _cumsum(x: Any, dim: int, dtype: Any = None) -> Any:
    # torch also takes a tensor of no dimensions, which jax refuses
    return jnp.cumsum(jnp.atleast_1d(x), dim, _convert(dtype)).reshape(x.shape)


@_enter("aten.var_mean.correction")
def _var_mean(
    x: Any, dims: Any = None, correction: float | None = 1, keepdim: bool = False
) -> tuple[Any, Any]:
    axes = _list_axes(x, dims)
    less: Any = 1 if correction is None else correction
    variance = jnp.var(x, axes, ddof=less, keepdims=keepdim)
    return variance, jnp.mean(x, axes, keepdims=keepdim)


@_enter("aten.var.correction")
def _var(x: Any, dims: Any = None, **settings: Any) -> Any:
    return _var_mean(x, dims, **settings)[0]


@_enter("aten.argmax.default")
def _argmax(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return jnp.argmax(x, dim if x.ndim else None, keepdims=keepdim)


@_enter("aten.any.default", "aten.any.dim", "aten.any.dims")
def _any(x: Any, dims: Any = None, keepdim: bool = False) -> Any:
    # here an empty list means no dimension
    if dims == []:
        return x.astype(jnp.bool_)
    return jnp.any(x, _list_axes(x, dims), keepdims=keepdim)


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
        "repeat": jnp.tile,
        "flip": jnp.flip,
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
    # torch leaves a dimension of more than one element alone, where jax raises
    return jnp.squeeze(x, tuple(axis for axis in axes if x.shape[axis] == 1))


@_enter("aten.expand.default")
def _expand(x: Any, sizes: Sequence[int], implicit: bool = False) -> Any:
    # new dimensions come first; -1 keeps the length of an old one
    added = len(sizes) - x.ndim
    shape = [x.shape[i - added] if size == -1 else size for i, size in enumerate(sizes)]
    return jnp.broadcast_to(x, shape)


@_enter("aten.copy.default")
def _copy(x: Any, source: Any, non_blocking: bool = False) -> Any:
    return jnp.broadcast_to(source, x.shape)


@_enter("aten.as_strided.default")
def _view_strided(x: Any, sizes: Sequence[int], strides: Any, offset: int | None = None) -> Any:
    # `list_missing` refuses views of other strides than those of a contiguous tensor
    first = offset or 0
    return x.reshape(-1)[first : first + math.prod(sizes)].reshape(sizes)


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
        # torch's last part may be shorter
        lax.slice_in_dim(x, first, min(first + size, count), axis=dim)
        # a dimension of no elements gives one part of none
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
    # torch's pads begin with the last dimension
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


@_enter("aten.empty.memory_format", "aten.empty_permuted.default")
def _empty(shape: Sequence[int], *order: Any, dtype: Any = None, **others: Any) -> Any:
    # torch leaves the values open; zeros are at least the same each time
    return jnp.zeros(shape, _convert(dtype))


@_enter("aten.new_empty_strided.default")
def _new_empty(x: Any, shape: Sequence[int], strides: Any, dtype: Any = None, **others: Any) -> Any:
    return jnp.zeros(shape, _convert(dtype) or x.dtype)


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
    # an index that is out of range, an error of torch, gives NaN
    return weight.at[indices].get(mode="fill")


@_enter("aten.index_select.default")
def _index_select(x: Any, dim: int, indices: Any) -> Any:
    if x.ndim == 0:
        return x
    return jnp.take(x, indices, dim, mode="fill")


def _at_along(x: Any, dim: int, indices: Any) -> Any:
    """Return the places of an array at indices along a dimension: they may cover a part of the
    other dimensions. An array of no dimension is one of one element.
    """
    indices = jnp.atleast_1d(indices)
    # a broadcast index for each dimension; only `dim` has its own
    places: list[Any] = list(np.ogrid[tuple(slice(n) for n in indices.shape)])
    places[dim] = indices
    return jnp.atleast_1d(x).at[tuple(places)]


def _choose(x: Any, dim: int, indices: Any, usual: Any, by_marks: Any) -> Any:
    """Return usual(x, indices); on Tenstorrent's chips, which have no operation that reads or writes
    by index, by_marks(x, marks), if each row along the dimension has one index: it is marked.
    """
    one = (*x.shape[:dim], 1, *x.shape[dim:][1:])
    if not x.ndim or indices.shape != one or not jnp.issubdtype(x.dtype, jnp.floating):
        return usual(x, indices)

    def compare(x: Any, indices: Any) -> Any:
        return by_marks(x, lax.broadcasted_iota(indices.dtype, x.shape, dim) == indices)

    # chosen when the program is compiled: others keep the usual operation
    return lax.platform_dependent(x, indices, tt=compare, default=usual)


@_enter("aten.gather.default")
def _gather(x: Any, dim: int, indices: Any, sparse_grad: bool = False) -> Any:
    def read(x: Any, indices: Any) -> Any:
        return _at_along(x, dim, indices).get(mode="fill").reshape(indices.shape)

    def add_marked(x: Any, marks: Any) -> Any:
        total = jnp.where(marks, x, 0).sum(dim, keepdims=True)
        # an index that is out of range marks nothing
        return jnp.where(marks.any(dim, keepdims=True), total, jnp.nan)

    dim = dim % max(x.ndim, 1)
    return _choose(x, dim, indices, read, add_marked)


@_enter("aten.scatter_add.default")
def _scatter_add(x: Any, dim: int, indices: Any, source: Any) -> Any:
    return _at_along(x, dim, indices).add(_cut_to(indices, source)).reshape(x.shape)


@_enter("aten.scatter.src")
def _scatter_source(x: Any, dim: int, indices: Any, source: Any) -> Any:
    return _at_along(x, dim, indices).set(_cut_to(indices, source)).reshape(x.shape)


def _cut_to(indices: Any, source: Any) -> Any:
    # torch ignores what a source has beyond the indices
    shape = jnp.atleast_1d(indices).shape
    return jnp.atleast_1d(source)[tuple(slice(n) for n in shape)]


@_enter("aten.scatter.value")
def _scatter(x: Any, dim: int, indices: Any, value: Any) -> Any:
    def write(x: Any, indices: Any) -> Any:
        return _at_along(x, dim, indices).set(jnp.asarray(value, x.dtype)).reshape(x.shape)

    dim = dim % max(x.ndim, 1)
    return _choose(x, dim, indices, write, lambda x, marks: jnp.where(marks, value, x))


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
        # dimensions behind the mask's, over which the choice is the same
        behind = x.ndim - (len(indices) - 1) - mask.ndim
        mask = mask.reshape(mask.shape + (1,) * behind)
        return jnp.where(mask, x + values if accumulate else values, x)
    at = x.at[_index_at(indices)]
    return at.add(values) if accumulate else at.set(values)
