"""Test the planner: predictions against the clock played in full, bounds, and the search against
all candidates."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import pytest

import ipu_pipe
from ipu_pipe.cli import plan as command
from ipu_pipe.config.load import load_config
from ipu_pipe.errors import BadInput
from ipu_pipe.hardware.description import Hardware, make_all_reduce, read_hardware
from ipu_pipe.hardware.memory import make_lockstep_schedule
from ipu_pipe.hardware.unit_costs import Unit
from ipu_pipe.plan.batch_times import BatchTimes
from ipu_pipe.plan.candidates import (
    Candidate,
    ReplicaLayout,
    list_candidates,
    list_layouts,
    make_boundary_transfer,
)
from ipu_pipe.plan.planner import NO_ROOM, find_bottleneck, find_least_memory, make_plan, search
from ipu_pipe.plan.prediction import Costing, Prediction, Problem, UnitSums, predict_cut
from ipu_pipe.run.train import train
from ipu_pipe.schedule.clock import clock
from ipu_pipe.schedule.methods import METHODS, Timeline
from ipu_pipe.schedule.timelines import make_schedule
from tests.support.runs import list_faults

BY_DEVICE = [
    "interleaved_1f1b",
    "zb_h1",
    "zb_h2",
    "interleaved_zb",
    "zbv",
    "v_half",
    "v_min",
    "dualpipe_v",
]
PIPELINES = ["pipedream_2bw", "pipedream_flush", "gpipe", "pipedream"]


def make_servers(**changes: Any) -> Hardware:
    """Return servers of two devices of 1 FLOP a second, with slow links between the servers."""
    figures: Dict[str, Any] = {
        "devices": 4,
        "device": {"memory_bytes": 1e4, "usable_share": 1.0, "memory_bandwidth": 1e9,
                   "rates": {"float32": {"peak_flops": 1.0, "achievable_share": 1.0}}},
        "links": [{"name": "inside", "holds": 2, "bandwidth": 1e6, "latency": 0.0},
                  {"name": "network", "bandwidth": 1e2, "latency": 0.0, "shared_by": 2}],
        **changes,
    }  # fmt: skip
    return read_hardware(figures, "here")


def draw_units(rng: np.random.Generator, count: int) -> Tuple[Unit, ...]:
    """Return units of random sizes."""

    def draw_unit(i: int) -> Unit:
        flops = float(rng.integers(1, 9))
        return Unit(
            f"unit{i}", flops, 2 * flops, int(rng.integers(0, 30)), 4.0 * rng.integers(1, 9), 40.0
        )

    return tuple(draw_unit(i) for i in range(count))


def make_small_problem(
    seed: int = 0, count: int = 6, memory: Optional[float] = None, **changes: Any
) -> Problem:
    """Return a small planning problem with random units."""
    machine = make_servers(**changes)
    result = draw_units(np.random.default_rng(seed), count)
    return Problem(
        result,
        8.0,
        machine,
        machine.device.usable_bytes if memory is None else memory,
        "float32",
        1,
    )


def predict_best_layout(problem: Problem, candidate: Candidate) -> Optional[Prediction]:
    """Return the prediction of the best cut on the better layout, or None if none fits."""
    predictions = []
    for layout in list_layouts(candidate.depth, candidate.width, candidate.placement):
        costing = Costing(problem, candidate, layout, UnitSums(problem, candidate.micro_batch_size))
        starts = costing.find_cut()
        if starts is not None:
            predictions.append(predict_cut(costing, starts))
    return max(predictions, key=lambda prediction: prediction.samples_per_second, default=None)


@pytest.mark.parametrize(
    "method, lockstep",
    [*((method, False) for method in PIPELINES), ("gpipe", True), ("pipedream_flush", True)],
)
def test_long_batches_are_extended_as_the_clock_would_play_them(
    method: str, lockstep: bool
) -> None:
    """The extrapolated time of a batch of 160 microbatches equals the time of a clock that plays
    all of them."""
    links = [{"name": "all", "bandwidth": 50.0, "latency": 0.1}]
    for seed in range(3):
        candidate = Candidate(method, 3, 1, 2, 160, False)
        task = make_small_problem(seed, memory=1e9, devices=3, lockstep=lockstep, links=links)
        costing = Costing(task, candidate, list_layouts(3, 1)[0], UnitSums(task, 2))
        starts = costing.find_cut()
        assert starts is not None
        costs = costing.compute_costs(starts)
        result = BatchTimes(METHODS[method], 3, costs).compute(160).seconds
        if METHODS[method].flushes:
            make = make_lockstep_schedule if lockstep else make_schedule
            assert result == pytest.approx(
                clock(make(METHODS[method], 3, 160, 160), costs).finish, rel=1e-9
            )
        else:  # the whole run's rate, its fill and drain apart
            times = [
                clock(make_schedule(METHODS[method], 3, n * 160, 160), costs).finish for n in (2, 4)
            ]
            assert result == pytest.approx((times[1] - times[0]) / 2, rel=1e-9)


@pytest.mark.parametrize("method", BY_DEVICE)
def test_long_batches_of_orders_are_extended_as_the_clock_would_play_them(method: str) -> None:
    links = [{"name": "all", "bandwidth": 500.0, "latency": 0.1}]
    for seed in range(2):
        task = make_small_problem(seed, memory=1e9, devices=3, links=links)
        (candidate,) = (candidate for candidate in list_candidates([method], 3, 6, 90, (False,)) if candidate.shape[1] == 3
                    and candidate.micro_batch_size == 1 and candidate.stages_per_device < 3)  # fmt: skip
        costing = Costing(
            task, candidate, list_layouts(3, 1, candidate.placement)[0], UnitSums(task, 1)
        )
        starts = costing.find_cut()
        assert starts is not None and candidate.gradient_accumulation == 90
        costs = costing.compute_costs(starts)
        result = BatchTimes(candidate.method_row, candidate.stages, costs).compute(90).seconds
        assert result == pytest.approx(
            clock(make_schedule(candidate.method_row, candidate.stages, 90, 90), costs).finish,
            rel=1e-6,
        )
        assert costing.bound_seconds(costs) <= result * (1 + 1e-9)


def test_the_memory_of_a_device_is_the_peak_of_its_stages() -> None:
    """On equal units a device stores P microbatches with ZBV and half of that with V-half, and
    the weights of both of its stages."""
    task = replace(
        make_small_problem(0, memory=1e9), units=(Unit("u", 1e3, 2e3, 10, 4.0, 100.0, 4),) * 8
    )
    most = {}
    for method in ("zbv", "v_half", "zb_h1", "interleaved_1f1b"):
        candidate = next(
            candidate
            for candidate in list_candidates([method], 4, 8, 16, (False,))
            if candidate.depth == 4
        )
        costing = Costing(
            task,
            candidate,
            list_layouts(4, 1, candidate.placement)[0],
            UnitSums(task, candidate.micro_batch_size),
        )
        starts = costing.find_cut()
        assert starts is not None
        memory = costing.compute_memory(starts)
        assert {device.weights for device in memory} == {2 * 10 * 4}
        most[method] = max(device.activations for device in memory) / (
            2 * 100 * candidate.micro_batch_size
        )
    assert most == pytest.approx({"zbv": 4, "v_half": 3, "zb_h1": 4, "interleaved_1f1b": 5.5})


@pytest.mark.parametrize("lockstep", [False, True])
def test_bounds_are_never_above_the_played_time(lockstep: bool) -> None:
    """A bound is never above the played time; otherwise the search would skip the best
    candidate."""
    checked = 0
    for seed in range(4):
        task = make_small_problem(seed, lockstep=lockstep)
        for candidate in list_candidates(
            PIPELINES[:3] if not lockstep else ["pipedream_flush"], 4, 6, 32
        ):
            for layout in list_layouts(candidate.depth, candidate.width, candidate.placement):
                costing = Costing(
                    task, candidate, layout, UnitSums(task, candidate.micro_batch_size)
                )
                starts = costing.find_cut()
                if starts is not None:
                    costs = costing.compute_costs(starts)
                    seconds = (
                        BatchTimes(METHODS[candidate.method], candidate.depth, costs)
                        .compute(candidate.gradient_accumulation)
                        .seconds
                    )
                    assert costing.bound_seconds(costs) <= seconds * (1 + 1e-9), candidate
                    checked += 1
    assert checked > 40


@pytest.mark.parametrize("memory, methods, batch", [
    (1e9, PIPELINES, 16),
    (4000.0, PIPELINES, 16),
    (1500.0, PIPELINES, 16),
    (1e9, ["pipedream_flush", *BY_DEVICE], 8),
    (2500.0, ["pipedream_flush", *BY_DEVICE], 8),
])  # fmt: skip
def test_the_search_finds_the_same_plans_as_trying_all(
    memory: float, methods: List[str], batch: int
) -> None:
    for seed in range(3) if methods is PIPELINES else (1,):
        task = make_small_problem(seed, memory=memory)
        candidates = list(list_candidates(methods, 4, 6, batch))
        answer = search(task, candidates, 5)
        rates: Dict[Any, float] = {}
        for predicted in (predict_best_layout(task, candidate) for candidate in candidates):
            if predicted is not None:
                shape = predicted.candidate.shape
                rates[shape] = max(predicted.samples_per_second, rates.get(shape, 0.0))
        best = [plan.samples_per_second for plan in answer.best]
        assert best or memory < 2000
        assert best == pytest.approx(sorted(rates.values(), reverse=True)[:5], rel=1e-9)
        assert sum(answer.refused.values()) + len(answer.best) == len(candidates)
        if not answer.best:
            assert answer.refused == {NO_ROOM: len(candidates)}
        for plan in answer.best:
            assert (
                max(device.total for device in plan.memory) <= memory
                and len(plan.memory) == plan.candidate.depth
            )


def test_pipedream_is_planned_with_the_equally_fast_schedule_of_least_memory() -> None:
    """On equal stages both schedules are equally fast; with a limit between their needs of
    memory only the capped one fits."""
    layers = tuple(
        Unit("", 1.0, 2.0, 10, 4.0, activations) for activations in (40.0, 40.0, 4000.0, 40.0)
    )
    task = Problem(layers, 8.0, make_servers(), 1e9, "float32", 1)
    capped, plain = (
        Candidate("pipedream", 4, 1, 1, 4, False, 1, row)
        for row in (Timeline.ONE_F_ONE_B_CAPPED, None)
    )
    most_memory = []
    for candidate in (capped, plain):
        predicted = predict_best_layout(task, candidate)
        assert predicted is not None
        most_memory.append(max(stage.total for stage in predicted.memory))
    assert most_memory[0] < most_memory[1]
    for memory in (1e9, most_memory[1] - 1):
        limited = replace(task, memory_bytes=memory)
        candidates = [
            candidate
            for candidate in list_candidates(["pipedream"], 4, 4, 4)
            if candidate.depth == 4
        ]
        best = search(limited, candidates, 1).best
        assert [plan.candidate.schedule for plan in best] == [Timeline.ONE_F_ONE_B_CAPPED]


def test_least_memory_is_where_it_begins_to_fit() -> None:
    task = make_small_problem(memory=10.0)
    candidates = list(list_candidates(PIPELINES, 4, 6, 16))
    assert not search(task, candidates, 5).best
    least_memory = find_least_memory(task, candidates)
    assert least_memory is not None
    advice = make_plan(task, PIPELINES, 4, 16)
    assert not advice.plans and advice.smallest_change is not None
    assert "usable memory per device" in advice.smallest_change
    enough, short = (make_small_problem(memory=least_memory[0] + more) for more in (0, -1))
    assert search(enough, candidates, 1).best and not search(short, candidates, 1).best


def test_the_larger_messages_stay_inside_a_server() -> None:
    """With two servers of two devices and two replicas of two stages, large weights keep a
    stage's replicas in one server, and large activations keep the stages of a replica in one."""
    for parameters, crossing, together in ((100000, 4.0, True), (1, 40000.0, False)):
        unit = Unit("", 1.0, 2.0, parameters, crossing, 0.0)
        servers = make_servers()
        task = Problem((unit, unit), 8.0, servers, 1e12, "float32", 0)
        candidate = Candidate("pipedream_flush", 2, 2, 1, 4, False)
        prediction = predict_best_layout(task, candidate)
        assert prediction is not None and prediction.layout.replicas_together is together
    inside, outside = ReplicaLayout(2, 2, False), ReplicaLayout(2, 2, True)
    assert inside.list_devices() == [[0, 1], [2, 3]] and outside.list_devices() == [[0, 2], [1, 3]]
    assert make_boundary_transfer(make_servers(), inside, 0).seconds == 1e-6
    assert (
        make_boundary_transfer(make_servers(), outside, 0).seconds == 2e-2
    )  # both replicas at once through one link
    assert make_all_reduce(
        make_servers(), outside.list_replicas(0), 100.0
    ).seconds == pytest.approx(1e-4)


def test_the_bottleneck_is_named() -> None:
    """Name the bottleneck of a stage with most of the work, of one microbatch per update, and of
    a link that is too slow."""
    one = Unit("", 1.0, 2.0, 1, 4.0, 4.0)
    heavy = Unit("heavy", 9.0, 18.0, 1, 4.0, 4.0)
    fast = make_servers(devices=2, links=[{"name": "all", "bandwidth": 1e6, "latency": 0.0}])

    def find_bottleneck_kind(
        units: Tuple[Unit, ...], count: int, machine: Hardware = fast
    ) -> Tuple[str, str]:
        task = Problem(units, 8.0, machine, 1e12, "float32", 0)
        prediction = predict_best_layout(task, Candidate("pipedream_flush", 2, 1, 1, count, False))
        assert prediction is not None
        reason = find_bottleneck(task, prediction)
        return reason.kind, str(reason)

    assert (
        find_bottleneck_kind((one, heavy), 500)[0] == "imbalance"
        and "heavy" in find_bottleneck_kind((one, heavy), 500)[1]
    )
    assert find_bottleneck_kind((one, one), 1)[0] == "bubble"
    assert find_bottleneck_kind((one, one), 2000)[0] == "compute"
    slow = make_servers(devices=2, links=[{"name": "all", "bandwidth": 1.0, "latency": 0.0}])
    assert find_bottleneck_kind((one, one), 500, slow)[0] == "link"


def test_one_device_has_no_bubble() -> None:
    """One device has no pipeline to fill: besides its passes it only updates. Story: the planner
    named a bubble as its bottleneck."""
    large = Unit("", 1.0, 2.0, 10**9, 4.0, 4.0)
    task = Problem((large,), 8.0, make_servers(), 1e12, "float32", 0)
    prediction = predict_best_layout(task, Candidate("pipedream_flush", 1, 1, 1, 1, False))
    assert prediction is not None
    reason = find_bottleneck(task, prediction)
    assert reason.kind == "compute" and reason.share > 0.4 and "updat" in reason.what


@pytest.mark.parametrize("batch", [0, 10**9 + 1, 10**20, 10**400])
def test_a_batch_too_large_to_plan_is_refused(batch: int) -> None:
    """Story: such a batch raised a division by zero or an overflow, or allocated an array of 58
    GiB."""
    with pytest.raises(BadInput, match="^--batch: "):
        make_plan(make_small_problem(memory=1e12), PIPELINES, 4, batch)


def test_the_largest_batch_is_planned() -> None:
    best = make_plan(make_small_problem(memory=1e12), ["gpipe"], 4, 10**9, 1).plans[0][0]
    assert best.candidate.global_batch_size == 10**9 and np.isfinite(best.samples_per_second)
    assert all(0 < stage.total <= 1e12 for stage in best.memory)


def run_plan_command(capsys: Any, *arguments: str) -> str:
    """Run the command on configs/mlp_digits.yaml, and return its standard output."""
    command.main(["configs/mlp_digits.yaml", *arguments])
    return str(capsys.readouterr().out)


def test_the_json_equals_plan_config_and_the_written_config_loads(
    capsys: Any, tmp_path: Path
) -> None:
    file = tmp_path / "planned.yaml"
    printed = run_plan_command(
        capsys,
        "--hardware",
        "v100x8",
        "--devices",
        "4",
        "--top",
        "3",
        "--json",
        "--write",
        str(file),
    )
    content = json.loads(printed)
    assert content == ipu_pipe.plan_config(
        load_config("configs/mlp_digits.yaml"), "v100x8", devices=4, top=3
    )
    assert (
        set(content) >= {"hardware", "devices", "plans", "refused", "smallest_change"}
        and content["devices"] == 4
    )
    keys = {
        "method", "depth", "width", "micro_batch_size", "gradient_accumulation", "recompute", "stages",
        "samples_per_second", "utilization", "global_batch_size", "memory_bytes", "binding",
    }  # fmt: skip
    assert len(content["plans"]) == 3 and all(keys <= set(plan) for plan in content["plans"])
    rates = [plan["samples_per_second"] for plan in content["plans"]]
    assert rates == sorted(rates, reverse=True)
    best = content["plans"][0]
    assert len(best["memory_bytes"]) == best["depth"] == len(best["stages"]) + 1
    assert (
        best["global_batch_size"]
        == best["micro_batch_size"] * best["gradient_accumulation"] * best["width"]
        <= 64
    )
    written = load_config(file)
    assert (written.method, written.replicas, written.recompute) == (
        best["method"],
        best["width"],
        best["recompute"],
    )
    assert written.micro_batch_size == best["micro_batch_size"] and written.hardware == "v100x8"


def test_a_method_with_old_weights_replaces_one_that_flushes_only_if_named(
    capsys: Any, tmp_path: Path
) -> None:
    file = tmp_path / "planned.yaml"
    options = [
        "--set",
        "method=gpipe",
        "--hardware",
        "v100x8",
        "--devices",
        "4",
        "--precision",
        "float32",
        "--top",
        "1",
    ]
    best = json.loads(run_plan_command(capsys, *options, "--json"))["plans"][0]["method"]
    assert not METHODS[best].flushes
    run_plan_command(capsys, *options, "--write", str(file))
    assert METHODS[load_config(file).method].flushes
    run_plan_command(capsys, *options, "--methods", best, "--write", str(file), "--overwrite")
    assert load_config(file).method == best
    split = [
        "--set",
        "method=pipedream",
        "method_args={split_backward: true}",
        *options[2:],
        "--methods",
        "pipedream",
    ]
    run_plan_command(capsys, *split, "--write", str(file), "--overwrite")
    written = load_config(file).method_args  # the plan is of whole backwards
    assert written.split_backward is None and written.schedule == "1f1b_capped"


@pytest.mark.parametrize("method", ["zbv", "interleaved_1f1b"])
def test_stages_of_a_device_are_planned_written_and_trained(
    method: str, tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "planned.yaml"
    options = [
        "--hardware",
        "v100x8",
        "--devices",
        "2",
        "--methods",
        f"pipedream_flush,{method}",
        "--top",
        "9",
        "--json",
    ]
    command.main(["configs/mlp_digits.yaml", *options, "--batch", "64"])
    plans = json.loads(capsys.readouterr().out)["plans"]
    best = next(plan for plan in plans if plan["method"] == method)
    assert best["stages_per_device"] == 2 == best["depth"] and len(best["stages"]) == 3
    assert len(best["memory_bytes"]) == len(best["activation_bytes"]) == 2
    assert best["devices"] == [[0, 1, 1, 0] if method == "zbv" else [0, 1, 0, 1]]
    small = ["--methods", method, "--batch", "64", "--memory", "200kB", "--write", str(file)]
    command.main(["configs/mlp_digits.yaml", *options[:4], *small])
    written = load_config(file, ["steps=2", "hardware=null"])
    summary = train(written, tmp_path / "run", quiet=True)
    assert summary["steps"] == 2 and len(summary["stages"]) == 4 and written.stages_per_device == 2


def test_a_config_is_written_only_for_its_own_plan(capsys: Any, tmp_path: Path) -> None:
    """A written config has the precision of its plan; float16 exists for plans alone, and is not
    written."""
    file = tmp_path / "planned.yaml"
    run_plan_command(
        capsys,
        "--hardware",
        "v100x8",
        "--devices",
        "2",
        "--precision",
        "float64",
        "--write",
        str(file),
    )
    assert load_config(file).precision == "float64"
    before = file.read_text()
    half = [
        "--hardware",
        "v100x8",
        "--devices",
        "2",
        "--precision",
        "float16",
        "--write",
        str(file),
    ]
    with pytest.raises(BadInput, match="^--write: precision: float16: must be"):
        run_plan_command(capsys, *half, "--overwrite")
    with pytest.raises(BadInput, match=f"^--write: {file}: exists already"):
        run_plan_command(capsys, *half)
    assert file.read_text() == before
    run_plan_command(
        capsys, "--hardware", "v100x8", "--devices", "2", "--write", str(file), "--overwrite"
    )
    assert file.read_text() != before


def test_the_configs_hardware_is_the_default(capsys: Any) -> None:
    """Check that the method stays, and that a method without a plan is named."""
    command.main(
        [
            "configs/mlp_digits.yaml",
            "--set",
            "hardware=v100x8",
            "method=local_overlapping",
            "--top",
            "1",
        ]
    )
    printed = capsys.readouterr()
    assert "8 devices of v100x8" in printed.out and "method: local_overlapping: " in printed.err


@pytest.mark.parametrize(
    "name, methods_option",
    [("v100x8", []), ("pod4", []), ("v100x8", ["--methods", "local_chunked"])],
)
def test_local_methods_are_planned_and_written(
    name: str, methods_option: List[str], capsys: Any, tmp_path: Path
) -> None:
    """Local methods are planned for a local config, beside pipelines, and if named; each stage
    is a block, also in the written config."""
    file = tmp_path / "planned.yaml"
    size = "500kB" if name == "v100x8" else "189MB"  # a fifth is code
    options = [
        "--set",
        "method=local_greedy",
        "--hardware",
        name,
        "--devices",
        "4",
        "--memory",
        size,
        "--top",
        "40",
    ]
    command.main(
        ["configs/mlp_digits.yaml", *options, *methods_option, "--json", "--write", str(file)]
    )
    printed = capsys.readouterr()
    plans = json.loads(printed.out)["plans"]
    methods = {plan["method"] for plan in plans}
    usual = {"local_greedy", "pipedream_flush"} | (
        set() if name == "pod4" else {"pipedream_2bw", "gpipe", "zb_h1"}
    )
    methods -= {*BY_DEVICE} - {"zb_h1"}  # as many as the few units have stages for
    assert (
        methods == ({"local_chunked"} if methods_option else usual)
        and "not planned" not in printed.err
    )
    written, best = load_config(file), plans[0]
    assert written.method == best["method"] and best["depth"] > 1
    if best["method"] == "local_chunked":
        assert list(written.method_args.blocks) == best["stages"]


@pytest.mark.parametrize("arguments, message", [
    ([], "--hardware: missing"),
    (["--hardware", "v100"], "--hardware: v100: must be one of"),
    (["--hardware", "v100x8", "--devices", "0"], "--devices: 0: must be"),
    (["--hardware", "pod16", "--devices", "32"], "--devices: 32: hardware pod16: needs 32 of 16: must be"),
    (["--hardware", "v100x8", "--methods", "pipedrem"], "--methods: pipedrem: must be of"),
    (["--hardware", "v100x8", "--precision", "int8"], "--precision: int8: must be one of"),
    (["--hardware", "v100x8", "--devices", "2", "--memory", "1kB"], "no configuration fits v100x8"),
])  # fmt: skip
def test_bad_input_is_reported(arguments: List[str], message: str, capsys: Any) -> None:
    assert any(message in fault for fault in list_faults(run_plan_command, capsys, *arguments))


@pytest.mark.parametrize(
    "text, size", [("16GB", 16e9), ("900MiB", 900 * 2**20), ("16e9", 16e9), ("1.5TB", 1.5e12)]
)
def test_sizes_are_bytes(text: str, size: float) -> None:
    assert command.main.make_parser().parse_args(["--memory", text]).memory == size
