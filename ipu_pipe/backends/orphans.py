"""A process of several ends when the launcher that started it is gone: nothing else would, and it would go on writing."""

from __future__ import annotations

import os
import sys
import threading
import time

NAME = "launcher watch"
INTERVAL = 0.5  # seconds between looks
ORPHANED = 1  # exit code: a fault


def end_without_launcher() -> None:
    """From now on watch the process that started this one, from a thread: a rank that waits for others looks at nothing. The
    signal that Linux can send at a parent's death comes at the death of the thread that started the child, too early."""
    if all(thread.name != NAME for thread in threading.enumerate()):
        threading.Thread(target=_watch, args=(os.getppid(),), name=NAME, daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(INTERVAL)
    try:
        print("error: the launcher of this process is gone: it ends", file=sys.stderr, flush=True)
    finally:
        os._exit(ORPHANED)
