"""Test the planner: memory and bottlenecks of a plan, the command, the config that it writes, and a run of that config."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, List, Optional, Set

import numpy as np
import pytest

import ipu_pipe
from ipu_pipe.cli import plan as command
from ipu_pipe.config.compare import dump_config
from ipu_pipe.config.load import configure, load_config
from ipu_pipe.errors import BadInput
from ipu_pipe.hardware.description import make_all_reduce, read_hardware
from ipu_pipe.hardware.unit_costs import Unit
from ipu_pipe.plan.answer import convert_to_json, format_answer, make_planned_config
from ipu_pipe.plan.candidates import (
    Candidate,
    ReplicaLayout,
    list_candidates,
    make_boundary_transfer,
)
from ipu_pipe.plan.config_cut import make_problem, predict_config_cut
from ipu_pipe.plan.planner import find_bottleneck, make_plan, search
from ipu_pipe.plan.prediction import Prediction, Problem, predict_cut
from ipu_pipe.run.planning import build_for_planning
from ipu_pipe.run.train import train
from ipu_pipe.schedule.methods import METHODS, Timeline
from tests import forked
from tests.support.runs import DIGITS, list_faults, needs_processes, read_summary
from tests.test_plan_search import PIPELINES, find_costings, make_problem_on_servers

ONE = Unit("", 1.0, 2.0, 1, 4.0, 4.0)


def make_unit_problem(*units: Unit, memory: float = 1e12, **changes: Any) -> Problem:
    """Return a problem of these units, without optimizer state."""
    task = make_problem_on_servers(0, memory, **changes)
    return replace(task, units=units, moments=0)


def predict_best(problem: Problem, *shape: Any) -> Prediction:
    """Return the prediction of the best cut of a candidate on the better layout."""
    found = find_costings(problem, [Candidate(*shape)])
    return max((predict_cut(*one) for one in found), key=lambda one: one.samples_per_second)


# ---- predictions


def test_the_memory_of_a_device_is_the_peak_of_its_stages() -> None:
    """On equal units a device stores P microbatches with ZBV and half of that with V-half, and
    the weights of both of its stages."""
    units = (Unit("u", 1e3, 2e3, 10, 4.0, 100.0, 4),) * 8
    task = replace(make_problem_on_servers(0), units=units)
    for method, most in (("zbv", 4), ("v_half", 3), ("zb_h1", 4), ("interleaved_1f1b", 5.5)):
        candidates = list_candidates([method], 4, 8, 16, (False,))
        candidate = next(candidate for candidate in candidates if candidate.depth == 4)
        costing, starts = find_costings(task, [candidate])[0]
        memory = costing.compute_memory(starts)
        assert {device.weights for device in memory} == {2 * 10 * 4}
        stored = max(device.activations for device in memory)
        assert stored == pytest.approx(most * 2 * 100 * candidate.micro_batch_size)


def test_pipedream_is_planned_with_the_equally_fast_schedule_of_least_memory() -> None:
    """On equal stages both schedules are equally fast; with a limit between their needs of
    memory only the capped one fits."""
    layers = [Unit("", 1.0, 2.0, 10, 4.0, size) for size in (40.0, 40.0, 4000.0, 40.0)]
    task = replace(make_unit_problem(*layers), moments=1)
    shape = ("pipedream", 4, 1, 1, 4, False, 1)
    capped, plain = (
        max(stage.total for stage in predict_best(task, *shape, row).memory)
        for row in (Timeline.ONE_F_ONE_B_CAPPED, None)
    )
    assert capped < plain
    candidates = [one for one in list_candidates(["pipedream"], 4, 4, 4) if one.depth == 4]
    for memory in (1e9, plain - 1):
        (best,) = search(replace(task, memory_bytes=memory), candidates, 1).best
        assert best.candidate.schedule == Timeline.ONE_F_ONE_B_CAPPED


def test_the_larger_messages_stay_inside_a_server() -> None:
    """With two servers of two devices and two replicas of two stages, large weights keep a
    stage's replicas in one server, and large activations keep the stages of a replica in one."""
    for parameters, crossing, together in ((100000, 4.0, True), (1, 40000.0, False)):
        unit = Unit("", 1.0, 2.0, parameters, crossing, 0.0)
        best = predict_best(make_unit_problem(unit, unit), "pipedream_flush", 2, 2, 1, 4, False)
        assert best.layout.replicas_together is together
    inside, outside = ReplicaLayout(2, 2, False), ReplicaLayout(2, 2, True)
    servers = make_problem_on_servers(0).hardware
    assert make_boundary_transfer(servers, inside, 0).seconds == 1e-6
    # both replicas at once through one link
    assert make_boundary_transfer(servers, outside, 0).seconds == 2e-2
    reduced = make_all_reduce(servers, outside.list_replicas(0), 100.0)
    assert reduced.seconds == pytest.approx(1e-4)


@pytest.mark.parametrize("units, count, bandwidth, kind, words", [
    ((ONE, Unit("heavy", 9.0, 18.0, 1, 4.0, 4.0)), 500, 1e6, "imbalance", "heavy"),
    ((ONE, ONE), 1, 1e6, "bubble", ""),
    ((ONE, ONE), 2000, 1e6, "compute", ""),
    ((ONE, ONE), 500, 1.0, "link", ""),
    # story: the planner named a bubble as the bottleneck of one device, which has no pipeline to fill
    ((replace(ONE, parameters=10**9),), 1, 1e6, "compute", "updat"),
])  # fmt: skip
def test_the_bottleneck_is_named(
    units: Any, count: int, bandwidth: float, kind: str, words: str
) -> None:
    links = [{"name": "all", "bandwidth": bandwidth, "latency": 0.0}]
    task = make_unit_problem(*units, devices=2, links=links)
    prediction = predict_best(task, "pipedream_flush", len(units), 1, 1, count, False)
    reason = find_bottleneck(task, prediction)
    assert reason.kind == kind and words in str(reason)


@pytest.mark.parametrize("batch", [0, 10**9 + 1, 10**400])
def test_a_batch_too_large_to_plan_is_refused(batch: int) -> None:
    """Story: such a batch raised a division by zero or an overflow, or allocated an array of 58
    GiB."""
    task = make_problem_on_servers(0, memory=1e12)
    with pytest.raises(BadInput, match="^--batch: "):
        make_plan(task, PIPELINES, 4, batch)
    best = make_plan(task, ["gpipe"], 4, 10**9, 1).plans[0][0]
    assert best.candidate.global_batch_size == 10**9 and np.isfinite(best.samples_per_second)


# ---- the optimizer state in streaming memory: it is planned where nothing fits without it, at the cost of its traffic

KEY = "backend.ipu.options.TensorLocations.setOptimizerLocation.useOnChipStorage: false"
UNITS = tuple(Unit(f"unit{i}", 5.0, 10.0, 1000, 4.0, 40.0) for i in range(4))


def make_streaming_problem(memory: float, size: Optional[float] = 1e6) -> Problem:
    """Return a problem of four units of 1000 float32 weights with Adam: each weight takes 16
    bytes on the device, 8 of them state that may be streamed, at 100 bytes a second."""
    device = {
        "memory_bytes": 1e6, "usable_share": 1.0, "memory_bandwidth": 1e9, "streaming_bytes": size,
        "streaming_bandwidth": size and 100.0, "rates": {"float32": {"peak_flops": 1.0, "achievable_share": 1.0}},
    }  # fmt: skip
    links = [{"name": "all", "bandwidth": 1e6, "latency": 0.0}]
    task = make_problem_on_servers(0, memory, devices=2, device=device, links=links)
    return replace(task, units=UNITS, moments=2)


def test_state_leaves_the_device_and_costs_its_traffic_at_each_update() -> None:
    on_chip = make_streaming_problem(1e6)
    here, there = (
        predict_best(task, "pipedream_flush", 2, 1, 1, 4, False)
        for task in (on_chip, replace(on_chip, streamed=True))
    )
    state = 2 * 1000 * 8  # of a stage
    for one, other in zip(here.memory, there.memory):
        assert (one.optimizer, other.optimizer) == (state, 0)
        assert one.total - other.total == state
    assert there.seconds - here.seconds == pytest.approx(2 * state / 100.0)


# a stage of two units takes 32 kB, 16 kB of them state
@pytest.mark.parametrize("memory, size, streams", [
    (40_000.0, 1e6, False),
    (20_000.0, 16e3, True),
    (20_000.0, 15_999.0, None),
    (20_000.0, None, None),
    (1000.0, 1e6, None),
])  # fmt: skip
def test_state_is_streamed_where_nothing_else_fits(
    memory: float, size: Optional[float], streams: Optional[bool]
) -> None:
    answer = make_plan(make_streaming_problem(memory, size), ["pipedream_flush"], 2, 8)
    assert bool(answer.plans) == (streams is not None)
    if streams is None:
        assert answer.smallest_change is not None
        return
    assert answer.problem.streamed == streams == (KEY in format_answer(answer))
    most = max(one.total for prediction, _ in answer.plans for one in prediction.memory)
    assert most <= memory
    for plan in convert_to_json(answer)["plans"]:
        assert ("optimizer state in streaming memory" in plan["binding"]) == streams


PERCEPTRON = {"entry": "models.mlp:mlp", "args": {"inputs": 64, "width": 256, "layers": 4}}


def test_the_key_of_streamed_state_is_read_and_written(tmp_path: Path, capsys: Any) -> None:
    file, planned = tmp_path / "c.yaml", tmp_path / "planned.yaml"
    adam = {"name": "adam", "lr": 0.1}
    config = configure(
        model=PERCEPTRON, data={"name": "digits"}, backend={"name": "poptorch"}, steps=2, stages=1,
        gradient_accumulation=8, optimizer=adam, precision="32.32",
    )  # fmt: skip
    file.write_text(dump_config(config))
    hardware = read_hardware("pod4")
    options = [str(file), *"--hardware pod4 --devices 1 --json --write".split(), str(planned)]
    memory = 0.2 * hardware.device.memory_bytes.value + 2e6  # beside the code
    for arguments, streams in ((["--memory", str(memory)], True), (["--overwrite"], False)):
        command.main([*options, *arguments])
        assert load_config(planned).ipu.streams_state == streams
        assert make_problem(load_config(planned), UNITS, 8.0, hardware, 2).streamed == streams
        assert (KEY in str(json.loads(capsys.readouterr().out)["smallest_change"])) == streams


def test_a_written_pipeline_recomputes_only_if_the_plan_does(tmp_path: Path) -> None:
    """Story: PopTorch's pipelines recompute by default, so a plan without recomputation was written
    as a config with it."""
    keys = {
        "model": PERCEPTRON, "data": {"name": "digits"}, "steps": 2, "gradient_accumulation": 8, "stages": 2,
        "method": "gpipe", "precision": "32.32", "hardware": "pod4",
    }  # fmt: skip
    config, file = configure(**keys, backend={"name": "poptorch"}), tmp_path / "planned.yaml"
    for recomputation, recomputes in (("none", False), ("auto", True)):
        backend = {"name": "poptorch", "ipu": {"recomputation": recomputation}}
        cut = predict_config_cut(build_for_planning(configure(**keys, backend=backend)))
        file.write_text(make_planned_config(config, cut.problem, cut.prediction, "pod4"))
        assert config.recomputes and load_config(file).recomputes is recomputes


# ---- the command


def run_plan_command(capsys: Any, line: str, *arguments: str) -> str:
    """Run the command on configs/mlp_digits.yaml, and return its standard output."""
    command.main([DIGITS, *line.split(), *arguments])
    return str(capsys.readouterr().out)


def test_the_json_equals_plan_config_and_the_written_config_loads(
    capsys: Any, tmp_path: Path
) -> None:
    file = tmp_path / "planned.yaml"
    line = "--hardware v100x8 --devices 4 --top 3 --json --write"
    content = json.loads(run_plan_command(capsys, line, str(file)))
    assert content == ipu_pipe.plan_config(load_config(DIGITS), "v100x8", devices=4, top=3)
    rates = [plan["samples_per_second"] for plan in content["plans"]]
    assert len(rates) == 3 and rates == sorted(rates, reverse=True)
    best, written = content["plans"][0], load_config(file)
    assert len(best["memory_bytes"]) == best["depth"] == len(best["stages"]) + 1
    size = best["micro_batch_size"] * best["gradient_accumulation"] * best["width"]
    assert best["global_batch_size"] == size <= 64
    assert (written.replicas, written.hardware) == (best["width"], "v100x8")
    for key in ("method", "recompute", "micro_batch_size"):
        assert getattr(written, key) == best[key]


def test_a_method_with_old_weights_replaces_one_that_flushes_only_if_named(
    capsys: Any, tmp_path: Path
) -> None:
    file = str(tmp_path / "planned.yaml")
    line = "--set method=gpipe --hardware v100x8 --devices 4 --precision float32 --top 1"
    best = json.loads(run_plan_command(capsys, f"{line} --json"))["plans"][0]["method"]
    assert not METHODS[best].flushes
    run_plan_command(capsys, line, "--write", file)
    assert METHODS[load_config(file).method].flushes
    run_plan_command(capsys, line, "--methods", best, "--write", file, "--overwrite")
    assert load_config(file).method == best
    line = line.replace("=gpipe", '=pipedream method_args={"split_backward":true}')
    line += f" --methods pipedream --overwrite --write {file}"
    run_plan_command(capsys, line)
    written = load_config(file).method_args  # the plan is of whole backwards
    assert written.split_backward is None and written.schedule == "1f1b_capped"


def test_stages_of_a_device_are_planned_written_and_trained(tmp_path: Path, capsys: Any) -> None:
    file, line = tmp_path / "planned.yaml", "--hardware v100x8 --devices 2 --batch 64"
    printed = run_plan_command(capsys, f"{line} --methods pipedream_flush,zbv --top 9 --json")
    best = next(plan for plan in json.loads(printed)["plans"] if plan["method"] == "zbv")
    assert best["stages_per_device"] == 2 == best["depth"] and len(best["stages"]) == 3
    assert len(best["memory_bytes"]) == 2 and best["devices"] == [[0, 1, 1, 0]]
    run_plan_command(capsys, f"{line} --methods zbv --memory 200kB --write {file}")
    written = load_config(file, ["steps=2", "hardware=null"])
    summary = train(written, tmp_path / "run", quiet=True)
    assert len(summary["stages"]) == 4 and written.stages_per_device == 2


def test_a_config_is_written_only_for_its_own_plan(capsys: Any, tmp_path: Path) -> None:
    """A written config has the precision of its plan; float16 exists for plans alone, and is not
    written. Of more devices than the hardware has, the config describes them."""
    file = tmp_path / "planned.yaml"
    line = f"--hardware v100x8 --devices 2 --write {file}"
    run_plan_command(capsys, f"{line} --precision float64")
    assert load_config(file).precision == "float64"
    before = file.read_text()
    for more, fault in ((" --overwrite", "precision: float16: must be"), ("", f"{file}: exists")):
        with pytest.raises(BadInput, match=f"^--write: {fault}"):
            run_plan_command(capsys, f"{line} --precision float16{more}")
    assert file.read_text() == before
    many = line.replace("--devices 2", "--devices 16 --precision float32 --top 1 --overwrite")
    run_plan_command(capsys, many)
    assert read_hardware(load_config(file).hardware).devices == 16


@pytest.mark.parametrize("line, methods", [
    ("--hardware v100x8 --memory 500kB", {"local_greedy", "pipedream_flush", "pipedream_2bw", "gpipe", "zb_h1"}),
    ("--hardware pod4 --memory 189MB", {"local_greedy", "pipedream_flush"}),  # a fifth is code
    ("--hardware v100x8 --memory 500kB --methods local_chunked", {"local_chunked"}),
])  # fmt: skip
def test_local_methods_are_planned_and_written(
    line: str, methods: Set[str], capsys: Any, tmp_path: Path
) -> None:
    """Local methods are planned for a local config, beside pipelines, and if named; each stage
    is a block, also in the written config."""
    file = tmp_path / "planned.yaml"
    line += f" --set method=local_greedy --devices 4 --top 40 --json --write {file}"
    plans = json.loads(run_plan_command(capsys, line))["plans"]
    planned, best = {plan["method"] for plan in plans}, plans[0]
    # others: as many as the few units have stages for
    assert methods <= planned and not any(name.startswith("local") for name in planned - methods)
    assert load_config(file).method == best["method"] and best["depth"] > 1
    if best["method"] == "local_chunked":
        assert list(load_config(file).method_args.blocks) == best["stages"]


def test_the_configs_hardware_is_the_default_and_a_method_without_a_plan_is_named(
    capsys: Any,
) -> None:
    command.main([DIGITS, *"--set hardware=v100x8 method=local_overlapping --top 1".split()])
    printed = capsys.readouterr()
    assert "8 devices of v100x8" in printed.out and "method: local_overlapping: " in printed.err


@pytest.mark.parametrize("line, message", [
    ("", "--hardware: missing"),
    ("--hardware v100", "--hardware: v100: must be one of"),
    ("--hardware v100x8 --devices 0", "--devices: 0: must be"),
    ("--hardware pod16 --devices 32", "--devices: 32: hardware pod16: needs 32 of 16: must be"),
    ("--hardware v100x8 --methods pipedrem", "--methods: pipedrem: must be of"),
    ("--hardware v100x8 --precision int8", "--precision: int8: must be one of"),
    ("--hardware v100x8 --devices 2 --memory 1kB", "no configuration fits v100x8"),
])  # fmt: skip
def test_bad_input_is_reported(line: str, message: str, capsys: Any) -> None:
    assert any(message in fault for fault in list_faults(run_plan_command, capsys, line))


def test_sizes_are_bytes() -> None:
    sizes = {"900MiB": 900 * 2**20, "16e9": 16e9, "1.5TB": 1.5e12}
    parser = command.main.make_parser()
    for text, size in sizes.items():
        assert parser.parse_args(["--memory", text]).memory == size


# a pipeline of two: all of the model with its gradients and state does not fit one device
HARDWARE = """\
devices: 2
device:
  memory_bytes: 200e3
  usable_share: 1.0
  memory_bandwidth: 5e9
  rates: {float32: {peak_flops: 2e9, achievable_share: 0.5}}
links: [{name: sockets, bandwidth: 1e9, latency: 100e-6}]
"""


@pytest.mark.slow
@needs_processes
def test_a_plan_trains_on_processes_and_is_compared_with_the_measurement(
    tmp_path: Path, capsys: Any
) -> None:
    """Go the way of docs/planner.md."""
    hardware, file, out = (tmp_path / name for name in ("two.yaml", "planned.yaml", "run"))
    hardware.write_text(HARDWARE)
    changes = "--set steps=4 backend.name=distributed backend.threads=1 evaluate.every=0"
    printed = run_plan_command(capsys, f"{changes} --json --hardware {hardware} --write {file}")
    best = json.loads(printed)["plans"][0]
    assert (best["depth"], best["width"]) == (2, 1)
    ranks: List[str] = [str(file), "--out", str(out)]
    launch = forked.run_ranks(2, "train", ranks, GLOO_SOCKET_IFNAME="lo")
    assert launch.code == 0, launch.error[-2000:]
    figures = re.search(
        r"predicted on two: ([0-9.]+) samples/s, measured: ([0-9.]+);", launch.printed
    )
    predicted, measured = map(float, figures.groups())
    assert predicted == pytest.approx(best["samples_per_second"], abs=0.06)
    assert measured == pytest.approx(read_summary(out)["throughput_samples_per_second"], abs=0.06)
    is_off = not 0.5 <= predicted / measured <= 2
    assert ("finding: the prediction is off" in launch.printed) == is_off
