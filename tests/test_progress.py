"""Test the progress of a run without a terminal: plain lines at intervals, by a clock that the
test sets."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any, List, Optional

import pytest
from command_line import run_here

from ipu_pipe.cli import train as train_command
from ipu_pipe.job.evaluation import EvaluationResult
from ipu_pipe.run.progress import Bar, Lines, Progress

DIGITS = "configs/mlp_digits.yaml"


def collect_lines(
    updates: int, seconds: float, per_epoch: Optional[int], evaluates: bool = False
) -> List[str]:
    """Return the lines of a run of `updates` updates of `seconds` each."""
    now, lines = 100.0, []
    bar = Bar(0, per_epoch, Lines(updates, per_epoch, lines.append, lambda: now))
    for done in range(1, updates + 1):
        now += seconds
        bar.advance(1.0, 0.5, 64.0)
        if evaluates and per_epoch and done % per_epoch == 0:
            now += 5.0
            bar.show_evaluation(EvaluationResult(0.5, {"accuracy": 0.75}))
    bar.end_epoch()
    return lines


# updates, seconds of each, updates of an epoch, whether it evaluates, then the begins of lines
LINES = [
    (100, 1.0, 1000, False, [f"update {n}/100, epoch 0.0{n // 10}:" for n in (30, 60, 90)]),
    # at the ends of epochs, though not more than one a second
    (30, 1.0, 10, False, [f"update {n}0/30, epoch {n}:" for n in (1, 2, 3)]),
    (125, 0.03, 10, False, [f"update {n}0/125, epoch {n}:" for n in (4, 8, 12)]),
    (40, 1.0, None, False, ["update 30/40: loss 1.000 accuracy 0.500, 64 samples/s"]),
    (35, 1.0, 20, True, ["update 20/35, epoch 1: loss 1.000 accuracy 0.500, 64 samples/s, test loss 0.500 accuracy 0.750"]),
]  # fmt: skip


@pytest.mark.parametrize("updates, seconds, per_epoch, evaluates, expected", LINES)
def test_a_line_comes_every_half_minute_and_at_the_ends_of_epochs(
    updates: int, seconds: float, per_epoch: Any, evaluates: bool, expected: List[str]
) -> None:
    lines = collect_lines(updates, seconds, per_epoch, evaluates)
    assert len(lines) == len(expected) and all(map(str.startswith, lines, expected))


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
    output = sys.stderr.getvalue()
    assert output.count("\n") == output.count("update ") == 4 and "\r" not in output


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_run_goes_on_if_nobody_reads_its_lines(name: str, monkeypatch: Any) -> None:
    """Story: `train CONFIG | head -1` ended at its next line, untrained and with exit code 0."""
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr("ipu_pipe.run.progress.EPOCH_SECONDS", 0.0)
    with open(writer, "w") as stream:
        monkeypatch.setattr(sys, name, stream)
        progress = Progress()
        progress.say("opening")
        with progress.show_bar(1, 0, 1) as bar:
            bar.advance(1.0, None, 8.0)
        print("what a callback prints", file=stream, flush=True)


# ---- --quiet


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--against", "gpipe"], ["--dry-run"]])
def test_quiet_training_prints_nothing(
    tmp_path: Path, more: List[str], monkeypatch: Any, capsys: Any
) -> None:
    sets = ["--set", "steps=2", "evaluate.every=0", "method=pipedream"]
    arguments = [DIGITS, *sets, *more, "--out", tmp_path / "run", "--quiet"]
    done = run_here(train_command, *arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert done == (0, "", "")
    assert (tmp_path / "run" / "summary.json").exists() == ("--dry-run" not in more)


def test_quiet_runs_print_faults_and_json_alone(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    def run_quietly(*arguments: Any) -> Any:
        words = [DIGITS, "--quiet", *arguments]
        return run_here(train_command, *words, monkeypatch=monkeypatch, capsys=capsys)

    code, output, errors = run_quietly("--set", "seed=-1")
    assert (code, output) == (2, "") and errors.startswith("error: --set seed=-1: seed: -1: ")
    assert run_quietly("--set", "steps=1", "--out", tmp_path) == (0, "", "")
    code, output, _ = run_quietly("--evaluate", tmp_path / "checkpoints" / "step-1")
    assert code == 0 and "test_loss" in json.loads(output)
