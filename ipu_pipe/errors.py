"""The errors that end a run, and the function of the command lines that prints a line per fault and
sets the exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import warnings
from typing import (
    Any,
    Callable,
    Iterator,
    Mapping,
    NoReturn,
    Sequence,
    TextIO,
)

from ipu_pipe import interrupts
from ipu_pipe.launcher import read_launch
from ipu_pipe.refusals import Language
from ipu_pipe.shipped import name_commands
from ipu_pipe.text import escape_lines, fold_lines, suggest

# by text: Python's own filter counts by line, and would print a text of two lines twice
_printed_warnings: set[str] = set()


class BadInput(ValueError):
    """Input of the user that cannot be used. `faults`: one line each (file, key, value, what is
    allowed), in the words of a config unless it left a `say_in`. Exit code 2.

    `lines`: the faults in both languages, to be raised again.
    """

    is_reported: bool | None = None

    def __init__(self, faults: str | Sequence[str]) -> None:
        self.lines = [str(fault) for fault in ([faults] if isinstance(faults, str) else faults)]
        assert self.lines, "BadInput needs at least one fault"
        super().__init__()
        self.say(Language.CONFIG)

    def say(self, language: Language) -> None:
        """Name settings in the faults as a caller knows them."""
        # choose words before the line is cut: a cut within their signs would leave both languages
        self.faults = [fold_lines(language.say(line)) for line in self.lines]
        self.args = ("; ".join(self.faults),)


def raise_faults(faults: Sequence[str] | Mapping[str, object]) -> None:
    """Raise `BadInput` with the faults, if there are any. A mapping says of each fault whether it
    applies.
    """
    lines = (
        [fault for fault, applies in faults.items() if applies]
        if isinstance(faults, Mapping)
        else faults
    )
    if lines:
        raise BadInput(lines)


@contextlib.contextmanager
def say_in(language: Language) -> Iterator[None]:
    """Name settings as the caller knows them in the faults of a `BadInput` that leaves the
    context.
    """
    try:
        yield
    except BadInput as error:
        error.say(language)
        raise


@contextlib.contextmanager
def locate_faults(place: object) -> Iterator[None]:
    """Name the place, such as a file or a call, before each fault of a `BadInput` that leaves the
    context.
    """
    try:
        yield
    except BadInput as error:
        # of lines, not faults: a border further out may still choose the other language
        raise BadInput([f"{place}: {line}" for line in error.lines]) from error.__cause__


class RunFault(RuntimeError):
    """A fault while running, in one line (a loss that is not finite, a full disk). Exit code 1.

    `is_reported`: whether another process has reported it. If that is not known (None), every
    process reports its own faults, and rank 0 alone the bad input, which all ranks find alike.
    """

    is_reported: bool | None = None


class Divergence(RunFault):
    """A training loss that is not finite. `reason`: the update and the loss, without the advice
    that the message adds.
    """

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason, advice)
        self.reason = reason

    def __str__(self) -> str:
        return "; ".join(self.args)


class UserFault(RunFault):
    """A fault in the user's own code (a model, loss, data source, optimizer), with its file and
    line.

    `traceback`: its text; `traceback_file`: where it was saved. Code that calls `train` gets the
    user's own exception, with this one at the end of its chain of causes.
    """

    def __init__(self, line: str, traceback: str) -> None:
        super().__init__(line)
        self.traceback = traceback
        self.traceback_file: str | None = None

    # exceptions are pickled on their way out of a child process
    def __reduce__(self) -> tuple[Any, ...]:
        state = {"traceback_file": self.traceback_file, "is_reported": self.is_reported}
        return type(self), (str(self), self.traceback), state


def walk_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, its cause, the cause of that, and so on."""
    # `raise e from e` makes a circle
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = (
            # as in Python's tracebacks: `from None` hides the context
            error.__cause__
            if error.__cause__ is not None or error.__suppress_context__
            else error.__context__
        )


def find_user_fault(error: BaseException | None) -> UserFault | None:
    """Return the `UserFault` in an exception's chain of causes, or None."""
    return next((cause for cause in walk_causes(error) if isinstance(cause, UserFault)), None)


def summarize(error: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    try:
        lines = str(error).strip().splitlines()
    # an exception of the user's own may fail here too
    except Exception as second:
        lines = [f"(its message cannot be formatted: {type(second).__name__})"]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextlib.contextmanager
def guard_writing(
    file: object, contents: str = "", kind: type[Exception] = RunFault
) -> Iterator[None]:
    """Raise `kind` if the system refuses to write a file or stream. `contents`: such as "the
    trace", to be named in the fault.
    """
    try:
        yield
    except OSError as error:
        subject = f"{contents} cannot" if contents else "cannot"
        # an OSError of a library has no strerror if it was made of a message alone
        raise kind(f"{file}: {subject} be written: {error.strerror or error}") from error


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `BadInput`, and whose help keeps its line breaks."""

    def __init__(self, **keys: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **keys})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse a command line, as argparse does. Refuse text that no system hands over, and which
        no path holds.
        """
        for word in sys.argv[1:] if args is None else args:
            # from \udc80 on a surrogate stands for a byte of a name that is not UTF-8
            if "\0" in word or any("\ud800" <= c < "\udc80" for c in word):
                raise BadInput(f"{word}: contains a character that a command line cannot have")
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        """Return the help, with commands named as the user calls them."""
        return name_commands(super().format_help())

    def list_options(self) -> list[str]:
        """Return the options of the command, such as --out."""
        return [name for action in self._actions for name in action.option_strings]

    def list_positional(self) -> dict[str, str]:
        """Return the name and the form of each argument that is not an option, such as config and
        CONFIG.
        """
        actions = [action for action in self._actions if not action.option_strings]
        return {action.dest: str(action.metavar or action.dest) for action in actions}

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is not one of an argument's choices, and name the nearest choice."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            raise argparse.ArgumentError(
                action, f"{error.message}{suggest(value, action.choices or ())}"
            ) from None

    def error(self, message: str) -> NoReturn:
        fault = message[len("argument ") :] if message.startswith("argument ") else message
        raise BadInput(f"{fault} ({self.prog} --help lists what is allowed)")


def run_command(main: Callable[[], None]) -> NoReturn:
    """Run a command line's `main` and exit: 0 done, 2 bad input, 1 fault, 130 Ctrl-C."""
    ended_by_ctrl_c = False
    faults = []
    # with -W or PYTHONWARNINGS the user wants Python's own warnings
    if not sys.warnoptions:
        warnings.showwarning = _show_warning
    # file names need not be valid text; standard error escapes them by default
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            interrupts.raise_at_first_interrupt()
            _open_closed_streams()
            main()
            # else a full disk shows as the interpreter ends, with Python's exit code 120
            with guard_writing("standard output"):
                sys.stdout.flush()
        except BaseException as error:
            ended_by_ctrl_c = interrupts.was_interrupted()
            # the interrupt may have become another exception on its way here
            if ended_by_ctrl_c:
                raise KeyboardInterrupt from error
            raise
        finally:
            interrupts.stop_raising()
        code = 0
    except BadInput as error:
        reported = read_launch().rank != 0 if error.is_reported is None else error.is_reported
        code = 2
        faults = [] if reported else error.faults
    except KeyboardInterrupt:
        if read_launch().rank == 0:
            print("interrupted", file=sys.stderr)
        code = interrupts.INTERRUPTED
    # --help ends so, and would be a fault below
    except SystemExit:
        raise
    # the user's code may raise what is no Exception (asyncio.CancelledError)
    except BaseException as error:
        code = 1
        is_unread = isinstance(error, BrokenPipeError) or isinstance(
            error.__cause__, BrokenPipeError
        )
        # the reader of our output (head, less) has exited, which is not an error; but the user's
        # code may have pipes of its own
        if is_unread and find_user_fault(error) is None:
            code = 0
        else:
            faults = _describe_fault(error)
        # what is still buffered would fail once more as the interpreter ends
        if isinstance(error, OSError) or isinstance(error.__cause__, OSError):
            _drop_output(sys.stdout)
    for fault in faults:
        _print_fault(f"error: {name_commands(fold_lines(fault))}")
    # taking down the interpreter restores the system's own handling of Ctrl-C: a second one would
    # end it without an exit code
    if ended_by_ctrl_c or read_launch().world > 1:
        end_process(code)
    sys.exit(code)


def _describe_fault(error: BaseException) -> list[str]:
    """Return the lines that report a fault while running, none where another rank has reported it.
    Raise the error itself if it is a bug in ipu_pipe.
    """
    user_fault = find_user_fault(error)
    if user_fault is not None:
        file = user_fault.traceback_file
        remedy = (
            f"the traceback is in {file}" if file else "tools/train.py --traceback shows all of it"
        )
        return [] if user_fault.is_reported else [f"{user_fault}; {remedy}"]
    if isinstance(error, RunFault):
        return [] if error.is_reported else [str(error)]
    if isinstance(error, ValueError) and _list_closed_streams():
        return [
            f"{' and '.join(_list_closed_streams())}: closed by the run's own code: nothing "
            f"can be printed there"
        ]
    if isinstance(error, OSError):
        # without a file name it concerns a stream, because code that writes files names them
        file = error.filename or "standard output: cannot be written"
        return [f"{file}: {error.strerror or error}"]
    raise error


def _print_fault(line: str) -> None:
    """Print a line on standard error, also if the user's code has closed Python's stream of it."""
    # there is nowhere else to print it
    with contextlib.suppress(OSError):
        try:
            print(line, file=sys.stderr, flush=True)
        except ValueError:
            os.write(2, f"{line}\n".encode("utf-8", "backslashreplace"))


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning of a library or of the user's code as one line, once and on rank 0 alone.

    Leave out a RuntimeWarning, which numpy gives for an overflow (the result then shows it), and
    those that only a developer of the code can act on.
    """
    text = fold_lines(str(message))
    quiet = (RuntimeWarning, DeprecationWarning, PendingDeprecationWarning, FutureWarning)
    if text in _printed_warnings or issubclass(category, quiet) or read_launch().rank != 0:
        return
    _printed_warnings.add(text)
    with contextlib.suppress(OSError):
        print(f"warning: {text}", file=sys.stderr, flush=True)


def _open_closed_streams() -> None:
    """Open standard streams that are closed: else the next file opened would get their number, and
    what is printed.
    """
    handle = os.open(os.devnull, os.O_RDWR)
    # a number below 3 is that of a closed stream, which stays open from now on
    while handle < 3:
        handle = os.open(os.devnull, os.O_RDWR)
    os.close(handle)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")
        raise RunFault(
            "standard output: is closed: nothing can be printed (use > /dev/null if nothing is "
            "wanted)"
        )


def _list_closed_streams() -> list[str]:
    """List the standard streams that Python code has closed, on which printing raises a
    ValueError.
    """
    streams = {"standard output": sys.stdout, "standard error": sys.stderr}
    return [name for name, stream in streams.items() if getattr(stream, "closed", False)]


def print_progress(text: str, stream: TextIO) -> None:
    """Print text of several lines at once. If the stream's reader (head) has exited, print nothing
    from now on: the work itself goes on.
    """
    try:
        # Python keeps back what goes into a pipe or a file, and a killed run would lose it
        print(escape_lines(text), file=stream, flush=True)
    except BrokenPipeError:
        _drop_output(stream)


def _drop_output(stream: TextIO) -> None:
    """Send what is still to be printed nowhere, so that nothing fails on it when the interpreter
    ends.
    """
    # the stream may not be a file
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def end_process(code: int) -> NoReturn:
    """End this process, one of several, at once.

    Taking down the interpreter around the process group's threads aborted about one run in five
    ("terminate called without an active exception").
    """
    for stream in (sys.stdout, sys.stderr):
        # the fault has been reported, if that is possible
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)
