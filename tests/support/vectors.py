"""Write the objectives of tools.experiments.vector_runs as modules, and plain replays of them."""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, List

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from ipu_pipe import begin_stage
from ipu_pipe.replay.replays import RandomizedReplays
from tools.experiments.vector_runs import Floats, Quadratic


class VectorBlock(nn.Module):
    """A contiguous part of the vector: it adds its share of the product and of the penalty to those
    of the previous blocks."""

    def __init__(self, first: int, last: int, l2: float) -> None:
        super().__init__()
        self.first, self.last, self.l2 = first, last, l2
        self.weight = nn.Parameter(torch.zeros(last - first))

    def forward(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Return (B, 2), product and penalty so far, from x (B, d) and `before` (B, 2)."""
        product = x[:, self.first : self.last] @ self.weight
        penalty = (self.l2 / 2 * self.weight.square().sum()).expand(len(x))
        return before + torch.stack((product, penalty), 1)


class Vector(nn.Module):
    """A parameter vector of `dimension` coordinates, 0 at first, in `blocks` equal contiguous
    parts, each a stage."""

    def __init__(self, dimension: int, blocks: int, l2: float = 0.0) -> None:
        super().__init__()
        size = dimension // blocks
        parts: List[nn.Module] = [VectorBlock(i * size, (i + 1) * size, l2) for i in range(blocks)]
        self.blocks = nn.ModuleList(begin_stage(part) for part in parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x w and l2/2 ||w||^2 of each sample, (B, 2), from x (B, d)."""
        total = x.new_zeros(len(x), 2)
        for block in self.blocks:
            total = block(x, total)
        return total


def compute_half_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return half the mean square error plus the penalty."""
    return (output[:, 0] - target).square().mean() / 2 + output[0, 1]


def compute_logistic_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the binary cross-entropy plus the penalty."""
    return F.binary_cross_entropy_with_logits(output[:, 0], target) + output[0, 1]


# ---- randomized PipeDream, one step at a time: the last `bound` + 1 iterates are copied for every block update


def _append_to_array(history: Floats, newest: Floats, bound: int) -> Floats:
    return np.concatenate([history[max(len(history) - bound, 0) :], newest[None]])


def _append_to_list(history: List[Floats], newest: Floats, bound: int) -> List[Floats]:
    return [x.copy() for x in history[max(len(history) - bound, 0) :]] + [newest]


def _replay(
    append: Callable[[Any, Floats, int], Any],
    begin: Callable[[Floats], Any],
    objective: Quadratic,
    source: RandomizedReplays,
    bound: int,
    rate: float,
    count: int,
) -> Floats:
    P, d = source.stages, objective.dimension
    size, history = d // P, begin(np.zeros(d))
    stages, microbatches = source.list_stages(0, count), source.list_microbatches(0, count)
    delays = source.list_delays(0, count)
    for k in range(count):
        stale = np.empty(d)
        for j in range(P):
            block = slice(j * size, (j + 1) * size)
            stale[block] = history[len(history) - 1 - delays[j, k]][block]
        b, s = int(microbatches[k]) % objective.batches, int(stages[k])
        block, rows = (
            slice(s * size, (s + 1) * size),
            slice(b * objective.batch_size, (b + 1) * objective.batch_size),
        )
        A = objective.A[rows]
        new = history[-1].copy()
        new[block] -= (
            rate * (A[:, block].T @ (A @ stale - objective.b[rows])) / objective.batch_size
        )
        history = append(history, new, bound)
    return np.asarray(history[-1])


# replays of Algorithm 1 from 0, which return the iterate (d,) after `count` block updates; the history is an array or a list
PLAIN: Dict[str, Callable[[Quadratic, RandomizedReplays, int, float, int], Floats]] = {
    "an array": functools.partial(_replay, _append_to_array, lambda start: start[None]),
    "a list": functools.partial(_replay, _append_to_list, lambda start: [start]),
}
