"""Shapes of what operations give, where PyTorch's own rules are slow: those are written in Python, and import a symbolic algebra.

A rule gives what the CPU would, or NotImplemented where it knows no better than PyTorch.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, Callable, Dict, Iterator, Tuple

import torch

ATEN = torch.ops.aten


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among an operation's arguments or results, and in lists there."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def like(x: Any, *rest: Any, **options: Any) -> Any:
    """A result like the first argument."""
    if x.is_contiguous() or 0 in x.stride():  # expanded: written out
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return torch.empty_like(x)


def _itself(x: Any, *rest: Any, **options: Any) -> Any:
    """What is filled with other numbers."""
    return x


def _new(x: Any, *shape: int) -> Any:
    """Contiguous, of the numbers of `x`."""
    return torch.empty(shape, dtype=x.dtype, device="meta")


def _each(values: Any, i: int) -> int:
    """Of dimension i, where one value may stand for all."""
    return int(values[i] if len(values) > 1 else values[0])


def _convolution(
    x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, extra: Any, groups: int
) -> Any:
    """x (b, c, ...) or (c, ...), weight (out, in / groups, ...), transposed (in, out / groups, ...)."""
    sizes, kernel = x.shape[-(weight.dim() - 2) :], weight.shape[2:]

    made = []
    for i, (size, width) in enumerate(zip(sizes, kernel)):
        reach = _each(dilation, i) * (width - 1)
        if transposed:
            made.append((size - 1) * _each(stride, i) - 2 * _each(padding, i) + reach + _each(extra, i) + 1)
        else:
            made.append((size + 2 * _each(padding, i) - reach - 1) // _each(stride, i) + 1)
    channels, given = (
        (weight.shape[1] * groups, weight.shape[0]) if transposed else (weight.shape[0], weight.shape[1] * groups)
    )
    if x.dim() not in (weight.dim(), weight.dim() - 1) or x.shape[-weight.dim() + 1] != given or min(made) < 1:
        raise RuntimeError(f"a convolution of {tuple(x.shape)} with weights {tuple(weight.shape)}")
    return _new(x, *x.shape[: -weight.dim() + 1], channels, *made)


def _convolution_backward(gradient: Any, x: Any, weight: Any, bias: Any, *rest: Any, **options: Any) -> Any:
    mask = options.get("output_mask", rest[-1])
    made = (like(x), like(weight), _new(gradient, *(bias or (0,))))
    return tuple(own if wanted else None for own, wanted in zip(made, mask))


def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
) -> Any:
    kept = weight if weight is not None else mean if mean is not None else x  # in whose numbers the CPU takes means
    size = x.shape[1] if training else 0
    return like(x), _new(kept, size), _new(kept, size)


def _batch_norm_backward(gradient: Any, x: Any, weight: Any, *rest: Any, **options: Any) -> Any:
    mask = options.get("output_mask", rest[-1])
    kept = weight if weight is not None else x
    made = (like(x), _new(kept, x.shape[1]), _new(kept, x.shape[1]))
    return tuple(own if wanted else None for own, wanted in zip(made, mask))


def _mean(x: Any, dimensions: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    over = {d % x.dim() for d in (dimensions or range(x.dim()))} if x.dim() else set()
    shape = [1 if d in over else size for d, size in enumerate(x.shape) if keepdim or d not in over]
    return torch.empty(shape, dtype=dtype or x.dtype, device="meta")


def _sum(x: Any, dimensions: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    return _mean(x, dimensions, keepdim, dtype or (None if x.is_floating_point() or x.is_complex() else torch.int64))


def _product(a: Any, b: Any) -> Any:
    """a (..., n, k), b (..., k, m)."""
    if a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        raise RuntimeError(f"a product of {tuple(a.shape)} with {tuple(b.shape)}")
    return _new(a, *a.shape[:-1], b.shape[-1])


def _sum_and_product(c: Any, a: Any, b: Any, **factors: Any) -> Any:
    return _product(a, b)


def _ones_like(x: Any, dtype: Any = None, **options: Any) -> Any:
    return torch.empty(x.shape, dtype=dtype or x.dtype, device="meta")


def _softmax(x: Any, dimension: int, to_float: bool = False) -> Any:
    return torch.empty(x.shape, dtype=torch.float32 if to_float else x.dtype, device="meta")


def _likelihood(x: Any, labels: Any, weights: Any, reduction: int, ignored: int) -> Any:
    return (_new(x) if reduction else _new(x, *labels.shape)), _new(x)


def _group_norm(x: Any, weight: Any, bias: Any, batch: int, channels: int, size: int, groups: int, eps: float) -> Any:
    return like(x), _new(x, batch, groups), _new(x, batch, groups)


def _max_pool(
    x: Any, width: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,), ceil_mode: bool = False
) -> Any:
    """x (b, c, h, w) or (c, h, w): its greatest numbers and where they are."""
    made = []
    for i, size in enumerate(x.shape[-2:]):
        step, around = _each(stride or width, i), _each(padding, i)
        reach = size + 2 * around - _each(dilation, i) * (_each(width, i) - 1) - 1
        count = (reach + (step - 1 if ceil_mode else 0)) // step + 1
        made.append(count - (ceil_mode and (count - 1) * step >= size + around))
    if min(made) < 1:
        raise RuntimeError(f"a pool of {tuple(x.shape)}")
    shape = (*x.shape[:-2], *made)
    return _new(x, *shape), torch.empty(shape, dtype=torch.int64, device="meta")


def _stack(tensors: Any, dim: int = 0) -> Any:
    """Tensors of one shape, along a new dimension."""
    first = tensors[0]
    if any(t.shape != first.shape for t in tensors):
        raise RuntimeError(f"stack of {[tuple(t.shape) for t in tensors]}")
    shape = [*first.shape]
    shape.insert(dim if dim >= 0 else dim + first.dim() + 1, len(tensors))
    dtype = functools.reduce(torch.promote_types, [t.dtype for t in tensors])
    return torch.empty(shape, dtype=dtype, device="meta")


def _like_second(gradient: Any, x: Any, *rest: Any, **options: Any) -> Any:
    return like(x)


def _contiguous(*values: Any) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors_in(values))


def _layer_norm(x: Any, sizes: Any, weight: Any, bias: Any, eps: float) -> Any:
    kept = weight if weight is not None else x
    shape = [*x.shape[: -len(sizes)], *[1] * len(sizes)]
    return _new(x, *x.shape), _new(kept, *shape), _new(kept, *shape)


def _layer_norm_backward(
    gradient: Any, x: Any, sizes: Any, mean: Any, deviation: Any, weight: Any, bias: Any, output_mask: Any
) -> Any:
    made = (x, weight if weight is not None else x, bias if bias is not None else x)
    return tuple(_new(own, *own.shape) if wanted else None for own, wanted in zip(made, output_mask))


def _embedding(weight: Any, places: Any, *rest: Any, **options: Any) -> Any:
    return _new(weight, *places.shape, *weight.shape[1:])


def _embedding_backward(gradient: Any, places: Any, count: int, *rest: Any, **options: Any) -> Any:
    return _new(gradient, count, gradient.shape[-1])


def _broadcast(*tensors: Any) -> Tuple[int, ...]:
    """The shape of tensors together: PyTorch's own way imports the algebra."""
    made = []
    for sizes in itertools.zip_longest(*(reversed(t.shape) for t in tensors), fillvalue=1):
        size = next((size for size in sizes if size != 1), 1)
        if any(each not in (1, size) for each in sizes):
            raise RuntimeError(f"{' and '.join(str(tuple(t.shape)) for t in tensors)} do not go together")
        made.append(size)
    return tuple(reversed(made))


def _compared(a: Any, b: Any) -> Any:
    """Whether, number by number."""
    shape = _broadcast(a, b) if isinstance(b, torch.Tensor) else a.shape
    return torch.empty(shape, dtype=torch.bool, device="meta") if _contiguous(a, b) else NotImplemented


def _both(a: Any, b: Any) -> Any:
    return _compared(a, b) if a.dtype == b.dtype == torch.bool else NotImplemented


def _filled(x: Any, mask: Any, value: Any) -> Any:
    whole = x.is_contiguous() and _broadcast(x, mask) == x.shape
    return _new(x, *x.shape) if whole else NotImplemented


def _where(condition: Any, a: Any, b: Any) -> Any:
    if a.dtype != b.dtype or not _contiguous(condition, a, b):
        return NotImplemented
    return _new(a, *_broadcast(condition, a, b))


def _joined(tensors: Any, dim: int = 0) -> Any:
    """Along a dimension that they have."""
    first = tensors[0]
    dim = dim % max(first.dim(), 1)

    def others(t: Any) -> Any:
        return [size for d, size in enumerate(t.shape) if d != dim]

    same = all(t.dim() == first.dim() > 0 and t.dtype == first.dtype and others(t) == others(first) for t in tensors)
    if not same or (first.dim() in (4, 5) and not _contiguous(tensors)):  # images may have their channels last
        return NotImplemented
    shape = [*first.shape]
    shape[dim] = sum(t.shape[dim] for t in tensors)
    return _new(first, *shape)


def _numbers(*ends: Any, dtype: Any = None, **options: Any) -> Any:
    """From 0 or the first to before the second, in steps of the third."""
    if not all(isinstance(end, int) for end in ends):
        return NotImplemented
    start, end, step = (0, *ends, 1) if len(ends) == 1 else (*ends, 1)[:3]
    return torch.empty(len(range(start, end, step)), dtype=dtype or torch.int64, device="meta")


def _triangle(x: Any, diagonal: int = 0) -> Any:
    return _new(x, *x.shape) if x.is_contiguous() else NotImplemented


def _unlike(x: Any) -> Any:
    return _new(x, *x.shape) if x.is_contiguous() and x.dtype == torch.bool else NotImplemented


COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
RULES: Dict[Any, Callable[..., Any]] = {
    ATEN.convolution.default: _convolution,
    ATEN.convolution_backward.default: _convolution_backward,
    ATEN.native_batch_norm.default: _batch_norm,
    ATEN.native_batch_norm_backward.default: _batch_norm_backward,
    ATEN.native_group_norm.default: _group_norm,
    ATEN.mm.default: _product,
    ATEN.bmm.default: _product,
    ATEN.addmm.default: _sum_and_product,
    ATEN.stack.default: _stack,
    ATEN.mean.dim: _mean,
    ATEN.sum.default: _sum,
    ATEN.sum.dim_IntList: _sum,
    ATEN.ones_like.default: _ones_like,
    ATEN.nll_loss_forward.default: _likelihood,
    ATEN.nll_loss_backward.default: _like_second,
    ATEN.nll_loss2d_forward.default: _likelihood,
    ATEN.nll_loss2d_backward.default: _like_second,
    ATEN._log_softmax.default: _softmax,
    ATEN._softmax.default: _softmax,
    ATEN._log_softmax_backward_data.default: like,
    ATEN._softmax_backward_data.default: like,
    ATEN.max_pool2d_with_indices.default: _max_pool,
    ATEN.max_pool2d_with_indices_backward.default: _like_second,
    ATEN.native_layer_norm.default: _layer_norm,
    ATEN.native_layer_norm_backward.default: _layer_norm_backward,
    ATEN.embedding.default: _embedding,
    ATEN.embedding_dense_backward.default: _embedding_backward,
    ATEN.baddbmm.default: _sum_and_product,
    ATEN.masked_fill.Scalar: _filled,
    ATEN.where.self: _where,
    ATEN.cat.default: _joined,
    ATEN.bitwise_not.default: _unlike,
    **dict.fromkeys((ATEN.bitwise_and.Tensor, ATEN.bitwise_or.Tensor), _both),
    **dict.fromkeys((ATEN.tril.default, ATEN.triu.default), _triangle),
    **{getattr(getattr(ATEN, name), kind): _compared for name in COMPARED for kind in ("Tensor", "Scalar")},
    **dict.fromkeys(
        (
            ATEN.normal_.default, ATEN.uniform_.default, ATEN.zero_.default, ATEN.fill_.Scalar, ATEN.bernoulli_.float,
            ATEN.div_.Scalar, ATEN.mul_.Scalar,
        ),
        _itself,
    ),
}  # fmt: skip
MADE = dict.fromkeys((ATEN.arange.default, ATEN.arange.start, ATEN.arange.start_step), _numbers)
POINTWISE = {
    ATEN.relu, ATEN.threshold_backward, ATEN.add, ATEN.mul, ATEN.sub, ATEN.div, ATEN.gelu, ATEN.gelu_backward, ATEN.silu,
    ATEN.silu_backward, ATEN.tanh, ATEN.tanh_backward, ATEN.sigmoid, ATEN.sigmoid_backward, ATEN.hardtanh,
    ATEN.hardtanh_backward, ATEN.hardswish, ATEN.hardswish_backward, ATEN.leaky_relu, ATEN.leaky_relu_backward, ATEN.elu,
    ATEN.exp, ATEN.rsqrt, ATEN.sqrt, ATEN.neg, ATEN.pow,
}  # fmt: skip
FLOATING = POINTWISE - {
    ATEN.relu,
    ATEN.threshold_backward,
    ATEN.add,
    ATEN.mul,
    ATEN.sub,
}  # of whole numbers PyTorch's rules


def alike(operation: Any, values: Any) -> bool:
    """Whether an operation of POINTWISE gives a tensor like its first argument: all are of its kind of numbers and, if there are
    others, contiguous, the others of its shape or of one that goes into it."""
    tensors = list(tensors_in(values))
    first = tensors[0]
    if values[0] is not first or first.dtype == torch.bool:
        return False
    floating = operation in FLOATING or any(isinstance(v, (float, complex)) for v in values)
    if floating and not first.is_floating_point():
        return False
    return len(tensors) == 1 or all(t.dtype == first.dtype and t.is_contiguous() and _into(t, first) for t in tensors)


def _into(t: Any, first: Any) -> bool:
    if t.shape == first.shape:
        return True
    sizes = zip(reversed(t.shape), reversed(first.shape))
    return t.dim() <= first.dim() and all(size in (1, wanted) for size, wanted in sizes)
