"""Uneven microbatches: `loss_weight` weighs them in an update's gradient and loss.

gradient    (loss_m * (w_m R / W)).backward() for m = 0 ... N-1 on each of R replicas, then the mean over the replicas
loss        sum of loss_m w_m / W, from left to right in float64

tests/test_emulator_exact.py weighs every method, tests/test_processes_equal_emulator.py runs what `describe_run` returns.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ipu_pipe
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.local.blocks import average_gradients
from ipu_pipe.model.loss import CountTokens, make_token_count
from ipu_pipe.schedule.methods import resolve_method
from tests.staged_models import draw_microbatches, join_stages
from tests.support.runs import (
    assert_same,
    assert_same_weights,
    list_faults,
    read_column,
    read_numbers,
)
from tests.test_emulator_exact import OPTIMIZERS, make_seeded_stages, train_on_emulator

N, IGNORED = 4, -100
Batch = Tuple[torch.Tensor, torch.Tensor]
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def make_token_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 13))


def make_token_batches(counts: Sequence[int]) -> List[Batch]:
    """Return a batch (2, 10) for each count, with labels on the first `count` tokens of a row."""
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 13, (2, 2, 10), generator=generator).unbind() for _ in counts]
    for (_, y), count in zip(batches, counts):
        y[:, count:] = IGNORED
    return batches  # type: ignore[return-value]


def compute_token_loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean over the tokens of a microbatch, NaN with NaN gradients if there are none."""
    labels = y.flatten()
    counts = labels != IGNORED
    losses = F.cross_entropy(output.flatten(0, 1), labels.clamp(min=0), reduction="none")
    return (losses * counts).sum() / counts.sum()


def count_first_row(y: torch.Tensor) -> int:
    """Return the number of labels in the first row, which is not that of all tokens."""
    return int((y[0] != IGNORED).sum())


def count_labels(y: torch.Tensor) -> int:
    return int((y != IGNORED).sum())


# the second update has a microbatch without tokens, the third has none at all, the fourth's first replica has none
UNEVEN = [1, 9, 4, 10, 3, 0, 7, 2, 0, 0, 0, 0, 0, 5, 0, 8]


def configure_uneven(method: str = "gpipe", **keys: Any) -> Any:
    settings: Dict[str, Any] = {
        "gradient_accumulation": N, "steps": 4, "stages": ["3"], "evaluate": {"every": 0}, "checkpoint": {"every": 2},
        "log": {"tensorboard": False, "every": 1}, "metrics": [],
    }  # fmt: skip
    return ipu_pipe.configure(method=method, **{**settings, **keys})


def describe_run(
    method: str = "gpipe", counts: Sequence[int] = UNEVEN, weight: Any = "tokens", **keys: Any
) -> Dict[str, Any]:
    """Return the arguments of `ipu_pipe.train` for uneven microbatches."""
    named = isinstance(weight, str)
    config = configure_uneven(method, **({"loss_weight": weight} if named else {}), **keys)
    return {
        "model": make_token_model(),
        "loss": compute_token_loss,
        "data": ipu_pipe.from_loader(make_token_batches(counts), make_token_batches(counts[:1])),
        "optimizer": SGD,
        "config": config,
        **({} if named else {"loss_weight": weight}),
    }


def describe_blocks() -> Dict[str, Any]:
    """Return the arguments of a run of blocks, in which some microbatches have no weight."""
    generator = torch.Generator().manual_seed(3)
    data = []
    for count in UNEVEN:
        y = torch.randint(0, 4, (10,), generator=generator)
        y[count:] = IGNORED
        data.append((torch.randn(10, 6, generator=generator), y))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    config = configure_uneven("local_greedy", stages=["2"], loss_weight="tokens")
    loader = ipu_pipe.from_loader(data, data[:1])
    return {"config": config, "model": model, "data": loader, "optimizer": SGD}


class OwnLoss(nn.Module):
    """A model that computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_token_model()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> Dict[str, torch.Tensor]:
        logits = self.body(inputs)
        return {"loss": compute_token_loss(logits, labels), "logits": logits}


def describe_own_loss() -> Dict[str, Any]:
    data = [{"inputs": x, "labels": y} for x, y in make_token_batches(UNEVEN)]
    config = configure_uneven(loss="model", loss_weight="tokens", stages=["body.3"])
    loader = ipu_pipe.from_loader(data, data[:1])
    return {"config": config, "model": OwnLoss(), "data": loader, "optimizer": SGD}


# ---- the definition


class Weighted(NamedTuple):
    """A run and the counts of tokens, weights and replicas that the plain loop has for it."""

    describe: Any
    counts: Sequence[int] = UNEVEN
    weigh: Any = count_labels
    replicas: int = 1


# with two replicas the second update's first replica has no token
TWO, THREE = [*UNEVEN[:8], 0, 5, 0, 9, 0, 1, 0, 4, *UNEVEN], UNEVEN * 3
WEIGHTED = {
    "gpipe": Weighted(describe_run),
    "split backward": Weighted(functools.partial(describe_run, "zb_h1")),
    "own loss": Weighted(describe_own_loss),
    "import": Weighted(functools.partial(describe_run, weight=f"{__name__}:count_first_row"), weigh=count_first_row),
    "function": Weighted(functools.partial(describe_run, weight=count_first_row), weigh=count_first_row),
    "two replicas": Weighted(functools.partial(describe_run, counts=TWO, replicas=2), TWO, replicas=2),
    "three replicas": Weighted(functools.partial(describe_run, counts=THREE, replicas=3), THREE, replicas=3),
}  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTED)
def test_an_update_is_the_plain_weighted_loop(name: str, tmp_path: Path) -> None:
    """Story: an update was the mean of its microbatches' means, and a token of a short microbatch counted ten times."""
    describe, counts, weigh, replicas = WEIGHTED[name]
    arguments, seen = describe(), []

    class Watch(ipu_pipe.Callback):
        def on_step(self, now: Any) -> None:
            seen.append(now.loss)

    ipu_pipe.train(out=tmp_path, quiet=True, callbacks=[Watch()], **arguments)
    model, data = make_token_model(), make_token_batches(counts)
    parameters = list(model.parameters())
    optimizer, losses = SGD(parameters), []
    for start in range(0, len(data), N * replicas):
        batch = [(x, y, weigh(y)) for x, y in data[start : start + N * replicas]]
        total, weighted_loss, by_replica = sum(w for _, _, w in batch), 0.0, []
        for replica in range(replicas):
            for p in parameters:
                p.grad = torch.zeros_like(p)
            for x, y, w in batch[replica::replicas]:
                if w:
                    (compute_token_loss(model(x), y) * (w * replicas / total)).backward()
            by_replica.append([p.grad for p in parameters])
        for x, y, w in batch:
            weighted_loss += compute_token_loss(model(x), y).item() * w if w else 0.0
        for p, *gradients in zip(parameters, *by_replica):
            p.grad = average_gradients(gradients)
        optimizer.step()
        losses.append(weighted_loss / total if total else None)
    trained = arguments["model"]
    assert_same(getattr(trained, "body", trained).state_dict(), model.state_dict())
    assert read_column(tmp_path, "train_loss") == seen == losses and (None in losses) == (
        replicas == 1
    )


def test_equal_weights_change_no_bit() -> None:
    data = draw_microbatches(24)
    one, other = (join_stages(make_seeded_stages("mlp")) for _ in range(2))
    chosen = resolve_method("pipedream")
    train_on_emulator(one, chosen, 3, data, OPTIMIZERS["sgd"])
    train_on_emulator(other, chosen, 3, data, OPTIMIZERS["sgd"], weights=[7.0] * 24)
    assert_same(one.state_dict(), other.state_dict())


@pytest.mark.parametrize("method", ["local_sgd", "randomized_pipedream"])
def test_an_update_of_one_microbatch_has_its_whole_loss(method: str, tmp_path: Path) -> None:
    """Weights change nothing except where they are 0: then the loss is not read."""
    full, empty = [count or 1 for count in UNEVEN], [0] * len(UNEVEN)
    models = []
    for counts, weight in ((full, "tokens"), (full, lambda y: 1), (empty, "tokens")):
        how: Dict[str, Any] = {"gradient_accumulation": 1, "steps": 6, "checkpoint": None}
        arguments = describe_run(method, counts, weight, **how)
        ipu_pipe.train(out=tmp_path / str(len(models)), quiet=True, **arguments)
        models.append(arguments["model"].state_dict())
    assert_same(models[0], models[1])
    assert_same(models[2], make_token_model().state_dict())
    assert set(read_column(tmp_path / "2", "train_loss")) == {None}


def test_a_resumed_run_reads_the_same_weights(tmp_path: Path) -> None:
    """A function of the labels is recorded, and required again."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    describe = functools.partial(describe_run, "pipedream", weight=count_first_row)
    ipu_pipe.train(out=whole, quiet=True, **describe())
    ipu_pipe.train(out=parts, quiet=True, **describe(steps=2))
    lacking = describe()
    del lacking["loss_weight"]
    faults = list_faults(ipu_pipe.train, out=parts, quiet=True, resume=True, **lacking)
    assert any(fault.startswith("given.loss_weight: ") for fault in faults)
    ipu_pipe.train(out=parts, quiet=True, resume=True, **describe())
    assert_same_weights(whole, parts)
    assert read_numbers(whole)[-2:] == read_numbers(parts)[-2:]


# ---- faults


@pytest.mark.parametrize(
    "value", [-1, float("nan"), float("inf"), "many", None, True, torch.ones(2)]
)
def test_an_invalid_weight_ends_the_run_in_one_line(value: Any, tmp_path: Path) -> None:
    """The invalid weight belongs to the second update: the first one is valid."""
    calls: List[int] = []

    def weigh(y: torch.Tensor) -> Any:
        calls.append(0)
        # the first call looks at microbatch 0 before training
        return value if len(calls) == 7 else 1

    with pytest.raises(RunFault) as fault:
        ipu_pipe.train(out=tmp_path, quiet=True, **describe_run(weight=weigh))
    assert str(fault.value).startswith("loss_weight: update 1, microbatch 5: ")


@pytest.mark.parametrize("weight, precision", [
    ("token", "float32"), ("tests.test_loss_weight:nothing", "bfloat16"), ("token", "bfloat16_mixed")
])  # fmt: skip
def test_an_unknown_weight_is_refused_and_leaves_the_model_as_it_was(
    weight: str, precision: str, tmp_path: Path
) -> None:
    """Story: the model stayed in bfloat16, or its forward under autocast."""
    job = describe_run(weight=weight, precision=precision)
    (fault,) = list_faults(ipu_pipe.train, out=tmp_path / "run", quiet=True, **job)
    assert fault.startswith(f"loss_weight: {weight}: ") and not (tmp_path / "run").exists()
    assert {p.dtype for p in job["model"].parameters()} == {torch.float32}
    assert "forward" not in vars(job["model"])


def test_tokens_are_the_labels_that_the_loss_does_not_ignore() -> None:
    y = torch.tensor([[1, 0, -100], [2, 3, 0]])
    ignored: List[Tuple[Any, int]] = [
        (F.cross_entropy, 5), (nn.CrossEntropyLoss(ignore_index=0), 4), (functools.partial(F.cross_entropy, ignore_index=3), 5),
        (compute_token_loss, 5),
    ]  # fmt: skip
    assert [make_token_count(loss)(y) for loss, _ in ignored] == [count for _, count in ignored]
    with pytest.raises(BadInput, match="reduction"):
        make_token_count(nn.CrossEntropyLoss(reduction="sum"))
    for labels in (y.double(), None, (y, y)):
        with pytest.raises(BadInput, match="loss_weight: tokens"):
            CountTokens(-100)(labels)


def test_a_rule_that_uses_the_gradient_of_one_microbatch_is_refused(tmp_path: Path) -> None:
    how: Dict[str, Any] = {"method_args": {"delay_compensation": {"scale": 0.5}}}
    (fault,) = list_faults(ipu_pipe.train, out=tmp_path, **describe_run("pipedream", **how))
    assert fault.startswith("method_args.delay_compensation: cannot be combined with loss_weight")
    single = describe_run("pipedream", gradient_accumulation=1, **how)
    ipu_pipe.train(out=tmp_path, quiet=True, **single)
