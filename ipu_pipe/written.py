"""Files written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any, Iterator, Mapping

from ipu_pipe.errors import writing


@contextlib.contextmanager
def whole(file: Path, what: str = "") -> Iterator[Path]:
    """The path to write to, beside `file`, whose place it takes at the end; where that fails, it is gone. Raises RunFault where
    the disk refuses, in which the file may be said to be `what`."""
    temporary = file.with_name(f".{file.name}.part")
    with writing(file, what):
        try:
            yield temporary
            os.replace(temporary, file)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()


def write(file: Path, text: str) -> Path:
    """Write a file whole or not at all. Raises RunFault where the disk refuses it."""
    with whole(file) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return file


def write_json(file: Path, found: Mapping[str, Any]) -> Path:
    """As `write`."""
    return write(file, json.dumps(found, indent=1) + "\n")
