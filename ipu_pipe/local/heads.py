"""Auxiliary heads, which turn the activations of a block into outputs of the model's own form."""

from __future__ import annotations

from typing import Callable

import torch
from torch import nn

from ipu_pipe.errors import BadInput

GROUPS = 8  # of a head's GroupNorm

# (an example of the activations at the end of a block, one of the model's outputs) -> head
MakeHead = Callable[[torch.Tensor, torch.Tensor], nn.Module]


class TokenHead(nn.Module):
    """Layer norm and projection (the paper's Transformers): (B, T, W) -> (B, classes, T), or (B, classes) of the mean token."""

    def __init__(self, width: int, classes: int, mean: bool) -> None:
        super().__init__()
        self.norm, self.projection, self._mean = nn.LayerNorm(width), nn.Linear(width, classes), mean

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output for x (B, T, W)."""
        x = self.norm(x)
        return self.projection(x.mean(dim=1)) if self._mean else self.projection(x).transpose(1, 2)


def make_image_head(channels: int, classes: int, batch_norm: bool) -> nn.Module:
    """Return norm, ReLU, mean over space and linear: (B, C, H, W) -> (B, classes) (the paper's ResNets).

    The norm is GroupNorm if the model has no BatchNorm, so that microbatches of one sample work.
    """
    groups = next(g for g in range(min(GROUPS, channels), 0, -1) if channels % g == 0)
    norm = nn.BatchNorm2d(channels) if batch_norm else nn.GroupNorm(groups, channels)
    return nn.Sequential(norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def make_head(model: nn.Module, activation: torch.Tensor, output: torch.Tensor) -> nn.Module:
    """Return the head for activations of images, tokens or vectors, by their shape. Raise `BadInput` for other shapes."""
    shape, classes = tuple(activation.shape), output.shape[1] if output.dim() > 1 else 0
    if len(shape) == 4 and output.dim() == 2:
        norms = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
        return make_image_head(shape[1], classes, norms)
    if len(shape) == 3 and output.dim() in (2, 3):
        return TokenHead(shape[2], classes, mean=output.dim() == 2)
    if len(shape) == 2 and output.dim() == 2:
        return nn.Linear(shape[1], classes)
    raise BadInput(
        f"model: no auxiliary head for activations {shape} and outputs {tuple(output.shape)}; set method_args.head to"
        " module:function, a function that makes one from an example of both"
    )
