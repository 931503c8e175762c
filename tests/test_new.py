"""`ipu-pipe new`: a commented config for a model of one's own, which loads and rehearses."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import ipu_pipe
from ipu_pipe.config.load import load_config
from ipu_pipe.run.proposal import Wish, suggest_config
from ipu_pipe.run.rehearsal import rehearse
from tests.command_line import CommandResult, run_here
from tests.support.runs import list_faults

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
