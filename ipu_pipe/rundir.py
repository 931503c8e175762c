"""A run's folder: who may use it, what is in it, and how its files are written without ever being half-written."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, TextIO, Tuple

from ipu_pipe import checkpoint
from ipu_pipe.errors import BadInput, RunFault

# what a run writes, and so what `--overwrite` may delete: nothing else in the folder is touched
OUTPUTS = (
    "config.yaml", "metrics.jsonl", "summary.json", "trace.json.gz", "memory.json", "ipu.json", "tensorboard", "checkpoints",
    "traceback.txt",
)  # fmt: skip


Measured = Tuple[Optional[float], Optional[float]]  # test loss and accuracy


@dataclass
class Position:
    """How far a run has come: what a checkpoint must carry besides tensors. Times are in seconds of training alone."""

    update: int = 0
    epoch_loss: float = 0.0  # sum over the epoch's updates so far, for the mean
    epoch_updates: int = 0
    seconds: float = 0.0
    timed_updates: int = 0
    best_loss: Optional[float] = None
    best_step: Optional[int] = None
    initial: Measured = (None, None)


def check_folder(path: Path, resume: bool = False, overwrite: bool = False) -> List[str]:
    """What the folder holds of a run. Raises BadInput if that is another run and neither resuming nor overwriting was asked
    for, or if nothing can be written there. Changes nothing."""
    try:
        above = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not above.is_dir():
            raise BadInput(f"--out: {above}: is a file, must be a folder")
        if not os.access(above, os.W_OK | os.X_OK):
            raise BadInput(f"--out: {above}: no permission to write")
        held = [name for name in OUTPUTS if (path / name).exists()]
    except OSError as error:
        raise BadInput(f"--out: {path}: {error.strerror or error}") from None
    if held and not (resume or overwrite):
        raise BadInput(f"--out: {path}: holds another run ({held[0]}): give --resume, --overwrite or another folder")
    if resume and not held:
        raise BadInput(f"--resume: {path}: holds no run to resume")
    return held


class RunDir:
    """The folder of one run, made or emptied as `check_folder` allows."""

    def __init__(self, path: Path, resume: bool = False, overwrite: bool = False) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._metrics: Optional[TextIO] = None
        held = check_folder(path, resume, overwrite)
        try:
            path.mkdir(parents=True, exist_ok=True)
            if overwrite:
                for name in held:
                    _remove(path / name)
            elif "traceback.txt" in held:  # of the fault that ended what is resumed now
                _remove(path / "traceback.txt")
        except OSError as error:
            raise BadInput(f"--out: {path}: {error.strerror or error}") from None

    def finished_summary(self) -> Optional[Dict[str, Any]]:
        """The summary of a run that has ended, or None."""
        try:
            file = self.path / "summary.json"
            return dict(json.loads(file.read_text())) if file.is_file() else None
        except (OSError, ValueError):
            return None

    def newest_checkpoint(self) -> Optional[Path]:
        """The checkpoint to go on from, or None if the run ended before its first."""
        found = checkpoint.steps(self.checkpoints)
        return self.checkpoints / f"step-{found[-1]}" if found else None

    def open_metrics(self, last_step: int) -> None:
        """Open metrics.jsonl for more lines, dropping those after update `last_step` (they will be made again)."""
        path = self.path / "metrics.jsonl"
        kept: List[str] = []
        try:
            if path.exists() and not path.is_file():  # reading a pipe or a device might never end
                raise RunFault(f"{path}: is no file")
            lines = path.read_text(errors="replace").splitlines() if last_step and path.exists() else []
            for line in lines:
                try:
                    if json.loads(line)["step"] <= last_step:
                        kept.append(line)
                except (ValueError, KeyError, TypeError):
                    pass  # the line at which the run was killed
            self.write_text("metrics.jsonl", "".join(line + "\n" for line in kept))
            self._metrics = open(path, "a")
        except OSError as error:
            raise RunFault(f"{path}: cannot be opened: {error.strerror or error}") from error

    def metric(self, record: Dict[str, Any]) -> None:
        """Append one record to metrics.jsonl."""
        assert self._metrics is not None
        try:
            self._metrics.write(json.dumps(finite(record)) + "\n")
            self._metrics.flush()
        except OSError as error:
            raise RunFault(f"{self.path / 'metrics.jsonl'}: cannot be written: {error.strerror or error}") from error

    def close(self) -> None:
        """Close metrics.jsonl."""
        if self._metrics is not None:
            with contextlib.suppress(OSError):  # every line was flushed: what cannot be written has been told
                self._metrics.close()

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file whole or not at all; what is not a number becomes null."""
        self.write_text(name, json.dumps(finite(value), indent=1) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a text file whole or not at all."""
        temporary = self.path / f".{name}.part"
        try:
            temporary.write_text(text)
            os.replace(temporary, self.path / name)
        except OSError as error:
            raise RunFault(f"{self.path / name}: cannot be written: {error.strerror or error}") from error


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def finite(value: Any) -> Any:
    """The value with every float that is not finite replaced by None: JSON has no such numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
