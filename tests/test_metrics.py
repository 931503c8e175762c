"""Test named metrics and the user's own: batches add up exactly, and files record the metrics."""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ipu_pipe
from ipu_pipe.data.sources import TensorData
from ipu_pipe.errors import BadInput
from ipu_pipe.job.evaluation import Tally, evaluate_sums
from ipu_pipe.job.metrics import make_metrics
from tests.callbacks_of_runs import Spread, confidence
from tests.support.runs import list_faults, read_metrics
from tests.test_callbacks import train_short_digits


def evaluate_metrics(
    chosen: Any,
    output: torch.Tensor,
    y: torch.Tensor,
    size: int = 12,
    loss: Any = nn.functional.cross_entropy,
) -> Any:
    """Return loss and metrics over batches of a size, of which the last may be smaller."""
    metrics = make_metrics(chosen)
    tally = Tally(loss, metrics)
    for o, labels in zip(output.split(size), y.split(size)):
        tally.add(o, labels, len(o))
    return evaluate_sums(metrics, tally.sums)


def test_batches_of_any_size_add_up() -> None:
    output, y = torch.randn(2, 12, 3, dtype=torch.float64)
    mse, mae = float((output - y).square().mean()), float((output - y).abs().mean())
    r2 = 1 - 36 * mse / float((y - y.mean()).square().sum())
    expected = {"mse": mse, "rmse": math.sqrt(mse), "mae": mae, "r2": r2}
    for size in (12, 5, 1):
        result = evaluate_metrics(list(expected), output, y, size, nn.functional.mse_loss)
        assert result.accuracy is None
        assert result.metrics == pytest.approx(expected, rel=1e-12)
    classes, labels = torch.randn(12, 9), torch.arange(12) % 9
    labels[2] = -100
    best = classes.topk(5, dim=1).indices
    right = (best == labels[:, None]).sum().item()
    for size in (12, 7):
        result = evaluate_metrics(["accuracy", "top5", "top1"], classes, labels, size)
        assert result.metrics["top5"] == right / 11
        assert result.metrics["top1"] == result.accuracy


def test_a_loss_that_is_a_sum_is_reported_as_a_mean() -> None:
    """Story: the sum of a batch was reported as the mean loss, 5.6 where that was 0.7."""
    output, y = torch.randn(12, 3, dtype=torch.float64), torch.arange(12) % 3
    y[2] = -100
    entropy = nn.CrossEntropyLoss(reduction="sum")
    squares = functools.partial(nn.functional.mse_loss, reduction="sum")
    for loss, labels, expected in (
        (entropy, y, float(nn.functional.cross_entropy(output, y))),
        (squares, torch.zeros_like(output), float(output.square().sum()) / 12),
    ):
        for size in (12, 7):
            measured = evaluate_metrics([], output, labels, size, loss)
            assert measured.loss == pytest.approx(expected)


def test_a_users_function_is_averaged_by_samples_and_an_object_keeps_its_sums() -> None:
    output, y = torch.randn(10, 4), torch.zeros(10, dtype=torch.int64)
    result = evaluate_metrics({"how_sure": confidence, "Spread": Spread()}, output, y, 7)
    spread = float(output.max() - output.min())
    expected = {"how_sure": float(confidence(output, y)), "Spread": spread}
    assert result.metrics == pytest.approx(expected)


def test_a_regression_reports_its_own_metrics_and_no_accuracy(tmp_path: Path, capsys: Any) -> None:
    x = torch.randn(64, 5)
    y = x @ torch.randn(5, 1)
    data, model = TensorData((x, y), (x, y)), nn.Linear(5, 1)
    config = ipu_pipe.configure(
        steps=8, micro_batch_size=16, metrics=["r2", "mae"], stages=1, log={"tensorboard": False}, optimizer={"lr": 0.1},
    )  # fmt: skip
    loss = nn.functional.mse_loss
    report = ipu_pipe.train(config, tmp_path, model=model, data=data, loss=loss)
    output = capsys.readouterr()
    assert "accuracy" not in output.out + output.err
    assert all(f"test {name} " in output.out for name in ("r2", "mae", "loss"))
    final, last = report["final"], read_metrics(tmp_path)[-1]
    assert final["test_r2"] == last["test_r2"] and final["test_accuracy"] is None
    left = (model(x) - y).square().sum() / (y - y.mean()).square().sum()
    assert final["test_r2"] == pytest.approx(1 - left.item(), abs=1e-5)


@pytest.mark.parametrize("chosen, message", [
    (["acuracy"], "metrics: acuracy: nearest is accuracy"),
    (["accuracy", "accuracy"], "metrics: accuracy: "),
    ([3], "metrics: 3: must be a name, a function"),
    ([Spread], "metrics: the class Spread: must be a name, a function"),
    ({"a b": confidence}, "metrics: .*a b.*: must be letters"),
    (["tests.callbacks_of_runs:nothing"], "metrics: .*has no nothing"),

])  # fmt: skip
def test_an_invalid_metric_is_refused_in_one_line(
    chosen: Any, message: str, tmp_path: Path
) -> None:
    (fault,) = list_faults(train_short_digits, tmp_path / "run", "steps=2", metrics=chosen)
    assert re.match(message, fault) and not (tmp_path / "run").exists()


def test_metrics_may_change_when_a_run_is_resumed(tmp_path: Path) -> None:
    sets = ["steps=4", "checkpoint.every=2", "checkpoint.keep=9", "gradient_accumulation=2"]
    whole = train_short_digits(tmp_path, *sets)
    metrics = ["accuracy", "top3", confidence]
    resumed = train_short_digits(tmp_path, *sets, metrics=metrics, resume_from=2)
    assert resumed["initial"] == whole["initial"]
    assert resumed["final"]["test_loss"] == whole["final"]["test_loss"]
    assert resumed["final"]["test_top3"] > resumed["final"]["test_accuracy"]


@pytest.mark.parametrize("value", [{"f1": 1.0}, torch.ones(3), None, "0.5"], ids=str)
def test_an_object_that_computes_more_than_a_number_is_named(value: Any) -> None:
    fixed = SimpleNamespace(update=lambda output, y: None, compute=lambda: value)
    output, y = torch.randn(2, 4), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(BadInput, match=r"^metrics: fixed.compute\(\): returned "):
        evaluate_metrics({"fixed": fixed}, output, y)
