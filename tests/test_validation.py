"""Check a validation set that is split off the training set: its samples, and its role in a run
on each backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
import yaml

import ipu_pipe
from ipu_pipe.config.load import load_config
from ipu_pipe.data.text import TextData
from ipu_pipe.run.train import check, train
from tests.support.data import write_pictures
from tests.support.runs import (
    DIGITS,
    assert_same_state,
    assert_same_weights,
    list_faults,
    read_column,
    read_json,
    read_metrics,
    read_numbers,
    read_summary,
)
from tests.test_processes import train_digits_on_ranks

SETS = [
    "method=pipedream", "stages=2", "gradient_accumulation=4", "data.validation=0.25", "data.subset=512", "data.test_subset=64",
    "log.tensorboard=false", "log.trace=false", "backend.threads=1", "log.every=2", "evaluate.steps=4", "evaluate.best=accuracy",
]  # fmt: skip


def train_validated(out: Path, *settings: str, **keys: Any) -> Dict[str, Any]:
    return train(load_config(DIGITS, [*SETS, *settings]), out, quiet=True, **keys)


def list_rows(x: torch.Tensor) -> List[bytes]:
    return [row.numpy().tobytes() for row in x]


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_every_sample_is_in_one_set_and_none_of_the_test_set_is_held_out(name: str) -> None:
    undivided, data, same, other = (
        ipu_pipe.load_data(name, seed=seed, subset=200, validation=size)
        for seed, size in ((3, None), (3, 0.25), (3, 50), (4, 50))
    )
    held_out = data.validation
    assert (data.train_samples, held_out.test_samples) == (150, 50)
    training = list_rows(data.take_train(0, range(150))[0])
    validation, test = (
        list_rows(torch.cat([x for x, _ in source.test_batches(64)]))
        for source in (held_out, undivided)
    )
    assert not {*training} & {*validation} and not {*validation} & {*test}
    if name == "digits":
        assert held_out.train is data.train  # the same tensors, not a copy
        whole = list_rows(undivided.take_train(0, range(200))[0])
        assert sorted([*training, *validation]) == sorted(whole)
    again, differing = (list_rows(x.validation.take_test(range(50))[0]) for x in (same, other))
    assert validation == again != differing


def test_no_character_of_a_text_is_in_both_sets() -> None:
    data = TextData(bytes(i % 251 for i in range(2000)), context=10)
    text, count = data._text.long(), data.train_samples
    data.split_off_validation(20, seed=0)
    left = data._text.long()
    assert data.train_samples == count - 21 and data.validation is not None
    held_out = torch.cat([x for x, _ in data.validation.test_batches(7)]).flatten()
    assert torch.equal(torch.cat([left, held_out]), text[: len(left) + 200])
    assert data.take_train(0, range(count - 21))[1].shape == (count - 21, 10)
    assert int(data._starts.max()) + 10 < len(left)


def test_image_folders_hold_out_files_without_augmenting_them(tmp_path: Path) -> None:
    write_pictures(tmp_path, 2, train=6, val=2)
    data = ipu_pipe.load_data("image_folder", tmp_path, size=8, validation=3)
    held_out = data.validation
    assert (data.train_samples, held_out.test_samples, len({*data.data_files})) == (9, 3, 16)
    assert torch.equal(*[next(iter(held_out.test_batches(3)))[0] for _ in range(2)])


def test_a_run_watches_the_validation_set_and_tests_at_both_ends(tmp_path: Path) -> None:
    stopping = "early_stopping={metric: accuracy, patience: 9}"
    report = train_validated(tmp_path, "steps=10", stopping)
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines if "test_loss" in line] == [0, 10]
    validated = {line["step"]: line for line in lines if "validation_loss" in line}
    assert [*validated] == [0, 4, 8, 10]
    for line, key in ((lines[-1], "test_loss"), (validated[10], "validation_loss")):
        assert report["final"][key] == line[key]
    accuracies = {step: line["validation_accuracy"] for step, line in validated.items() if step}
    # the first of the best
    best = max(accuracies, key=lambda step: (accuracies[step], -step))
    assert report["best"] == {"step": best, "validation_accuracy": accuracies[best]}
    manifest = read_json(tmp_path / "checkpoints" / "step-10" / "manifest.json")
    state = manifest["callbacks"][0]["state"]
    assert (state["best"], state["best_step"]) == (accuracies[best], best)

    numbers = read_numbers(tmp_path)
    # as if killed after its last line: no line is written twice
    (tmp_path / "summary.json").unlink()
    resumed = train_validated(tmp_path, "steps=10", stopping, resume=True)
    assert resumed["final"] == report["final"] and read_numbers(tmp_path) == numbers
    # as in a run planned that long
    train_validated(tmp_path / "cut", "steps=4")
    train_validated(tmp_path / "cut", "steps=10", resume=True)
    assert read_numbers(tmp_path / "cut") == numbers
    assert read_summary(tmp_path / "cut")["best"] == report["best"]


def test_processes_validate_as_the_emulator_does(tmp_path: Path) -> None:
    code, _, error = train_digits_on_ranks(2, tmp_path / "ranks", *SETS, "steps=8")
    assert code == 0, error
    same = ["optimizer.lr=0.02", "micro_batch_size=8", "checkpoint.every=4", "evaluate.subset=100"]
    report = train_validated(tmp_path / "one", "steps=8", *same)
    assert (
        read_summary(tmp_path / "ranks")["final"] == report["final"]
        and "validation_loss" in report["final"]
    )
    assert_same_weights(tmp_path / "ranks", tmp_path / "one")


def test_loaders_have_a_validation_loader(tmp_path: Path) -> None:
    data = ipu_pipe.load_data("digits", subset=64)
    batches = [data.train_batch(0, i, 8) for i in range(8)]
    source = ipu_pipe.from_loader(batches[:4], batches[4:], validation=batches[4:])
    config = ipu_pipe.configure(micro_batch_size=8, steps=4, log={"tensorboard": False})
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    final = train(config, tmp_path / "run", data=source, model=model, quiet=True)["final"]
    assert final["validation_loss"] == final["test_loss"] is not None


class ShadowingSource(ipu_pipe.data.TensorData):
    """A source of the user that stores its argument under the name of a validation set."""

    def __init__(self, validation: Any, **of_the_file: Any) -> None:
        super().__init__(*[(torch.zeros(8, 64), torch.zeros(8).long())] * 2)
        self.validation = validation


def test_a_validation_set_that_is_not_a_source_is_refused(tmp_path: Path) -> None:
    """It once raised an AttributeError at the first evaluation."""
    (fault,) = list_faults(
        train_validated,
        tmp_path / "run",
        "data={name: 'tests.test_validation:ShadowingSource', validation: 0.1}",
    )
    assert fault.startswith("data: validation: 0.1: ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", [0, -3, 1.5, True, "'x'", 1437, 0.0001, float("inf")])
def test_bad_values_are_refused(value: Any, tmp_path: Path) -> None:
    written = {True: "true", float("inf"): ".inf"}.get(value, value)
    (fault,) = list_faults(
        train_validated, tmp_path / "run", "data.subset=1437", f"data.validation={written}"
    )
    printed = "true" if value is True else str(value).strip("'")
    assert f"data.validation: {printed}: " in fault
    assert not (tmp_path / "run").exists()


def test_the_best_is_by_a_metric_that_is_evaluated(tmp_path: Path) -> None:
    (fault,) = list_faults(train_validated, tmp_path / "run", "evaluate.best=top5")
    assert fault.startswith("evaluate.best: top5: ")
    # a metric of the call, which the config does not name
    keys = ["evaluate.best=zero", "steps=1"]
    report = train_validated(tmp_path, *keys, metrics={"zero": lambda output, y: 0.0})
    assert report["best"]["validation_zero"] == 0


# ---- a learning rate that follows evaluations

ARGS = "{factor: 0.5, patience: 0, threshold: 0.02, cooldown: 1}"
PLATEAU_SETS = [
    "method=pipedream", "stages=2", "gradient_accumulation=1", "micro_batch_size=8", "data.subset=256", "data.test_subset=64",
    "log.tensorboard=false", "log.trace=false", "backend.threads=1", "log.every=1", "evaluate.steps=2", "checkpoint.every=2",
    "optimizer.lr=0.02", "optimizer.momentum=0.9",
]  # fmt: skip


def train_with_sets(out: Path, *sets: str, **keys: Any) -> Dict[str, Any]:
    return train(load_config(DIGITS, [*PLATEAU_SETS, *sets]), out, quiet=True, **keys)


@pytest.mark.parametrize("metric, mode", [("loss", "min"), ("accuracy", "max")])
def test_rates_are_those_of_torchs_scheduler_after_each_evaluation(
    metric: str, mode: str, tmp_path: Path
) -> None:
    plateau = f"lr_schedule={{name: plateau, metric: {metric}, args: {ARGS}}}"
    train_with_sets(tmp_path, "steps=16", plateau)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.02)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode, **yaml.safe_load(ARGS))
    rates = []
    for line in read_metrics(tmp_path)[1:]:
        if "lr" in line:
            rates.append(optimizer.param_groups[0]["lr"])
        else:
            scheduler.step(line[f"test_{metric}"])
    assert read_column(tmp_path, "lr") == rates and len(rates) == 16 and len({*rates}) > 2


@pytest.mark.slow
def test_a_resume_continues_it(tmp_path: Path) -> None:
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    plateau = f"lr_schedule={{name: plateau, warmup_steps: 3, args: {ARGS}}}"
    train_with_sets(cut, "steps=6", plateau)
    train_with_sets(cut, "steps=12", plateau, resume=True)
    train_with_sets(whole, "steps=12", plateau)
    rates = read_column(whole, "lr")
    assert read_column(cut, "lr") == rates and len({*rates}) > 4
    assert_same_state(cut, whole, 12)


BAD_PLATEAUS = {
    "args: {factor: 2}": "lr_schedule.args: ", "args: {x: 2}": "lr_schedule.args: ", "metric: top5": "lr_schedule.metric: top5: ",
    "args: {patience: x}": "lr_schedule.args.patience: x: ", "args: {factor: -1}": "lr_schedule.args.factor: -1: ",
    "args: {min_lr: [x]}": "lr_schedule.args.min_lr: ", "interval: epoch": "lr_schedule.interval: epoch: ",
}  # fmt: skip


@pytest.mark.parametrize("value", BAD_PLATEAUS)
def test_bad_values_of_a_plateau_are_refused(value: str, tmp_path: Path) -> None:
    sets = [*PLATEAU_SETS, "steps=2", f"lr_schedule={{name: plateau, {value}}}"]
    (fault,) = list_faults(lambda: check(load_config(DIGITS, sets), tmp_path / "run"))
    assert BAD_PLATEAUS[value] in fault
