"""A run's folder: who may use it, what is in it, and how its files are written without ever being half-written."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, TextIO, Union

from ipu_pipe.config.yaml_files import read_yaml
from ipu_pipe.errors import BadInput, RunFault, guard_writing
from ipu_pipe.files import write
from ipu_pipe.job.record import Begun
from ipu_pipe.report.summary import upgrade_summary
from ipu_pipe.run import checkpoint, folder_lock

# what a run writes, and so what `--overwrite` may delete: nothing else in the folder is touched
FOLDERS = {  # and what of these is a run's own
    "tensorboard": re.compile(r"events\.out\.tfevents\..*"),
    "checkpoints": re.compile(r"step-\d+|\.step-\d+\.(part|old)"),
    "trace": re.compile(r"(rank-\d+|modelled)\.trace"),
}
OUTPUTS = (
    "config.yaml", "metrics.jsonl", "summary.json", "trace.json.gz", "memory.json", "record.json", "ipu.json", "init_from.json",
    "diverged.json", "traceback.txt", "against.json", "against.png", *FOLDERS,
)  # fmt: skip
# keys that a run's config.yaml always spells out, as hardly a config written by hand does
SPELT_OUT = {
    "model",
    "data",
    "method",
    "method_args",
    "optimizer",
    "lr_schedule",
    "init_from",
    "seed",
    "log",
    "checkpoint",
}


def as_folder(out: Union[str, Path]) -> Path:
    """The folder that `out` names. Raises BadInput where it names none: an empty text would be the current folder."""
    if not isinstance(out, (str, os.PathLike)) or not str(out).strip():
        raise BadInput(f"--out: {out!r}: must name a folder")
    return Path(out)


def check_folder(path: Path, resume: bool = False, overwrite: bool = False) -> List[str]:
    """What the folder holds of a run. Raises BadInput if that is another run and neither resuming nor overwriting was asked
    for, if what is to be overwritten is no run, or if nothing can be written there. Changes nothing."""
    try:
        above = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not above.is_dir():
            raise BadInput(f"--out: {above}: is a file, must be a folder")
        if not os.access(above, os.W_OK | os.X_OK):
            raise BadInput(f"--out: {above}: no permission to write")
        held = [name for name in OUTPUTS if (path / name).exists()]
        foreign = _foreign(path, held) if overwrite else None
    except OSError as error:
        raise BadInput(f"--out: {path}: {error.strerror or error}") from None
    odd = [name for name in held if (path / name).is_dir() != (name in FOLDERS)]
    if odd:
        raise BadInput(
            f"--out: {path}: {odd[0]} is {'a folder' if odd[0] not in FOLDERS else 'no folder'}, which no run writes"
        )
    if held and not (resume or overwrite):
        raise BadInput(f"--out: {path}: holds another run ({held[0]}): give --resume, --overwrite or another folder")
    if foreign is not None:
        raise BadInput(
            f"--overwrite: {path}: {foreign}: what is there is no run to replace: give another folder, or empty it"
        )
    return held


def finished_summary(path: Path) -> Optional[Dict[str, Any]]:
    """The summary of the run in the folder `path` if it has ended, or None."""
    try:
        file = path / "summary.json"
        if not file.is_file():  # a pipe would be waited for
            return None
        found = dict(json.loads(file.read_text()))
    except (OSError, ValueError):
        return None
    return upgrade_summary(found, str(file))


def earlier_starts(path: Path) -> List[Any]:
    """What a run's folder says of its starts so far; nothing where it was not written, or cannot be read."""
    try:
        file = path / "record.json"
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    except (OSError, ValueError):
        return []
    return found if isinstance(found, list) else []


def _foreign(path: Path, held: Sequence[str]) -> Optional[str]:
    """Why the folder, which holds something, is not a run's (or several runs'); None where it is, or is empty."""
    if held:
        return None if _is_run(path) else f"{held[0]} is there, but no config.yaml of a run"
    others = [entry for entry in _entries(path) if _entries(entry) or not entry.is_dir()]  # what is empty is no one's
    others = [entry for entry in others if not _is_run(entry)]
    return f"it holds {others[0].name}" if others else None


def _entries(path: Path) -> List[Path]:
    """What is in the folder, but for the lock."""
    return sorted(entry for entry in path.iterdir() if entry.name != folder_lock.NAME) if path.is_dir() else []


def _is_run(path: Path) -> bool:
    """Whether `path` is the folder of a run: whether its config.yaml is one that a run wrote."""
    file = path / "config.yaml"
    try:
        return file.is_file() and SPELT_OUT <= read_yaml(file).keys()
    except BadInput:
        return False


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
                for name in reversed(held):  # config.yaml last: what is half deleted is still known for a run
                    _remove(path / name)
                    _remove(path / f".{name}.part")
            if resume:
                checkpoint.tidy(self.checkpoints)
                _remove(path / "traceback.txt")  # of the fault that ended what is resumed now
        except OSError as error:
            raise BadInput(f"--out: {path}: {error.strerror or error}") from None

    def describe(self, config: str, begun: Optional[Begun]) -> None:
        """Write what the run is, and what it has of the weights that it begins with, where these need not all fit."""
        self.write_text("config.yaml", config)
        if begun is not None:
            self.write_json("init_from.json", begun._asdict())

    def forget_after(self, update: int, say: Callable[[str], None]) -> None:
        """What a finished run says of itself, and checkpoints after `update`, from which the run goes on: deleted, and told."""
        for name in ("summary.json", "trace/modelled.trace"):
            with contextlib.suppress(FileNotFoundError):
                (self.path / name).unlink()
        later = [step for step in checkpoint.steps(self.checkpoints) if step > update]
        checkpoint.drop(self.checkpoints, later[::-1])  # a run killed here goes on from what is left
        if later:
            say(f"deleted, to be made again: step-{', step-'.join(map(str, later))}")

    def forget_trace(self) -> None:
        """What ranks of an earlier start wrote, where there are none now: it is not this one's."""
        with guard_writing(self.path / "trace"):
            if (self.path / "trace").is_dir():
                _remove(self.path / "trace")

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
        with guard_writing(self.path / "metrics.jsonl"):
            self._metrics.write(json.dumps(finite(record)) + "\n")
            self._metrics.flush()

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
        write(self.path / name, text)


def _remove(path: Path) -> None:
    """Delete an output of a run. Of a folder of outputs what a run wrote there; the folder itself if nothing is left in it."""
    if path.is_dir():
        own = FOLDERS[path.name]
        for entry in path.iterdir():
            if own.fullmatch(entry.name):
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        with contextlib.suppress(OSError):  # not empty, or a link to a folder elsewhere
            path.rmdir()
    elif path.exists() or path.is_symlink():
        path.unlink()


def finite(value: Any) -> Any:
    """The value with every float that is not finite replaced by None: JSON has no such numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
