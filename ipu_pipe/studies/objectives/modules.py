"""The same objectives as an ordinary module and a loss, for any method on any backend."""

from __future__ import annotations

from typing import List

import torch
from torch import nn
from torch.nn import functional as F

from ipu_pipe.model.stages import begin_stage


class Block(nn.Module):
    """A contiguous part of the vector: adds its share of the product, and of the penalty, to what came before."""

    def __init__(self, first: int, last: int, l2: float) -> None:
        super().__init__()
        self.first, self.last, self.l2 = first, last, l2
        self.weight = nn.Parameter(torch.zeros(last - first))

    def forward(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """x: (B, d); before: (B, 2), the product and the penalty so far -> (B, 2)."""
        product = x[:, self.first : self.last] @ self.weight
        penalty = (self.l2 / 2 * self.weight.square().sum()).expand(len(x))
        return before + torch.stack((product, penalty), 1)


class Vector(nn.Module):
    """A parameter vector of `dimension` coordinates in `blocks` equal contiguous parts, each a stage, that begins at 0.

    x: (B, d) -> (B, 2): x w, and l2/2 ||w||^2.
    """

    def __init__(self, dimension: int, blocks: int, l2: float = 0.0) -> None:
        super().__init__()
        size = dimension // blocks
        parts: List[nn.Module] = [Block(i * size, (i + 1) * size, l2) for i in range(blocks)]
        self.blocks = nn.ModuleList(begin_stage(part) for part in parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product and the penalty of each sample."""
        total = x.new_zeros(len(x), 2)
        for block in self.blocks:
            total = block(x, total)
        return total


def half_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Half the mean square of what is left, plus the penalty."""
    return (output[:, 0] - target).square().mean() / 2 + output[0, 1]


def logistic(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The binary cross-entropy, plus the penalty."""
    return F.binary_cross_entropy_with_logits(output[:, 0], target) + output[0, 1]
