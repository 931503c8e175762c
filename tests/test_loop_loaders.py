"""Test loaders, optimizers and models of other libraries in a user's loop on processes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, Callable, List

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ipu_pipe
from ipu_pipe.errors import BadInput, RunFault
from tests.support.loops import Case, Loop, make_loop_batch, make_perceptron
from tests.support.processes import end_rank, run_in_group
from tests.support.runs import assert_same, needs_processes

SHARED = "do not shard the loader by rank"
BATCH = 4


def make_loader_samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 5, (64,), generator=generator))


ON_TWO = {"backend": "distributed", "deadline": 60}
TWO_STAGES = Case("pipedream", stages=["5"])


# ---- the ranks of one pipeline read the same batches


def shuffle_by_rank(rank: int) -> Any:
    return DataLoader(
        make_loader_samples(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(rank)
    )


def shard_by_default(rank: int) -> Any:
    return DataLoader(
        make_loader_samples(), BATCH, sampler=DistributedSampler(make_loader_samples())
    )


def prepare_by_accelerate(rank: int) -> Any:
    accelerate = pytest.importorskip("accelerate")
    os.environ.update(LOCAL_RANK=str(rank), MASTER_ADDR="localhost", MASTER_PORT="1")
    # a fork has the state of the process that it comes from, where an earlier test may have made an accelerator
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    return accelerator.prepare(DataLoader(make_loader_samples(), BATCH, shuffle=True))


def read_other_batches(rank: int, folder: Path, make_loader: Callable[[int], Any]) -> None:
    loader, pipe = make_loader(rank), Loop(TWO_STAGES, **ON_TWO).pipe
    with pytest.raises(RunFault) as fault:
        for batch in loader:
            pipe.step(*batch)
    assert rank == 1 or SHARED in str(fault.value)
    end_rank(folder, rank)


@needs_processes
@pytest.mark.parametrize("make_loader", [
    shuffle_by_rank, shard_by_default, pytest.param(prepare_by_accelerate, marks=pytest.mark.slow)
])  # fmt: skip
def test_ranks_that_read_other_batches_are_refused(make_loader: Any, tmp_path: Path) -> None:
    if make_loader is prepare_by_accelerate:
        pytest.importorskip("accelerate")
    run_in_group(2, read_other_batches, tmp_path, make_loader)
    assert all((tmp_path / f"{rank}.ended").exists() for rank in range(2))


def begin_with_other_sizes(rank: int, folder: Path) -> None:
    """Begin with microbatches of unequal sizes; Gloo would end the process at such a message."""
    x, y = make_loop_batch(TWO_STAGES, 0)
    size = 4 - 2 * rank
    with pytest.raises(BadInput, match=f"^step: inputs of a microbatch: rank 0 has .*{SHARED}"):
        Loop(TWO_STAGES, **ON_TWO).pipe.step(x[:size], y[:size])


def give_a_short_batch(rank: int, folder: Path) -> None:
    """Assert that all ranks refuse a short batch, and can continue."""
    plain, loop = (Loop(TWO_STAGES, **ON_TWO) for _ in range(2))
    plain.run(0, 4)
    plain_state = plain.close().state_dict()
    loop.run(0, 2)
    x, y = make_loop_batch(TWO_STAGES, 2)
    with pytest.raises(ValueError, match="^step: microbatch 0 has 2 samples, those of"):
        loop.pipe.step(x[:2], y[:2])
    loop.run(2, 4)
    assert_same(plain_state, loop.close().state_dict())


@needs_processes
@pytest.mark.parametrize("work", [begin_with_other_sizes, give_a_short_batch])
def test_microbatches_of_other_sizes_are_refused(work: Any, tmp_path: Path) -> None:
    run_in_group(2, work, tmp_path)


def sample_by_replica(pipe: ipu_pipe.Pipeline, replicas: Any) -> None:
    """Train on the samples of these replicas."""
    data = make_loader_samples()
    loaders = [
        DataLoader(data, BATCH, sampler=DistributedSampler(data, num_replicas=2, rank=replica))
        for replica in replicas
    ]
    with pipe:
        for batches in zip(*loaders):
            pipe.step(*map(torch.cat, zip(*batches)))


def sample_on_rank(rank: int, folder: Path) -> None:
    loop = Loop(TWO_STAGES._replace(replicas=2), **ON_TWO)
    sample_by_replica(loop.pipe, [loop.pipe.replica])
    expected = torch.load(folder / "expected.pt")
    # running statistics are each replica's own
    trained = dict(loop.model.named_parameters())
    assert_same({name: expected[name] for name in trained}, trained)


@needs_processes
def test_a_sampler_by_replica_gives_the_emulators_weights(tmp_path: Path) -> None:
    """Four ranks train two replicas of two stages."""
    loop = Loop(TWO_STAGES._replace(replicas=2))
    sample_by_replica(loop.pipe, range(2))
    torch.save(loop.model.state_dict(), tmp_path / "expected.pt")
    run_in_group(4, sample_on_rank, tmp_path)


# ---- the contexts in which loops evaluate and save


def evaluate_without_gradients(rank: int, folder: Path) -> None:
    """Assert that evaluating and saving under no_grad lose no update and change no loss."""
    losses: List[Any] = []
    for context in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        loop = Loop(TWO_STAGES, **ON_TWO)
        loop.run(0, 5, drains=False)
        assert loop.pipe.in_flight
        with context():  # type: ignore[operator]
            loop.pipe.evaluate([make_loop_batch(loop.case, 50)])
        loop.run(5, 7, drains=False)
        with context():  # type: ignore[operator]
            loop.pipe.state_dict()
        loop.run(7, 10, drains=False)
        loop.close()
        losses.append(loop.losses)
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 10


@needs_processes
def test_a_drain_under_no_grad_runs_the_backwards(tmp_path: Path) -> None:
    run_in_group(2, evaluate_without_gradients, tmp_path)


def test_a_drain_under_autocast_is_refused() -> None:
    """It is refused before a forward runs in the autocast type.

    An empty pipeline may be evaluated under autocast.
    """
    loop = Loop(TWO_STAGES)
    loop.run(0, 3, drains=False)
    batch = make_loop_batch(TWO_STAGES, 50)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(RuntimeError, match="^evaluate: called under autocast"):
            loop.pipe.evaluate([batch])
    loop.pipe.drain()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loop.pipe.evaluate([batch])


def test_a_loop_may_evaluate_before_its_first_step() -> None:
    x, y = batch = make_loop_batch(TWO_STAGES, 0)
    with pytest.raises(RunFault, match="example"):
        Loop(TWO_STAGES).pipe.evaluate([batch])
    plain, early = (Loop(TWO_STAGES, example=batch) for _ in range(2))
    output = make_perceptron().eval()(x)
    loss = early.pipe.evaluate([batch], ["accuracy"])["loss"]
    assert loss == pytest.approx(cross_entropy(output, y).item())
    assert torch.equal(early.pipe.predict(x), output)
    for loop in (plain, early):
        loop.run(0, 5)
        loop.close()
    assert plain.losses == early.losses
