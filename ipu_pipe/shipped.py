"""Find the configs and models that come with the library, and the names of its commands as the user calls them.

In a clone the models and configs are beside the package, as `models` and `configs`; a wheel contains them as
`ipu_pipe.models` and `ipu_pipe/configs`, so it installs no package `models` or `configs`, names
that users may have themselves.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Optional

PACKAGE = Path(__file__).resolve().parent
MODELS, COMMAND = "models", "ipu-pipe"
TOOL = re.compile(r"\b(?:python )?tools/(\w+)\.py")


def find_configs() -> Path:
    """Return the folder of the example configs and of the hardware descriptions."""
    inside = PACKAGE / "configs"
    return inside if inside.is_dir() else PACKAGE.parent / "configs"


def find_config(name: str) -> Path:
    """Return the path of a config: the user's own file, else an example (configs/mlp_digits.yaml, mlp_digits)."""
    path = Path(name)
    if path.exists() or path.is_absolute():
        return path
    inside = Path(*path.parts[1:]) if path.parts[:1] == ("configs",) else path
    candidate = find_configs() / inside
    candidate = candidate if inside.suffix else candidate.with_suffix(".yaml")
    return candidate if candidate.is_file() else path


def get_program() -> Optional[str]:
    """Return what the user called to run a command; None for a script of a clone."""
    called = Path(sys.argv[0])
    if called.stem == COMMAND:
        return COMMAND
    return "python -m ipu_pipe" if called.name == "__main__.py" and called.parent.name == "ipu_pipe" else None


def name_commands(text: str, program: Optional[str] = None) -> str:
    """Return text that names commands as in a clone (python tools/fetch_data.py) with the names that the user calls."""
    program = program or get_program()
    if program is None:
        return text
    return TOOL.sub(lambda match: f"{program} {match.group(1).replace('_', '-')}", text)
