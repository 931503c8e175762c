"""Losses may take fields of the batch, or the whole batch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Dict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ipu_pipe
from ipu_pipe.model.loss import list_requested_fields
from ipu_pipe.run.build import build
from tests.support.flows import train_updates
from tests.support.processes import check_two_processes
from tests.support.runs import needs_processes
from tests.test_batches import (
    NAMED_PAIRS,
    PARTS,
    TwoInputs,
    assert_trains_alike,
    configure_short_run,
    find_refusal,
)

WEIGHTS = [torch.rand(4, generator=torch.Generator().manual_seed(i)) for i in range(len(PARTS))]
NAMED = [{"a": a, "b": b, "labels": y, "weights": w} for (a, b, y), w in zip(PARTS, WEIGHTS)]
INSIDE = [({"a": a, "b": b, "weights": w}, y) for (a, b, y), w in zip(PARTS, WEIGHTS)]


def compute_weighted_loss(output: Any, y: Any, *, weights: Any) -> torch.Tensor:
    """Return the mean of weighted sample losses; the weights are a field of the batch, not an input of the model."""
    return (F.cross_entropy(output, y, reduction="none") * weights).mean()


def compute_smooth_loss(output: Any, y: Any, *, batch: Any, strength: float = 0.1) -> torch.Tensor:
    """Return the cross-entropy plus a penalty that reads the inputs."""
    a = batch["a"] if isinstance(batch, dict) else batch[0]
    return (
        F.cross_entropy(output, y) + strength * (output.sum(dim=1) - a.sum(dim=1)).square().mean()
    )


CASES = {
    "a field": lambda: {"batches": NAMED, "loss": compute_weighted_loss},
    "a field of the inputs": lambda: {"batches": INSIDE, "loss": compute_weighted_loss},
    "the whole batch": lambda: {"batches": PARTS, "loss": compute_smooth_loss},
    "a changed output": lambda: {
        "batches": NAMED, "loss": compute_weighted_loss, "output": lambda scores: 2 * scores
    },
}  # fmt: skip


def compute_loss_by_hand(case: str, model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss of a case as a plain loop computes it."""
    if case == "the whole batch":
        return compute_smooth_loss(model(*batch[:2]), batch[2], batch=batch)
    fields = {**batch[0], "labels": batch[1]} if case == "a field of the inputs" else batch
    output = model(fields["a"], fields["b"]) * (2 if case == "a changed output" else 1)
    return compute_weighted_loss(output, fields["labels"], weights=fields["weights"])


@pytest.mark.parametrize("case", CASES)
def test_a_loss_that_takes_fields_trains_as_in_plain_pytorch(case: str) -> None:
    assert_trains_alike(
        TwoInputs(),
        compute_loss=lambda model, batch: compute_loss_by_hand(case, model, batch),
        **CASES[case](),
    )


def test_metrics_read_the_labels_alone(tmp_path: Path) -> None:
    model, data = TwoInputs(), ipu_pipe.from_loader(NAMED, NAMED)
    config = configure_short_run(metrics=["accuracy"], evaluate={"subset": 6})
    keys = {"model": model, "data": data, "loss": compute_weighted_loss}
    final = ipu_pipe.train(config, tmp_path, quiet=True, **keys)["final"]
    right = [model(batch["a"], batch["b"]).argmax(dim=1) == batch["labels"] for batch in NAMED]
    assert final["test_accuracy"] == pytest.approx(torch.cat(right)[:6].double().mean().item())


@pytest.mark.parametrize(
    "keys", [{"method": "local_greedy", "stages": ["1"]}, {"precision": "bfloat16_mixed"}]
)
def test_blocks_and_mixed_precision_pass_the_batch_too(keys: Dict[str, Any]) -> None:
    """The losses of auxiliary heads get the batch; and so do losses under autocast, which are float32."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4))
    data = ipu_pipe.from_loader([(a, y) for a, _, y in PARTS])
    job = build(configure_short_run(**keys), model, data, compute_smooth_loss)
    flow, (result,) = train_updates(job, 1)
    assert result.loss > 0
    flow.engine.close()


UNEVEN = [{**batch, "weights": torch.ones(3)} for batch in NAMED]


@pytest.mark.parametrize("batches, loss, parts", [
    (PARTS, compute_weighted_loss, ["loss: takes weights of the batch, which besides labels has no fields"]),
    (NAMED_PAIRS, compute_weighted_loss, ["loss: takes weights", "besides labels has a, b: must be"]),
    (UNEVEN, lambda f, y, *, weights, batch: f.sum(),
     ["data: batch.a has the shape (4, 3), weights (3,): the first dimension"]),
    (PARTS, lambda output, y, mask: output.sum(),
     ["loss: takes mask besides outputs and labels: ", "loss(output, y, *, mask)"]),
])  # fmt: skip
def test_a_field_that_the_batch_lacks_is_reported(batches: Any, loss: Any, parts: Any) -> None:
    line = find_refusal(TwoInputs(), batches, loss=loss)
    assert line.startswith(parts[0]) and all(part in line for part in parts)


def test_losses_of_torch_take_no_fields() -> None:
    for loss in (F.cross_entropy, nn.MSELoss(), torch.dot):
        assert list_requested_fields(loss) == ()


# ---- on two processes


def make_loss_arguments(case: str, method: str) -> Dict[str, Any]:
    """Make the arguments of `train` for a case, the same in each call."""
    torch.manual_seed(3)
    arguments = CASES[case]()
    data = ipu_pipe.from_loader(arguments["batches"], arguments.pop("batches")[:2])
    config = configure_short_run(stages=["out"], checkpoint={"every": 3}, method=method)
    return {"config": config, "model": TwoInputs(), "data": data, **arguments}


@needs_processes
def test_two_processes_pass_the_batch_to_the_last_stage(tmp_path: Path) -> None:
    cases = {"gpipe": "a field", "pipedream": "the whole batch", "pipemare": "a changed output"}
    runs = {method: partial(make_loss_arguments, case, method) for method, case in cases.items()}
    check_two_processes(tmp_path, runs)
