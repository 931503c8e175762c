"""What comes with the library besides its code, and how the user calls its commands.

In a clone the models and configs lie beside the package, as `models` and `configs`; a wheel has them inside, as
`ipu_pipe.models` and `ipu_pipe/configs`, so that it installs no other package of a name that users have themselves.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Optional

HERE = Path(__file__).resolve().parent
MODELS, COMMAND = "models", "ipu-pipe"
TOOL = re.compile(r"\b(?:python )?tools/(\w+)\.py")


def find_configs() -> Path:
    """The folder of the example configs and of the hardware descriptions."""
    inside = HERE / "configs"
    return inside if inside.is_dir() else HERE.parent / "configs"


def find_config(name: str) -> Path:
    """The config that is asked for: the user's own file, else an example by its name (configs/mlp_digits.yaml, mlp_digits)."""
    path = Path(name)
    if path.exists() or path.is_absolute():
        return path
    inside = Path(*path.parts[1:]) if path.parts[:1] == ("configs",) else path
    candidates = [find_configs() / inside] if inside.suffix else [(find_configs() / inside).with_suffix(".yaml")]
    return next((candidate for candidate in candidates if candidate.is_file()), path)


def get_program() -> Optional[str]:
    """What the user called to get a command; None: a script of a clone."""
    called = Path(sys.argv[0])
    if called.stem == COMMAND:
        return COMMAND
    return "python -m ipu_pipe" if called.name == "__main__.py" and called.parent.name == "ipu_pipe" else None


def name_commands(text: str, called: Optional[str] = None) -> str:
    """`text`, which names commands as a clone has them (python tools/fetch_data.py), as the user calls them, or as they are to be
    `called`."""
    called = called or get_program()
    if called is None:
        return text
    return TOOL.sub(lambda found: f"{called} {found.group(1).replace('_', '-')}", text)
