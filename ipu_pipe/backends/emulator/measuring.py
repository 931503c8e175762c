"""Losses and right answers of updates, read from their device as late as one wants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, List, Optional, Sequence

import torch

from ipu_pipe.backends.interface import StepResult
from ipu_pipe.backends.work import Work


@dataclass(frozen=True)
class _Unread:
    """What an update measured, still on its device: sums of the losses of `count` microbatches, shares of right answers."""

    update: int
    losses: List[torch.Tensor]
    shares: List[Optional[torch.Tensor]]
    samples: int
    count: int


class BatchSums:
    """Sums over a batch's microbatches: of the losses, one of each block that has its own, and of right answers."""

    def __init__(self) -> None:
        self._losses: List[torch.Tensor] = []
        self._right: List[Optional[torch.Tensor]] = []
        self.samples = self.count = 0

    def add(self, losses: List[torch.Tensor], answers: List[Optional[torch.Tensor]], samples: int) -> None:
        """One microbatch; `answers`: (right, all), None where that has no meaning."""
        self._losses = [a + b for a, b in zip(self._losses, losses)] if self.count else losses
        self._right = [_sum(a, b) for a, b in zip(self._right, answers)] if self.count else answers
        self.samples, self.count = self.samples + samples, self.count + 1

    def of_update(self, k: int) -> _Unread:
        """All of them, as what update k measured."""
        shares = [None if answers is None else answers[0] / answers[1].clamp(min=1) for answers in self._right]
        return _Unread(k, self._losses, shares, self.samples, self.count)


class Measurements:
    """What updates measured and was not read yet."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._unread: List[_Unread] = []

    def add(self, k: int, sums: BatchSums) -> None:
        """Of update k."""
        self._unread.append(sums.of_update(k))

    def read(self) -> List[StepResult]:
        """By update, for which a GPU is waited for once. Raises RunFault where a loss is not finite."""
        unread, self._unread = self._unread, []
        losses = _values([loss for batch in unread for loss in batch.losses])
        shares = _values([share for batch in unread for share in batch.shares if share is not None])
        results = []
        for batch in unread:
            means = [next(losses) / batch.count for _ in batch.losses]
            self._work.refuse_nonfinite(batch.update, means)
            own = [None if share is None else next(shares) for share in batch.shares]
            blocks = tuple(zip(means, own)) if len(means) > 1 else ()
            results.append(StepResult(means[-1], own[-1], batch.samples, blocks))
        return results


def of_steps(results: Sequence[StepResult], block_updates: int) -> List[StepResult]:
    """What steps of so many updates of single stages measured. Samples: a microbatch's, whose gradients of P stages they stand
    for."""
    if block_updates == 1:
        return list(results)
    found = []
    for first in range(0, len(results), block_updates):
        own = results[first : first + block_updates]
        shares = [result.accuracy for result in own if result.accuracy is not None]
        accuracy = sum(shares) / len(shares) if len(shares) == len(own) else None
        found.append(StepResult(sum(result.loss for result in own) / len(own), accuracy, own[0].samples))
    return found


def _sum(a: Optional[torch.Tensor], b: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    return a if b is None else b if a is None else a + b


def _values(scalars: Sequence[torch.Tensor]) -> Iterator[float]:
    """Their values, for which a GPU is waited for once."""
    return iter(torch.stack([scalar.reshape(()) for scalar in scalars]).tolist() if scalars else [])
