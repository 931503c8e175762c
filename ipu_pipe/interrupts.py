"""Ctrl-C on a command line: one line and exit code 130, whenever it comes.

    first moments, imports     nothing to tidy up yet: the process ends at once
    while the command works    KeyboardInterrupt, so that what is open is closed; a second Ctrl-C ends the process at once
    on the way out             the process ends at once

What is on the disk is whole at every moment, so that ending at once loses nothing. Nothing but the standard library is imported
here, and little of it: a command line calls `end_at_once` before all else.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any, NoReturn

INTERRUPTED = 130  # exit code: 128 and the signal's number


def end_at_once() -> None:
    """From now on Ctrl-C ends the process."""
    if _is_ours_to_set():
        signal.signal(signal.SIGINT, _end)


def raise_first() -> None:
    """From now on the first Ctrl-C raises KeyboardInterrupt and the next ends the process. Only where `end_at_once` was called
    before: a library, or a test, keeps the handler that it has."""
    if signal.getsignal(signal.SIGINT) is _end and _is_ours_to_set():
        signal.signal(signal.SIGINT, _raise)
        sys.unraisablehook = _unraisable


def came() -> bool:
    """Whether Ctrl-C has come since `raise_first`."""
    return sys.unraisablehook is _unraisable and signal.getsignal(signal.SIGINT) is _end


def leave() -> None:
    """The command is done: what `raise_first` began is over, and Ctrl-C ends the process."""
    if signal.getsignal(signal.SIGINT) is _raise:
        signal.signal(signal.SIGINT, _end)


def _is_ours_to_set() -> bool:
    """Only the main thread may set handlers; a process that was told to ignore Ctrl-C (nohup) goes on ignoring it."""
    return threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) != signal.SIG_IGN


def _raise(number: int, frame: Any) -> None:
    signal.signal(signal.SIGINT, _end)
    if _imports(frame):  # an import broken off comes out as any exception, or is taken for a module that is not there
        _end()
    raise KeyboardInterrupt


def _imports(frame: Any) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _unraisable(unraisable: Any) -> None:
    """KeyboardInterrupt that came where Python cannot raise it (a finalizer): it must not be lost, nor be a traceback."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        _end()
    sys.__unraisablehook__(unraisable)


def _end(*_: Any) -> NoReturn:
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)
