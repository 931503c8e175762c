"""The gradients of passes in flight, which belong to the pipeline: between two calls `p.grad` is
the caller's.

    between calls   zero_grad, a probe's backward, a plain warm-up    the caller's own p.grad
    in a call       p.grad is what passes in flight have gathered     the caller's is put away
"""

from __future__ import annotations

import contextlib
from typing import Iterable, Iterator

import torch


class OwnGradients:
    """Lend `p.grad` of the trained parameters to the engine for the time of a call.

    Parameters that no optimizer steps keep nothing: their gradients would only add up.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], stepped: Iterable[torch.Tensor]) -> None:
        keeps = {id(p) for p in stepped}
        # a parameter may be in two stages, and must be lent once
        self._parameters = list({id(p): p for p in (*parameters, *stepped)}.values())
        self._keeps = [id(p) in keeps for p in self._parameters]
        self._own: list[torch.Tensor | None] = [None] * len(self._parameters)
        self._is_lent = False

    @contextlib.contextmanager
    def lend(self) -> Iterator[None]:
        """Put the gradients in flight into `p.grad` inside the context, and the caller's back after
        it, also after an error.
        """
        # a drain inside a call: they are there already
        if self._is_lent:
            yield
            return
        theirs = [p.grad for p in self._parameters]
        self._swap(theirs, self._own)
        self._is_lent = True
        try:
            yield
        finally:
            self._is_lent = False
            mine = [p.grad for p in self._parameters]
            # what no optimizer steps is dropped, or it would add up for ever
            self._own = [g if keeps else None for g, keeps in zip(mine, self._keeps)]
            self._swap(mine, theirs)

    def _swap(self, old: list[torch.Tensor | None], new: list[torch.Tensor | None]) -> None:
        for p, before, after in zip(self._parameters, old, new):
            # most are None on both sides, and a write costs more than a test
            if before is not after:
                p.grad = after

    def forget(self) -> None:
        """Drop what is in flight: another state was loaded."""
        self._own = [None] * len(self._parameters)
