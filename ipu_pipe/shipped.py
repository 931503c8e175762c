"""Find the example configs that are shipped with the library, and name its commands as the user
calls them.

In a clone the models, configs and examples are beside the package, as `models`, `configs` and
`examples`; a wheel contains them as `ipu_pipe.models`, `ipu_pipe/configs` and so on, so it installs no package `models` or
`configs`, names that users may have themselves.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
MODELS = "models"
COMMAND = "ipu-pipe"
# torchrun counts up to a comma: a sentence may name it, and further on a tool without it
TOOL = re.compile(r"\b(torchrun [^,;]*?)?(?:python )?tools/(\w+)\.py")


def find_shipped(name: str) -> Path:
    """Return the folder `name` that is shipped with the library: in a wheel inside the package."""
    in_wheel = PACKAGE / name
    return in_wheel if in_wheel.is_dir() else PACKAGE.parent / name


def find_configs() -> Path:
    """Return the folder of the example configs and of the hardware descriptions."""
    return find_shipped("configs")


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
    # os.path, because Path raises where a name is too long
    if os.path.exists(path) or path.is_absolute():
        return path
    return find_example(name) or path


def find_example(name: str) -> Path | None:
    """Return the path of the example config `name`, None if there is none."""
    path = Path(name)
    relative = Path(*path.parts[1:]) if path.parts[:1] == ("configs",) else path
    example = find_configs() / relative
    example = example if relative.suffix else example.with_suffix(".yaml")
    return example if os.path.isfile(example) else None


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
        launcher, name = match.groups()
        # other tools run from a clone alone, by their own names
        if not (PACKAGE / "cli" / f"{name}.py").is_file():
            return match.group()
        # torchrun starts a script or a module, not a command
        start = f"{launcher}-m ipu_pipe" if launcher else program
        return f"{start} {name.replace('_', '-')}"

    return TOOL.sub(name_command, text)
