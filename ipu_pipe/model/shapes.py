"""A model run by shape: its tensors stand on PyTorch's meta device, which has shapes and no numbers.

What runs so takes milliseconds and no memory, whatever the model's size. It shows the order of execution, FLOPs, what is kept for
the backward and what crosses boundaries, as the CPU would have them. A forward that looks at values cannot be run by shape: it
raises, and who asked takes the tensors themselves.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Dict, Iterator, List, Set, Tuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ipu_pipe.model.uncompiled import without_compiler

ATEN = torch.ops.aten
SMALL = 300_000  # numbers


def fits(model: nn.Module, x: torch.Tensor) -> bool:
    """Whether a forward of `x` may be run by shape. A GPU's kernels keep other things than the CPU's, and so do the CPU's own for
    recurrent layers: these run as they are."""
    devices = {t.device.type for t in [x, *model.parameters(), *model.buffers()]}
    return devices == {"meta"} or (
        devices == {"cpu"} and not any(isinstance(module, nn.RNNBase) for module in model.modules())
    )


def pays(model: nn.Module, x: torch.Tensor) -> bool:
    """Whether a forward of `x` is quicker by shape, where it may be: of few numbers it is not."""
    return fits(model, x) and (x.is_meta or x.numel() + sum(p.numel() for p in model.parameters()) > SMALL)


def stand_in(value: Any) -> Any:
    """The tensors of a nest as shapes."""

    def shape(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or (t.is_meta and not t.requires_grad):
            return t
        return torch.empty_like(t, device="meta")

    return tree_map(shape, value)


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Inside, what is computed with shapes gives shapes, as the CPU's own would be, and imports no compiler."""
    with without_compiler(), _FusedAttention(), _Shapes():
        yield


@contextlib.contextmanager
def made_by_shape() -> Iterator[None]:
    """Inside, tensors are made as shapes, such as the weights of a model."""
    with shapes_only(), torch.device("meta"):
        yield


@contextlib.contextmanager
def by_shape(model: nn.Module) -> Iterator[None]:
    """Inside, the model's parameters and buffers are shapes, and so is all that is computed with shapes. At the end the model is
    as it was, whatever its forward has put on it."""
    held = [(module, _held(module)) for module in model.modules()]
    twins: Dict[int, torch.Tensor] = {}

    def twin(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            return tensor
        if id(tensor) not in twins:
            made = torch.empty_like(tensor, device="meta")
            is_weight = isinstance(tensor, nn.Parameter)
            twins[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if is_weight else made
        return twins[id(tensor)]

    try:
        for module in model.modules():
            tables: Tuple[Dict[str, Any], ...] = (module._parameters, module._buffers)
            for table in tables:
                table.update({name: twin(tensor) for name, tensor in table.items() if tensor is not None})
        with shapes_only():
            yield
    finally:
        for module, (attributes, contents) in held:
            vars(module).clear()
            vars(module).update(attributes)
            for container, content in contents:
                container.clear()
                container.update(content) if isinstance(container, (dict, set)) else container.extend(content)


def _held(module: nn.Module) -> Tuple[Dict[str, Any], List[Tuple[Any, Any]]]:
    """A module's attributes, and what is in those that hold others (its tables of parameters and buffers, a cache of masks)."""
    attributes = dict(vars(module))
    containers = [
        value for value in attributes.values() if type(value).__name__ in ("dict", "list", "set", "OrderedDict")
    ]
    return attributes, [(container, container.copy()) for container in containers]


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among an operation's arguments or results, and in lists there."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


class _Shapes(TorchDispatchMode):
    """Operations on shapes. A tensor that the forward made or kept elsewhere becomes a shape where it meets one."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # its name in PyTorch: the compiler is not imported to be told of this class
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        shapes = {tensor.is_meta for tensor in tensors_in((*args, *kwargs.values()))}
        if len(shapes) > 1:
            args, kwargs = stand_in((args, kwargs))
        if True in shapes and func in RULES:
            return RULES[func](*args, **kwargs)
        if True in shapes and func.overloadpacket in POINTWISE and _alike(args):
            return _like(args[0])
        return func(*args, **kwargs)


# ---- shapes of what PyTorch's own rules are slowest for, and import a symbolic algebra: they are written in Python


def _like(x: Any, *rest: Any, **options: Any) -> Any:
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
    made = (_like(x), _like(weight), _new(gradient, *(bias or (0,))))
    return tuple(own if wanted else None for own, wanted in zip(made, mask))


def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
) -> Any:
    kept = weight if weight is not None else mean if mean is not None else x  # in whose numbers the CPU takes means
    size = x.shape[1] if training else 0
    return _like(x), _new(kept, size), _new(kept, size)


def _batch_norm_backward(gradient: Any, x: Any, weight: Any, *rest: Any, **options: Any) -> Any:
    mask = options.get("output_mask", rest[-1])
    like = weight if weight is not None else x
    made = (_like(x), _new(like, x.shape[1]), _new(like, x.shape[1]))
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
    return _like(x), _new(x, batch, groups), _new(x, batch, groups)


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
    return _like(x)


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
    ATEN._log_softmax.default: _softmax,
    ATEN._softmax.default: _softmax,
    ATEN._log_softmax_backward_data.default: _like,
    ATEN._softmax_backward_data.default: _like,
    ATEN.max_pool2d_with_indices.default: _max_pool,
    ATEN.max_pool2d_with_indices_backward.default: _like_second,
    **dict.fromkeys((ATEN.normal_.default, ATEN.uniform_.default, ATEN.zero_.default, ATEN.fill_.Scalar), _itself),
}
POINTWISE = {ATEN.relu, ATEN.threshold_backward, ATEN.add, ATEN.mul, ATEN.sub, ATEN.div}


def _alike(values: Any) -> bool:
    """Whether the tensors among an operation's arguments are contiguous, of one shape and of one kind of numbers."""
    tensors = list(tensors_in(values))
    first = tensors[0]
    return (
        values[0] is first
        and (
            len(tensors) == 1
            or all(t.shape == first.shape and t.dtype == first.dtype and t.is_contiguous() for t in tensors)
        )
        and not (
            first.dtype == torch.bool
            or any(isinstance(v, (float, complex)) for v in values)
            and not first.is_floating_point()
        )
    )


# ---- operations that look at values


class _Looks(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: Set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # as above
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


# what refuses some numbers: places out of range, probabilities, matrices; a conversion to whole numbers leads there
CHOOSY = ("embedding", "index", "gather", "scatter", "take", "put", "multinomial", "linalg", "cholesky", "one_hot", "bincount",
          "nll", "_assert", "unpool", "grid_sample", "bucketize", "searchsorted")  # fmt: skip


@contextlib.contextmanager
def looks_at_values() -> Iterator[Callable[[], bool]]:
    """Whether what ran inside may refuse a sample for its numbers."""
    with _Looks() as seen:
        yield lambda: any(part in name for part in CHOOSY for name in seen.names)


# ---- attention


class _FusedAttention(TorchFunctionMode):
    """Attention as the CPU takes it: on shapes PyTorch would write it out, which keeps other tensors for the backward."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _casts():  # of the CPU's tensors alone
            raise RuntimeError("autocast: what it makes of shapes is not what the CPU makes")
        if func is nn.functional.scaled_dot_product_attention and FUSED is not None:
            return _attention(*args, **kwargs)
        return func(*args, **kwargs)


def _casts() -> bool:
    """Whether autocast is at work for the CPU."""
    if hasattr(torch, "get_autocast_dtype"):  # since then it asks for the device
        return torch.is_autocast_enabled("cpu")
    return torch.is_autocast_cpu_enabled()


FUSED: Any = getattr(ATEN, "_scaled_dot_product_flash_attention_for_cpu", None)  # from torch 2.1 on
FLASH = 1  # its number among PyTorch's ways


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: Any = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    plain = nn.functional.scaled_dot_product_attention
    keywords = dict({} if scale is None else {"scale": scale}, **({"enable_gqa": True} if enable_gqa else {}))

    def on_cpu(tensor: Any) -> Any:
        if tensor is None:
            return None
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)  # never written: takes no memory
        return made.requires_grad_(tensor.requires_grad)

    if not query.is_meta:
        return plain(query, key, value, attn_mask, dropout_p, is_causal, **keywords)
    given = [on_cpu(tensor) for tensor in (query, key, value, attn_mask)]
    choice: Any = torch._fused_sdp_choice  # type: ignore[attr-defined]
    if choice(*given, dropout_p, is_causal, **keywords) != FLASH or enable_gqa:
        return plain(query, key, value, attn_mask, dropout_p, is_causal, **keywords)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
    return FUSED(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
