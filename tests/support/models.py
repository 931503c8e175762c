"""Help tests of models: modules from functions, meta models, counts of weights, gradients."""

from __future__ import annotations

from typing import Any, Callable, List

import torch
from torch import nn
from torch.nn import functional as F


class Composed(nn.Module):
    """A module of named parts whose forward is `function(module, *inputs)`; a tensor among the
    parts becomes a buffer."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self._function = function
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self._function(self, *inputs)


def take_output(inner: nn.Module) -> nn.Module:
    """Wrap a recurrent layer so that it returns its outputs without its state."""
    return Composed(lambda m, x: m.inner(x)[0], inner=inner)


class Versioned(nn.Sequential):
    """A Sequential whose state dict must carry its version, as torchvision's MNASNet's must."""

    _version = 2

    def _load_from_state_dict(
        self, state: Any, prefix: str, local_metadata: Any, *others: Any
    ) -> None:
        if local_metadata.get("version") not in (1, 2):
            raise ValueError("version should be set to 1 or 2")
        super()._load_from_state_dict(state, prefix, local_metadata, *others)


def build_on_meta(make: Callable[..., nn.Module], **args: Any) -> Any:
    """Build a model on the meta device, with sizes and names but without memory."""
    with torch.device("meta"):
        return make(**args)


def count_weights(model: nn.Module) -> int:
    """Return the number of scalars in all parameters."""
    return sum(p.numel() for p in model.parameters())


def find_unreached_weights(
    make: Callable[[], nn.Module], x: torch.Tensor, y: torch.Tensor
) -> List[str]:
    """Return the names of weights that a gradient of cross-entropy does not reach.

    Assert before that the seed alone decides the first weights.
    """
    models = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        models.append(make())
    first, again, other = (
        torch.cat([p.detach().flatten() for p in m.parameters()]) for m in models
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    F.cross_entropy(models[0](x), y).backward()
    return [
        n for n, p in models[0].named_parameters() if p.grad is None or not p.grad.abs().sum() > 0
    ]
