"""Whether another batch is begun, of a run that may be asked to end: rank 0 says so to every rank, batch by batch.

rank 0   U2 | asked to end | F8: the first of batch 4 ...     batches 3 and what was begun of it are in flight: they are done
              says "no" to all before batch 4
rank 1   ... F7  (word on batch 4: no)  B6 U3 ...             its row without what is of batch 4

The word on a batch is said before its first forward on rank 0, and awaited before that on another rank, which could not do it
before: no one waits longer for it than for the microbatch. Every rank ends at the same update, with nothing on its way.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Deque, Iterable, Iterator, Optional, Tuple

import torch
import torch.distributed as dist

from ipu_pipe.backends.processes.mail import UPDATE, Mail
from ipu_pipe.backends.processes.row import Action

WORD_TAG = (1 << 30) + 16  # beyond all messages of the schedule and of evaluations
KEPT = 64  # words on their way


class Ending:
    """The batches that are begun. `batch`: microbatches of one; `updates`: of the run as planned; `first`: to come."""

    def __init__(self, mail: Mail, rank: int, batch: int, updates: int, first: int) -> None:
        self._mail, self._rank, self._batch, self._updates = mail, rank, batch, updates
        self._begun = first
        self._end: Optional[int] = None
        self._asked = False
        self._out: Deque[Tuple[Any, torch.Tensor]] = deque()
        self._coming: Optional[Tuple[Any, torch.Tensor]] = None
        self._opens = not mail.has_channels  # which must be used once before anything is posted
        mail.open(first * batch, first)

    def ask(self) -> None:
        """On rank 0: begin no more."""
        self._asked = True

    @property
    def end(self) -> int:
        """The updates of the run, as far as it is known."""
        return self._updates if self._end is None else self._end

    def has(self, b: int) -> bool:
        """Whether the run has batch b. Of the first that is not begun it is decided now, or the word is awaited."""
        if b >= self._begun and b < self.end:
            goes = self._tell(b) if self._rank == 0 else self._hear(b)
            if goes:
                self._begun = b + 1
                if self._opens:
                    self._mail.open(self._begun * self._batch, self._begun)
            else:
                self._end = b
        return b < self._begun

    def open(self) -> int:
        """From now on receives may be posted, as batches are begun; how many are."""
        self._opens = True
        return self._begun

    def begun(self, row: Iterable[Action]) -> Iterator[Action]:
        """A row's actions without those of batches that there are not."""
        for kind, index in row:
            if kind == UPDATE or self.has(index // self._batch):
                yield kind, index

    def _tell(self, b: int) -> bool:
        word = torch.tensor([0 if self._asked else 1])
        for rank in range(1, dist.get_world_size()):
            self._out.append((dist.isend(word, rank, tag=WORD_TAG + b), word))
        while len(self._out) > KEPT * dist.get_world_size():
            self._mail.wait(self._out.popleft()[0])
        return not self._asked

    def _hear(self, b: int) -> bool:
        work, word = self._coming or self._listen(b)
        self._mail.wait(work, 0)
        self._coming = None
        goes = bool(word.item())
        if goes and b + 1 < self._updates:
            self._coming = self._listen(b + 1)
        return goes

    def _listen(self, b: int) -> Tuple[Any, torch.Tensor]:
        word = torch.zeros(1, dtype=torch.int64)
        return dist.irecv(word, 0, tag=WORD_TAG + b), word

    def flush(self) -> None:
        """Wait until all words are through."""
        while self._out:
            self._mail.wait(self._out.popleft()[0])
