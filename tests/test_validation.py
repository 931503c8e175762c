"""Check a validation set that is split off the training set: its samples, and its role in a run
on each backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch

import ipu_pipe
from ipu_pipe.config.load import load_config
from ipu_pipe.run.train import train
from tests.support.data import write_pictures
from tests.support.runs import (
    DIGITS,
    assert_same_weights,
    list_faults,
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
    undivided, data = (
        ipu_pipe.load_data(name, seed=3, subset=200, **more) for more in ({}, {"validation": 0.25})
    )
    held_out = data.validation
    assert (data.train_samples, held_out.test_samples) == (150, 50)
    training_rows = list_rows(data.take_train(0, range(150))[0])
    validation_rows = list_rows(torch.cat([x for x, _ in held_out.test_batches(16)]))
    test_rows = list_rows(torch.cat([x for x, _ in undivided.test_batches(64)]))
    assert not {*training_rows} & {*validation_rows} and not {*validation_rows} & {*test_rows}
    if name == "digits":
        assert held_out.train is data.train  # the same tensors, not a copy
        assert sorted([*training_rows, *validation_rows]) == sorted(
            list_rows(undivided.take_train(0, range(200))[0])
        )
    same_seed, other_seed = (
        ipu_pipe.load_data(name, seed=s, subset=200, validation=50) for s in (3, 4)
    )
    assert (
        validation_rows
        == list_rows(same_seed.validation.take_test(range(50))[0])
        != list_rows(other_seed.validation.take_test(range(50))[0])
    )


def test_no_character_of_a_text_is_in_both_sets() -> None:
    from ipu_pipe.data.text import TextData

    data = TextData(bytes(i % 251 for i in range(2000)), context=10)
    text, count = data._text, data.train_samples
    data.split_off_validation(20, seed=0)
    assert data.train_samples == count - 21 and data.validation is not None
    held_out = torch.cat([x for x, _ in data.validation.test_batches(7)]).flatten()
    assert torch.equal(
        torch.cat([data._text.long(), held_out]), text[: len(data._text) + 200].long()
    )
    windows = data.take_train(0, range(count - 21))
    assert int(data._starts.max()) + 10 < len(data._text) and windows[1].shape == (count - 21, 10)


def test_image_folders_hold_out_files_without_augmenting_them(tmp_path: Path) -> None:
    write_pictures(tmp_path, 2, train=6, val=2)
    data = ipu_pipe.load_data("image_folder", tmp_path, size=8, validation=3)
    held_out = data.validation
    assert (data.train_samples, held_out.test_samples, len({*data.data_files})) == (9, 3, 16)
    assert torch.equal(*[next(iter(held_out.test_batches(3)))[0] for _ in range(2)])


def test_a_run_watches_the_validation_set_and_tests_at_both_ends(tmp_path: Path) -> None:
    out, stopping = tmp_path / "run", "early_stopping={metric: accuracy, patience: 9}"
    report = train_validated(out, "steps=10", stopping)
    lines = read_metrics(out)
    assert [line["step"] for line in lines if "test_loss" in line] == [0, 10]
    validation_lines = {line["step"]: line for line in lines if "validation_loss" in line}
    assert [*validation_lines] == [0, 4, 8, 10]
    final = {
        key: value for key, value in validation_lines[10].items() if key.startswith("validation_")
    }
    assert (
        final.items() <= report["final"].items()
        and report["final"]["test_loss"] == lines[-1]["test_loss"]
    )
    best = max(
        (step for step in validation_lines if step),
        key=lambda step: (validation_lines[step]["validation_accuracy"], -step),
    )
    assert report["best"] == {
        "step": best,
        "validation_accuracy": validation_lines[best]["validation_accuracy"],
    }
    state = read_json(out / "checkpoints" / "step-10" / "manifest.json")["callbacks"][0]["state"]
    assert (state["best"], state["best_step"]) == (
        validation_lines[best]["validation_accuracy"],
        best,
    )

    numbers = read_numbers(out)
    (out / "summary.json").unlink()  # as if killed after its last line: no line is written twice
    resumed = train_validated(out, "steps=10", stopping, resume=True)
    assert resumed["final"] == report["final"] and read_numbers(out) == numbers


def test_a_longer_run_has_the_lines_of_one_planned_that_long(tmp_path: Path) -> None:
    train_validated(tmp_path / "cut", "steps=4")
    train_validated(tmp_path / "cut", "steps=8", resume=True)
    train_validated(tmp_path / "whole", "steps=8")
    assert read_numbers(tmp_path / "cut") == read_numbers(tmp_path / "whole")
    assert read_summary(tmp_path / "cut")["best"] == read_summary(tmp_path / "whole")["best"]


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
    batches, other = (
        [data.train_batch(0, i, 8) for i in range(first, first + 4)] for first in (0, 4)
    )
    config = ipu_pipe.configure(
        model={"entry": "models.mlp:mlp", "args": {"width": 8}}, micro_batch_size=8, steps=4
    )
    source = ipu_pipe.from_loader(batches, other, validation=other)
    config = config.model_copy(update={"log": config.log.model_copy(update={"tensorboard": False})})
    final = train(config, tmp_path / "run", data=source, quiet=True)["final"]
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


@pytest.mark.parametrize(
    "value", ["0", "-3", "1.5", "true", "'x'", "1437", "0.0001", ".inf", "1e400"]
)
def test_bad_values_are_refused(value: str, tmp_path: Path) -> None:
    def train_with_value() -> None:
        train(
            load_config(DIGITS, ["data.subset=1437", f"data.validation={value}"]),
            tmp_path / "run",
            quiet=True,
        )

    (fault,) = list_faults(train_with_value)
    printed_value = "inf" if value in (".inf", "1e400") else value.strip("'")
    assert f"data.validation: {printed_value}: " in fault
    assert not (tmp_path / "run").exists()


def test_the_best_is_by_a_metric_that_is_evaluated(tmp_path: Path) -> None:
    (fault,) = list_faults(train_validated, tmp_path / "run", "evaluate.best=top5")
    assert fault.startswith("evaluate.best: top5: ")
    # a metric of the call, which the config does not name
    metrics = {"zero": lambda output, y: 0.0}
    assert (
        train_validated(tmp_path / "run", "evaluate.best=zero", "steps=1", metrics=metrics)["best"][
            "validation_zero"
        ]
        == 0
    )
