"""A model's buffers (running statistics, counters) and attributes, put back as they were after it ran for a look at it."""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List, Mapping, Tuple

import torch
from torch import nn


@contextlib.contextmanager
def buffers_restored(model: nn.Module) -> Iterator[None]:
    """Put back every buffer at the end: its values, and the tensor itself where a forward bound another one to its name
    (`self.count = self.count + 1`)."""
    held = [
        (module, name, tensor, None if tensor is None else tensor.detach().clone())
        for module in model.modules()
        for name, tensor in module._buffers.items()
    ]
    try:
        yield
    finally:
        for module, name, tensor, value in held:
            module._buffers[name] = tensor
            if tensor is not None and value is not None and 0 not in tensor.stride():  # expanded: nothing can write it
                tensor.data.copy_(value)


@contextlib.contextmanager
def all_restored(model: nn.Module) -> Iterator[None]:
    """Put back buffers and attributes at the end, modes with them: all that a forward leaves on a model."""
    with attributes_restored(model), buffers_restored(model):
        yield


@contextlib.contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """Put back at the end what modules have as attributes, and what is in those that hold others (tables of parameters and
    buffers, a cache of masks): a forward may keep tensors or counters there."""
    held = [(module, _held(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, (attributes, contents) in held:
            vars(module).clear()
            vars(module).update(attributes)
            for container, content in contents:
                container.clear()
                container.update(content) if isinstance(container, (dict, set)) else container.extend(content)


def _held(module: nn.Module) -> Tuple[Dict[str, Any], List[Tuple[Any, Any]]]:
    attributes = dict(vars(module))
    containers = [
        value for value in attributes.values() if type(value).__name__ in ("dict", "list", "set", "OrderedDict")
    ]
    return attributes, [(container, container.copy()) for container in containers]


def load_state(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy `tensors`, one for each name of the model's state dict, into `model`."""
    # this state dict carries the modules' versions, without which torchvision's MNASNet refuses to load any
    state = model.state_dict()
    state.update(tensors)
    model.load_state_dict(state)
