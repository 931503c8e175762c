"""Check that gradients averaged by the backend's own all-reduce are close to the exact mean and
overlap the backward, on nccl too."""

from __future__ import annotations

import copy
from datetime import timedelta
from pathlib import Path
from typing import Any, List

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ipu_pipe.backends.processes.layout import RankLayout
from ipu_pipe.backends.processes.mail import REPLICAS, Mail
from ipu_pipe.backends.processes.nccl import use_channels_once
from ipu_pipe.backends.processes.trace import TraceRecorder
from ipu_pipe.backends.processes.update import (
    OverlappedAverage,
    ReplicaGroup,
    average_over_replicas,
    divide_into_buckets,
)
from ipu_pipe.errors import RunFault
from tests.nccl_double import NcclDouble
from tests.support.models import Composed
from tests.support.processes import run_in_group
from tests.support.runs import assert_close_losses, needs_processes, read_state
from tests.test_processes import train_digits_on_emulator, train_digits_on_ranks

pytestmark = needs_processes
RANKS, MICROBATCHES, BUCKET = 3, 2, 8 * (9 * 9 + 9)  # bytes of one layer


def make_partly_used_layers() -> Any:
    """Make layers of which one is used by rank 1 alone, and one by no rank."""

    def forward(m: Any, x: torch.Tensor, rank: int) -> torch.Tensor:
        for number, layer in enumerate(m.layers):
            if number != 1 and (number != 2 or rank == 1):
                x = layer(x).tanh()
        return x * m.scale

    torch.manual_seed(3)
    layers = nn.ModuleList([nn.Linear(9, 9, dtype=torch.float64) for _ in range(5)])
    return Composed(forward, layers=layers, scale=nn.Parameter(torch.ones(9)))


def test_buckets_are_of_one_dtype_and_size_the_last_parameters_first() -> None:
    model = make_partly_used_layers()
    layers = [[layer.bias, layer.weight] for layer in reversed(model.layers)]
    assert [
        [id(p) for p in bucket] for bucket in divide_into_buckets(list(model.parameters()), BUCKET)
    ] == [[id(p) for p in bucket] for bucket in [*layers, [model.scale]]]
    large = divide_into_buckets([model.scale, *model.layers[0].parameters()], 1)
    assert [len(bucket) for bucket in large] == [1, 1, 1]


def test_fast_is_close_to_exact_and_runs_beside_the_last_backward(tmp_path: Path) -> None:
    run_in_group(RANKS, _check_reductions, tmp_path)


def _check_reductions(rank: int, folder: Path) -> None:
    _check_numbers_and_order(rank, ReplicaGroup(None), _make_mail(rank), [])
    _check_parts(rank)
    group = dist.new_group(list(range(RANKS)))
    _check_nccl(rank, group)


def _make_mail(rank: int, channels: Any = None) -> Mail:
    return Mail(
        RankLayout(rank, (0,), RANKS),
        torch.device("cpu"),
        TraceRecorder(rank, 0, range(0)),
        60.0,
        channels=channels,
    )


def _check_numbers_and_order(rank: int, group: ReplicaGroup, mail: Mail, log: List[str]) -> None:
    exact, fast = make_partly_used_layers(), make_partly_used_layers()
    draw = torch.Generator().manual_seed(rank)
    inputs = [torch.randn(4, 9, generator=draw, dtype=torch.float64) for _ in range(MICROBATCHES)]
    for x in inputs:
        exact(x, rank).square().sum().backward()
    average_over_replicas(list(exact.parameters()), mail, group)

    average = OverlappedAverage(list(fast.parameters()), mail, group, MICROBATCHES, BUCKET)
    fast.layers[0].weight.register_hook(lambda gradient: log.append("first layer"))
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda *args, **settings: log.append("sum") or all_reduce(*args, **settings)  # type: ignore[func-returns-value]
    for _ in range(2):  # the second pass starts from zero gradients
        fast.zero_grad()
        for x in inputs:
            log.append("backward")
            with average.add_pass():
                fast(x, rank).square().sum().backward()
        average.finish()
    dist.all_reduce = all_reduce
    average.remove_hooks()

    for (name, p), q in zip(exact.named_parameters(), fast.parameters()):
        if name.startswith("layers.1"):
            assert p.grad is None and q.grad is None
            continue
        assert p.grad is not None and q.grad is not None and p.grad.shape == q.grad.shape
        torch.testing.assert_close(
            q.grad, p.grad, rtol=1e-6 if q.dtype == torch.float32 else 1e-13, atol=1e-15
        )
    assert any(bool(p.grad.any()) for p in fast.layers[2].parameters() if p.grad is not None)
    # the bucket of the last layer is sent before the first layer has its gradient; an unused layer
    # delays the buckets after it
    before = 3 if rank == 1 else 2  # of 6 buckets
    last_pass = ["backward", *["sum"] * before, "first layer", *["sum"] * (6 - before)]
    assert log == 2 * ["backward", "first layer", *last_pass], log


def _check_parts(rank: int) -> None:
    """Check that a gradient that arrives twice in one backward is refused once its sum has
    begun."""
    layer = nn.Linear(9, 9)
    average = OverlappedAverage(
        list(layer.parameters()), _make_mail(rank), ReplicaGroup(None), 1, 1
    )
    x = torch.randn(2, 9, requires_grad=True)
    with pytest.raises(RunFault, match="reduction: fast"), average.add_pass():
        hidden: Any = checkpoint(layer, x, use_reentrant=True)
        out: Any = checkpoint(layer, hidden, use_reentrant=True)
        out.sum().backward()
    for _, work in average._begun:
        work.wait()


def _check_nccl(rank: int, group: Any) -> None:
    """Check that a group of nccl is used once before anything is posted, and that its waits have
    no limit."""
    double, channels = NcclDouble([group]), {REPLICAS: group}
    with double:
        use_channels_once(
            channels, [], RankLayout(rank, (0,), RANKS), torch.device("cpu"), timedelta(seconds=60)
        )
        through = ReplicaGroup(None, group)
        assert through.of_gradients is group
        _check_numbers_and_order(rank, copy.copy(through), _make_mail(rank, channels), [])
    untouched = NcclDouble([group])
    other, source = (rank + 1) % RANKS, (rank - 1) % RANKS
    with untouched:
        untouched._touched.add(id(group))
        posted = dist.irecv(torch.empty(1), source, group)
        untouched._touched.clear()
        with pytest.raises(AssertionError, match="first"):
            _make_mail(rank, channels).begin_sum(torch.zeros(1), group)
        untouched._touched.add(id(group))
        dist.barrier()
        dist.isend(torch.zeros(1), other, group).wait()
        posted.wait()


@pytest.mark.slow
def test_three_replicas_with_fast_reduction_are_close_to_the_emulator(tmp_path: Path) -> None:
    """Train three replicas, since a sum of two has only one order; the emulator trains the same
    config.

    A sum that began before the rule had corrected the last microbatch's gradients lost those of
    earlier microbatches.
    """
    settings = [
        "method=pipedream",
        "stages=2",
        "replicas=3",
        "gradient_accumulation=2",
        "reduction=fast",
        "steps=8",
        "log.every=1",
    ]
    settings.append("method_args={delay_compensation: {scale: 1.0}}")
    code, _, error = train_digits_on_ranks(3, tmp_path / "ranks", *settings)
    assert code == 0, error
    train_digits_on_emulator(tmp_path / "one", *settings)
    torch.testing.assert_close(
        *(read_state(tmp_path / out, 8) for out in ("ranks", "one")), rtol=1e-4, atol=1e-6
    )
    assert_close_losses(tmp_path / "ranks", tmp_path / "one", 1e-5)
