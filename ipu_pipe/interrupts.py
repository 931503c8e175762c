"""Handle Ctrl-C on a command line: print one line and exit with code 130, at any moment.

    first moments, imports     nothing to clean up yet: the process ends at once
    while the command works    KeyboardInterrupt, so that open files are closed; a second Ctrl-C ends the process at once
    on the way out             the process ends at once

Files are written atomically, so that ending at once loses nothing. This module imports only a small
part of the standard library, because a command line calls `install_end_at_interrupt` before
anything else.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any, NoReturn

# exit code: 128 and the signal's number
INTERRUPTED = 130


def install_end_at_interrupt() -> None:
    """End the process at Ctrl-C from now on."""
    if _may_set_handler():
        signal.signal(signal.SIGINT, _end)


def raise_at_first_interrupt() -> None:
    """Raise KeyboardInterrupt at the first Ctrl-C from now on, and end the process at the next.

    Do nothing if `install_end_at_interrupt` was not called before: the handler of a library or a
    test is not replaced.
    """
    if signal.getsignal(signal.SIGINT) is _end and _may_set_handler():
        signal.signal(signal.SIGINT, _raise)
        sys.unraisablehook = _handle_unraisable


def was_interrupted() -> bool:
    """Return whether Ctrl-C was pressed since `raise_at_first_interrupt`. Ask before
    `stop_raising`: later it is always True.
    """
    return sys.unraisablehook is _handle_unraisable and signal.getsignal(signal.SIGINT) is _end


def stop_raising() -> None:
    """Let Ctrl-C end the process again, as before `raise_at_first_interrupt`."""
    if signal.getsignal(signal.SIGINT) is _raise:
        signal.signal(signal.SIGINT, _end)


def _may_set_handler() -> bool:
    """Return whether this is the main thread and the process was not started to ignore Ctrl-C (as
    by `nohup ... &`).
    """
    return (
        # signal.signal raises in any other thread
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) != signal.SIG_IGN
    )


def _raise(number: int, frame: Any) -> None:
    # first of all, so that the next Ctrl-C ends the process also within this handler
    signal.signal(signal.SIGINT, _end)
    while frame is not None:
        # an interrupted import may raise anything, or look like a missing module, so end at once
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _end()
        frame = frame.f_back
    raise KeyboardInterrupt


def _handle_unraisable(unraisable: Any) -> None:
    """End the process for a KeyboardInterrupt where Python cannot raise it (a finalizer): it must
    not be lost.
    """
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        _end()
    sys.__unraisablehook__(unraisable)


def _end(*_: Any) -> NoReturn:
    # no print: a stream that was interrupted within a write refuses another one
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)
