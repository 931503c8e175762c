"""Rehearsals: a config for IPUs is judged and tried without PopTorch and without its data."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ipu_pipe.config.load import configure, load_config
from ipu_pipe.job.factories import make_data
from ipu_pipe.plan.candidates import Candidate
from ipu_pipe.report.run_text import format_plan
from ipu_pipe.run.build import build
from ipu_pipe.run.planning import build_for_planning, replace_missing_data
from ipu_pipe.run.rehearsal import _list_changes, rehearse
from tests.command_line import CommandResult, run_here
from tests.support.runs import DIGITS, ROOT, list_faults

POD = "configs/pod/pod4_resnet18_pipelined.yaml"
# images of 32x32, so that two updates take a second
SMALL = ["data.size=32", "data.root=/nowhere", "replicas=1"]


def rehearse_pod(*changes: str) -> Any:
    return rehearse(load_config(POD, [*SMALL, *changes]))


@pytest.fixture
def run_command(monkeypatch: Any, capsys: Any) -> Any:
    def run(name: str, *arguments: str) -> CommandResult:
        command = importlib.import_module(f"ipu_pipe.cli.{name}")
        return run_here(command, *arguments, monkeypatch=monkeypatch, capsys=capsys)

    return run


def test_a_config_for_ipus_is_rehearsed_as_it_stands(run_command: Any) -> None:
    result = run_command("rehearse", POD, "--set", *SMALL)
    assert result.returncode == 0
    assert "in precision 16.16, not measured" in result.stdout
    assert "does not exist: planned with random images" in result.stdout
    assert "with the same loss" in result.stdout
    assert result.stdout.rstrip().endswith("fits pod4 (predicted)")
    # the run on the emulator is small, and says so
    assert "float32 on the CPU, micro_batch_size 2, gradient_accumulation 4" in result.stderr


@pytest.mark.parametrize("changes, keys", [
    (["stages=8"], ["hardware: pod4", "8 of 4 devices"]),
    (["stages=3"], ["stages: 3 IPUs: IPUs are reserved by powers of 2"]),
    (["data.subset=100"], ["3 microbatches an epoch do not fill one batch"]),
    (["gradient_accumulation=6"], ["gradient_accumulation: 6", "7"]),
    (["backend.ipu.device_iterations=3", "steps=4"], ["device_iterations: 3"]),
    (["method=pipedream"], ["method: pipedream"]),
])  # fmt: skip
def test_a_config_that_ipus_refuse_is_one_line(
    run_command: Any, changes: list[str], keys: list[str]
) -> None:
    result = run_command("rehearse", POD, "--set", *SMALL, *changes)
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.returncode == 2 and len(lines) == 1
    assert all(key in lines[0] for key in keys)


def test_a_stage_over_memory_is_one_line_and_exit_code_2(run_command: Any, tmp_path: Path) -> None:
    tiny = tmp_path / "tiny.yaml"
    pod = ROOT / "configs" / "hardware" / "pod4.yaml"
    tiny.write_text(f"extends: {pod}\ndevice: {{memory_bytes: 20000}}\n")
    keys = [f"hardware={tiny}", "method=gpipe", "data.subset=64", "data.test_subset=8"]
    result = run_command("rehearse", DIGITS, "--set", *keys)
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.returncode == 2 and len(lines) == 1
    assert "hardware: does not fit tiny: device 0 needs 86.7 kB of 20 kB" in lines[0]
    assert "433.4%" in result.stdout


@pytest.mark.slow
def test_a_stage_over_memory_is_one_line_with_a_change_that_fits() -> None:
    misfit = rehearse_pod("micro_batch_size=8192", "stages=2").misfit
    assert "does not fit pod4: device 0 needs" in misfit and "it would fit with" in misfit
    change = misfit.partition("it would fit with ")[2].split()
    changed = [text for text in change if "=" in text]
    stages = "stages={count: 2, by: hardware}"
    again = rehearse_pod("micro_batch_size=8192", stages, *changed)
    assert again.misfit is None


@pytest.mark.parametrize("size, accumulate, sizes", [
    (8, 4, [(4, 8), (2, 16), (1, 32)]),
    (7, 4, [(2, 14), (1, 28)]),
    (6, 1, [(3, 2), (1, 6)]),
])  # fmt: skip
def test_a_change_that_fits_leaves_the_samples_of_an_update(
    size: int, accumulate: int, sizes: Any
) -> None:
    """Story: 4 microbatches of 7 became 9 of 3, an update of 27 samples."""
    candidate = Candidate("gpipe", 1, 2, size, accumulate, True)
    hardware = SimpleNamespace(device=SimpleNamespace(streaming_bytes=None))
    cut: Any = SimpleNamespace(
        problem=SimpleNamespace(hardware=hardware, streamed=False),
        prediction=SimpleNamespace(candidate=candidate),
    )
    _, *changes = _list_changes(cut)
    assert [(one.micro_batch_size, one.gradient_accumulation) for one, *_ in changes] == sizes


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_a_config_for_ipus_is_planned_from_shapes_with_the_same_figures(norm: str) -> None:
    keys = [*SMALL, "steps=2", "data.bytes=false", f"model.args.norm={norm}"]
    keys += ["model.args.bytes=false"]
    config, _ = replace_missing_data(load_config(POD, keys))
    shapes = build_for_planning(config)
    assert shapes.example[0].is_meta
    assert format_plan(shapes) == format_plan(build(config))
    broadcasts = load_config(POD, [*keys, "replicas=2", "hardware=pod16"])
    if norm == "batch":
        (fault,) = list_faults(lambda: build_for_planning(broadcasts))
        assert fault.startswith("backend.ipu.broadcast_buffers: true: training writes bn1.running")
    else:
        build_for_planning(broadcasts)


@pytest.mark.slow
def test_a_config_without_hardware_is_judged_on_the_smallest_pod_that_suffices() -> None:
    said: list[str] = []
    config = load_config(POD, [*SMALL, "hardware=null", "replicas=4"])
    rehearsal = rehearse(config, said.append)
    assert "pod16" in said[0] and rehearsal.text.endswith("fits pod16 (predicted)")


def test_a_plan_and_a_dry_run_need_neither_data_nor_the_sdk(run_command: Any) -> None:
    for name, options in (("train", ["--dry-run"]), ("plan", ["--hardware", "pod4"])):
        result = run_command(name, POD, *options, "--set", *SMALL, "steps=2")
        assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("keys", [
    {"name": "cifar10", "root": "/nowhere", "size": 16},
    {"name": "mnist", "root": "/nowhere", "validation": 100},
    {"name": "shakespeare", "root": "/nowhere", "context": 8},
    {"name": "image_folder", "root": "/nowhere", "bytes": True},
    {"name": "translation", "root": "/nowhere"},
])  # fmt: skip
def test_data_that_is_missing_has_a_stand_in_of_its_shape(keys: Any) -> None:
    config, line = replace_missing_data(configure(data=keys))
    x, _ = make_data(config).train_batch(0, 0, 2)
    shapes = {
        "cifar10": (2, 3, 16, 16),
        "mnist": (2, 1, 28, 28),
        "shakespeare": (2, 8),
        "translation": (2, 2, 32),
    }
    assert tuple(x.shape) == shapes.get(keys["name"], (2, 3, 224, 224))
    assert "does not exist" in line


@pytest.mark.parametrize("keys, fault", [
    ({"name": "image_folder", "sise": 64}, "data.sise: 64: unknown key for image_folder"),
    ({"name": "image_folder", "size": "a"}, "data: data.size: a: must be a whole number >= 1"),
    ({"name": "cifar10", "size": 7}, "data: data.size: 7: must be 32, or 16 or 8"),
    ({"name": "mnist", "subset": 60_001}, "data: data.subset: 60001: must be from 1 to 60000"),
    ({"name": "shakespeare", "foo": 3}, "data.foo: 3: unknown key for shakespeare"),
])  # fmt: skip
def test_a_stand_in_has_the_options_of_its_set(keys: Any, fault: str) -> None:
    def make_stand_in() -> None:
        config, _ = replace_missing_data(configure(data={**keys, "root": "/nowhere"}))
        make_data(config)

    (line,) = list_faults(make_stand_in)
    assert line.startswith(fault)


def test_a_set_without_a_stand_in_keeps_its_config() -> None:
    config = configure(data={"name": "digits", "root": "/nowhere"})
    assert replace_missing_data(config) == (config, "")
