"""What one process holds of a pipeline: its stage, what enters and leaves it, what it shares with its neighbours."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Callable, ContextManager, Dict, List, Optional, Sequence, Tuple

import torch
from torch import nn

from ipu_pipe.backends.processes.layout import Layout
from ipu_pipe.backends.processes.ties import Ties
from ipu_pipe.model.cutting import Crossing, Piece
from ipu_pipe.model.randomness import KeyedRandomness
from ipu_pipe.schedule.methods import Structure


@dataclass(frozen=True)
class Place:
    """This process's. `source(m)`: microbatch m as (x, y), asked for on the first and the last stage only. `crossings`: what
    crosses each cut. Of blocks with losses of their own (`structure`): `head`, the auxiliary head, and `behind`, the stage
    before, of which this one holds a duplicate. `ties`: weights that other stages use, too. `checksums`: CRC-32 of the batches
    that were read, by microbatch, until they are compared with those of the other ranks that read them.
    """

    layout: Layout
    piece: Piece
    crossings: Sequence[Crossing]
    source: Callable[[int], Tuple[Any, Any]]
    device: torch.device
    random: Optional[KeyedRandomness] = None
    structure: Optional[Structure] = None
    head: Optional[nn.Module] = None
    behind: Optional[Piece] = None
    ties: Ties = Ties()
    checksums: Dict[int, int] = field(default_factory=dict)

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the first stage."""
        return self.layout.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.layout.stage == self.layout.depth - 1

    @property
    def is_local(self) -> bool:
        """Whether gradients stay inside blocks."""
        return self.structure is not None

    @property
    def has_loss(self) -> bool:
        """Whether a loss is taken of what this stage gives."""
        return self.head is not None or self.is_last

    @cached_property
    def held(self) -> List[torch.Tensor]:
        """Parameters and buffers of what is here, each once."""
        modules = [piece.tensors() for piece in (self.piece, self.behind) if piece is not None]
        own = [t for tensors in modules for t in tensors]
        if self.head is not None:
            own += [*self.head.parameters(), *self.head.buffers()]
        return list({id(t): t for t in own}.values())

    def draw_forward(self, m: int, piece: Piece) -> ContextManager[None]:
        """Key what modules draw in a forward of a piece for microbatch m."""
        if self.random is None:
            return nullcontext()
        return self.random.forward(m * self.layout.width + self.layout.replica, piece.calls_before)

    def draw_backward(self, m: int) -> ContextManager[None]:
        """Key what modules draw in the backward of microbatch m, where checkpoints run forwards again."""
        if self.random is None:
            return nullcontext()
        return self.random.backward(m * self.layout.width + self.layout.replica)

    def data(self, m: int) -> Tuple[Any, Any]:
        """Inputs and labels of microbatch m; None what this stage does not need."""
        if self.enter is not None and not self.has_loss:
            return None, None
        x, y = self.source(m)
        return x if self.enter is None else None, y if self.has_loss else None

    @property
    def others(self) -> List[int]:
        """The other stages."""
        return [stage for stage in range(self.layout.depth) if stage != self.layout.stage]

    @property
    def _shares(self) -> bool:
        return self.structure is not None and self.structure.overlap > 0

    @property
    def _entries(self) -> List[Optional[Crossing]]:
        """What arrives with a microbatch, by stage: where layers are shared, a stage starts one layer earlier."""
        return [None, *self.crossings] if not self._shares else [None, None, *self.crossings[:-1]]

    @cached_property
    def enter(self) -> Optional[Crossing]:
        """What arrives with a microbatch; None where it is the data."""
        return self._entries[self.layout.stage]

    @cached_property
    def leave(self) -> Optional[Crossing]:
        """What the next stage gets."""
        return None if self.is_last else self._entries[self.layout.stage + 1]

    @cached_property
    def shared_before(self) -> List[nn.Parameter]:
        """Weights of the stage before that are here, too."""
        return trainable(self.behind) if self.behind is not None else []

    @cached_property
    def shared_own(self) -> List[nn.Parameter]:
        """Weights of this stage that the next one holds, too."""
        return trainable(self.piece) if self._shares and not self.is_last else []

    @property
    def shared(self) -> List[Tuple[int, List[nn.Parameter]]]:
        """The weights shared with each neighbour."""
        pairs = [(self.layout.stage - 1, self.shared_before), (self.layout.stage + 1, self.shared_own)]
        return [(neighbour, weights) for neighbour, weights in pairs if weights]


def trainable(piece: Piece) -> List[nn.Parameter]:
    """A piece's parameters that need a gradient, in its order."""
    return [p for p in piece.parameters() if p.requires_grad]
