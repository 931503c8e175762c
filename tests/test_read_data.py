"""What data a run reads: hashes in its record, and that a run does not go on with other data."""

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
from tests.test_callbacks import DIGITS, SHORT, go
from tests.test_processes import train_digits_on_emulator, train_digits_on_ranks

OWN = [
    "data={name: tests.test_read_data:Images}", "method=gpipe", "stages=2", "checkpoint.every=2", "log.tensorboard=false",
]  # fmt: skip
SHAPES = [
    "micro_batch_size=8", "gradient_accumulation=2", "backend.threads=1", "evaluate.every=0", "model.args.width=8",
]  # fmt: skip


class Images(ipu_pipe.data.TensorData):
    """Of the files in a folder."""

    def __init__(self, root: str = "data") -> None:
        files = sorted(Path(root).glob("*.npy"))
        x = torch.cat([torch.from_numpy(np.load(file)) for file in files])
        y = torch.arange(len(x)) % 10
        super().__init__((x, y), (x[:8], y[:8]))
        self.data_files = files


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for part in range(2):
        save(tmp_path / "data" / f"{part}.npy", part)
    return tmp_path


def save(file: Path, seed: int) -> None:
    np.save(file, np.random.default_rng(seed).standard_normal((32, 1, 8, 8), dtype=np.float32))


def own(out: Path, steps: int, **how: Any) -> Dict[str, Any]:
    return ipu_pipe.train(
        load_config(DIGITS, [*OWN, *SHAPES, f"steps={steps}"]), out, quiet=True, **how
    )


def newest(out: Path) -> Any:
    return json.loads((out / "record.json").read_text())[-1]["data"]


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_the_record_has_the_hashes_of_the_files_that_were_read(folder: Path) -> None:
    go(folder / "digits", "steps=1", "gradient_accumulation=1")
    file = _find_digits_file()
    assert newest(folder / "digits")["files"][file.name]["sha256"] == digest(file)
    own(folder / "run", 2)
    record = newest(folder / "run")
    assert record["folder"] == str(folder / "data")
    assert {name: entry["sha256"] for name, entry in record["files"].items()} == {
        f"{part}.npy": digest(folder / "data" / f"{part}.npy") for part in range(2)
    }


def test_a_run_does_not_go_on_with_other_data(folder: Path) -> None:
    """Story: it went on with whatever was in the files by then, without a word."""
    own(folder / "run", 2)
    was, content = digest(folder / "data" / "1.npy"), (folder / "data" / "1.npy").read_bytes()
    save(folder / "data" / "1.npy", 5)
    now = digest(folder / "data" / "1.npy")
    message = f"record.json: data: 1.npy: its SHA-256 was {was[:16]}, is {now[:16]}: the data of a run cannot change"
    (fault,) = list_faults(own, folder / "run", 4, resume=True)
    assert message in fault
    with pytest.raises(BadInput, match=message):
        check(
            load_config(DIGITS, [*OWN, *SHAPES, "steps=4"]), folder / "run", resume=True
        )  # as --dry-run does
    save(folder / "data" / "2.npy", 2)
    first, second, *_ = list_faults(own, folder / "run", 4, resume=True)
    assert "1.npy" in first and "2.npy" in second
    (folder / "data" / "2.npy").unlink()
    (folder / "data" / "1.npy").write_bytes(content)
    own(folder / "run", 4, resume=True)
    assert newest(folder / "run")["files"]["1.npy"]["sha256"] == was


@needs_processes
def test_processes_do_not_go_on_with_other_data(folder: Path) -> None:
    where = "data={name: tests.test_read_data:Images, root: " + str(folder / "data") + "}"
    sets = ["stages=2", "method=gpipe", where, "evaluate.every=0"]
    train_digits_on_emulator(folder / "run", *sets, "steps=4", "gradient_accumulation=2")
    save(folder / "data" / "1.npy", 5)
    code, _, error = train_digits_on_ranks(
        2, folder / "run", *sets, "steps=8", "gradient_accumulation=2", "--resume"
    )
    assert (
        code == 2
        and error.count("data: 1.npy: its SHA-256 was") == 1
        and len(error.splitlines()) == 1
    )


def test_files_that_moved_or_are_unchanged_are_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: List[Path] = []
    plain = files.hash_file
    own(folder / "run", 2)
    monkeypatch.setattr(
        files, "hash_file", lambda file, kind: read.append(file) or plain(file, kind)
    )
    own(folder / "run", 4, resume=True)
    assert read == []  # their sizes and times say enough
    shutil.copytree(folder / "data", folder / "there" / "data")
    shutil.copytree(folder / "run", folder / "there" / "run")
    monkeypatch.chdir(folder / "there")
    (folder / "there" / "data" / "0.npy").touch()
    own(Path("run"), 6, resume=True)
    assert [file.name for file in read] == ["0.npy"]


def test_many_or_large_files_are_known_by_names_and_sizes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MOST_HASHED_BYTES", (folder / "data" / "0.npy").stat().st_size)
    own(folder / "run", 2)
    entries = newest(folder / "run")["files"]
    assert entries["0.npy"]["sha256"] and entries["1.npy"]["sha256"] is None
    np.save(folder / "data" / "1.npy", np.zeros((40, 1, 8, 8), dtype=np.float32))
    with pytest.raises(BadInput, match="data: 1.npy: its size was 8320, is 10368"):
        own(folder / "run", 4, resume=True)
    save(folder / "data" / "1.npy", 1)
    monkeypatch.setattr(provenance, "MOST_FILES", 1)
    own(folder / "many", 2)
    assert (
        newest(folder / "many")["files"] == {}
        and newest(folder / "many")["file_names"]["count"] == 2
    )
    save(folder / "data" / "2.npy", 2)
    with pytest.raises(BadInput, match="the SHA-256 of the names of its files was"):
        own(folder / "many", 4, resume=True)


def loaded(seed: int, noise: bool = False) -> Any:
    """Samples that Python made; with `noise` drawn from a state that nothing repeats."""
    x = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    samples = TensorDataset(x, torch.arange(64) % 10)

    def together(batch: List[Any]) -> Any:
        x, y = (torch.stack(part) for part in zip(*batch))
        return x + float(np.random.default_rng().random()) * noise, y

    data_loader = DataLoader(samples, 8, shuffle=True, collate_fn=together)
    return ipu_pipe.from_loader(data_loader, DataLoader(samples, 8))


def test_data_that_python_gave_is_known_by_its_first_microbatch(folder: Path) -> None:
    def train(out: str, steps: int, data: Any, **how: Any) -> None:
        config = load_config(DIGITS, [*SHORT, *OWN[1:], *SHAPES, f"steps={steps}"])
        ipu_pipe.train(config, folder / out, data=data, quiet=True, **how)

    train("run", 2, loaded(0))
    train("run", 4, loaded(0), resume=True)
    with pytest.raises(
        BadInput,
        match="the SHA-256 of the first microbatch was [0-9a-f]{16}, is [0-9a-f]{16}: the data",
    ):
        train("run", 6, loaded(1), resume=True)
    train("noisy", 2, loaded(0, noise=True))
    train(
        "noisy", 4, loaded(0, noise=True), resume=True
    )  # draws another one each time: nothing can be said of it


def test_a_file_that_cannot_be_read_is_named(folder: Path) -> None:
    data = loaded(0)
    data.data_files = ["data/missing.npy"]
    with pytest.raises(BadInput, match="data: data/missing.npy: No such file"):
        ipu_pipe.train(
            load_config(DIGITS, [*SHORT, *OWN[1:], *SHAPES, "steps=2"]),
            folder / "run",
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
