"""Test a learning rate that follows evaluations: it equals torch's ReduceLROnPlateau, on
processes and after a resume too."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch

from ipu_pipe.config.load import load_config
from ipu_pipe.run.train import check, train
from tests.support.runs import DIGITS, assert_same_state, list_faults, read_metrics
from tests.test_processes import train_digits_on_both

ARGS = "{factor: 0.5, patience: 0, threshold: 0.02, cooldown: 1}"
SETS = [
    "method=pipedream", "stages=2", "gradient_accumulation=1", "micro_batch_size=8", "data.subset=256", "data.test_subset=64",
    "log.tensorboard=false", "log.trace=false", "backend.threads=1", "log.every=1", "evaluate.steps=2", "checkpoint.every=2",
    "optimizer.lr=0.02", "optimizer.momentum=0.9",
]  # fmt: skip


def train_with_sets(out: Path, *sets: str, **keys: Any) -> Dict[str, Any]:
    return train(load_config(DIGITS, [*SETS, *sets]), out, quiet=True, **keys)


def list_rates(out: Path) -> List[float]:
    return [line["lr"] for line in read_metrics(out) if "lr" in line]


@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_rates_are_those_of_torchs_scheduler_after_each_evaluation(
    metric: str, tmp_path: Path
) -> None:
    train_with_sets(
        tmp_path / "run",
        "steps=16",
        f"lr_schedule={{name: plateau, metric: {metric}, args: {ARGS}}}",
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.02)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer,
        mode="max" if metric == "accuracy" else "min",
        factor=0.5,
        patience=0,
        threshold=0.02,
        cooldown=1,
    )
    rates = []
    for line in read_metrics(tmp_path / "run")[1:]:
        if "lr" in line:
            rates.append((line["lr"], optimizer.param_groups[0]["lr"]))
        else:
            scheduler.step(line[f"test_{metric}"])
    assert len(rates) == 16 and all(ours == theirs for ours, theirs in rates)
    assert len({*list_rates(tmp_path / "run")}) > 2


@pytest.mark.slow
def test_a_resume_continues_it_and_processes_have_its_rates(tmp_path: Path) -> None:
    plateau = f"lr_schedule={{name: plateau, warmup_steps: 3, args: {ARGS}}}"
    train_with_sets(tmp_path / "cut", "steps=6", plateau)
    train_with_sets(tmp_path / "cut", "steps=12", plateau, resume=True)
    train_with_sets(tmp_path / "whole", "steps=12", plateau)
    assert list_rates(tmp_path / "cut") == list_rates(tmp_path / "whole")
    assert_same_state(tmp_path / "cut", tmp_path / "whole", 12)
    sets = [
        "method=spectrain",
        "stages=2",
        "gradient_accumulation=1",
        "evaluate.steps=2",
        "log.every=1",
        plateau,
    ]
    train_digits_on_both(tmp_path, 2, *sets)
    assert len({*list_rates(tmp_path / "one")}) > 4


BAD = {
    "{name: plateau, args: {factor: 2}}": "lr_schedule.args: ", "{name: plateau, args: {x: 2}}": "lr_schedule.args: ",
    "{name: plateau, metric: top5}": "lr_schedule.metric: top5: ", "{name: constant, metric: loss}": "lr_schedule.metric: loss: ",
    "{name: plateau, args: {patience: x}}": "lr_schedule.args.patience: x: ",
    "{name: plateau, args: {factor: -1}}": "lr_schedule.args.factor: -1: ",
    "{name: plateau, args: {min_lr: [x]}}": "lr_schedule.args.min_lr: ",
    "{name: plateau, interval: epoch}": "lr_schedule.interval: epoch: ",
}  # fmt: skip


@pytest.mark.parametrize("value", BAD)
def test_bad_values_are_refused(value: str, tmp_path: Path) -> None:
    (fault,) = list_faults(
        lambda: check(
            load_config(DIGITS, [*SETS, "steps=2", f"lr_schedule={value}"]), tmp_path / "run"
        )
    )
    assert BAD[value] in fault
