"""`ipu-pipe check`: small runs on this machine equal the emulator; a row that differs is exit code 1."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ipu_pipe.backends.processes.launch import describe_missing_support
from ipu_pipe.errors import RunFault
from ipu_pipe.run import machine_check
from tests.command_line import run_here
from tests.support.runs import ROOT
from tests.support.slow import mark_slow

pytest_plugins = ["poptorch_double"]  # the fixture `poptorch`
TRIALS = (
    machine_check.PLAIN_TRIAL,
    *machine_check.DEVICE_TRIALS,
    *machine_check.PROCESS_TRIALS,
    *machine_check.IPU_TRIALS,
    *machine_check.XLA_TRIALS,
)
# of torch 2.13, where rank 1 killed itself; the indented lines between are left out
KILLED = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
=======================================================
ipu_pipe.run.machine_check FAILED
-------------------------------------------------------
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 11699)  (SIGTERM)
  traceback : Signal 15 (SIGTERM) received by PID 11699
-------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 11701)  (SIGKILL)
  traceback : Signal 9 (SIGKILL) received by PID 11701
=======================================================
"""


@pytest.fixture
def run_check(monkeypatch: Any, capsys: Any) -> Any:
    command = importlib.import_module("ipu_pipe.cli.check")
    return lambda *words: run_here(command, *words, monkeypatch=monkeypatch, capsys=capsys)


@pytest.mark.parametrize(
    "trial",
    mark_slow(machine_check.IPU_TRIALS, lambda trial: trial.number in (301, 302)),
    ids=lambda trial: str(trial.number),
)
def test_a_pod_equals_the_emulator(poptorch: Any, monkeypatch: Any, trial: Any) -> None:
    """The double is written to these assumptions; the test shows that every row runs on a pod's
    software, not that an IPU agrees."""
    monkeypatch.setenv("POPTORCH_DOUBLE_IPUS", "4")
    monkeypatch.setattr(machine_check, "IPU_TRIALS", (trial,))
    (row,) = machine_check.run_ipu_trials("PopTorch double, 4 IPUs")
    assert row.verdict == "equal", row


def test_processes_that_need_a_newer_torch_are_not_run(monkeypatch: Any) -> None:
    monkeypatch.setattr(machine_check.torch, "__version__", "2.0.1+cpu")
    monkeypatch.setattr(machine_check, "_attempt", lambda trial, *rest: None)
    monkeypatch.setattr(machine_check, "_run_on_processes", lambda *keys: [])
    machine = {
        "cuda_devices": ["a", "b"],
        "gloo": True,
        "nccl": True,
        "ipus": "none",
        "accelerators": [],
    }
    rows = [row for row in machine_check._run_all(machine) if row and row.number < 300]
    missing = [row for row in rows if row.where != "accelerator"]
    assert [row.where for row in missing] == ["gloo"] * 6 + ["nccl"] * 6
    details = {(row.verdict, row.detail) for row in missing}
    assert details == {("not run", "needs torch 2.4 or later, this is 2.0.1+cpu")}


@pytest.mark.parametrize(
    "trial",
    mark_slow(TRIALS, lambda trial: trial.number in (101, 313, 314)),
    ids=lambda trial: str(trial.number),
)
def test_rounding_is_a_tenth_of_a_trials_tolerance_at_most(
    tmp_path: Path, trial: machine_check.Trial
) -> None:
    """BatchNorm's trial once grew rounding to 5 times the weights: no IPU could have passed it."""
    # processes equal the emulator bit for bit, but on GPUs
    tolerance = (trial.tolerance or machine_check.ROUNDING) / 10
    trial = trial._replace(tolerance=tolerance, resumes=False)
    weights = {}
    for precision in ("float32", "float64"):
        config = machine_check.configure_trial(trial, {"name": "emulator"}, precision)
        weights[precision] = machine_check._run(trial, config, tmp_path / precision)
    is_double = {w.dtype == torch.float64 for w in weights["float64"].values() if w.dim()}
    assert is_double == {True}
    row = machine_check._compare(trial, "cpu", weights["float32"], weights["float64"])
    assert row.verdict == "equal", row


@pytest.mark.parametrize("seed, code", [(0, 0), (1, 1)])
def test_a_difference_is_exit_code_1_and_says_how_large(
    run_check: Any, monkeypatch: Any, tmp_path: Path, seed: int, code: int
) -> None:
    trial = machine_check.Trial(101, "a plain loop", {"stages": 1, "seed": 0})

    def run_other(machine: Any) -> Any:
        other = trial._replace(keys={**trial.keys, "seed": seed})
        yield machine_check._attempt(
            trial, "cpu", lambda: machine_check._run_alone(other, {"device": "cpu"})
        )

    monkeypatch.setattr(machine_check, "_run_all", run_other)
    result = run_check("--json", "--to", tmp_path / "check.json")
    report = json.loads(result.stdout)
    assert (result.returncode, report["different"], report["equal"]) == (code, code, 1 - code)
    assert json.loads((tmp_path / "check.json").read_text()) == report
    assert ("error: 1 of the runs differ" in result.stderr) == bool(code)


def test_xlas_rows_have_the_tolerance_of_the_devices_products(monkeypatch: Any) -> None:
    """TF32's products pass, the weights of another method do not, and bfloat16's are not run."""
    pytest.importorskip("jax", reason="xla needs jax: pip install 'ipu_pipe[xla]'")
    trial = machine_check.XLA_TRIALS[1]
    monkeypatch.setattr(machine_check, "XLA_TRIALS", [trial])
    run = machine_check._run

    def run_by_gpipe(trial: Any, config: Any, folder: Path) -> Any:
        if config.backend.name == "xla":
            gpipe = trial._replace(keys={**trial.keys, "method": "gpipe"})
            config = machine_check.configure_trial(gpipe, {"name": "emulator"})
        return run(trial, config, folder)

    for device, error, runs, verdict, detail in (
        ("cpu", None, run, "equal", "at most 0.0001"),
        ("tt", None, run, "not run", "jax has no such platform"),
        ("cpu", 6e-4, run_by_gpipe, "different", "at most 0.003"),
        ("cpu", 6e-3, run_by_gpipe, "not run", "products are 0.006 off"),
    ):
        monkeypatch.setattr(machine_check, "_run", runs)
        if error is not None:
            monkeypatch.setattr(machine_check, "measure_product_error", lambda _, e=error: e)
        (row,) = machine_check.run_xla_trials(device)
        assert row.verdict == verdict and detail in row.detail, row


@pytest.mark.slow
def test_processes_equal_the_emulator_or_show_the_first_error_of_a_rank() -> None:
    if not describe_missing_support():
        rows = list(machine_check._run_on_processes("gloo", {}))
        assert [row.verdict for row in rows] == ["equal"] * 6, rows
    first, *rest = machine_check._run_on_processes("gloo", {"deadline": -1})
    why = "BadInput: configure: backend.deadline: -1: must be greater than 0"
    assert (first.verdict, first.detail) == ("different", why)
    assert {row.verdict for row in rest} == {"not run"} and rest[-1].number == 206


def test_the_rank_that_failed_first_is_shown(monkeypatch: Any, tmp_path: Path) -> None:
    killed = "rank 1 ended with exit code -9 and reported no error"
    assert machine_check.find_first_error(tmp_path, KILLED) == killed
    # torchrun itself failed
    text = "Traceback (most recent call last):\n  ...\nOSError: no port"
    assert machine_check.find_first_error(tmp_path, text) == "OSError: no port"
    for text in ("device lost\nsecond line", "rank 1 has ended"):

        def fail(*arguments: Any, text: str = text) -> None:
            raise RunFault(text)

        monkeypatch.setattr(machine_check, "_run", fail)
        with pytest.raises(RunFault):
            machine_check.run_rank(str(tmp_path), "{}")
    assert machine_check.find_first_error(tmp_path, KILLED) == "RunFault: device lost"


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
    missing = "PopTorch is not installed"
    assert {row.detail for row in machine_check.run_ipu_trials(missing)} == {missing}


def test_the_docs_number_every_assumption() -> None:
    text = (ROOT / "docs" / "results" / "checks.md").read_text()
    for trial in machine_check.IPU_TRIALS:
        assert f"- **{trial.number}**: {trial.what}\n" in text


@pytest.mark.parametrize("tolerance, verdict", [(1e-4, "different"), (1e-6, "not run")])
def test_a_difference_that_rounding_alone_may_make_is_not_counted(
    tolerance: float, verdict: str
) -> None:
    """Story: on every pod the row of BatchNorm failed, whose run exploded on the emulator alone."""
    trial = machine_check.Trial(313, "a run", {"stages": 1, "optimizer": {"lr": 1.0}}, tolerance)
    wrong = trial._replace(keys={**trial.keys, "seed": 1})
    row = machine_check._attempt(
        trial, "ipu", lambda: machine_check._run_alone(wrong, {"device": "cpu"})
    )
    assert row.verdict == verdict and ("float64" in row.detail) == (verdict == "not run")


def test_a_run_that_fails_or_trains_to_nan_is_a_difference() -> None:
    """Story: Python's `max` passed over NaN, so a device that trains to NaN was equal."""
    trial = machine_check.PLAIN_TRIAL

    def fail() -> Any:
        raise RuntimeError("device lost")

    row = machine_check._attempt(trial, "gloo", fail)
    assert row.verdict == "different" and "device lost" in row.detail
    expected = {"w": torch.ones(2), "v": torch.ones(2)}
    for name in expected:
        actual = {**expected, name: torch.tensor([1.0, float("nan")])}
        row = machine_check._compare(trial, "cpu", actual, expected)
        assert row.verdict == "different", row
