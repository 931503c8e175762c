"""What command lines have in common: kinds of arguments for argparse's `type`, CONFIG and --set, lines of progress."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Callable

from ipu_pipe.errors import BadInput
from ipu_pipe.shipped import config_path


def folder(text: str) -> Path:
    """A folder's path. An empty one is refused: it would be the current folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r}: must name a folder")
    return Path(text)


def add_set(parser: argparse.ArgumentParser, says: str = "change keys of the config; VALUE is YAML") -> None:
    """The option --set, with what its help `says`."""
    parser.add_argument("--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help=says)


def config_of(args: argparse.Namespace, example: str) -> str:
    """CONFIG, which may stand behind the last --set too (--set a=1 CONFIG), or its file where it names one that comes with the
    library. Raises BadInput, which names `example`."""
    if args.config is None and args.set and "=" not in args.set[-1]:
        args.config = args.set.pop()
    if args.config is None:
        raise BadInput(f"CONFIG: missing: must be a YAML file, such as {example}")
    return str(config_path(args.config))


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """The option --quiet."""
    parser.add_argument("--quiet", action="store_true", help="print faults alone, and JSON where it is asked for")


def say(text: str) -> None:
    """A line of progress, on standard error: standard output is the result's."""
    print(text, file=sys.stderr, flush=True)


def saying(quiet: bool) -> Callable[[str], None]:
    """`say`, or where it is to be `quiet` nothing."""
    return unsaid if quiet else say


def printing(quiet: bool) -> Callable[[str], None]:
    """What prints a result on standard output, or where it is to be `quiet` nothing."""
    return unsaid if quiet else print


def unsaid(text: str) -> None:
    """For what is not to be said."""
