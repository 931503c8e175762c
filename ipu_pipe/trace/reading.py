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
    check_columns,
    concatenate_counters,
    concatenate_events,
    refuse_later_schema,
)
from ipu_pipe.trace.kineto import ProfilerRank, merge_ranks
from ipu_pipe.trace.store import MAGIC, MOST_BYTES, ROW_BYTES, SUFFIX, Allowance, find_store_files, read_store

CHROME = "trace.json.gz"
PROFILE = "profile.pop"  # PopVision's; Graphcore's library reads it
GZIP = b"\x1f\x8b"
BATCH = 1 << 14  # records that become columns at once
MOST_TEXT = 1 << 30  # bytes of JSON in a file


def read_trace(path: Path) -> Trace:
    """Read the trace in a run's folder, a trace file, or a folder of a profiler's files. Raise `BadInput`, a line a fault, where
    no trace can be read, or where it has no events."""
    try:
        files = _find_files(path)
        is_ours = [_is_store(file) for file in files]
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from None
    allowance = Allowance(MOST_BYTES)
    if all(is_ours):
        trace = merge_traces([read_store(file, allowance) for file in files])
    else:
        trace = _read_json_files(files, allowance)
    check_columns(path, trace.events, trace.counters)
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
    if (path / "config.yaml").exists():  # whose JSON files are not traces
        raise BadInput(f"{path}: is a run without a trace (neither trace/*{SUFFIX} nor {CHROME})")
    files = sorted(file for file in path.iterdir() if file.name.endswith((".json", ".json.gz")))
    if not files:
        raise BadInput(
            f"{path}: holds no trace: must be a run's folder (trace/*{SUFFIX} or {CHROME}), or a folder of Chrome traces"
        )
    return files


def _is_store(path: Path) -> bool:
    if path.exists() and not path.is_file():  # reading a pipe or a device might never end
        raise BadInput(f"{path}: is not a file: must be a run's folder or a trace file")
    with path.open("rb") as file:
        begin = file.read(len(MAGIC))
    if begin == MAGIC or path.suffix == SUFFIX:
        return True
    if not begin:
        raise BadInput(f"{path}: is empty")
    if begin[:2] != GZIP and begin.lstrip()[:1] not in (b"{", b"["):
        raise BadInput(
            f"{path}: is not a trace: must be ipu_pipe's (*{SUFFIX}) or a Chrome trace in JSON, plain or gzipped"
        )
    return False


# ---- Chrome JSON


def _read_json_files(files: Sequence[Path], allowance: Allowance) -> Trace:
    """Read one or several files of ours, or PyTorch's profiler's, one a rank."""
    ours: List[Trace] = []
    ranks: List[Tuple[Path, Dict[str, Any], ProfilerRank]] = []
    for path in files:
        records = _Records(allowance)
        keys = _parse(path, records)
        if records.is_ours or (records.is_ours is None and "otherData" in keys):
            ours.append(records.build_trace(path, keys))
        else:
            ranks.append((path, keys, records.rank))
    if ours and ranks:
        raise BadInput(f"{ranks[0][0]}: is not of ipu_pipe, as other files of {files[0].parent} are: give one file")
    if ours:
        return merge_traces(ours)
    try:
        trace = merge_ranks(ranks)
    except BadInput:
        raise
    except (ValueError, OverflowError) as error:
        raise BadInput(f"{files[0].parent}: cannot be read as traces of ranks: {error}") from None
    if not len(trace.events.start):
        raise BadInput(f"{files[0]}: holds neither events of ipu_pipe nor kernels or operations of PyTorch's profiler")
    return trace


def _parse(path: Path, records: "_Records") -> Dict[str, Any]:
    """Hand each record of a Chrome trace to `records`. Return the file's other keys."""
    problem = f"{path}: cannot be read as a Chrome trace"
    try:
        with path.open("rb") as raw:
            is_packed = raw.read(2) == GZIP
            raw.seek(0)
            text = (gzip.open(raw) if is_packed else raw).read(MOST_TEXT + 1)
        if len(text) > MOST_TEXT:
            raise BadInput(f"{path}: holds more than {MOST_TEXT >> 20} MiB of JSON: record fewer updates (log.trace)")
        # the hook takes each record as soon as it is parsed, so that millions of dictionaries are never held at once
        document = json.loads(text.decode("utf-8", errors="replace"), object_hook=records.take)
        keys = {"traceEvents": document} if isinstance(document, list) else document
        if any(record is not None for record in keys.pop("traceEvents")):
            raise ValueError("traceEvents: must be objects with a ph")
        records.pack()
        return dict(keys)
    except BadInput:
        raise
    except (OSError, EOFError, zlib.error) as error:  # a damaged gzip header is an OSError without an errno
        raise BadInput(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except json.JSONDecodeError as error:
        raise BadInput(
            f"{problem}: {'ends too early' if error.pos >= len(error.doc) else 'is not JSON: ' + error.msg}"
        ) from None
    except KeyError as error:
        raise BadInput(f"{problem}: {error}: missing, or not known") from None
    except (ValueError, TypeError, OverflowError, RecursionError, AttributeError) as error:
        raise BadInput(f"{problem}: {type(error).__name__}: {error}") from None


class _Records:
    """Takes the records of one file. The first event says whether they are ours or the profiler's (`is_ours`; None: no event)."""

    def __init__(self, allowance: Allowance) -> None:
        self.is_ours: Optional[bool] = None
        self.rank = ProfilerRank()
        self._allowance = allowance
        self._rows: List[Tuple[Any, ...]] = []
        self._parts: List[Events] = []
        self._counters: List[Counter] = []

    def take(self, record: Dict[str, Any]) -> Optional[Dict[str, Any]]:
        """Take a record and return None; return other objects, such as a record's arguments, as they are."""
        phase = record.get("ph")
        if phase is None:
            return record
        if phase in ("X", "C"):
            self._allowance.take(ROW_BYTES)
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
        if not rows:
            return
        if not self.is_ours:
            self.rank.add(rows)
            return
        columns: Dict[str, Any] = dict(zip(EVENT_TYPES, zip(*rows)))
        start = build_time_column("ts", columns.pop("start"))
        end = start + build_time_column("dur", columns.pop("end"))
        integers = {name: build_integer_column(name, values, EVENT_TYPES[name]) for name, values in columns.items()}
        self._parts.append(Events(start=start, end=end, **integers))

    def build_trace(self, path: Path, keys: Dict[str, Any]) -> Trace:
        """Return the trace that `write_chrome` wrote. Raise `BadInput` where it cannot have."""
        metadata = keys.get("otherData", {})
        if not isinstance(metadata, dict):
            raise BadInput(f"{path}: otherData: {json.dumps(metadata)[:40]}: must be an object")
        refuse_later_schema(metadata, path)
        try:
            build_integer_column("pid", [counter.device for counter in self._counters], np.int32)
            return Trace(concatenate_events(self._parts), Counters.from_rows(self._counters), metadata)
        except (ValueError, OverflowError) as error:
            raise BadInput(f"{path}: cannot be read as a Chrome trace: {error}") from None


def _read_row(record: Dict[str, Any], args: Any) -> Tuple[Any, ...]:
    """Return the columns of one event, its duration in the place of its end."""
    return (
        args["stage"], record["pid"], KIND_CODE[record["cat"]], args["k"] if "k" in args else args["microbatch"],
        record["ts"], record["dur"], args["version"], args.get("bytes", -1), args.get("peer", -1),
        PAYLOAD_CODE[args.get("carries", "")],
    )  # fmt: skip
