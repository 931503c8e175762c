"""Rehearsals: a config for IPUs is judged and tried without PopTorch and without its data."""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import ipu_pipe
from ipu_pipe.config.load import configure, load_config
from ipu_pipe.job.factories import make_data
from ipu_pipe.plan.candidates import Candidate
from ipu_pipe.report.run_text import format_plan
from ipu_pipe.run.build import build
from ipu_pipe.run.planning import build_for_planning, replace_missing_data
from ipu_pipe.run.proposal import Wish, suggest_config
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
    assert "does not exist: planned with random images" in result.stdout
    assert "with the same loss" in result.stdout
    assert result.stdout.rstrip().endswith("fits pod4 (predicted)")
    # the run on the emulator is small, and says so
    assert "float32 on the CPU, micro_batch_size 2, gradient_accumulation 4" in result.stderr


@pytest.mark.parametrize("changes", [
    ["early_stopping={patience: 1}"],
    ["lr_schedule.name=plateau"],
    ["method=local_sgd", "method_args={outer: {fragments: 2, delay: 1}, local_steps: 400}", "evaluate.steps=400"],
    ["method=local_sgd", "model.args.layers=9", "stages=8"],
    ["method=local_chunked", "method_args={blocks: 2, block_accumulation: [3, 2]}"],
    ["method=pipedream", "stages=1", "method_args.constant_delay.updates=[[2, 1, 0, 1]]"],
])  # fmt: skip
def test_the_small_run_keeps_the_config_possible(changes: list[str]) -> None:
    assert "with the same loss" in rehearse(load_config(DIGITS, changes)).text


@pytest.mark.parametrize("change, keys", [
    ("stages=8", ["hardware: pod4", "8 of 4 devices"]),
    ("stages=3", ["stages: 3 IPUs: IPUs are reserved by powers of 2"]),
    ("data.subset=100", ["3 microbatches an epoch do not fill one batch"]),
    ("gradient_accumulation=6", ["gradient_accumulation: 6", "7"]),
    ("backend.ipu.device_iterations=3", ["device_iterations: 3"]),
    ("method=pipedream", ["method: pipedream"]),
])  # fmt: skip
def test_a_config_that_ipus_refuse_is_one_line(change: str, keys: list[str]) -> None:
    (fault,) = list_faults(rehearse_pod, "steps=4", change)
    assert all(key in fault for key in keys)


def test_a_stage_over_memory_is_one_line_and_exit_code_2(run_command: Any, tmp_path: Path) -> None:
    tiny, pod = tmp_path / "tiny.yaml", ROOT / "configs" / "hardware" / "pod4.yaml"
    tiny.write_text(f"extends: {pod}\ndevice: {{memory_bytes: 20000}}\n")
    keys = [f"hardware={tiny}", "method=gpipe", "data.subset=64", "data.test_subset=8"]
    result = run_command("rehearse", DIGITS, "--set", *keys)
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.returncode == 2 and "433.4%" in result.stdout
    assert "hardware: does not fit tiny: device 0 needs 86.7 kB of 20 kB" in line


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
    (7, 4, [(2, 14), (1, 28)]), (6, 1, [(3, 2), (1, 6)]),
])  # fmt: skip
def test_a_change_that_fits_leaves_the_samples_of_an_update(
    size: int, accumulate: int, sizes: Any
) -> None:
    """Story: 4 microbatches of 7 became 9 of 3, an update of 27 samples."""
    cut: Any = Mock()
    cut.problem.hardware.device.streaming_bytes, cut.problem.streamed = None, False
    cut.prediction.candidate = Candidate("gpipe", 1, 2, size, accumulate, True)
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


@pytest.mark.parametrize("keys, shape", [
    ({"name": "cifar10", "size": 16}, (3, 16, 16)), ({"name": "mnist", "validation": 100}, (1, 28, 28)),
    ({"name": "shakespeare", "context": 8}, (8,)), ({"name": "image_folder", "bytes": True}, (3, 224, 224)),
    ({"name": "translation"}, (2, 32)),
])  # fmt: skip
def test_data_that_is_missing_has_a_stand_in_of_its_shape(keys: Any, shape: Any) -> None:
    config, line = replace_missing_data(configure(data={**keys, "root": "/nowhere"}))
    x, _ = make_data(config).train_batch(0, 0, 2)
    assert tuple(x.shape) == (2, *shape) and "does not exist" in line


@pytest.mark.parametrize("keys, fault", [
    ({"name": "image_folder", "sise": 64}, "data.sise: 64: unknown key for image_folder"),
    ({"name": "image_folder", "size": "a"}, "data: data.size: a: must be a whole number >= 1"),
    ({"name": "cifar10", "size": 7}, "data: data.size: 7: must be 32, or 16 or 8"),
    ({"name": "mnist", "subset": 60_001}, "data: data.subset: 60001: must be from 1 to 60000"),
])  # fmt: skip
def test_a_stand_in_has_the_options_of_its_set(keys: Any, fault: str) -> None:
    def make_stand_in() -> None:
        config, _ = replace_missing_data(configure(data={**keys, "root": "/nowhere"}))
        make_data(config)

    (line,) = list_faults(make_stand_in)
    assert line.startswith(fault)


# ---- ipu-pipe new

MINE = """
import torch
from torch import nn
import ipu_pipe

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(4, width)

    def forward(self, x):
        return x + torch.relu(self.norm(self.conv(x)))

def make(norm, mark=lambda module: module):
    blocks = [Block(16), Block(16), mark(Block(16)), Block(16)]
    return nn.Sequential(nn.Conv2d(3, 16, 3), norm, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 7))

def net():
    return make(nn.GroupNorm(4, 16))

def marked():
    return make(nn.BatchNorm2d(16), ipu_pipe.begin_stage)

def segments():
    return nn.Conv2d(3, 7, 1)

def load_data():
    data = torch.utils.data.TensorDataset(torch.rand(256, 3, 16, 16), torch.randint(7, (256,)))
    loader = torch.utils.data.DataLoader(data, 4)
    return ipu_pipe.from_loader(loader, loader)
"""
WISH = Wish("new_mine:net", "pod4", (3, 16, 16), 64)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Any) -> Path:
    """Return a folder with a model of a user's own, which is the current one."""
    (tmp_path / "new_mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def run_new(folder: Path, monkeypatch: Any, capsys: Any) -> Any:
    def run(*arguments: str) -> CommandResult:
        command = importlib.import_module("ipu_pipe.cli.new")
        return run_here(command, *arguments, monkeypatch=monkeypatch, capsys=capsys)

    return run


def test_printed_commands_can_be_pasted(run_new: Any) -> None:
    """Story: a name with a space was two arguments."""
    wish = "--hardware", "pod4", "--shape", "3,16,16", "--stages", "1", "--batch", "8"
    result = run_new("new_mine:net", *wish, "--out", "my net.yaml")
    rehearsal, trial, run = map(shlex.split, result.stdout.splitlines())
    assert rehearsal[-1] == "my net.yaml" and run[-3:] == ["my net.yaml", "--out", "runs/my net"]
    assert "runs/my net_try" in trial


def test_a_config_for_a_pod_is_written_and_rehearses(run_new: Any) -> None:
    """Story: a user's own config extended one of configs/pod, whose model arguments stayed."""
    result = run_new("new_mine:net", "--hardware", "pod4", "--shape", "3,16,16", "--stages", "2", "--batch", "64")  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0].endswith("net_pod4.yaml")
    config = load_config("net_pod4.yaml")
    assert config.data.options()["classes"] == 7 and len(config.stages) == 1
    assert config.replicas * 2 == 4 and config.precision == "16.16"
    assert config.gradient_accumulation >= 3
    assert rehearse(config).text.endswith("fits pod4 (predicted)")
    # Story: the command that was printed for this machine was refused, since it has no IPUs
    settings = result.stdout.splitlines()[1].partition(" --set ")[2].split()
    summary = ipu_pipe.train(load_config("net_pod4.yaml", settings), "runs/try", quiet=True)
    assert summary["steps"] == 3
    again = run_new("new_mine:net", "--hardware", "pod4")
    assert again.returncode == 2 and "net_pod4.yaml: exists already" in again.stderr


def test_the_users_own_data_are_rehearsed_by_their_shape(folder: Path) -> None:
    """Story: a rehearsal gave the user's function the keys `subset` and `test_subset`."""
    text = suggest_config(WISH._replace(batch=16)).replace("# data:", "data:")
    lines = [line for line in text.splitlines() if "synthetic" not in line]
    (folder / "own.yaml").write_text("\n".join(lines))
    config = load_config(
        "own.yaml", ["micro_batch_size=4", "gradient_accumulation=4", "replicas=4"]
    )
    assert config.data.name == "new_mine:load_data"
    said: list[str] = []
    assert rehearse(config, said.append).misfit is None
    assert said[-1].endswith("data synthetic in the shape of new_mine:load_data")


def test_marks_in_the_model_are_the_stages(folder: Path) -> None:
    (folder / "c.yaml").write_text(suggest_config(WISH._replace(entry="new_mine:marked")))
    config = load_config("c.yaml")
    assert config.stages is None and config.replicas == 2
    # the statistics of BatchNorm on several replicas
    assert config.ipu.broadcast_buffers is False


def test_other_hardware_has_no_settings_of_ipus(folder: Path) -> None:
    (folder / "c.yaml").write_text(suggest_config(WISH._replace(hardware="v100x8")))
    config = load_config("c.yaml")
    assert config.backend.ipu is None and config.precision == "float32"


@pytest.mark.parametrize("change, place", [
    ({"hardware": "pod17"}, "--hardware: pod17: "),
    ({"entry": "new_mine:nett"}, "model.entry: new_mine:nett: "),
    ({"shape": (3, 16)}, "--shape: 3,16: the model fails"),
    ({"entry": "new_mine:segments"}, "--shape: 3,16,16: two samples give (2, 7, 16, 16)"),
    ({"stages": 3}, "--hardware: pod4: no pipeline of 3 stages"),
    ({"stages": 4, "batch": 6}, "--hardware: pod4: no pipeline of 4 stages"),
])  # fmt: skip
def test_a_wish_that_cannot_be_is_one_line(folder: Path, change: Any, place: str) -> None:
    (fault,) = list_faults(lambda: suggest_config(WISH._replace(**change)))
    assert fault.startswith(place)
