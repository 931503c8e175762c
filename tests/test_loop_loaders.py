"""Test loaders, optimizers and models of other libraries in a user's loop on processes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ipu_pipe
from ipu_pipe.errors import BadInput, RunFault, end_process
from tests.support.loops import Case, Loop, make_loop_batch, make_perceptron, make_sgd
from tests.support.processes import run_in_group
from tests.support.runs import assert_same, needs_processes

SHARED = "do not shard the loader by rank"
BATCH = 4


def make_loader_samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 5, (64,), generator=generator))


def make_two_rank_pipeline(model: nn.Module, optimizer: Any, **keys: Any) -> ipu_pipe.Pipeline:
    """Return a pipeline of two stages on processes."""
    where: Dict[str, Any] = {"backend": "distributed", "backend_args": {"deadline": 60}}
    return ipu_pipe.Pipeline(
        model, cross_entropy, optimizer, "pipedream", **{"stages": ["5"], **where, **keys}
    )


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
    loader, model = make_loader(rank), make_perceptron()
    pipe = make_two_rank_pipeline(model, make_sgd(model.parameters()))
    with pytest.raises(RunFault) as fault:
        for batch in loader:
            pipe.step(*batch)
    assert rank == 1 or SHARED in str(fault.value)
    (folder / f"{rank}.ended").touch()
    end_process(0)


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
    x, y = make_loop_batch(Case("pipedream", 2), 0)
    model = make_perceptron()
    size = 8 - 4 * rank
    with pytest.raises(BadInput, match=f"^step: inputs of a microbatch: rank 0 has .*{SHARED}"):
        make_two_rank_pipeline(model, make_sgd(model.parameters()), microbatches=2).step(
            x[:size], y[:size]
        )


def give_a_short_batch(rank: int, folder: Path) -> None:
    """Assert that all ranks refuse a short batch, and can continue."""
    models = []
    where: Dict[str, Any] = {"backend": "distributed", "backend_args": {"deadline": 60}}
    for refused_at in (None, 2):
        loop = Loop(Case("pipedream", 2, stages=["5"]), **where)
        for k in range(4):
            x, y = make_loop_batch(loop.case, k)
            if k == refused_at:
                with pytest.raises(ValueError, match="^step: microbatch 0 has 2 samples, those of"):
                    loop.pipe.step(x[:4], y[:4])
            loop.pipe.step(x, y)
        models.append(loop.close().state_dict())
    assert_same(*models)


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
    model = make_perceptron()
    pipe = make_two_rank_pipeline(model, make_sgd(model.parameters()), replicas=2)
    sample_by_replica(pipe, [pipe.replica])
    expected = torch.load(folder / "expected.pt")
    # running statistics are each replica's own
    trained = dict(model.named_parameters())
    assert_same({name: expected[name] for name in trained}, trained)


@needs_processes
def test_a_sampler_by_replica_gives_the_emulators_weights(tmp_path: Path) -> None:
    """Four ranks train two replicas of two stages."""
    model = make_perceptron()
    here: Dict[str, Any] = {"replicas": 2, "backend": "emulator", "backend_args": {}}
    sample_by_replica(make_two_rank_pipeline(model, make_sgd(model.parameters()), **here), range(2))
    torch.save(model.state_dict(), tmp_path / "expected.pt")
    run_in_group(4, sample_on_rank, tmp_path)


# ---- the contexts in which loops evaluate and save


def evaluate_without_gradients(rank: int, folder: Path) -> None:
    """Assert that evaluating and saving under no_grad lose no update and change no loss."""
    losses: List[Any] = []
    for context in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        loop = Loop(
            Case("pipedream", 2, stages=["5"]), backend="distributed", backend_args={"deadline": 60}
        )
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
    loop = Loop(Case("pipedream", 2))
    loop.run(0, 3, drains=False)
    batch = make_loop_batch(loop.case, 50)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(
        RuntimeError, match="^evaluate: called under autocast"
    ):
        loop.pipe.evaluate([batch])
    loop.pipe.drain()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loop.pipe.evaluate([batch])
    loop.close()


def test_a_loop_may_evaluate_before_its_first_step() -> None:
    case = Case("pipedream", 2)
    x, y = make_loop_batch(case, 0)
    with pytest.raises(RunFault, match="example"):
        Loop(case).pipe.evaluate([(x, y)])
    plain, early = (Loop(case, example=(x[:4], y[:4])) for _ in range(2))
    output = make_perceptron().eval()(x)
    loss = early.pipe.evaluate([(x, y)], ["accuracy"])["loss"]
    assert loss == pytest.approx(cross_entropy(output, y).item())
    assert torch.equal(early.pipe.predict(x), output)
    for loop in (plain, early):
        loop.run(0, 5)
        loop.close()
    assert plain.losses == early.losses
