"""A launcher or a person asks one process of several to end (SIGTERM), wherever it is.

main thread       a step ...... waiting inside torch (C++), where Python's handlers do not run
SIGTERM           |  noted, and a byte goes through a pipe
this thread       |  reads it, waits, ends the process if it is still there (after Ctrl-C: at the very same place)
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


class Stopping:
    """The launcher asks this process to end, because another one has failed. A neighbour of that one notices it at its next
    wait and can say for whom it waited: so a process goes on for a moment before it ends."""

    GRACE = 3.0  # seconds, after which a process that is between two actions ends
    PATIENCE = 5.0  # seconds, after which it ends where it is
    asked: Optional[float] = None
    _before: Optional[Tuple[Any, int]] = None  # handler and wake-up descriptor

    @classmethod
    def ask(cls, *_: Any) -> None:
        """For signal.signal."""
        cls.asked = cls.asked or time.monotonic()

    @classmethod
    def check(cls) -> None:
        """End the process if it was asked to a while ago."""
        if cls.asked is not None and time.monotonic() - cls.asked > cls.GRACE:
            sys.exit(TERMINATED)

    @classmethod
    def watch(cls) -> None:
        """From now on SIGTERM ends the process as said above. Only the main thread may ask for it."""
        if cls._before is not None or threading.current_thread() is not threading.main_thread():
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        threading.Thread(target=cls._wait, args=(reader,), name="ipu_pipe stopping", daemon=True).start()
        cls._before = signal.signal(signal.SIGTERM, cls.ask), signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    @classmethod
    def rest(cls) -> None:
        """SIGTERM is again what it was before."""
        if cls._before is not None:
            handler, descriptor = cls._before
            signal.signal(signal.SIGTERM, handler)
            os.close(signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False))  # which ends the thread
            cls._before = None

    @classmethod
    def _wait(cls, reader: int) -> None:
        while True:
            came = os.read(reader, 1)
            if not came:
                os.close(reader)
                return
            if came[0] == signal.SIGTERM:
                time.sleep(cls.PATIENCE)
                if cls._before is not None:
                    os._exit(TERMINATED)
            elif came[0] == signal.SIGINT:
                place = _place_of_main()
                time.sleep(cls.PATIENCE)
                if cls._before is not None and _place_of_main() == place:
                    os._exit(INTERRUPTED)


def _place_of_main() -> Tuple[int, int]:
    """Where the main thread is: its frame and the instruction in it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return (id(frame), frame.f_lasti) if frame is not None else (0, 0)
