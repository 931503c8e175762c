"""A run's weights are exported into one file under unsplit names, or a folder by the model's own save_pretrained."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ipu_pipe
from ipu_pipe.cli import export
from ipu_pipe.run.train import train
from ipu_pipe.store import checkpoint
from tests.command_line import run_here
from tests.support.runs import assert_same, list_faults
from tests.test_train import make_short_config


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run with auxiliary heads and checkpoints after 4, 8 and 12 updates; return its folder."""
    out = tmp_path_factory.mktemp("trained") / "run"
    keys = [
        "checkpoint={every: 4, keep: 9}",
        "model.args.width=8",
        "stages=2",
        "method=local_greedy",
    ]
    train(make_short_config(*keys, "evaluate.steps=4", "evaluate.subset=64"), out, quiet=True)
    return out


@pytest.fixture
def run_export(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    return functools.partial(run_here, export, monkeypatch=monkeypatch, capsys=capsys)


@pytest.mark.parametrize("step", ["12", "4", "best"])
def test_a_file_has_the_weights_without_heads(
    step: str, trained_run: Path, tmp_path: Path, run_export: Any
) -> None:
    checkpoints = trained_run / "checkpoints"
    position = checkpoint.load(checkpoints / "step-12").manifest["position"]
    expected = f"step-{position['best_step'] if step == 'best' else step}"
    file = tmp_path / "new" / "model.safetensors"
    chosen = ["--step", step] * (step != "12")  # the newest is the default
    code, printed, error = run_export(str(trained_run), "--to", str(file), *chosen)
    assert (code, error) == (0, "") and expected in printed
    saved, weights = load_file(file), checkpoint.read_weights(checkpoints / expected)
    assert len(weights) > len(saved) > 0  # the heads are for training only
    assert_same(saved, {name: weights[name] for name in saved})


@pytest.mark.parametrize(
    "options, place",
    [
        ("gone --to m.safetensors", "gone: "),
        ("RUN --to m.safetensors --step 5", "--step: 5: "),
        ("RUN --to m.safetensors --step x", "--step: "),
        ("RUN --to folder", "--to: folder: "),
        ("RUN --to RUN", "--to: RUN: "),
        ("RUN --to RUN/checkpoints/step-12/model.safetensors", "--to: RUN/checkpoints/step-12/"),
        ("RUN", "the following arguments are required: --to"),
    ],
)
def test_a_refused_export_is_one_line_and_writes_nothing(
    options: str,
    place: str,
    trained_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_export: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "RUN").symlink_to(trained_run)
    code, printed, error = run_export(*options.split())
    assert (code, printed, error.count("\n")) == (2, "", 1) and error.startswith(f"error: {place}")
    assert [path.name for path in tmp_path.iterdir()] == ["RUN"]


def test_the_current_folder_is_a_checkpoint_but_no_new_folder(
    trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    (fault,) = list_faults(ipu_pipe.export, trained_run, ".")
    assert fault.startswith("--to: .: exists already")
    monkeypatch.chdir(trained_run / "checkpoints" / "step-12")
    assert ipu_pipe.export(".", tmp_path / "a.safetensors", "best").name.startswith("step-")


def test_a_model_of_transformers_is_exported_to_its_own_layout(tmp_path: Path) -> None:
    third_party = pytest.importorskip("tests.third_party")
    torch.manual_seed(1)
    # whose head is its embedding
    model, other = (third_party.make_hugging_gpt2() for _ in range(2))
    path = checkpoint.save(tmp_path / "run" / "checkpoints", 3, model.state_dict(), {}, {})
    assert ipu_pipe.export(tmp_path / "run", tmp_path / "gpt2", into=other) == path
    assert {"config.json", "model.safetensors"} <= {
        file.name for file in (tmp_path / "gpt2").iterdir()
    }
    again: nn.Module = type(model).from_pretrained(tmp_path / "gpt2")
    assert_same(again.state_dict(), model.state_dict())
    (fault,) = list_faults(ipu_pipe.export, tmp_path / "run", tmp_path / "gpt2", into=other)
    assert fault.startswith(f"--to: {tmp_path / 'gpt2'}: ")
