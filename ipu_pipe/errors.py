"""The two ways a run can fail, and how a command line reports them: one line a fault, no traceback."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, Callable, NoReturn, Optional, Sequence, Union

from ipu_pipe import interrupts


class BadInput(ValueError):
    """What the user gave cannot be used. `faults`: one line each (file, key, value, what is allowed). Exit code 2."""

    is_told: Optional[bool] = None

    def __init__(self, faults: Union[str, Sequence[str]]) -> None:
        self.faults = [faults] if isinstance(faults, str) else list(faults)
        assert self.faults, "BadInput needs at least one fault"
        super().__init__("; ".join(self.faults))


class RunFault(RuntimeError):
    """A fault while running, told in one line (a loss that is not finite, a disk that is full). Exit code 1.

    Of several processes the first one that finds a fault tells it; `is_told` says whether another has. Where that is not
    known (None), every process tells its own, and bad input, which all find alike, rank 0.
    """

    is_told: Optional[bool] = None


def first_line(error: BaseException) -> str:
    """An exception of the user's own code in one line: its kind and the first line of what it says."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are bad input like any other (one `error: ...` line, exit code 2) and whose
    help keeps the line breaks it is given."""

    def __init__(self, **keys: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **keys})

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message} ({self.prog} --help lists what is allowed)")


def run_command(main: Callable[[], None]) -> NoReturn:
    """Run a command line's `main` and leave with its exit code: 0 done, 2 bad input, 1 fault, 130 Ctrl-C."""
    ended_by_ctrl_c = False
    try:
        try:
            interrupts.raise_first()
            main()
            sys.stdout.flush()
        except BaseException as error:
            ended_by_ctrl_c = interrupts.came()
            if ended_by_ctrl_c:  # it may have become another exception on its way here
                raise KeyboardInterrupt from error
            raise
        finally:
            interrupts.leave()
    except BadInput as error:
        told = os.environ.get("RANK", "0") != "0" if error.is_told is None else error.is_told
        for fault in () if told else error.faults:
            print("error: " + " ".join(fault.split()), file=sys.stderr)
        code = 2
    except RunFault as error:
        if not error.is_told:
            print("error: " + " ".join(str(error).split()), file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("interrupted", file=sys.stderr)
        code = interrupts.INTERRUPTED
    except BrokenPipeError:  # the reader of our output (head, less) has left: not our fault, nothing to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    else:
        code = 0
    # taking down the interpreter restores the system's own handling of Ctrl-C: a second one would end it without an exit code
    if ended_by_ctrl_c or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        end_process(code)
    sys.exit(code)


def end_process(code: int) -> NoReturn:
    """End a process of several at once: taking down the interpreter around the process group's threads aborted about one run
    in five ("terminate called without an active exception")."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
