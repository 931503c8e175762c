"""Auxiliary heads, which turn the activations of a block into outputs of the model's own form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Sequence, Union

import torch
from torch import nn

from ipu_pipe.errors import BadInput

# the groups of a head's GroupNorm
GROUPS = 8

# (an example of the activations at the end of a block, one of the model's outputs) -> head
MakeHead = Callable[[torch.Tensor, torch.Tensor], nn.Module]
# the resolved value of a config's method_args.head
Heads = Union[MakeHead, "AugLocal"]


class TokenHead(nn.Module):
    """Layer norm and projection (the paper's Transformers): (B, T, W) -> (B, classes, T), or (B,
    classes) of the mean token.
    """

    def __init__(self, width: int, classes: int, mean: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.projection = nn.Linear(width, classes)
        self._mean = mean

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output for x (B, T, W)."""
        x = self.norm(x)
        # torch's cross-entropy takes the classes in the second dimension
        return self.projection(x.mean(dim=1)) if self._mean else self.projection(x).transpose(1, 2)


def _make_norm(channels: int, batch_norm: bool) -> nn.Module:
    # GroupNorm demands that the groups divide the channels
    groups = next(g for g in range(min(GROUPS, channels), 0, -1) if channels % g == 0)
    return nn.BatchNorm2d(channels) if batch_norm else nn.GroupNorm(groups, channels)


def make_image_head(channels: int, classes: int, batch_norm: bool) -> nn.Module:
    """Return norm, ReLU, mean over space and linear: (B, C, H, W) -> (B, classes) (the paper's
    ResNets).

    The norm is GroupNorm if the model has no BatchNorm, so that microbatches of one sample work.
    """
    norm = _make_norm(channels, batch_norm)
    return nn.Sequential(
        norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
    )


class ResidualLayer(nn.Module):
    """Two 3x3 convolutions with norms, added to their input, or to a 1x1 convolution of it: (B, C,
    H, W) -> (B, C', H', W').
    """

    def __init__(self, channels: int, to: int, stride: int, batch_norm: bool) -> None:
        super().__init__()
        # without biases, which the norms would subtract again
        self.conv1 = nn.Conv2d(channels, to, 3, stride, 1, bias=False)
        self.norm1 = _make_norm(to, batch_norm)
        self.norm2 = _make_norm(to, batch_norm)
        self.conv2 = nn.Conv2d(to, to, 3, 1, 1, bias=False)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != to:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, to, 1, stride, bias=False), _make_norm(to, batch_norm)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        residual = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(residual + self.shortcut(x))


@dataclass(frozen=True)
class AugLocal:
    """Heads of d = `depth` layers in the shapes of later ones, picked uniformly, and the usual head
    (AugLocal, Ma et al.).

    Layer l of L, from 0, picks l + (L - 1 - l) i / d, i = 1..d, rounded, or all later layers if
    there are at most d. Depths fall
    with l: d_l = max(1, round(d (1 - c l / (L - 2)) + c l / (L - 2))), c = `pyramid`.
    """

    depth: int
    pyramid: float = 0.5

    def compute_depth(self, layer: int, layers: int) -> int:
        """Return d_l."""
        share = self.pyramid * layer / (layers - 2) if layers > 2 else 0.0
        return max(1, round(self.depth * (1 - share) + share))

    def pick(self, layer: int, layers: int) -> list[int]:
        """Return the layers whose shapes the head of a layer has."""
        left = layers - 1 - layer
        depth = self.compute_depth(layer, layers)
        if depth >= left:
            return list(range(layer + 1, layers))
        return [round(layer + left / depth * i) for i in range(1, depth + 1)]

    def make(
        self,
        model: nn.Module,
        layer: int,
        activations: Sequence[torch.Tensor],
        output: torch.Tensor,
    ) -> nn.Module:
        """Return the head of a layer. Raise `BadInput` for activations that are neither images nor
        vectors.

        `activations`: the activations at the ends of all layers but the last, which is taken to
        have the shape of the one before.
        """
        x = activations[layer]
        shapes = [tuple(one.shape) for one in (*activations, activations[-1])]
        modules: list[nn.Module] = []
        for picked in self.pick(layer, len(shapes)):
            to = shapes[picked]
            if x.dim() != len(to) or x.dim() not in (2, 4):
                raise BadInput(
                    f"method_args.head: depth: layers are made for images and vectors, not from "
                    f"{tuple(x.shape)} to {to}"
                )
            if x.dim() == 2:
                module: nn.Module = nn.Sequential(nn.Linear(x.shape[1], to[1]), nn.ReLU())
            else:
                module = ResidualLayer(
                    x.shape[1],
                    to[1],
                    # a later layer may be larger, which no stride can make
                    max(round(x.shape[2] / to[2]), 1),
                    _has_batch_norm(model),
                )
            # in evaluation mode, so that running statistics do not change
            modules.append(module.to(x.device, x.dtype).eval())
            with torch.no_grad():
                x = module(x)
        return nn.Sequential(*modules, make_head(model, x, output)).train()


def _has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def make_head(model: nn.Module, activation: torch.Tensor, output: torch.Tensor) -> nn.Module:
    """Return the head for activations of images, tokens or vectors, by their shape. Raise
    `BadInput` for other shapes.
    """
    shape = tuple(activation.shape)
    classes = output.shape[1] if output.dim() > 1 else 0
    if len(shape) == 4 and output.dim() == 2:
        return make_image_head(shape[1], classes, _has_batch_norm(model))
    if len(shape) == 3 and output.dim() in (2, 3):
        return TokenHead(shape[2], classes, mean=output.dim() == 2)
    if len(shape) == 2 and output.dim() == 2:
        return nn.Linear(shape[1], classes)
    raise BadInput(
        f"model: no auxiliary head for activations {shape} and outputs {tuple(output.shape)}; set "
        f"method_args.head to"
        " module:function, a function that makes one from an example of both"
    )
