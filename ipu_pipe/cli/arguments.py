"""Arguments and output that several commands share."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Callable, Tuple

from ipu_pipe.config.values import MOST_COUNT
from ipu_pipe.errors import BadInput
from ipu_pipe.shipped import find_config
from ipu_pipe.text import escape_lines, show


def folder(text: str) -> Path:
    """Convert an argument to a folder's path. Refuse an empty one: it would mean the current folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r}: must name a folder")
    return Path(text)


def whole(low: int, high: int = MOST_COUNT) -> Callable[[str], int]:
    """Return a converter of an argument to an integer in [low, high], for argparse's `type`."""

    def convert(text: str) -> int:
        digits = text.strip()
        if len(digits) < 30 and digits.lstrip("+-").isdecimal() and digits.isascii() and low <= int(digits) <= high:
            return int(digits)
        raise argparse.ArgumentTypeError(f"{show(text)}: must be a whole number from {low} to {high}")

    return convert


count = whole(1)


def counts(text: str) -> Tuple[int, ...]:
    """Convert an argument to positive integers separated by commas."""
    return tuple(count(part) for part in text.split(","))


def positive(text: str) -> float:
    """Convert an argument to a number in (0, 1e18)."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e18:
        raise argparse.ArgumentTypeError(f"{show(text)}: must be a number above 0 and below 1e18")
    return value


def add_set(parser: argparse.ArgumentParser) -> None:
    """Add the option --set KEY=VALUE ..."""
    says = "change keys of the config; VALUE is YAML"
    parser.add_argument("--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help=says)


def take_config(args: argparse.Namespace, example: str) -> str:
    """Return the path of the config that CONFIG names: a file, or an example that comes with the library.

    CONFIG may also stand behind the last --set (--set a=1 CONFIG). Raise `BadInput`, which names `example`, if it is missing.
    """
    if args.config is None and args.set and "=" not in args.set[-1]:
        args.config = args.set.pop()
    if args.config is None:
        raise BadInput(f"CONFIG: missing: must be a YAML file, such as {example}")
    return str(find_config(args.config))


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Add the option --quiet."""
    parser.add_argument("--quiet", action="store_true", help="print faults alone, and JSON where it is asked for")


def add_traceback(parser: argparse.ArgumentParser) -> None:
    """Add the option --traceback."""
    parser.add_argument("--traceback", action="store_true", help="print a fault's whole traceback, not its line alone")


def say(text: str) -> None:
    """Print a line of progress on standard error; standard output belongs to the result."""
    print(escape_lines(text), file=sys.stderr, flush=True)


def tell(text: str) -> None:
    """Print a result on standard output."""
    print(escape_lines(text))


def get_say(quiet: bool) -> Callable[[str], None]:
    """Return `say`, or a function that prints nothing if `quiet`."""
    return (lambda text: None) if quiet else say


def get_tell(quiet: bool) -> Callable[[str], None]:
    """Return `tell`, or a function that prints nothing if `quiet`."""
    return (lambda text: None) if quiet else tell
