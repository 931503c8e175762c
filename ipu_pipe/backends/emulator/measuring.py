"""Losses and accuracies of updates, read from their device as late as one wants: to read one makes the host wait for a GPU."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

import torch

from ipu_pipe.backends.interface import StepResult
from ipu_pipe.backends.losses import MicrobatchResult, average, tabulate
from ipu_pipe.backends.work import Work


class BatchResults:
    """The results of an update's microbatches, for each block that has a loss of its own."""

    def __init__(self) -> None:
        self.by_block: List[List[MicrobatchResult]] = []
        self.samples = self.count = 0

    def add(self, losses: List[torch.Tensor], answers: List[Optional[torch.Tensor]], samples: int) -> None:
        """Add a microbatch: a loss and (right, counted) labels or None for each block."""
        self.by_block = self.by_block or [[] for _ in losses]
        for results, loss, of_block in zip(self.by_block, losses, answers):
            results.append(MicrobatchResult(loss, of_block))
        self.samples, self.count = self.samples + samples, self.count + 1


class Measurements:
    """The results of updates that nobody has read yet."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._unread: List[Tuple[int, BatchResults]] = []

    def add(self, k: int, results: BatchResults) -> None:
        """Add the results of update k."""
        self._unread.append((k, results))

    def read(self) -> List[StepResult]:
        """Return the results since the last reading, by update. Raise `RunFault` if a loss is not finite."""
        unread, self._unread = self._unread, []
        steps = []
        for k, results in unread:
            blocks = [average(tabulate(of_block)) for of_block in results.by_block]
            self._work.refuse_nonfinite(k, [loss for loss, _ in blocks])
            steps.append(StepResult(*blocks[-1], results.samples, tuple(blocks) if len(blocks) > 1 else ()))
        return steps


def combine_block_updates(results: Sequence[StepResult], block_updates: int) -> List[StepResult]:
    """Return the results of steps that consist of `block_updates` updates of single stages each, in order.

    A step's samples are those of one microbatch: its updates stand for the gradients of all P stages of that microbatch.
    """
    if block_updates == 1:
        return list(results)
    steps = []
    for first in range(0, len(results), block_updates):
        of_step = results[first : first + block_updates]
        shares = [result.accuracy for result in of_step if result.accuracy is not None]
        accuracy = sum(shares) / len(shares) if len(shares) == len(of_step) else None
        steps.append(StepResult(sum(result.loss for result in of_step) / len(of_step), accuracy, of_step[0].samples))
    return steps
