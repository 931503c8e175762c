"""Test hardware descriptions and the times, links and memory that follow, against hand results."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch

from ipu_pipe.backends.ipu.feed import convert_input
from ipu_pipe.config.load import Config, dump_yaml, parse_yaml
from ipu_pipe.errors import BadInput
from ipu_pipe.hardware import description, memory, unit_costs
from ipu_pipe.hardware.description import (
    HARDWARE_FOLDER,
    Hardware,
    SourcedFigure,
    find_this_file,
    list_hardware,
    read_hardware,
)
from ipu_pipe.hardware.paper_figures import compute_worker_footprint
from ipu_pipe.hardware.precision import MASTERS, PRECISIONS
from ipu_pipe.hardware.unit_costs import MeasuredPasses, Unit
from ipu_pipe.schedule.clock import Transfer
from ipu_pipe.schedule.methods import METHODS, resolve_method
from tests.support.runs import list_faults
from tests.support.units import join_units

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


def list_hardware_faults(keys: Dict[str, Any], folder: Path) -> List[str]:
    file = folder / "own.yaml"
    file.write_text(dump_yaml(keys))
    return [fault.replace(str(file), "own.yaml") for fault in list_faults(read_hardware, str(file))]


# ---- descriptions


def test_every_named_description_is_complete_and_names_its_sources() -> None:
    devices = {
        "gc2": 2, "gc200": 1, "bow": 1, "m2000": 4, "pod4": 4, "pod16": 16, "pod64": 64,
        "v100x8": 8, "h100x8": 8, "h200x8": 8, "a100": 1, "t4": 1, "v5e": 4,
    }  # fmt: skip
    assert {*devices, "this"} == set(list_hardware())
    for name, count in devices.items():
        hardware = read_hardware(name)
        assert hardware.name == name and hardware.about and hardware.devices == count
        for key, figure in hardware.list_figures():
            assert figure.source != "not stated", (name, key)
            assert not ("estimate" in figure.source and figure.confirmed), (name, key)
    assert [read_hardware(name).lockstep for name in ("gc2", "pod64", "v100x8", "h200x8")] == [
        True,
        True,
        False,
        False,
    ]
    # of products: see test_predictions.py
    assert read_hardware("v100x8").find_rate("float16") == pytest.approx(71.25e12)
    figures = read_hardware("m2000").format_figures()
    assert "device.code_share 0.2 (estimate for code and exchange; not confirmed)" in figures
    assert "device.memory_bandwidth 4.75e+13 (Laskin et al. 2020, appendix D)" in figures


def test_a_users_file_is_a_description_like_the_named_ones(tmp_path: Path) -> None:
    file = tmp_path / "wafer.yaml"
    file.write_text(dump_yaml({**PLAIN, "name": "wafer"}))
    assert read_hardware(str(file)) == read_hardware({**PLAIN, "name": "wafer"})
    (tmp_path / "larger.yaml").write_text(
        "extends: wafer.yaml\nname: larger\ndevice: {memory_bytes: 2e9}\n"
    )
    larger = read_hardware(str(tmp_path / "larger.yaml"))
    assert (larger.device.usable_bytes, larger.device.code_bytes) == (1.8e9, 0.2e9)
    assert read_hardware(str(file)).device.usable_bytes == 0.9e9
    # a named one is extended by its name
    (tmp_path / "mine.yaml").write_text("extends: pod16\ndevice: {memory_bytes: 2e9}\n")
    mine, pod16 = read_hardware(str(tmp_path / "mine.yaml")), read_hardware("pod16")
    assert (mine.device.memory_bytes.value, mine.devices) == (2e9, pod16.devices)


def test_bad_files_are_reported_one_line_per_fault_with_the_nearest_key(tmp_path: Path) -> None:
    device = {**PLAIN["device"], "memory_bytes": -3, "usable_share": {"value": 1.2, "sorce": "x"}}
    device["memory_bandwidth"] = {"value": 3e9, "confirmed": True}
    device["rates"] = {
        "float17": {"peak_flops": 1, "achievable_share": 1},
        "float32": {"peak_flops": 1e12},
    }
    links = [PLAIN["links"][0], {**PLAIN["links"][1], "bandwith": 1}]
    faults = list_hardware_faults(
        {**PLAIN, "lockstep": "maybe", "device": device, "links": links, "hots": 3}, tmp_path
    )
    begins = [
        "lockstep: maybe: ",
        "device.memory_bytes.value: -3: must be greater than or equal to 1",
        "device.usable_share.value: 1.2: must be less than or equal to 1",
        "device.usable_share.sorce: x: unknown key, nearest is source", "device.memory_bandwidth.confirmed: true: says that",
        "device.rates.float17: float17: ", "device.rates.float32.achievable_share: missing: ",
        "links.1.bandwith: 1: unknown key, nearest is bandwidth", "hots: 3: unknown key, nearest is host",
    ]  # fmt: skip
    assert len(faults) == len(begins)
    assert all(fault.startswith(f"own.yaml: {begin}") for fault, begin in zip(faults, begins)), (
        faults
    )


@pytest.mark.parametrize("tiny", [5e-324, 1e-300, 0.5])
def test_a_figure_so_small_that_times_would_be_infinite_is_refused(
    tiny: float, tmp_path: Path
) -> None:
    """Story: a plan for such hardware printed nan and inf, and exited with 0."""
    rates = {"float32": {"peak_flops": tiny, "achievable_share": min(tiny, 1e-7)}}
    device = {**PLAIN["device"], "memory_bytes": tiny, "memory_bandwidth": tiny, "rates": rates}
    links_ = [{**PLAIN["links"][0], "bandwidth": tiny, "latency": 1e300}, PLAIN["links"][1]]
    keys = [
        fault.split(": ")[1]
        for fault in list_hardware_faults({**PLAIN, "device": device, "links": links_}, tmp_path)
    ]
    assert keys == [
        "device.memory_bytes.value", "device.memory_bandwidth.value", "device.rates.float32.peak_flops.value",
        "device.rates.float32.achievable_share.value", "links.0.bandwidth.value", "links.0.latency.value",
    ]  # fmt: skip


def test_no_text_of_a_description_controls_the_terminal(tmp_path: Path) -> None:
    """Story: a source with an escape sequence cleared the screen of the person who planned."""
    device = {**PLAIN["device"], "memory_bytes": {"value": 1e9, "source": "\x1b[2J"}}
    levels = [{**PLAIN["links"][0], "name": "a\x1b[31m"}, PLAIN["links"][1]]
    evil = read_hardware(
        {**PLAIN, "name": "n\x07", "about": "\x9b2J", "device": device, "links": levels}
    )
    lines = [
        evil.name,
        evil.about,
        *evil.format_figures(),
        *description.make_transfer(evil, 0, 1, 1.0).links,
    ]
    assert all(line.isprintable() for line in lines) and "\\x1b[2J" in evil.format_figures()[0]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"devices": 9}, "devices: 9: must be at most 8: no level of links holds more"),
        ({"links": []}, "devices: 8: must be at most 1"),
        ({"links": PLAIN["links"][::-1]}, "links.1.holds: 4: must be a larger multiple of 8"),
        (
            {"links": [PLAIN["links"][0], {**PLAIN["links"][1], "holds": 6}]},
            "links.1.holds: 6: must be a larger",
        ),
        (
            {"links": [{**PLAIN["links"][0], "holds": None}, PLAIN["links"][1]]},
            "links.0.holds: null: only the last",
        ),
        (
            {"device": {**PLAIN["device"], "code_share": 0.9}},
            "device.code_share: 0.9: leaves nothing of usable_share",
        ),
        (
            {"device": {**PLAIN["device"], "streaming_bytes": 1}},
            "device.streaming_bytes: given or null alone",
        ),
        ({"device": {**PLAIN["device"], "rates": {}}}, "device.rates: {}: must state at least one"),
        ({"device": None}, "device: null: must be a mapping"),
    ],
)
def test_inconsistent_figures_are_refused(
    changes: Dict[str, Any], message: str, tmp_path: Path
) -> None:
    (fault,) = list_hardware_faults({**PLAIN, **changes}, tmp_path)
    assert fault.startswith(f"own.yaml: {message}")


def test_unknown_names_are_refused_with_the_known_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadInput, match=r"^--hardware: pod61: .*\bpod64\b"):
        read_hardware("pod61")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    with pytest.raises(BadInput, match=r"^hardware: this: .* python tools/measure_hardware.py"):
        read_hardware("this", "hardware")
    # ended in "no such config file"
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: this\ndevices: 2\n")
    with pytest.raises(BadInput, match=r"mine.yaml: extends: this: .* is not measured yet"):
        read_hardware(str(mine))
    find_this_file().parent.mkdir(parents=True)
    find_this_file().write_text(
        dump_yaml({key: value for key, value in PLAIN.items() if key != "name"})
    )
    assert read_hardware("this").name == "this"
    assert read_hardware(str(mine)).devices == 2


def test_unavailable_devices_and_precisions_are_refused(plain_hardware: Hardware) -> None:
    assert (
        plain_hardware.with_devices(2).devices == 2
        and read_hardware("v100x8").with_devices(64).devices == 64
    )
    for devices in (0, 9):
        with pytest.raises(BadInput, match=f"^--devices: {devices}: hardware plain: "):
            plain_hardware.with_devices(devices)
    with pytest.raises(
        BadInput, match="^precision: 16.16: hardware plain states no rate for float16"
    ):
        plain_hardware.find_rate("16.16")


# ---- times


def make_unit(name: str = "a", **changes: Any) -> Unit:
    keys: Dict[str, Any] = {
        "forward_flops": 1e9, "backward_flops": 2e9, "parameters": 1000, "output_bytes": 400.0, "activation_bytes": 4000.0,
    }  # fmt: skip
    return Unit(name, **{**keys, **changes})


def test_a_pass_takes_its_arithmetic_or_its_memory_traffic(plain_hardware: Hardware) -> None:
    assert unit_costs.compute_pass_seconds(
        make_unit(), plain_hardware, "float32", 4
    ) == pytest.approx((4e9 / 0.5e12, 8e9 / 0.5e12))
    moving = make_unit(forward_flops=0.0, backward_flops=0.0)
    forward = (4 * 1000 + 2 * 4 * 4000) / 1e11
    backward = (4 * 1000 + 2 * 4 * 1000 + 4 * 4 * 4000) / 1e11
    assert unit_costs.compute_pass_seconds(moving, plain_hardware, "float32", 4) == pytest.approx(
        (forward, backward)
    )


@pytest.mark.parametrize(
    "samples, forward", [(2, 1.0), (4, 2.0), (6, 2.5), (8, 3.0), (16, 5.0), (1, 0.5)]
)
def test_times_between_measured_sizes_are_interpolated(
    plain_hardware: Hardware, samples: int, forward: float
) -> None:
    measured = (
        MeasuredPasses(8, 3.0, 6.0),
        MeasuredPasses(4, 2.0, 4.0),
        MeasuredPasses(2, 1.0, 2.0),
    )
    seconds = unit_costs.compute_pass_seconds(
        make_unit(measured=measured), plain_hardware, "float32", samples
    )
    assert seconds == pytest.approx((forward, 2 * forward))
    one = make_unit(measured=(MeasuredPasses(samples, 2.0, 3.0),))  # one size is scaled
    assert unit_costs.compute_pass_seconds(one, plain_hardware, "float32", 2 * samples) == (
        4.0,
        6.0,
    )


def test_an_update_is_memory_traffic(plain_hardware: Hardware) -> None:
    # float32 with Adam: weights and two moments read and written, the gradient read
    seconds = unit_costs.compute_update_seconds(make_unit(), plain_hardware, "float32", 2)
    assert seconds == pytest.approx(1000 * (2 * 4 * 3 + 4) / 1e11)
    assert (
        unit_costs.compute_update_seconds(
            make_unit(update_seconds=3.0), plain_hardware, "float32", 2
        )
        == 3.0
    )


def test_units_join_to_a_stage() -> None:
    a = make_unit(
        "a", measured=(MeasuredPasses(1, 1.0, 2.0), MeasuredPasses(4, 3.0, 5.0)), update_seconds=1.0
    )
    b = make_unit("b", parameters=7, output_bytes=3.0, measured=(MeasuredPasses(4, 10.0, 20.0),))
    assert join_units([a, b]) == Unit(
        "a", 2e9, 4e9, 1007, 3.0, 8000.0, 4, (MeasuredPasses(4, 13.0, 25.0),), 1.0
    )


# ---- links


def test_the_smallest_level_that_joins_devices_carries_their_messages(
    plain_hardware: Hardware,
) -> None:
    assert description.find_level(plain_hardware, [2, 2]) is None
    names = [description.find_level(plain_hardware, ends).name for ends in ([0, 3], [4, 7], [3, 4])]
    assert names == ["inside", "inside", "between"]
    assert description.make_transfer(plain_hardware, 0, 1, 1e9) == Transfer(
        0.1, 1e-6, ("inside from device 0", "inside to device 1")
    )
    across = description.make_transfer(plain_hardware, 3, 4, 1e9, sharing=2)
    assert across == Transfer(
        2.0, 1e-3, ("between from devices 0 to 3", "between to devices 4 to 7")
    )
    assert description.compute_message_seconds(plain_hardware.links[1], 1e9, 2) == pytest.approx(
        across.seconds + across.latency
    )
    assert description.make_transfer(plain_hardware, 5, 5, 1e9) == Transfer()
    with pytest.raises(BadInput, match="no level joins devices 0 and 8"):
        description.make_transfer(plain_hardware, 0, 8, 1.0)


def test_a_ring_sends_its_bytes_nearly_twice(plain_hardware: Hardware) -> None:
    inside, between = plain_hardware.links
    assert description.compute_all_reduce_seconds(inside, 4e9, 1) == 0.0
    assert description.compute_all_reduce_seconds(inside, 4e9, 4) == pytest.approx(
        2 * 3 / 4 * 4e9 / 1e10 + 6e-6
    )
    transfer = description.make_all_reduce(plain_hardware, [0, 4], 1e9)
    assert description.compute_all_reduce_seconds(between, 1e9, 2) == pytest.approx(1.002)
    assert transfer.seconds + transfer.latency == pytest.approx(1.002)
    assert set(transfer.links) == {
        f"between {way} devices {group}" for way in ("from", "to") for group in ("0 to 3", "4 to 7")
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
        ("gpipe", 0, 1, 8), ("gpipe", 3, 1, 8), ("pipedream_flush", 0, 1, 4), ("pipedream_flush", 3, 1, 1),
        ("pipedream_2bw", 0, 2, 4), ("pipedream_2bw", 3, 2, 1), ("naive", 0, 1, 1), ("local_greedy", 0, 1, 1),
        ("pipelined_backprop", 0, 1, 7), ("pipelined_backprop", 3, 1, 1),
    ],
)  # fmt: skip
def test_memory_follows_the_method(method: str, stage: int, versions: int, in_flight: int) -> None:
    """Versions are those of the papers; in flight are N microbatches (GPipe), P - s (1F1B),
    2(P-1-s) + 1 (dataflow)."""
    memory_bytes = compute_memory(method, stage)
    assert (
        memory_bytes.weights,
        memory_bytes.versions,
        memory_bytes.gradients,
        memory_bytes.optimizer,
    ) == (
        400,
        400 * (versions - 1),
        400,
        400,
    )
    assert (memory_bytes.activations, memory_bytes.code) == (in_flight * 2 * KEPT, 0)
    assert memory_bytes.total == 400 * (versions + 2) + in_flight * 2 * KEPT
    recomputed = compute_memory(method, stage, recompute=True)
    assert recomputed.activations == in_flight * ENTERS + 2 * KEPT
    assert (
        recomputed.total - recomputed.activations == memory_bytes.total - memory_bytes.activations
    )


def test_memory_equals_the_footprint_of_the_paper() -> None:
    """Narayanan et al. 2021, section 3, count 2|W|/d + A/d + d A_in; GPipe |W|/d + A/d + m A_in.

    Both are weights and activations alone.
    """
    paper = compute_worker_footprint(4 * 400, 4 * 2 * KEPT, ENTERS, 4, 8, recompute=True)
    for method in ("gpipe", "pipedream_flush", "pipedream_2bw"):
        ours = compute_memory(method, 0, recompute=True)
        assert ours.weights + ours.versions + ours.activations == paper[method]


def test_stages_in_lock_step_stash_as_poptorch_does() -> None:
    """Four stages keep 7, 5, 3, 1 microbatches in either timeline of a method that flushes.

    The last stage recomputes nothing.
    """
    for method in ("gpipe", "pipedream_flush"):
        stashed = [compute_memory(method, s, lockstep=True).activations for s in range(4)]
        assert stashed == [2 * KEPT * depth for depth in (7, 5, 3, 1)]
        recomputed = [
            compute_memory(method, s, recompute=True, lockstep=True).activations for s in range(4)
        ]
        assert recomputed == [ENTERS * depth + 2 * KEPT for depth in (7, 5, 3, 0)]
    assert [compute_memory("local_chunked", s, lockstep=True).activations for s in range(2)] == [
        2 * KEPT
    ] * 2
    assert memory.make_lockstep_schedule(METHODS["gpipe"], 4, 16, 8).slot_count == 2 * (
        8 + 2 * 4 - 2
    )
    assert memory.make_lockstep_schedule(METHODS["naive"], 4, 2, 1).slot_count == 2 * 2 * 4


def test_precision_optimizer_and_code_count(plain_hardware: Hardware) -> None:
    mixed = compute_memory("gpipe", 0, precision="float16", moments=2, device=plain_hardware.device)
    assert (mixed.weights, mixed.gradients, mixed.optimizer, mixed.accumulators) == (
        200,
        200,
        1600,
        0,
    )
    assert mixed.activations == 8 * 2 * KEPT / 2 and mixed.code == 1e8
    amounts = {
        "weights": 400,
        "gradients": 40,
        "optimizer": 4,
        "accumulators": 300,
        "saved": 30,
        "entering": 3,
    }
    summed = memory.sum_stage_bytes(
        memory.KeptCounts(copies=2, inputs=5, activations=1),
        memory.StageSizes(frozen=8, **amounts),
    )
    assert (summed.weights, summed.versions, summed.accumulators, summed.activations) == (
        408,
        400,
        300,
        45,
    )


def test_precisions_are_those_of_a_config_and_one_for_plans() -> None:
    assert set(PRECISIONS) == {
        *Config.model_fields["precision"].annotation.__args__,
        "float16",
        MASTERS,
    }
    assert HARDWARE_FOLDER.is_dir()


def test_the_page_shows_the_figures_of_the_files() -> None:
    def format_figure(figure: SourcedFigure, scale: float = 1.0) -> str:
        return f"{figure.value / scale:.4g}{'' if figure.confirmed else '*'}"

    def format_row(name: str) -> str:
        hardware = read_hardware(name)
        device = hardware.device
        rates = "; ".join(
            f"{kind} {format_figure(rate.peak_flops, 1e12)} x {format_figure(rate.achievable_share)}"
            for kind, rate in device.rates.items()
        )
        level = "; ".join(
            f"{link.name} {format_figure(link.bandwidth, 1e9)}, {format_figure(link.latency, 1e-6)} us"
            + (f", shared by {link.shared_by}" if link.shared_by > 1 else "")
            for link in hardware.links
        )
        sizes = f"{format_figure(device.memory_bytes, 1e9)} | {rates} | {format_figure(device.memory_bandwidth, 1e9)}"
        return f"| `{name}` | {hardware.devices} | {sizes} | {level} |"

    docs = HARDWARE_FOLDER.parents[1] / "docs"
    keys = (
        (docs / "hardware.md")
        .read_text(encoding="utf-8")
        .partition("## Measure this machine")[0]
        .splitlines()
    )
    example = "\n".join(line for line in keys if line.startswith("    ") and "extends" not in line)
    page = (docs / "reference" / "hardware.md").read_text(encoding="utf-8").splitlines()
    assert (
        read_hardware({"name": "page", **parse_yaml(example, "page")}).with_devices(64).devices
        == 64
    )
    assert [line for line in page if line.startswith("| `")] == [
        format_row(name) for name in list_hardware() if name != "this"
    ]


@pytest.mark.parametrize("precision", ["16.16", "16.32", "32.32", "float32"])
def test_plans_count_inputs_in_the_precision_of_an_ipu(precision: str) -> None:
    assert convert_input(torch.zeros(1), precision).element_size() == PRECISIONS[precision].data
