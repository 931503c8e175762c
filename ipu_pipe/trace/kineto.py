"""Traces of PyTorch's profiler (Kineto), a file a rank: which records are compute and which communication.

A rank is a device and a stage. Where a rank used a GPU, its device's time is that of kernels and copies; else that of the CPU's
operations, which lie within one another. Records say nothing of microbatches, versions and waits.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from ipu_pipe.errors import BadInput
from ipu_pipe.trace.events import (
    COLLECTIVE,
    KINDS,
    UNSPECIFIED,
    Counters,
    Events,
    Trace,
    build_time_column,
    concatenate_events,
)

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
ON_HOST = ("cpu_op", "user_annotation")
COLLECTIVES = re.compile(r"nccl|gloo:|c10d::|record_param_comms|ncclx|rccl", re.IGNORECASE)
TOWARDS = ((re.compile("all_?|reduce|sendrecv", re.IGNORECASE), COLLECTIVE), (re.compile("send|DtoH|PtoP"), "send"),
           (re.compile("recv|HtoD", re.IGNORECASE), "recv"))  # fmt: skip
RANK_IN_NAME = re.compile(r"rank[-_.]?(\d{1,6})", re.IGNORECASE)
NOTE = (
    "PyTorch's profiler: a rank is taken as a device and a stage; microbatches, versions and waits are not told "
    "(a wait for a message is within its communication)"
)


class KinetoColumns:
    """What is taken of one rank's records."""

    def __init__(self) -> None:
        self._kinds: Dict[Tuple[str, str], int] = {}
        self._parts: List[Tuple[Any, Any, Any, Any]] = []

    def take(self, records: Sequence[Any]) -> None:
        """Keep those that say what the device did."""
        found = [(self._kind(r), r["ts"], r["dur"]) for r in records if r["ph"] == "X"]
        found = [row for row in found if row[0] >= 0]
        if found:
            kinds, begin, lasted = zip(*found)
            code = np.array(kinds, np.int16)
            start = build_time_column("ts", begin)
            self._parts.append((code % 256, start, start + build_time_column("dur", lasted), code >= 256))

    def _kind(self, record: Dict[str, Any]) -> int:
        """A kind's code, 256 more on a GPU; -1 of what is not looked at. Names repeat: each is looked at once."""
        category, name = record.get("cat", ""), record["name"]
        code = self._kinds.get((category, name))
        if code is None:
            code = self._kinds[category, name] = _code(str(category), str(name))
        return code

    def events(self, rank: int, base_ns: int) -> Events:
        """The rank's events, by the clock that all ranks of a host share."""
        if not self._parts:
            return Events.from_rows([])
        kind, start, end, gpu = (np.concatenate(column) for column in zip(*self._parts))
        if gpu.any():
            kind, start, end = kind[gpu], start[gpu], end[gpu]
        count = len(start)

        def same(value: int, to: Any) -> Any:
            return np.full(count, value, to)

        place, unknown = same(rank, np.int32), same(-1, np.int32)
        return Events(
            place, place, kind.astype(np.int8), unknown, start + base_ns, end + base_ns, unknown, same(-1, np.int64), unknown,
            same(0, np.int8),
        )  # fmt: skip


def _code(category: str, name: str) -> int:
    communicates = COLLECTIVES.search(name) is not None or (category == "gpu_memcpy" and "DtoD" not in name)
    if category not in (*ON_GPU, *ON_HOST) or (category == "user_annotation" and not communicates):
        return -1
    kind = UNSPECIFIED
    if communicates:
        kind = next((word for pattern, word in TOWARDS if pattern.search(name)), COLLECTIVE)
    return KINDS.index(kind) + 256 * (category in ON_GPU)


def rank_of(path: Path, keys: Dict[str, Any]) -> Optional[int]:
    """The rank that a file is of, as it says or as its name does; None where neither does."""
    told = keys.get("distributedInfo")
    if isinstance(told, dict) and isinstance(told.get("rank"), int) and 0 <= told["rank"] < 1 << 20:
        return int(told["rank"])
    named = RANK_IN_NAME.search(path.name)
    return int(named.group(1)) if named else None


def base_of(keys: Dict[str, Any]) -> int:
    """What a file's times are counted from, in nanoseconds."""
    base = keys.get("baseTimeNanoseconds", 0)
    if not isinstance(base, int):
        raise ValueError(f"baseTimeNanoseconds: {base}: must be a whole number")
    return base


def of_ranks(files: Sequence[Tuple[Path, Dict[str, Any], KinetoColumns]]) -> Trace:
    """One trace of all ranks, counted from the first one's base."""
    ranks = [rank_of(path, keys) for path, keys, _ in files]
    notes = [NOTE]
    if None in ranks and len(files) > 1:
        notes.append("the ranks are not told: files are numbered in the order of their names")
    numbers = list(range(len(files))) if None in ranks else [rank for rank in ranks if rank is not None]
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    if twice:
        same = [str(path) for (path, _, _), number in zip(files, numbers) if number == twice[0]]
        raise BadInput(f"{', '.join(same)}: are all of rank {twice[0]}: must be one file a rank")
    bases = [base_of(keys) for _, keys, _ in files]
    hosts = {str(keys["host_name"]) for _, keys, _ in files if "host_name" in keys}
    if len(hosts) > 1:
        notes.append(f"ranks on {len(hosts)} hosts: times are as far apart as the hosts' clocks")
    parts = [columns.events(rank, base - bases[0]) for (_, _, columns), rank, base in zip(files, numbers, bases)]
    empty = [str(path) for (path, _, _), part in zip(files, parts) if not len(part.start)]
    notes += [f"{path}: holds no kernel and no operation" for path in empty]
    metadata = {"backend": "PyTorch profiler", "modelled": False}
    return Trace(concatenate_events(parts), Counters.from_rows([]), metadata, tuple(notes))
