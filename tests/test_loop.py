"""Test early stopping, predictions, and the record of a run's environment."""

from __future__ import annotations

import contextlib
import json
import math
import re
import subprocess
from pathlib import Path
from typing import Any, Dict, Iterator
from unittest import mock

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
from ipu_pipe.run.loop import TrainingLoop
from ipu_pipe.run.train import train
from ipu_pipe.store import checkpoint
from tests.support.processes import run_in_group
from tests.support.runs import (
    DIGITS,
    assert_same_state,
    list_faults,
    needs_processes,
    read_json,
    read_numbers,
    read_summary,
    read_weights,
)
from tests.test_callbacks import SHORT, train_short_digits
from tests.test_going_on import OWN, make_counting_model
from tests.test_train import make_short_config

OFTEN = [
    "steps=24",
    "evaluate.every=0.125",
    "gradient_accumulation=1",
    "micro_batch_size=8",
    "checkpoint.keep=1",
]


@contextlib.contextmanager
def kill_in(method: str) -> Iterator[None]:
    """Interrupt runs in a method of their loop; assert that the block ends so."""
    kill = mock.patch.object(TrainingLoop, method, side_effect=KeyboardInterrupt)
    with kill, pytest.raises(KeyboardInterrupt):
        yield


def test_a_run_stops_when_it_becomes_no_better_and_keeps_the_best(tmp_path: Path) -> None:
    """At a rate of 0 no evaluation is better than the first; one comes every 4 updates, and the
    third ends the run."""
    stops = ["optimizer.lr=0", "early_stopping={patience: 2, min_delta: 0.001}"]
    report = train_short_digits(tmp_path / "run", *OFTEN, *stops)
    assert (report["steps"], report["planned_steps"]) == (12, 24)
    assert "at step 4 for 2 evaluations" in report["stopped"]
    kept = checkpoint.list_steps(tmp_path / "run" / "checkpoints")
    assert kept == [4, 12] and report["best"]["step"] == 4
    # with the patience used so far
    resumed = train_short_digits(tmp_path / "run", *OFTEN, *stops, resume_from=4)
    assert resumed["steps"] == 12 and resumed["stopped"] == report["stopped"]


def test_a_run_that_is_killed_after_its_early_end_ends_there(tmp_path: Path, capsys: Any) -> None:
    """Story: interrupted in its last test, after its last checkpoint, it trained on when resumed."""
    sets = [*OFTEN, "optimizer.lr=0", "early_stopping.patience=2", "data.validation=0.2"]
    expected = train_short_digits(tmp_path / "whole", *sets)
    with kill_in("_complete_metrics"):
        train_short_digits(tmp_path / "cut", *sets)
    resumed = train_short_digits(tmp_path / "cut", *sets, resume=True)
    for key in ("steps", "stopped", "best", "final"):
        assert resumed[key] == expected[key]
    assert read_numbers(tmp_path / "cut") == read_numbers(tmp_path / "whole")
    # asked for, it goes on
    (tmp_path / "cut" / "summary.json").unlink()
    longer = train_short_digits(tmp_path / "cut", *sets, resume_from=expected["steps"])
    assert longer["steps"] > expected["steps"]
    # without a checkpoint it cannot, and nothing says that it could
    sets += ["checkpoint=null"]
    train_short_digits(tmp_path / "none", *sets)
    train(load_config(DIGITS, [*SHORT, *sets]), tmp_path / "none", resume=True)
    printed = capsys.readouterr().out
    assert "it ended early" in printed and "--resume-from" not in printed


class StopAtCheckpoint(ipu_pipe.Callback):
    """Ask for the end at the checkpoint of update 8."""

    def on_checkpoint(self, now: ipu_pipe.Moment) -> Any:
        return ipu_pipe.Stop("saved") if now.step == 8 else None


def test_an_end_that_a_checkpoint_asks_for_outlives_a_kill(tmp_path: Path) -> None:
    """Story: the checkpoint was written before its callback asked, so the resumed run trained on."""
    sets = [*OFTEN, "checkpoint.every=8"]
    with kill_in("_complete_metrics"):
        train_short_digits(tmp_path / "cut", *sets, callbacks=[StopAtCheckpoint()])
    resumed = train_short_digits(tmp_path / "cut", *sets, resume=True)
    assert (resumed["steps"], resumed["stopped"]) == (8, "saved")
    train_short_digits(tmp_path / "planned", *sets, "steps=8")
    assert_same_state(tmp_path / "cut", tmp_path / "planned", 8)


@pytest.mark.parametrize("longer", [True, False])
def test_a_run_that_goes_on_after_its_early_end_does_so_if_it_is_killed_at_once(
    tmp_path: Path, longer: bool
) -> None:
    """Story: killed before the first checkpoint after its early end, it ended there when resumed."""
    sets = [*OFTEN, "optimizer.lr=0", "early_stopping.patience=2"]
    steps = train_short_digits(tmp_path, *sets)["steps"]
    sets += ["steps=60"] if longer else []
    start = {"resume": True} if longer else {"resume_from": steps}
    # also if it is killed again
    for options in (start, {"resume": True}):
        with kill_in("_step"):
            train_short_digits(tmp_path, *sets, **options)
    assert train_short_digits(tmp_path, *sets, resume=True)["steps"] > steps


# arguments, values, then the best one, its step, the evaluations that were not better, and why it stops
EVALUATIONS = {
    "more is better": ({"patience": 2}, (0.5, 0.6, 0.6, 0.55), (0.6, 2, 2), "not better than"),
    "less is better": ({"patience": 1, "mode": "min"}, (0.5, 0.4), (0.4, 2, 0), ""),
    # story: after a NaN no evaluation was better, and the next checkpoint ended the run
    "not a number": ({"patience": 2}, (math.nan, 0.5, math.nan), (0.5, 2, 1), ""),
    "infinite": ({"patience": 2}, (math.inf, 0.5, -math.inf), (0.5, 2, 1), ""),
    "never finite": ({"patience": 1}, (math.nan,), (None, None, 1), "not finite"),
    # story: a metric that was undefined for one evaluation's samples ended the run, as unknown
    "undefined": ({"patience": 1}, (None, 0.5, None), (0.5, 2, 0), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", EVALUATIONS)
def test_evaluations_stop_a_run_by_their_values(name: str) -> None:
    keys, values, outcome, why = EVALUATIONS[name]
    stopping, position, reasons = ipu_pipe.EarlyStopping("accuracy", **keys), Position(), []  # type: ignore[arg-type]
    for step, value in enumerate(values, 1):
        metrics = {"test_accuracy": value}
        stop = stopping.on_evaluation(
            ipu_pipe.Moment(step, 0.0, (), 0.1, None, metrics, None, None)
        )
        reasons.append("" if stop is None else stop.reason)
        position.update = step
        position.add_evaluation("test_accuracy", value)
    assert (stopping.best, stopping.best_step, stopping.waited) == outcome
    *earlier, last = reasons
    assert not any(earlier) and why in last and bool(why) == bool(last)
    if outcome[0] and "mode" not in keys:
        assert position.best == {"step": outcome[1], "test_accuracy": outcome[0]}


def test_predictions_are_the_models_in_evaluation_mode(tmp_path: Path) -> None:
    train_short_digits(tmp_path, "steps=3")
    config = load_config(tmp_path / "config.yaml")
    model, data = make_model(config), make_data(config)
    model.load_state_dict(read_weights(tmp_path))
    batches = list(data.test_batches(10))
    parts = [x for x, _ in batches]
    inputs = torch.cat(parts)
    with torch.no_grad():
        expected = model.eval()(inputs)
    model.train()
    for form in (data, inputs, parts, batches):
        # batches of another size may take other kernels
        torch.testing.assert_close(ipu_pipe.predict(model, form, batch_size=10), expected)  # type: ignore[arg-type]
    assert model.training
    outputs = ipu_pipe.predict(model, inputs)
    for folder in (tmp_path, tmp_path / "checkpoints" / "step-3"):
        assert torch.equal(ipu_pipe.predict(folder, inputs), outputs)
    assert torch.equal(ipu_pipe.predict(tmp_path, inputs, into=make_model(config)), outputs)


class Named(nn.Module):
    """Take two inputs by name; return a mapping of outputs, one of which is not a tensor."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        return {"sum": a + b, "kept": (a.mean(dim=1), "text")}


def test_predictions_of_nested_inputs() -> None:
    a, b = torch.randn(7, 3), torch.randn(7, 3)
    predictions = ipu_pipe.predict(Named(), {"a": a, "b": b}, batch_size=3)
    assert torch.equal(predictions["sum"], a + b)
    assert predictions["kept"][0].shape == (7,) and predictions["kept"][1] == "text"


@pytest.mark.parametrize("data, keys, words", [
    ([], {}, "contains no samples"),
    (3, {}, "data: 3: must be a DataSource"),
    (torch.ones(1, 3), {"model": Path(__file__).parent}, "predict: .*: no config there names the model"),
    (torch.ones(1, 3), {"into": nn.Linear(3, 2)}, "into: must be None"),
    (torch.ones(1, 3), {"batch_size": 0}, "batch_size: 0"),
])  # fmt: skip
def test_a_prediction_that_cannot_be_is_one_line(data: Any, keys: Any, words: str) -> None:
    (fault,) = list_faults(ipu_pipe.predict, **{"model": nn.Linear(3, 2), "data": data, **keys})
    assert re.search(words, fault)


def test_a_run_records_versions_machine_and_data(tmp_path: Path) -> None:
    sets = ["steps=4", "checkpoint.every=2", "gradient_accumulation=1"]
    run, other = tmp_path / "run", tmp_path / "other"
    train_short_digits(run, *sets)
    train_short_digits(run, *sets, resume_from=2)
    train_short_digits(other, *sets, "data.subset=255")
    first, second = read_json(run / "record.json")
    (of_other,) = read_json(other / "record.json")
    assert (first["first_update"], second["first_update"]) == (0, 2)
    assert first["begun"] <= first["ended"] <= second["begun"]
    assert first["versions"]["torch"] == torch.__version__ and first["command"]
    assert first["machine"]["cores"] >= 1 and first["machine"]["memory_bytes"] > 2**20
    assert first["data"] == second["data"] != of_other["data"]


def test_the_commit_is_that_of_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_git(*args: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *args]
        return subprocess.check_output(command, text=True).strip()

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


def test_a_commit_whose_changes_are_unknown_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: where git could not tell, a sweep ended in a TypeError before its first model."""
    for dirty, words in ((False, ""), (True, " changed"), (None, " perhaps changed")):
        commit = {"commit": "0123456789", "dirty": dirty}
        monkeypatch.setattr(provenance, "find_commit", lambda folder, commit=commit: commit)
        assert name_commit(Path(), 4) == f"0123{words}"


def test_a_summary_of_another_version_is_refused(tmp_path: Path) -> None:
    train_short_digits(tmp_path / "run", "steps=2")
    summary = tmp_path / "run" / "summary.json"
    for schema in (1, 3, "x"):
        summary.write_text(json.dumps({**read_json(summary), "schema": schema}))
        with pytest.raises(BadInput, match=f"summary.json: schema: {schema}"):
            train_short_digits(tmp_path / "run", "steps=2", resume=True)


# ---- the weights of the best evaluation

# the greatest value of a falling loss is the best: that of the first evaluation, after 4 updates; the third ends the run
STOPS = "early_stopping={mode: max, patience: 2, restore_best: true}"
STOPPED = [
    *OFTEN,
    'stages=["4"]',
    "log.tensorboard=false",
    "evaluate.subset=32",
    "data.subset=256",
    "backend.threads=1",
]


def train_own_model(out: Path, method: str, *overrides: str, **keys: Any) -> Any:
    """Train a model of the caller; return the report and the model."""
    settings = [*STOPPED, "optimizer.lr=0.01", f"method={method}", *OWN[method], *overrides]
    model = make_counting_model()
    return ipu_pipe.train(make_short_config(*settings), out, model=model, **keys), model


def has_weights(model_state: Dict[str, Any], weights: Dict[str, torch.Tensor]) -> bool:
    return all(
        torch.equal(value, weights[name].to(value.dtype)) for name, value in model_state.items()
    )


class FinalWeights(ipu_pipe.Callback):
    def on_end(self, now: ipu_pipe.Moment) -> None:
        self.model = {name: value.clone() for name, value in now.model.state_dict().items()}  # type: ignore[union-attr]


@pytest.mark.parametrize("method", OWN)
def test_the_model_has_the_best_weights_when_the_run_ends(
    method: str, tmp_path: Path, capsys: Any
) -> None:
    run, other, final_weights = tmp_path / "run", tmp_path / "other", FinalWeights()
    report, model = train_own_model(run, method, STOPS, callbacks=[final_weights])
    best_step, last_step = report["restored_step"], report["steps"]
    assert (best_step, last_step) == ((16, 24) if method == "local_greedy" else (4, 12))
    line = f"restored the best weights, of step {best_step}: {run}/checkpoints/step-{best_step}"
    assert capsys.readouterr().out.rstrip().endswith(f"\n{line}")
    best, last = read_weights(run, best_step), read_weights(run, last_step)
    assert has_weights(model.state_dict(), best) and not has_weights(model.state_dict(), last)
    assert has_weights({"1.weight": final_weights.model["1.weight"]}, best)
    assert read_summary(run)["restored_step"] == best_step
    # everything except the model equals a run without it
    plain_report, plain_model = train_own_model(other, method, STOPS.replace("true", "false"))
    assert plain_report["final"] == report["final"] and "restored_step" not in plain_report
    assert has_weights(plain_model.state_dict(), last)


def test_the_newest_may_be_the_best_and_a_run_need_not_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    report, model = train_own_model(run, "pipedream", STOPS.replace("max", "min"), "steps=8")
    assert report["restored_step"] == 8 and report["stopped"] is None
    assert capsys.readouterr().out.rstrip().endswith("the newest weights are the best: step 8")
    assert has_weights(model.state_dict(), read_weights(run, 8))
    # a resumed run remembers the best evaluation
    for steps in (8, 12):
        stopping = ipu_pipe.EarlyStopping(mode="max", patience=9, restore_best=True)
        keys = {"callbacks": [stopping], "resume": steps == 12}
        report, model = train_own_model(whole, "pipedream", f"steps={steps}", **keys)
        assert report["restored_step"] == 4
        assert has_weights(model.state_dict(), read_weights(whole, 4))


def train_each_method(rank: int, folder: Path) -> None:
    """Train each method as a rank of a group of two, and save the weights of the caller's model."""
    for method in OWN:
        backend = ["backend.name=distributed", "backend.deadline=60"]
        report, model = train_own_model(folder / method, method, STOPS, *backend, quiet=True)
        assert report["restored_step"] < report["steps"]
        torch.save(model.state_dict(), folder / f"{method}-{rank}.pt")


@pytest.mark.slow
@needs_processes
def test_every_process_has_the_best_weights(tmp_path: Path) -> None:
    run_in_group(2, train_each_method, tmp_path)
    for method in OWN:
        report, emulated = train_own_model(tmp_path / f"one-{method}", method, STOPS, quiet=True)
        best = read_weights(tmp_path / method, report["restored_step"])
        for rank in range(2):
            saved = torch.load(tmp_path / f"{method}-{rank}.pt")
            assert has_weights(saved, best) and has_weights(saved, emulated.state_dict())
