"""What tests of models share: models without memory, sizes, gradients."""

from __future__ import annotations

from typing import Any, Callable, List

import torch
from torch import nn
from torch.nn import functional as F


class TakeOutput(nn.Module):
    """Give the outputs of a recurrent layer, without its state."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


def on_meta(make: Callable[..., nn.Module], **args: Any) -> Any:
    """Return the model without memory for its weights: sizes, names and the order of execution are the same."""
    with torch.device("meta"):
        return make(**args)


def count_weights(model: nn.Module) -> int:
    """Return the numbers in all weights."""
    return sum(p.numel() for p in model.parameters())


def find_unreached_weights(make: Callable[[], nn.Module], x: torch.Tensor, y: torch.Tensor) -> List[str]:
    """Return the weights that a gradient of cross-entropy does not reach. The seed alone decides a model's first weights."""
    models = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        models.append(make())
    first, again, other = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in models)
    assert torch.equal(first, again) and not torch.equal(first, other)
    F.cross_entropy(models[0](x), y).backward()
    return [n for n, p in models[0].named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
