"""Files written whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Mapping

from ipu_pipe.errors import writing


def write(file: Path, text: str) -> Path:
    """Write a file whole or not at all: first beside it, under another name. Raises RunFault where the disk refuses it."""
    with writing(file):
        temporary = file.with_name(f".{file.name}.part")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, file)
    return file


def write_json(file: Path, found: Mapping[str, Any]) -> Path:
    """As `write`."""
    return write(file, json.dumps(found, indent=1) + "\n")
