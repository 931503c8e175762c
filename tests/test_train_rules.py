"""Check the update rules through a whole run: configs, outputs, resuming, refusals, and the
figures of summary.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import List

import pytest

from ipu_pipe.report.memory import build_memory_table
from ipu_pipe.report.run_text import format_plan
from ipu_pipe.run.build import build
from ipu_pipe.run.train import train
from tests.interrupted import interrupt_at
from tests.support.runs import assert_same_weights, list_faults, read_numbers
from tests.test_rules import ROWS, Row
from tests.test_train import make_short_config, make_stateful_model

SGD = ["optimizer.momentum=0.9", "optimizer.lr=0.02"]
ADAMW = ["optimizer={name: adamw, lr: 0.003, momentum: null}"]


def list_row_settings(row: Row) -> List[str]:
    """Return a row of the table as --set pairs."""
    args = dict(row.args)
    if row.switch:
        args["warmup"] = {"epochs": row.switch / 44}  # 44 updates an epoch
    return [f"method={row.method}", f"method_args={json.dumps(args)}"]


# a row for each kind of state: of an optimizer, a rule, a generator, a warm-up
RESUMED = {
    "gpipe": SGD, "2bw": SGD, "t1+t2+warmup": SGD, "recompute+t2": ADAMW, "hogwild": SGD, "delay+both": SGD,
    "shrinking": SGD, "compensation-adaptive": SGD, "gap-warmup": SGD, "prediction-optimizer+t1": ADAMW,
    "feedback+t2": SGD, "spectrain-1f1b": SGD,
}  # fmt: skip
RESUMED_ROWS = {**ROWS, "gpipe": Row("gpipe", {}), "2bw": Row("pipedream_2bw", {})}


def test_the_resumed_rows_have_every_argument_of_the_table() -> None:
    resumed = {key for name in RESUMED for key in RESUMED_ROWS[name].args}
    assert resumed >= {key for row in ROWS.values() for key in row.args}


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_each_kind_of_state_is_saved_and_resumed_to_the_bit(name: str, tmp_path: Path) -> None:
    """A run of a model with running statistics and dropout is interrupted after a checkpoint."""
    settings = [*RESUMED[name], *list_row_settings(RESUMED_ROWS[name])]
    config = make_short_config(
        "checkpoint.every=5", "stages=null", "lr_schedule.name=cosine", *settings
    )
    whole = train(config, tmp_path / "whole", model=make_stateful_model(), quiet=True)
    model = make_stateful_model()
    with interrupt_at(8):
        train(config, tmp_path / "cut", model=model, quiet=True)
    # hooks once stayed, and dropout drew the same mask for ever
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    resumed = train(config, tmp_path / "cut", model=make_stateful_model(), resume=True, quiet=True)
    assert_same_weights(tmp_path / "whole", tmp_path / "cut")
    assert [resumed[key] for key in ("initial", "final")] == [whole["initial"], whole["final"]]
    assert read_numbers(tmp_path / "cut") == read_numbers(tmp_path / "whole")


# ---- figures


def test_t2_costs_one_copy_of_the_weights() -> None:
    """The ratio is 1.33 with momentum and 1.25 with Adam (PipeMare, Table 2). A stage without
    delay needs no copy; PipeMare has none."""
    for optimizer, moments, ratio in ((SGD, 1, 4 / 3), (ADAMW, 2, 5 / 4)):
        config = make_short_config("method=pipemare", "stages=4", "method_args.t2={}", *optimizer)
        job = build(config)
        rows = build_memory_table(job)
        assert all(row["optimizer_bytes"] == (moments + 1) * row["weight_bytes"] for row in rows)
        assert f"{ratio:.2f} times that of the synchronous method" in format_plan(job)


def test_a_warm_up_is_amortized(tmp_path: Path) -> None:
    """The utilization is (E_async + E_sync) / (E_async + E_sync / u) with u = N/(N+P-1)
    (PipeMare, section 3.1, W)."""
    warmup = f"method_args.warmup.epochs={4 / 44}"
    config = make_short_config("method=pipemare", "stages=4", warmup, *SGD)
    report = train(config, tmp_path, quiet=True)
    (first, second) = report["phases"]
    assert first == {"method": "gpipe", "updates": 4, "planned_utilization": pytest.approx(4 / 7)}
    assert second["updates"] == 8
    expected = 12 / (8 / second["planned_utilization"] + 4 / (4 / 7))
    assert report["planned_utilization"] == pytest.approx(expected)


def test_hyperparameters_are_scaled_to_the_update_size() -> None:
    # updates of 32 samples
    job = build(make_short_config("optimizer={lr: 0.1, momentum: 0.9, reference_batch_size: 128}"))
    group = job.optimizer.param_groups[0]
    m = 0.9 ** (32 / 128)
    assert group["momentum"] == pytest.approx(m)
    assert group["lr"] == pytest.approx(0.1 * (1 - m) * 32 / (0.1 * 128))


def test_annealing_follows_the_learning_rate_schedule() -> None:
    """It ends at the first milestone; `tests/test_rules.py` has other schedules."""
    settings = ["method_args.t1={}", "lr_schedule={name: step, milestones: [4]}", "steps=400"]
    job = build(make_short_config("method=pipemare", "stages=4", *SGD, *settings))
    staleness = float(job.table.rule_lag()[0])
    assert job.rules.rates(43)[0] < job.rate(43)
    assert job.rules.rates(44)[0] == job.rate(44)
    assert job.rules.rates(0)[0] == pytest.approx(job.rate(0) / staleness)


# ---- refusals


@pytest.mark.parametrize("setting, message", [
    ("recompute.segments=9", "from 1 to the number of stages, 4"),
    ("hogwild={max: 4, mean: [1, 2]}", "for each of 4 stages"),
    ("hogwild={max: 4, mean: 3}", "must be at least 6"),
])  # fmt: skip
def test_rules_that_do_not_fit_the_stages_are_refused(setting: str, message: str) -> None:
    keys = ["stages=4", "method=pipemare", *SGD, f"method_args.{setting}"]
    (fault,) = list_faults(build, make_short_config(*keys))
    assert message in fault
