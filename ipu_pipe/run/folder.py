"""The folder of a run: its lock, what may be in it, and its files, which are never half-written.

The lock is the operating system's (flock) on a file `.lock` in the folder, not the file itself: one that a killed run left behind
locks nothing. It names its holder, for the run that is refused.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import socket
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, TextIO, Union

from ipu_pipe.config.load import read_yaml
from ipu_pipe.errors import BadInput, RunFault, guard_writing
from ipu_pipe.files import replace_nonfinite, write_text
from ipu_pipe.launcher import read_launch
from ipu_pipe.report.summary import check_schema
from ipu_pipe.run import checkpoint

try:
    import fcntl
# Windows does not have it
except ImportError:
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)

_open_here: Set[int] = set()  # descriptors that hold a lock: a forked process must not hold it longer than this one


@contextlib.contextmanager
def lock_folder(folder: Path, say: Callable[[str], None] = print) -> Iterator[None]:
    """Hold the lock of `folder`, which is made if it is missing, and deleted at the end if nothing was put into it.

    Raise `BadInput` if another run is on in it. `say` is told if the file system has no locks.
    """
    descriptor = None
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with _refuse_out(folder):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = _lock(folder / LOCK)
        if descriptor is None:
            say(f"{folder}: no locks on this file system: nothing keeps a second run out of this folder")
        yield
    finally:
        if descriptor is not None:
            # delete the file first, while no other process can hold it
            with contextlib.suppress(OSError):
                (folder / LOCK).unlink()
            _close(descriptor)
        with contextlib.suppress(OSError):  # not empty
            for path in missing:
                path.rmdir()


def _lock(file: Path) -> Optional[int]:
    """Return a descriptor of `file` that holds its lock, None where the file system has no locks.

    Raise `BadInput` if another process has it.
    """
    while fcntl is not None:
        descriptor = os.open(str(file), os.O_RDWR | os.O_CREAT, 0o666)
        _open_here.add(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # its last holder may have removed the file since it was opened: then this lock is of nothing
            if file.exists() and os.path.samestat(os.fstat(descriptor), file.stat()):
                # the lock also holds on a full disk
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode())
                return descriptor
            _close(descriptor)
        except OSError as error:
            _close(descriptor)
            if error.errno in TAKEN:
                raise _describe_holder(file.parent) from None
            if error.errno not in NO_LOCKS:
                raise
            file.unlink()
            return None
    return None


def _describe_holder(folder: Path) -> BadInput:
    holder = "another process"
    with contextlib.suppress(OSError, ValueError):
        pid, host = (folder / LOCK).read_text().split()
        holder = f"process {pid}" + (f" on {host}" if host != socket.gethostname() else "")
    return BadInput(f"--out: {folder}: {holder} writes a run there: wait for it, or give another folder")


def _close(descriptor: int) -> None:
    _open_here.discard(descriptor)
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _close_in_child() -> None:
    for descriptor in list(_open_here):
        _close(descriptor)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


@contextlib.contextmanager
def _refuse_out(path: Path) -> Iterator[None]:
    """Raise `BadInput` if the system refuses the folder."""
    try:
        yield
    except OSError as error:
        raise BadInput(f"--out: {path}: {error.strerror or error}") from None


# what a run writes, and so what `--overwrite` may delete: nothing else in the folder is touched
FOLDERS = {  # and what of these is a run's own
    "tensorboard": re.compile(r"events\.out\.tfevents\..*"),
    "checkpoints": re.compile(r"step-\d+|\.step-\d+\.(part|old)"),
    "trace": re.compile(r"(rank-\d+|modelled)\.trace"),
}
OUTPUTS = (
    "config.yaml", "metrics.jsonl", "metrics.csv", "summary.json", "trace.json.gz", "memory.json", "record.json", "ipu.json",
    "init_from.json", "ema.safetensors", "diverged.json", "traceback.txt", "against.json", "against.png", *FOLDERS,
)  # fmt: skip
# keys that a run's config.yaml always spells out, as hardly a config written by hand does
SPELT_OUT = {
    "model", "data", "method", "method_args", "optimizer", "lr_schedule", "init_from", "seed", "log", "checkpoint",
}  # fmt: skip


def parse_folder(out: Union[str, Path]) -> Path:
    """Return the folder that `out` names. Raise `BadInput` for an empty text, which would be the current folder."""
    if not isinstance(out, (str, os.PathLike)) or not str(out).strip():
        raise BadInput(f"--out: {out!r}: must name a folder")
    return Path(out)


def check_folder(path: Path, resume: bool = False, overwrite: bool = False) -> List[str]:
    """List the outputs of a run in the folder `path`, changing nothing.

    Raise `BadInput` if they are of another run and neither resuming nor overwriting was asked for, if what is to be overwritten
    is not a run, or if nothing can be written there.
    """
    with _refuse_out(path):
        above = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not above.is_dir():
            raise BadInput(f"--out: {above}: is a file, must be a folder")
        if not os.access(above, os.W_OK | os.X_OK):
            raise BadInput(f"--out: {above}: no permission to write")
        outputs = [name for name in OUTPUTS if (path / name).exists()]
        if outputs == ["record.json"]:  # left by a run that was killed as it began
            outputs = []
        for name in outputs:
            if (path / name).is_dir() != (name in FOLDERS):
                kind = "no folder" if name in FOLDERS else "a folder"
                raise BadInput(f"--out: {path}: {name} is {kind}, which no run writes")
        if outputs and not (resume or overwrite):
            raise BadInput(f"--out: {path}: holds another run ({outputs[0]}): give --resume, --overwrite or another folder")
        foreign = _find_foreign(path, outputs) if overwrite else None
        if foreign is not None:
            why = "what is there is no run to replace: give another folder, or empty it"
            raise BadInput(f"--overwrite: {path}: {foreign}: {why}")
    return outputs


def _find_foreign(path: Path, outputs: List[str]) -> Optional[str]:
    """Return why a folder with files in it is not that of a run (or of several runs), None if it is, or is empty."""
    if outputs:
        return None if _is_run(path) else f"{outputs[0]} is there, but no config.yaml of a run"
    for entry in _list_entries(path):
        # an empty folder belongs to nobody
        if (_list_entries(entry) or not entry.is_dir()) and not _is_run(entry):
            return f"it holds {entry.name}"
    return None


def _list_entries(path: Path) -> List[Path]:
    """List the entries of the folder except the lock."""
    return sorted(entry for entry in path.iterdir() if entry.name != LOCK) if path.is_dir() else []


def _is_run(path: Path) -> bool:
    """Return whether the folder has a config.yaml that a run wrote."""
    try:
        return (path / "config.yaml").is_file() and SPELT_OUT <= read_yaml(path / "config.yaml").keys()
    except BadInput:
        return False


def read_summary(path: Path) -> Optional[Dict[str, Any]]:
    """Return the summary of the run in the folder `path`, None if it has not ended."""
    summary = _read_json(path / "summary.json")
    if not isinstance(summary, dict):
        return None
    check_schema(summary, str(path / "summary.json"))
    return summary


def read_starts(path: Path) -> List[Any]:
    """Return what a run's folder records of its starts so far, [] if that is missing or unreadable."""
    starts = _read_json(path / "record.json")
    return starts if isinstance(starts, list) else []


def is_restarted(path: Path) -> bool:
    """Return whether the launcher has restarted this process, and the newest start of the run in `path` was one of its own."""
    launch = read_launch()
    starts = read_starts(path) if launch.attempt else []
    return bool(starts) and isinstance(starts[-1], dict) and starts[-1].get("job") == launch.job


def _read_json(file: Path) -> Any:
    """Return what a JSON file holds, None if it is missing or unreadable. A pipe would be waited for: it is not read."""
    try:
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except (OSError, ValueError):
        return None


class RunFolder:
    """The folder of one run, made or emptied as `check_folder` allows."""

    def __init__(self, path: Path, resume: bool = False, overwrite: bool = False) -> None:
        self.path, self.checkpoints = path, path / "checkpoints"
        self._metrics: Optional[TextIO] = None
        outputs = check_folder(path, resume, overwrite)
        with _refuse_out(path):
            path.mkdir(parents=True, exist_ok=True)
            if overwrite:
                for name in reversed(outputs):  # config.yaml last: what is half deleted is still known for a run
                    _remove(path / name)
                    _remove(path / f".{name}.part")
            if resume:
                checkpoint.tidy(self.checkpoints)
                # it tells the error that ended the run that is resumed now
                _remove(path / "traceback.txt")

    def forget_after(self, update: int, say: Callable[[str], None]) -> None:
        """Delete what a finished run wrote at its end, and the checkpoints after `update`, from which it goes on, and say so."""
        # these are written at the end
        for name in ("summary.json", "ema.safetensors", "trace/modelled.trace"):
            self.forget(name)
        later = [step for step in checkpoint.list_steps(self.checkpoints) if step > update]
        # newest first, so that a run killed here resumes from what is left
        checkpoint.delete_steps(self.checkpoints, later[::-1])
        if later:
            say(f"deleted, to be made again: step-{', step-'.join(map(str, later))}")

    def forget(self, name: str) -> None:
        """Delete an output, if it is there. Raise `RunFault` if the disk refuses."""
        with guard_writing(self.path / name):
            _remove(self.path / name)

    def open_metrics(self, last_step: int, retested: bool = False) -> None:
        """Open metrics.jsonl for more lines, dropping those after update `last_step` (they will be made again).

        If `retested`, also the test at `last_step`, which was the end of a run that has a validation set.
        """
        path = self.path / "metrics.jsonl"
        if path.exists() and not path.is_file():  # reading a pipe or a device might never end
            raise RunFault(f"{path}: is no file")
        with guard_writing(path):
            past = []
            for line in path.read_text(errors="replace").splitlines() if last_step and path.exists() else ():
                # the run may have been killed within a line
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    record = json.loads(line)
                    if record["step"] < last_step + (not (retested and "test_loss" in record)):
                        past.append(line + "\n")
            write_text(path, "".join(past))
            self._metrics = open(path, "a")

    def write_metrics(self, record: Dict[str, Any]) -> None:
        """Append one record to metrics.jsonl."""
        assert self._metrics is not None
        with guard_writing(self.path / "metrics.jsonl"):
            self._metrics.write(json.dumps(replace_nonfinite(record)) + "\n")
            self._metrics.flush()

    def close(self) -> None:
        """Close metrics.jsonl."""
        if self._metrics is not None:
            with contextlib.suppress(OSError):  # every line was flushed: what cannot be written has been told
                self._metrics.close()


def _remove(path: Path) -> None:
    """Delete an output of a run. Of a folder of outputs what a run wrote there; the folder itself if nothing is left in it."""
    if path.is_dir():
        for entry in path.iterdir():
            if FOLDERS[path.name].fullmatch(entry.name):
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        # it may be not empty, or a link to a folder elsewhere
        with contextlib.suppress(OSError):
            path.rmdir()
    elif path.exists() or path.is_symlink():
        path.unlink()
