"""Help tests of data: read an epoch, check its samples, write an image folder, assert one fault."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Callable, List, Sequence, Tuple

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


def assert_samples_follow_seed_and_epoch(
    make: Callable[[int], DataSource], sizes: Sequence[int]
) -> None:
    """Assert that the samples of an epoch, and their order, depend on the seed and the epoch alone:
    not on the size of batches, on what was read or drawn before, or on the process."""
    expected = {
        (seed, epoch): epoch_of(make(seed), epoch, sizes[0]) for seed in (0, 1) for epoch in (0, 1)
    }
    for one, other in itertools.combinations(expected.values(), 2):
        assert not torch.equal(one[0], other[0])
    source, state = make(1), torch.random.get_rng_state()
    for epoch, size in itertools.product((1, 0), sizes):
        for a, b in zip(epoch_of(source, epoch, size), expected[1, epoch]):
            assert torch.equal(a, b)
    size = sizes[-1]
    assert torch.equal(source.train_batch(1, 1, size)[0], expected[1, 1][0][size : 2 * size])
    assert torch.equal(state, torch.random.get_rng_state())
    torch.rand(1)
    assert torch.equal(epoch_of(make(1), 1, size)[0], expected[1, 1][0])


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
