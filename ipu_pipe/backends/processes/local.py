"""A stage with a local loss: its auxiliary head, and the layers that it shares with its neighbors.

With an overlap, stage j runs the piece of stage j - 1 once more before its own, and a layer's
gradient is the mean of both:

    stage 1:  x1 -> piece 0' -> piece 1 -> head 1        piece 0' is kept equal to piece 0 by the averaging
    stage 2:  x2 -> piece 1' -> piece 2 -> head 2        x2: the input of piece 1, which stage 1 sends
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, List, Sequence, Tuple

import torch
from torch import nn

from ipu_pipe.backends.processes.mail import SHARED, Mail, Message, Shapes
from ipu_pipe.cut.crossing import Crossing, TensorSpec
from ipu_pipe.cut.cutting import Piece
from ipu_pipe.local.blocks import average_gradients

# a neighboring stage, and the weights that both stages hold
Shared = Tuple[int, List[nn.Parameter]]


@dataclass(frozen=True)
class LocalBlock:
    """The parts of a stage with a local loss besides its piece.

    `head`: the auxiliary head, None for the last stage; `previous`: the previous stage's piece if
    layers overlap; `shared`: the weights that a neighbor holds too.
    """

    head: nn.Module | None = None
    overlaps: bool = False
    previous: Piece | None = None
    shared: Sequence[Shared] = ()

    @classmethod
    def create(
        cls, cut: Sequence[Piece], stage: int, overlaps: bool, head: nn.Module | None
    ) -> LocalBlock:
        """Return the block of a stage of a cut model."""
        if not overlaps:
            return cls(head)
        previous = cut[stage - 1] if stage else None
        # the stage that has the other copy, and the piece: the previous one, or this one again
        pairs = [(stage - 1, previous), (stage + 1, cut[stage] if stage + 1 < len(cut) else None)]
        shared = [
            (s, [p for p in piece.parameters() if p.requires_grad])
            for s, piece in pairs
            if piece is not None
        ]
        # without trained weights nothing is averaged, and no message is sent
        return cls(head, overlaps, previous, [(s, weights) for s, weights in shared if weights])

    def list_entries(self, crossings: Sequence[Crossing]) -> list[Crossing | None]:
        """Return the tensors that each stage receives, None if its input is the data.

        With an overlap a stage starts one piece earlier.
        """
        # stage 1 runs piece 0 again, so that it reads the data, too
        return [None, None, *crossings[:-1]] if self.overlaps else [None, *crossings]

    def list_needs(self) -> Iterator[tuple[int, Shapes]]:
        """Yield (source stage, shapes) of the gradients that an update needs."""
        for neighbor, weights in self.shared:
            yield neighbor, tuple(TensorSpec(tuple(p.shape), p.dtype, False) for p in weights)

    def send_gradients(self, k: int, stage: int, mail: Mail) -> None:
        """Send the gradients of the shared layers of `stage` to its neighbors, after the last
        backward of update k.

        The update may come in a later slot, and the neighbors' updates need them before.
        """
        for neighbor, weights in self.shared:
            # the neighbor waits for a message of known shape in any case
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in weights]
            mail.send(Message(SHARED, k, stage, neighbor), gradients)

    def average_gradients(self, k: int, stage: int, mail: Mail) -> None:
        """Replace the gradients of the shared layers of `stage` by the mean over the stages that
        hold them.
        """
        for neighbor, weights in self.shared:
            for p, theirs in zip(weights, mail.receive(Message(SHARED, k, neighbor, stage))):
                # without this check a parameter that no block uses would get a gradient of zero
                if p.grad is not None or bool(theirs.any()):
                    p.grad = average_gradients([p.grad, theirs])
