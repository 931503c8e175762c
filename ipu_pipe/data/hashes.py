"""Hashes of files, read in pieces that fit in memory."""

from __future__ import annotations

import hashlib
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, Mapping, Optional

MOST_BYTES = 1 << 30  # that are hashed at a start, some seconds' work


def hash_file(path: Path, algorithm: str) -> str:
    """Return the hexadecimal hash of a file; `algorithm` is sha256, or md5 where official sums are given so."""
    digest = hashlib.new(algorithm)
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def hash_files(files: Mapping[str, Path], known: Mapping[str, Any]) -> Dict[str, Dict[str, Any]]:
    """Return `bytes`, `modified_ns` and `sha256` of each file by its name.

    The hash is taken from `known`, an earlier result, if size and time are the same. It is None beyond the first `MOST_BYTES`,
    and for anything but a regular file: a pipe may never end. Raise `OSError`.
    """
    states = {name: path.stat() for name, path in files.items()}
    records = {name: {"bytes": state.st_size, "modified_ns": state.st_mtime_ns} for name, state in states.items()}
    left, chosen = MOST_BYTES, []
    for name, state in states.items():
        left -= state.st_size
        if left >= 0 and stat.S_ISREG(state.st_mode):
            chosen.append(name)

    def hashed(name: str) -> Optional[str]:
        before = known.get(name)
        if isinstance(before, dict) and {**before, "sha256": None} == {**records[name], "sha256": None}:
            return before.get("sha256") or hash_file(files[name], "sha256")
        return hash_file(files[name], "sha256")

    with ThreadPoolExecutor() as pool:
        sums = dict(zip(chosen, pool.map(hashed, chosen)))
    return {name: {**state, "sha256": sums.get(name)} for name, state in records.items()}
