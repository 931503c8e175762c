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
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import ipu_pipe
from ipu_pipe.errors import BadInput, RunFault, end_process
from tests.support.loops import Case, Loop, make_loop_batch, make_perceptron, make_sgd
from tests.support.processes import run_in_group
from tests.support.runs import assert_same, needs_processes
from tests.support.slow import mark_slow

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


class Pairs(Dataset):  # type: ignore[type-arg]
    """A dataset of samples for a model that computes its own loss."""

    def __len__(self) -> int:
        return len(make_loader_samples())

    def __getitem__(self, i: int) -> Dict[str, torch.Tensor]:
        x, y = make_loader_samples()[i]
        return {"x": x, "y": y}


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = make_perceptron()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Dict[str, torch.Tensor]:
        return {"loss": cross_entropy(self.layers(x), y)}


def shard_mappings(rank: int) -> Any:
    return DataLoader(Pairs(), BATCH, sampler=DistributedSampler(Pairs()))  # type: ignore[arg-type]


def read_other_batches(rank: int, folder: Path, make_loader: Callable[[int], Any]) -> None:
    loader = make_loader(rank)
    if make_loader is shard_mappings:
        model: nn.Module = OwnLoss()
        where: Dict[str, Any] = {"backend": "distributed", "backend_args": {"deadline": 60}}
        pipe = ipu_pipe.Pipeline(
            model, None, make_sgd(model.parameters()), "pipedream", stages=["layers.5"], **where
        )
    else:
        model = make_perceptron()
        pipe = make_two_rank_pipeline(model, make_sgd(model.parameters()))
    with pytest.raises(RunFault) as fault:
        for batch in loader:
            pipe.step(*([batch] if isinstance(batch, dict) else batch))
    assert rank == 1 or SHARED in str(fault.value)
    (folder / f"{rank}.ended").touch()
    end_process(0)


WRONG_LOADERS = [shuffle_by_rank, shard_by_default, prepare_by_accelerate, shard_mappings]
# which `make test` runs
QUICK = [shuffle_by_rank, shard_by_default]


@needs_processes
@pytest.mark.parametrize("make_loader", mark_slow(WRONG_LOADERS, QUICK.__contains__))
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
    for sizes in ([8, 8, 8, 8], [8, 8, 4, 8, 8]):
        loop = Loop(
            Case("pipedream", 2, stages=["5"]), backend="distributed", backend_args={"deadline": 60}
        )
        k = 0
        for size in sizes:
            x, y = make_loop_batch(loop.case, k)
            if size == 8:
                loop.pipe.step(x, y)
                k += 1
                continue
            with pytest.raises(
                ValueError, match="^step: microbatch 0 has 2 samples, those of the first step 4"
            ):
                loop.pipe.step(x[:4], y[:4])
        models.append(loop.close().state_dict())
    assert_same(*models)


@needs_processes
@pytest.mark.parametrize("work", [begin_with_other_sizes, give_a_short_batch])
def test_microbatches_of_other_sizes_are_refused(work: Any, tmp_path: Path) -> None:
    run_in_group(2, work, tmp_path)


def leave_out_labels(rank: int, folder: Path) -> None:
    """Pass no labels on the rank of the loss; the example must not replace them."""
    x, y = make_loop_batch(Case("pipedream"), 0)
    model = make_perceptron()
    pipe = make_two_rank_pipeline(model, make_sgd(model.parameters()), example=(x, y))
    with pytest.raises(ValueError if rank else RunFault) as fault:
        for _ in range(5):
            pipe.step(microbatches=[(x, None)])
    assert rank == 0 or str(fault.value).startswith("step: y is None")
    (folder / f"{rank}.ended").touch()
    end_process(0)


@needs_processes
def test_no_example_replaces_missing_labels(tmp_path: Path) -> None:
    run_in_group(2, leave_out_labels, tmp_path)
    assert all((tmp_path / f"{rank}.ended").exists() for rank in range(2))


def test_a_step_without_a_batch_changes_nothing() -> None:
    loop = Loop(Case("pipedream"))
    x, y = make_loop_batch(loop.case, 0)
    for arguments, name in (((), "x"), ((x,), "y"), ((None, y), "x")):
        with pytest.raises(ValueError, match=f"^step: {name} is None"):
            loop.pipe.step(*arguments)
    loop.run(0, 3)
    with pytest.raises(ValueError, match="^step: y is None"):
        loop.pipe.step(microbatches=[(x, None)])
    loop.run(3, 5)
    loop.close()


def sample_by_replica(rank: int, folder: Path) -> None:
    model = make_perceptron()
    pipe = make_two_rank_pipeline(model, make_sgd(model.parameters()), replicas=2)
    sampler = DistributedSampler(
        make_loader_samples(), num_replicas=pipe.replicas, rank=pipe.replica
    )
    with pipe:
        for x, y in DataLoader(make_loader_samples(), BATCH, sampler=sampler):
            pipe.step(x, y)
    expected = torch.load(folder / "expected.pt")
    # running statistics are each replica's own
    trained = dict(model.named_parameters())
    assert_same({name: expected[name] for name in trained}, trained)


@needs_processes
def test_a_sampler_by_replica_gives_the_emulators_weights(tmp_path: Path) -> None:
    """Four ranks train two replicas of two stages."""
    model = make_perceptron()
    pipe = make_two_rank_pipeline(
        model, make_sgd(model.parameters()), replicas=2, backend="emulator", backend_args={}
    )
    samplers = [
        DistributedSampler(make_loader_samples(), num_replicas=2, rank=replica)
        for replica in range(2)
    ]
    loaders = [DataLoader(make_loader_samples(), BATCH, sampler=sampler) for sampler in samplers]
    with pipe:
        for batches in zip(*loaders):
            pipe.step(*map(torch.cat, zip(*batches)))
    torch.save(model.state_dict(), tmp_path / "expected.pt")
    run_in_group(4, sample_by_replica, tmp_path)


# ---- wrapped models and optimizers


def test_a_prepared_optimizer_is_refused_by_name() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = make_perceptron()
    prepared = accelerate.Accelerator(cpu=True).prepare(make_sgd(model.parameters()))
    with pytest.raises(
        BadInput, match="^optimizer: an AcceleratedOptimizer: wraps a SGD: give that one"
    ):
        ipu_pipe.Pipeline(model, cross_entropy, prepared)


def wrap_in_ddp(rank: int, folder: Path) -> None:
    model = nn.parallel.DistributedDataParallel(make_perceptron())
    pipe = make_two_rank_pipeline(model, make_sgd(model.parameters()), stages=["module.5"])
    with pytest.raises(
        BadInput, match="^model: is wrapped by DistributedDataParallel: give the model itself"
    ):
        pipe.step(*make_loop_batch(Case("pipedream"), 0))


@needs_processes
def test_a_model_that_others_divide_is_refused_by_name(tmp_path: Path) -> None:
    run_in_group(2, wrap_in_ddp, tmp_path)


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
    model = make_perceptron()
    with pytest.raises(RunFault, match="example"):
        make_two_rank_pipeline(
            model, make_sgd(model.parameters()), backend="emulator", backend_args={}
        ).evaluate([(x, y)])
    model = make_perceptron()
    keys: Dict[str, Any] = {"backend": "emulator", "backend_args": {}, "example": (x[:4], y[:4])}
    pipe = make_two_rank_pipeline(model, make_sgd(model.parameters()), **keys)
    before = pipe.evaluate([(x, y)], ["accuracy"])
    assert torch.equal(pipe.predict(x), make_perceptron().eval()(x))
    expected = cross_entropy(make_perceptron().eval()(x), y)
    assert before["loss"] == pytest.approx(expected.item())
    # and its steps are those of a loop that did not
    losses = []
    for evaluates in (False, True):
        loop = Loop(case, example=(x[:4], y[:4]))
        if evaluates:
            loop.pipe.evaluate([(x, y)])
        loop.run(0, 5)
        loop.close()
        losses.append(loop.losses)
    assert losses[0] == losses[1]
