"""Check ranks on a simulated network: the emulator's bits in any order of messages, and an end
in time when a rank is lost."""

from __future__ import annotations

from typing import Tuple

import pytest

from tests.simulation.cases import DEADLINE
from tests.simulation.network import Loss, Network
from tests.simulation.ranks import (
    check_run,
    prepare_keys,
    run_seeds,
    split_by_case,
    train_on_network,
)
from tests.support.pairs import IS_FULL
from tests.support.runs import needs_processes
from tests.support.slow import mark_slow

pytestmark = needs_processes
SEEDS = 5000 if IS_FULL else 500  # 125 cases: each setting is trained, most with two models
QUICK = 20
GROUPS = mark_slow(split_by_case(range(SEEDS)), lambda seeds: seeds[0] < QUICK)


@pytest.mark.parametrize("seeds", GROUPS, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_seeds_of_the_simulated_network(seeds: Tuple[int, ...]) -> None:
    failures = run_seeds(seeds)
    assert not failures, "\n".join(failures)


def test_a_rank_stores_no_more_messages_than_microbatches_in_flight() -> None:
    """Each rank once kept 24 sent tensors for a neighbor, a multiple of its activations."""
    prepared = prepare_keys("mlp", method="pipedream_flush", gradient_accumulation=16, steps=1)
    report = train_on_network(prepared, Network(1, 2, DEADLINE))[0].result.report
    message = 2 * 12 * 4  # bytes: samples, the greatest width, float32
    in_flight, posted = 2, 3
    losses = 16 * 4 * 8  # sent once an update
    assert report.peak_memory[1]["buffers"] <= (in_flight + posted) * message + losses


@pytest.mark.slow
def test_a_rank_may_be_lost_at_any_call() -> None:
    """Other ranks once ended with a traceback if a rank was lost while the engine started or
    replicas waited for an evaluation."""
    clip = {"norm": 1.0, "scope": "global"}
    prepared = prepare_keys("mlp", method="gpipe", replicas=2, clip=clip, evaluate={"steps": 1})
    for at in range(1, prepared.calls[0], 6):
        check_run(prepared, Network(at, 4, DEADLINE, Loss(0, at, is_killed=True)))
    for at in range(1, prepared.calls[1], 10):
        check_run(prepared, Network(at, 4, DEADLINE, Loss(1, at, is_killed=False)))
