"""Declare a command with its arguments (`@command`, `option`), parse arguments, and print progress
and results.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import sys
import traceback
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

from ipu_pipe import errors
from ipu_pipe.config.values import MOST_COUNT
from ipu_pipe.errors import BadInput, Parser, RunFault, find_user_fault
from ipu_pipe.files import explain_impossible_path
from ipu_pipe.shipped import find_config
from ipu_pipe.text import escape_lines, find_nearest, show

# typing's names: an alias is evaluated, and Python 3.8 cannot subscript tuple and dict
Option = Tuple[Tuple[str, ...], str, Dict[str, Any]]
Epilog = Union[str, Callable[[], str]]
Function = Callable[[argparse.Namespace], None]


def option(*names: str, group: str = "", **keys: Any) -> Option:
    """Return an argument of a command, as `argparse.ArgumentParser.add_argument` takes it, and its
    `group` in the help.
    """
    return names, group, keys


SET = option(
    "--set",
    action="extend",
    nargs="+",
    default=[],
    metavar="KEY=VALUE",
    help="change keys of the config, such as optimizer.lr=0.1 (values are YAML)",
)
CONFIG = (
    option(
        "config",
        metavar="CONFIG",
        # optional for argparse, since the words of a --set before it may have taken it
        # (`_take_config_name`)
        nargs="?",
        help="a YAML file, or the name of one in configs/, such as mlp_digits",
    ),
    SET,
)
JSON = option("--json", action="store_true", help="print JSON")
QUIET = option("--quiet", action="store_true", help="print only errors, and JSON if requested")
COMMON = (
    QUIET,
    option(
        "--traceback",
        action="store_true",
        help="print the whole traceback of an error instead of one line",
    ),
)


class Command:
    """A command: a function of its parsed arguments.

    `epilog`: text, or a function that returns it when it is shown. The function prints by
    `args.print_progress`, which --quiet mutes, and by `args.print_result`, which --quiet and --json
    mute.
    """

    def __init__(
        self,
        description: Optional[str],
        epilog: Epilog,
        options: Sequence[Option],
        function: Function,
    ) -> None:
        self._description = description
        self._epilog = epilog
        self._options = options
        self._function = function

    def make_parser(self) -> Parser:
        """Return the command's parser."""
        # made only to be shown, since a table in it may need slow imports
        epilog = self._epilog if isinstance(self._epilog, str) else self._epilog()
        name = self._function.__module__.rpartition(".")[2]
        # `Parser` prints this name as the user called the command
        parser = Parser(prog=f"tools/{name}.py", description=self._description, epilog=epilog)
        groups: Dict[str, Any] = {"": parser}
        for names, group, keys in self._options:
            if group not in groups:
                groups[group] = parser.add_argument_group(group)
            groups[group].add_argument(*names, **keys)
        return parser

    def __call__(self, arguments: Optional[Sequence[str]] = None) -> None:
        """Run the command on a command line, sys.argv by default."""
        parser = self.make_parser()
        words = list(sys.argv[1:] if arguments is None else arguments)
        # first: argparse would name the option that an unknown one was to be
        _refuse_unknown(parser, _find_unknown_options(parser, words))
        # parse_args would end at the rest, without our suggestion
        args, rest = parser.parse_known_args(words)
        _refuse_unknown(parser, [*_find_settings(parser, args), *rest])
        # not every command has --quiet and --json
        is_quiet = getattr(args, "quiet", False)
        args.print_progress = (lambda text: None) if is_quiet else print_progress
        args.print_result = (
            (lambda text: None) if is_quiet or getattr(args, "json", False) else print_result
        )
        if "config" in args:
            args.config_name = _take_config_name(args)
            args.config = str(find_config(args.config_name))
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
            wants_traceback = getattr(args, "traceback", False) and not isinstance(
                error, KeyboardInterrupt
            )
            # of several processes one prints the fault
            if wants_traceback and not getattr(fault or error, "is_reported", None):
                sys.stderr.write(fault.traceback if fault is not None else traceback.format_exc())
            raise


def command(
    description: Optional[str], epilog: Epilog, *options: Option
) -> Callable[[Function], Command]:
    """Return a decorator that makes a command of a function of parsed arguments."""
    return functools.partial(Command, description, epilog, options)


def _find_unknown_options(parser: Parser, words: Sequence[str]) -> List[str]:
    """Return the first word that begins no option of the parser, and its values; nothing if there
    is none.
    """
    for number, word in enumerate(words):
        # for argparse, what follows it are values
        if word == "--":
            break
        name = word.partition("=")[0]
        # argparse takes any beginning of a long option for the option
        if name.startswith("--") and not any(
            known.startswith(name) for known in parser.list_options()
        ):
            values = itertools.takewhile(
                lambda value: not value.startswith("--"), words[number + 1 :]
            )
            return [word, *values]
    return []


def _find_settings(parser: Parser, args: argparse.Namespace) -> List[str]:
    """Return the positional arguments that are KEY=VALUE in place of a file's name."""
    if "--set" not in parser.list_options():
        return []
    # `what` is that of a tool of the clone: tools/stability.py draws figures
    positional = [getattr(args, name) for name in ("config", "what") if name in args]
    values = [value for one in positional for value in (one if isinstance(one, list) else [one])]
    # a file's name may have an = in it; os.path, because Path raises where a name is too long
    return [value for value in values if value and "=" in value and not os.path.exists(value)]


def _refuse_unknown(parser: Parser, words: Sequence[str]) -> None:
    """Raise `BadInput` if there are `words` that a command does not take, with the spelling that it
    takes.
    """
    if not words:
        return
    hint = _suggest_argument(parser, words)
    hint = f"; did you mean {hint}?" if hint else ""
    parser.error(f"unrecognized arguments: {' '.join(map(show, words))}{hint}")


def _suggest_argument(parser: Parser, words: Sequence[str]) -> str:
    """Return what may be meant by an unknown word and the values after it: an argument, an option,
    or --set KEY=VALUE.
    """
    name, equals, value = words[0].partition("=")
    # --name=VALUE, or --name VALUE
    value = value if equals else " ".join(words[1:2]) or "VALUE"
    options = {option[2:]: option for option in parser.list_options() if option.startswith("--")}
    bare = name.lstrip("-")
    # nothing tells what a stray word was meant for
    if not name.startswith("-") and not equals:
        return ""
    # --config FILE, as other trainers have it
    if name.startswith("-") and bare in parser.list_positional():
        return f"{parser.list_positional()[bare]} without {name}"
    key = ""
    if "set" in options:
        # imported here because it imports pydantic, which only commands with a config need
        from ipu_pipe.config.faults import find_key
        from ipu_pipe.config.schema import Config

        key = find_key(bare, Config)
    # a key that the word says exactly comes before an option that is similar
    near = "" if key or not name.startswith("-") else find_nearest(bare, options)
    if near:
        # VALUE stands for a word that the user has not typed
        return f"{options[near]} {value}" if value != "VALUE" else options[near]
    if "set" in options:
        key = key or find_nearest(bare, Config.model_fields)
    if key.startswith("--") or not key:
        return key
    # `find_key` names several keys if sections share one, such as `every`
    return " or ".join(f"--set {one}={value}" for one in key.split(" or "))


def _take_config_name(args: argparse.Namespace) -> str:
    """Return CONFIG as the user wrote it: a file, or the name of an example that comes with the
    library.

    CONFIG may also follow the last --set (--set a=1 CONFIG). Raise `BadInput` if it is missing.
    """
    if args.config is None and args.set and "=" not in args.set[-1]:
        args.config = args.set.pop()
    if args.config is None:
        raise BadInput("CONFIG: missing: must be a YAML file, such as configs/mlp_digits.yaml")
    return str(args.config)


def parse_folder(text: str) -> Path:
    """Convert an argument to a folder's path. Refuse an empty one: it would mean the current
    folder.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r}: must name a folder")
    return parse_file(text)


def parse_file(text: str) -> Path:
    """Convert an argument to a file's path. Refuse a name that no file can have."""
    why = explain_impossible_path(text)
    if why:
        raise argparse.ArgumentTypeError(f"{show(text)}: {why}")
    return Path(text)


def int_in(low: int, high: int = MOST_COUNT) -> Callable[[str], int]:
    """Return a converter of an argument to an integer in [low, high], for argparse's `type`."""

    def parse_integer(text: str) -> int:
        digits = text.strip()
        if (
            # int() refuses thousands of digits by an error of its own
            len(digits) < 30
            and digits.lstrip("+-").isdecimal()
            # int() also reads the digits of other scripts
            and digits.isascii()
            and low <= int(digits) <= high
        ):
            return int(digits)
        raise argparse.ArgumentTypeError(
            f"{show(text)}: must be a whole number from {low} to {high}"
        )

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
    # written so that it also refuses NaN, which no comparison holds for
    if not 0 < value < 1e18:
        raise argparse.ArgumentTypeError(f"{show(text)}: must be a number above 0 and below 1e18")
    return value


def parse_names(text: str) -> Tuple[str, ...]:
    """Convert an argument to different names separated by commas."""
    # a comma at the end names nothing
    names = tuple(filter(None, text.split(",")))
    # a name may be a run's folder, which two runs must not share
    if not names or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{show(text)}: must be different names, by commas")
    return names


def print_progress(text: str) -> None:
    """Print a line of progress on standard error; standard output belongs to the result."""
    errors.print_progress(text, sys.stderr)


def print_result(text: str) -> None:
    """Print a result on standard output."""
    print(escape_lines(text))
