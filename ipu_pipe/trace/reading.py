"""Traces read, whoever wrote them: run folders, our own files, our Chrome JSON and PyTorch's profiler's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import numpy as np

from ipu_pipe.errors import BadInput
from ipu_pipe.trace.events import (
    EVENT_TYPES,
    KIND_CODE,
    PAYLOAD_CODE,
    Counter,
    Counters,
    Events,
    Trace,
    build_integer_column,
    build_time_column,
    check_columns,
    concatenate_counters,
    concatenate_events,
    refuse_later_schema,
)
from ipu_pipe.trace.json_records import GZIP, read_records
from ipu_pipe.trace.kineto import KinetoColumns, of_ranks
from ipu_pipe.trace.store import MAGIC, MOST_BYTES, ROW_BYTES, SUFFIX, Allowance, find_store_files, read_store

CHROME = "trace.json.gz"
PROFILE = "profile.pop"  # PopVision's; read by Graphcore's library


def read_trace(path: Path) -> Trace:
    """The trace in a run's folder, a file, or a folder of a profiler's files. Raises BadInput, a line a fault, where there is
    none that can be read, or where it has no events."""
    try:
        files = _files(path)
        if not files:
            raise BadInput(
                f"{path}: holds no trace: must be a run's folder (trace/*{SUFFIX} or {CHROME}), or a folder of Chrome traces"
            )
        ours = [_begins_as_ours(file) for file in files]
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from None
    allowance = Allowance(MOST_BYTES)
    found = merged([read_store(file, allowance) for file in files]) if all(ours) else read_json(files, allowance)
    check_columns(path, found.events, found.counters)
    if not len(found.events.start):
        raise BadInput(f"{path}: holds no events: there is nothing to analyze")
    return found


def _files(path: Path) -> List[Path]:
    if not path.is_dir():
        if not path.exists():
            raise BadInput(f"{path}: no such run or trace: must be a run's folder or a trace file")
        if not path.is_file():
            raise BadInput(f"{path}: is no file, must be a run's folder or a trace file")
        return [path]
    own = find_store_files(path) or sorted(path.glob(f"*{SUFFIX}"))
    if own or (path / CHROME).is_file():
        return own or [path / CHROME]
    if (path / "config.yaml").exists():  # its JSON files are no traces
        raise BadInput(f"{path}: is a run without a trace (neither trace/*{SUFFIX} nor {CHROME})")
    return sorted(file for file in path.iterdir() if file.name.endswith((".json", ".json.gz")))


def _begins_as_ours(path: Path) -> bool:
    with path.open("rb") as file:
        begin = file.read(len(MAGIC))
    if begin == MAGIC or path.suffix == SUFFIX:
        return True
    if not begin:
        raise BadInput(f"{path}: is empty")
    if begin[:2] != GZIP and begin.lstrip()[:1] not in (b"{", b"["):
        raise BadInput(
            f"{path}: is no trace: must be ipu_pipe's (*{SUFFIX}) or a Chrome trace in JSON, plain or gzipped"
        )
    return False


def merged(traces: Sequence[Trace]) -> Trace:
    """One of several, such as one a rank, whose times count from one moment; what the first says of the run stands. It is
    modelled if any of them is."""
    if len(traces) == 1:
        return traces[0]
    metadata: Dict[str, Any] = {}
    for trace in reversed(traces):
        metadata.update(trace.metadata)
    if any(trace.metadata.get("modelled") for trace in traces):
        metadata["modelled"] = True
    notes = tuple(note for trace in traces for note in trace.notes)
    events, counters = [trace.events for trace in traces], [trace.counters for trace in traces]
    return Trace(concatenate_events(events), concatenate_counters(counters), metadata, notes)


def read_json(files: Sequence[Path], allowance: Allowance) -> Trace:
    """Our Chrome JSON, one or several, or PyTorch's profiler's, a file a rank."""
    own: List[Trace] = []
    foreign = []
    for path in files:
        taker = _Taker(allowance)
        keys = read_records(path, taker.take)
        if taker.ours is not None and (taker.told or "otherData" in keys):
            own.append(taker.ours.trace(path, keys))
        else:
            foreign.append((path, keys, taker.kineto))
    if own and foreign:
        raise BadInput(f"{foreign[0][0]}: is not of ipu_pipe as {files[0].parent}'s others are: give one file")
    return merged(own) if own else _of_ranks(foreign)


def _of_ranks(files: Any) -> Trace:
    try:
        found = of_ranks(files)
    except BadInput:
        raise
    except (ValueError, OverflowError) as error:
        raise BadInput(f"{files[0][0].parent}: cannot be read as traces of ranks: {error}") from None
    if not len(found.events.start):
        raise BadInput(
            f"{files[0][0]}: holds neither events of ipu_pipe nor kernels or operations of PyTorch's profiler"
        )
    return found


class _Taker:
    """Records go to who can read them, as the first event tells: ours until then."""

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self.ours: Optional[_ChromeColumns] = _ChromeColumns()
        self.kineto = KinetoColumns()
        self.told = False

    def take(self, records: List[Any]) -> None:
        """Hand on some records."""
        self._allowance.take(len(records) * ROW_BYTES)
        first = None if self.told else next((r for r in records if r["ph"] == "X"), None)
        if first is not None:
            self.told, args = True, first.get("args")
            if first.get("cat") not in KIND_CODE or not isinstance(args, dict) or "stage" not in args:
                self.ours = None
        if self.ours is not None:
            self.ours.take(records)
        else:
            self.kineto.take(records)


class _ChromeColumns:
    """What `write_chrome` wrote, as columns again."""

    def __init__(self) -> None:
        self._parts: List[Events] = []
        self._counters: List[Counter] = []

    def take(self, records: Sequence[Any]) -> None:
        """Read some records."""
        rows = [
            (
                a["stage"], r["pid"], KIND_CODE[r["cat"]], a["k"] if "k" in a else a["microbatch"], r["ts"], r["dur"],
                a["version"], a.get("bytes", -1), a.get("peer", -1), PAYLOAD_CODE[a.get("carries", "")],
            )
            for r in records if r["ph"] == "X" for a in (r["args"],)
        ]  # fmt: skip
        if rows:
            columns = dict(zip(EVENT_TYPES, zip(*rows)))
            start = build_time_column("ts", columns.pop("start"))
            end = start + build_time_column("dur", columns.pop("end"))
            whole = {name: build_integer_column(name, values, EVENT_TYPES[name]) for name, values in columns.items()}
            self._parts.append(Events(start=start, end=end, **whole))
        for r in records:
            if r["ph"] == "C":
                (moment,) = build_time_column("ts", [r["ts"]]).tolist()
                for name, value in r["args"].items():
                    value = float("nan") if value is None else float(value)
                    self._counters.append(Counter(r["pid"], str(r["name"] if name == "value" else name), moment, value))

    def trace(self, path: Path, keys: Dict[str, Any]) -> Trace:
        """All that was read."""
        metadata = keys.get("otherData", {})
        if not isinstance(metadata, dict):
            raise BadInput(f"{path}: otherData: {json.dumps(metadata)[:40]}: must be an object")
        refuse_later_schema(metadata, path)
        try:
            build_integer_column("pid", [counter.device for counter in self._counters], np.int32)
            return Trace(concatenate_events(self._parts), Counters.from_rows(self._counters), metadata)
        except (ValueError, OverflowError) as error:
            raise BadInput(f"{path}: cannot be read as a Chrome trace: {error}") from None
