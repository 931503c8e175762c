"""Find the example configs that are shipped with the library, and name its commands as the user
calls them.

In a clone the models and configs are beside the package, as `models` and `configs`; a wheel
contains them as `ipu_pipe.models` and `ipu_pipe/configs`, so it installs no package `models` or
`configs`, names that users may have themselves.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
MODELS = "models"
COMMAND = "ipu-pipe"
TOOL = re.compile(r"\b(?:python )?tools/(\w+)\.py")


def find_configs() -> Path:
    """Return the folder of the example configs and of the hardware descriptions."""
    in_wheel = PACKAGE / "configs"
    return in_wheel if in_wheel.is_dir() else PACKAGE.parent / "configs"


def list_configs() -> list[str]:
    """Return the names of the example configs, as `find_config` takes them."""
    folder = find_configs()
    names = sorted(str(file.relative_to(folder).with_suffix("")) for file in folder.rglob("*.yaml"))
    return [name for name in names if not name.startswith("hardware")]


def find_config(name: str) -> Path:
    """Return the path of a config: the user's own file, else an example (configs/mlp_digits.yaml,
    mlp_digits).
    """
    path = Path(name)
    if path.exists() or path.is_absolute():
        return path
    return find_example(name) or path


def find_example(name: str) -> Path | None:
    """Return the path of the example config `name`, None if there is none."""
    path = Path(name)
    relative = Path(*path.parts[1:]) if path.parts[:1] == ("configs",) else path
    example = find_configs() / relative
    example = example if relative.suffix else example.with_suffix(".yaml")
    return example if example.is_file() else None


def get_program() -> str | None:
    """Return the program that the user called, "ipu-pipe" or "python -m ipu_pipe"; None for a
    script of a clone (tools/*.py).
    """
    called = Path(sys.argv[0])
    if called.stem == COMMAND:
        return COMMAND
    return (
        "python -m ipu_pipe"
        if called.name == "__main__.py" and called.parent.name == "ipu_pipe"
        else None
    )


def name_commands(text: str, program: str | None = None) -> str:
    """Replace a clone's names of commands (python tools/fetch_data.py) by those that the user calls
    (ipu-pipe fetch-data).
    """
    program = program or get_program()
    if program is None:
        return text

    def name_command(match: re.Match[str]) -> str:
        name = match.group(1)
        # other tools run from a clone alone, by their own names
        is_command = (PACKAGE / "cli" / f"{name}.py").is_file()
        return f"{program} {name.replace('_', '-')}" if is_command else match.group()

    return TOOL.sub(name_command, text)
