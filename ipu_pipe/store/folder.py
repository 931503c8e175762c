"""The folder of a run: its lock, the outputs that it may contain, and its files, which are never
half-written.

The lock is the operating system's (flock) on a file `.lock` in the folder. The file alone, left
behind by a killed run, locks nothing. It names its holder, for the message to a second run.
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
from typing import Any, Callable, Iterator, TextIO

from ipu_pipe.config.load import read_yaml
from ipu_pipe.errors import BadInput, RunFault, guard_writing
from ipu_pipe.files import parse_path, read_file, replace_nonfinite, write_text
from ipu_pipe.launcher import read_launch
from ipu_pipe.report.summary import SCHEMA
from ipu_pipe.store import checkpoint
from ipu_pipe.text import show

try:
    import fcntl
# Windows does not have it
except ImportError:
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)

# descriptors that hold a lock, which forked processes close, so that they do not hold the lock
# longer than this process
_open_here: set[int] = set()


@contextlib.contextmanager
def lock_folder(folder: Path, say: Callable[[str], None] = print) -> Iterator[None]:
    """Hold the lock of `folder`, which is made if it is missing, and deleted at the end if it is
    empty.

    Raise `BadInput` if another run holds it. `say` prints a warning if the file system has no
    locks.
    """
    descriptor = None
    # noted before they are made: a refused run leaves no empty folders
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with guard_writing(f"--out: {folder}", kind=BadInput):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = _lock(folder / LOCK)
        if descriptor is None:
            say(
                f"{folder}: no locks on this file system: nothing keeps a second run out of this "
                f"folder"
            )
        yield
    finally:
        if descriptor is not None:
            # delete the file first, while no other process can hold it
            with contextlib.suppress(OSError):
                (folder / LOCK).unlink()
            _close(descriptor)
        # a folder that is not empty stays
        with contextlib.suppress(OSError):
            for path in missing:
                path.rmdir()


def _lock(file: Path) -> int | None:
    """Return a descriptor of `file` that holds its lock, None where the file system has no locks.

    Raise `BadInput` if another process has it.
    """
    while fcntl is not None:
        descriptor = os.open(str(file), os.O_RDWR | os.O_CREAT, 0o666)
        _open_here.add(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # the last holder may have removed the file since it was opened; then this lock is void
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
            # a file that locks nothing would stay behind
            file.unlink()
            return None
    return None


def _describe_holder(folder: Path) -> BadInput:
    holder = "another process"
    with contextlib.suppress(OSError, ValueError):
        pid, host = (folder / LOCK).read_text().split()
        holder = f"process {pid}" + (f" on {host}" if host != socket.gethostname() else "")
    return BadInput(
        f"--out: {folder}: {holder} writes a run there: wait for it, or give another folder"
    )


def _close(descriptor: int) -> None:
    _open_here.discard(descriptor)
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _close_in_child() -> None:
    for descriptor in list(_open_here):
        _close(descriptor)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


# the outputs of a run, which `--overwrite` may delete; nothing else in the folder is touched
# folder -> names of the files in it that a run writes
FOLDERS = {
    "tensorboard": re.compile(r"events\.out\.tfevents\..*"),
    "checkpoints": re.compile(r"step-\d+|\.step-\d+\.(part|old)"),
    "trace": re.compile(r"(rank-\d+|modelled)\.trace"),
}
OUTPUTS = (
    "config.yaml",
    "metrics.jsonl",
    "metrics.csv",
    "summary.json",
    "trace.json.gz",
    "memory.json",
    "record.json",
    "ipu.json",
    "init_from.json",
    "ema.safetensors",
    "diverged.json",
    "traceback.txt",
    "against.json",
    "against.png",
    *FOLDERS,
)
# keys that a run's config.yaml always has, unlike most configs written by hand
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


def parse_folder(out: str | Path) -> Path:
    """Return the folder that `out` names. Raise `BadInput` for an empty text, which would be the
    current folder.
    """
    if not isinstance(out, (str, os.PathLike)) or not str(out).strip():
        raise BadInput(f"--out: {out!r}: must name a folder")
    return parse_path(out, "--out")


def check_folder(
    path: Path, resume: bool = False, overwrite: bool = False, can_resume: bool = True
) -> list[str]:
    """List the outputs of a run in the folder `path` without changing anything.

    Raise `BadInput` if there are outputs and neither `resume` nor `overwrite`, if the folder to
    overwrite is not a run's, or if nothing can be written there. `can_resume`: the command has
    --resume.
    """
    with guard_writing(f"--out: {path}", kind=BadInput):
        # the folder itself may not exist yet: its files will be made in the nearest that does
        above = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not above.is_dir():
            raise BadInput(f"--out: {above}: is a file, must be a folder")
        if not os.access(above, os.W_OK | os.X_OK):
            raise BadInput(f"--out: {above}: no permission to write")
        outputs = [name for name in OUTPUTS if (path / name).exists()]
        # a run that was killed at its beginning leaves only this file, which the next one replaces
        is_begun = outputs == ["record.json"]
        if is_begun:
            outputs = []
        for name in outputs:
            if (path / name).is_dir() != (name in FOLDERS):
                kind = "not a folder" if name in FOLDERS else "a folder"
                raise BadInput(f"--out: {path}: {name} is {kind}, so it is not a run's")
        if outputs and not (resume or overwrite):
            options = "--resume, --overwrite" if can_resume else "--overwrite"
            raise BadInput(
                f"--out: {path}: contains another run ({outputs[0]}): give {options} or another "
                f"folder"
            )
        foreign = _find_foreign(path, outputs) if overwrite and not is_begun else None
        if foreign is not None:
            why = "the folder is not a run's: give another folder, or empty it"
            raise BadInput(f"--overwrite: {path}: {foreign}: {why}")
    return outputs


def _find_foreign(path: Path, outputs: list[str]) -> str | None:
    """Return the reason why a folder is not the folder of a run or of several runs; None if it is,
    or if it is empty.
    """
    if outputs:
        return None if is_run(path) else f"{outputs[0]} is there, but no config.yaml of a run"
    for entry in _list_entries(path):
        # an empty folder belongs to nobody
        if (_list_entries(entry) or not entry.is_dir()) and not is_run(entry):
            return f"it contains {entry.name}"
    return None


def _list_entries(path: Path) -> list[Path]:
    """List the entries of the folder except the lock."""
    return sorted(entry for entry in path.iterdir() if entry.name != LOCK) if path.is_dir() else []


def is_run(path: Path) -> bool:
    """Return whether the folder has a config.yaml that a run wrote."""
    try:
        return (path / "config.yaml").is_file() and SPELT_OUT <= read_yaml(
            path / "config.yaml"
        ).keys()
    except BadInput:
        return False


def read_summary(path: Path) -> dict[str, Any] | None:
    """Return the summary of the run in the folder `path`, None if it has not ended. Raise
    `BadInput` for another version's.
    """
    summary = _read_json(path / "summary.json")
    if not isinstance(summary, dict):
        return None
    schema = summary.get("schema", SCHEMA)
    if schema != SCHEMA:
        remedy = "use the ipu_pipe that wrote it, or --overwrite"
        raise BadInput(
            f"{path / 'summary.json'}: schema: {show(schema)}: this version reads {SCHEMA}: "
            f"{remedy}"
        )
    return summary


def read_starts(path: Path) -> list[Any]:
    """Return the records of a run's starts so far, [] if they are missing or unreadable."""
    starts = _read_json(path / "record.json")
    return starts if isinstance(starts, list) else []


def is_to_go_on(path: Path, update: int) -> bool:
    """Return whether the newest start of the run in `path` was to go on from `update` after an
    early end there: it was killed before its first checkpoint.
    """
    starts = read_starts(path)
    newest = starts[-1] if starts else None
    return (
        isinstance(newest, dict)
        and newest.get("first_update") == update
        and bool(newest.get("goes_on"))
    )


def is_restarted(path: Path) -> bool:
    """Return whether the launcher has restarted this process, and also made the newest start of the
    run in `path`.
    """
    launch = read_launch()
    starts = read_starts(path) if launch.attempt else []
    newest = starts[-1] if starts else None
    return isinstance(newest, dict) and newest.get("job") == launch.job


def _read_json(file: Path) -> Any:
    """Return the content of a JSON file, None if it is missing or unreadable; a pipe, which would
    block, is not read.
    """
    try:
        return json.loads(read_file(file))
    except (OSError, ValueError, RecursionError):
        return None


class RunFolder:
    """The folder of one run, made or emptied as `check_folder` allows."""

    def __init__(self, path: Path, resume: bool = False, overwrite: bool = False) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._metrics: TextIO | None = None
        outputs = check_folder(path, resume, overwrite)
        with guard_writing(f"--out: {path}", kind=BadInput):
            path.mkdir(parents=True, exist_ok=True)
            if overwrite:
                # config.yaml last, so that a half-deleted folder is still recognized as a run's
                for name in reversed(outputs):
                    _remove(path / name)
                    _remove(path / f".{name}.part")
            if resume:
                checkpoint.delete_leftovers(self.checkpoints)
                # the traceback of the fault that ended the earlier start
                _remove(path / "traceback.txt")

    def forget_after(self, update: int, say: Callable[[str], None]) -> None:
        """Delete the final files of a finished run and the checkpoints after `update`, from which
        the run continues.
        """
        # these are written at the end of a run
        for name in ("summary.json", "ema.safetensors", "trace/modelled.trace"):
            self.forget(name)
        later = [step for step in checkpoint.list_steps(self.checkpoints) if step > update]
        # newest first, so that a run that is killed here can resume from the others
        checkpoint.delete_steps(self.checkpoints, later[::-1])
        if later:
            say(f"deleted, will be written again: step-{', step-'.join(map(str, later))}")

    def forget(self, name: str) -> None:
        """Delete an output, if it is there. Raise `RunFault` if the disk refuses."""
        with guard_writing(self.path / name):
            _remove(self.path / name)

    def open_metrics(self, last_step: int, retested: bool = False) -> None:
        """Open metrics.jsonl for more lines; drop the lines after update `last_step`, which will be
        written again.

        `retested`: also drop the test at `last_step`, which was the final test of a run with a
        validation set.
        """
        path = self.path / "metrics.jsonl"
        # reading a pipe or a device might never end
        if path.exists() and not path.is_file():
            raise RunFault(f"{path}: is not a file")
        with guard_writing(path):
            past = []
            text = read_file(path).decode(errors="replace") if last_step and path.exists() else ""
            for line in text.splitlines():
                # the run may have been killed within a line
                with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                    record = json.loads(line)
                    if record["step"] < last_step + (not (retested and "test_loss" in record)):
                        past.append(line + "\n")
            write_text(path, "".join(past))
            self._metrics = open(path, "a")

    def write_metrics(self, record: dict[str, Any]) -> None:
        """Append one record to metrics.jsonl."""
        assert self._metrics is not None
        with guard_writing(self.path / "metrics.jsonl"):
            self._metrics.write(json.dumps(replace_nonfinite(record)) + "\n")
            self._metrics.flush()

    def close(self) -> None:
        """Close metrics.jsonl."""
        if self._metrics is not None:
            # every line was flushed, so an earlier write has reported the error
            with contextlib.suppress(OSError):
                self._metrics.close()


def _remove(path: Path) -> None:
    """Delete an output of a run: a file, or the run's files in a folder and then the folder, if it
    is empty.
    """
    if path.is_dir():
        for entry in path.iterdir():
            # what others have put there stays
            if FOLDERS[path.name].fullmatch(entry.name):
                shutil.rmtree(
                    entry
                ) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        # the folder may contain other files, or be a link
        with contextlib.suppress(OSError):
            path.rmdir()
    elif path.exists() or path.is_symlink():
        path.unlink()
