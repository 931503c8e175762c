"""Ranks on a simulated network give the emulator's bits in any order of messages, and end in time when one of them is lost."""

from __future__ import annotations

from typing import Tuple

import pytest
import torch

from tests.simulation.ranks import run_seeds, split_by_case

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 4), reason="processes need torch 2.4"
)
SEEDS = 1000


@pytest.mark.parametrize("seeds", split_by_case(range(SEEDS)), ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_seeds_of_the_simulated_network(seeds: Tuple[int, ...]) -> None:
    failures = run_seeds(seeds)
    assert not failures, "\n".join(failures)
