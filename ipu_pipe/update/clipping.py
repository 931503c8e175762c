"""Clipping of gradients by the norm of a stage, of all stages, or of all stages some updates ago."""

from __future__ import annotations

import math
from typing import Dict, Iterable, List, Optional, Sequence, Union

import torch

from ipu_pipe.schedule.table import Kind, Schedule

MARGIN = 1e-6  # added to a norm, as torch's own clipping does


def compute_gradient_norms(parameters: Iterable[torch.Tensor]) -> List[torch.Tensor]:
    """Return the Euclidean norm of each gradient that exists, by one kernel a tensor.

    Torch's own clipping takes all tensors of a GPU at once; whether a stage has a process of its own must not change the kernels.
    """
    return [torch.linalg.vector_norm(p.grad) for p in parameters if p.grad is not None]


def clip_to_norm(norm: float, parameters: Iterable[torch.Tensor], norms: Sequence[torch.Tensor]) -> None:
    """Scale the gradients of `parameters` so that the norm of all gradients is at most `norm`.

    `norms` are the norms of all of them, those of other parameters included.
    """
    if not norms:
        return
    total = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
    _multiply(parameters, torch.clamp(norm / (total + MARGIN), max=1.0))


def _multiply(parameters: Iterable[torch.Tensor], scale: Union[float, torch.Tensor]) -> None:
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(scale.to(p.grad.device) if isinstance(scale, torch.Tensor) else scale)


def compute_norm(parameters: Iterable[torch.Tensor]) -> Optional[float]:
    """Return the Euclidean norm of the gradients of these parameters, or None if there are none."""
    norms = compute_gradient_norms(parameters)
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else None


class DelayedGlobalNorm:
    """Clipping of asynchronous methods by a global norm.

    A stage updates before the other stages have their gradients, so it takes the norm of the newest update that all stages have
    done before any of them does this one: `lag` updates back. After a drain there is none yet, and the stage's own norm clips.
    """

    def __init__(self, norm: float, schedule: Schedule) -> None:
        self._norm, self._schedule = norm, schedule
        self.lag = _common_lag(schedule)
        self._totals: Dict[int, float] = {}

    def source(self, k: int) -> Optional[int]:
        """Return the update whose global norm clips update k, or None if the stage's own norm does."""
        begin, _ = self._schedule.stretch(k)
        return k - self.lag if k - self.lag >= begin else None

    def is_needed(self, k: int) -> bool:
        """Return whether the norm of update k clips a later update."""
        return k + self.lag < self._schedule.stretch(k)[1]

    def remember(self, k: int, norms: Sequence[Optional[float]]) -> None:
        """Store the norms of update k, one for each stage in order."""
        self._totals[k] = math.sqrt(sum(n * n for n in norms if n is not None))
        self._totals.pop(k - 2 * self.lag - 1, None)

    def clip(self, k: int, parameters: Sequence[torch.Tensor], own: Optional[float]) -> None:
        """Scale a stage's gradients of update k, whose own norm is `own`."""
        source = self.source(k)
        total = own if source is None else self._totals[source]
        if total is not None:
            _multiply(parameters, min(self._norm / (total + MARGIN), 1.0))


def _common_lag(schedule: Schedule) -> int:
    """Return the least g such that all stages have done update k - g before any stage does update k, for all k."""
    longest = max(schedule.stretches, key=lambda part: part.microbatches)
    first = longest.first_microbatch // schedule.accumulate
    count = min(longest.microbatches // schedule.accumulate, 4 * schedule.stages + 8)
    slots = schedule.slots(Kind.UPDATE, first, first + count)
    earliest, latest = slots.min(axis=0), slots.max(axis=0)
    for lag in range(1, count):
        if (latest[:-lag] < earliest[lag:]).all():
            return lag
    return max(count, 1)
