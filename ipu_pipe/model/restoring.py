"""Restore a model's state: contexts that undo at their end what a forward or a backward changed, and `load_state`.

Modes, buffers, attributes and weights each have a context; `restore_all` restores all of them, gradients and random states too.
The library uses them for every trial run: shape inference, cost measurement, the verification of pieces, warm-ups.
"""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List, Mapping, Tuple

import torch
from torch import nn


@contextlib.contextmanager
def restore_modes(*models: nn.Module) -> Iterator[None]:
    """Restore the training mode of each module of `models` at the end of the context.

    `requires_grad` of the parameters too, because a user's `train()` may freeze some.
    """
    modes = [(module, module.training) for model in models for module in model.modules()]
    trainability = [(p, p.requires_grad) for model in models for p in model.parameters()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, is_trained in trainability:
            if parameter.requires_grad != is_trained:
                parameter.requires_grad_(is_trained)


@contextlib.contextmanager
def restore_buffers(model: nn.Module) -> Iterator[None]:
    """Restore every buffer: its values, and the tensor itself if a forward has bound another one to its name
    (`self.count = self.count + 1`)."""
    buffers = [
        (module, name, tensor, None if tensor is None else tensor.detach().clone())
        for module in model.modules()
        for name, tensor in module._buffers.items()
    ]
    try:
        yield
    finally:
        for module, name, tensor, value in buffers:
            module._buffers[name] = tensor
            # an expanded tensor cannot be written
            if tensor is not None and value is not None and 0 not in tensor.stride():
                tensor.data.copy_(value)


@contextlib.contextmanager
def restore_attributes(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of modules and the contents of their containers (tables of parameters and buffers, caches), where a
    forward may keep tensors or counters."""
    contents_by_module = [(module, _copy_attributes(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, (attributes, contents) in contents_by_module:
            vars(module).clear()
            vars(module).update(attributes)
            for container, content in contents:
                container.clear()
                container.update(content) if isinstance(container, (dict, set)) else container.extend(content)


def _copy_attributes(module: nn.Module) -> Tuple[Dict[str, Any], List[Tuple[Any, Any]]]:
    attributes = dict(vars(module))
    containers = [
        value for value in attributes.values() if type(value).__name__ in ("dict", "list", "set", "OrderedDict")
    ]
    return attributes, [(container, container.copy()) for container in containers]


def load_state(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy `tensors`, one for each name of the model's state dict, into `model`."""
    # the model's own state dict has the modules' versions, without which torchvision's MNASNet refuses to load
    state = model.state_dict()
    state.update(tensors)
    model.load_state_dict(state)


@contextlib.contextmanager
def restore_weights(model: nn.Module) -> Iterator[None]:
    """Restore the values of weights, which a forward may write."""
    # expanded weights cannot be written
    values = [(p, p.detach().clone()) for p in model.parameters() if 0 not in p.stride()]
    try:
        yield
    finally:
        for p, value in values:
            p.data.copy_(value)


@contextlib.contextmanager
def restore_all(model: nn.Module) -> Iterator[None]:
    """Restore weights, buffers, gradients, attributes, modes and random states: all that a forward and a backward can change."""
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters]
    cuda = [t.device for t in parameters[:1] if t.is_cuda]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        for restore in (restore_modes, restore_attributes, restore_buffers, restore_weights):
            stack.enter_context(restore(model))
        try:
            for p in parameters:
                p.grad = None
            yield
        finally:
            for p, gradient in zip(parameters, gradients):
                p.grad = gradient
