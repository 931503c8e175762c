"""Checkpoints are whole or absent, refused if corrupt, stored under unsplit names, and pruned to the newest and the best."""

from __future__ import annotations

import errno
import os
import stat
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ipu_pipe.backends.ranks import read_torch_version
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.model.stages import begin_stage, partition
from ipu_pipe.store import checkpoint
from ipu_pipe.update.optimizer import export_state, import_state, make_groups
from tests.support.runs import assert_same, list_faults


def save_small_checkpoint(folder: Path, step: int) -> Path:
    model = nn.Linear(3, 2)
    state, position = {"weight/momentum": torch.ones(2, 3)}, {"position": {"update": step}}
    return checkpoint.save(folder, step, model.state_dict(), state, position)


def test_round_trip_keeps_names_values_and_state(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    state = {"0.weight/momentum_buffer": torch.ones(2, 3)}
    path = checkpoint.save(tmp_path, 7, model.state_dict(), state, {"note": [1, None]})
    assert path == tmp_path / "step-7"
    saved = checkpoint.load(path)
    assert_same(saved.model, model.state_dict())
    assert_same(saved.optimizer, state)
    assert saved.manifest["note"] == [1, None] and saved.manifest["step"] == 7


def test_a_checkpoint_can_be_written_on_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: on Windows every checkpoint failed with "Bad file descriptor".

    A file open for reading was flushed, and a folder was opened.
    """
    open_here, flush_here = os.open, os.fsync
    writable, flushed = set(), []

    def open_as_windows(path: Any, flags: int, *mode: int) -> int:
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        handle = open_here(path, flags, *mode)
        if flags & (os.O_RDWR | os.O_WRONLY):
            writable.add(handle)
        return handle

    def flush_as_windows(handle: int) -> None:
        if handle not in writable:
            raise OSError(errno.EBADF, "Bad file descriptor")
        flushed.append(handle)
        flush_here(handle)

    monkeypatch.setattr(os, "open", open_as_windows)
    monkeypatch.setattr(os, "fsync", flush_as_windows)
    # in this module alone, since pathlib reads os.name too
    monkeypatch.setattr(checkpoint, "os", types.SimpleNamespace(**{**vars(os), "name": "nt"}))
    path = save_small_checkpoint(tmp_path, 3)
    assert checkpoint.load(path).manifest["step"] == 3
    # two files of tensors and the manifest
    assert len(flushed) == 3


def test_folders_are_flushed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file on disk is lost if the entry in its folder is not."""
    kinds = []
    flush_here = os.fsync

    def record_flush(handle: int) -> None:
        kinds.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        flush_here(handle)

    monkeypatch.setattr(os, "fsync", record_flush)
    save_small_checkpoint(tmp_path / "checkpoints", 3)
    assert kinds == ["file"] * 3 + ["folder"] * 3


def test_tied_weights_are_kept_under_both_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    saved = checkpoint.load(checkpoint.save(tmp_path, 1, model.state_dict(), {}, {}))
    assert torch.equal(saved.model["0.weight"], saved.model["1.weight"])


def test_a_tied_weight_is_loaded_by_any_of_its_names_but_not_by_two_that_differ() -> None:
    """Story: the last of two different values was loaded silently, and files with one of the names were refused."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    one, other = torch.randn(3, 3), torch.randn(3, 3)
    for name in ("0.weight", "1.weight"):
        checkpoint.load_weights(model, {name: one}, "file")
        assert torch.equal(model[0].weight, one) and torch.equal(model[1].weight, one)
    with pytest.raises(
        BadInput,
        match="file: 1.weight: differs from 0.weight, which is the same weight of the model",
    ):
        checkpoint.load_weights(model, {"0.weight": other, "1.weight": one}, "file")
    assert torch.equal(model[0].weight, one)
    checkpoint.load_weights(model, {"0.weight": other, "1.weight": one}, "file", strict=False)
    assert torch.equal(model[0].weight, other)


@pytest.mark.parametrize("file", ["optimizer.safetensors", "manifest.json"])
def test_a_missing_file_is_named(tmp_path: Path, file: str) -> None:
    path = save_small_checkpoint(tmp_path, 3)
    (path / file).unlink()
    (line,) = list_faults(checkpoint.load, path)
    assert line.startswith(f"{path / file}: corrupt checkpoint") and "missing" in line


def test_another_schema_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "SCHEMA", 99)
        path = save_small_checkpoint(tmp_path, 3)
    fault = list_faults(checkpoint.load, path)[0]
    assert fault.startswith(f"{path / 'manifest.json'}: schema: 99: ")
    assert f"init_from: {path / 'model.safetensors'}" in fault
    for weights in (path, path / "model.safetensors"):  # the remedy in the line works
        assert set(checkpoint.read_weights(weights)) == {"weight", "bias"}


def test_an_interrupted_save_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_small_checkpoint(tmp_path, 1)

    def raise_full_disk(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", raise_full_disk)
    with pytest.raises(RunFault, match="No space left on device"):
        save_small_checkpoint(tmp_path, 2)
    assert checkpoint.list_steps(tmp_path) == [1]
    (tmp_path / ".step-5.part").mkdir()  # as kill -9 leaves it
    assert checkpoint.list_steps(tmp_path) == [1]


def test_prune_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in (2, 10, 9, 30, 40):
        save_small_checkpoint(tmp_path, step)
    checkpoint.prune(tmp_path, keep=2, best=[None, 9])
    assert checkpoint.list_steps(tmp_path) == [9, 30, 40]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-30", "step-40", "step-9"]


@pytest.mark.skipif(
    read_torch_version() < checkpoint.SAFE_TORCH, reason="such a torch reads safetensors alone"
)
def test_plain_state_dicts_load_and_other_files_do_not(tmp_path: Path) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    checkpoint.load_weights(other, checkpoint.read_tensors(tmp_path / "plain.pt"), "plain.pt")
    assert torch.equal(other.weight, model.weight)
    torch.save(model, tmp_path / "module.pt")  # a pickled module: its code must not run
    (tmp_path / "text.pt").write_text("hello")
    torch.save({"epoch": 3}, tmp_path / "other.pt")
    for name in ("module.pt", "text.pt", "other.pt", "absent.pt"):
        with pytest.raises(BadInput, match=name):
            checkpoint.read_tensors(tmp_path / name)


def test_weights_that_do_not_fit_are_named() -> None:
    tensors = {"weight": torch.ones(2, 4), "extra": torch.ones(1)}
    assert list_faults(checkpoint.load_weights, nn.Linear(3, 2), tensors, "file.pt") == [
        "file.pt: bias: missing, the model needs it",
        "file.pt: extra: the model has no such parameter or buffer",
        "file.pt: weight: shape (2, 4), the model has (2, 3)",
    ]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizer_state_moves_to_another_number_of_stages(kind: Any) -> None:
    settings = {"lr": 0.1, "momentum": 0.9} if kind is torch.optim.SGD else {"lr": 0.1}

    def make_both(choice: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), begin_stage(nn.Linear(3, 3)), nn.Linear(3, 2))
        groups = make_groups(model, partition(model, torch.zeros(1, 3), choice))
        return model, kind(groups, **settings)

    def step(model: nn.Module, optimizer: Any) -> None:
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = make_both(None)
    step(model, optimizer)
    names = {p: n for n, p in model.named_parameters()}
    tensors, plain = export_state(optimizer, names)
    other, other_optimizer = make_both("finest")
    other.load_state_dict(model.state_dict())
    tensors = {name: value.clone() for name, value in tensors.items()}
    import_state(other_optimizer, {p: n for n, p in other.named_parameters()}, tensors, plain)
    step(model, optimizer)
    step(other, other_optimizer)
    assert_same(model.state_dict(), other.state_dict())
