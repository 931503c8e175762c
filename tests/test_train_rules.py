"""Check the update rules through a whole run: configs, outputs, resuming, refusals, and the
figures of summary.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest

from ipu_pipe.config.load import load_config
from ipu_pipe.errors import BadInput
from ipu_pipe.report.memory import build_memory_table
from ipu_pipe.report.run_text import format_plan
from ipu_pipe.run.build import build
from ipu_pipe.run.train import train
from ipu_pipe.update.apply import FORWARD, PLAIN
from tests.interrupted import interrupt_at
from tests.support.runs import DIGITS, assert_same_weights, read_metrics
from tests.support.slow import mark_slow
from tests.test_rules import ROWS, Row
from tests.test_train import (  # noqa: F401
    make_set_options,
    make_short_config,
    make_stateful_model,
    run_train_tool,
)

SGD = ["optimizer.momentum=0.9", "optimizer.lr=0.02"]
ADAMW = ["optimizer={name: adamw, lr: 0.003, momentum: null}"]


def list_row_settings(row: Row) -> List[str]:
    """Return a row of the table as --set pairs."""
    args: Dict[str, Any] = dict(row.args)
    if row.switch:
        args["warmup"] = {"epochs": row.switch / 44}  # 44 updates an epoch
    return [f"method={row.method}", f"method_args={json.dumps(args)}"]


# a row for each kind of state: of an optimizer, a rule, a generator, a warm-up
RESUMED = [
    "t1+t2+warmup", "recompute+t2", "hogwild", "delay+both", "prediction-2bw", "difference", "both", "shrinking",
    "compensation-adaptive", "compensation-warmup", "gap-warmup",
    "prediction-optimizer+t1", "feedback-2bw", "feedback+t2", "spectrain-1f1b",
]  # fmt: skip


def test_the_resumed_rows_have_every_argument_of_the_table() -> None:
    resumed = {key for name in RESUMED for key in ROWS[name].args}
    assert resumed == {key for row in ROWS.values() for key in row.args}


# one of each kind of state, which `make test` runs
QUICK = {"t1+t2+warmup", "hogwild", "prediction-2bw", "compensation-adaptive", "feedback+t2"}


@pytest.mark.parametrize("name", mark_slow(RESUMED, QUICK.__contains__))
def test_each_kind_of_state_is_saved_and_resumed_to_the_bit(name: str, tmp_path: Path) -> None:
    config = make_short_config(
        "checkpoint.every=5",
        "stages=null",
        "lr_schedule.name=cosine",
        *SGD,
        *list_row_settings(ROWS[name]),
    )
    whole = train(config, tmp_path / "whole", model=make_stateful_model(), quiet=True)
    with interrupt_at(8):
        train(config, tmp_path / "cut", model=make_stateful_model(), quiet=True)
    resumed = train(config, tmp_path / "cut", model=make_stateful_model(), resume=True, quiet=True)
    assert_same_weights(tmp_path / "whole", tmp_path / "cut")
    assert resumed["final"] == whole["final"]
    assert [line["step"] for line in read_metrics(tmp_path / "cut") if "test_loss" in line] == [
        0,
        12,
    ]


def test_a_rule_with_accumulators_on_adam_resumes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.test_train_rules.SGD", ADAMW)
    test_each_kind_of_state_is_saved_and_resumed_to_the_bit("t1+t2", tmp_path)


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


def test_the_summary_has_the_papers_figures(tmp_path: Path) -> None:
    report = train(
        make_short_config("method=pipemare", "stages=4", "method_args.t2={}", *SGD),
        tmp_path / "a",
        quiet=True,
    )
    figures = report["memory"]
    assert figures["weight_optimizer_copies"] == 4 and figures[
        "weight_optimizer_ratio"
    ] == pytest.approx(4 / 3)
    measured = sum(
        stage["optimizer_bytes"] + 2 * stage["weight_bytes"] for stage in report["stages"]
    )
    assert figures["weight_optimizer_bytes"] == measured
    report = train(
        make_short_config("method=pipedream_2bw", "stages=4", *SGD), tmp_path / "b", quiet=True
    )
    assert report["memory"]["weight_optimizer_copies"] == 4  # two versions, gradient, momentum
    footprint = report["memory"]["footprint_per_worker"]
    total = sum(stage["weight_bytes"] for stage in report["stages"]) / 2
    two, one = footprint["pipedream_2bw"], footprint["pipedream_flush"]
    assert two["with_recompute"] - one["with_recompute"] == pytest.approx(total / 4)


def test_a_warm_up_is_amortized(tmp_path: Path) -> None:
    """The utilization is (E_async + E_sync) / (E_async + E_sync / u) with u = N/(N+P-1)
    (PipeMare, section 3.1, W)."""
    report = train(
        make_short_config(
            "method=pipemare", "stages=4", f"method_args.warmup.epochs={4 / 44}", *SGD
        ),
        tmp_path / "a",
        quiet=True,
    )
    (first, second) = report["phases"]
    assert first == {"method": "gpipe", "updates": 4, "planned_utilization": pytest.approx(4 / 7)}
    assert second["updates"] == 8
    expected = 12 / (8 / second["planned_utilization"] + 4 / (4 / 7))
    assert report["planned_utilization"] == pytest.approx(expected)


def test_recomputation_shrinks_the_planned_activations() -> None:
    deep = ["model.args={inputs: 64, width: 32, layers: 15}", "stages=null"]
    without, segments = (
        sum(
            row["activation_bytes"]
            for row in build_memory_table(
                build(make_short_config("method=pipemare", *deep, *settings))
            )
        )
        for settings in ([], ["method_args.recompute={}"])
    )
    assert segments < without
    for method in ("gpipe", "pipedream_2bw"):
        settings = ["gradient_accumulation=16"]
        plain, recomputing = (
            build_memory_table(
                build(make_short_config(f"method={method}", *deep, *settings, f"recompute={value}"))
            )
            for value in ("false", "true")
        )
        job = build(make_short_config(f"method={method}", *deep, *settings))
        for s, (a, b) in enumerate(zip(plain, recomputing)):
            x = job.example[0].numel() * 4 if s == 0 else job.footprint.boundary_bytes[s - 1]
            assert a["activation_bytes"] == a["in_flight"] * job.footprint.saved_bytes[s]
            assert b["activation_bytes"] == b["in_flight"] * x + job.footprint.saved_bytes[s]


def test_hyperparameters_are_scaled_to_the_update_size() -> None:
    # updates of 32 samples
    job = build(make_short_config("optimizer={lr: 0.1, momentum: 0.9, reference_batch_size: 128}"))
    group = job.optimizer.param_groups[0]
    m = 0.9 ** (32 / 128)
    assert group["momentum"] == pytest.approx(m)
    assert group["lr"] == pytest.approx(0.1 * (1 - m) * 32 / (0.1 * 128))


def test_annealing_follows_the_learning_rate_schedule() -> None:
    step = ["lr_schedule={name: step, milestones: [4]}", "steps=400"]
    for settings, expected in (
        (step, 44),
        (["lr_schedule.warmup_steps=6"], 30),
        (["steps=100"], 25),
    ):
        job = build(
            make_short_config("method=pipemare", "stages=4", "method_args.t1={}", *SGD, *settings)
        )
        staleness = float(job.table.rule_lag()[0])
        assert job.rules.rates(expected - 1)[0] < job.rate(expected - 1)
        assert job.rules.rates(expected)[0] == job.rate(expected)
        assert job.rules.rates(0)[0] == pytest.approx(job.rate(0) / staleness)


# ---- refusals


def test_spike_compensation_and_prediction_on_adamw_are_refused_with_the_reason(
    tmp_path: Path,
    run_train_tool: Any,  # noqa: F811
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(
        f"extends: {DIGITS}\nmethod: pipelined_backprop\noptimizer: {{name: adamw, lr: 0.001, momentum: null}}\n"
        "method_args: {spike_compensation: {}, weight_prediction: {}}\n"
    )
    code, output, errors = run_train_tool(str(file), "--out", str(tmp_path / "run"))
    lines = errors.splitlines()
    assert code == 2 and not output and len(lines) == 2 and not (tmp_path / "run").exists()
    assert lines[0].startswith(f"error: {file}: method_args.spike_compensation: adamw: ")
    assert lines[1].startswith(f"error: {file}: method_args.weight_prediction: adamw: ")
    assert all("velocity of SGD with momentum" in line for line in lines)


@pytest.mark.parametrize("pairs, message", [
    (["method=pipemare", "method_args.recompute.segments=9", "stages=4"], "from 1 to the number of stages, 4"),
    (["method=pipemare", "method_args.hogwild={max: 4, mean: [1, 2]}", "stages=4"], "for each of 4 stages"),
    (["method=pipemare", "method_args.hogwild={max: 4, mean: 3}", "stages=4"], "must be at least 6"),
])  # fmt: skip
def test_arguments_that_do_not_fit_the_stages_are_refused(pairs: List[str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        build(make_short_config(*pairs, *SGD))


def test_rules_are_checked_against_an_optimizer_made_in_python(tmp_path: Path) -> None:
    import functools

    import torch

    config = make_short_config(
        "method=pipelined_backprop", "stages=4", "method_args.weight_prediction={}", *SGD
    )
    with pytest.raises(BadInput, match="velocity of SGD"):
        build(config, optimizer=functools.partial(torch.optim.RMSprop, lr=0.1))
    job = build(config, optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5))
    assert job.rules.encode_forwards(np.zeros(4, int)).tolist() == [
        FORWARD,
        FORWARD,
        FORWARD,
        PLAIN,
    ]


def test_a_config_of_rules_survives_being_written_and_read(tmp_path: Path) -> None:
    from ipu_pipe.config.compare import dump_config

    for row in ROWS.values():
        config = make_short_config(*list_row_settings(row), *SGD)
        file = tmp_path / "c.yaml"
        file.write_text(dump_config(config))
        assert load_config(file) == config
