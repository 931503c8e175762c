"""Kinds of command-line arguments, for argparse's `type`."""

from __future__ import annotations

import argparse
from pathlib import Path


def folder(text: str) -> Path:
    """A folder's path. An empty one is refused: it would be the current folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r}: must name a folder")
    return Path(text)
