"""Test the measured description of this machine, and the command that writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ipu_pipe.cli.measure_hardware import main
from ipu_pipe.config.load import load_config
from ipu_pipe.errors import BadInput
from ipu_pipe.hardware import measuring
from ipu_pipe.hardware.description import compute_message_seconds, read_hardware
from ipu_pipe.run.planning import PlanningRequest, make_planning_problem
from tests.support.runs import ROOT, list_faults


def test_the_measured_time_is_that_of_one_call() -> None:
    calls = []
    assert measuring.time_median(lambda: calls.append(0), 1e-6) > 0 and len(calls) > 1


def test_a_long_message_takes_its_latency_and_its_bytes() -> None:
    latency = measuring.split_latency(1e-4, 1e-4 + measuring.LONG_BYTES / 1e9)
    assert latency["latency"] == 1e-4 and latency["bandwidth"] == pytest.approx(1e9)
    assert measuring.split_latency(1.0, 0.5)["bandwidth"] == measuring.LONG_BYTES / 0.5  # disturbed


def test_figures_of_two_processes_make_a_description() -> None:
    pair = [
        {"rates": {"float32": [1e9, 4e9]}, "copied": 2e9},
        {"rates": {"float32": [3e9, 6e9]}, "copied": 4e9},
    ]
    result = {**measuring.average(pair), "memory": 8e9, "latency": 1e-5, "bandwidth": 1e8}
    hardware = read_hardware({"name": "this", **measuring.describe(result, 4, 2, "cpu")})
    assert (hardware.devices, hardware.most_devices, hardware.device.memory_bytes.value) == (
        4,
        None,
        2e9,
    )
    assert hardware.device.memory_bandwidth.value == 3e9 and hardware.find_rate("float32") == 2e9
    assert compute_message_seconds(hardware.links[0], 1e6) == pytest.approx(1e-5 + 0.01)
    assert [key for key, figure in hardware.list_figures() if not figure.confirmed] == [
        "device.usable_share"
    ]


@pytest.mark.slow
def test_the_command_writes_a_readable_description(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.yaml"
    main(["--out", str(out), "--seconds", "0.001"])
    result = read_hardware(str(out))
    assert (
        set(result.device.rates) == {"float32", "float64", "bfloat16"}
        and result.find_rate("bfloat16") > 0
    )
    assert result.links[0].name == "gloo" and result.device.memory_bytes.value > 1e8
    output = capsys.readouterr().out.splitlines()
    assert output[-1] == f"written: {out}" and len(output) == 1 + len(result.list_figures())


def test_plans_for_this_machine_time_the_models_parts() -> None:
    """Story: plans by FLOPs predicted 24 times the throughput of a small model on a laptop."""
    figures = {
        "rates": {"float32": [1e9, 4e9]},
        "copied": 2e9,
        "memory": 8e9,
        "latency": 1e-5,
        "bandwidth": 1e8,
    }
    machine = measuring.describe(figures, 2, 1, "cpu")
    config, threads = load_config(ROOT / "configs" / "mlp_digits.yaml"), torch.get_num_threads()

    def is_timed(**others: Any) -> bool:
        hardware = {
            **machine,
            "measured_on": {**machine["measured_on"], **others.pop("measured_on", {})},
        }
        problem = make_planning_problem(
            config.model_copy(update={"hardware": hardware}), PlanningRequest(**others)
        ).problem
        return all(unit.measured for unit in problem.units)

    assert is_timed() and not is_timed(measure=False)
    assert not is_timed(measured_on={"name": "another"}) and not is_timed(
        measured_on={"device": "cuda"}
    )
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("key, value", [
    ("--threads", "0"), ("--threads", "2000"), ("--seconds", "nan"), ("--seconds", "0"), ("--out", "x.json"),
    ("--out", "/nowhere/x.yaml"),
])  # fmt: skip
def test_impossible_arguments_are_refused_by_key(key: str, value: str) -> None:
    (fault,) = list_faults(main, [key, value])
    assert fault.startswith(f"{key}: {value}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_reported() -> None:
    with pytest.raises(BadInput, match="^--device: cuda: this PyTorch finds no GPU: must be cpu$"):
        main(["--device", "cuda"])
