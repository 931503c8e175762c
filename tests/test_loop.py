"""Test early stopping, predictions, and the record of a run's environment."""

from __future__ import annotations

import json
import math
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from torch import nn

import ipu_pipe
from ipu_pipe.config.load import load_config
from ipu_pipe.errors import BadInput
from ipu_pipe.job.factories import make_data, make_model
from ipu_pipe.report import provenance
from ipu_pipe.report.position import Position
from ipu_pipe.report.provenance import find_commit, name_commit
from ipu_pipe.run.train import train
from ipu_pipe.store.checkpoint import load_weights, read_weights
from tests.support.runs import DIGITS, list_faults, read_json
from tests.test_callbacks import SHORT, train_short_digits

OFTEN = [
    "steps=24",
    "evaluate.every=0.125",
    "gradient_accumulation=1",
    "micro_batch_size=8",
    "checkpoint.keep=1",
]


def test_a_run_stops_when_it_becomes_no_better_and_keeps_the_best(tmp_path: Path) -> None:
    """At a rate of 0 no evaluation is better than the first; one comes every 4 updates, and the
    third ends the run."""
    stops = ["optimizer.lr=0", "early_stopping={patience: 2, min_delta: 0.001}"]
    report = train_short_digits(tmp_path / "run", *OFTEN, *stops)
    assert (report["steps"], report["planned_steps"]) == (12, 24)
    assert (
        "test_loss is not better than" in report["stopped"]
        and "at step 4 for 2 evaluations" in report["stopped"]
    )
    checkpoints = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert checkpoints == ["step-12", "step-4"] and report["best"]["step"] == 4
    resumed_report = train_short_digits(
        tmp_path / "run", *OFTEN, *stops, resume_from=4
    )  # with the patience used so far
    assert resumed_report["steps"] == 12 and resumed_report["stopped"] == report["stopped"]


def test_more_is_better_for_an_accuracy() -> None:
    stopping = ipu_pipe.EarlyStopping("accuracy", patience=2)
    stops = [
        stopping.on_evaluation(_make_moment(step, value))
        for step, value in enumerate((0.5, 0.6, 0.6, 0.55), 1)
    ]
    assert (
        stops[:3] == [None, None, None]
        and isinstance(stops[3], ipu_pipe.Stop)
        and stopping.best_step == 2
    )
    falling = ipu_pipe.EarlyStopping("accuracy", mode="min", patience=1)
    assert [
        falling.on_evaluation(_make_moment(1, 0.5)),
        falling.on_evaluation(_make_moment(2, 0.4)),
    ] == [None, None]


def _make_moment(step: int, accuracy: Optional[float]) -> ipu_pipe.Moment:
    return ipu_pipe.Moment(step, 0.0, (), 0.1, None, {"test_accuracy": accuracy}, None, None)


def test_early_stopping_on_an_unmeasured_metric_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match="^early_stopping.metric: r2: "
    ):  # before anything is trained or written
        train_short_digits(tmp_path / "run", "steps=3", callbacks=[ipu_pipe.EarlyStopping("r2")])
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    with pytest.raises(BadInput, match="^early_stopping.metric: r2: "):
        train_short_digits(tmp_path / "run", "steps=3", "early_stopping={metric: r2}")
    with pytest.raises(
        BadInput, match="early_stopping.metric: accuracy: no evaluation computes it"
    ):
        ipu_pipe.EarlyStopping("accuracy").on_evaluation(
            replace(_make_moment(1, None), metrics={"test_loss": 0.5})
        )


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_never_the_best(odd: float) -> None:
    """Story: after a NaN no evaluation was better, and the next checkpoint ended the run."""
    stopping = ipu_pipe.EarlyStopping("accuracy", patience=2)
    position = Position()
    for step, value in enumerate((odd, 0.5, odd), 1):
        assert stopping.on_evaluation(_make_moment(step, value)) is None
        position.update = step
        position.add_evaluation("test_accuracy", value)
    assert (stopping.best, stopping.best_step, stopping.waited) == (0.5, 2, 1)
    assert position.best == {"step": 2, "test_accuracy": 0.5}
    never = ipu_pipe.EarlyStopping("accuracy", patience=1).on_evaluation(_make_moment(1, odd))
    assert isinstance(never, ipu_pipe.Stop) and "not finite" in never.reason


def test_an_evaluation_without_the_metric_neither_stops_nor_counts() -> None:
    """Story: a metric that was undefined for one evaluation's samples ended the run, as unknown."""
    stopping = ipu_pipe.EarlyStopping("accuracy", patience=1)
    for step, value in enumerate((None, 0.5, None), 1):
        assert stopping.on_evaluation(_make_moment(step, value)) is None
    assert (stopping.best, stopping.waited) == (0.5, 0)


def test_predictions_are_the_models_in_evaluation_mode(tmp_path: Path) -> None:
    sets = ["steps=3", "gradient_accumulation=2"]
    train_short_digits(tmp_path / "run", *sets)
    config = load_config(DIGITS, [*SHORT, *sets])
    model, data = make_model(config), make_data(config)
    load_weights(model, read_weights(tmp_path / "run" / "checkpoints" / "step-3"), "here")
    batches = list(data.test_batches(10))
    with torch.no_grad():
        expected = torch.cat([model.eval()(x) for x, _ in batches])
    model.train()
    inputs = torch.cat([x for x, _ in batches])
    close = {"rtol": 1e-5, "atol": 1e-6}  # batches of another size may take other kernels
    for form in (data, inputs, [x for x, _ in batches], batches):
        torch.testing.assert_close(ipu_pipe.predict(model, form, batch_size=10), expected, **close)  # type: ignore[arg-type]
    assert model.training
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-3"):
        assert torch.equal(
            ipu_pipe.predict(folder, data, batch_size=10),
            ipu_pipe.predict(model, data, batch_size=10),
        )
    outputs = ipu_pipe.predict(tmp_path / "run", inputs, into=make_model(config))
    assert torch.equal(outputs, ipu_pipe.predict(model, inputs))


class Named(nn.Module):
    """Take two inputs by name; return a mapping of outputs, one of which is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        return {"sum": self.weight * (a + b), "kept": (a.mean(dim=1), "text")}


def test_predictions_of_nested_inputs_and_refusals(tmp_path: Path) -> None:
    a, b = torch.randn(7, 3), torch.randn(7, 3)
    predictions = ipu_pipe.predict(Named(), {"a": a, "b": b}, batch_size=3)
    assert (
        torch.equal(predictions["sum"], a + b)
        and predictions["kept"][0].shape == (7,)
        and predictions["kept"][1] == "text"
    )
    attempts = {
        "contains no samples": lambda: ipu_pipe.predict(nn.Linear(3, 2), []),
        "data: 3: must be a DataSource": lambda: ipu_pipe.predict(nn.Linear(3, 2), 3),
        "predict: .*: no config there names the model": lambda: ipu_pipe.predict(tmp_path, a),
        "into: must be None": lambda: ipu_pipe.predict(nn.Linear(3, 2), a, into=nn.Linear(3, 2)),
        "batch_size: 0": lambda: ipu_pipe.predict(nn.Linear(3, 2), a, batch_size=0),
    }
    for words, attempt in attempts.items():
        (fault,) = list_faults(attempt)
        assert re.search(words, fault)


def test_a_run_records_versions_machine_and_data(tmp_path: Path) -> None:
    sets = ["steps=4", "checkpoint.every=2", "checkpoint.keep=9", "gradient_accumulation=1"]
    train_short_digits(tmp_path / "run", *sets)
    train_short_digits(tmp_path / "run", *sets, resume_from=2)
    first, second = read_json(tmp_path / "run" / "record.json")
    assert [start["first_update"] for start in (first, second)] == [0, 2]
    assert first["begun"] <= first["ended"] <= second["begun"]
    assert (
        first["versions"]["torch"] == torch.__version__
        and first["versions"]["ipu_pipe"] == ipu_pipe.__version__
    )
    assert (
        first["machine"]["cores"] >= 1
        and first["machine"]["memory_bytes"] > 2**20
        and first["command"]
    )
    assert first["data"] == second["data"] and first["data"]["first_microbatch"][1] == "int64 [16]"
    train_short_digits(tmp_path / "other", *sets, "data.subset=255")
    (other,) = read_json(tmp_path / "other" / "record.json")
    assert other["data"]["sha256"] != first["data"]["sha256"]


def test_the_closing_lines_name_the_files_that_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Story: they named a trace of a run that wrote none."""
    for trace in ("null", "{begin: 0}"):
        out = tmp_path / trace[:1]
        train(load_config(DIGITS, [*SHORT, "steps=2", f"log.trace={trace}"]), out)
        closing = capsys.readouterr().out
        assert str(out / "metrics.jsonl") in closing
        assert (str(out / "trace.json.gz") in closing) == (out / "trace.json.gz").is_file()
    assert (out / "trace.json.gz").is_file()


def test_the_commit_is_that_of_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_git(*args: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *args]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    assert find_commit(Path("/")) is None
    run_git("init", "-q", "-b", "work")
    (tmp_path / "a").write_text("1")
    run_git("add", "a")
    run_git("commit", "-qm", "first")
    (tmp_path / "inner").mkdir()
    commit = {"repository": str(tmp_path), "commit": run_git("rev-parse", "HEAD"), "dirty": False}
    assert find_commit(tmp_path / "inner") == commit
    (tmp_path / "a").write_text("2")
    assert find_commit(tmp_path) == {**commit, "dirty": True}
    monkeypatch.setenv("PATH", "")
    assert find_commit(tmp_path) is None


@pytest.mark.parametrize(
    ("dirty", "words"), [(False, ""), (True, " changed"), (None, " perhaps changed")]
)
def test_a_commit_whose_changes_are_unknown_is_named(
    dirty: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: where git could not tell, a sweep ended in a TypeError before its first model."""
    monkeypatch.setattr(
        provenance, "find_commit", lambda folder: {"commit": "0123456789", "dirty": dirty}
    )
    assert name_commit(Path(), 4) == f"0123{words}"


@pytest.mark.parametrize("schema", [1, 3, "x"])
def test_a_summary_of_another_version_is_refused(schema: Any, tmp_path: Path) -> None:
    train_short_digits(tmp_path / "run", "steps=2")
    summary = tmp_path / "run" / "summary.json"
    summary.write_text(json.dumps({**read_json(summary), "schema": schema}))
    with pytest.raises(BadInput, match=f"summary.json: schema: {schema}"):
        train_short_digits(tmp_path / "run", "steps=2", resume=True)
