"""Declare a command with its arguments (`@command`, `option`), parse arguments, and print progress and results."""

from __future__ import annotations

import argparse
import functools
import sys
import traceback
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Sequence, Tuple, Union

from ipu_pipe.config.values import MOST_COUNT
from ipu_pipe.errors import BadInput, Parser, RunFault, find_user_fault
from ipu_pipe.shipped import find_config
from ipu_pipe.text import escape_lines, show

Option = Tuple[Tuple[str, ...], str, Dict[str, Any]]
Epilog = Union[str, Callable[[], str]]
Function = Callable[[argparse.Namespace], None]


def option(*names: str, group: str = "", **keys: Any) -> Option:
    """Return an argument of a command, as `argparse.ArgumentParser.add_argument` takes it, and its `group` in the help."""
    return names, group, keys


SET = option("--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help="other values of keys, as YAML")
CONFIG = (option("config", metavar="CONFIG", nargs="?", help="a YAML file, such as those in configs/"), SET)
JSON = option("--json", action="store_true", help="print JSON")
QUIET = option("--quiet", action="store_true", help="print faults alone, and JSON where it is asked for")
RUNS = Path("runs/experiments")
COMMON = (QUIET, option("--traceback", action="store_true", help="print a fault's whole traceback, not its line alone"))


class Command:
    """A command: a function of its parsed arguments.

    `epilog`: text, or a function that returns it when it is shown. The function prints by `args.print_progress`, which --quiet
    mutes, and by `args.print_result`, which --quiet and --json mute.
    """

    def __init__(self, description: Optional[str], epilog: Epilog, options: Sequence[Option], function: Function) -> None:
        self._description, self._epilog, self._options, self._function = description, epilog, options, function

    def make_parser(self) -> Parser:
        """Return the command's parser."""
        epilog = self._epilog if isinstance(self._epilog, str) else self._epilog()
        name = self._function.__module__.rpartition(".")[2]
        parser = Parser(prog=f"tools/{name}.py", description=self._description, epilog=epilog)
        groups: Dict[str, Any] = {"": parser}
        for names, group, keys in self._options:
            if group not in groups:
                groups[group] = parser.add_argument_group(group)
            groups[group].add_argument(*names, **keys)
        return parser

    def __call__(self, arguments: Optional[Sequence[str]] = None) -> None:
        """Run the command on a command line, sys.argv by default."""
        args = self.make_parser().parse_args(arguments)
        is_quiet = getattr(args, "quiet", False)
        args.print_progress = (lambda text: None) if is_quiet else print_progress
        args.print_result = (lambda text: None) if is_quiet or getattr(args, "json", False) else print_result
        if "config" in args:
            args.config = _take_config(args)
        try:
            self._function(args)
        except SystemExit as error:
            # commands that need no torch never exit so
            from ipu_pipe.job.user_code import is_own_exit

            if is_own_exit(error):
                raise
            # its exit code might mean success
            raise RunFault(f"code that the config names called exit({show(error.code)})") from error
        except BaseException as error:
            fault = find_user_fault(error)
            wants_traceback = getattr(args, "traceback", False) and not isinstance(error, KeyboardInterrupt)
            if wants_traceback and not getattr(fault or error, "is_reported", None):
                sys.stderr.write(fault.traceback if fault is not None else traceback.format_exc())
            raise


def command(description: Optional[str], epilog: Epilog, *options: Option) -> Callable[[Function], Command]:
    """Return a decorator that makes a command of a function of parsed arguments."""
    return functools.partial(Command, description, epilog, options)


def _take_config(args: argparse.Namespace) -> str:
    """Return the path of the config that CONFIG names: a file, or an example that comes with the library.

    CONFIG may also follow the last --set (--set a=1 CONFIG). Raise `BadInput` if it is missing.
    """
    if args.config is None and args.set and "=" not in args.set[-1]:
        args.config = args.set.pop()
    if args.config is None:
        raise BadInput("CONFIG: missing: must be a YAML file, such as configs/mlp_digits.yaml")
    return str(find_config(args.config))


def parse_folder(text: str) -> Path:
    """Convert an argument to a folder's path. Refuse an empty one: it would mean the current folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r}: must name a folder")
    return Path(text)


def int_in(low: int, high: int = MOST_COUNT) -> Callable[[str], int]:
    """Return a converter of an argument to an integer in [low, high], for argparse's `type`."""

    def parse_integer(text: str) -> int:
        digits = text.strip()
        if len(digits) < 30 and digits.lstrip("+-").isdecimal() and digits.isascii() and low <= int(digits) <= high:
            return int(digits)
        raise argparse.ArgumentTypeError(f"{show(text)}: must be a whole number from {low} to {high}")

    return parse_integer


parse_count = int_in(1)


def parse_counts(text: str) -> Tuple[int, ...]:
    """Convert an argument to positive integers separated by commas."""
    return tuple(map(parse_count, text.split(",")))


def parse_positive(text: str) -> float:
    """Convert an argument to a number in (0, 1e18)."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e18:
        raise argparse.ArgumentTypeError(f"{show(text)}: must be a number above 0 and below 1e18")
    return value


def parse_names(text: str) -> Tuple[str, ...]:
    """Convert an argument to names separated by commas."""
    names = tuple(filter(None, text.split(",")))
    if not names:
        raise argparse.ArgumentTypeError(f"{show(text)}: must be names, by commas")
    return names


def print_progress(text: str) -> None:
    """Print a line of progress on standard error; standard output belongs to the result."""
    print(escape_lines(text), file=sys.stderr, flush=True)


def print_result(text: str) -> None:
    """Print a result on standard output."""
    print(escape_lines(text))
