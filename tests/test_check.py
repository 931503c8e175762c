"""`ipu-pipe check`: small runs on this machine equal the emulator; a row that differs is exit code 1."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from ipu_pipe.run import machine_check
from tests.command_line import run_here
from tests.support.runs import needs_processes
from tests.support.slow import mark_slow

pytest_plugins = ["poptorch_double"]  # the fixture `poptorch`
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def run_check(monkeypatch: Any, capsys: Any) -> Any:
    command = importlib.import_module("ipu_pipe.cli.check")
    return lambda *words: run_here(command, *words, monkeypatch=monkeypatch, capsys=capsys)


@pytest.mark.slow
@needs_processes
def test_this_machine_equals_the_emulator(run_check: Any, tmp_path: Path) -> None:
    result = run_check("--json", "--to", tmp_path / "check.json")
    report = json.loads(result.stdout)
    assert result.returncode == 0 and report["different"] == 0
    assert json.loads((tmp_path / "check.json").read_text()) == report
    rows = {(row["where"], row["number"]): row for row in report["rows"]}
    for trial in machine_check.PROCESS_TRIALS:
        assert rows["gloo", trial.number]["verdict"] == "equal", rows["gloo", trial.number]
    # listed with the reason, not counted
    assert rows["ipu", 301]["detail"] == "PopTorch is not installed"
    assert report["equal"] + report["not_run"] == len(rows)


def test_a_difference_is_exit_code_1_and_says_how_large(run_check: Any, monkeypatch: Any) -> None:
    trial = machine_check.Trial(101, "a plain loop", {"stages": 1})

    def run_wrong(machine: Any) -> Any:
        wrong = trial._replace(keys={"stages": 1, "seed": 1})
        yield machine_check._attempt(
            trial, "cpu", lambda: machine_check._run_alone(wrong, {"device": "cpu"})
        )

    monkeypatch.setattr(machine_check, "_run_all", run_wrong)
    result = run_check()
    assert result.returncode == 1 and "error: 1 of the runs differ" in result.stderr
    assert "different" in result.stdout and "0 equal, 1 different" in result.stdout


def test_a_run_that_fails_is_a_difference_with_its_reason() -> None:
    def fail() -> Any:
        raise RuntimeError("device lost")

    row = machine_check._attempt(machine_check.PROCESS_TRIALS[0], "gloo", fail)
    assert row.verdict == "different" and "device lost" in row.detail


@pytest.mark.parametrize(
    "trial",
    mark_slow(machine_check.IPU_TRIALS, lambda trial: trial.number in (301, 302)),
    ids=lambda trial: str(trial.number),
)
def test_the_double_agrees_with_every_assumption(
    poptorch: Any, monkeypatch: Any, trial: machine_check.Trial
) -> None:
    """The double is written to these assumptions; the test shows that the rows run, not that an
    IPU agrees."""
    monkeypatch.setattr(machine_check, "IPU_TRIALS", (trial,))
    (row,) = machine_check.run_ipu_trials("PopTorch double, 4 IPUs")
    assert row.verdict == "equal", row


def test_a_report_without_a_folder_is_refused_before_the_runs(
    run_check: Any, tmp_path: Path
) -> None:
    for to, why in ((tmp_path / "gone" / "x.json", "no such folder"), (tmp_path, "is a folder")):
        result = run_check("--to", to)
        assert result.returncode == 2 and result.stderr.count("error: ") == 1
        assert f"error: --to: {to}: {why}" in result.stderr


def test_a_row_that_needs_more_ipus_than_the_machine_has_is_not_run() -> None:
    rows = list(machine_check.run_ipu_trials("PopTorch double, 0 IPUs"))
    assert {row.verdict for row in rows} == {"not run"}
    assert rows[0].detail == "needs 1 IPUs of 0"


def test_the_docs_number_every_assumption() -> None:
    text = (ROOT / "docs" / "ipu.md").read_text()
    for trial in machine_check.IPU_TRIALS:
        assert f"| {trial.number} | {trial.what} |" in text
