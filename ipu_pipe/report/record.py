"""What a run was made with, besides its config: the commit, versions, the machine, the command, the data.

Read without asking anyone: a repository's commit from its files; only whether it was changed since is git's to say.
"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Mapping, Optional

import numpy as np
import torch

from ipu_pipe import __version__

GIT_SECONDS = 5.0


def record_of(data: Optional[Mapping[str, Any]]) -> Dict[str, Any]:
    """Of a start that is now, with what is known of its `data`; what is not known is null."""
    return {
        "begun": now(),
        "ended": None,
        "command": list(sys.argv),
        "folder": os.getcwd(),
        "commit": commit(Path.cwd()),
        "versions": {
            "ipu_pipe": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "numpy": str(np.__version__),
        },
        "machine": machine(),
        "data": data,
    }


def now() -> str:
    """UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def commit(folder: Path) -> Optional[Dict[str, Any]]:
    """The commit of the repository that `folder` is in, and whether files that it knows have changed since (null where git is
    missing); None outside of one."""
    for above in (folder, *folder.parents):
        found = _repository(above / ".git")
        if found is not None:
            return {"repository": str(above), "commit": _head(found), "dirty": _is_dirty(above)}
    return None


def _repository(git: Path) -> Optional[Path]:
    """The folder with HEAD: of a worktree, where its file points to."""
    try:
        if git.is_file():
            told = git.read_text(encoding="utf-8").partition("gitdir:")[2].strip()
            git = git.parent / told
        return git if (git / "HEAD").is_file() else None
    except (OSError, ValueError):
        return None


def _head(git: Path) -> Optional[str]:
    """The commit that HEAD is: itself, a file of its branch's, or a line of the packed ones."""
    try:
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref:"):
            return head
        name = head[4:].strip()
        shared = git / "commondir"
        common = git / shared.read_text(encoding="utf-8").strip() if shared.is_file() else git
        for place in (git, common):
            if (place / name).is_file():
                return (place / name).read_text(encoding="utf-8").strip()
        packed = (common / "packed-refs").read_text(encoding="utf-8").splitlines()
        return next((line.split()[0] for line in packed if line.endswith(f" {name}")), None)
    except (OSError, ValueError):
        return None


def _is_dirty(folder: Path) -> Optional[bool]:
    ask = ["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"]
    try:
        said = subprocess.run(ask, capture_output=True, timeout=GIT_SECONDS, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return bool(said.stdout.strip())


def machine() -> Dict[str, Any]:
    """This process's machine: its CPU and how many of its cores, memory in bytes, GPUs."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    try:
        memory: Optional[int] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        memory = None
    return {
        "name": platform.node(), "system": platform.platform(), "cpu": _cpu(), "cores": os.cpu_count(),
        "memory_bytes": memory, "gpus": gpus, "threads": torch.get_num_threads(),
    }  # fmt: skip


def _cpu() -> Optional[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name"))
    return next(named, platform.processor() or None)
