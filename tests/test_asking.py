"""Losses that take fields of the batch, or all of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ipu_pipe
from ipu_pipe.backends.ipu.backend import list_faults
from ipu_pipe.model.loss import list_requested_fields
from ipu_pipe.pipeline.build import build
from tests.support.flows import train_updates
from tests.support.processes import check_two_processes
from tests.support.runs import needs_processes
from tests.test_batches import NAMED_PAIRS, PARTS, Two, refusal, settings, train_alike

WEIGHTS = [torch.rand(4, generator=torch.Generator().manual_seed(i)) for i in range(len(PARTS))]
NAMED = [{"a": a, "b": b, "labels": y, "weights": w} for (a, b, y), w in zip(PARTS, WEIGHTS)]
INSIDE = [({"a": a, "b": b, "weights": w}, y) for (a, b, y), w in zip(PARTS, WEIGHTS)]


def weighted(output: Any, y: Any, *, weights: Any) -> torch.Tensor:
    """Of samples with weights of their own, which are no input of the model."""
    return (F.cross_entropy(output, y, reduction="none") * weights).mean()


def smooth(output: Any, y: Any, *, batch: Any, strength: float = 0.1) -> torch.Tensor:
    """Outputs are near a function of the inputs, too."""
    a = batch["a"] if isinstance(batch, dict) else batch[0]
    return (
        F.cross_entropy(output, y) + strength * (output.sum(dim=1) - a.sum(dim=1)).square().mean()
    )


class Weighted(nn.Module):
    def forward(self, output: Any, y: Any, *, weights: Any) -> torch.Tensor:
        return weighted(output, y, weights=weights)


CASES: Dict[str, Callable[[], Dict[str, Any]]] = {
    "a field": lambda: {"batches": NAMED, "loss": weighted},
    "a field of the inputs": lambda: {"batches": INSIDE, "loss": weighted},
    "a module": lambda: {"batches": NAMED, "loss": Weighted()},
    "the whole batch": lambda: {"batches": PARTS, "loss": smooth},
    "of what is taken": lambda: {
        "batches": NAMED,
        "loss": weighted,
        "output": lambda scores: 2 * scores,
    },
}


def by_hand(case: str, model: nn.Module, batch: Any) -> torch.Tensor:
    if case == "the whole batch":
        return smooth(model(*batch[:2]), batch[2], batch=batch)
    fields = {**batch[0], "labels": batch[1]} if isinstance(batch, (tuple, list)) else batch
    output = model(fields["a"], fields["b"]) * (2 if case == "of what is taken" else 1)
    return weighted(output, fields["labels"], weights=fields["weights"])


@pytest.mark.parametrize("case", CASES)
def test_a_loss_that_takes_of_the_batch_trains_as_in_plain_pytorch(case: str) -> None:
    train_alike(Two(), value=lambda model, batch: by_hand(case, model, batch), **CASES[case]())


def test_metrics_are_of_the_labels(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, data = Two(), ipu_pipe.from_loader(NAMED, NAMED)
    config = settings(metrics=["accuracy", "top2"], evaluate={"subset": 6})
    final = ipu_pipe.train(
        config, tmp_path / "run", model=model, data=data, loss=weighted, quiet=True
    )["final"]
    with torch.no_grad():
        right = [model(one["a"], one["b"]).argmax(dim=1) == one["labels"] for one in NAMED]
    assert final["test_accuracy"] == pytest.approx(torch.cat(right)[:6].double().mean().item())
    assert final["test_top2"] >= final["test_accuracy"] and final["train_loss"] > 0


def test_blocks_and_mixed_precision_give_it_too() -> None:
    """To the losses of auxiliary heads; and under autocast, where the loss is a float32 number."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4))
    pairs = [(a, y) for a, _, y in PARTS]
    for keys in ({"method": "local_greedy", "stages": ["1"]}, {"precision": "bfloat16_mixed"}):
        flow, (result,) = train_updates(
            build(settings(**keys), model, ipu_pipe.from_loader(pairs), smooth), 1
        )
        assert result.loss > 0
        flow.engine.close()


def test_what_cannot_be_taken_is_reported() -> None:
    assert all(
        list_requested_fields(loss) == ()
        for loss in (F.cross_entropy, torch.nn.MSELoss(), torch.dot)
    )
    assert refusal(Two(), PARTS, loss=weighted).startswith(
        "loss: takes weights of the batch, which besides labels has no fields"
    )
    assert "besides labels has a, b: must be" in refusal(Two(), NAMED_PAIRS, loss=weighted)
    uneven = [{**one, "weights": torch.ones(3)} for one in NAMED]
    line = refusal(Two(), uneven, loss=lambda f, y, *, weights, batch: f.sum())
    assert line.startswith("data: batch.a has the shape (4, 3), weights (3,): the first dimension")
    line = refusal(Two(), PARTS, loss=lambda output, y, mask: output.sum())
    assert (
        line.startswith("loss: takes mask besides outputs and labels: ")
        and "loss(output, y, *, mask)" in line
    )


def test_ipus_give_a_loss_outputs_and_labels_alone() -> None:
    job = build(settings(), Two(), ipu_pipe.from_loader([(a, y) for a, _, y in PARTS]), smooth)
    (fault,) = list_faults(job)
    assert fault.startswith("loss: takes batch of the batch: ")


# ---- on two processes


def make_arguments(case: str, method: str) -> Dict[str, Any]:
    """Return the arguments of `train`, the same each time."""
    torch.manual_seed(3)
    arguments = CASES[case]()
    data = ipu_pipe.from_loader(arguments["batches"], arguments.pop("batches")[:2])
    config = settings(stages=["out"], checkpoint={"every": 3}, method=method)
    return {"config": config, "model": Two(), "data": data, **arguments}


@needs_processes
def test_two_processes_give_it_to_the_last_stage(tmp_path: Path) -> None:
    runs = [
        ("a field", "gpipe"),
        ("the whole batch", "pipedream"),
        ("of what is taken", "pipemare"),
    ]
    check_two_processes(
        tmp_path, {method: partial(make_arguments, case, method) for case, method in runs}
    )
