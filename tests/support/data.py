"""Help tests of data: read an epoch at once, write an image folder, assert one fault."""

from __future__ import annotations

from pathlib import Path
from typing import List, Tuple

import pytest
import torch

from ipu_pipe.data import DataSource


def epoch_of(source: DataSource, epoch: int, batch_size: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels of an epoch, read in batches."""
    batches = [
        source.train_batch(epoch, i, batch_size)
        for i in range(source.train_batches_per_epoch(batch_size))
    ]
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def write_pictures(root: Path, classes: int, **counts: int) -> None:
    """Write an image folder of small, distinct pictures; `counts` are per part and class."""
    image = pytest.importorskip("PIL.Image")
    # of one color a crop would look like the whole picture
    ramp = image.linear_gradient("L").resize((12, 9))
    for part, count in counts.items():
        for label in range(classes):
            (root / part / str(label)).mkdir(parents=True)
            for number in range(count):
                colors = (image.new("L", (12, 9), value) for value in (label * 60, number))
                image.merge("RGB", [ramp, *colors]).save(root / part / str(label) / f"{number}.png")


def one_line(faults: List[str], *parts: str) -> None:
    """Assert that `faults` is one fault, on one line, that contains all `parts`."""
    (fault,) = faults
    assert "\n" not in fault
    for part in parts:
        assert part in fault, fault
