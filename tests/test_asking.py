"""Losses that take fields of the batch, or all of it."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ipu_pipe
from ipu_pipe.backends.ipu.backend import list_faults
from ipu_pipe.backends.table import make_engine
from ipu_pipe.config.schema import BackendConfig
from ipu_pipe.errors import end_process
from ipu_pipe.model.loss import list_requested_fields
from ipu_pipe.run.build import build
from tests import forked
from tests.support.runs import assert_same_weights, read_summary
from tests.test_batches import PARTS, Two, refusal, settings, train_alike

WEIGHTS = [torch.rand(4, generator=torch.Generator().manual_seed(i)) for i in range(len(PARTS))]
NAMED = [{"a": a, "b": b, "labels": y, "weights": w} for (a, b, y), w in zip(PARTS, WEIGHTS)]
INSIDE = [({"a": a, "b": b, "weights": w}, y) for (a, b, y), w in zip(PARTS, WEIGHTS)]


def weighted(output: Any, y: Any, *, weights: Any) -> torch.Tensor:
    """Of samples with weights of their own, which are no input of the model."""
    return (F.cross_entropy(output, y, reduction="none") * weights).mean()


def smooth(output: Any, y: Any, *, batch: Any, strength: float = 0.1) -> torch.Tensor:
    """Outputs are near a function of the inputs, too."""
    a = batch["a"] if isinstance(batch, dict) else batch[0]
    return F.cross_entropy(output, y) + strength * (output.sum(dim=1) - a.sum(dim=1)).square().mean()


class Weighted(nn.Module):
    def forward(self, output: Any, y: Any, *, weights: Any) -> torch.Tensor:
        return weighted(output, y, weights=weights)


CASES: Dict[str, Callable[[], Dict[str, Any]]] = {
    "a field": lambda: {"batches": NAMED, "loss": weighted},
    "a field of the inputs": lambda: {"batches": INSIDE, "loss": weighted},
    "a module": lambda: {"batches": NAMED, "loss": Weighted()},
    "the whole batch": lambda: {"batches": PARTS, "loss": smooth},
    "of what is taken": lambda: {"batches": NAMED, "loss": weighted, "output": lambda scores: 2 * scores},
}


def by_hand(case: str, model: nn.Module, batch: Any) -> torch.Tensor:
    if case == "the whole batch":
        return smooth(model(*batch[:2]), batch[2], batch=batch)
    held = {**batch[0], "labels": batch[1]} if isinstance(batch, (tuple, list)) else batch
    output = model(held["a"], held["b"]) * (2 if case == "of what is taken" else 1)
    return weighted(output, held["labels"], weights=held["weights"])


@pytest.mark.parametrize("case", CASES)
def test_a_loss_that_takes_of_the_batch_trains_as_in_plain_pytorch(case: str) -> None:
    given = CASES[case]()
    train_alike(Two(), given.pop("batches"), lambda model, batch: by_hand(case, model, batch), **given)


def test_metrics_are_of_the_labels(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, data = Two(), ipu_pipe.from_loader(NAMED, NAMED)
    config = settings(metrics=["accuracy", "top2"], evaluate={"subset": 6})
    found = ipu_pipe.train(config, tmp_path / "run", model=model, data=data, loss=weighted, quiet=True)["final"]
    with torch.no_grad():
        right = [model(one["a"], one["b"]).argmax(dim=1) == one["labels"] for one in NAMED]
    assert found["test_accuracy"] == pytest.approx(torch.cat(right)[:6].double().mean().item())
    assert found["test_top2"] >= found["test_accuracy"] and found["train_loss"] > 0


def test_blocks_and_mixed_precision_give_it_too() -> None:
    """To the losses of auxiliary heads; and under autocast, where the loss is a float32 number."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4))
    pairs = [(a, y) for a, _, y in PARTS]
    for keys in ({"method": "local_greedy", "stages": ["1"]}, {"precision": "bfloat16_mixed"}):
        engine = make_engine(build(settings(**keys), model, ipu_pipe.from_loader(pairs), smooth), 0)
        assert engine.step(0)[0].loss > 0
        engine.close()


def test_what_cannot_be_taken_is_told() -> None:
    assert (
        list_requested_fields(F.cross_entropy)
        == list_requested_fields(torch.nn.MSELoss())
        == list_requested_fields(torch.dot)
        == ()
    )
    assert refusal(Two(), PARTS, loss=weighted) == (
        "loss: takes weights of the batch, which besides labels has no fields by name: must be among these, or batch for"
        " the whole batch"
    )
    line = refusal(Two(), [{"a": a, "b": b, "labels": y} for a, b, y in PARTS], loss=weighted)
    assert "besides labels has a, b: must be" in line
    uneven = [{**one, "weights": torch.ones(3)} for one in NAMED]
    line = refusal(Two(), uneven, loss=lambda f, y, *, weights, batch: f.sum())
    assert line.startswith("data: batch.a has the shape (4, 3), weights (3,): the first dimension")
    line = refusal(Two(), PARTS, loss=lambda output, y, mask: output.sum())
    assert line.startswith("loss: takes mask besides outputs and labels: ") and "loss(output, y, *, mask)" in line


def test_ipus_give_a_loss_outputs_and_labels_alone() -> None:
    job = build(settings(), Two(), ipu_pipe.from_loader([(a, y) for a, _, y in PARTS]), smooth)
    (fault,) = list_faults(job)
    assert fault.startswith("loss: takes batch of the batch: ")


# ---- on two processes


def as_trained(case: str) -> Dict[str, Any]:
    """What `train` is given, the same each time."""
    torch.manual_seed(3)
    made = CASES[case]()
    data = ipu_pipe.from_loader(made["batches"], made.pop("batches")[:2])
    return {"model": Two(), "data": data, "quiet": True, **made}


def config_of(method: str, **keys: Any) -> Any:
    return settings(stages=["out"], checkpoint={"every": 3}, method=method, **keys)


RUNS = [("a field", "gpipe"), ("the whole batch", "pipedream"), ("of what is taken", "pipemare")]


def one_rank(rank: int, folder: Path, runs: List[Any]) -> None:
    """A process of two, forked from one that has imported all."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        for case, method in runs:
            config = config_of(method, backend=BackendConfig(name="distributed", deadline=60))
            ipu_pipe.train(config, folder / "two" / method, **as_trained(case))
        torch.distributed.barrier()
    except BaseException:
        traceback.print_exc()
        end_process(1)
    end_process(0)


@pytest.mark.skipif(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 4), reason="needs torch 2.4")
def test_two_processes_give_it_to_the_last_stage(tmp_path: Path) -> None:
    for case, method in RUNS:
        ipu_pipe.train(config_of(method), tmp_path / "one" / method, **as_trained(case))
    forked.in_ranks(2, one_rank, tmp_path, RUNS)
    for _, method in RUNS:
        one, two = tmp_path / "one" / method, tmp_path / "two" / method
        assert_same_weights(one, two)
        assert read_summary(one)["final"] == read_summary(two)["final"], method
