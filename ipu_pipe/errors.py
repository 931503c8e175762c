"""The two ways a run can fail, and how a command line reports them: one line a fault, no traceback."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import traceback
import warnings
from typing import Any, Callable, Iterator, NoReturn, Optional, Sequence, Set, TextIO, Tuple, Type, Union

from ipu_pipe import interrupts, launched
from ipu_pipe.shipped import name_commands
from ipu_pipe.text import fold_lines


class BadInput(ValueError):
    """What the user gave cannot be used. `faults`: one line each (file, key, value, what is allowed). Exit code 2."""

    is_told: Optional[bool] = None

    def __init__(self, faults: Union[str, Sequence[str]]) -> None:
        self.faults = [fold_lines(fault) for fault in ([faults] if isinstance(faults, str) else faults)]
        assert self.faults, "BadInput needs at least one fault"
        super().__init__("; ".join(self.faults))


class RunFault(RuntimeError):
    """A fault while running, told in one line (a loss that is not finite, a disk that is full). Exit code 1.

    Of several processes the first one that finds a fault tells it; `is_told` says whether another has. Where that is not
    known (None), every process tells its own, and bad input, which all find alike, rank 0.
    """

    is_told: Optional[bool] = None


class UserFault(RunFault):
    """What code of the user's own (a model, loss, data source, optimizer) raised, and where: `traceback` is the whole of it,
    `kept` the file that holds it. Code that calls `train` gets the user's own exception, with this one at the end of its
    chain of causes."""

    def __init__(self, line: str, whole: str) -> None:
        super().__init__(line)
        self.traceback = whole
        self.kept: Optional[str] = None

    def __reduce__(self) -> Tuple[Any, ...]:
        """For the way out of a process of its own."""
        return type(self), (str(self), self.traceback), {"kept": self.kept, "is_told": self.is_told}


def find_user_fault(error: Optional[BaseException]) -> Optional[UserFault]:
    """The UserFault in an exception's chain, or None."""
    for link in walk_causes(error):
        if isinstance(link, UserFault):
            return link
    return None


def walk_causes(error: Optional[BaseException]) -> Iterator[BaseException]:
    """An exception, what caused it, what caused that, and so on."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ if error.__cause__ is not None or error.__suppress_context__ else error.__context__


@contextlib.contextmanager
def guard_writing(place: Any, what: str = "") -> Iterator[None]:
    """A disk that refuses `place`, a file or stream, is a fault in one line, which may say `what` that is."""
    try:
        yield
    except OSError as error:
        raise RunFault(f"{place}: {what and what + ' '}cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def show_traceback(wanted: bool) -> Iterator[None]:
    """Where it is wanted, the traceback of what ends a command goes to standard error, before its line."""
    try:
        yield
    except Exception as error:
        fault = find_user_fault(error)
        if wanted and not getattr(fault or error, "is_told", None):
            sys.stderr.write(fault.traceback if fault is not None else traceback.format_exc())
        raise


def summarize(error: BaseException) -> str:
    """An exception of the user's own code in one line: its kind and the first line of what it says."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are bad input like any other (one `error: ...` line, exit code 2) and whose
    help keeps the line breaks it is given."""

    def __init__(self, **keys: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **keys})

    def format_help(self) -> str:
        """The help, with commands named as the user calls them."""
        return name_commands(super().format_help())

    def error(self, message: str) -> NoReturn:
        place = message[len("argument ") :] if message.startswith("argument ") else message
        raise BadInput(f"{place} ({self.prog} --help lists what is allowed)")


def run_command(main: Callable[[], None]) -> NoReturn:
    """Run a command line's `main` and leave with its exit code: 0 done, 2 bad input, 1 fault, 130 Ctrl-C."""
    ended_by_ctrl_c = False
    if not sys.warnoptions:  # -W and PYTHONWARNINGS ask for Python's own
        warnings.showwarning = _show_warning
    if isinstance(sys.stdout, io.TextIOWrapper):  # file names need not be text; standard error is so by default
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            interrupts.raise_first()
            _check_streams()
            main()
            with guard_writing("standard output"):
                sys.stdout.flush()
        except BaseException as error:
            ended_by_ctrl_c = interrupts.came()
            if ended_by_ctrl_c:  # it may have become another exception on its way here
                raise KeyboardInterrupt from error
            raise
        finally:
            interrupts.leave()
        code = 0
    except BadInput as error:
        told = launched.read().rank != 0 if error.is_told is None else error.is_told
        for fault in () if told else error.faults:
            _tell(fault)
        code = 2
    except BrokenPipeError:  # the reader of our output (head, less) has left: not our fault, nothing to say
        _drop_output()
        code = 0
    except KeyboardInterrupt:
        if launched.read().rank == 0:
            print("interrupted", file=sys.stderr)
        code = interrupts.INTERRUPTED
    except Exception as error:
        if isinstance(error.__cause__, BrokenPipeError):
            _drop_output()
            code = 0
        else:
            line = _line(error)
            if line is None:
                raise
            if line:
                _tell(line)
            if isinstance(error, OSError) or isinstance(error.__cause__, OSError):
                _drop_output()
            code = 1
    # taking down the interpreter restores the system's own handling of Ctrl-C: a second one would end it without an exit code
    if ended_by_ctrl_c or launched.read().world > 1:
        end_process(code)
    sys.exit(code)


def _line(error: Exception) -> Optional[str]:
    """A fault in one line; empty where another process has told it. None of what is no fault of a run, but of this library."""
    fault = find_user_fault(error)
    if fault is not None:
        rest = f"the traceback is in {fault.kept}" if fault.kept else "tools/train.py --traceback shows all of it"
        return "" if fault.is_told else f"{fault}; {rest}"
    if isinstance(error, RunFault):
        return "" if error.is_told else str(error)
    if isinstance(error, OSError):  # without a file it is a stream: whoever writes files names them
        named = "standard output" if error.filename is None else error.filename
        return f"{named}: {error.strerror or error}"
    return None


def _show_warning(
    message: Union[Warning, str], category: Type[Warning], filename: str, lineno: int,
    file: Optional[TextIO] = None, line: Optional[str] = None,
) -> None:  # fmt: skip
    """Print a warning of a library or of the user's code as one line, once and on rank 0 alone.

    Leave out a RuntimeWarning, which numpy gives for an overflow (the result then says so), and those that only a developer of
    the code can heed.
    """
    text = fold_lines(str(message))
    quiet = (RuntimeWarning, DeprecationWarning, PendingDeprecationWarning, FutureWarning)
    if text in _WARNED or issubclass(category, quiet) or launched.read().rank != 0:
        return
    _WARNED.add(text)
    with contextlib.suppress(OSError):
        print(f"warning: {text}", file=sys.stderr, flush=True)


_WARNED: Set[str] = set()  # warnings that have been printed


def _tell(line: str) -> None:
    with contextlib.suppress(OSError):  # there is nowhere else to tell it
        print(f"error: {name_commands(fold_lines(line))}", file=sys.stderr, flush=True)


def _check_streams() -> None:
    """Standard streams that are closed: the number of one would go to the next file opened, which would get what is printed."""
    if sys.stdin is None or sys.stderr is None:
        handle = os.open(os.devnull, os.O_RDWR)
        while handle < 3 and handle != 1:
            handle = os.open(os.devnull, os.O_RDWR)
        if handle == 1 or handle > 2:
            os.close(handle)
        sys.stderr = sys.stderr or open(2, "w", closefd=False)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")
        raise RunFault("standard output: is closed: nothing can be printed (give /dev/null where nothing is wanted)")


def _drop_output() -> None:
    """What is still to be printed goes nowhere, so that nothing fails on it when the interpreter ends."""
    with contextlib.suppress(OSError, ValueError):  # a stream that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def end_process(code: int) -> NoReturn:
    """End a process of several at once: taking down the interpreter around the process group's threads aborted about one run
    in five ("terminate called without an active exception")."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # it has been told, where that is possible
            stream.flush()
    os._exit(code)
