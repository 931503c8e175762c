"""Experiments: all faults of a file are reported, finished runs are not repeated, and the table has the verdicts."""

from __future__ import annotations

import contextlib
import functools
import json
from pathlib import Path
from typing import Any, Dict, List

import pytest
import yaml

from ipu_pipe.errors import BadInput
from tests.command_line import run_here
from tests.interrupted import interrupt_at
from tests.support.runs import ROOT, list_faults, read_json, read_metrics
from tools.experiments import reproduce
from tools.experiments.experiment import Request
from tools.experiments.measures import collect_gaps, compute_normalized_time
from tools.experiments.training_grids import (
    TrainingGrid,
    compare,
    load_experiment,
    make_experiment,
    refuse_rows,
    run_one,
)

TEXT = """
title: Digits
source: nobody, Table 0
base:
  model: {entry: models.mlp:mlp}
  data: {name: digits}
  method: pipemare
  optimizer: {lr: 0.02, momentum: 0.9}
  steps: 20
  gradient_accumulation: 2
  backend: {threads: 1}
full: {steps: 30}
seeds: [0, 1]
rows:
  sync: {method: gpipe}
  warm up: {method_args: {warmup: {epochs: 0.1}}}
  bad: {optimizer: {lr: 1e9}}
expect: [{better: sync, than: bad}, {better: bad, than: sync, by: 0.1}, {equal: warm up, to: sync, margin: 0.9}]
"""


@pytest.fixture()
def grid_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the experiment TEXT into a file, and return it."""
    monkeypatch.chdir(ROOT)
    path = tmp_path / "digits.yaml"
    path.write_text(TEXT)
    return path


def read_grid(grid_file: Path) -> TrainingGrid:
    return TrainingGrid.model_validate(yaml.safe_load(grid_file.read_text()))


def test_gaps_are_the_differences_of_rows_by_seed() -> None:
    """Seed 1 has one row alone, and is left out."""
    runs = [
        {
            "label": label,
            "seed": seed,
            "diverged": None,
            "curve": [[0.0, 0.0, 4.0], [1.0, 1.0, last]],
        }
        for label, seed, last in (("one", 0, 3.0), ("other", 0, 1.0), ("one", 1, 9.0))
    ]
    rows = [{"label": label, "step": 10} for label in ("one", "other")]
    assert collect_gaps(rows, runs, {"a": ("one", "other")}) == [("a", [0.0, 10.0], [[0.0], [2.0]])]


@pytest.mark.slow
def test_rows_and_seeds_are_run_and_compared(grid_file: Path, tmp_path: Path) -> None:
    experiment = load_experiment(grid_file)
    outcome = experiment.run(Request(tmp_path / "runs", jobs=2, say=lambda line: None))
    rows, curves = outcome.results["rows"], outcome.findings.curves
    runs = [(curve["label"], curve["seed"]) for curve in curves]
    assert runs == [(row, seed) for row in experiment.labels for seed in (0, 1)]
    assert curves[0]["diverged"] is None and "loss is" in curves[-1]["diverged"]
    sync = curves[0]["curve"]
    assert sync[0][0] == 0 and sync[-1][1] > sync[-1][0]  # gpipe has bubbles
    assert rows[0]["final"] == pytest.approx(sum(rows[0]["final_by_seed"].values()) / 2)
    assert rows[2]["final"] is None and rows[2]["diverged"] == 2
    files = {file.name: file for file in outcome.write(tmp_path / "results")}
    pictures = ["accuracy_by_epoch.png", "accuracy_by_time.png"]
    assert list(files) == ["results.json", "table.md", *pictures]
    assert read_json(files["results.json"])["rows"] == rows


def test_an_interrupted_run_is_resumed(grid_file: Path, tmp_path: Path) -> None:
    config = read_grid(grid_file).make_config("sync", 0)
    whole = run_one(config, str(tmp_path / "whole"), {})
    with interrupt_at(9):
        run_one(config, str(tmp_path / "cut"), {})
    assert run_one(config, str(tmp_path / "cut"), {})["curve"] == whole["curve"]
    # a run whose config has an unknown key is measured again
    measured = tmp_path / "cut" / "measured.json"
    old = read_json(measured)
    old["asked"]["config"]["renamed"], old["curve"] = 1, []
    measured.write_text(json.dumps(old))
    assert run_one(config, str(tmp_path / "cut"), {})["curve"] == whole["curve"]


def test_each_row_is_tuned_on_its_own_and_compared_at_equal_time(
    grid_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid_file.write_text(
        TEXT.replace("seeds: [0, 1]", "seeds: [0]\ntune: {rates: [0.5, 1e9], keys: {steps: 5, data: {subset: 400}}, seed: 3}")
        .replace("  bad: {optimizer: {lr: 1e9}}", "  groups: {}\n  longer: {steps: 24}")
        .replace("than: bad}", "than: groups, at: time}").replace("better: bad,", "better: groups,")
        + "measure: {name: test_loss}\n"
    )  # fmt: skip
    requests: List[Any] = []

    def run_in_order(work: Any, arguments: Any, request: Any, describe: Any) -> Any:
        requests.extend(arguments.values())
        return {key: work(*values) for key, values in arguments.items()}

    monkeypatch.setattr("tools.experiments.training_grids.run_all", run_in_order)
    results = load_experiment(grid_file).run(Request(tmp_path)).results
    # "longer" is tuned by the runs of "groups", which are the same
    assert [(config["steps"], config["seed"], config["optimizer"]["lr"]) for config, *_ in requests] == [
        (5, 3, 0.01), (5, 3, 2e7)] * 3 + [(20, 0, 0.01)] * 3 + [(24, 0, 0.01)]  # fmt: skip
    row = results["rows"][0]
    assert results["rows"][3]["tuning"] == results["rows"][2]["tuning"] != row["tuning"]
    assert row["rate"] == 0.5 and row["tuning"][0.5] < 3 and row["tuning"][1e9] is None
    assert row["at_equal_time"] > row["final"]  # gpipe has fewer updates by then
    assert results["rows"][2]["at_equal_time"] == pytest.approx(results["rows"][2]["final"])
    assert results["verdicts"][0]["claim"].endswith("at equal time")
    # keys that a newer version adds do not repeat finished runs
    measured = next(tmp_path.rglob("measured.json"))
    old = read_json(measured)
    del old["asked"]["config"]["recompute"], old["asked"]["measure"]["window"]
    measured.write_text(json.dumps(old))
    monkeypatch.setattr(
        "tools.experiments.measures.train_run", lambda *args: pytest.fail("run again")
    )
    load_experiment(grid_file).run(Request(tmp_path))


def test_epochs_replace_the_length_of_all_rows_in_a_folder_of_their_own(
    grid_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_steps = load_experiment(grid_file)
    assert list_faults(by_steps.check, Request(tmp_path, epochs=2))
    text = TEXT.replace("steps: 20", "epochs: 5").replace("{steps: 30}", "{epochs: 7}")
    grid_file.write_text(text.replace("sync: {", "sync: {epochs: 6, "))
    requests: List[Any] = []

    def stop_before_runs(work: Any, arguments: Any, request: Any, describe: Any) -> Any:
        requests.extend(arguments.values())
        raise BadInput("no runs")

    monkeypatch.setattr("tools.experiments.training_grids.run_all", stop_before_runs)
    experiment = load_experiment(grid_file)
    for full, epochs, folder in (
        (False, None, "digits"), (True, None, "digits-full"), (True, 2, "digits-full-epochs-2"),
    ):  # fmt: skip
        request = Request(tmp_path, seeds=[0], full=full, epochs=epochs)
        experiment.check(request)
        with pytest.raises(BadInput):
            experiment.run(request)
        lengths = [config["epochs"] for config, *_ in requests]
        assert lengths == [epochs] * 3 if epochs else lengths == [6] + [7 if full else 5] * 2
        assert all(Path(path).parts[-3] == folder for _, path, _ in requests)
        requests.clear()


def test_time_is_counted_by_phase() -> None:
    shares = ((10, 0.5), (100, 1.0))
    phases = [{"updates": count, "planned_utilization": share} for count, share in shares]
    assert [compute_normalized_time(phases, step) for step in (0, 5, 10, 30)] == [0, 10, 20, 40]


def test_each_claim_of_the_paper_has_a_verdict(grid_file: Path) -> None:
    """Check with three seeds, a row that diverged, and a row that was not requested."""
    grid = read_grid(grid_file)
    accuracy = {"sync": (0.5, 0.52, 0.51), "warm up": (0.5, 0.53, 0.5), "bad": (None,) * 3}
    runs = [
        {"label": label, "seed": seed, "curve": [(0.0, 0.0, 2.3, 0.1), (1.0, 1.0, 0.5, value)][: 2 if value else 1],
         "final": value, "best": value, "values": {}, "diverged": None if value else "loss is nan", "step": 20}
        for label, values in accuracy.items() for seed, value in enumerate(values)
    ]  # fmt: skip
    experiment = make_experiment("digits", grid)

    def report(grid: TrainingGrid, runs: Any) -> Any:
        return experiment.report(compare(grid, runs), grid_file.parent)

    outcome = report(grid, runs)
    verdicts = outcome.results["verdicts"]
    assert [one["verdict"] for one in verdicts] == ["shown", "contradicted", "shown"]
    # a diverged run counts with its first value
    differences = [one["difference"] for one in verdicts]
    assert differences == pytest.approx([0.41, -0.51, 0.0])
    assert outcome.results["agrees"] is False and len(outcome.results["differences"]) == 1
    assert "| sync is better than bad | shown |" in outcome.table
    assert "| bad | pipemare | 3 of 3 runs diverged |" in outcome.table
    # or, if that value is the mean of a window, with the loss at the very beginning
    with_begin = [{**run, "begin": 0.2} if run["diverged"] else run for run in runs]
    difference = report(grid, with_begin).results["verdicts"][0]["difference"]
    assert difference == pytest.approx(0.31)
    # a seed in which all rows of a claim diverged does not count
    some = [{**runs[0], "final": None}, *runs[1:]]
    counts = [verdict["seeds"] for verdict in report(grid, some).results["verdicts"]]
    assert counts == [2, 2, 3]
    chosen = grid.model_copy(update={"rows": {"sync": grid.rows["sync"]}})
    verdicts = report(chosen, runs[:3]).results["verdicts"]
    assert {verdict["verdict"] for verdict in verdicts} == {"not run"}


@pytest.mark.slow
def test_a_row_begins_with_the_weights_at_the_end_of_another(
    grid_file: Path, tmp_path: Path
) -> None:
    head = TEXT[: TEXT.index("  sync:")] + "  tuned: {after: sync, optimizer: {lr: 1e-9}}\n"
    finals: Dict[str, Any] = {}
    for folder, keys in (("a", "steps: 20"), ("a", "steps: 30"), ("b", "optimizer: {lr: 1e9}")):
        grid_file.write_text(f"{head}  sync: {{method: gpipe, {keys}}}\n")
        # the other row is trained too, and first
        outcome = load_experiment(grid_file).run(Request(tmp_path / folder, jobs=2, rows=["tuned"]))
        rows = {row["label"]: row["final_by_seed"] for row in outcome.results["rows"]}
        # with other initial weights the run is another one, although its keys are the same
        assert rows["tuned"] == rows["sync"] and finals != rows
        finals = rows
    # a run that begins with diverged weights has diverged
    assert finals["tuned"] == {"0": None, "1": None}
    assert "row sync diverged" in str(outcome.findings.curves)


def test_time_by_fill_and_drain_is_that_of_equation_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of N = 2 on S = 3 stages takes N + 2 S = 8 steps if the method flushes, else 2."""
    monkeypatch.chdir(ROOT)
    keys = {"stages": 3, "steps": 4, "evaluate": {"steps": 4, "subset": 64}}
    config = {**yaml.safe_load(TEXT)["base"], **keys}
    for method, name, factor in (("gpipe", "test_loss", 4), ("pipemare", "test_accuracy", 1)):
        folder = tmp_path / method
        options = {"fill_and_drain": True, **({"name": name} if name == "test_loss" else {})}
        result = run_one({**config, "method": method}, str(folder), options)
        epoch, time = result["curve"][-1][:2]
        assert time == pytest.approx(epoch * factor) and epoch > 0
        assert result["final"] == pytest.approx(read_metrics(folder)[-1][name])


@pytest.mark.parametrize("change, message", [
    ("seeds: [0, 1] -> seeds: 3", "seeds: 3: "),
    ("title: Digits -> titel: Digits", "titel: "),
    ("better: sync -> better: synk", "expect.0.better: synk: "),
    ("than: bad -> to: bad", "expect.0: "),
    ("expect: -> gaps: {one: [sync, synk]}\nexpect:", "gaps.one: synk: "),
    ("expect: -> finals: {rate: {one: {0.1: synk}}}\nexpect:", "finals.rate.one: synk: "),
    ("method: gpipe -> method: gpip", "rows.sync on base: method: gpip"),
    ("sync: { -> sync: {after: warm, ", "rows.sync.after: warm: "),
    ("sync: { -> sync: {after: bad, init_from: x, ", "rows.sync.init_from: x: "),
    ("steps: 30 -> stepz: 30", "rows.sync on full: stepz: 30: "),
])  # fmt: skip
def test_a_wrong_file_is_reported_in_one_line(grid_file: Path, change: str, message: str) -> None:
    grid_file.write_text(TEXT.replace(*change.split(" -> ")))
    faults = list_faults(load_experiment, grid_file)
    assert any(message in fault and str(grid_file) in fault for fault in faults), faults


def test_rows_that_cannot_be_built_are_refused_before_any_run(
    grid_file: Path, tmp_path: Path
) -> None:
    bad = "  bad: {optimizer: {lr: 1e9}}"
    narrow = "  bad: {after: sync, model: {entry: 'models.mlp:mlp', args: {width: 8}}}"
    hogwild = "  bad: {method_args: {hogwild: {max: 1, mean: 1}}}"
    for row, message in (
        (narrow, "rows.bad.after: sync: "),
        (hogwild, "rows: bad: method_args.hogwild.max: 1: "),
    ):
        grid_file.write_text(TEXT.replace(bad, row))
        (fault,) = list_faults(load_experiment(grid_file).run, Request(tmp_path / "runs"))
        assert fault.startswith(f"digits: {message}") and not (tmp_path / "runs").exists()
    # a finished run exempts its row only if it has the row's config (story: rows that were changed since were exempt too)
    grid, measured = read_grid(grid_file), tmp_path / "digits" / "bad" / "seed-0" / "measured.json"
    measured.parent.mkdir(parents=True)
    for label, is_refused in (("sync", True), ("bad", False)):
        asked = {"config": grid.make_config(label, 7), "measure": {}}
        measured.write_text(json.dumps({"asked": asked}))
        with pytest.raises(BadInput) if is_refused else contextlib.nullcontext():
            refuse_rows("digits", grid, tmp_path / "digits", False)


@pytest.fixture
def run_reproduce(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """Return the function that runs the command with arguments."""
    monkeypatch.chdir(ROOT)
    return functools.partial(run_here, reproduce, monkeypatch=monkeypatch, capsys=capsys)


def test_the_command_lists_and_refuses(run_reproduce: Any) -> None:
    listing = run_reproduce()
    files = (ROOT / "configs" / "experiments").glob("*.yaml")
    assert listing.returncode == 0 and all(path.stem in listing.stdout for path in files)
    for arguments, place in (
        (["nothing"], "EXPERIMENT: nothing"),
        (["rpd_delays", "--at-most", "1"], "--at-most: 1"),
        (["pb_vgg11", "--rows", "x"], "--rows: x"),
    ):
        result = run_reproduce(*arguments)
        assert result.returncode == 2 and f"error: {place}: " in result.stderr
