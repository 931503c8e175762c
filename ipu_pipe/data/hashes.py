"""Hashes of files, in pieces that fit in memory."""

from __future__ import annotations

import hashlib
from pathlib import Path


def file_hash(path: Path, algorithm: str) -> str:
    """Hexadecimal hash of a file's contents; `algorithm`: sha256, or md5 where official sums are given so."""
    digest = hashlib.new(algorithm)
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()
