"""Traces of PyTorch's profiler (Kineto), a file a rank: which records are compute and which are communication.

A rank is taken as a device and a stage. Where a rank used a GPU, its time is that of kernels and copies; else that of the CPU's
operations, which are nested. The records do not say microbatches, versions and waits.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ipu_pipe.errors import BadInput
from ipu_pipe.text import show
from ipu_pipe.trace import events as ev
from ipu_pipe.trace.events import Counters, Events, Trace

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
ON_HOST = ("cpu_op", "user_annotation")
COMMUNICATES = re.compile(r"nccl|gloo:|c10d::|record_param_comms|ncclx|rccl", re.IGNORECASE)
DIRECTIONS = (
    (re.compile("all_?|reduce|sendrecv", re.IGNORECASE), ev.COLLECTIVE),
    (re.compile("send|DtoH|PtoP"), "send"),
    (re.compile("recv|HtoD", re.IGNORECASE), "recv"),
)
RANK_IN_NAME = re.compile(r"rank[-_.]?(\d{1,6})", re.IGNORECASE)
NOTE = (
    "PyTorch's profiler: a rank is taken as a device and a stage; it does not say microbatches, versions and waits "
    "(a wait for a message is within its communication)"
)


@functools.lru_cache(maxsize=1 << 16)  # names repeat
def identify_record(category: str, name: str) -> Tuple[int, bool]:
    """Return the code of a record's kind, -1 if it says nothing of the device, and whether it was on a GPU."""
    communicates = COMMUNICATES.search(name) is not None or (category == "gpu_memcpy" and "DtoD" not in name)
    if category not in (*ON_GPU, *ON_HOST) or (category == "user_annotation" and not communicates):
        return -1, False
    kind = ev.UNSPECIFIED
    if communicates:
        kind = next((direction for pattern, direction in DIRECTIONS if pattern.search(name)), ev.COLLECTIVE)
    return ev.KIND_CODE[kind], category in ON_GPU


def merge_ranks(files: Sequence[Tuple[Path, Dict[str, Any], Events]]) -> Trace:
    """Return one trace of all ranks, from each file's path, keys and events; times count from the first file's base. Raise
    `BadInput` for two files of one rank, a base that is not an integer, and files without events."""
    first, notes = files[0][0], [NOTE]
    ranks = [rank for rank in (_find_rank(path, keys) for path, keys, _ in files) if rank is not None]
    if len(ranks) < len(files):
        ranks = [*range(len(files))]
        if len(files) > 1:
            notes.append("the files do not say their ranks: they are numbered in the order of their names")
    repeated = min((rank for rank in ranks if ranks.count(rank) > 1), default=None)
    if repeated is not None:
        same = [str(path) for (path, _, _), rank in zip(files, ranks) if rank == repeated]
        raise BadInput(f"{', '.join(same)}: are all of rank {repeated}: must be one file a rank")
    bases = [keys.get("baseTimeNanoseconds", 0) for _, keys, _ in files]
    if not all(isinstance(base, int) and abs(base) < ev.FARTHEST_NS * 2 for base in bases):
        raise BadInput(
            f"{first}: baseTimeNanoseconds: {show(bases[0])}: must be a whole number of nanoseconds in every file"
        )
    hosts = {str(keys["host_name"]) for _, keys, _ in files if "host_name" in keys}
    if len(hosts) > 1:
        notes.append(f"ranks on {len(hosts)} hosts: their times differ by as much as the hosts' clocks do")
    parts: List[Events] = []
    for (path, _, events), rank, base in zip(files, ranks, bases):
        columns = {**events._asdict(), "stage": rank, "device": rank}
        columns.update(start=events.start + base - bases[0], end=events.end + base - bases[0])
        parts.append(Events.from_columns(len(events.start), **columns))
        if not len(events.start):
            notes.append(f"{path}: holds no kernel and no operation")
    trace = Trace(
        ev.concatenate_events(parts),
        Counters.from_rows([]),
        {"backend": "PyTorch profiler", "modelled": False},
        tuple(notes),
    )
    if not len(trace.events.start):
        raise BadInput(f"{first}: holds neither events of ipu_pipe nor kernels or operations of PyTorch's profiler")
    ev.check_trace(first.parent, *trace[:3])
    return trace


def _find_rank(path: Path, keys: Dict[str, Any]) -> Optional[int]:
    """Return the rank that a file or its name says; None where neither does."""
    info = keys.get("distributedInfo")
    if isinstance(info, dict) and isinstance(info.get("rank"), int) and 0 <= info["rank"] < 1 << 20:
        return int(info["rank"])
    named = RANK_IN_NAME.search(path.name)
    return int(named.group(1)) if named else None
