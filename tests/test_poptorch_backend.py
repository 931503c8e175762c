"""Compare training on the double of PopTorch with the emulator: weights are equal bit for bit
where the accumulation is a power of two; and errors of a device are retried or reported in one
line. Nothing here ran on an IPU."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List, Tuple

import pytest
import torch
from torch import nn

from ipu_pipe.backends.ipu.blocks import describe_block_errors
from ipu_pipe.backends.ipu.feed import convert_label
from ipu_pipe.backends.ranks import read_torch_version
from ipu_pipe.cli import train as tool
from ipu_pipe.config.load import load_config
from ipu_pipe.data import load_data
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
    find_compilation,
    make_ipu_config,
    make_ipu_model,
    simulate_poprun,
    train_small_run,
)
from tests.support.models import Composed
from tests.support.runs import (
    DIGITS,
    ROOT,
    assert_close_losses,
    assert_same,
    assert_same_weights,
    assert_states_close,
    find_checkpoint,
    list_faults,
    read_column,
    read_json,
    read_summary,
    read_trace_file,
    read_weights,
)
from tests.support.slow import mark_slow

pytest_plugins = ["poptorch_double"]  # the fixture `poptorch`
DOUBLE = str(ROOT / "tests" / "poptorch_double" / "path")
EVALUATION = 7  # calls: 50 test samples, 8 a call on 4 stages
PLAIN = {"name": "sgd", "lr": 0.05}


# stages of models, where a case has no others
CUTS = {"residual": ["1", "2", "4"], "convolution": ["1", "2", "3"]}


def compare_with_emulator(
    tmp_path: Path,
    method: str = "gpipe",
    name: str = "residual",
    ipu: Any = None,
    objects: Any = None,
    **keys: Any,
) -> Any:
    """Run on the double and on the emulator, assert equal weights and close losses and
    evaluations, and return the double's summary."""
    if name in CUTS:
        keys.setdefault("stages", CUTS[name])
    ours, theirs = (
        train_small_run(config, tmp_path / folder, name, **(objects or {}))
        for folder, config in {
            "ipu": make_ipu_config(method, "poptorch", ipu, **keys),
            "emulator": make_ipu_config(method, **{**keys, "precision": "float32"}),
        }.items()
    )
    assert_same_weights(tmp_path / "ipu", tmp_path / "emulator")
    assert_close_losses(tmp_path / "ipu", tmp_path / "emulator", 1e-6)
    for when in ("initial", "final"):
        assert ours[when] == pytest.approx(theirs[when], rel=1e-5)
    return ours


# ---- the emulator's weights

ADAM = {"name": "adam", "lr": 0.01, "betas": [0.8, 0.95], "weight_decay": 0.02}
ADAMW = {"name": "adamw", "lr": 0.01, "no_decay": "norms_and_biases", "weight_decay": 0.1}
COSINE = {"name": "cosine", "warmup_steps": 2}
RMSPROP = functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True)
WEIGHTED = Composed(
    lambda m, output, y: (
        nn.functional.cross_entropy(output, y, reduction="none") * m.factors[y]
    ).mean(),
    factors=torch.tensor([1.0, 2.0, 0.5, 1.0]),  # of the labels
)
SAME: Dict[str, Dict[str, Any]] = {
    "pipeline with BatchNorm": {},
    "1F1B": {"method": "pipedream_flush", "name": "convolution", "optimizer": ADAMW, "lr_schedule": COSINE},
    "sharded, a weight of two IPUs": {"method": "naive", "name": "tied", "gradient_accumulation": 2},
    "a state dict with a version": {"name": "versioned", "stages": 2, "steps": 2},
    "a loss with a tensor": {"method": "local_greedy", "name": "mlp", "steps": 2, "objects": {"loss": WEIGHTED}},
    "an optimizer of the user's own": {"name": "mlp", "objects": {"optimizer": RMSPROP}},
    # Story: evaluations detach the device, and attaching restored the rate read at the detachment.
    "a rate that changes at an evaluation": {
        "name": "mlp", "lr_schedule": {"name": "step", "milestones": [1], "gamma": 0.1}, "steps": None, "epochs": 2,
        "checkpoint": {}, "gradient_accumulation": 64,
    },
    "skip connections": {"name": "skipping", "lr_schedule": {"name": "step", "milestones": [0.1], "gamma": 0.5}},
    "one IPU": {"stages": 1, "gradient_accumulation": 1},
    "stages sharing IPUs": {"ipu": {"ipus": [0, 0, 1, 1, 1]}, "stages": ["1", "2", "3", "4"], "gradient_accumulation": 4},
    "clipped, device iterations": {"clip": {"norm": 0.1}, "ipu": {"device_iterations": 2}},
    "replicas": {"replicas": 2, "ipu": {"broadcast_buffers": False, "auto_round_num_ipus": True}},
    "asynchronous loading": {"ipu": {"data_loading": {"mode": "async"}, "device_iterations": 2}, "replicas": 2, "name": "mlp"},
    "two chunks, BatchNorm": {"method": "local_chunked", "stages": ["1", "4"]},
    "the last layers alone": {"method": "last_layers", "name": "convolution", "optimizer": ADAM},
    "rates by block": {"method": "local_greedy", "name": "mlp", "method_args": {"block_rates": [1, 0.5, 2, 1]}},
    "32.32, all set": {
        "precision": "32.32", "recompute": True,
        "ipu": {"options": {"Training.setMeanAccumulationAndReplicationReductionStrategy": "PostAndLoss"}, "loss_scaling": 128,
                "stochastic_rounding": True, "inference_device_iterations": 7},
    },
}  # fmt: skip


# which `make test` runs
QUICK = {
    "pipeline with BatchNorm", "sharded, a weight of two IPUs", "replicas", "asynchronous loading", "rates by block",
    "32.32, all set", "a state dict with a version", "a loss with a tensor", "an optimizer of the user's own",
}  # fmt: skip


@pytest.mark.parametrize("case", mark_slow(SAME, QUICK.__contains__))
def test_weights_are_the_emulators_to_the_bit(poptorch: Any, tmp_path: Path, case: str) -> None:
    summary = compare_with_emulator(tmp_path, **SAME[case])
    assert summary["backend"] == "poptorch" and summary["device"] == "ipu"


def train_mlp(out: Path, ipu: Any = None, method: str = "gpipe", **keys: Any) -> Dict[str, Any]:
    """Train a perceptron on the double, by the keys of a config, and return the summary."""
    return train_small_run(make_ipu_config(method, "poptorch", ipu, **keys), out, "mlp")


def test_the_updates_of_a_call_have_the_rate_of_its_first(tmp_path: Path, poptorch: Any) -> None:
    """A call of several updates keeps one rate, as in Graphcore's own training code. Story: a
    warm-up and a cosine were refused."""
    train_mlp(tmp_path, {"device_iterations": 2}, lr_schedule=COSINE)
    job = build(make_ipu_config(lr_schedule=COSINE), make_ipu_model("mlp"), Source())
    assert read_column(tmp_path, "lr") == [job.rate(k) for k in (0, 0, 2, 2, 4, 4)]


def test_output_modes_report_the_same_losses_but_for_final(poptorch: Any, tmp_path: Path) -> None:
    losses = {}
    for mode in ("all", "sum", "final"):
        train_mlp(tmp_path / mode, {"output_mode": mode})
        losses[mode] = read_column(tmp_path / mode, "train_loss")
        # the mode chooses what comes back, not what is computed
        assert_same_weights(tmp_path / "all", tmp_path / mode)
    assert losses["sum"] == pytest.approx(losses["all"], rel=1e-6)
    assert losses["final"] != pytest.approx(losses["all"], rel=1e-3)


@pytest.mark.parametrize("precision", ["16.16", "16.32"])
def test_half_precision_ends_in_a_float32_model(
    poptorch: Any, tmp_path: Path, precision: str
) -> None:
    train_small_run(make_ipu_config(), tmp_path / "float32", "mlp")
    train_mlp(tmp_path / "half", {"loss_scaling": 128.0}, precision=precision)
    weight = read_weights(tmp_path / "half")["0.0.weight"]
    assert weight.dtype == torch.float32
    assert_close_losses(tmp_path / "half", tmp_path / "float32", 2e-3)
    assert torch.equal(weight, weight.half().float()) == (precision == "16.16")
    assert find_compilation(poptorch).optimizer["variables"]["loss_scaling"][0] == 128.0
    calls = poptorch.recorded.of("PoplarExecutor.__call__")
    assert calls and all(
        "float16" in str(call["args"]) and "float32" not in str(call["args"]) for call in calls
    )
    labels = torch.tensor([1e5, 0.1])
    assert torch.equal(convert_label(labels), labels)


# ---- the calls of PopTorch


def test_stages_and_the_loss_are_laid_out_as_in_the_model(poptorch: Any, tmp_path: Path) -> None:
    train_mlp(tmp_path)
    compiled, evaluated = (find_compilation(poptorch, training) for training in (True, False))
    for one in (compiled, evaluated):
        assert (one.strategy, one.stages) == ("PipelinedExecution", {0: 0, 1: 1, 2: 2, 3: 3})
    assert evaluated.options["device_iterations"] == 4
    assert compiled.parameters["body.model.2.0.weight"] == 2
    loss = compiled.losses[-1]
    assert (loss.function, loss.stage, loss.final) == ("identity_loss", 3, True)
    groups = compiled.optimizer["groups"]
    constants = {
        name for group in groups for name, (_, constant) in group.items() if constant
    }  # the rate alone may change
    assert constants == {"momentum", "dampening", "weight_decay", "nesterov"}


def test_local_losses_are_computed_where_their_blocks_are(poptorch: Any, tmp_path: Path) -> None:
    summary = train_mlp(tmp_path, method="local_greedy")
    compiled = find_compilation(poptorch)
    local = [("cross_entropy", ipu) for ipu in range(4)]
    assert [(loss.function, loss.ipu) for loss in compiled.losses] == [*local, ("identity_loss", 3)]
    heads = {name: ipu for name, ipu in compiled.parameters.items() if "heads" in name}
    assert heads == {f"body.heads.{i}.{kind}": i for i in range(3) for kind in ("weight", "bias")}
    assert summary["blocks"][0]["test_loss"] is not None


def test_rates_reach_the_ipu_when_they_change(poptorch: Any, tmp_path: Path) -> None:
    for schedule, count in ((None, 0), ({"name": "linear"}, 5)):
        train_mlp(tmp_path, lr_schedule=schedule)
        assert poptorch.recorded.names().count("PoplarExecutor.setOptimizer") == count


def test_a_small_pod_is_shared_by_training_and_evaluation(
    poptorch: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    stays = {"detach_for_evaluation": False}
    monkeypatch.setenv("POPTORCH_DOUBLE_IPUS", "4")
    shared = train_mlp(tmp_path / "shared")
    with pytest.raises(
        RunFault, match=r"poptorch_cpp_error: Failed to acquire 4 IPU\(s\).*gc-info"
    ):
        train_mlp(tmp_path / "both", stays)
    monkeypatch.setenv("POPTORCH_DOUBLE_IPUS", "8")
    assert train_mlp(tmp_path / "both", stays)["final"] == shared["final"]
    monkeypatch.setenv("POPTORCH_DOUBLE_IPUS", "2")
    poptorch.recorded.compilations.clear()
    with pytest.raises(BadInput, match="this machine has no device of 4 IPUs.*compile_only=true"):
        train_mlp(tmp_path / "few")
    assert poptorch.recorded.compilations == []
    train_mlp(tmp_path / "few", {"options": {"useIpuModel": True}})


def test_times_cycles_and_profiles_are_reported(poptorch: Any, tmp_path: Path) -> None:
    ipu = {
        "options": {"logCycleCount": True},
        "profile": {"directory": str(tmp_path / "profile")},
    }
    summary = train_mlp(tmp_path / "run", ipu)
    report = read_json(tmp_path / "run" / "ipu.json")
    assert report["pipeline_cycles_an_update"] == 16 + 2 * 4 - 2
    assert report["cycles_of_the_last_call"] == 22000
    assert summary["planned_utilization"] == report["full_cycles_share"] == 16 / 22
    assert report["latency_seconds"]["round_trip"] > report["latency_seconds"]["compute"] > 0
    device = report["profiles"]["training"]["devices"][1]
    figures = [device[key] for key in ("memory_bytes", "cycles", "exchange_in_bytes")]
    assert figures == [4 * 3000, 1000, 2000]
    assert report["profiles"]["training"]["ipus"] == 4 and "inference" in report["profiles"]
    events = read_trace_file(tmp_path / "run")["traceEvents"]
    kinds = Counter(event["cat"] for event in events if event["ph"] == "X")
    assert [kinds[kind] for kind in ("update", "send", "recv", "evaluate")] == [6, 6, 6, 2]
    counters = {event["name"]: event["args"]["value"] for event in events if event["ph"] == "C"}
    assert counters["IPU cycles an update"] == 22000 and counters["samples/s"] > 0


def test_the_first_call_is_the_warm_up_and_its_updates_share_its_time(
    poptorch: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Story: updates of one call were timed one by one, so that all but the first took no time,
    and throughput came out too high."""
    now, takes = [0.0], iter([100.0, 1.0, 1.0])

    class ClockedExecutor(poptorch.PoplarExecutor):  # type: ignore[misc,name-defined]
        def __call__(self, *args: Any) -> Any:
            now[0] += next(takes) if self._training else 0.0
            return super().__call__(*args)

    monkeypatch.setattr(sys.modules["poptorch._executor"], "PoplarExecutor", ClockedExecutor)
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    summary = train_mlp(tmp_path, {"device_iterations": 2})
    assert summary["throughput_samples_per_second"] == 4 * 32 / 2
    assert read_column(tmp_path, "samples_per_second") == [32 / 50] * 2 + [64.0] * 4


def test_callbacks_see_the_newest_weights_or_none(poptorch: Any, tmp_path: Path) -> None:
    """Story: callbacks got the initial weights for the whole run."""
    models: List[Any] = []
    at_rest: List[Tuple[int, Dict[str, torch.Tensor]]] = []

    class WeightRecorder(Callback):
        def on_step(self, moment: Any) -> None:
            models.append(moment.model)

        def on_checkpoint(self, moment: Any) -> None:
            weights = {name: value.clone() for name, value in moment.model.state_dict().items()}
            at_rest.append((moment.step, weights))

        on_evaluation = on_end = on_checkpoint

    settings = make_ipu_config(on="poptorch", evaluate={"every": 0.3})
    train_small_run(settings, tmp_path, "mlp", callbacks=[WeightRecorder()])
    assert models == [None] * 6 and [step for step, _ in at_rest] == [2, 4, 6, 6, 6]
    for step, weights in at_rest:
        assert_same(weights, read_weights(tmp_path, step))


# ---- resuming


def interrupt_run(out: Path, settings: Any, at: int) -> None:
    """Train until an interrupt before update `at`."""
    with pytest.raises(KeyboardInterrupt):
        train_small_run(settings, out, "mlp", data=Source(at * 16, KeyboardInterrupt()))


def resume_mlp(out: Path, ipu: Any = None, on: str = "poptorch", **keys: Any) -> None:
    """Resume the run of a perceptron with other keys."""
    train_small_run(make_ipu_config(on=on, ipu=ipu, **keys), out, "mlp", resume=True)


@pytest.mark.parametrize(
    "optimizer", mark_slow([SGD, ADAM, PLAIN], lambda optimizer: optimizer is ADAM)
)
def test_a_resumed_run_ends_with_the_same_weights(
    poptorch: Any, tmp_path: Path, optimizer: Any
) -> None:
    # the torch of PopTorch 3.4 has no sharded checkpoints
    form = "sharded" if read_torch_version() >= (2, 4) else "single"
    keys = {
        "optimizer": optimizer,
        "lr_schedule": COSINE,
        "checkpoint": {"every": 2, "format": form},
    }
    train_mlp(tmp_path / "straight", **keys)
    broken = poptorch.UnrecoverableError("broken", "poplar_unrecoverable_error")
    poptorch.recorded.fail("execute", EVALUATION + 5, broken)
    with pytest.raises(RunFault, match="update 4: poplar_unrecoverable_error: broken"):
        train_mlp(tmp_path / "resumed", **keys)
    resume_mlp(tmp_path / "resumed", stages=2, **keys)  # on other IPUs
    assert_same_weights(tmp_path / "straight", tmp_path / "resumed")
    # one process has nothing to shard
    names = {path.name for path in find_checkpoint(tmp_path / "resumed").iterdir()}
    assert "model.safetensors" in names and not any("-of-" in name for name in names)


COMBINED = {"use_combined_accum": True}
HALF_VELOCITIES = {"optimizer_options": {"velocity_accum_type": "float16"}}


@pytest.mark.parametrize("ipu, optimizer, other, tolerance", [
    ({}, SGD, {"loss_scaling": 4.0}, 0),
    pytest.param(COMBINED, SGD, {"loss_scaling": 4.0}, 0, marks=pytest.mark.slow),
    pytest.param({"device_iterations": 2}, ADAM, {"loss_scaling": 4.0}, 0, marks=pytest.mark.slow),
    # PopTorch would misread the memory of the other type
    pytest.param({}, SGD, HALF_VELOCITIES, 1e-4, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_loss_scaling_that_changes_changes_no_weight(
    poptorch: Any, tmp_path: Path, ipu: Any, optimizer: Any, other: Any, tolerance: float
) -> None:
    """PopTorch stores velocities times the loss scaling: they are rescaled where it changes, in a
    run and between runs. Story: they were loaded unchanged, and the momentum was off by the ratio."""
    train_mlp(tmp_path / "straight", ipu, optimizer=optimizer)
    changing = make_ipu_config(
        on="poptorch",
        ipu={**ipu, "loss_scaling": [[0, 2.0], [2, 64.0], [5, 0.5]]},
        optimizer=optimizer,
    )
    train_small_run(changing, tmp_path / "changing", "mlp")
    assert_same_weights(tmp_path / "straight", tmp_path / "changing")
    interrupt_run(tmp_path / "resumed", changing, 4)
    resume_mlp(tmp_path / "resumed", {**ipu, **other}, optimizer=optimizer)
    weights = [read_weights(tmp_path / name) for name in ("straight", "resumed")]
    assert_states_close(*weights, tolerance)
    assert not poptorch.recorded.warnings
    written = load_config(tmp_path / "changing" / "config.yaml")
    assert written.ipu.loss_scaling == changing.ipu.loss_scaling


@pytest.mark.parametrize("first, second", [({}, COMBINED), (COMBINED, {})])
def test_velocities_of_the_other_variant_are_refused(
    poptorch: Any, tmp_path: Path, first: Any, second: Any
) -> None:
    """Velocities of the other variant have other names. Story: PopTorch warned, and training
    continued without momentum."""
    interrupt_run(tmp_path, make_ipu_config(on="poptorch", ipu=first), 4)
    with pytest.raises(BadInput, match="the state that was loaded has no Accl.*init_from"):
        resume_mlp(tmp_path, second)
    assert not poptorch.recorded.warnings


def test_nesterov_momentum_is_pytorchs(poptorch: Any, tmp_path: Path) -> None:
    """Nesterov momentum equals PyTorch's if the mean is a running mean (PopART reads the
    accumulator as it is). Story: it was refused, though PopTorch has it."""
    nesterov = {**SGD, "nesterov": True}
    strategy = "Training.setMeanAccumulationAndReplicationReductionStrategy"
    train_mlp(
        tmp_path / "ipu",
        {"options": {strategy: "Running"}, "loss_scaling": 64.0},
        optimizer=nesterov,
    )
    train_small_run(make_ipu_config(optimizer=nesterov), tmp_path / "emulator", "mlp")
    assert_states_close(read_weights(tmp_path / "emulator"), read_weights(tmp_path / "ipu"), 1e-6)


@pytest.mark.slow
def test_weights_change_the_backend(poptorch: Any, tmp_path: Path) -> None:
    for first, second in (("emulator", "poptorch"), ("poptorch", "emulator")):
        interrupt_run(tmp_path / first, make_ipu_config(on=first, optimizer=PLAIN), 4)
        resume_mlp(tmp_path / first, on=second, optimizer=PLAIN)
    assert_same_weights(tmp_path / "emulator", tmp_path / "poptorch")
    # the loops show that optimizer state is refused both ways; its weights alone are not
    interrupt_run(tmp_path / "other", make_ipu_config(), 4)
    initial = find_checkpoint(tmp_path / "other", 4) / "model.safetensors"
    train_mlp(tmp_path / "anew", init_from=str(initial))


# ---- faults


@pytest.mark.slow
def test_a_recoverable_error_is_retried_once_from_the_last_checkpoint(
    poptorch: Any, tmp_path: Path, capsys: Any
) -> None:
    """The machine has as many IPUs as the job needs, so the next session gets them only after all
    of the lost one is gone."""
    asynchronous = {"data_loading": {"mode": "async"}}
    train_mlp(tmp_path / "plain", asynchronous)
    faults = [("execute", EVALUATION + call) for call in (1, 4, 5)]  # before a checkpoint, after it
    for event, call in [*faults, ("copyWeightsToHost", 1)]:
        poptorch.recorded.fail(event, call)
        train_mlp(tmp_path / "retried", asynchronous)
        assert_same_weights(tmp_path / "plain", tmp_path / "retried")
        repeated = (call - EVALUATION - 1) % 2 if event == "execute" else 0
        assert event != "execute" or f"repeating {repeated} updates" in capsys.readouterr().err
        assert poptorch._device.ipus_by_holder == {}


MEMORY, DEAD = "poplar_graph_memory_allocation_error", "poplar_unrecoverable_error"
TWICE = r"\(IPU_RESET\) for the second time since the last checkpoint.*--resume"


@pytest.mark.parametrize("event, calls, error, message", [
    ("compile", [1], lambda p: p.Error("Out of memory on tile 0", MEMORY), "take more stages"),
    ("execute", [1], lambda p: p.UnrecoverableError("dead", DEAD), "poplar_unrecoverable_error: dead"),
    ("attach", [1], lambda p: p.Error("Failed to acquire 4 IPU(s)", "poptorch_cpp_error"), "POPTORCH_WAIT_FOR_IPU=1"),
    ("execute", [1], lambda p: AssertionError("Invalid batch\n dimension"), "AssertionError: Invalid batch dimension"),
    ("execute", [EVALUATION + 3, EVALUATION + 5], lambda p: None, TWICE),
])  # fmt: skip
def test_errors_of_all_families_are_reported_in_one_line_and_keep_no_ipu(
    poptorch: Any, tmp_path: Path, event: str, calls: List[int], error: Any, message: str
) -> None:
    for call in calls:
        poptorch.recorded.fail(event, call, error(poptorch))
    with pytest.raises(RunFault, match=message) as caught:
        train_mlp(tmp_path, checkpoint={"every": None})
    assert "\n" not in str(caught.value) and str(caught.value).startswith("poptorch: ")
    assert poptorch._device.ipus_by_holder == {}


def test_ctrl_c_leaves_no_wrapper_and_no_ipu_in_use(poptorch: Any, tmp_path: Path) -> None:
    model = make_ipu_model("residual")

    def list_kinds() -> Any:
        parts = [*model.modules(), *model.parameters(), *model.buffers()]
        return [(type(part), len(getattr(part, "_forward_pre_hooks", ()))) for part in parts]

    before = list_kinds()
    poptorch.recorded.fail("execute", 12, KeyboardInterrupt())
    settings = make_ipu_config(on="poptorch", stages=CUTS["residual"])
    with pytest.raises(KeyboardInterrupt):
        train_small_run(settings, tmp_path, model=model)
    assert list_kinds() == before and poptorch._device.ipus_by_holder == {}
    assert_same(dict(model.state_dict()), read_weights(tmp_path, 4))


def test_a_divergence_in_a_block_stays_one(poptorch: Any) -> None:
    with pytest.raises(Divergence) as raised, describe_block_errors(1, "training"):
        raise Divergence("update 3: the training loss is nan", "lower optimizer.lr")
    assert raised.value.reason == "rank 1, block 1: update 3: the training loss is nan"
    assert str(raised.value).endswith("; lower optimizer.lr")


# ---- before anything compiles


def make_odd_model() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 64), OddModel())


def make_composed_model(forward: Any) -> nn.Module:
    """Return a model whose first stage is a function of itself and its input."""
    first = Composed(forward, inner=nn.Linear(12, 12), seen=torch.zeros((), dtype=torch.int64))
    return nn.Sequential(first, nn.Linear(12, 4))


# what PopTorch would accept but compute differently


def count_calls(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.seen += 1
    return m.inner(x)


def subtract_mean(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.inner(x)
    with torch.no_grad():
        mean = y.mean()
    return y - mean


def make_run_of_bytes() -> Dict[str, Any]:
    """Return a model that takes bytes, and data that stay bytes."""
    model = Composed(lambda m, x: m.linear(x.float()), linear=nn.Linear(12, 4))
    return {"model": model, "data": load_data("synthetic", shape=[12], subset=64, bytes=True)}


def make_groups(**of_biases: float) -> Dict[str, Any]:
    """Return a model and an optimizer whose groups differ."""
    model = make_ipu_model("mlp")
    wide = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    groups: Any = [{"params": wide}, {"params": biases, **of_biases}]
    return {"model": model, "optimizer": torch.optim.SGD(groups, lr=0.05)}


def lose_doubled(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(Own.apply(output), y)


ODD_STAGES = ["1.2", "1.4", "1.6"]
WEIGHED_ALONE = {"method": "naive", "gradient_accumulation": 1}
# keys of the config, a function that makes objects of the build, and parts of the one line; none: it is accepted
UNFIT: List[Tuple[Dict[str, Any], Any, List[str]]] = [
    ({"replicas": 2, "stages": CUTS["residual"]}, lambda: {"model": make_ipu_model("residual")},
     ["backend.ipu.broadcast_buffers: true", "1.inner.0.running_mean", "GroupNorm"]),
    ({"stages": ODD_STAGES}, lambda: {"model": make_odd_model()},
     ["model: 1.2.table.values: used by stages 1, 2 on IPUs 1, 2", "backend.ipu.ipus"]),
    ({"stages": ODD_STAGES, "method": "naive"}, lambda: {"model": make_odd_model()}, []),
    ({"stages": ODD_STAGES, "ipu": {"ipus": [0, 1, 1, 1]}}, lambda: {"model": make_odd_model()}, []),
    ({}, lambda: {"model": make_ipu_model("tied")}, ["model: 1.0.weight: used by stages 1, 3 on IPUs 1, 3"]),
    ({"method": "local_greedy"}, lambda: {"model": make_ipu_model("tied")},
     ["1.0.weight on stage 1 and 3.0.weight on stage 3 are one shared weight", "two gradients"]),
    ({}, lambda: {"optimizer": functools.partial(torch.optim.Adagrad, lr=0.1)}, ["optimizer: Adagrad: "]),
    ({}, lambda: {"optimizer": functools.partial(torch.optim.AdamW, amsgrad=True)}, ["optimizer.amsgrad: true"]),
    # the optimizer of the caller counts, not the config's
    ({"optimizer": {**SGD, "nesterov": True}}, lambda: {"optimizer": functools.partial(torch.optim.SGD, lr=0.1)}, []),
    ({}, lambda: make_groups(lr=0.1), ["optimizer: parameter groups with different learning rates: "]),
    ({}, lambda: make_groups(weight_decay=0.1), []),
    ({"stages": {"finest": 16}, "gradient_accumulation": 32}, dict, ["the stage is empty"]),
    ({"ipu": {"device_iterations": 3}, "steps": None, "checkpoint": {}}, dict, ["comes after 20 updates: "]),
    ({"ipu": {"device_iterations": 4}, "steps": 6, "checkpoint": {}}, dict, ["comes after 6 updates: "]),
    ({"ipu": {"device_iterations": 4}, "steps": 12, "checkpoint": {"every": 6}}, dict, ["comes after 6 updates: "]),
    ({"ipu": {"device_iterations": 4}, "steps": 12, "evaluate": {"steps": 3}, "checkpoint": {}}, dict, ["after 3 updates: "]),
    ({"loss_weight": "tokens"}, dict, ["loss_weight: tokens: PopTorch averages"]),
    ({**WEIGHED_ALONE, "replicas": 2}, lambda: {"loss_weight": len}, ["loss_weight: (given in Python)"]),
    ({**WEIGHED_ALONE, "loss_weight": "tokens"}, dict, ["loss_weight: tokens: a microbatch of weight 0"]),
    ({}, lambda: {"loss": lose_doubled}, ["model: Own: "]),
    ({"precision": "16.32", "stages": 1}, make_run_of_bytes, ["precision: 16.32: inputs are uint8"]),
    ({"stages": ["1"]}, lambda: {"model": make_composed_model(lambda m, x: Own.apply(m.inner(x)))},
     ["model: Own: ", "never calls its backward"]),
    ({"stages": ["1"]}, lambda: {"model": make_composed_model(count_calls)},
     ["model: 0.seen: training writes an integer buffer"]),
    ({"stages": ["1"]}, lambda: {"model": make_composed_model(subtract_mean)},
     ["model: mean in 0", "torch.no_grad() has no effect inside a forward"]),
]  # fmt: skip


@pytest.mark.parametrize("keys, make_objects, words", UNFIT)
def test_what_ipus_would_not_train_as_it_stands_is_refused(
    poptorch: Any, keys: Any, make_objects: Any, words: List[str]
) -> None:
    objects = {"model": make_ipu_model("mlp"), "data": Source(), **make_objects()}
    settings = make_ipu_config(on="poptorch", **keys)
    if not words:
        build(settings, **objects)
        return
    (fault,) = list_faults(build, settings, **objects)
    assert all(part in fault for part in words), fault


def test_data_that_cannot_go_to_another_process_is_refused(poptorch: Any, tmp_path: Path) -> None:
    source = Source()
    source.odd = lambda: None  # type: ignore[attr-defined]
    settings = make_ipu_config(on="poptorch", ipu={"data_loading": {"mode": "async"}})
    line = "data_loading.mode: async: the data cannot go to another process"
    with pytest.raises(BadInput, match=line):
        train_small_run(settings, tmp_path, "mlp", data=source)


# ---- launchers


def test_poprun_sets_replicas_and_no_forbidden_method_is_called(
    poptorch: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    settings = {"replicas": 2, "stages": 2}
    train_small_run(make_ipu_config(**settings), tmp_path / "emulator", "mlp")
    simulate_poprun(monkeypatch, 1, 0, 2)
    # which joining sets
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    train_mlp(tmp_path / "poprun", **settings)
    assert_same_weights(tmp_path / "poprun", tmp_path / "emulator")
    compiled = find_compilation(poptorch)
    assert compiled.options["replication_factor"] == 2 and compiled.ipus == 4
    with pytest.raises(BadInput, match=r"replicas: 4: poprun started 2 \(--num-replicas\)"):
        train_mlp(tmp_path / "four", replicas=4, stages=2)


APART = {"method": "local_greedy", "ipu": {"local": "decoupled"}}


@pytest.mark.parametrize("launcher, keys, line", [
    ({"POPDIST_NUM_INSTANCES": "1"}, APART, "not under poprun"),
    ({}, APART, "decoupled: each block runs in a process of its own: start it with torchrun"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, {}, "one process drives all IPUs: start it without torchrun"),
])  # fmt: skip
def test_launchers_that_do_not_fit_are_refused(
    poptorch: Any, tmp_path: Path, monkeypatch: Any, launcher: Any, keys: Any, line: str
) -> None:
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match=line):
        check(make_ipu_config(on="poptorch", **keys), tmp_path / "none")


SHORT = [
    "steps=4", "log.tensorboard=false", "gradient_accumulation=8", "micro_batch_size=4", "backend.name=poptorch",
]  # fmt: skip


@pytest.mark.slow
def test_instances_evaluate_shares_of_the_test_set(tmp_path: Path) -> None:
    """Two instances of poprun, one with an additional batch, make the same number of calls,
    since their replicas wait for each other."""
    write_pictures(tmp_path, 2, train=8, val=150)
    keys = [
        "model.entry=models.mlp:mlp", "model.args={inputs: 192, width: 8, layers: 1, classes: 2}", "stages=2", "steps=2",
        f"data={{name: image_folder, size: 8, root: {tmp_path}}}", "method=gpipe", "replicas=2",
        "micro_batch_size=2", "gradient_accumulation=4", "log.tensorboard=false",
    ]  # fmt: skip
    train(load_config(DIGITS, keys), tmp_path / "emulator", quiet=True)
    arguments = [DIGITS, "--set", *keys, "backend.name=poptorch", "--out", str(tmp_path / "ipus")]
    ranks = {"POPDIST_NUM_INSTANCES": "2", "POPDIST_NUM_LOCAL_REPLICAS": "1"}
    code, _, error = forked.run_ranks(
        2, "train", arguments, PYTHONPATH=DOUBLE, POPTORCH_DOUBLE_ALONE="1", **ranks
    )
    assert code == 0, error
    ours, theirs = (read_summary(tmp_path / name)["initial"] for name in ("ipus", "emulator"))
    assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("module, parts", [
    ("", ("Poplar SDK 3.4", "Python 3.8", "torch 2.0.1", "backend.name=emulator")),
    ("raise ImportError('activate your Poplar SDK')", ("activate your",)),  # its own words
])  # fmt: skip
def test_without_poptorch_the_command_prints_one_line(
    monkeypatch: Any, capsys: Any, tmp_path: Path, module: str, parts: Any
) -> None:
    if module:
        (tmp_path / "poptorch.py").write_text(module)
        monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(ROOT)
    arguments = [DIGITS, "--set", *SHORT, "method=gpipe", "--out", str(tmp_path / "run")]
    code, _, errors = run_here(tool, *arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2 and len(errors.splitlines()) == 1
    assert errors.startswith("error: backend.name: poptorch: ")
    assert all(part in errors for part in parts)
    assert not (tmp_path / "run").exists()


def test_the_command_in_a_process_of_its_own(tmp_path: Path) -> None:
    keys = ["method=pipedream_flush", "stages=2", "--out", str(tmp_path / "run")]
    fault = "execute:24:RecoverableError:LINK_RESET"
    code, out, error = forked.run_command(
        "train", DIGITS, "--set", *SHORT, *keys, PYTHONPATH=DOUBLE, POPTORCH_DOUBLE_FAIL=fault
    )
    assert code == 0 and out.splitlines()[-1].startswith("throughput: "), error
    assert "(PipelinedExecution): 10 pipeline cycles an update, 80.0% of them full" in out
    # PopTorch's wrapped model calls torch's state_dict by position
    assert "Positional args" not in error and "Warning" not in error


# ---- the analysis of a run


@pytest.mark.parametrize(
    "method, stages, replicas, busy_share",
    [("pipedream_flush", 4, 2, 16 / 22), ("local_greedy", 4, 1, 16 / 22), ("naive", 4, 1, 1 / 4)],
)
def test_the_analysis_takes_all_ipus_as_one_device(
    method: str, stages: int, replicas: int, busy_share: float, tmp_path: Path, poptorch: Any
) -> None:
    """Story: the host sees calls of all IPUs together as device 0, and every other device was
    reported as 100 % idle."""
    keys = {"stages": stages, "replicas": replicas}
    summary = train_mlp(tmp_path / "ipu", {}, method, **keys)
    analysis: Dict[str, Any] = analyze_run(tmp_path / "ipu")
    (device,) = analysis["devices"]
    assert device["covers"] == "all IPUs" and device["busy_ns"] > 0
    assert sum(device[part] for part in PARTS) == analysis["span_ns"]
    unknown = [analysis[key] for key in ("utilization", "bubble_fraction", "imbalance")]
    overlap = [analysis["overlap"][key] for key in ("share", "hidden_ns")]
    assert {*unknown, *overlap, device["utilization"], summary["utilization"]} == {None}
    assert analysis["stages"] == analysis["links"] == analysis["staleness"] == []
    # planned as PopTorch's pipeline runs it, here as in the summary
    assert analysis["planned_bubble_fraction"] == pytest.approx(1 - busy_share)
    assert summary["planned_bubble_fraction"] == analysis["planned_bubble_fraction"]
    text = format_analysis(analysis).split("note:")[0]
    assert "all IPUs as one device" in text and "stages" not in text and "bubble" not in text
    if replicas == 1:
        train_small_run(make_ipu_config(method, **keys), tmp_path / "emulator", "mlp")
        # device 0 of the emulator's trace is another device than all IPUs
        for figure in compute_differences(analysis, analyze_run(tmp_path / "emulator")):
            assert figure["difference"] is None or not figure["name"].startswith("devices[")


READ_LATE = ["gradient_accumulation=2", "log.every=40", "steps=40"]
BLOCKS = [
    (2, ["method_args.block_accumulation=[1,2]", "optimizer.momentum=0.9", "checkpoint.every=2"]),
    # if other ranks waited to send results, and rank 0 for activations, all would deadlock
    pytest.param(
        4, ["method_args.block_accumulation=[1,2,4,1]", *READ_LATE], marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize("blocks, others", BLOCKS)
def test_blocks_on_ipus_of_their_own_give_the_emulators_weights(
    blocks: int, others: List[str], tmp_path: Path
) -> None:
    """Each block is a device with its stage, and one may accumulate over several updates; a device
    error in one process ends the run."""
    keys = [*SHORT[:-1], "method=local_greedy", f"stages={blocks}", *others]
    decoupled = ["backend.name=poptorch", "backend.ipu.local=decoupled"]
    arguments = [DIGITS, "--set", *keys, *decoupled, "--out", str(tmp_path / "blocks")]
    code, out, error = forked.run_ranks(blocks, "train", arguments, PYTHONPATH=DOUBLE)
    assert code == 0 and "each in a process of its own" in out, error
    assert "Positional args" not in error, error
    train(load_config(DIGITS, keys), tmp_path / "emulator", quiet=True)
    assert_states_close(
        read_weights(tmp_path / "blocks"), read_weights(tmp_path / "emulator"), 1e-6
    )
    assert_close_losses(tmp_path / "blocks", tmp_path / "emulator", 1e-6)
    one, other = (read_summary(tmp_path / name) for name in ("blocks", "emulator"))
    for a, b in zip(one["blocks"], other["blocks"]):
        assert a == pytest.approx(b, rel=1e-5)
    assert one["links"][0]["bytes_per_microbatch"] == other["links"][0]["bytes_per_microbatch"]
    for index, device in enumerate(analyze_run(tmp_path / "blocks")["devices"]):
        assert (device["index"], device["stages"]) == (index, [index]) and "covers" not in device
        # checkpoints and evaluations do not count as bubble
        assert device["busy_ns"] > 0 and device["outside_ns"] > 0
    if blocks > 2:
        return
    broken = {"POPTORCH_DOUBLE_FAIL": "execute:92:RecoverableError:PARTITION_RESET"}
    code, out, error = forked.run_ranks(
        2, "train", [*arguments, "--overwrite"], PYTHONPATH=DOUBLE, **broken
    )
    (complaint,) = [line for line in error.splitlines() if line.startswith("error: ")]
    assert code != 0 and "device error (PARTITION_RESET)" in complaint and "--resume" in complaint
