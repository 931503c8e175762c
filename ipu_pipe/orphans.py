"""A process that another one started ends with it, however that one ends (killed by SIGKILL, too): nothing else would end it,
and it would go on writing. The signal that Linux can send at a parent's death comes at the death of the thread that started
the child, too early; so the parent is looked at, from a thread, since the process may be busy or wait meanwhile."""

from __future__ import annotations

import os
import sys
import threading
import time

NAME = "ipu_pipe orphans"
ORPHANED = 1  # exit code: a fault
LOOK = 0.5  # seconds between looks


def end_with(parent: int, line: str = "") -> None:
    """From now on this process ends when `parent`, which started it, has, and says `line`. Asked for twice, it is done once."""
    if all(thread.name != NAME for thread in threading.enumerate()):
        threading.Thread(target=_watch, args=(parent, line), name=NAME, daemon=True).start()


def end_with_launcher() -> None:
    """As `end_with`, of a rank and the launcher that started it."""
    end_with(os.getppid(), "error: the launcher of this process is gone: it ends")


def _watch(parent: int, line: str) -> None:
    while os.getppid() == parent:  # an orphan gets another parent
        time.sleep(LOOK)
    try:
        if line:
            print(line, file=sys.stderr, flush=True)
    finally:
        os._exit(ORPHANED)
