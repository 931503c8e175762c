"""Run a model on PyTorch's meta device, which has shapes and no values.

Such a run takes milliseconds and no memory, whatever the size of the model. It gives the order of
execution, the FLOPs, the tensors saved for the backward and the tensors that cross boundaries, as
on the CPU. A forward that reads values raises here, and the caller runs it on real tensors instead.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ipu_pipe.model.batch import list_tensors
from ipu_pipe.model.restoring import restore_attributes
from ipu_pipe.model.watching import FunctionWatch, OperationWatch


def can_run_on_meta(model: nn.Module, x: Any) -> bool:
    """Tell whether a forward of `x` may run on the meta device: not on a GPU and not with recurrent
    layers, whose kernels save other tensors."""
    tensors = [*list_tensors(x), *model.parameters(), *model.buffers()]
    devices = {t.device.type for t in tensors}
    return devices == {"meta"} or (
        devices == {"cpu"} and not any(isinstance(module, nn.RNNBase) for module in model.modules())
    )


def to_meta(value: Any) -> Any:
    """Return the nest with its tensors on the meta device."""

    def move(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or (t.is_meta and not t.requires_grad):
            return t
        return torch.empty_like(t, device="meta")

    return tree_map(move, value)


def make_shapes(value: Any) -> Any:
    """Return the nest with a new meta tensor in place of each tensor.

    A few samples of a meta tensor are a view, which would keep the bytes of the whole microbatch.
    """

    def make_shape(t: Any) -> Any:
        return torch.empty_like(t, device="meta") if isinstance(t, torch.Tensor) else t

    return tree_map(make_shape, value)


@contextlib.contextmanager
def compute_on_meta() -> Iterator[None]:
    """Run computations with meta tensors on the meta device, with the operations that the CPU would
    choose.
    """
    with FunctionWatch(_call_as_cpu), OperationWatch(_run_on_meta):
        yield


@contextlib.contextmanager
def build_on_meta() -> Iterator[None]:
    """Make new tensors on the meta device, such as the weights of a model."""
    with compute_on_meta(), torch.device("meta"):
        yield


@contextlib.contextmanager
def move_to_meta(model: nn.Module) -> Iterator[None]:
    """Move the model's parameters and buffers to the meta device inside the context; restore the
    model and its attributes.
    """
    twins: dict[int, torch.Tensor] = {}

    def get_meta_twin(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            return tensor
        # one twin for each tensor, so that tied weights stay tied
        if id(tensor) not in twins:
            shape = torch.empty_like(tensor, device="meta")
            is_weight = isinstance(tensor, nn.Parameter)
            twins[id(tensor)] = nn.Parameter(shape, tensor.requires_grad) if is_weight else shape
        return twins[id(tensor)]

    # the tables of weights are attributes, too: it puts the real tensors back
    with restore_attributes(model):
        for module in model.modules():
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for table in tables:
                table.update(
                    {
                        name: get_meta_twin(tensor)
                        for name, tensor in table.items()
                        if tensor is not None
                    }
                )
        with compute_on_meta():
            yield


def _run_on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation; if only some of its arguments are meta tensors, move the others to the meta
    device first.
    """
    if len({tensor.is_meta for tensor in list_tensors((*args, *kwargs.values()))}) > 1:
        args, kwargs = to_meta((args, kwargs))
    return func(*args, **kwargs)


# ---- attention


def _call_as_cpu(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function; for attention take the CPU's fused kernel.

    On the meta device PyTorch would use plain operations for attention, which save other tensors
    for the backward.
    """
    if _is_autocast():
        raise RuntimeError("autocast on the meta device differs from autocast on the CPU")
    if func is nn.functional.scaled_dot_product_attention and FUSED is not None:
        return _run_attention(*args, **kwargs)
    return func(*args, **kwargs)


def _is_autocast() -> bool:
    """Tell whether autocast is on for the CPU."""
    # newer versions take the device as an argument
    if hasattr(torch, "get_autocast_dtype"):
        return torch.is_autocast_enabled("cpu")
    return torch.is_autocast_cpu_enabled()


# available from torch 2.1 on
FUSED: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
# PyTorch's number of this kernel
FLASH_KERNEL = 1


def _run_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> Any:
    """Run attention by the fused kernel if the CPU would choose it for tensors of these shapes,
    else by plain operations.
    """
    plain = nn.functional.scaled_dot_product_attention
    keywords = dict(
        {} if scale is None else {"scale": scale}, **({"enable_gqa": True} if enable_gqa else {})
    )

    def make_empty_on_cpu(tensor: Any) -> Any:
        if tensor is None:
            return None
        # never written, so it takes no memory
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        return empty.requires_grad_(tensor.requires_grad)

    if not query.is_meta:
        return plain(query, key, value, attn_mask, dropout_p, is_causal, **keywords)
    # PyTorch chooses by the device of the tensors that it is asked with
    stand_ins = [make_empty_on_cpu(tensor) for tensor in (query, key, value, attn_mask)]
    choice: Any = torch._fused_sdp_choice  # type: ignore[attr-defined]
    # the kernel has no argument for grouped queries
    if choice(*stand_ins, dropout_p, is_causal, **keywords) != FLASH_KERNEL or enable_gqa:
        return plain(query, key, value, attn_mask, dropout_p, is_causal, **keywords)
    # PyTorch, too, turns a mask of truth values into numbers before it calls the kernel
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
    # it returns (output, log-sum-exp of each row)
    return FUSED(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
