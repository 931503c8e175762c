"""Losses of a stage: of a batch's microbatches, and on their way to the first rank, which tells what an update measured."""

from __future__ import annotations

from collections import deque
from typing import Any, Deque, Dict, List, Optional

import torch
import torch.distributed as dist

from ipu_pipe.backends.interface import StepResult
from ipu_pipe.backends.losses import COLUMNS, MicrobatchResult, average, tabulate
from ipu_pipe.backends.processes.layout import Layout
from ipu_pipe.backends.processes.mail import RESULT, Mail, Message
from ipu_pipe.errors import RunFault
from ipu_pipe.model.cutting import Shape

DRAW_ALIKE = (
    "the inputs of one would be trained with the labels of the other; seed every generator that the data hold "
    "(numpy.random.default_rng(SEED)), or draw from the global ones, which are seeded alike on all ranks"
)


class Losses:
    """The results of microbatches whose update is still to come, in order."""

    def __init__(self) -> None:
        self._results: Deque[MicrobatchResult] = deque()

    def add(self, loss: torch.Tensor, answers: Optional[torch.Tensor]) -> None:
        """Add the next microbatch: its loss, and (right, counted) labels or None."""
        self._results.append(MicrobatchResult(loss, answers))

    def take(self, count: int) -> torch.Tensor:
        """Remove the next `count` microbatches and return their table (`losses.tabulate`)."""
        return tabulate([self._results.popleft() for _ in range(count)])


class Telling:
    """The stages `with_loss` send the first stage of their replica the results of each update's microbatches; the first stages
    gather those of all replicas over their group `first_stages`. With its results each sends the checksums of the batches that it
    has read for its labels, which must be those that the first stage has read for its inputs. `microbatches`: of an update on one
    replica; `samples`: of an update; `data`: the name of the data, for the fault."""

    def __init__(
        self, mail: Mail, layout: Layout, with_loss: List[int], microbatches: int, samples: int, first_stages: Any, data: str
    ) -> None:
        self._mail, self._layout, self.with_loss, self._samples = mail, layout, with_loss, samples
        self._microbatches, self._data = microbatches, data
        self._shape = (Shape((microbatches, COLUMNS + 1), torch.float64, False),)
        self._first_stages = first_stages
        # of the first stage, by update
        self._own: Dict[int, torch.Tensor] = {}
        self._checksums: Dict[int, torch.Tensor] = {}
        self._expected = 0

    def expect(self, first: int, until: int) -> None:
        """Post receives, on the first stage, for the results of the updates in [first, until) that are not expected yet."""
        first = max(first, self._expected)
        for source in self.with_loss:
            if source:
                self._mail.expect(source, [(Message(RESULT, k), self._shape) for k in range(first, until)])
        self._expected = max(first, until)

    def tell(self, k: int, table: Optional[torch.Tensor], checksums: Dict[int, int]) -> None:
        """Send a stage's table of update k to the first stage, which keeps its own; None where the stage has no loss. Takes the
        update's microbatches out of `checksums`, if they are there."""
        numbers = range(k * self._microbatches, (k + 1) * self._microbatches)
        column = torch.tensor([checksums.pop(m, 0) for m in numbers], dtype=torch.float64)
        if self._layout.stage == 0:
            self._checksums[k] = column
        if table is None:
            return
        if self._layout.stage == 0:
            self._own[k] = table
        else:
            self._mail.send(0, Message(RESULT, k), [torch.cat([table, column[:, None]], dim=1)])

    def result(self, k: int) -> StepResult:
        """Return the result of update k, which only the first stages know."""
        if self._layout.stage:
            return StepResult(float("nan"), None, self._samples)
        received = {s: self._mail.receive(s, Message(RESULT, k))[0] for s in self.with_loss if s}
        self._compare(k, {s: table[:, -1] for s, table in received.items()})
        tables = torch.stack([
            received[s][:, :-1] if s else self._own.pop(k) for s in self.with_loss
        ])  # (blocks, microbatches, 3)
        if self._layout.width > 1:
            start = self._mail.timeline.mark()
            replicas = [torch.empty_like(tables) for _ in range(self._layout.width)]
            self._mail.wait(dist.all_gather(replicas, tables, group=self._first_stages, async_op=True))
            self._mail.timeline.add("wait", k, start, carries="losses")
            # microbatch 0 of each replica, microbatch 1 of each, ...: the order in which the emulator has them
            tables = torch.stack(replicas, dim=2).flatten(1, 2)
        blocks = [average(table) for table in tables]
        return StepResult(*blocks[-1], self._samples, tuple(blocks) if len(blocks) > 1 else ())

    def _compare(self, k: int, checksums: Dict[int, torch.Tensor]) -> None:
        """Raise `RunFault` where a stage has read other batches for update k than the first one; `checksums` are by stage."""
        first = self._checksums.pop(k)
        for stage, column in checksums.items():
            if not torch.equal(first, column):
                ranks = self._layout.rank_of(0), self._layout.rank_of(stage)
                raise RunFault(
                    f"data: {self._data}: update {k}: rank {ranks[0]} and rank {ranks[1]} read different batches: {DRAW_ALIKE}"
                )
