"""Layers that several blocks hold. With an overlap of 1 block j trains layer j - 1 once more, and the two gradients of a
layer are averaged:

    block 1:  x1 -> layer 0' -> layer 1 -> head 1        layer 0' is a duplicate of layer 0, kept equal by the averaging
    block 2:  x2 -> layer 1' -> layer 2 -> head 2        x2: what enters layer 1
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Sequence

import torch

from ipu_pipe.model.buffers import buffers_restored
from ipu_pipe.model.cutting import Piece
from ipu_pipe.model.randomness import drawing_from


class Duplicates:
    """What each block holds of the `overlap` pieces before its own: the same weights, gradients apart."""

    def __init__(self, pieces: Sequence[Piece], overlap: int) -> None:
        self._pieces = pieces
        # of each block: the number of a piece before its own -> name -> tensor in the same memory
        self._held = [
            {again: self._duplicate(pieces[again]) for again in range(max(0, index - overlap), index)}
            for index in range(len(pieces))
        ]

    def _duplicate(self, piece: Piece) -> Dict[str, torch.Tensor]:
        return {name: p.detach().requires_grad_(p.requires_grad) for name, p in piece.named_parameters()}

    def run(self, index: int, again: int, value: Any, drawn: torch.Tensor) -> Any:
        """Run piece `again`, as block `index` holds it, on what enters it; `drawn`: the random state from which the piece itself
        drew."""
        piece = self._pieces[again]
        with buffers_restored(piece), drawing_from(drawn):  # the block that owns the layer moves its running statistics
            return torch.func.functional_call(piece, self._held[index][again], (value,))

    def average(self) -> None:
        """Each layer's gradient becomes the mean over the blocks that hold it."""
        for again, piece in enumerate(self._pieces):
            duplicates = [held[again] for held in self._held if again in held]
            for name, parameter in piece.named_parameters():
                parameter.grad = mean_gradient([parameter.grad, *(tensors[name].grad for tensors in duplicates)])
                for tensors in duplicates:
                    tensors[name].grad = None


def mean_gradient(gradients: Sequence[Optional[torch.Tensor]]) -> Optional[torch.Tensor]:
    """The mean of a layer's gradients in the order of its blocks; a block that does not reach it counts as zero."""
    given = [g for g in gradients if g is not None]
    if not given or len(gradients) == 1:
        return given[0] if given else None
    total = given[0]
    for g in given[1:]:
        total = total + g
    return total / len(gradients)
