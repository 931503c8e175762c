"""A model's buffers (running statistics, counters), put back as they were after it ran for a look at it."""

from __future__ import annotations

import contextlib
from typing import Iterator

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
