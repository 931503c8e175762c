"""Layers that several blocks hold. With an overlap of 1 block j trains layer j - 1 once more, and the two gradients of a
layer are averaged:

    block 1:  x1 -> layer 0' -> layer 1 -> head 1        layer 0' is a duplicate of layer 0, kept equal by the averaging
    block 2:  x2 -> layer 1' -> layer 2 -> head 2        x2: what enters layer 1
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Sequence

import torch

from ipu_pipe.errors import BadInput
from ipu_pipe.model.buffers import buffers_restored
from ipu_pipe.model.cutting import Piece


class Duplicates:
    """What each block holds of the `overlap` pieces before its own: the same weights, gradients apart. Raises BadInput."""

    def __init__(self, pieces: Sequence[Piece], overlap: int) -> None:
        self._pieces = pieces
        for index in range(len(pieces)):
            for again in range(max(0, index - overlap), index):
                if pieces[again].own_weights():
                    raise BadInput(
                        "model: local_overlapping: weights of the model itself cannot be duplicated: put them into modules"
                    )
        self._held = [self._of_block(index, overlap) for index in range(len(pieces))]

    def _of_block(self, index: int, overlap: int) -> Dict[str, torch.Tensor]:
        """Of the weights of the pieces before block `index` that it holds too: "piece/name" -> tensor in the same memory."""
        found = {}
        for again in range(max(0, index - overlap), index):
            for name, parameter in self._pieces[again].named_parameters():
                found[f"{again}/{name}"] = parameter.detach().requires_grad_(parameter.requires_grad)
        return found

    def run(self, index: int, again: int, value: Any) -> Any:
        """Piece `again`, as block `index` holds it, on what enters it."""
        own = {
            key.partition("/")[2]: tensor
            for key, tensor in self._held[index].items()
            if key.partition("/")[0] == str(again)
        }
        piece = self._pieces[again]
        with buffers_restored(piece):  # the block that owns the layer moves its running statistics
            return torch.func.functional_call(piece, own, (value,))

    def average(self) -> None:
        """Each layer's gradient becomes the mean over the blocks that hold it."""
        for again, piece in enumerate(self._pieces):
            for name, parameter in piece.named_parameters():
                held = [parameter.grad]
                for duplicates in self._held:
                    tensor = duplicates.get(f"{again}/{name}")
                    if tensor is not None:
                        held.append(tensor.grad)
                        tensor.grad = None
                parameter.grad = mean_gradient(held)


def mean_gradient(gradients: Sequence[Optional[torch.Tensor]]) -> Optional[torch.Tensor]:
    """The mean of a layer's gradients in the order of its blocks; a block that does not reach it counts as zero."""
    given = [g for g in gradients if g is not None]
    if not given or len(gradients) == 1:
        return given[0] if given else None
    total = given[0]
    for g in given[1:]:
        total = total + g
    return total / len(gradients)
