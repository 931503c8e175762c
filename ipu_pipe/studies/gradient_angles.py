"""The angle between each block's local gradient and the true one, seen on one fixed batch (Laskin et al. 2020, Figure 6(a))."""

from __future__ import annotations

import math
from typing import Any, Callable, List, NamedTuple, Optional, Sequence

import torch
from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.local.blocks import compute_losses, get_blocks
from ipu_pipe.model.calling import call
from ipu_pipe.model.nests import copied, lead
from ipu_pipe.model.probe import Loss, observe_effects
from ipu_pipe.model.randomness import KeyedRandomness
from ipu_pipe.model.restoring import buffers_restored, modes_restored, undisturbed


class Angle(NamedTuple):
    """Between two gradients: in degrees (0 to 180; below 90 the one descends the other's loss too), and its cosine."""

    degrees: float
    cosine: float


class GradientProbe:
    """The angle between each block's local gradient and the true one, on one fixed batch.

    Local: of the block's own loss, a layer of several blocks has the mean of theirs. True: of the last block's loss through the
    whole model. Both at the same weights, in training mode, with the same buffers and random draws; weights, buffers, gradients,
    modes and random states are left as found.

    `model`: a BlockedModel, between two updates; BadInput where it is another. `x`, `y`: the batch. `loss`: as
    `ipu_pipe.local.blocks.compute_losses` takes it. `seed`: of the draws.
    """

    def __init__(self, model: nn.Module, loss: Loss, x: Any, y: Any, seed: int = 0) -> None:
        blocks = get_blocks(model)
        if blocks is None:
            raise BadInput(f"model: {type(model).__name__}: has no blocks that are trained by losses of their own")
        self._model, self._loss, self._x, self._y, self._seed, self._blocks = model, loss, x, y, seed, blocks
        self._random = observe_effects(model, copied(x)).draws
        # a block's layers without its head; none where they are frozen
        self._own = [
            [t for t in piece.tensors() if isinstance(t, nn.Parameter) and t.requires_grad] for piece in blocks.pieces
        ]

    def angles(self) -> List[Optional[Angle]]:
        """One for each block, in order; None where a gradient is zero, not finite, or the block does not train."""
        whole = self._blocks.model
        with undisturbed(self._model), modes_restored(whole):
            keyed = KeyedRandomness(self._model, self._random, self._seed, lead(self._x).device)
            try:
                self._model.train()
                whole.train()
                local = self._gradients(self._model, keyed, self._blocks.average_duplicates)
                true = self._gradients(whole, keyed, lambda: None)
            finally:
                keyed.remove()
        return [angle(a, b) for a, b in zip(local, true)]

    def _gradients(
        self, model: nn.Module, keyed: KeyedRandomness, finish: Callable[[], None]
    ) -> List[torch.Tensor]:
        """Of each block's layers, one vector of float64 a block."""
        for parameter in self._model.parameters():
            parameter.grad = None
        with buffers_restored(self._model), buffers_restored(self._blocks.model):
            with keyed.forward(0):
                output = call(model, copied(self._x))
            with keyed.backward(0):
                torch.autograd.backward(compute_losses(self._loss, output, self._y))
        finish()
        return [_vector([torch.zeros_like(p) if p.grad is None else p.grad for p in own]) for own in self._own]


def _vector(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.detach().double().flatten() for t in tensors]) if tensors else torch.zeros(0)


def angle(a: torch.Tensor, b: torch.Tensor) -> Optional[Angle]:
    """Between two vectors; None where one is zero or not finite. By Kahan's formula, exact for small angles, where the arc cosine
    is not: 2 atan(|a/|a| - b/|b|| / |a/|a| + b/|b||)."""
    lengths = float(a.norm()), float(b.norm())
    if not all(0 < length < math.inf for length in lengths):
        return None
    a, b = a / lengths[0], b / lengths[1]
    degrees = math.degrees(2 * math.atan2(float((a - b).norm()), float((a + b).norm())))
    return Angle(degrees, max(-1.0, min(1.0, float(a @ b))))
