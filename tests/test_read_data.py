"""Check the hashes of the data in a run's record, and that a run refuses to resume with other
data."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, Dict, List

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
from tests.test_callbacks import DIGITS, SHORT, train_short_digits
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
    train_on_images(root_folder / "run", 2)
    was, content = (
        hash_file(root_folder / "data" / "1.npy"),
        (root_folder / "data" / "1.npy").read_bytes(),
    )
    save_images(root_folder / "data" / "1.npy", 5)
    now = hash_file(root_folder / "data" / "1.npy")
    message = f"record.json: data: 1.npy: its SHA-256 was {was[:16]}, is {now[:16]}: the data of a run cannot change"
    (fault,) = list_faults(train_on_images, root_folder / "run", 4, resume=True)
    assert message in fault
    with pytest.raises(BadInput, match=message):
        # --dry-run calls it
        check(load_config(DIGITS, [*OWN, *SHAPES, "steps=4"]), root_folder / "run", resume=True)
    save_images(root_folder / "data" / "2.npy", 2)
    first, second, *_ = list_faults(train_on_images, root_folder / "run", 4, resume=True)
    assert "1.npy" in first and "2.npy" in second
    (root_folder / "data" / "2.npy").unlink()
    (root_folder / "data" / "1.npy").write_bytes(content)
    train_on_images(root_folder / "run", 4, resume=True)
    assert read_data_record(root_folder / "run")["files"]["1.npy"]["sha256"] == was


@needs_processes
def test_processes_do_not_resume_with_other_data(root_folder: Path) -> None:
    data_key = (
        "data={name: tests.test_read_data:FolderImages, root: " + str(root_folder / "data") + "}"
    )
    settings = ["stages=2", "method=gpipe", data_key, "evaluate.every=0"]
    train_digits_on_emulator(root_folder / "run", *settings, "steps=4", "gradient_accumulation=2")
    save_images(root_folder / "data" / "1.npy", 5)
    code, _, error = train_digits_on_ranks(
        2, root_folder / "run", *settings, "steps=8", "gradient_accumulation=2", "--resume"
    )
    assert (
        code == 2
        and error.count("data: 1.npy: its SHA-256 was") == 1
        and len(error.splitlines()) == 1
    )


def test_files_that_moved_or_are_unchanged_are_the_same(
    root_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed_files: List[Path] = []
    real_hash = files.hash_file
    train_on_images(root_folder / "run", 2)
    monkeypatch.setattr(
        files, "hash_file", lambda file, kind: hashed_files.append(file) or real_hash(file, kind)
    )
    train_on_images(root_folder / "run", 4, resume=True)
    assert hashed_files == []  # unchanged sizes and times suffice
    shutil.copytree(root_folder / "data", root_folder / "there" / "data")
    shutil.copytree(root_folder / "run", root_folder / "there" / "run")
    monkeypatch.chdir(root_folder / "there")
    (root_folder / "there" / "data" / "0.npy").touch()
    train_on_images(Path("run"), 6, resume=True)
    assert [file.name for file in hashed_files] == ["0.npy"]


def test_many_or_large_files_are_identified_by_names_and_sizes(
    root_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MOST_HASHED_BYTES", (root_folder / "data" / "0.npy").stat().st_size)
    train_on_images(root_folder / "run", 2)
    entries = read_data_record(root_folder / "run")["files"]
    assert entries["0.npy"]["sha256"] and entries["1.npy"]["sha256"] is None
    np.save(root_folder / "data" / "1.npy", np.zeros((40, 1, 8, 8), dtype=np.float32))
    with pytest.raises(BadInput, match="data: 1.npy: its size was 8320, is 10368"):
        train_on_images(root_folder / "run", 4, resume=True)
    save_images(root_folder / "data" / "1.npy", 1)
    monkeypatch.setattr(provenance, "MOST_FILES", 1)
    train_on_images(root_folder / "many", 2)
    assert (
        read_data_record(root_folder / "many")["files"] == {}
        and read_data_record(root_folder / "many")["file_names"]["count"] == 2
    )
    save_images(root_folder / "data" / "2.npy", 2)
    with pytest.raises(BadInput, match="the SHA-256 of the names of its files was"):
        train_on_images(root_folder / "many", 4, resume=True)


def make_loader_data(seed: int, noise: bool = False) -> Any:
    """Return samples of a DataLoader; with `noise`, its collate function adds an unseeded random
    number."""
    x = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    samples = TensorDataset(x, torch.arange(64) % 10)

    def collate_with_noise(batch: List[Any]) -> Any:
        x, y = (torch.stack(part) for part in zip(*batch))
        return x + float(np.random.default_rng().random()) * noise, y

    data_loader = DataLoader(samples, 8, shuffle=True, collate_fn=collate_with_noise)
    return ipu_pipe.from_loader(data_loader, DataLoader(samples, 8))


def test_data_passed_from_python_is_identified_by_its_first_microbatch(root_folder: Path) -> None:
    def train_on(out: str, steps: int, data: Any, **keys: Any) -> None:
        config = load_config(DIGITS, [*SHORT, *OWN[1:], *SHAPES, f"steps={steps}"])
        ipu_pipe.train(config, root_folder / out, data=data, quiet=True, **keys)

    train_on("run", 2, make_loader_data(0))
    train_on("run", 4, make_loader_data(0), resume=True)
    with pytest.raises(
        BadInput,
        match="the SHA-256 of the first microbatch was [0-9a-f]{16}, is [0-9a-f]{16}: the data",
    ):
        train_on("run", 6, make_loader_data(1), resume=True)
    train_on("noisy", 2, make_loader_data(0, noise=True))
    # each start draws other noise, so no hash identifies the data
    train_on("noisy", 4, make_loader_data(0, noise=True), resume=True)


def test_a_file_that_cannot_be_read_is_named(root_folder: Path) -> None:
    data = make_loader_data(0)
    data.data_files = ["data/missing.npy"]
    with pytest.raises(BadInput, match="data: data/missing.npy: No such file"):
        ipu_pipe.train(
            load_config(DIGITS, [*SHORT, *OWN[1:], *SHAPES, "steps=2"]),
            root_folder / "run",
            data=data,
            quiet=True,
        )


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"1")
    result = files.hash_files({name: tmp_path / name for name in ("pipe", "file")}, {})
    assert (
        result["pipe"]["sha256"] is None
        and result["file"]["sha256"] == hashlib.sha256(b"1").hexdigest()
    )
