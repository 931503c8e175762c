"""SIGTERM, which a launcher sends to all ranks when one has failed, and Ctrl-C, while this rank waits for another.

A neighbor of the failed rank notices it at its next wait and can name it, so a rank goes on for a moment before it ends:

    main thread       a step ...... waits inside torch (C++), where Python's signal handlers do not run
    SIGTERM           |  noted, and a byte goes through a pipe
    watching thread   |  reads it, sleeps, ends the process if it is still there (after Ctrl-C: at the very same place)
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any, Optional, Tuple

from ipu_pipe.interrupts import INTERRUPTED

TERMINATED = 143  # exit code of a process that was asked to end


class Termination:
    """SIGTERM from the launcher, which asks this process to end because another one has failed."""

    GRACE = 3.0  # seconds, after which a process that is between two actions ends
    PATIENCE = 5.0  # seconds, after which it ends wherever it is
    asked: Optional[float] = None
    _before: Optional[Tuple[Any, int]] = None  # handler and wake-up descriptor before `watch`

    @classmethod
    def ask(cls, *_: Any) -> None:
        """Note the signal: a handler for `signal.signal`."""
        cls.asked = cls.asked or time.monotonic()

    @classmethod
    def check(cls) -> None:
        """End the process if it was asked to a while ago."""
        if cls.asked is not None and time.monotonic() - cls.asked > cls.GRACE:
            sys.exit(TERMINATED)

    @classmethod
    def watch(cls) -> None:
        """Take over SIGTERM, from the main thread; elsewhere do nothing."""
        if cls._before is not None or threading.current_thread() is not threading.main_thread():
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        threading.Thread(target=cls._wait, args=(reader,), name="ipu_pipe stopping", daemon=True).start()
        cls._before = signal.signal(signal.SIGTERM, cls.ask), signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    @classmethod
    def unwatch(cls) -> None:
        """Give SIGTERM back."""
        if cls._before is not None:
            handler, descriptor = cls._before
            signal.signal(signal.SIGTERM, handler)
            # closing it ends the thread
            os.close(signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False))
            cls._before = None

    @classmethod
    def _wait(cls, reader: int) -> None:
        while True:
            byte = os.read(reader, 1)
            if not byte:
                os.close(reader)
                return
            if byte[0] == signal.SIGTERM:
                time.sleep(cls.PATIENCE)
                if cls._before is not None:
                    os._exit(TERMINATED)
            elif byte[0] == signal.SIGINT:
                place = _find_main_thread()
                time.sleep(cls.PATIENCE)
                if cls._before is not None and _find_main_thread() == place:
                    os._exit(INTERRUPTED)


def _find_main_thread() -> Tuple[int, int]:
    """Return the main thread's frame and the instruction in it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return (id(frame), frame.f_lasti) if frame is not None else (0, 0)
