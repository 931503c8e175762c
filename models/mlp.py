"""Multi-layer perceptrons: one stage per linear layer, or per residual block."""

from __future__ import annotations

from collections import OrderedDict
from typing import List, Tuple

import torch
from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.model.stages import begin_stage


def mlp(inputs: int = 64, width: int = 128, layers: int = 4, classes: int = 10) -> nn.Sequential:
    """Build a perceptron of `layers` hidden layers of `width` with ReLU and a linear head:
    `layers + 1` stages. Without hidden layers it is a linear classifier.

    Input (B, ...) with `inputs` values per sample, output (B, classes). Raise `BadInput` if a size
    is out of range.
    """
    for name, value in (
        ("inputs", inputs),
        ("width", width),
        ("layers", layers),
        ("classes", classes),
    ):
        if isinstance(value, int) and value > 100_000:
            raise BadInput(f"mlp: {name}: {value}: must be at most 100000")
        least = 0 if name == "layers" else 1
        if value < least:
            raise BadInput(f"mlp: {name}: {value}: must be at least {least}")
    children: List[Tuple[str, nn.Module]] = [("flatten", nn.Flatten())]
    for layer in range(1, layers + 1):
        linear = nn.Linear(inputs if layer == 1 else width, width)
        children.append((f"fc{layer}", begin_stage(linear) if layer > 1 else linear))
        children.append((f"relu{layer}", nn.ReLU()))
    head = nn.Linear(width if layers else inputs, classes)
    children.append(("head", begin_stage(head) if layers else head))
    return nn.Sequential(OrderedDict(children))


class PreNormBlock(nn.Module):
    """A residual block: x + Linear(relu(LayerNorm(x))), (B, width) -> (B, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(torch.relu(self.norm(x)))


def residual_mlp(
    inputs: int = 784, width: int = 64, blocks: int = 32, classes: int = 10
) -> nn.Sequential:
    """Build a linear layer, `blocks` residual blocks and a linear head: `blocks + 2` stages.

    Input (B, ...) with `inputs` values per sample, output (B, classes).
    """
    children: List[Tuple[str, nn.Module]] = [
        ("flatten", nn.Flatten()),
        ("stem", nn.Linear(inputs, width)),
    ]
    for block in range(1, blocks + 1):
        children.append((f"block{block}", begin_stage(PreNormBlock(width))))
    children.append(("head", begin_stage(nn.Linear(width, classes))))
    return nn.Sequential(OrderedDict(children))
