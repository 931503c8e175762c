"""Compare training on the double of PopTorch with the emulator: weights are equal bit for bit
where the accumulation is a power of two; and errors of a device are retried or reported in one
line. Nothing here ran on an IPU."""

from __future__ import annotations

import functools
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Tuple

import pytest
import torch
from torch import nn

from ipu_pipe.backends.ipu import backend as row
from ipu_pipe.backends.ipu import engine as ipu_engine
from ipu_pipe.backends.ipu.blocks import describe_block_errors
from ipu_pipe.backends.ipu.feed import convert_input, convert_label
from ipu_pipe.backends.ipu.optimizer import import_state
from ipu_pipe.cli import analyze as analyze_tool
from ipu_pipe.cli import train as tool
from ipu_pipe.config.load import load_config
from ipu_pipe.data.sources import TensorData
from ipu_pipe.errors import BadInput, Divergence, RunFault
from ipu_pipe.report.analysis.analyze import analyze_run
from ipu_pipe.report.analysis.text import PARTS, compute_differences, format_analysis
from ipu_pipe.run import loop
from ipu_pipe.run.build import build
from ipu_pipe.run.callbacks import Callback
from ipu_pipe.run.train import check, train
from tests import forked
from tests.command_line import run_here
from tests.staged_models import OddModel
from tests.support.data import write_pictures
from tests.support.ipu_runs import (
    SGD,
    Own,
    Source,
    make_ipu_config,
    make_ipu_model,
    train_small_run,
)
from tests.support.models import Composed, Versioned
from tests.support.runs import (
    DIGITS,
    ROOT,
    assert_close_losses,
    assert_same,
    assert_same_weights,
    assert_states_close,
    find_checkpoint,
    list_faults,
    needs_processes,
    read_column,
    read_json,
    read_metrics,
    read_summary,
    read_trace_file,
    read_weights,
)
from tests.support.slow import mark_slow

pytest_plugins = ["poptorch_double"]  # the fixture `poptorch`
DOUBLE = str(ROOT / "tests" / "poptorch_double" / "path")
EVALUATION = 7  # calls: 50 test samples, 8 a call on 4 stages
PLAIN = {"name": "sgd", "lr": 0.05}


def compare_with_emulator(
    tmp_path: Path, method: str = "gpipe", name: str = "residual", ipu: Any = None, **keys: Any
) -> Any:
    """Run on the double and on the emulator, assert equal weights and close losses and
    evaluations, and return both summaries."""
    ours = train_small_run(make_ipu_config(method, "poptorch", ipu, **keys), tmp_path / "ipu", name)
    theirs = train_small_run(
        make_ipu_config(method, **{**keys, "precision": "float32"}), tmp_path / "emulator", name
    )
    assert_same_weights(tmp_path / "ipu", tmp_path / "emulator")
    assert_close_losses(tmp_path / "ipu", tmp_path / "emulator", 1e-6)
    for when in ("initial", "final"):
        assert ours[when] == pytest.approx(theirs[when], rel=1e-5)
    return ours, theirs


# ---- the emulator's weights

ADAM = {"name": "adam", "lr": 0.01, "betas": [0.8, 0.95], "weight_decay": 0.02}
ADAMW = {"name": "adamw", "lr": 0.01, "no_decay": "norms_and_biases", "weight_decay": 0.1}
COSINE = {"name": "cosine", "warmup_steps": 2}
SAME: Dict[str, Dict[str, Any]] = {
    "pipeline with BatchNorm": {},
    "1F1B": {"method": "pipedream_flush", "name": "convolution", "optimizer": ADAMW, "lr_schedule": COSINE},
    "sharded": {"method": "naive", "name": "mlp", "optimizer": ADAM, "gradient_accumulation": 2},
    "sharded, a weight of two IPUs": {"method": "naive", "name": "tied", "gradient_accumulation": 2},
    "skip connections": {"name": "skipping", "lr_schedule": {"name": "step", "milestones": [0.1], "gamma": 0.5}},
    "one IPU": {"stages": 1, "gradient_accumulation": 1},
    "stages sharing IPUs": {"ipu": {"ipus": [0, 0, 1, 1, 1]}, "stages": ["1", "2", "3", "4"], "gradient_accumulation": 4},
    "clipped": {"clip": {"norm": 0.1}},
    "replicas": {"replicas": 2, "ipu": {"broadcast_buffers": False, "auto_round_num_ipus": True}},
    "device iterations": {"ipu": {"device_iterations": 2}},
    "asynchronous loading": {"ipu": {"data_loading": {"mode": "async"}, "device_iterations": 2}, "replicas": 2, "name": "mlp"},
    "detached heads": {"method": "local_greedy", "name": "mlp"},
    "two chunks, BatchNorm": {"method": "local_chunked", "stages": ["1", "4"]},
    "the last layers alone": {"method": "last_layers", "name": "convolution", "optimizer": ADAM},
    "rates by block": {"method": "local_greedy", "name": "mlp", "method_args": {"block_rates": [1, 0.5, 2, 1]}},
    "32.32, all set": {
        "precision": "32.32", "recompute": True,
        "ipu": {"options": {"Training.setMeanAccumulationAndReplicationReductionStrategy": "PostAndLoss"}, "loss_scaling": 128,
                "stochastic_rounding": True, "inference_device_iterations": 7},
    },
}  # fmt: skip


@pytest.mark.slow
def test_a_rate_that_changes_at_an_evaluation_reaches_the_device(
    tmp_path: Path, poptorch: Any
) -> None:
    """Story: evaluations detach the device, attaching restores the rate read at the detachment,
    and the new rate was set before."""
    step = {"name": "step", "milestones": [1], "gamma": 0.1}
    keys: Dict[str, Any] = {
        "lr_schedule": step,
        "steps": None,
        "epochs": 2,
        "checkpoint": {},
        "gradient_accumulation": 64,
    }
    compare_with_emulator(tmp_path, name="mlp", **keys)
    for folder, on in (
        ("ipu", "poptorch"),
        ("emulator", "emulator"),
    ):  # and a run that is resumed there
        shutil.rmtree(find_checkpoint(tmp_path / folder))
        (tmp_path / folder / "summary.json").unlink()
        train_small_run(make_ipu_config(on=on, **keys), tmp_path / folder, "mlp", resume=True)
    assert_same_weights(tmp_path / "ipu", tmp_path / "emulator")


@pytest.mark.parametrize("has_scheduler", [False, True])
def test_the_updates_of_a_call_have_the_rate_of_its_first(
    tmp_path: Path, poptorch: Any, has_scheduler: bool
) -> None:
    """A call of several updates keeps one rate, as in Graphcore's own training code. Story: a
    warm-up and a cosine were refused."""

    def hold_rate(k: int) -> float:
        return [0.2, 0.2, 1.0, 1.0, 0.5, 0.5][min(k, 5)]

    def change_rate_within_calls(k: int) -> float:
        return hold_rate(k) if k % 2 == 0 else 7.0

    if not has_scheduler:
        train_small_run(
            make_ipu_config(on="poptorch", ipu={"device_iterations": 2}, lr_schedule=COSINE),
            tmp_path / "cosine",
            "mlp",
        )
        whole = make_ipu_config(lr_schedule=COSINE)
        rates = [build(whole, make_ipu_model("mlp"), Source()).rate(k) for k in (0, 0, 2, 2, 4, 4)]
        assert read_column(tmp_path / "cosine", "lr") == rates and len(set(rates)) > 1
        return
    for on, ipu, factor in (
        ("poptorch", {"device_iterations": 2}, change_rate_within_calls),
        ("emulator", None, hold_rate),
    ):

        def make_scheduler(optimizer: Any, factor: Any = factor) -> Any:
            return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

        train_small_run(
            make_ipu_config(on=on, ipu=ipu), tmp_path / on, "mlp", lr_scheduler=make_scheduler
        )
    assert_same_weights(tmp_path / "poptorch", tmp_path / "emulator")
    assert read_column(tmp_path / "poptorch", "lr") == read_column(tmp_path / "emulator", "lr")


def test_a_model_that_needs_its_version_in_a_state_dict_trains(
    tmp_path: Path, poptorch: Any
) -> None:
    torch.manual_seed(3)
    versioned = Versioned(nn.Linear(12, 8), nn.Linear(8, 4))
    before = versioned[0].weight.clone()
    train_small_run(
        make_ipu_config(on="poptorch", steps=2, stages=2), tmp_path / "ipu", model=versioned
    )
    assert not torch.equal(versioned[0].weight, before)


def test_a_loss_with_a_tensor_of_its_own_is_on_every_block(tmp_path: Path, poptorch: Any) -> None:
    weighted = Composed(
        lambda m, output, y: (
            nn.functional.cross_entropy(output, y, reduction="none") * m.factors[y]
        ).mean(),
        factors=torch.tensor([1.0, 2.0, 0.5, 1.0]),  # of the labels
    )
    for folder, on in (("ipu", "poptorch"), ("emulator", "emulator")):
        train_small_run(
            make_ipu_config("local_greedy", on, steps=2), tmp_path / folder, "mlp", loss=weighted
        )
    assert_same_weights(tmp_path / "ipu", tmp_path / "emulator")


def test_labels_stay_in_float32() -> None:
    y = torch.tensor([1e5, 0.1])
    assert torch.equal(convert_label(y), y) and convert_input(y, "16.32").dtype == torch.float16


# which `make test` runs
QUICK = {
    "pipeline with BatchNorm", "sharded, a weight of two IPUs", "replicas", "asynchronous loading", "rates by block",
    "32.32, all set",
}  # fmt: skip


@pytest.mark.parametrize("case", mark_slow(SAME, QUICK.__contains__))
def test_weights_are_the_emulators_to_the_bit(poptorch: Any, tmp_path: Path, case: str) -> None:
    keys = dict(SAME[case])
    if (
        keys.get("name", "residual") == "residual"
        and "ipus" not in keys.get("ipu", {})
        and "stages" not in keys
    ):
        keys["stages"] = ["1", "2", "4"]  # 4 stages: a sum alone is not worth an IPU
    if keys.get("name") == "convolution":
        keys.setdefault("stages", ["1", "2", "3"])
    ours, _ = compare_with_emulator(tmp_path, **keys)
    assert ours["backend"] == "poptorch" and ours["device"] == "ipu"


def test_output_modes_report_the_same_losses_but_for_final(poptorch: Any, tmp_path: Path) -> None:
    losses = {}
    for mode in ("all", "sum", "final"):
        train_small_run(
            make_ipu_config(on="poptorch", ipu={"output_mode": mode}), tmp_path / mode, "mlp"
        )
        losses[mode] = read_column(tmp_path / mode, "train_loss")
    assert losses["sum"] == pytest.approx(losses["all"], rel=1e-6)
    assert losses["final"] != pytest.approx(losses["all"], rel=1e-3)
    # difference 0.0: the mode chooses what comes back, not what is computed
    assert_same_weights(tmp_path / "all", tmp_path / "final")
    assert_same_weights(tmp_path / "all", tmp_path / "sum")


def test_averages_are_refused(poptorch: Any) -> None:
    (fault,) = list_build_faults(make_ipu_config(on="poptorch", ema={"decay": 0.9}))
    assert fault.startswith("ema.decay: 0.9: no weights are averaged on the devices: ")


@needs_processes
def test_one_process_shards_nothing(poptorch: Any, tmp_path: Path) -> None:
    sharded = {"every": 2, "keep": 9, "format": "sharded"}
    for on in ("poptorch", "emulator"):
        config = make_ipu_config(on=on, steps=4, checkpoint=sharded)
        train_small_run(config, tmp_path / on, "mlp")
        names = {path.name for path in find_checkpoint(tmp_path / on).iterdir()}
        assert "model.safetensors" in names and not any("-of-" in name for name in names)
    assert_same_weights(tmp_path / "poptorch", tmp_path / "emulator")
    config = make_ipu_config(on="poptorch", steps=4, checkpoint=sharded)
    train_small_run(config, tmp_path / "poptorch", "mlp", resume_from=2, overwrite=False)
    assert_same_weights(tmp_path / "poptorch", tmp_path / "emulator")


@pytest.mark.parametrize("precision", ["16.16", "16.32"])
def test_half_precision_ends_in_a_float32_model(
    poptorch: Any, tmp_path: Path, precision: str
) -> None:
    train_small_run(make_ipu_config(), tmp_path / "float32", "mlp")
    train_small_run(
        make_ipu_config(on="poptorch", precision=precision, ipu={"loss_scaling": 128.0}),
        tmp_path / "half",
        "mlp",
    )
    weight = read_weights(tmp_path / "half")["0.0.weight"]
    assert weight.dtype == torch.float32
    assert_close_losses(tmp_path / "half", tmp_path / "float32", 2e-3)
    assert torch.equal(weight, weight.half().float()) == (precision == "16.16")
    assert find_compilation(poptorch).optimizer["variables"]["loss_scaling"][0] == 128.0
    calls = poptorch.recorded.of("PoplarExecutor.__call__")
    assert calls and all(
        "float16" in str(call["args"]) and "float32" not in str(call["args"]) for call in calls
    )


# ---- the calls of PopTorch


def find_compilation(poptorch: Any, training: bool = True) -> Any:
    return next(c for c in poptorch.recorded.compilations if c.training == training)


def test_stages_blocks_and_the_loss_are_laid_out_as_in_the_model(
    poptorch: Any, tmp_path: Path
) -> None:
    train_small_run(make_ipu_config(on="poptorch"), tmp_path, "mlp")
    compiled = find_compilation(poptorch)
    assert (
        compiled.strategy == "PipelinedExecution"
        and compiled.forward_stages == 4
        and compiled.ipus == 4
    )
    assert compiled.stages == {0: 0, 1: 1, 2: 2, 3: 3}
    assert compiled.parameters["body.model.2.0.weight"] == 2 and compiled.losses[-1].stage == 3
    assert compiled.losses[-1].function == "identity_loss" and compiled.losses[-1].final
    constants = {
        name
        for group in compiled.optimizer["groups"]
        for name, (_, constant) in group.items()
        if constant
    }
    assert constants == {
        "momentum",
        "dampening",
        "weight_decay",
        "nesterov",
    }  # the rate alone may change
    evaluated = find_compilation(poptorch, training=False)
    assert (
        evaluated.options["device_iterations"] == 4 and evaluated.strategy == "PipelinedExecution"
    )


def test_local_losses_are_computed_where_their_blocks_are(poptorch: Any, tmp_path: Path) -> None:
    train_small_run(make_ipu_config("local_greedy", on="poptorch"), tmp_path, "mlp")
    compiled = find_compilation(poptorch)
    local = [("cross_entropy", ipu) for ipu in range(4)]
    assert [(loss.function, loss.ipu) for loss in compiled.losses] == [*local, ("identity_loss", 3)]
    heads = {name: ipu for name, ipu in compiled.parameters.items() if "heads" in name}
    assert heads == {f"body.heads.{i}.{kind}": i for i in range(3) for kind in ("weight", "bias")}
    assert read_summary(tmp_path)["blocks"][0]["test_loss"] is not None


def test_rates_reach_the_ipu_when_they_change(poptorch: Any, tmp_path: Path) -> None:
    train_small_run(make_ipu_config(on="poptorch"), tmp_path, "mlp")
    assert "PoplarExecutor.setOptimizer" not in poptorch.recorded.names()
    train_small_run(make_ipu_config(on="poptorch", lr_schedule={"name": "linear"}), tmp_path, "mlp")
    assert poptorch.recorded.names().count("PoplarExecutor.setOptimizer") == 5


def test_a_small_pod_is_shared_by_training_and_evaluation(
    poptorch: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("POPTORCH_DOUBLE_IPUS", "4")
    train_small_run(make_ipu_config(on="poptorch"), tmp_path / "shared", "mlp")
    with pytest.raises(
        RunFault, match=r"poptorch_cpp_error: Failed to acquire 4 IPU\(s\).*gc-info"
    ):
        train_small_run(
            make_ipu_config(on="poptorch", ipu={"detach_for_evaluation": False}),
            tmp_path / "both",
            "mlp",
        )
    monkeypatch.setenv("POPTORCH_DOUBLE_IPUS", "8")
    train_small_run(
        make_ipu_config(on="poptorch", ipu={"detach_for_evaluation": False}),
        tmp_path / "both",
        "mlp",
    )
    assert_same_weights(tmp_path / "shared", tmp_path / "both")
    one, other = (read_summary(tmp_path / name) for name in ("shared", "both"))
    assert one["final"] == other["final"]


def test_times_cycles_and_profiles_are_reported(poptorch: Any, tmp_path: Path) -> None:
    profile = {"directory": str(tmp_path / "profile")}
    ipu = {
        "options": {"logCycleCount": True},
        "profile": profile,
        "engine_options": {"debug.instrument": "true"},
    }
    summary = train_small_run(make_ipu_config(on="poptorch", ipu=ipu), tmp_path / "run", "mlp")
    report = read_json(tmp_path / "run" / "ipu.json")
    assert (
        report["pipeline_cycles_an_update"] == 16 + 2 * 4 - 2
        and report["cycles_of_the_last_call"] == 22000
    )
    assert summary["planned_utilization"] == report["full_cycles_share"] == 16 / 22
    assert report["latency_seconds"]["round_trip"] > report["latency_seconds"]["compute"] > 0
    device = report["profiles"]["training"]["devices"][1]
    assert (
        device["memory_bytes"] == 4 * 3000
        and device["cycles"] == 1000
        and device["exchange_in_bytes"] == 2000
    )
    assert report["profiles"]["training"]["ipus"] == 4 and "inference" in report["profiles"]
    engine = find_compilation(poptorch).options["engineOptions"]
    assert engine["debug.instrument"] == engine["autoReport.all"] == "true"
    trace = read_trace_file(tmp_path / "run")
    kinds = [e["cat"] for e in trace["traceEvents"] if e["ph"] == "X"]
    assert (
        kinds.count("update") == kinds.count("send") == kinds.count("recv") == 6
        and kinds.count("evaluate") == 2
    )
    counters = {e["name"]: e["args"]["value"] for e in trace["traceEvents"] if e["ph"] == "C"}
    assert counters["IPU cycles an update"] == 22000 and counters["samples/s"] > 0
    assert not trace["otherData"]["modelled"]


def test_the_first_call_is_the_warm_up_and_its_updates_share_its_time(
    poptorch: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Updates of one call share its time. Story: updates were timed one by one, so that all but
    the first of a call took no time, and throughput came out too high."""
    now, takes = [0.0], iter([100.0, 1.0, 1.0])

    class ClockedExecutor(poptorch.PoplarExecutor):  # type: ignore[misc,name-defined]
        def __call__(self, *args: Any) -> Any:
            now[0] += next(takes) if self._training else 0.0
            return super().__call__(*args)

    monkeypatch.setattr(sys.modules["poptorch._executor"], "PoplarExecutor", ClockedExecutor)
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    summary = train_small_run(
        make_ipu_config(on="poptorch", ipu={"device_iterations": 2}), tmp_path, "mlp"
    )
    assert summary["throughput_samples_per_second"] == 4 * 32 / 2
    lines = read_metrics(tmp_path)
    assert [line["samples_per_second"] for line in lines if "train_loss" in line] == [
        32 / 50
    ] * 2 + [64.0] * 4


def test_callbacks_see_the_newest_weights_or_none(poptorch: Any, tmp_path: Path) -> None:
    """Story: callbacks got the initial weights for the whole run."""
    values_by_event: Dict[str, List[Any]] = {}

    class WeightRecorder(Callback):
        def on_step(self, moment: Any) -> None:
            values_by_event.setdefault("step", []).append(moment.model)

        def on_evaluation(self, moment: Any) -> None:
            self.on_checkpoint(moment)

        def on_checkpoint(self, moment: Any) -> None:
            weights = {name: value.clone() for name, value in moment.model.state_dict().items()}
            values_by_event.setdefault("at rest", []).append((moment.step, weights))

        on_end = on_checkpoint

    train_small_run(
        make_ipu_config(on="poptorch", evaluate={"every": 0.3}),
        tmp_path,
        callbacks=[WeightRecorder()],
        model=make_ipu_model("mlp"),
    )
    assert values_by_event["step"] == [None] * 6 and [
        step for step, _ in values_by_event["at rest"]
    ] == [2, 4, 6, 6, 6]
    for step, weights in values_by_event["at rest"]:
        assert_same(weights, read_weights(tmp_path, step))


# ---- resuming


@pytest.mark.parametrize(
    "optimizer", mark_slow([SGD, ADAM, PLAIN], lambda optimizer: optimizer is ADAM)
)
def test_a_resumed_run_ends_with_the_same_weights(
    poptorch: Any, tmp_path: Path, optimizer: Any
) -> None:
    straight = make_ipu_config(on="poptorch", optimizer=optimizer)
    train_small_run(straight, tmp_path / "straight", "mlp")
    broken = poptorch.UnrecoverableError("broken", "poplar_unrecoverable_error")
    poptorch.recorded.fail("execute", EVALUATION + 5, broken)
    with pytest.raises(RunFault, match="update 4: poplar_unrecoverable_error: broken"):
        train_small_run(straight, tmp_path / "resumed", "mlp")
    other = make_ipu_config(on="poptorch", optimizer=optimizer, stages=2)  # on other IPUs
    train_small_run(other, tmp_path / "resumed", "mlp", resume=True)
    assert_same_weights(tmp_path / "straight", tmp_path / "resumed")


def train_in_two_halves(tmp_path: Path, first: Any, second: Any, optimizer: Any = SGD) -> None:
    """Train four updates with `first` as `backend.ipu`, then resume for two updates with
    `second`."""
    interrupt_run(tmp_path, make_ipu_config(on="poptorch", optimizer=optimizer, ipu=first), 4)
    train_small_run(
        make_ipu_config(on="poptorch", optimizer=optimizer, ipu=second),
        tmp_path,
        "mlp",
        resume=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("combined", [False, True])
def test_velocities_follow_the_loss_scaling_when_a_run_is_resumed(
    poptorch: Any, tmp_path: Path, combined: bool
) -> None:
    """PopTorch stores velocities times the loss scaling. Story: they were loaded unchanged, and
    the momentum was off by the ratio."""
    first, second = (
        {"use_combined_accum": combined, "loss_scaling": scaling} for scaling in (128.0, 4.0)
    )
    train_small_run(
        make_ipu_config(on="poptorch", ipu={"use_combined_accum": combined}),
        tmp_path / "straight",
        "mlp",
    )
    train_in_two_halves(tmp_path / "scaled", first, second)
    assert_same_weights(tmp_path / "straight", tmp_path / "scaled")
    if combined:
        train_small_run(make_ipu_config(), tmp_path / "other", "mlp")
    else:  # PopTorch would misread the other type's memory
        train_in_two_halves(
            tmp_path / "other", {}, {"optimizer_options": {"velocity_accum_type": "float16"}}
        )
    assert_states_close(
        read_weights(tmp_path / "straight"),
        read_weights(tmp_path / "other"),
        1e-6 if combined else 1e-4,
    )


CHANGES = [[0, 2.0], [2, 64.0], [5, 0.5]]


@pytest.mark.parametrize("ipu, optimizer", [
    ({}, SGD),
    pytest.param({}, PLAIN, marks=pytest.mark.slow),
    pytest.param({}, ADAM, marks=pytest.mark.slow),
    pytest.param({"device_iterations": 2}, SGD, marks=pytest.mark.slow),
    pytest.param({"use_combined_accum": True}, SGD, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_loss_scaling_that_changes_in_a_run_changes_no_weight(
    poptorch: Any, tmp_path: Path, ipu: Any, optimizer: Any
) -> None:
    """PopTorch stores velocities times the loss scaling: they are rescaled where it changes, and
    after a resume."""
    train_small_run(
        make_ipu_config(on="poptorch", ipu=ipu, optimizer=optimizer), tmp_path / "straight", "mlp"
    )
    changing = make_ipu_config(
        on="poptorch", ipu={**ipu, "loss_scaling": CHANGES}, optimizer=optimizer
    )
    train_small_run(changing, tmp_path / "changing", "mlp")
    assert_same_weights(tmp_path / "straight", tmp_path / "changing")
    interrupt_run(tmp_path / "resumed", changing, 4)
    train_small_run(changing, tmp_path / "resumed", "mlp", resume=True)
    assert_same_weights(tmp_path / "straight", tmp_path / "resumed")
    assert not poptorch.recorded.warnings
    assert (
        load_config(tmp_path / "changing" / "config.yaml").ipu.loss_scaling
        == changing.ipu.loss_scaling
    )


@pytest.mark.parametrize("combined", [True, False])
def test_velocities_of_the_other_variant_are_refused(
    poptorch: Any, tmp_path: Path, combined: bool
) -> None:
    """Velocities of the other variant have other names. Story: PopTorch warned, and training
    continued without momentum."""
    with pytest.raises(BadInput, match="the state that was loaded has no Accl.*init_from"):
        train_in_two_halves(
            tmp_path, {"use_combined_accum": combined}, {"use_combined_accum": not combined}
        )
    assert not poptorch.recorded.warnings


def test_a_state_with_a_missing_name_is_refused(poptorch: Any, tmp_path: Path) -> None:
    interrupt_run(tmp_path, make_ipu_config(on="poptorch", optimizer=ADAM), 4)

    def import_without_entry(*args: Any) -> Any:
        state = import_state(*args)
        # the engine opens before the state is loaded
        if state is None:
            return None
        return state._replace(
            tensors={k: v for k, v in state.tensors.items() if k != "Accl2___body.model.3.bias"}
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ipu_engine, "import_state", import_without_entry)
        with pytest.raises(
            BadInput,
            match="^optimizer: the state that was loaded has no Accl2___body.model.3.bias ",
        ):
            train_small_run(
                make_ipu_config(on="poptorch", optimizer=ADAM), tmp_path, "mlp", resume=True
            )


@pytest.mark.parametrize("scaling", [1.0, 64.0])
def test_nesterov_momentum_is_pytorchs(poptorch: Any, tmp_path: Path, scaling: float) -> None:
    """Nesterov momentum equals PyTorch's if the mean is a running mean (PopART reads the
    accumulator as it is). Story: it was refused, though PopTorch has it."""
    nesterov = {**SGD, "nesterov": True}
    strategy = "Training.setMeanAccumulationAndReplicationReductionStrategy"
    running = {"options": {strategy: "Running"}, "loss_scaling": scaling}
    train_small_run(
        make_ipu_config(on="poptorch", ipu=running, optimizer=nesterov), tmp_path / "ipu", "mlp"
    )
    train_small_run(make_ipu_config(optimizer=nesterov), tmp_path / "emulator", "mlp")
    assert_states_close(read_weights(tmp_path / "emulator"), read_weights(tmp_path / "ipu"), 1e-6)


def interrupt_run(out: Path, settings: Any, at: int) -> None:
    """Train until an interrupt before update `at`."""
    with pytest.raises(KeyboardInterrupt):
        train_small_run(settings, out, "mlp", data=Source(at * 16, KeyboardInterrupt()))


@pytest.mark.slow
def test_weights_change_the_backend_and_optimizer_state_does_not(
    poptorch: Any, tmp_path: Path
) -> None:
    for first, second in (("emulator", "poptorch"), ("poptorch", "emulator")):
        interrupt_run(tmp_path / first, make_ipu_config(on=first, optimizer=PLAIN), 4)
        train_small_run(
            make_ipu_config(on=second, optimizer=PLAIN), tmp_path / first, "mlp", resume=True
        )
    assert_same_weights(tmp_path / "emulator", tmp_path / "poptorch")
    interrupt_run(tmp_path / "ours", make_ipu_config(on="poptorch"), 4)
    with pytest.raises(BadInput, match="PopTorch's, which only backend.name poptorch"):
        train_small_run(make_ipu_config(), tmp_path / "ours", "mlp", resume=True)
    interrupt_run(tmp_path / "torch", make_ipu_config(), 4)
    with pytest.raises(BadInput, match="torch.optim's, of which PopTorch can load none"):
        train_small_run(make_ipu_config(on="poptorch"), tmp_path / "torch", "mlp", resume=True)
    initial = tmp_path / "torch" / "checkpoints" / "step-4" / "model.safetensors"
    train_small_run(
        make_ipu_config(on="poptorch", init_from=str(initial)), tmp_path / "anew", "mlp"
    )


# ---- faults


@pytest.mark.slow
def test_a_recoverable_error_is_retried_once_from_the_last_checkpoint(
    poptorch: Any, tmp_path: Path, capsys: Any
) -> None:
    settings = make_ipu_config(on="poptorch", ipu={"data_loading": {"mode": "async"}})
    train_small_run(settings, tmp_path / "plain", "mlp")
    for call in (1, 4, 5):  # before any checkpoint, in the middle, at once after one
        poptorch.recorded.fail("execute", EVALUATION + call)
        train_small_run(settings, tmp_path / "retried", "mlp")
        assert_same_weights(tmp_path / "plain", tmp_path / "retried")
        done = (call - 1) % 2
        assert f"repeating {done} updates" in capsys.readouterr().err
    assert read_column(tmp_path / "plain", "train_loss") == read_column(
        tmp_path / "retried", "train_loss"
    )
    poptorch.recorded.fail("copyWeightsToHost", 1)
    train_small_run(settings, tmp_path / "retried", "mlp")
    assert_same_weights(tmp_path / "plain", tmp_path / "retried")


def test_a_second_error_before_the_next_checkpoint_ends_the_run(
    poptorch: Any, tmp_path: Path
) -> None:
    for call in (3, 5):
        poptorch.recorded.fail("execute", EVALUATION + call)
    with pytest.raises(
        RunFault, match=r"\(IPU_RESET\) for the second time since the last checkpoint.*--resume"
    ):
        train_small_run(make_ipu_config(on="poptorch", checkpoint={"every": None}), tmp_path, "mlp")
    assert poptorch._device.ipus_by_holder == {}


MEMORY, ATTACHING = "poplar_graph_memory_allocation_error", "poptorch_cpp_error"


@pytest.mark.parametrize("event, error, message", [
    ("compile", lambda p: p.Error("Out of memory on tile 0", MEMORY), "take more stages"),
    ("execute", lambda p: p.UnrecoverableError("dead", "poplar_unrecoverable_error"), "poplar_unrecoverable_error: dead"),
    ("attach", lambda p: p.Error("Failed to acquire 4 IPU(s)", ATTACHING), "POPTORCH_WAIT_FOR_IPU=1"),
    ("execute", lambda p: AssertionError("Invalid batch\n dimension"), "AssertionError: Invalid batch dimension"),
])  # fmt: skip
def test_both_families_of_errors_are_reported_in_one_line(
    poptorch: Any, tmp_path: Path, event: str, error: Callable[[Any], BaseException], message: str
) -> None:
    poptorch.recorded.fail(event, 1, error(poptorch))
    with pytest.raises(RunFault) as caught:
        train_small_run(make_ipu_config(on="poptorch"), tmp_path, "mlp")
    assert (
        message in str(caught.value)
        and "\n" not in str(caught.value)
        and str(caught.value).startswith("poptorch: ")
    )


def test_ctrl_c_leaves_no_wrapper_and_no_ipu_in_use(poptorch: Any, tmp_path: Path) -> None:
    model = make_ipu_model("residual")

    def list_kinds() -> Any:
        parts = [*model.modules(), *model.parameters(), *model.buffers()]
        return [type(part) for part in parts], [
            len(part._forward_pre_hooks) for part in model.modules()
        ]

    before = list_kinds()
    poptorch.recorded.fail("execute", 12, KeyboardInterrupt())
    settings = make_ipu_config(on="poptorch", stages=["1", "2", "4"])
    with pytest.raises(KeyboardInterrupt):
        train_small_run(settings, tmp_path, model=model)
    assert list_kinds() == before and poptorch._device.ipus_by_holder == {}
    assert_same(dict(model.state_dict()), read_weights(tmp_path, 4))  # of the last checkpoint
    train_small_run(settings, tmp_path, model=model)
    assert list_kinds() == before and poptorch._device.ipus_by_holder == {}
    assert_same(dict(model.state_dict()), read_weights(tmp_path))


def test_a_nan_loss_ends_the_run(poptorch: Any, tmp_path: Path) -> None:
    with pytest.raises(RunFault, match="update 0 of method gpipe: the training loss is nan"):
        train_small_run(
            make_ipu_config(on="poptorch"),
            tmp_path,
            "mlp",
            loss=lambda x, y: nn.functional.cross_entropy(x * torch.nan, y),
        )


def test_a_divergence_in_a_block_stays_one(poptorch: Any) -> None:
    with pytest.raises(Divergence) as raised, describe_block_errors(1, "training"):
        raise Divergence("update 3: the training loss is nan", "lower optimizer.lr")
    assert raised.value.reason == "rank 1, block 1: update 3: the training loss is nan"
    assert str(raised.value).endswith("; lower optimizer.lr")


# ---- before anything compiles


def list_build_faults(settings: Any, name: str = "mlp", **keys: Any) -> List[str]:
    return list_faults(build, settings, **{"model": make_ipu_model(name), "data": Source(), **keys})


def make_odd_model() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 64), OddModel())


ODD_STAGES = ["1.2", "1.4", "1.6"]
# keys of the config, of the build, and parts of the one line
UNFIT: List[Tuple[Dict[str, Any], Dict[str, Any], List[str]]] = [
    ({"gradient_accumulation": 6}, {},
     ["gradient_accumulation: 6: a PopTorch pipeline of 4 stages needs at least 2 x 4 - 1 = 7"]),
    ({}, {"name": "convolution"}, ["5 IPUs: IPUs are reserved by powers of 2, here 8", "auto_round_num_ipus"]),
    ({"replicas": 2, "stages": ["1", "2", "4"]}, {"name": "residual"},
     ["backend.ipu.broadcast_buffers: true", "1.inner.0.running_mean", "GroupNorm"]),
    ({"stages": ODD_STAGES}, {"model": make_odd_model()},
     ["model: 1.2.table.values: used by stages 1, 2 on IPUs 1, 2", "backend.ipu.ipus"]),
    ({}, {"name": "tied"}, ["model: 1.0.weight: used by stages 1, 3 on IPUs 1, 3"]),
    ({"method": "local_greedy"}, {"name": "tied"},
     ["1.0.weight on stage 1 and 3.0.weight on stage 3 are one shared weight", "two gradients"]),
    ({}, {"optimizer": functools.partial(torch.optim.Adagrad, lr=0.1)}, ["optimizer: Adagrad: "]),
    ({}, {"optimizer": functools.partial(torch.optim.AdamW, amsgrad=True)}, ["optimizer.amsgrad: true"]),
    ({"stages": {"finest": 16}, "gradient_accumulation": 32}, {}, ["the stage is empty"]),
    ({"ipu": {"device_iterations": 3}, "steps": None, "checkpoint": {}}, {}, ["must divide the run's 20"]),
    ({"loss_weight": "tokens"}, {}, ["loss_weight: tokens: PopTorch averages"]),
    ({"method": "naive", "replicas": 2, "gradient_accumulation": 1}, {"loss_weight": len}, ["loss_weight: (given in Python)"]),
    ({}, {"loss": lambda output, y: nn.functional.cross_entropy(Own.apply(output), y)}, ["model: Own: "]),
]  # fmt: skip


@pytest.mark.parametrize("keys, parts, words", UNFIT)
def test_models_that_ipus_cannot_pipeline_are_refused(
    poptorch: Any, keys: Any, parts: Any, words: List[str]
) -> None:
    (fault,) = list_build_faults(make_ipu_config(on="poptorch", **keys), **parts)
    assert all(part in fault for part in words), fault


def test_a_weight_is_accepted_where_it_changes_nothing(poptorch: Any) -> None:
    build(
        make_ipu_config("naive", "poptorch", gradient_accumulation=1, loss_weight="tokens"),
        model=make_ipu_model("mlp"),
        data=Source(),
    )


def test_a_buffer_of_two_stages_may_be_sharded_or_on_one_ipu(poptorch: Any) -> None:
    build(
        make_ipu_config("naive", "poptorch", stages=ODD_STAGES),
        model=make_odd_model(),
        data=Source(),
    )
    build(
        make_ipu_config(on="poptorch", stages=ODD_STAGES, ipu={"ipus": [0, 1, 1, 1]}),
        model=make_odd_model(),
        data=Source(),
    )


def make_unfaithful_model(what: str) -> nn.Module:
    """Return a model that PopTorch would accept but compute differently."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        x = m.inner(x)
        if what == "function":
            return Own.apply(x)
        if what == "counter":
            m.seen += 1
        if what == "no_grad":
            with torch.no_grad():
                x = x - x.mean()
        return x

    first = Composed(forward, inner=nn.Linear(12, 12), seen=torch.zeros((), dtype=torch.int64))
    return nn.Sequential(first, nn.Linear(12, 4))


@pytest.mark.parametrize("what, message", [
    ("function", "model: Own: .*never calls its backward"),
    ("counter", "model: 0.seen: training writes an integer buffer"),
    ("no_grad", r"model: mean in 0.*: torch.no_grad\(\) has no effect inside a forward"),
])  # fmt: skip
def test_models_that_poptorch_computes_differently_are_refused_by_name(
    poptorch: Any, what: str, message: str
) -> None:
    (fault,) = list_build_faults(
        make_ipu_config(on="poptorch", stages=["1"]), model=make_unfaithful_model(what)
    )
    assert re.match(message, fault), fault
    build(
        make_ipu_config(on="poptorch", stages=["1"]),
        model=make_unfaithful_model("nothing"),
        data=Source(),
    )


def test_half_inputs_that_stay_float32_are_refused(poptorch: Any) -> None:
    keys = {"on": "poptorch", "precision": "16.32", "stages": 1}
    x, y = torch.zeros(64, 12, dtype=torch.uint8), torch.zeros(64, dtype=torch.int64)

    class FloatLinear(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.float())

    class ByteData(TensorData):
        def _normalize(self, x: torch.Tensor) -> torch.Tensor:
            return x

    (fault,) = list_build_faults(
        make_ipu_config(**keys), model=FloatLinear(12, 4), data=ByteData((x, y), (x, y), 5)
    )
    assert fault.startswith("precision: 16.32: inputs are uint8")


def test_groups_may_differ_in_all_settings_but_the_rate(
    poptorch: Any,
) -> None:
    def make_groups(**of_biases: float) -> Dict[str, Any]:
        net = make_ipu_model("mlp")
        wide, biases = (
            [p for p in net.parameters() if (p.dim() > 1) is many] for many in (True, False)
        )
        groups: Any = [{"params": wide}, {"params": biases, **of_biases}]
        return {"model": net, "optimizer": torch.optim.SGD(groups, lr=0.05)}

    (fault,) = list_build_faults(make_ipu_config(on="poptorch"), **make_groups(lr=0.1))
    assert fault.startswith("optimizer: parameter groups with different learning rates: ")
    build(make_ipu_config(on="poptorch"), data=Source(), **make_groups(weight_decay=0.1))
    build(make_ipu_config(), data=Source(), **make_groups(lr=0.1))


def test_an_optimizer_of_the_users_own_is_translated(poptorch: Any, tmp_path: Path) -> None:
    rmsprop = functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True)
    for on in ("emulator", "poptorch"):
        train_small_run(make_ipu_config(on=on), tmp_path / on, "mlp", optimizer=rmsprop)
    assert_same_weights(tmp_path / "emulator", tmp_path / "poptorch")


def test_a_machine_with_too_few_ipus_is_reported_before_compiling(
    poptorch: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("POPTORCH_DOUBLE_IPUS", "2")
    with pytest.raises(BadInput, match="this machine has no device of 4 IPUs.*compile_only=true"):
        train_small_run(make_ipu_config(on="poptorch"), tmp_path, "mlp")
    assert poptorch.recorded.compilations == []
    simulator = {"options": {"useIpuModel": True}}
    train_small_run(make_ipu_config(on="poptorch", ipu=simulator), tmp_path, "mlp")


def test_compiling_alone_needs_no_ipu_and_trains_nothing(
    poptorch: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setenv("POPTORCH_DOUBLE_IPUS", "0")
    target = {"useOfflineIpuTarget": 2}
    ipu = {"compile_only": True, "options": target, "executable_cache": "cache"}
    with pytest.raises(SystemExit) as exit_error:
        train_small_run(make_ipu_config(on="poptorch", ipu=ipu), tmp_path / "run", "mlp")
    assert (
        exit_error.value.code == 0 and "compiled for 4 IPUs x replicas 1" in capsys.readouterr().out
    )
    assert [c.training for c in poptorch.recorded.compilations] == [
        True,
        False,
    ] and poptorch.recorded.runs == []


def test_data_that_cannot_go_to_another_process_is_refused(poptorch: Any, tmp_path: Path) -> None:
    source = Source()
    source.odd = lambda: None  # type: ignore[attr-defined]
    with pytest.raises(
        BadInput, match="data_loading.mode: async: the data cannot go to another process"
    ):
        train_small_run(
            make_ipu_config(on="poptorch", ipu={"data_loading": {"mode": "async"}}),
            tmp_path,
            "mlp",
            data=source,
        )


# ---- launchers


def test_poprun_sets_replicas_and_no_forbidden_method_is_called(
    poptorch: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    settings = {"replicas": 2, "stages": 2}
    train_small_run(make_ipu_config(**settings), tmp_path / "emulator", "mlp")
    # joining sets the last two
    values = {"POPDIST_NUM_INSTANCES": "1", "POPDIST_INSTANCE_INDEX": "0", "POPDIST_NUM_LOCAL_REPLICAS": "2",
              "RANK": "0", "WORLD_SIZE": "1"}  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    train_small_run(make_ipu_config(on="poptorch", **settings), tmp_path / "poprun", "mlp")
    assert_same_weights(tmp_path / "poprun", tmp_path / "emulator")
    assert (
        find_compilation(poptorch).options["replication_factor"] == 2
        and find_compilation(poptorch).ipus == 4
    )
    with pytest.raises(BadInput, match=r"replicas: 4: poprun started 2 \(--num-replicas\)"):
        train_small_run(
            make_ipu_config(on="poptorch", replicas=4, stages=2), tmp_path / "four", "mlp"
        )
    with pytest.raises(BadInput, match="not under poprun"):
        check(
            make_ipu_config("local_greedy", "poptorch", {"local": "decoupled"}), tmp_path / "none"
        )


@pytest.mark.slow
def test_instances_evaluate_shares_of_the_test_set(tmp_path: Path) -> None:
    """Two instances of poprun, one with an additional batch, make the same number of calls,
    since their replicas wait for each other."""
    write_pictures(tmp_path, 2, train=8, val=150)
    keys = [
        "model.entry=models.mlp:mlp",
        "model.args={inputs: 192, width: 8, layers: 1, classes: 2}",
        "stages=2",
        "steps=2",
    ]
    keys += [
        "data={name: image_folder, size: 8, root: %s}" % tmp_path,
        "method=gpipe",
        "replicas=2",
    ]
    keys += ["micro_batch_size=2", "gradient_accumulation=4", "log.tensorboard=false"]
    summaries = {}
    for name, on in (("emulator", []), ("ipus", ["backend.name=poptorch"])):
        arguments = [DIGITS, "--set", *keys, *on, "--out", str(tmp_path / name)]
        ranks = {"POPDIST_NUM_INSTANCES": "2", "POPDIST_NUM_LOCAL_REPLICAS": "1"}
        if on:
            code, _, error = forked.run_ranks(
                2, "train", arguments, PYTHONPATH=DOUBLE, POPTORCH_DOUBLE_ALONE="1", **ranks
            )
        else:
            code, _, error = forked.run_command("train", *arguments)
        assert code == 0, error
        summaries[name] = read_summary(tmp_path / name)
    assert summaries["ipus"]["initial"] == pytest.approx(summaries["emulator"]["initial"], rel=1e-6)


def test_launchers_that_do_not_fit_are_refused(
    poptorch: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    with pytest.raises(
        BadInput, match="decoupled: each block runs in a process of its own: start it with torchrun"
    ):
        check(
            make_ipu_config("local_greedy", "poptorch", {"local": "decoupled"}), tmp_path / "none"
        )
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BadInput, match="one process drives all IPUs: start it without torchrun"):
        check(make_ipu_config(on="poptorch"), tmp_path / "none")


def test_an_sdk_that_is_not_switched_on_is_reported(poptorch: Any, monkeypatch: Any) -> None:
    import builtins

    real = builtins.__import__

    def fail_to_import_poptorch(name: str, *rest: Any, **keys: Any) -> Any:
        if name == "poptorch":
            raise ImportError("Unable to import PopTorch, activate your Poplar SDK")
        return real(name, *rest, **keys)

    monkeypatch.setattr(builtins, "__import__", fail_to_import_poptorch)
    with pytest.raises(BadInput, match="backend.name: poptorch: .*Unable to import PopTorch"):
        row.start(make_ipu_config(on="poptorch"), {})


SHORT = [
    "steps=4",
    "log.tensorboard=false",
    "gradient_accumulation=8",
    "micro_batch_size=4",
    "backend.name=poptorch",
]


def test_without_poptorch_the_command_prints_one_line(
    monkeypatch: Any, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    out = str(tmp_path / "run")
    arguments = [DIGITS, "--set", *SHORT, "method=gpipe", "--out", out]
    code, _, errors = run_here(tool, *arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2 and len(errors.splitlines()) == 1
    assert (
        errors.startswith("error: backend.name: poptorch: ") and "backend.name=emulator" in errors
    )
    assert all(part in errors for part in ("Poplar SDK 3.4", "Python 3.8", "torch 2.0.1"))
    assert not Path(out).exists()


def test_the_command_in_a_process_of_its_own(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    arguments = [
        DIGITS,
        "--set",
        *SHORT,
        "method=pipedream_flush",
        "stages=2",
        "--out",
        str(tmp_path / "run"),
    ]
    faulty = {
        "POPTORCH_DOUBLE_FAIL": "execute:24:RecoverableError:LINK_RESET",
        "POPTORCH_DOUBLE_RECORD": str(record),
    }
    code, out, error = forked.run_command("train", *arguments, PYTHONPATH=DOUBLE, **faulty)
    assert code == 0 and out.splitlines()[-1].startswith("throughput: "), error
    assert "(PipelinedExecution): 10 pipeline cycles an update, 80.0% of them full" in out
    # PopTorch's wrapped model calls torch's state_dict by position
    assert "Positional args" not in error and "Warning" not in error
    assert sum(name == "destroy" for name, _ in read_json(record)["events"]) >= 2


# ---- the analysis of a run


def assert_one_device(folder: Path, busy_share: float) -> Dict[str, Any]:
    """Assert that a run's analysis, in text, JSON and a comparison, names no single IPU or
    stage, and return it."""
    analysis: Dict[str, Any] = analyze_run(folder)
    (device,) = analysis["devices"]
    assert device["covers"] == "all IPUs" and device["busy_ns"] > 0
    for key in ("utilization", "bubble_fraction", "imbalance"):
        assert analysis[key] is None, key
    # a slow disk may make a checkpoint the bottleneck, which names no stage
    assert analysis["bottleneck"] is None or analysis["bottleneck"]["stage"] is None
    assert (
        device["utilization"]
        is analysis["overlap"]["share"]
        is analysis["overlap"]["hidden_ns"]
        is None
    )
    assert analysis["stages"] == analysis["links"] == analysis["staleness"] == []
    assert sum(device[part] for part in PARTS) == analysis["span_ns"]
    # planned as PopTorch's pipeline runs it, here as in the summary
    assert analysis["planned_bubble_fraction"] == pytest.approx(1 - busy_share)
    summary = read_summary(folder)
    assert summary["planned_bubble_fraction"] == analysis["planned_bubble_fraction"]
    assert summary["utilization"] is summary["bubble_fraction"] is None
    text = format_analysis(analysis)
    assert "all IPUs as one device" in text and "0 (all IPUs)" in text and "known" in text
    assert (
        "move work" not in text
        and "stages" not in text.split("note:")[0]
        and "bubble" not in text.split("note:")[0]
    )
    return analysis


@pytest.mark.parametrize("stages, replicas", [(2, 1), (4, 2), (8, 1)])
def test_the_analysis_takes_all_ipus_as_one_device(
    stages: int, replicas: int, tmp_path: Path, poptorch: Any, monkeypatch: Any, capsys: Any
) -> None:
    """Story: the host sees calls of all IPUs together as device 0, and every other device was
    reported as 100 % idle."""
    deep = nn.Sequential(*[nn.Linear(12, 12) for _ in range(7)], nn.Linear(12, 4))
    train_small_run(
        make_ipu_config("pipedream_flush", "poptorch", stages=stages, replicas=replicas),
        tmp_path / "ipu",
        model=deep,
    )
    assert_one_device(tmp_path / "ipu", 16 / (16 + 2 * stages - 2))
    png, html = tmp_path / "timeline.png", tmp_path / "page.html"
    arguments = (str(tmp_path / "ipu"), "--png", str(png), "--html", str(html))
    code, _, _ = run_here(analyze_tool, *arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert (
        code == 0 and png.read_bytes()[1:4] == b"PNG" and '"covers": "all IPUs"' in html.read_text()
    )


@pytest.mark.parametrize("method, busy_share", [("naive", 1 / 4), ("local_greedy", 16 / 22)])
def test_the_analysis_of_other_executions_of_all_ipus(
    method: str, busy_share: float, tmp_path: Path, poptorch: Any
) -> None:
    train_small_run(make_ipu_config(method, "poptorch", stages=4), tmp_path / "ipu", "mlp")
    analysis = assert_one_device(tmp_path / "ipu", busy_share)
    train_small_run(make_ipu_config(method, stages=4), tmp_path / "emulator", "mlp")
    # device 0 of the emulator's trace is another device than all IPUs
    for figure in compute_differences(analysis, analyze_run(tmp_path / "emulator")):
        assert figure["difference"] is None or not figure["name"].startswith("devices[")


@pytest.mark.parametrize("blocks", mark_slow([2, 4], lambda blocks: blocks == 2))
def test_the_analysis_of_blocks_on_ipus_of_their_own(blocks: int, tmp_path: Path) -> None:
    """Each block is a device with its stage; checkpoints and evaluations do not count as bubble."""
    keys = [*SHORT[:-1], "checkpoint.every=2", "method=local_greedy", f"stages={blocks}"]
    decoupled = ["backend.name=poptorch", "backend.ipu.local=decoupled"]
    arguments = [DIGITS, "--set", *keys, *decoupled, "--out", str(tmp_path / "run")]
    code, _, error = forked.run_ranks(blocks, "train", arguments, PYTHONPATH=DOUBLE)
    assert code == 0 and "Positional args" not in error, error
    analysis = analyze_run(tmp_path / "run")
    assert [device["index"] for device in analysis["devices"]] == list(range(blocks))
    for device in analysis["devices"]:
        assert (
            device["stages"] == [device["index"]]
            and device["busy_ns"] > 0
            and "covers" not in device
        )
        assert device["outside_ns"] > 0


@pytest.mark.slow
def test_blocks_do_not_wait_for_results_that_are_read_late(tmp_path: Path) -> None:
    """Rank 0 reads losses only for a line of metrics: if the other ranks waited to send their
    results, and rank 0 for activations, all would deadlock."""
    keys = [
        "steps=40",
        "log.tensorboard=false",
        "gradient_accumulation=2",
        "micro_batch_size=4",
        "log.every=40",
    ]
    keys += ["method=local_greedy", "stages=4", "method_args.block_accumulation=[1,2,4,1]"]
    decoupled = ["backend.name=poptorch", "backend.ipu.local=decoupled"]
    arguments = [DIGITS, "--set", *keys, *decoupled, "--out", str(tmp_path / "blocks")]
    code, _, error = forked.run_ranks(4, "train", arguments, PYTHONPATH=DOUBLE)
    assert code == 0, error
    train(load_config(DIGITS, keys), tmp_path / "emulator", quiet=True)
    assert_states_close(
        read_weights(tmp_path / "blocks"), read_weights(tmp_path / "emulator"), 1e-6
    )
    assert_close_losses(tmp_path / "blocks", tmp_path / "emulator", 1e-6)


def test_blocks_on_ipus_of_their_own_give_the_emulators_weights(tmp_path: Path) -> None:
    """Decoupled blocks under a launcher's variables equal the emulator, with a block that
    accumulates over two updates; then a device error occurs in one process."""
    keys = [
        *SHORT[:-1],
        "method=local_greedy",
        "stages=2",
        "method_args.block_accumulation=[1,2]",
        "optimizer.momentum=0.9",
    ]
    decoupled = ["backend.name=poptorch", "backend.ipu.local=decoupled"]
    arguments = [DIGITS, "--set", *keys, *decoupled, "--out", str(tmp_path / "blocks")]
    code, out, error = forked.run_ranks(2, "train", arguments, PYTHONPATH=DOUBLE)
    assert code == 0 and "each in a process of its own" in out, error
    train(load_config(DIGITS, keys), tmp_path / "emulator", quiet=True)
    assert_same_weights(tmp_path / "blocks", tmp_path / "emulator")
    assert_close_losses(tmp_path / "blocks", tmp_path / "emulator", 1e-6)
    one, other = (read_summary(tmp_path / name) for name in ("blocks", "emulator"))
    for a, b in zip(one["blocks"], other["blocks"]):
        assert a == pytest.approx(b, rel=1e-5)
    assert one["links"][0]["bytes_per_microbatch"] == other["links"][0]["bytes_per_microbatch"]
    broken = {"POPTORCH_DOUBLE_FAIL": "execute:92:RecoverableError:PARTITION_RESET"}
    code, out, error = forked.run_ranks(
        2, "train", [*arguments, "--overwrite"], PYTHONPATH=DOUBLE, **broken
    )
    (complaint,) = [line for line in error.splitlines() if line.startswith("error: ")]
    assert (
        code != 0 and "device error (PARTITION_RESET)" in complaint and "--resume" in complaint
    ), error
