"""Losses of a stage: of a batch's microbatches, and on their way to the first rank, which tells what an update measured."""

from __future__ import annotations

from collections import deque
from typing import Any, Deque, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist

from ipu_pipe.backends.interface import StepResult
from ipu_pipe.backends.processes.layout import Layout
from ipu_pipe.backends.processes.mail import RESULT, Mail, Message
from ipu_pipe.model.cutting import Shape

RESULT_SHAPE = (Shape((2,), torch.float64, False),)  # loss, share of right answers
Measured = Tuple[float, Optional[float]]  # the same


class Losses:
    """Of microbatches whose update is still to come, in order."""

    def __init__(self) -> None:
        self._held: Deque[Tuple[torch.Tensor, Optional[torch.Tensor]]] = deque()

    def add(self, loss: torch.Tensor, answers: Optional[torch.Tensor]) -> None:
        """Of the next microbatch; `answers`: (right, all), None where that has no meaning."""
        self._held.append((loss, answers))

    def take(self, count: int) -> Measured:
        """Mean loss and share of right answers of the next `count`."""
        batch = [self._held.popleft() for _ in range(count)]
        mean = float(sum(loss for loss, _ in batch)) / len(batch)
        answers = [counts for _, counts in batch if counts is not None]
        right = torch.stack(answers).sum(dim=0) if answers else None
        return mean, None if right is None else float(right[0] / right[1].clamp(min=1))


class Telling:
    """The stages `with_loss` tell the first one of each replica theirs; that averages them over `first_stages`, the group of
    the replicas' first ranks. `samples`: of an update."""

    def __init__(self, mail: Mail, layout: Layout, with_loss: List[int], samples: int, first_stages: Any) -> None:
        self._mail, self._layout, self.with_loss, self._samples = mail, layout, with_loss, samples
        self._first_stages = first_stages
        self._own: Dict[int, torch.Tensor] = {}  # of the first stage, by update
        self._expected = 0

    def expect(self, first: int, until: int) -> None:
        """On the first stage: the losses of the updates from `first` to `until`, or what of these was not expected yet, come."""
        first = max(first, self._expected)
        for source in self.with_loss:
            if source:
                self._mail.expect(source, [(Message(RESULT, k), RESULT_SHAPE) for k in range(first, until)])
        self._expected = max(first, until)

    def tell(self, k: int, found: Optional[Measured]) -> None:
        """Send a stage's loss of update k to the first one; it keeps its own."""
        if found is None:
            return
        value = torch.tensor([found[0], float("nan") if found[1] is None else found[1]], dtype=torch.float64)
        if self._layout.stage == 0:
            self._own[k] = value
        else:
            self._mail.send(0, Message(RESULT, k), [value])

    def result(self, k: int) -> StepResult:
        """Of update k; only the first stages know it."""
        if self._layout.stage:
            return StepResult(float("nan"), None, self._samples)
        told = [self._mail.receive(s, Message(RESULT, k))[0] if s else self._own.pop(k) for s in self.with_loss]
        found = torch.stack(told)
        if self._layout.width > 1:
            start = self._mail.timeline.mark()
            self._mail.wait(dist.all_reduce(found, group=self._first_stages, async_op=True))
            self._mail.timeline.add("wait", k, start, carries="losses")
            found /= self._layout.width
        blocks = tuple((loss, None if share != share else share) for loss, share in found.tolist())
        return StepResult(*blocks[-1], self._samples, blocks if len(blocks) > 1 else ())
