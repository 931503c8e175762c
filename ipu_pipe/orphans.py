"""A process that another one started ends with it, however that one ends (killed by SIGKILL, too)."""

from __future__ import annotations

import os
import threading
import time

ORPHANED = 143  # exit code: as if asked to end
LOOK = 0.5  # seconds between looks


def end_with(parent: int) -> None:
    """From now on this process ends when `parent`, which started it, has. An orphan gets another parent: that is what is looked
    for, in a thread, so that the process may be busy or wait meanwhile."""
    threading.Thread(target=_watch, args=(parent,), name="ipu_pipe orphans", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK)
    os._exit(ORPHANED)
