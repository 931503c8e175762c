"""train --against METHOD compares with a run of as many samples and with one of as much time, by the schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict

import numpy as np
import pytest
import yaml

from ipu_pipe.cli import train as train_command
from ipu_pipe.comparison import equal_time
from ipu_pipe.comparison.equal_time import (
    ComparedRun,
    choose_accumulations,
    describe,
    fit_into_time,
    match_samples,
    train_against,
)
from ipu_pipe.config.load import configure, load_config
from ipu_pipe.errors import Divergence
from ipu_pipe.run.planning import build_for_planning
from ipu_pipe.schedule.methods import METHODS
from ipu_pipe.store.folder import read_starts
from tests.command_line import run_here
from tests.support.runs import DIGITS, ROOT, read_json, read_summary

SHORT = [
    "steps=24", "log.tensorboard=false", "gradient_accumulation=2", "micro_batch_size=8", "evaluate={every: 0, subset: 64}",
    "backend.threads=1", "stages=4", "optimizer.lr=0.02", "lr_schedule={name: linear, warmup_steps: 4}",
]  # fmt: skip


def load_short_config(*pairs: str) -> Any:
    return load_config(DIGITS, [*SHORT, *pairs])


def compare(
    folder: Path, *accumulations: int, run: str = "pipedream", other: str = "gpipe", more: Any = ()
) -> str:
    """Compare short runs of two methods and return what is printed."""
    configs = (load_short_config(f"method={name}", *more) for name in (run, other))
    return train_against(*configs, folder, list(accumulations) or None, quiet=True)


def make_summary(method: str, steps: int, **more: Any) -> Dict[str, Any]:
    """Make the summary of a run on four stages with two microbatches an update."""
    return {
        "method": method, "steps": steps, "batch": {"gradient_accumulation": 2}, "model": {"stages": 4},
        "samples": steps * 16, "planned_utilization": 0.5, "modelled_utilization": None, "utilization": None,
        "updates_per_epoch": 1000, "throughput_samples_per_second": 12.34, **more,
    }  # fmt: skip


# a pass may be half of one
IN_ONE_SLOT = [name for name, method in METHODS.items() if method.order is None]


@pytest.mark.parametrize("method", IN_ONE_SLOT)
def test_slots_of_a_run_are_its_schedules(method: str) -> None:
    """The clock ends a run in as many slots as the planned share of busy ones says, drains included.

    Story: the microbatches of local SGD's replicas were not counted, so its runs took a quarter of their slots.
    """
    N = 1 if METHODS[method].rounds or METHODS[method].history else 4
    keys = [f"method={method}", f"gradient_accumulation={N}", "evaluate={steps: 5, subset: 64}"]
    job = build_for_planning(load_short_config(*keys, "steps=18", "optimizer.lr=0.01"))
    assert [5, 10, 15] == [drain for drain in job.drains if 0 < drain < 18]
    slots = job.play_updates(None, job.drains, 18)
    microbatches = 18 * job.schedule.accumulate
    assert slots[-1] == pytest.approx(2 * microbatches / job.compute_planned_utilization())
    assert (np.diff(slots) > 0).all()


@pytest.mark.parametrize("accumulate, steps", [(2, 150), (4, 107), (8, 68), (500, None)])
@pytest.mark.parametrize("length", [1000, None])
def test_as_much_time_is_the_most_updates_that_fit(
    accumulate: int, steps: Any, length: Any
) -> None:
    """GPipe on 4 stages needs 2 (K + 3) slots for an update; 1F1B needs 1,506 for 375 updates of 2 microbatches.

    Story: for data without a length the comparison ended in a traceback after both runs had trained."""
    first = make_summary("pipedream", 375, updates_per_epoch=length)
    chosen = fit_into_time(load_short_config("method=gpipe", "steps=375"), accumulate, first, 1506)
    if steps is None:
        assert chosen is None
        return
    assert (chosen.steps, chosen.gradient_accumulation) == (steps, accumulate)
    assert 2 * (accumulate + 3) * steps <= 1506 < 2 * (accumulate + 3) * (steps + 1)
    assert chosen.optimizer.lr == pytest.approx(0.02 * accumulate / 2)
    assert chosen.lr_schedule.warmup_steps == -(-4 * 2 // accumulate)  # as many samples


@pytest.mark.parametrize("accumulate", [4, 16])
def test_the_experiment_at_equal_time_has_these_settings(accumulate: int) -> None:
    grid = yaml.safe_load((ROOT / "configs" / "experiments" / "equal_time.yaml").read_text())
    # it drains for three evaluations before the last
    job = build_for_planning(configure(**grid["base"]))
    slots = float(job.play_updates(None, job.drains, 400)[-1])
    assert slots == 1624
    gpipe = configure(**{**grid["base"], "method": "gpipe"})
    fitted = fit_into_time(gpipe, accumulate, make_summary("pipedream", 400), slots)
    row = grid["rows"][f"GPipe N={accumulate}, equal time"]
    assert fitted.steps == row["steps"]
    assert fitted.optimizer.lr == pytest.approx(row["optimizer"]["lr"])
    assert fitted.lr_schedule.warmup_steps == row["lr_schedule"]["warmup_steps"]


def test_a_fall_that_ends_with_the_run_ends_with_the_others_too() -> None:
    """Story: the equal-time run was refused after both others had trained, or its rate fell by half."""
    linear = ["steps=24", "lr_schedule={name: linear, total_steps: 24}"]
    gpipe = load_short_config("method=gpipe", "stages=2", *linear)
    for accumulate in (1, 8):
        chosen = fit_into_time(gpipe, accumulate, make_summary("pipedream", 24), 200.0)
        assert chosen.lr_schedule.total_steps == pytest.approx(chosen.steps, abs=1)
    local = load_short_config("method=local_sgd", "gradient_accumulation=1", *linear)
    matched = match_samples(gpipe, local)
    assert matched.lr_schedule.total_steps == matched.steps == 12


def test_milestones_come_at_the_same_share_of_the_run() -> None:
    gpipe = load_short_config("method=gpipe", "lr_schedule={name: step, milestones: [2, 3]}")
    chosen = fit_into_time(gpipe, 4, make_summary("pipedream", 24), 102.0)
    share = chosen.steps * 4 / 48
    assert chosen.lr_schedule.milestones == pytest.approx([2 * share, 3 * share])


def test_a_method_that_does_not_drain_keeps_its_batch() -> None:
    assert choose_accumulations(load_short_config("method=gpipe")) == [2, 4, 8, 16]
    assert choose_accumulations(load_short_config("method=gpipe"), [4, 4]) == [4]
    assert choose_accumulations(load_short_config("method=pipemare")) == [2]


def test_both_comparisons_are_printed_and_drawn(tmp_path: Path) -> None:
    printed = compare(tmp_path / "run", 4, 8)
    results = read_json(tmp_path / "run" / "against.json")
    assert results["run"]["method"] == "pipedream"
    assert results["same_samples"]["samples"] == results["run"]["samples"] == 24 * 16
    slots = results["run"]["slots"]
    for run, accumulate in zip(results["same_time"], (4, 8)):
        report = read_summary(tmp_path / "run" / f"gpipe-accumulate-{accumulate}")
        assert report["batch"]["gradient_accumulation"] == run["accumulate"] == accumulate
        assert report["steps"] == run["steps"]
        assert 0.5 * slots < run["slots"] <= slots < results["same_samples"]["slots"]
        assert [run["curve"][n]["slots"] for n in (0, -1)] == [0, run["slots"]]
    best = max(run["final"]["test_accuracy"] for run in results["same_time"])
    assert f"{best:.3f} by gpipe at its best" in printed
    pytest.importorskip("matplotlib")
    assert (tmp_path / "run" / "against.png").read_bytes().startswith(b"\x89PNG")
    # a method that takes no longer is not run again
    compare(tmp_path / "other", run="gpipe", other="pipedream", more=["steps=2"])
    assert read_json(tmp_path / "other" / "against.json")["same_time"] == []


@pytest.mark.parametrize(
    "method, stages, updates",
    [("randomized_pipedream", 4, 48), ("local_sgd", 3, 16), ("gpipe", 4, 24)],
)
def test_a_method_with_batches_of_its_own_has_as_many_samples(method, stages, updates) -> None:
    """Story: randomized PipeDream's updates of one microbatch were as many as GPipe's of four."""
    config = load_short_config(f"stages={stages}", "method=pipedream")
    accumulate = 2 if method == "gpipe" else 1
    keys = [f"method={method}", f"stages={stages}", f"gradient_accumulation={accumulate}"]
    matched = match_samples(config, load_short_config(*keys))
    assert matched.steps == updates
    assert matched.lr_schedule.warmup_steps == -(-4 * updates // 24)


def test_a_rate_that_is_too_high_is_reported_and_the_others_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, why = equal_time.train, "update 3 of method gpipe: the training loss is nan"

    def train(config: Any, out: Path, **how: Any) -> Any:
        if config.gradient_accumulation == 8:
            raise Divergence(why, "a smaller learning rate may help")
        return whole(config, out, **how)

    monkeypatch.setattr(equal_time, "train", train)
    printed = compare(tmp_path / "run", 4, 8)
    assert "8 microbatches per update" in printed and why in printed
    assert "by gpipe at its best" in printed


def test_a_restart_goes_on_with_its_own_runs_and_overwrites_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Story: the second run of an earlier comparison was taken for the new one's."""
    settings = (f"--set={pair}" for pair in (*SHORT, "steps=2", "method=gpipe"))
    command = [DIGITS, "--out", tmp_path, "--overwrite", *settings]
    other = ["--against", "pipedream"]
    for attempt, job, options in ((0, "old", other), (0, "new", []), (1, "new", other)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
        result = run_here(train_command, *command, *options, monkeypatch=monkeypatch, capsys=capsys)
        assert result.returncode == 0, result.stderr
    assert "restart 1 by the launcher" in result.stdout  # of the first run alone
    for folder in (tmp_path, tmp_path / "pipedream"):
        assert [start["job"] for start in read_starts(folder)] == ["new"]


def test_the_better_loss_counts_where_accuracy_has_no_meaning() -> None:
    def make_run(method: str, loss: float, slots: float, accumulate: int = 2) -> ComparedRun:
        final = {"test_loss": loss, "test_accuracy": None}
        return ComparedRun(method, accumulate, 0.1, 10, 320, slots, final, [])

    runs = make_run("pipedream", 1.5, 100.0), make_run("gpipe", 1.25, 250.0)
    summaries = (make_summary(run.method, 10) for run in runs)
    same_time = [make_run("gpipe", 2.0, 99.0, 4), make_run("gpipe", 1.75, 98.0, 8)]
    printed = describe(*summaries, *runs, same_time)
    assert "test loss 1.500 by pipedream, 1.250 by gpipe: +0.250" in printed
    assert "test loss 1.500 by pipedream, 1.750 by gpipe at its best: -0.250" in printed


def test_methods_with_several_stages_a_device_are_compared_too(tmp_path: Path) -> None:
    """Story: they were refused, since their slots hold other passes than those of one stage a device."""
    short = ["gradient_accumulation=4", "steps=4"]
    zbv = load_short_config("method=zbv", "stages_per_device=2", *short)
    gpipe = load_short_config("method=gpipe", *short)
    printed = train_against(zbv, gpipe, tmp_path, [8], quiet=True)
    record = read_json(tmp_path / "against.json")
    # two stages a device: at least four forwards and backwards of each for each microbatch
    assert record["run"]["slots"] >= 4 * 16 > 4 * 2 * (4 + 3) == record["same_samples"]["slots"]
    assert "zbv has 2 devices, gpipe 4" in printed


def test_a_run_that_diverged_is_named_and_advised_rates_are_scaled(tmp_path: Path) -> None:
    """Story: 32 microbatches at eight times the rate ended at a loss of 1.6e14, unsaid."""
    short = ["steps=60", "log.tensorboard=false", "evaluate={every: 0, subset: 64}", "stages=4"]
    short.append("micro_batch_size=8")
    printed, records = [], []
    for folder, high, methods in (
        ("a", [], ["pipedream", "gpipe"]),
        ("b", ["optimizer.lr=2", "allow_nonfinite=true"], ["gpipe", "pipedream"]),
    ):
        configs = [load_config(DIGITS, [*short, *high, f"method={name}"]) for name in methods]
        printed.append(train_against(*configs, tmp_path / folder, [] if high else [8], quiet=True))
        records.append(read_json(tmp_path / folder / "against.json"))
    first = records[0]
    rates = [one["rate"] for one in (first["run"], first["same_samples"], *first["same_time"])]
    assert rates == [0.025, 0.05, 0.1] and "diverged" not in printed[0]
    diverged = records[1]["run"]["diverged"]
    assert diverged.startswith("diverged after update ") and f"  gpipe: {diverged}" in printed[1]
