"""Write output files atomically: a reader sees all of a file's new contents, or none."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Iterator

from ipu_pipe.errors import guard_writing


@contextlib.contextmanager
def atomic_file(file: Path, what: str = "") -> Iterator[Path]:
    """Yield a temporary path; if the block succeeds, the contents written there become `file`.

    A regular file is replaced in one step, so that a reader sees the old one or the new one. A symbolic link is followed. A
    device or a pipe cannot be replaced: it receives the bytes. Raise `RunFault`, naming the file `what`, on any error, including
    a pipe without a reader.
    """
    with guard_writing(file, what):
        target = Path(os.path.realpath(file))
        # realpath gives up on a link that leads to itself
        if target.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if target.is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if target.exists() and not target.is_file():
            # Opening a pipe that nobody reads would wait forever: without waiting it is an error (ENXIO).
            descriptor = os.open(target, os.O_WRONLY | os.O_NONBLOCK)
            os.set_blocking(descriptor, True)
            with open(descriptor, "wb") as sink, tempfile.TemporaryDirectory() as folder:
                temporary = Path(folder) / target.name
                yield temporary
                with open(temporary, "rb") as source:
                    shutil.copyfileobj(source, sink)
            return
        temporary = target.with_name(f".{target.name}.part")
        try:
            yield temporary
            os.replace(temporary, target)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()


def write_text(file: Path, text: str) -> Path:
    """Write `text` to a file atomically and return the path. Raise `RunFault` if it cannot be written."""
    with atomic_file(file) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return file


def write_json(file: Path, value: Any) -> Path:
    """Write a value as JSON to a file atomically and return the path; NaN and infinities become null."""
    return write_text(file, json.dumps(replace_nonfinite(value), indent=1) + "\n")


def replace_nonfinite(value: Any) -> Any:
    """Replace every float that is not finite by None: JSON has neither NaN nor infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_nonfinite(item) for item in value]
    return value
