"""List the example loops and notebooks, or copy them into a folder of yours."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from ipu_pipe.cli.arguments import QUIET, command, option, parse_folder
from ipu_pipe.errors import BadInput, guard_writing, raise_faults
from ipu_pipe.shipped import find_shipped

KINDS = (".py", ".ipynb", ".sh", ".sbatch")
EPILOG = """
A notebook runs in Jupyter. The two batch files (.sh, .sbatch) start tools/train.py of a clone.

examples:
  ipu-pipe examples
  ipu-pipe examples --copy mine
"""


def list_examples() -> list[Path]:
    """Return the files of the examples. Raise `BadInput` if this installation has none."""
    folder = find_shipped("examples")
    files = [file for file in folder.glob("*") if file.suffix in KINDS]
    raise_faults({f"{folder}: has no examples: this installation lacks them": not files})
    return sorted(files)


def describe_example(file: Path) -> str:
    """Return the first sentence of an example."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".ipynb":
        # the format stores a cell as a list of lines that keep their ends
        text = "".join(json.loads(text)["cells"][0]["source"])
    # a script begins with its shell, and not with what it does
    lines = (line.strip('"# ') for line in text.splitlines() if not line.startswith("#!"))
    return next(filter(None, lines), "")


@command(
    __doc__,
    EPILOG,
    option("--copy", type=parse_folder, metavar="DIR", help="copy them into this folder"),
    QUIET,
)
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    files = list_examples()
    if args.copy is None:
        width = max(len(file.name) for file in files)
        args.print_result(
            "\n".join(f"{file.name:{width}}  {describe_example(file)}" for file in files)
        )
        return
    # all names are looked at before the first copy, so that a refusal leaves nothing behind
    taken = [file.name for file in files if (args.copy / file.name).exists()]
    if taken:
        raise BadInput(f"--copy: {args.copy}: has a file {taken[0]}: choose another folder")
    with guard_writing(args.copy):
        args.copy.mkdir(parents=True, exist_ok=True)
        for file in files:
            # the contents alone: an installed file may be read-only, and its copy is to be changed
            shutil.copyfile(file, args.copy / file.name)
    args.print_result(f"copied: {len(files)} files; python {args.copy / 'own_loop.py'} runs one")
