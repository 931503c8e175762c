"""The tensors that cross a cut, and the messages that carry them.

A message is contiguous. It has the tensor's dimensions in their order in memory, so that the
receiver rebuilds the tensor with
the same strides: kernels may sum in another order for another memory layout. The gradient's message
goes back in the gradient's own order:

    previous piece                            next piece
    value --- to_messages ------------------> from_messages --> value     the messages require gradients
    gradients <-- unpack_gradients ---------- collect_gradients           after the next piece's backward
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Sequence

import torch

from ipu_pipe.errors import BadInput


def get_memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the order of a tensor's dimensions in memory; () if it is contiguous, or if no order
    is without gaps.
    """
    strides = tensor.stride()
    # dimensions of size 1 may have equal strides, and then keep their order
    order = tuple(sorted(range(tensor.dim()), key=lambda d: (-strides[d], d)))
    return () if tensor.is_contiguous() or not tensor.permute(order).is_contiguous() else order


def invert_order(order: Sequence[int]) -> list[int]:
    """Return the permutation that undoes `order`."""
    return [list(order).index(d) for d in range(len(order))]


def record_raw_gradient(tensor: torch.Tensor) -> None:
    """Let a leaf record its gradients as a backward makes them: its `grad` would take the leaf's
    memory layout.
    """
    if tensor.requires_grad:
        raw: list[torch.Tensor] = []
        # detached, because the graph of a gradient inside a module would keep the leaf alive
        tensor.register_hook(lambda gradient: raw.append(gradient.detach()))
        tensor.raw_gradient = raw  # type: ignore[attr-defined]


def get_raw_gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that the backward has left on a leaf, None if it has left none."""
    # `autograd.grad` inside a module (forces, a gradient penalty) calls the hook, too, but leaves no
    # `grad`; the backward comes last
    if tensor.grad is None:
        return None
    raw: Sequence[torch.Tensor] = getattr(tensor, "raw_gradient", ())
    return raw[-1] if raw else tensor.grad


@dataclass(frozen=True)
class TensorSpec:
    """The shape, dtype and memory layout of a tensor that crosses a cut.

    `differentiable`: a gradient comes back for it. `order`: the order of its dimensions in memory,
    () if contiguous; the message has its dimensions in that order. `gradient_order`: the order in
    memory of the dimensions of the message's gradient, () for the message's own order.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool
    order: tuple[int, ...] = ()
    gradient_order: tuple[int, ...] = ()

    @property
    def gradient(self) -> TensorSpec:
        """The spec of the message with the gradient."""
        return TensorSpec(self.message_shape, self.dtype, False, self.gradient_order)

    def with_gradient_order(self, order: Sequence[int]) -> TensorSpec:
        """Return the spec of a tensor whose gradient has its dimensions in this order in memory; ()
        means contiguous.
        """
        message_dims = invert_order(self.order or range(len(self.shape)))
        of_message = tuple(message_dims[d] for d in order or range(len(self.shape)))
        return replace(
            self, gradient_order=() if of_message == tuple(range(len(of_message))) else of_message
        )

    @cached_property
    def message_shape(self) -> tuple[int, ...]:
        """The shape of the message."""
        return tuple(self.shape[d] for d in self.order) if self.order else self.shape

    @property
    def bytes(self) -> int:
        """The bytes of the message."""
        # torch before 2.1 has no `dtype.itemsize`
        return math.prod(self.shape) * torch.empty((), dtype=self.dtype).element_size()


OUTPUT_DTYPE = (
    "where FSDP2 computes in fewer bits, fully_shard the stage itself with "
    "MixedPrecisionPolicy(..., output_dtype"
)


@dataclass(frozen=True)
class Crossing:
    """The value that one piece passes to the next: a tensor, or a tuple of tensors."""

    tensors: tuple[TensorSpec, ...]

    def to_messages(self, value: Any) -> list[torch.Tensor]:
        """Turn a crossing value into messages. Raise `BadInput` if a tensor's shape is not the
        recorded one.
        """
        # a single tensor crosses without a tuple around it
        values = value if isinstance(value, tuple) else (value,)
        for t, spec in zip(values, self.tensors):
            if (tuple(t.shape), t.dtype) != (spec.shape, spec.dtype):
                is_cast = t.dtype != spec.dtype
                remedy = f": {OUTPUT_DTYPE}={spec.dtype})" if is_cast else ""
                raise BadInput(
                    f"model: a stage returns a tensor of shape {tuple(t.shape)}, {t.dtype}, but of "
                    f"shape {spec.shape},"
                    f" {spec.dtype} in the recorded forward: a tensor that crosses a boundary must "
                    f"have one shape{' and dtype' * is_cast}{remedy}"
                )
        return [t.permute(spec.order) if spec.order else t for t, spec in zip(values, self.tensors)]

    def from_messages(self, messages: Sequence[torch.Tensor]) -> Any:
        """Return the crossing value whose messages are `messages`."""
        pairs = zip(messages, self.tensors)
        values = tuple(
            t.permute(invert_order(spec.order)) if spec.order else t for t, spec in pairs
        )
        return values[0] if len(values) == 1 else values

    def require_gradients(self, messages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Let the differentiable messages receive gradients in a backward, and return all messages.

        If the gradient has another memory layout than the message, a hook stores it unchanged.
        """
        for t, spec in zip(messages, self.tensors):
            if spec.differentiable:
                t.requires_grad_()
                if spec.gradient_order:
                    record_raw_gradient(t)
        return list(messages)

    def collect_gradients(self, messages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients that a backward left on the messages of `require_gradients`, as
        messages.
        """
        gradients = []
        for t, spec in zip(messages, self.tensors):
            if spec.differentiable:
                gradient = get_raw_gradient(t)
                # the previous stage waits for a message in any case
                gradient = torch.zeros_like(t) if gradient is None else gradient
                gradients.append(
                    gradient.permute(spec.gradient_order) if spec.gradient_order else gradient
                )
        return gradients

    def unpack_gradients(self, messages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients whose messages are `messages`, one for each differentiable
        tensor.
        """
        orders = [spec.gradient_order for spec in self.tensors if spec.differentiable]
        return [
            g.permute(invert_order(order)) if order else g for g, order in zip(messages, orders)
        ]
