"""Test the progress of a run without a terminal: plain lines at intervals, by a clock that the
test sets."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any, List, Optional

import pytest
from command_line import run_here

from ipu_pipe import load_config, train
from ipu_pipe.cli import collect
from ipu_pipe.cli import train as train_command
from ipu_pipe.job.evaluation import EvaluationResult
from ipu_pipe.run.progress import Bar, Lines, Progress

DIGITS = "configs/mlp_digits.yaml"


class ManualClock:
    """Clock whose time the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def collect_lines(
    updates: int, seconds: float, per_epoch: Optional[int], evaluates: bool = False
) -> List[str]:
    """Return the lines of a run of `updates` updates of `seconds` each."""
    clock, lines = ManualClock(), []
    bar = Bar(0, per_epoch, Lines(updates, per_epoch, lines.append, clock))
    for done in range(1, updates + 1):
        clock.now += seconds
        bar.advance(1.0, 0.5, 64.0)
        if evaluates and per_epoch and done % per_epoch == 0:
            clock.now += 5.0
            bar.show_evaluation(EvaluationResult(0.5, {"accuracy": 0.75}))
    bar.end_epoch()
    return lines


def test_a_line_every_half_minute() -> None:
    lines = collect_lines(updates=100, seconds=1.0, per_epoch=1000)
    assert [line.partition(",")[0] for line in lines] == [
        "update 30/100",
        "update 60/100",
        "update 90/100",
    ]
    assert lines[0] == "update 30/100, epoch 0.03: loss 1.000 accuracy 0.500, 64 samples/s"


def test_a_line_at_an_epochs_end_though_not_more_than_one_a_second() -> None:
    slow = collect_lines(updates=30, seconds=1.0, per_epoch=10)
    assert [line.partition(":")[0] for line in slow] == [
        f"update {n}0/30, epoch {n}" for n in (1, 2, 3)
    ]
    quick = collect_lines(updates=125, seconds=0.03, per_epoch=10)
    assert [line.partition(":")[0] for line in quick] == [
        f"update {n}0/125, epoch {n}" for n in (4, 8, 12)
    ]


def test_lines_without_epochs_name_no_epoch() -> None:
    lines = collect_lines(updates=40, seconds=1.0, per_epoch=None)
    assert lines == ["update 30/40: loss 1.000 accuracy 0.500, 64 samples/s"]


def test_an_epochs_end_and_its_evaluation_are_one_line() -> None:
    lines = collect_lines(updates=35, seconds=1.0, per_epoch=20, evaluates=True)
    assert lines == [
        "update 20/35, epoch 1: loss 1.000 accuracy 0.500, 64 samples/s, test loss 0.500 accuracy 0.750"
    ]


@pytest.mark.parametrize("colours", ["", "1"])
def test_output_to_a_file_has_no_carriage_returns(
    monkeypatch: pytest.MonkeyPatch, colours: str
) -> None:
    monkeypatch.setenv("FORCE_COLOR", colours)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    for name in ("LINE_SECONDS", "EPOCH_SECONDS"):
        monkeypatch.setattr(f"ipu_pipe.run.progress.{name}", 0.0)
    with Progress().show_bar(3, 0, 3) as bar:
        for _ in range(3):
            bar.advance(1.0, None, 8.0)
    output: Any = sys.stderr.getvalue()
    lines = [
        f"update {n}/3, epoch {e}: loss 1.000, 8 samples/s"
        for n, e in ((1, 0.33), (2, 0.67), (3, 1), (3, 1))
    ]
    assert output.split("\n") == [*lines, ""]


# ---- --quiet


@pytest.mark.parametrize(
    "more", [[], ["--against", "gpipe", "--set", "method=pipedream"], ["--dry-run"]]
)
def test_quiet_training_prints_nothing(
    tmp_path: Path, more: List[str], monkeypatch: Any, capsys: Any
) -> None:
    arguments = [
        DIGITS,
        "--set",
        "steps=2",
        "evaluate.every=0",
        *more,
        "--out",
        tmp_path / "run",
        "--quiet",
    ]
    done = run_here(train_command, *arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert done == (0, "", "")
    assert (tmp_path / "run" / "summary.json").exists() == ("--dry-run" not in more)


def test_quiet_runs_print_faults_and_json_alone(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    done = run_here(
        train_command, DIGITS, "--quiet", "--set", "seed=-1", monkeypatch=monkeypatch, capsys=capsys
    )
    assert (
        done.returncode == 2
        and done.stdout == ""
        and done.stderr.startswith("error: --set seed=-1: seed: -1: ")
    )
    train(load_config(DIGITS, ["steps=1"]), tmp_path, quiet=True)
    assert capsys.readouterr() == ("", "")
    weights = tmp_path / "checkpoints" / "step-1"
    arguments = [DIGITS, "--quiet", "--evaluate", weights]
    done = run_here(train_command, *arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert done.returncode == 0 and "test_loss" in json.loads(done.stdout)


def test_quiet_collect_writes_and_prints_nothing(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    arguments = [DIGITS, "--methods", "gpipe", "--steps", "0", "--out", tmp_path, "--quiet"]
    assert run_here(collect, *arguments, monkeypatch=monkeypatch, capsys=capsys) == (0, "", "")
    assert (tmp_path / "memory.json").is_file()
