"""One run a folder: the process that writes there holds the folder's lock, and its end, however it comes, frees it.

The lock is the operating system's (flock) on a file `.lock` in the folder, not the file itself: one that a killed run left behind
locks nothing. It names its holder, for the one who is refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from pathlib import Path
from typing import Callable, List, Optional, Set

from ipu_pipe.errors import BadInput

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"
PATIENCE = 0.3  # seconds in which one who only looks whether a folder is in use lets go of it again
TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)

_open_here: Set[int] = set()  # descriptors that hold a lock: a forked process must not hold it longer than this one


class FolderLock:
    """The lock of `folder`, to be taken with `take` and let go with `release` (or `with`). `say` is told where the file system
    has no locks."""

    def __init__(self, folder: Path, say: Callable[[str], None] = print) -> None:
        self._folder, self._file, self._say = folder, folder / NAME, say
        self._descriptor: Optional[int] = None
        self._made: List[Path] = []  # folders, the innermost last

    def take(self) -> None:
        """Lock the folder, which is made where it is not there. Raises BadInput where another run is on in it."""
        try:
            self._make()
            self._descriptor = _locked(self._file)
        except OSError as error:
            self._remove_made()
            if error.errno in NO_LOCKS:
                self._say(
                    f"{self._folder}: no locks on this file system: nothing keeps a second run out of this folder"
                )
                return
            raise BadInput(f"--out: {self._folder}: {error.strerror or error}") from None
        if self._descriptor is None:
            raise _in_use(self._folder)

    def _make(self) -> None:
        self._made = []
        missing = [folder for folder in (self._folder, *self._folder.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            self._made.append(folder)

    def release(self) -> None:
        """Let the folder go. A folder that was made for the lock and got nothing else is gone again."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # the file goes first, while no one else can hold it
                self._file.unlink()
            _close(self._descriptor)
            self._descriptor = None
        self._remove_made()

    def _remove_made(self) -> None:
        with contextlib.suppress(OSError):  # not empty
            while self._made:
                self._made[-1].rmdir()
                self._made.pop()
        self._made = []

    def __enter__(self) -> "FolderLock":
        self.take()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


def refuse_used(folder: Path) -> None:
    """Raise BadInput where a run is on in `folder`. Changes nothing."""
    file = folder / NAME
    if fcntl is None:
        return
    with contextlib.suppress(OSError):
        descriptor = os.open(str(file), os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in TAKEN:
                raise _in_use(folder) from None
        finally:
            os.close(descriptor)


def _locked(file: Path) -> Optional[int]:
    """A descriptor of `file` that holds its lock, None where another has it. Raises OSError."""
    if fcntl is None:
        raise OSError(errno.ENOSYS, "no locks")
    until = time.monotonic() + PATIENCE
    while True:
        descriptor = os.open(str(file), os.O_RDWR | os.O_CREAT, 0o666)
        kept = False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, file):
                _open_here.add(descriptor)
                _name_holder(descriptor)
                kept = True
                return descriptor
        except OSError as error:
            if error.errno in NO_LOCKS:
                file.unlink()
            if error.errno not in TAKEN:
                raise
            if time.monotonic() > until:
                return None
            time.sleep(0.02)
        finally:
            if not kept:
                _close(descriptor)


def _is_at(descriptor: int, file: Path) -> bool:
    """Whether the file is still the one that was opened: its last holder may have removed it meanwhile."""
    try:
        there = os.stat(str(file))
    except FileNotFoundError:
        return False
    here = os.fstat(descriptor)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _name_holder(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # the lock holds on a full disk too
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode())


def _in_use(folder: Path) -> BadInput:
    holder = "another process"
    with contextlib.suppress(OSError, ValueError):
        pid, host = (folder / NAME).read_text().split()
        holder = f"process {pid}" + (f" on {host}" if host != socket.gethostname() else "")
    return BadInput(f"--out: {folder}: {holder} writes a run there: wait for it, or give another folder")


def _close(descriptor: int) -> None:
    _open_here.discard(descriptor)
    os.close(descriptor)


def _close_in_child() -> None:
    for descriptor in list(_open_here):
        with contextlib.suppress(OSError):
            _close(descriptor)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
