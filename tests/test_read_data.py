"""Check the hashes of the data in a run's record, and that a run refuses to resume with other
data."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, Dict, List
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ipu_pipe
from ipu_pipe import files
from ipu_pipe.config.load import load_config
from ipu_pipe.data.sets import _find_digits_file
from ipu_pipe.errors import BadInput
from ipu_pipe.report import provenance
from ipu_pipe.run.train import check
from tests.support.runs import list_faults, needs_processes
from tests.test_callbacks import DIGITS, train_short_digits
from tests.test_processes import train_digits_on_emulator, train_digits_on_ranks

OWN = [
    "data={name: tests.test_read_data:FolderImages}", "method=gpipe", "stages=2", "checkpoint.every=2", "log.tensorboard=false",
]  # fmt: skip
SHAPES = [
    "micro_batch_size=8", "gradient_accumulation=2", "backend.threads=1", "evaluate.every=0", "model.args.width=8",
]  # fmt: skip


class FolderImages(ipu_pipe.data.TensorData):
    """Images of the .npy files in a folder."""

    def __init__(self, root: str = "data") -> None:
        files = sorted(Path(root).glob("*.npy"))
        x = torch.cat([torch.from_numpy(np.load(file)) for file in files])
        y = torch.arange(len(x)) % 10
        super().__init__((x, y), (x[:8], y[:8]))
        self.data_files = files


@pytest.fixture
def root_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for part in range(2):
        save_images(tmp_path / "data" / f"{part}.npy", part)
    return tmp_path


def save_images(file: Path, seed: int) -> None:
    np.save(file, np.random.default_rng(seed).standard_normal((32, 1, 8, 8), dtype=np.float32))


def train_on_images(out: Path, steps: int, **keys: Any) -> Dict[str, Any]:
    return ipu_pipe.train(
        load_config(DIGITS, [*OWN, *SHAPES, f"steps={steps}"]), out, quiet=True, **keys
    )


def read_data_record(out: Path) -> Any:
    return json.loads((out / "record.json").read_text())[-1]["data"]


def hash_file(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_the_record_has_the_hashes_of_the_files_that_were_read(root_folder: Path) -> None:
    train_short_digits(root_folder / "digits", "steps=1", "gradient_accumulation=1")
    file = _find_digits_file()
    assert read_data_record(root_folder / "digits")["files"][file.name]["sha256"] == hash_file(file)
    train_on_images(root_folder / "run", 2)
    record = read_data_record(root_folder / "run")
    assert record["folder"] == str(root_folder / "data")
    assert {name: entry["sha256"] for name, entry in record["files"].items()} == {
        f"{part}.npy": hash_file(root_folder / "data" / f"{part}.npy") for part in range(2)
    }


def test_a_run_does_not_resume_with_other_data(root_folder: Path) -> None:
    """A run once resumed with whatever the files held by then, without a message."""
    run, file = root_folder / "run", root_folder / "data" / "1.npy"
    train_on_images(run, 2)
    was, content = hash_file(file), file.read_bytes()
    save_images(file, 5)
    hashes = f"its SHA-256 was {was[:16]}, is {hash_file(file)[:16]}"
    message = f"record.json: data: 1.npy: {hashes}: the data of a run cannot change"
    (fault,) = list_faults(train_on_images, run, 4, resume=True)
    assert message in fault
    with pytest.raises(BadInput, match=message):
        # --dry-run calls it
        check(load_config(DIGITS, [*OWN, *SHAPES, "steps=4"]), run, resume=True)
    more = file.with_name("2.npy")
    save_images(more, 2)
    first, second, *_ = list_faults(train_on_images, run, 4, resume=True)
    assert "1.npy" in first and "2.npy" in second
    more.unlink()
    file.write_bytes(content)
    train_on_images(run, 4, resume=True)
    assert read_data_record(run)["files"]["1.npy"]["sha256"] == was


@needs_processes
def test_processes_do_not_resume_with_other_data(root_folder: Path) -> None:
    run = root_folder / "run"
    data = f"data={{name: tests.test_read_data:FolderImages, root: {root_folder / 'data'}}}"
    settings = ["stages=2", "method=gpipe", data, "evaluate.every=0", "gradient_accumulation=2"]
    train_digits_on_emulator(run, *settings, "steps=4")
    save_images(root_folder / "data" / "1.npy", 5)
    code, _, error = train_digits_on_ranks(2, run, *settings, "steps=8", "--resume")
    assert code == 2 and len(error.splitlines()) == 1
    assert "data: 1.npy: its SHA-256 was" in error


def test_files_that_moved_or_are_unchanged_are_the_same(
    root_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_on_images(Path("run"), 2)
    hashed = Mock(side_effect=files.hash_file)
    monkeypatch.setattr(files, "hash_file", hashed)
    train_on_images(Path("run"), 4, resume=True)
    assert not hashed.called  # unchanged sizes and times suffice
    for name in ("data", "run"):
        shutil.copytree(name, root_folder / "there" / name)
    monkeypatch.chdir(root_folder / "there")
    Path("data/0.npy").touch()
    train_on_images(Path("run"), 6, resume=True)
    assert [call.args[0].name for call in hashed.call_args_list] == ["0.npy"]


def test_many_or_large_files_are_identified_by_names_and_sizes(
    root_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, many, data = (root_folder / name for name in ("run", "many", "data"))
    monkeypatch.setattr(files, "MOST_HASHED_BYTES", (data / "0.npy").stat().st_size)
    train_on_images(run, 2)
    entries = read_data_record(run)["files"]
    assert entries["0.npy"]["sha256"] and entries["1.npy"]["sha256"] is None
    np.save(data / "1.npy", np.zeros((40, 1, 8, 8), dtype=np.float32))
    with pytest.raises(BadInput, match="data: 1.npy: its size was 8320, is 10368"):
        train_on_images(run, 4, resume=True)
    monkeypatch.setattr(provenance, "MOST_FILES", 1)
    train_on_images(many, 2)
    record = read_data_record(many)
    assert record["files"] == {} and record["file_names"]["count"] == 2
    save_images(data / "2.npy", 2)
    with pytest.raises(BadInput, match="the SHA-256 of the names of its files was"):
        train_on_images(many, 4, resume=True)


def make_loader_data(seed: int, noise: float = 0.0) -> Any:
    """Return samples of a DataLoader, whose collate function adds unseeded random noise."""
    x = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    samples = TensorDataset(x, torch.arange(64) % 10)

    def collate_with_noise(batch: List[Any]) -> Any:
        x, y = (torch.stack(part) for part in zip(*batch))
        return x + noise * float(np.random.default_rng().random()), y

    loader = DataLoader(samples, 8, shuffle=True, collate_fn=collate_with_noise)
    return ipu_pipe.from_loader(loader, DataLoader(samples, 8))


def test_data_passed_from_python_is_identified_by_its_first_microbatch(root_folder: Path) -> None:
    train_on_images(Path("run"), 2, data=make_loader_data(0))
    train_on_images(Path("run"), 4, data=make_loader_data(0), resume=True)
    message = "the SHA-256 of the first microbatch was [0-9a-f]{16}, is [0-9a-f]{16}: the data"
    with pytest.raises(BadInput, match=message):
        train_on_images(Path("run"), 6, data=make_loader_data(1), resume=True)
    train_on_images(Path("noisy"), 2, data=make_loader_data(0, noise=1.0))
    # each start draws other noise, so no hash identifies the data
    train_on_images(Path("noisy"), 4, data=make_loader_data(0, noise=1.0), resume=True)
    data = make_loader_data(0)
    data.data_files = ["data/missing.npy"]
    with pytest.raises(BadInput, match="data: data/missing.npy: No such file"):
        train_on_images(Path("missing"), 2, data=data)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"1")
    hashes = files.hash_files({name: tmp_path / name for name in ("pipe", "file")}, {})
    assert hashes["pipe"]["sha256"] is None
    assert hashes["file"]["sha256"] == hash_file(tmp_path / "file")
