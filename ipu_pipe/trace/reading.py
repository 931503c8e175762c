"""Read a trace, whoever wrote it, into the columns of `trace.events`.

    *.trace                  our own files, one per rank (`trace.store`)
    trace.json.gz            our Chrome JSON (`trace.chrome`)
    *.json, *.json.gz        the JSON of PyTorch's profiler, one file per rank

`_Records` takes the records of a JSON file one by one, tells from the first event who wrote them,
and packs them into columns.
"""

from __future__ import annotations

import functools
import gzip
import json
import re
import zlib
from pathlib import Path
from typing import Any, Sequence

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput
from ipu_pipe.files import open_file
from ipu_pipe.text import show
from ipu_pipe.trace import events as ev
from ipu_pipe.trace.events import Counter, Counters, Events, Trace
from ipu_pipe.trace.store import MAGIC, SUFFIX, find_store_files, read_store

CHROME = "trace.json.gz"
GZIP = b"\x1f\x8b"
# records that are packed into columns together
BATCH = 1 << 14
# bytes of columns in all files, 22 million events; more is refused before memory is allocated
MOST_BYTES = 1 << 30
# bytes of JSON in a file
MOST_TEXT = 1 << 30


def read_trace(path: Path) -> Trace:
    """Read the trace in a run's folder, a trace file, or a folder of a profiler's files.

    Raise `BadInput` if there is no readable trace or it has no events.
    """
    files = _find_files(path)
    if all(_is_native(file) for file in files):
        traces = []
        bytes_left = MOST_BYTES
        for file in files:
            traces.append(read_store(file, bytes_left))
            bytes_left -= sum(column.nbytes for column in traces[-1].events)
        trace = merge_traces(traces)
    else:
        trace = _read_json_files(files)
    if not len(trace.events.start):
        raise BadInput(f"{path}: contains no events: there is nothing to analyze")
    return trace


def merge_traces(traces: Sequence[Trace]) -> Trace:
    """Merge traces with a common time origin, such as one for each rank.

    The first trace's metadata win; the result is modelled if any is.
    """
    if len(traces) == 1:
        return traces[0]
    metadata = {key: value for trace in reversed(traces) for key, value in trace.metadata.items()}
    if any(trace.metadata.get("modelled") for trace in traces):
        metadata["modelled"] = True
    events, counters, _, notes = zip(*traces)
    return Trace(
        ev.concatenate_events(events), ev.concatenate_counters(counters), metadata, sum(notes, ())
    )


def _find_files(path: Path) -> list[Path]:
    """Return the trace files of a run, of a folder, or the file itself; our own format before
    JSON.
    """
    if not path.is_dir():
        if not path.exists():
            raise BadInput(f"{path}: no such run or trace: must be a run's folder or a trace file")
        return [path]
    ours = find_store_files(path) or sorted(path.glob(f"*{SUFFIX}"))
    if ours or (path / CHROME).is_file():
        return ours or [path / CHROME]
    files = sorted(file for file in path.iterdir() if file.name.endswith((".json", ".json.gz")))
    # JSON files of a run are not traces
    if not files or (path / "config.yaml").exists():
        what = f"must have trace/*{SUFFIX} or {CHROME}, or be a folder of Chrome traces"
        raise BadInput(f"{path}: is a run or a folder without a trace: {what}")
    return files


def _is_native(path: Path) -> bool:
    """Return whether a file is in our own format, False for JSON. Raise `BadInput` if it is
    neither.
    """
    try:
        with open_file(path) as file:
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
    """Read one or several files of ours, or PyTorch's profiler's, one per rank."""
    ours: list[Trace] = []
    profiler_files: list[tuple[Path, dict[str, Any], Events]] = []
    for path in files:
        try:
            records, keys = _parse(path)
            if records.is_ours or (records.is_ours is None and "otherData" in keys):
                ours.append(records.build_trace(path, keys))
            else:
                profiler_files.append((path, keys, ev.concatenate_events(records.parts)))
        # a damaged gzip header raises an OSError without an errno
        except (OSError, EOFError, zlib.error) as error:
            raise BadInput(
                f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from None
        except (
            ValueError,
            KeyError,
            TypeError,
            OverflowError,
            RecursionError,
            AttributeError,
        ) as error:
            # JSON may contain a value of any type here.
            raise BadInput(
                f"{path}: cannot be read as a Chrome trace: {type(error).__name__}: {error}"
            ) from None
    if ours and profiler_files:
        raise BadInput(
            f"{profiler_files[0][0]}: is not of ipu_pipe, as other files of {files[0].parent} are: "
            f"give one file"
        )
    return merge_traces(ours) if ours else merge_profiler_files(profiler_files)


def _parse(path: Path) -> tuple["_Records", dict[str, Any]]:
    """Return the records of a Chrome trace, and the file's other keys."""
    with open_file(path) as raw:
        is_gzipped = raw.read(2) == GZIP
        raw.seek(0)
        text = (gzip.open(raw) if is_gzipped else raw).read(MOST_TEXT + 1)
    if len(text) > MOST_TEXT:
        raise BadInput(
            f"{path}: holds more than {MOST_TEXT >> 20} MiB of JSON: record fewer updates "
            f"(log.trace)"
        )
    records = _Records()
    # The hook gets each record as soon as it is parsed, so that memory never contains millions of
    # dictionaries.
    document = json.loads(text.decode("utf-8", errors="replace"), object_hook=records.take)
    keys = {"traceEvents": document} if isinstance(document, list) else document
    if any(record is not None for record in keys.pop("traceEvents")):
        raise ValueError("traceEvents: must be objects with a ph")
    records.pack()
    return records, dict(keys)


class _Records:
    """The records of one file. The first event says whether they are ours or the profiler's
    (`is_ours`; None: no event).
    """

    def __init__(self) -> None:
        self.is_ours: bool | None = None
        self.parts: list[Events] = []
        self._rows: list[tuple[Any, ...]] = []
        self._counters: list[Counter] = []
        self._on_gpu = False

    def take(self, record: dict[str, Any]) -> dict[str, Any] | None:
        """Take a record and return None; return other objects, such as a record's arguments,
        unchanged.
        """
        phase = record.get("ph")
        if phase is None:
            return record
        if phase == "X":
            args = record.get("args")
            if self.is_ours is None:
                self.is_ours = (
                    record.get("cat") in ev.KIND_CODE and isinstance(args, dict) and "stage" in args
                )
            if self.is_ours:
                self._rows.append(_read_row(record, args))
            else:
                self._take_profiler_record(record)
        elif phase == "C" and self.is_ours is not False:
            (time,) = _build_times("ts", [record["ts"]]).tolist()
            (device,) = _build_integers("pid", [record["pid"]], np.int32).tolist()
            for name, value in record["args"].items():
                name = str(record["name"] if name == "value" else name)
                self._counters.append(
                    Counter(device, name, time, float("nan" if value is None else value))
                )
        if len(self._rows) == BATCH:
            self.pack()
        return None

    def _take_profiler_record(self, record: dict[str, Any]) -> None:
        kind, on_gpu = identify_record(str(record.get("cat", "")), str(record["name"]))
        # the busy time of a GPU includes only its kernels
        if on_gpu and not self._on_gpu:
            self._on_gpu = True
            self._rows = []
            self.parts = []
        if kind >= 0 and on_gpu == self._on_gpu:
            self._rows.append((-1, 0, kind, -1, record["ts"], record["dur"], -1, -1, -1, 0))

    def pack(self) -> None:
        """Make the rows that were taken into columns."""
        columns: dict[str, Any] = dict(zip(ev.EVENT_TYPES, zip(*self._rows)))
        self._rows = []
        if columns:
            start = _build_times("ts", columns.pop("start"))
            end = start + _build_times("dur", columns.pop("end"))
            integers = {
                name: _build_integers(name, column, ev.EVENT_TYPES[name])
                for name, column in columns.items()
            }
            self.parts.append(Events(start=start, end=end, **integers))

    def build_trace(self, path: Path, keys: dict[str, Any]) -> Trace:
        """Return the trace that `write_chrome` wrote. Raise `BadInput` or ValueError if it did not
        write it.
        """
        metadata = keys.get("otherData", {})
        if not isinstance(metadata, dict):
            raise ValueError("otherData: must be an object")
        trace = Trace(
            ev.concatenate_events(self.parts), Counters.from_rows(self._counters), metadata
        )
        ev.check_trace(path, *trace[:3])
        return trace


def _read_row(record: dict[str, Any], args: Any) -> tuple[Any, ...]:
    """Return the columns of one event, its duration in the place of its end."""
    return (
        args["stage"],
        record["pid"],
        ev.KIND_CODE[record["cat"]],
        args["k"] if "k" in args else args["microbatch"],
        record["ts"],
        record["dur"],
        args["version"],
        args.get("bytes", -1),
        args.get("peer", -1),
        ev.PAYLOAD_CODE[args.get("carries", "")],
    )


def _build_integers(name: str, values: Sequence[Any], kind: Any) -> NDArray[Any]:
    """Return integers as a column of the type `kind`. Raise ValueError for values that are not
    integers or do not fit.
    """
    column = np.array(values)
    if (
        column.dtype.kind not in "iu"
        or column.ndim != 1
        or not np.array_equal(column, column.astype(kind))
    ):
        raise ValueError(f"{name}: must be whole numbers of {np.dtype(kind)}")
    return column.astype(kind)


def _build_times(name: str, microseconds: Sequence[Any]) -> NDArray[np.int64]:
    """Return times, given in microseconds, as nanoseconds. Raise ValueError for other values and
    for times too far from 0.
    """
    column = np.array(microseconds)
    # a comparison with NaN is false, so NaN is refused too
    if (
        column.dtype.kind not in "iuf"
        or column.ndim != 1
        or not (np.abs(column) < ev.FARTHEST_NS / 1000).all()
    ):
        raise ValueError(
            f"{name}: must be numbers of microseconds, below {ev.FARTHEST_NS // 1000:.0e}"
        )
    return np.rint(column.astype(np.float64) * 1000).astype(np.int64)


# ---- PyTorch's profiler (Kineto), one file per rank: which records are compute and which are communication
#
# A rank is taken as a device and a stage. Where a rank used a GPU, its time is that of kernels and
# copies; else that of the CPU's operations, which are nested. The records do not say
# microbatches, versions and waits.

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
    "PyTorch's profiler: a rank is taken as a device and a stage; it does not record microbatches, "
    "versions and waits "
    "(a wait for a message is within its communication)"
)


# names repeat, so parse each once
@functools.lru_cache(maxsize=1 << 16)
def identify_record(category: str, name: str) -> tuple[int, bool]:
    """Return the code of a record's kind, -1 if it says nothing of the device, and whether it was
    on a GPU.
    """
    communicates = COMMUNICATES.search(name) is not None or (
        category == "gpu_memcpy" and "DtoD" not in name
    )
    if category not in (*ON_GPU, *ON_HOST) or (category == "user_annotation" and not communicates):
        return -1, False
    kind = ev.UNSPECIFIED
    if communicates:
        kind = next(
            (direction for pattern, direction in DIRECTIONS if pattern.search(name)), ev.COLLECTIVE
        )
    return ev.KIND_CODE[kind], category in ON_GPU


def merge_profiler_files(files: Sequence[tuple[Path, dict[str, Any], Events]]) -> Trace:
    """Return one trace of all ranks, from each file's path, keys and events; times count from the
    first file's base. Raise `BadInput` for two files of one rank, a base that is not an integer,
    and files without events.
    """
    first_path = files[0][0]
    notes = [NOTE]
    ranks = [
        rank for rank in (_find_rank(path, keys) for path, keys, _ in files) if rank is not None
    ]
    if len(ranks) < len(files):
        ranks = [*range(len(files))]
        if len(files) > 1:
            notes.append(
                "the files do not name their ranks, so they are numbered in the order of their "
                "names"
            )
    repeated = min((rank for rank in ranks if ranks.count(rank) > 1), default=None)
    if repeated is not None:
        same = [str(path) for (path, _, _), rank in zip(files, ranks) if rank == repeated]
        raise BadInput(f"{', '.join(same)}: are all of rank {repeated}: must be one file a rank")
    bases = [keys.get("baseTimeNanoseconds", 0) for _, keys, _ in files]
    if not all(isinstance(base, int) and abs(base) < ev.FARTHEST_NS * 2 for base in bases):
        raise BadInput(
            f"{first_path}: baseTimeNanoseconds: {show(bases[0])}: must be a whole number of "
            f"nanoseconds in every file"
        )
    hosts = {str(keys["host_name"]) for _, keys, _ in files if "host_name" in keys}
    if len(hosts) > 1:
        notes.append(
            f"ranks on {len(hosts)} hosts: their times differ by as much as the hosts' clocks do"
        )
    parts: list[Events] = []
    for (path, _, events), rank, base in zip(files, ranks, bases):
        columns = {**events._asdict(), "stage": rank, "device": rank}
        columns.update(start=events.start + base - bases[0], end=events.end + base - bases[0])
        parts.append(Events.from_columns(len(events.start), **columns))
        if not len(events.start):
            notes.append(f"{path}: contains no kernel and no operation")
    trace = Trace(
        ev.concatenate_events(parts),
        Counters.from_rows([]),
        {"backend": "PyTorch profiler", "modelled": False},
        tuple(notes),
    )
    if not len(trace.events.start):
        raise BadInput(
            f"{first_path}: contains neither events of ipu_pipe nor kernels or operations of "
            f"PyTorch's profiler"
        )
    ev.check_trace(first_path.parent, *trace[:3])
    return trace


def _find_rank(path: Path, keys: dict[str, Any]) -> int | None:
    """Return the rank that a file or its name says; None where neither does."""
    info = keys.get("distributedInfo")
    if isinstance(info, dict) and isinstance(info.get("rank"), int) and 0 <= info["rank"] < 1 << 20:
        return int(info["rank"])
    match = RANK_IN_NAME.search(path.name)
    return int(match.group(1)) if match else None
