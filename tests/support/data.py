"""What tests of data share: an epoch in one piece, tables of official files, one fault a line."""

from __future__ import annotations

from typing import List, Tuple

import torch

from ipu_pipe.data import DataSource


def epoch_of(source: DataSource, epoch: int, batch_size: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels of an epoch, read in batches."""
    batches = [source.train_batch(epoch, i, batch_size) for i in range(source.train_batches_per_epoch(batch_size))]
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def one_line(faults: List[str], *parts: str) -> None:
    """Check that there is one fault, in one line that has all `parts`."""
    (fault,) = faults
    assert "\n" not in fault
    for part in parts:
        assert part in fault, fault
