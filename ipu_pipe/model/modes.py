"""A model's training and evaluation modes, put back as they were after it ran for a look at it."""

from __future__ import annotations

import contextlib
from typing import Iterator

from torch import nn


@contextlib.contextmanager
def modes_restored(*models: nn.Module) -> Iterator[None]:
    """Put back at the end whether each module of `models` was training."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
