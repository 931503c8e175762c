"""Open the files that a user names, write output files atomically (a reader sees all of a file's
new contents, or none), and hash files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import stat
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Iterator, Mapping

from ipu_pipe.errors import BadInput, guard_writing
from ipu_pipe.text import show

# ---- reading

# the most bytes of a file whose text is read at once: more than any manifest, table or list of
# lines of a run
MOST_TEXT_BYTES = 1 << 30
# the most bytes of a file of weights: no machine has the memory for more
MOST_WEIGHTS_BYTES = 1 << 40


def parse_path(value: str | os.PathLike[str], key: str) -> Path:
    """Return the path that `value` names. Raise `BadInput`, about `key`, for text that no file's
    name can hold.
    """
    why = explain_impossible_path(value)
    if why:
        raise BadInput(f"{key}: {show(value)}: {why}")
    return Path(value)


def explain_impossible_path(value: str | os.PathLike[str]) -> str:
    """Return why no file can have the name `value`, "" if one can."""
    try:
        if b"\0" in os.fsencode(value):
            raise ValueError("embedded null byte")
        os.lstat(value)
    # half a character is a UnicodeEncodeError
    except (TypeError, ValueError) as error:
        return f"cannot be a path: {error}"
    # for a name that is too long pathlib raises wherever it is only asked
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return f"cannot be a path: {error.strerror}"
    return ""


def open_file(path: Path, most_bytes: int = MOST_WEIGHTS_BYTES) -> BinaryIO:
    """Open a regular file of at most `most_bytes` bytes, for reading.

    Raise `OSError`, with the reason, for anything else: a pipe would block, a device might never
    end.
    """
    try:
        # O_NONBLOCK, because opening a pipe waits for a writer; systems without it have no such
        # files
        handle = os.open(
            path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        )
    # a NUL, or half a character
    except ValueError as error:
        raise OSError(errno.EINVAL, f"no file can have this name ({error})") from None
    # of the open file: by now the path may lead to another one
    state = os.fstat(handle)
    why = ""
    if not stat.S_ISREG(state.st_mode):
        why = "is not a regular file"
    elif state.st_size > most_bytes:
        why = f"has {state.st_size} bytes, at most {most_bytes} are read"
    if why:
        os.close(handle)
        raise OSError(errno.EINVAL, why)
    return open(handle, "rb")


def read_file(path: Path, most_bytes: int = MOST_TEXT_BYTES) -> bytes:
    """Return the contents of a file that `open_file` opens. Raise `OSError`."""
    with open_file(path, most_bytes) as file:
        content = file.read(most_bytes + 1)
    # a file of /proc has no size before it is read
    if len(content) > most_bytes:
        raise OSError(errno.EINVAL, f"has more than {most_bytes} bytes")
    return content


# ---- writing


@contextlib.contextmanager
def atomic_file(file: Path, contents: str = "") -> Iterator[Path]:
    """Yield a temporary path; if the block succeeds, the contents written there become `file`.

    A regular file is replaced in one step, so that a reader sees the old one or the new one. A
    symbolic link is followed. A device or a pipe cannot be replaced: it receives the bytes. Raise
    `RunFault`, which may name the `contents`, on any error, including a pipe without a reader.
    """
    with guard_writing(file, contents):
        # os.replace would put the file in a link's place, and leave its target as it was
        target = Path(os.path.realpath(file))
        # realpath gives up on a link that leads to itself
        if target.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if target.is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if target.exists() and not target.is_file():
            # Opening a pipe that nobody reads would wait forever: without waiting it is an error
            # (ENXIO).
            descriptor = os.open(target, os.O_WRONLY | os.O_NONBLOCK)
            os.set_blocking(descriptor, True)
            with open(descriptor, "wb") as sink, tempfile.TemporaryDirectory() as folder:
                temporary = Path(folder) / target.name
                yield temporary
                with open(temporary, "rb") as source:
                    shutil.copyfileobj(source, sink)
            return
        # in the same folder: os.replace does not cross file systems
        temporary = target.with_name(f".{target.name}.part")
        try:
            yield temporary
            os.replace(temporary, target)
        finally:
            # after os.replace there is none
            with contextlib.suppress(OSError):
                temporary.unlink()


def write_text(file: Path, text: str) -> Path:
    """Write `text` to a file atomically and return the path. Raise `RunFault` if it cannot be
    written.
    """
    with atomic_file(file) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return file


def write_json(file: Path, value: Any) -> Path:
    """Write a value as JSON to a file atomically and return the path; NaN and infinities become
    null.
    """
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


# ---- hashes

# the most bytes that are hashed at a start of a run, which takes some seconds
MOST_HASHED_BYTES = 1 << 30


def hash_file(path: Path, algorithm: str) -> str:
    """Return the hexadecimal hash of a file; `algorithm`: sha256, or md5 if the set's publisher
    gives that.
    """
    digest = hashlib.new(algorithm)
    with open_file(path) as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def hash_files(
    files: Mapping[str, Path],
    earlier: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """Return `bytes`, `modified_ns` and `sha256` of each file by its name.

    The hash is taken from `earlier`, an earlier result, if size and time are the same. It is None
    beyond the first `MOST_HASHED_BYTES`, and for anything but a regular file: a pipe may never end.
    Raise `OSError`.
    """
    states = {name: path.stat() for name, path in files.items()}
    records = {
        name: {"bytes": state.st_size, "modified_ns": state.st_mtime_ns}
        for name, state in states.items()
    }
    bytes_left = MOST_HASHED_BYTES
    names = []
    for name, state in states.items():
        bytes_left -= state.st_size
        if bytes_left >= 0 and stat.S_ISREG(state.st_mode):
            names.append(name)

    def hash_or_reuse(name: str) -> str | None:
        record = earlier.get(name)
        if (
            isinstance(record, dict)
            and record.get("sha256")
            and {**record, "sha256": None} == {**records[name], "sha256": None}
        ):
            return str(record["sha256"])
        return hash_file(files[name], "sha256")

    # hashlib releases the GIL while it hashes
    with ThreadPoolExecutor() as pool:
        hashes = dict(zip(names, pool.map(hash_or_reuse, names)))
    return {name: {**record, "sha256": hashes.get(name)} for name, record in records.items()}
