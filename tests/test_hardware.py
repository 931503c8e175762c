"""Test hardware descriptions and the times, links and memory that follow, against hand results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch

from ipu_pipe.backends.ipu.feed import convert_input
from ipu_pipe.cli.measure_hardware import main
from ipu_pipe.config.load import Config, dump_yaml, load_config, parse_yaml
from ipu_pipe.errors import BadInput
from ipu_pipe.hardware import description, measuring, memory, unit_costs
from ipu_pipe.hardware.description import (
    HARDWARE_FOLDER,
    Hardware,
    find_this_file,
    list_hardware,
    read_hardware,
)
from ipu_pipe.hardware.precision import MASTERS, PRECISIONS
from ipu_pipe.hardware.unit_costs import MeasuredPasses, Unit
from ipu_pipe.run.planning import PlanningRequest, make_planning_problem
from ipu_pipe.schedule.clock import Transfer
from ipu_pipe.schedule.methods import METHODS, resolve_method
from tests.support.runs import DIGITS, list_faults

# 1 GB of memory, 1 TFLOP/s of which half is reached, 100 GB/s; two servers of four that share 1 GB/s, 10 GB/s inside
PLAIN: Dict[str, Any] = {
    "name": "plain",
    "devices": 8,
    "device": {
        "memory_bytes": 1e9, "usable_share": 0.9, "code_share": 0.1, "memory_bandwidth": 1e11,
        "rates": {"float32": {"peak_flops": 1e12, "achievable_share": 0.5}},
    },
    "links": [
        {"name": "inside", "holds": 4, "bandwidth": 1e10, "latency": 1e-6},
        {"name": "between", "holds": 8, "bandwidth": 1e9, "latency": 1e-3, "shared_by": 4},
    ],
}  # fmt: skip


@pytest.fixture
def plain_hardware() -> Hardware:
    return read_hardware(PLAIN)


# ---- descriptions


def test_every_named_description_is_complete_and_names_its_sources() -> None:
    for name in {*list_hardware()} - {"this"}:
        hardware = read_hardware(name)
        assert hardware.name == name and hardware.about
        for key, figure in hardware.list_figures():
            assert figure.source != "not stated", (name, key)
            assert not ("estimate" in figure.source and figure.confirmed), (name, key)
    lockstep = [read_hardware(name).lockstep for name in ("gc2", "pod64", "v100x8", "h200x8")]
    assert lockstep == [True, True, False, False]
    # of products: see test_predictions.py
    assert read_hardware("v100x8").find_rate("float16") == pytest.approx(71.25e12)


def test_a_users_file_is_a_description_like_the_named_ones(tmp_path: Path) -> None:
    file, larger = tmp_path / "wafer.yaml", tmp_path / "larger.yaml"
    file.write_text(dump_yaml({**PLAIN, "name": "wafer"}))
    assert read_hardware(str(file)) == read_hardware({**PLAIN, "name": "wafer"})
    for extended, devices in (("wafer.yaml", 8), ("pod16", 16)):
        larger.write_text(f"extends: {extended}\ndevice: {{memory_bytes: 2e9}}\n")
        hardware = read_hardware(str(larger))
        assert (hardware.device.memory_bytes.value, hardware.devices) == (2e9, devices)
    assert read_hardware(str(file)).device.usable_bytes == 0.9e9


INSIDE, BETWEEN = PLAIN["links"]
DEVICE = PLAIN["device"]
SMALL = "must be greater than or equal to "
# changes of the plain description, and how its faults begin
WRONG: List[Tuple[Dict[str, Any], List[str]]] = [
    ({"lockstep": "maybe", "hots": 3}, ["lockstep: maybe: ", "hots: 3: unknown key, nearest is host"]),
    ({"device": {**DEVICE, "memory_bytes": -3, "usable_share": {"value": 1.2, "sorce": "x"},
                 "memory_bandwidth": {"value": 3e9, "confirmed": True}}},
     [f"device.memory_bytes.value: -3: {SMALL}1", "device.usable_share.value: 1.2: must be less than or equal to 1",
      "device.usable_share.sorce: x: unknown key, nearest is source", "device.memory_bandwidth.confirmed: true: says that"]),
    ({"device": {**DEVICE, "rates": {"float17": {"peak_flops": 1, "achievable_share": 1}, "float32": {"peak_flops": 1e12}}}},
     ["device.rates.float17: float17: ", "device.rates.float32.achievable_share: missing: "]),
    # Story: a plan for hardware of such figures, or tiny ones, printed nan and inf, and exited with 0.
    ({"device": {**DEVICE, "memory_bytes": 0.5, "memory_bandwidth": 0.5,
                 "rates": {"float32": {"peak_flops": 0.5, "achievable_share": 1e-7}}},
      "links": [{**INSIDE, "bandwidth": 0.5, "latency": 1e300}, BETWEEN]},
     ["device.memory_bytes.value", "device.memory_bandwidth.value", "device.rates.float32.peak_flops.value",
      "device.rates.float32.achievable_share.value", "links.0.bandwidth.value", "links.0.latency.value"]),
    ({"devices": 9}, ["devices: 9: must be at most 8: no level of links holds more"]),
    ({"links": []}, ["devices: 8: must be at most 1"]),
    ({"links": [BETWEEN, INSIDE]}, ["links.1.holds: 4: must be a larger multiple of 8"]),
    ({"links": [INSIDE, {**BETWEEN, "holds": 6}]}, ["links.1.holds: 6: must be a larger"]),
    ({"links": [{**INSIDE, "holds": None}, BETWEEN]}, ["links.0.holds: null: only the last"]),
    ({"device": {**DEVICE, "code_share": 0.9}}, ["device.code_share: 0.9: leaves nothing of usable_share"]),
    ({"device": {**DEVICE, "streaming_bytes": 1}}, ["device.streaming_bytes: given or null alone"]),
    ({"device": {**DEVICE, "rates": {}}}, ["device.rates: {}: must state at least one"]),
    ({"device": None}, ["device: null: must be a mapping"]),
]  # fmt: skip


@pytest.mark.parametrize("changes, begins", WRONG)
def test_wrong_figures_are_refused_by_their_keys(
    changes: Dict[str, Any], begins: List[str], tmp_path: Path
) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(dump_yaml({**PLAIN, **changes}))
    faults = list_faults(read_hardware, str(file))
    assert len(faults) == len(begins)
    for fault, begin in zip(faults, begins):
        assert fault.startswith(f"{file}: {begin}"), faults


def test_no_text_of_a_description_controls_the_terminal() -> None:
    """Story: a source with an escape sequence cleared the screen of the person who planned."""
    device = {**DEVICE, "memory_bytes": {"value": 1e9, "source": "\x1b[2J"}}
    keys = {"name": "n\x07", "about": "\x9b2J", "links": [{**INSIDE, "name": "a\x1b[31m"}, BETWEEN]}
    evil = read_hardware({**PLAIN, **keys, "device": device})
    links = description.make_transfer(evil, 0, 1, 1.0).links
    assert "".join([evil.name, evil.about, *evil.format_figures(), *links]).isprintable()
    assert "\\x1b[2J" in evil.format_figures()[0]


def test_unknown_names_devices_and_precisions_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain_hardware: Hardware
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: this\ndevices: 2\n")
    for call, line in (
        (lambda: read_hardware("pod61"), r"^--hardware: pod61: .*\bpod64\b"),
        (lambda: read_hardware("this", "hardware"), "^hardware: this: .* python tools/measure_hardware.py"),
        # ended in "no such config file"
        (lambda: read_hardware(str(mine)), "mine.yaml: extends: this: .* is not measured yet"),
        (lambda: plain_hardware.with_devices(0), "^--devices: 0: hardware plain: "),
        (lambda: plain_hardware.with_devices(9), "^--devices: 9: hardware plain: "),
        (lambda: plain_hardware.find_rate("16.16"), "^precision: 16.16: hardware plain states no rate for float16"),
    ):  # fmt: skip
        with pytest.raises(BadInput, match=line):
            call()
    assert plain_hardware.with_devices(2).devices == 2
    assert read_hardware("v100x8").with_devices(64).devices == 64
    find_this_file().parent.mkdir(parents=True)
    find_this_file().write_text(dump_yaml({k: v for k, v in PLAIN.items() if k != "name"}))
    assert read_hardware("this").name == "this" and read_hardware(str(mine)).devices == 2


# ---- times


def make_unit(name: str = "a", **changes: Any) -> Unit:
    keys: Dict[str, Any] = {
        "forward_flops": 1e9, "backward_flops": 2e9, "parameters": 1000, "output_bytes": 400.0, "activation_bytes": 4000.0,
    }  # fmt: skip
    return Unit(name, **{**keys, **changes})


def test_a_pass_and_an_update_take_their_arithmetic_or_memory_traffic(
    plain_hardware: Hardware,
) -> None:
    of_pass, of_update = unit_costs.compute_pass_seconds, unit_costs.compute_update_seconds
    plain, keys = make_unit(), (plain_hardware, "float32")
    assert of_pass(plain, *keys, 4) == pytest.approx((4e9 / 0.5e12, 8e9 / 0.5e12))
    moving = make_unit(forward_flops=0.0, backward_flops=0.0)
    forward = (4 * 1000 + 2 * 4 * 4000) / 1e11
    backward = (4 * 1000 + 2 * 4 * 1000 + 4 * 4 * 4000) / 1e11
    assert of_pass(moving, *keys, 4) == pytest.approx((forward, backward))
    # float32 with Adam: weights and two moments read and written, the gradient read
    assert of_update(plain, *keys, 2) == pytest.approx(1000 * (2 * 4 * 3 + 4) / 1e11)
    assert of_update(make_unit(update_seconds=3.0), *keys, 2) == 3.0


def test_times_between_measured_sizes_are_interpolated(plain_hardware: Hardware) -> None:
    measured = tuple(
        MeasuredPasses(size, seconds, 2 * seconds)
        for size, seconds in ((8, 3.0), (4, 2.0), (2, 1.0))
    )
    keys = (plain_hardware, "float32")
    for samples, forward in ((4, 2.0), (6, 2.5), (16, 5.0), (1, 0.5)):
        seconds = unit_costs.compute_pass_seconds(make_unit(measured=measured), *keys, samples)
        assert seconds == pytest.approx((forward, 2 * forward))
    one = make_unit(measured=(MeasuredPasses(3, 2.0, 3.0),))  # one size is scaled
    assert unit_costs.compute_pass_seconds(one, *keys, 6) == (4.0, 6.0)


# ---- links


def test_the_smallest_level_that_joins_devices_carries_their_messages(
    plain_hardware: Hardware,
) -> None:
    make_transfer = description.make_transfer
    assert make_transfer(plain_hardware, 0, 3, 1e9) == Transfer(
        0.1, 1e-6, ("inside from device 0", "inside to device 3")
    )
    across = make_transfer(plain_hardware, 3, 4, 1e9, sharing=2)
    links = ("between from devices 0 to 3", "between to devices 4 to 7")
    assert across == Transfer(2.0, 1e-3, links)
    assert description.compute_message_seconds(plain_hardware.links[1], 1e9, 2) == pytest.approx(
        across.seconds + across.latency
    )
    assert make_transfer(plain_hardware, 5, 5, 1e9) == Transfer()
    with pytest.raises(BadInput, match="no level joins devices 0 and 8"):
        make_transfer(plain_hardware, 0, 8, 1.0)


def test_a_ring_sends_its_bytes_nearly_twice(plain_hardware: Hardware) -> None:
    inside = plain_hardware.links[0]
    assert description.compute_all_reduce_seconds(inside, 4e9, 1) == 0.0
    assert description.compute_all_reduce_seconds(inside, 4e9, 4) == pytest.approx(0.6 + 6e-6)
    transfer = description.make_all_reduce(plain_hardware, [0, 4], 1e9)
    assert transfer.seconds + transfer.latency == pytest.approx(1.002)
    groups = ("devices 0 to 3", "devices 4 to 7")
    assert set(transfer.links) == {
        f"between {way} {group}" for way in ("from", "to") for group in groups
    }
    assert description.make_all_reduce(plain_hardware, [3], 1e9) == Transfer()


def test_flows_crowd_where_they_leave_or_enter_together(plain_hardware: Hardware) -> None:
    pipelines = [(0, 4), (1, 5), (2, 3)]  # two leave the first server; the third stays inside
    assert description.count_sharing(plain_hardware, pipelines) == [2, 2, 1]
    assert description.count_sharing(plain_hardware, [(0, 3), (1, 3), (0, 2)]) == [2, 2, 2]


# ---- memory

WEIGHTS, KEPT, ENTERS = 100, 40.0, 8.0  # numbers, bytes a sample, bytes a microbatch


def compute_memory(
    method: str,
    stage: int,
    stages: int = 4,
    accumulate: int = 8,
    recompute: bool = False,
    **more: Any,
) -> Any:
    counts = memory.count_kept(
        resolve_method(method), stages, accumulate, recompute, more.pop("lockstep", False)
    )
    keys = {"precision": "float32", "samples": 2, "moments": 1, **more}
    return memory.compute_stage_memory(
        make_unit(parameters=WEIGHTS, activation_bytes=KEPT), ENTERS, counts.select(stage), **keys
    )


@pytest.mark.parametrize(
    "method, stage, versions, in_flight",
    [
        ("gpipe", 3, 1, 8), ("pipedream_flush", 0, 1, 4), ("pipedream_2bw", 0, 2, 4), ("local_greedy", 0, 1, 1),
        ("pipelined_backprop", 0, 1, 7),
    ],
)  # fmt: skip
def test_memory_follows_the_method(method: str, stage: int, versions: int, in_flight: int) -> None:
    """Versions are those of the papers; in flight are N microbatches (GPipe), P - s (1F1B),
    2(P-1-s) + 1 (dataflow)."""
    plain, recomputed = (compute_memory(method, stage, recompute=again) for again in (False, True))
    for one in (plain, recomputed):
        assert (one.weights, one.versions) == (400, 400 * (versions - 1))
        assert (one.gradients, one.optimizer, one.code) == (400, 400, 0)
    assert plain.activations == in_flight * 2 * KEPT
    assert recomputed.activations == in_flight * ENTERS + 2 * KEPT


def test_stages_in_lock_step_stash_as_poptorch_does() -> None:
    """Four stages keep 7, 5, 3, 1 microbatches in either timeline of a method that flushes.

    The last stage recomputes nothing.
    """
    for method, again, one, fixed, sizes in (
        ("gpipe", False, 2 * KEPT, 0, (7, 5, 3, 1)),
        ("pipedream_flush", True, ENTERS, 2 * KEPT, (7, 5, 3, 0)),
    ):
        kept = [
            compute_memory(method, s, recompute=again, lockstep=True).activations for s in range(4)
        ]
        assert kept == [one * depth + fixed for depth in sizes]
    assert compute_memory("local_chunked", 1, lockstep=True).activations == 2 * KEPT
    make_schedule = memory.make_lockstep_schedule
    assert make_schedule(METHODS["gpipe"], 4, 16, 8).slot_count == 2 * (8 + 2 * 4 - 2)
    assert make_schedule(METHODS["naive"], 4, 2, 1).slot_count == 2 * 2 * 4


def test_precision_optimizer_and_code_count(plain_hardware: Hardware) -> None:
    mixed = compute_memory("gpipe", 0, precision="float16", moments=2, device=plain_hardware.device)
    assert (mixed.weights, mixed.gradients) == (200, 200)
    assert (mixed.optimizer, mixed.accumulators) == (1600, 0)
    assert mixed.activations == 8 * 2 * KEPT / 2 and mixed.code == 1e8
    sizes = memory.StageSizes(
        frozen=8, weights=400, gradients=40, optimizer=4, accumulators=300, saved=30, entering=3
    )
    summed = memory.sum_stage_bytes(memory.KeptCounts(copies=2, inputs=5, activations=1), sizes)
    assert (summed.weights, summed.versions) == (408, 400)
    assert (summed.accumulators, summed.activations) == (300, 45)


def test_precisions_are_those_of_a_config_and_one_for_plans() -> None:
    of_configs = Config.model_fields["precision"].annotation.__args__
    assert set(PRECISIONS) == {*of_configs, "float16", MASTERS}
    for precision in ("16.16", "16.32", "32.32", "float32"):  # inputs, as an IPU gets them
        size = convert_input(torch.zeros(1), precision).element_size()
        assert size == PRECISIONS[precision].data


def test_the_page_shows_the_figures_of_the_files() -> None:
    """Each number of a file is in its row of the page, in the unit of its column."""
    docs = HARDWARE_FOLDER.parents[1] / "docs"
    page = (docs / "reference" / "hardware.md").read_text(encoding="utf-8").splitlines()
    rows = {line.split("`")[1]: line for line in page if line.startswith("| `")}
    assert list(rows) == [name for name in list_hardware() if name != "this"]
    for name, row in rows.items():
        hardware = read_hardware(name)
        device = hardware.device
        figures = [
            (device.memory_bytes, 1e9), (device.memory_bandwidth, 1e9),
            *((rate.peak_flops, 1e12) for rate in device.rates.values()),
            *((rate.achievable_share, 1.0) for rate in device.rates.values()),
            *((link.bandwidth, 1e9) for link in hardware.links), *((link.latency, 1e-6) for link in hardware.links),
        ]  # fmt: skip
        words = re.split("[ ,;|]+", row)
        for figure, scale in figures:
            assert f"{figure.value / scale:.4g}{'' if figure.confirmed else '*'}" in words, row
    text = (docs / "hardware.md").read_text(encoding="utf-8")
    keys = text.partition("## Measure this machine")[0].splitlines()
    example = [line for line in keys if line.startswith("    ") and "extends" not in line]
    hardware = read_hardware({"name": "page", **parse_yaml("\n".join(example), "page")})
    assert hardware.with_devices(64).devices == 64


# ---- this machine, measured


def test_figures_of_two_processes_make_a_description() -> None:
    pair = [
        {"rates": {"float32": [1e9, 4e9]}, "copied": 2e9},
        {"rates": {"float32": [3e9, 6e9]}, "copied": 4e9},
    ]
    result = {**measuring.average(pair), "memory": 8e9, "latency": 1e-5, "bandwidth": 1e8}
    hardware = read_hardware({"name": "this", **measuring.describe(result, 4, 2, "cpu")})
    device = hardware.device
    assert (hardware.devices, hardware.most_devices) == (4, None)
    assert (device.memory_bytes.value, device.memory_bandwidth.value) == (2e9, 3e9)
    assert hardware.find_rate("float32") == 2e9
    seconds = description.compute_message_seconds(hardware.links[0], 1e6)
    assert seconds == pytest.approx(1e-5 + 0.01)
    open_figures = [key for key, figure in hardware.list_figures() if not figure.confirmed]
    assert open_figures == ["device.usable_share"]
    latency = measuring.split_latency(1e-4, 1e-4 + measuring.LONG_BYTES / 1e9)
    assert latency["latency"] == 1e-4 and latency["bandwidth"] == pytest.approx(1e9)
    assert measuring.split_latency(1.0, 0.5)["bandwidth"] == measuring.LONG_BYTES / 0.5  # disturbed


@pytest.mark.slow
def test_the_command_writes_a_readable_description(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.yaml"
    main(["--out", str(out), "--seconds", "0.001"])
    result = read_hardware(str(out))
    assert set(result.device.rates) == {"float32", "float64", "bfloat16"}
    assert result.find_rate("bfloat16") > 0 and result.device.memory_bytes.value > 1e8
    assert result.links[0].name == "gloo"
    output = capsys.readouterr().out.splitlines()
    assert output[-1] == f"written: {out}" and len(output) == 1 + len(result.list_figures())


def test_plans_for_this_machine_time_the_models_parts() -> None:
    """Story: plans by FLOPs predicted 24 times the throughput of a small model on a laptop."""
    rates = {"float32": [1e9, 4e9]}
    figures = {"rates": rates, "copied": 2e9, "memory": 8e9, "latency": 1e-5, "bandwidth": 1e8}
    machine = measuring.describe(figures, 2, 1, "cpu")
    config, threads = load_config(DIGITS), torch.get_num_threads()

    def is_timed(measured_on: Any = None, **others: Any) -> bool:
        hardware = {**machine, "measured_on": {**machine["measured_on"], **(measured_on or {})}}
        request = config.model_copy(update={"hardware": hardware})
        problem = make_planning_problem(request, PlanningRequest(**others)).problem
        return all(unit.measured for unit in problem.units)

    assert is_timed() and not is_timed(measure=False) and not is_timed({"name": "another"})
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("key, value", [
    ("--threads", "0"), ("--threads", "2000"), ("--seconds", "nan"), ("--out", "x.json"), ("--out", "/nowhere/x.yaml"),
    pytest.param("--device", "cuda", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")),
])  # fmt: skip
def test_impossible_arguments_are_refused_by_key(key: str, value: str) -> None:
    (fault,) = list_faults(main, [key, value])
    assert fault.startswith(f"{key}: {value}")
