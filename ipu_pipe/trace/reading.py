"""Reading a trace, whoever wrote it: a run's folder, our own files, our Chrome JSON and the JSON of PyTorch's profiler."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

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
    check_trace,
    concatenate_counters,
    concatenate_events,
)
from ipu_pipe.trace.kineto import ProfilerRank, merge_ranks
from ipu_pipe.trace.store import MAGIC, SUFFIX, find_store_files, read_store

CHROME = "trace.json.gz"
PROFILE = "profile.pop"  # PopVision's; Graphcore's library reads it
GZIP = b"\x1f\x8b"
BATCH = 1 << 14  # records that become columns at once
MOST_BYTES = 1 << 30  # of columns in all files, 22 million events: more is refused before memory is taken for it
MOST_TEXT = 1 << 30  # bytes of JSON in a file


def read_trace(path: Path) -> Trace:
    """Read the trace in a run's folder, a trace file, or a folder of a profiler's files. Raise `BadInput`, a line a fault, where
    no trace can be read, or where it has no events."""
    files = _find_files(path)
    if all(_is_store(file) for file in files):
        traces, left = [], MOST_BYTES
        for file in files:
            traces.append(read_store(file, left))
            left -= sum(column.nbytes for column in traces[-1].events)
        trace = merge_traces(traces)
    else:
        trace = _read_json_files(files)
    if not len(trace.events.start):
        raise BadInput(f"{path}: holds no events: there is nothing to analyze")
    return trace


def merge_traces(traces: Sequence[Trace]) -> Trace:
    """Return traces whose times count from one moment, such as one a rank, as one. Metadata of the first take precedence; the
    result is modelled if one of them is."""
    if len(traces) == 1:
        return traces[0]
    metadata: Dict[str, Any] = {}
    for trace in reversed(traces):
        metadata.update(trace.metadata)
    if any(trace.metadata.get("modelled") for trace in traces):
        metadata["modelled"] = True
    events, counters = [trace.events for trace in traces], [trace.counters for trace in traces]
    notes = tuple(note for trace in traces for note in trace.notes)
    return Trace(concatenate_events(events), concatenate_counters(counters), metadata, notes)


def _find_files(path: Path) -> List[Path]:
    if not path.is_dir():
        if not path.exists():
            raise BadInput(f"{path}: no such run or trace: must be a run's folder or a trace file")
        return [path]
    ours = find_store_files(path) or sorted(path.glob(f"*{SUFFIX}"))
    if ours or (path / CHROME).is_file():
        return ours or [path / CHROME]
    files = sorted(file for file in path.iterdir() if file.name.endswith((".json", ".json.gz")))
    if not files or (path / "config.yaml").exists():  # JSON files of a run are not traces
        what = f"must have trace/*{SUFFIX} or {CHROME}, or be a folder of Chrome traces"
        raise BadInput(f"{path}: is a run or a folder without a trace: {what}")
    return files


def _is_store(path: Path) -> bool:
    if path.exists() and not path.is_file():  # reading a pipe or a device might never end
        raise BadInput(f"{path}: is not a file: must be a run's folder or a trace file")
    try:
        with path.open("rb") as file:
            begin = file.read(len(MAGIC))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from None
    if begin == MAGIC or path.suffix == SUFFIX:
        return True
    if begin[:2] != GZIP and begin.lstrip()[:1] not in (b"{", b"["):
        what = f"must be ipu_pipe's (*{SUFFIX}) or a Chrome trace in JSON, plain or gzipped"
        raise BadInput(f"{path}: is {'not a trace' if begin else 'empty'}: {what}")
    return False


# ---- Chrome JSON


def _read_json_files(files: Sequence[Path]) -> Trace:
    """Read one or several files of ours, or PyTorch's profiler's, one a rank."""
    ours: List[Trace] = []
    ranks: List[Tuple[Path, Dict[str, Any], ProfilerRank]] = []
    for path in files:
        try:
            records, keys = _parse(path)
            if records.is_ours or (records.is_ours is None and "otherData" in keys):
                ours.append(records.build_trace(path, keys))
            else:
                ranks.append((path, keys, records.rank))
        except (OSError, EOFError, zlib.error) as error:  # a damaged gzip header is an OSError without an errno
            raise BadInput(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError, AttributeError) as error:
            # whatever JSON may hold in the place of what is looked for
            raise BadInput(f"{path}: cannot be read as a Chrome trace: {type(error).__name__}: {error}") from None
    if ours and ranks:
        raise BadInput(f"{ranks[0][0]}: is not of ipu_pipe, as other files of {files[0].parent} are: give one file")
    return merge_traces(ours) if ours else merge_ranks(ranks)


def _parse(path: Path) -> Tuple["_Records", Dict[str, Any]]:
    """Return the records of a Chrome trace, and the file's other keys."""
    with path.open("rb") as raw:
        is_packed = raw.read(2) == GZIP
        raw.seek(0)
        text = (gzip.open(raw) if is_packed else raw).read(MOST_TEXT + 1)
    if len(text) > MOST_TEXT:
        raise BadInput(f"{path}: holds more than {MOST_TEXT >> 20} MiB of JSON: record fewer updates (log.trace)")
    records = _Records()
    # the hook takes each record as soon as it is parsed, so that millions of dictionaries are never held at once
    document = json.loads(text.decode("utf-8", errors="replace"), object_hook=records.take)
    keys = {"traceEvents": document} if isinstance(document, list) else document
    if any(record is not None for record in keys.pop("traceEvents")):
        raise ValueError("traceEvents: must be objects with a ph")
    records.pack()
    return records, dict(keys)


class _Records:
    """Takes the records of one file. The first event says whether they are ours or the profiler's (`is_ours`; None: no event)."""

    def __init__(self) -> None:
        self.is_ours: Optional[bool] = None
        self.rank = ProfilerRank()
        self._rows: List[Tuple[Any, ...]] = []
        self._parts: List[Events] = []
        self._counters: List[Counter] = []

    def take(self, record: Dict[str, Any]) -> Optional[Dict[str, Any]]:
        """Take a record and return None; return other objects, such as a record's arguments, as they are."""
        phase = record.get("ph")
        if phase is None:
            return record
        if phase == "X":
            args = record.get("args")
            if self.is_ours is None:
                self.is_ours = record.get("cat") in KIND_CODE and isinstance(args, dict) and "stage" in args
            row = _read_row(record, args) if self.is_ours else self.rank.read_row(record)
            if row is not None:
                self._rows.append(row)
        elif phase == "C" and self.is_ours is not False:
            (time,) = build_time_column("ts", [record["ts"]]).tolist()
            for name, value in record["args"].items():
                name = str(record["name"] if name == "value" else name)
                self._counters.append(Counter(record["pid"], name, time, float("nan" if value is None else value)))
        if len(self._rows) == BATCH:
            self.pack()
        return None

    def pack(self) -> None:
        """Make the rows that were taken into columns."""
        rows, self._rows = self._rows, []
        if rows and self.is_ours:
            columns: Dict[str, Any] = dict(zip(EVENT_TYPES, zip(*rows)))
            start = build_time_column("ts", columns.pop("start"))
            end = start + build_time_column("dur", columns.pop("end"))
            integers = {name: build_integer_column(name, values, EVENT_TYPES[name]) for name, values in columns.items()}
            self._parts.append(Events(start=start, end=end, **integers))
        elif rows:
            self.rank.add(rows)

    def build_trace(self, path: Path, keys: Dict[str, Any]) -> Trace:
        """Return the trace that `write_chrome` wrote. Raise `BadInput` or ValueError where it cannot have."""
        metadata = keys.get("otherData", {})
        if not isinstance(metadata, dict):
            raise ValueError("otherData: must be an object")
        build_integer_column("pid", [counter.device for counter in self._counters], np.int32)
        events, counters = concatenate_events(self._parts), Counters.from_rows(self._counters)
        check_trace(path, events, counters, metadata)
        return Trace(events, counters, metadata)


def _read_row(record: Dict[str, Any], args: Any) -> Tuple[Any, ...]:
    """Return the columns of one event, its duration in the place of its end."""
    return (
        args["stage"], record["pid"], KIND_CODE[record["cat"]], args["k"] if "k" in args else args["microbatch"],
        record["ts"], record["dur"], args["version"], args.get("bytes", -1), args.get("peer", -1),
        PAYLOAD_CODE[args.get("carries", "")],
    )  # fmt: skip
