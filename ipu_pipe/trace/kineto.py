"""Traces of PyTorch's profiler (Kineto), a file a rank: which records are compute and which are communication.

A rank is taken as a device and a stage. Where a rank used a GPU, its time is that of kernels and copies; else that of the CPU's
operations, which are nested. The records do not say microbatches, versions and waits.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from ipu_pipe.errors import BadInput
from ipu_pipe.text import show
from ipu_pipe.trace.events import (
    COLLECTIVE,
    FARTHEST_NS,
    KINDS,
    UNSPECIFIED,
    Counters,
    Events,
    Trace,
    build_time_column,
    check_trace,
    concatenate_events,
)

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
ON_HOST = ("cpu_op", "user_annotation")
COMMUNICATES = re.compile(r"nccl|gloo:|c10d::|record_param_comms|ncclx|rccl", re.IGNORECASE)
DIRECTIONS = (
    (re.compile("all_?|reduce|sendrecv", re.IGNORECASE), COLLECTIVE),
    (re.compile("send|DtoH|PtoP"), "send"),
    (re.compile("recv|HtoD", re.IGNORECASE), "recv"),
)
RANK_IN_NAME = re.compile(r"rank[-_.]?(\d{1,6})", re.IGNORECASE)
NOTE = (
    "PyTorch's profiler: a rank is taken as a device and a stage; it does not say microbatches, versions and waits "
    "(a wait for a message is within its communication)"
)


class ProfilerRank:
    """The events of one rank, from its records."""

    def __init__(self) -> None:
        self._parts: List[Tuple[Any, Any, Any, Any]] = []

    def read_row(self, record: Dict[str, Any]) -> Optional[Tuple[Any, ...]]:
        """Return the kind's code, whether it was on a GPU, begin and duration (us) of a record; None if it says nothing of the
        device."""
        kind = _identify(str(record.get("cat", "")), str(record["name"]))
        return None if kind is None else (*kind, record["ts"], record["dur"])

    def add(self, rows: Sequence[Tuple[Any, ...]]) -> None:
        """Add rows that `read_row` returned."""
        kinds, on_gpu, begin, duration = zip(*rows)
        start = build_time_column("ts", begin)
        end = start + build_time_column("dur", duration)
        self._parts.append((np.array(kinds, np.int8), np.array(on_gpu, bool), start, end))

    def build_events(self, rank: int, base_ns: int) -> Events:
        """Return the rank's events; `base_ns` is added to their times."""
        if not self._parts:
            return Events.from_rows([])
        kind, on_gpu, start, end = (np.concatenate(column) for column in zip(*self._parts))
        if on_gpu.any():
            kind, start, end = kind[on_gpu], start[on_gpu], end[on_gpu]
        return Events.from_columns(
            len(start), stage=rank, device=rank, kind=kind, start=start + base_ns, end=end + base_ns
        )


def merge_ranks(files: Sequence[Tuple[Path, Dict[str, Any], ProfilerRank]]) -> Trace:
    """Return one trace of all ranks, from each file's path, keys and events; times count from the first file's base. Raise
    `BadInput` for two files of one rank, a base that is not an integer, and files without events."""
    paths, first, notes = [path for path, _, _ in files], files[0][0], [NOTE]
    ranks = [_find_rank(path, keys) for path, keys, _ in files]
    if None in ranks and len(files) > 1:
        notes.append("the files do not say their ranks: they are numbered in the order of their names")
    numbers = list(range(len(files))) if None in ranks else [rank for rank in ranks if rank is not None]
    repeated = sorted({number for number in numbers if numbers.count(number) > 1})
    if repeated:
        same = [str(path) for path, number in zip(paths, numbers) if number == repeated[0]]
        raise BadInput(f"{', '.join(same)}: are all of rank {repeated[0]}: must be one file a rank")
    bases = [keys.get("baseTimeNanoseconds", 0) for _, keys, _ in files]
    if not all(isinstance(base, int) and abs(base) < FARTHEST_NS * 2 for base in bases):
        raise BadInput(f"{first}: baseTimeNanoseconds: {show(bases[0])}: must be a whole number of nanoseconds in every file")
    hosts = {str(keys["host_name"]) for _, keys, _ in files if "host_name" in keys}
    if len(hosts) > 1:
        notes.append(f"ranks on {len(hosts)} hosts: their times differ by as much as the hosts' clocks do")
    parts = [rank.build_events(number, base - bases[0]) for (_, _, rank), number, base in zip(files, numbers, bases)]
    notes += [f"{path}: holds no kernel and no operation" for path, part in zip(paths, parts) if not len(part.start)]
    events, metadata = concatenate_events(parts), {"backend": "PyTorch profiler", "modelled": False}
    if not len(events.start):
        raise BadInput(f"{first}: holds neither events of ipu_pipe nor kernels or operations of PyTorch's profiler")
    check_trace(first.parent, events, Counters.from_rows([]), metadata)
    return Trace(events, Counters.from_rows([]), metadata, tuple(notes))


@functools.lru_cache(maxsize=1 << 16)  # names repeat
def _identify(category: str, name: str) -> Optional[Tuple[int, bool]]:
    """Return the code of the kind and whether it was on a GPU; None for records that say nothing of the device."""
    communicates = COMMUNICATES.search(name) is not None or (category == "gpu_memcpy" and "DtoD" not in name)
    if category not in (*ON_GPU, *ON_HOST) or (category == "user_annotation" and not communicates):
        return None
    kind = UNSPECIFIED
    if communicates:
        kind = next((direction for pattern, direction in DIRECTIONS if pattern.search(name)), COLLECTIVE)
    return KINDS.index(kind), category in ON_GPU


def _find_rank(path: Path, keys: Dict[str, Any]) -> Optional[int]:
    """Return the rank that a file or its name says; None where neither does."""
    info = keys.get("distributedInfo")
    if isinstance(info, dict) and isinstance(info.get("rank"), int) and 0 <= info["rank"] < 1 << 20:
        return int(info["rank"])
    named = RANK_IN_NAME.search(path.name)
    return int(named.group(1)) if named else None
