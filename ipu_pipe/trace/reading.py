"""Read a trace, whoever wrote it, into the columns of `trace.events`.

    *.trace                  our own files, one per rank (`trace.store`)
    trace.json.gz            our Chrome JSON (`trace.chrome`)
    *.json, *.json.gz        the JSON of PyTorch's profiler, one file per rank
    *.pvti                   PopVision's system trace (`trace.popvision`)

`_Records` takes the records of a JSON file one by one and tells from the first event who wrote
them. Ours are packed into columns here; the profiler's are read by `trace.kineto`, joined to a
pipeline by `trace.pipelining`, and divided into waits and communication by `trace.waits`.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, NoReturn, Sequence

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput
from ipu_pipe.files import open_file
from ipu_pipe.text import list_some, show
from ipu_pipe.trace import events as ev
from ipu_pipe.trace.events import Counter, Counters, Events, Trace
from ipu_pipe.trace.json_records import CHAKRA, GZIP, MOST_TEXT, Report, parse_records
from ipu_pipe.trace.kineto import ProfilerRecords, RankRecords, find_rank
from ipu_pipe.trace.pass_names import Patterns, compile_patterns
from ipu_pipe.trace.pipelining import find_pipeline
from ipu_pipe.trace.popvision import PVTI, read_pvti
from ipu_pipe.trace.store import MAGIC, SUFFIX, find_store_files, read_store
from ipu_pipe.trace.waits import (
    estimate_offsets,
    match_messages,
    split_collectives,
    split_waits,
)

CHROME = "trace.json.gz"
# records that are packed into columns together
BATCH = 1 << 14
# bytes of columns in all files, 22 million events; more is refused before memory is allocated
MOST_BYTES = 1 << 30
# a float64 holds times up to this one exactly; later ones are counted from the least one
MOST_EXACT_NS = 1 << 53
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_trace(path: Path, passes: str | Sequence[str] = (), report: Report = None) -> Trace:
    """Read the trace in a run's folder, a trace file, or a folder of a profiler's files.

    `passes`: regular expressions for the names of a profiler's ranges and functions, with groups as
    in `trace.pass_names`; `report`: takes a line for each 100 MB of JSON that are read. Raise
    `BadInput` if there is no readable trace or it has no events.
    """
    patterns = compile_patterns(passes)
    if path.suffix == PVTI:
        return read_pvti(path)
    files = _find_files(path)
    if all(_is_native(file) for file in files):
        traces = []
        bytes_left = MOST_BYTES
        for file in files:
            traces.append(read_store(file, bytes_left))
            # the limit is of all ranks' files together
            bytes_left -= sum(column.nbytes for column in traces[-1].events)
        trace = merge_traces(traces)
    else:
        trace = _read_json_files(files, patterns, report)
    if not len(trace.events.start):
        raise BadInput(f"{path}: contains no events: there is nothing to analyze")
    return trace


def merge_traces(traces: Sequence[Trace]) -> Trace:
    """Merge traces with a common time origin, such as one for each rank.

    The first trace's metadata win; the result is modelled if any is.
    """
    if len(traces) == 1:
        return traces[0]
    # reversed, so that the first trace's values are written last
    metadata = {key: value for trace in reversed(traces) for key, value in trace.metadata.items()}
    if any(trace.metadata.get("modelled") for trace in traces):
        # a simulated time must not pass for a measured one
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
    # a run's folder, or one that holds its traces
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
    # a damaged file of ours is reported by its own reader, not as bad JSON
    if begin == MAGIC or path.suffix == SUFFIX:
        return True
    if path.suffix == ".et":
        raise BadInput(f"{path}: {CHAKRA}")
    text = begin[len(BYTE_ORDER_MARK) :] if begin.startswith(BYTE_ORDER_MARK) else begin
    if begin[:2] != GZIP and text.lstrip()[:1] not in (b"{", b"["):
        what = f"must be ipu_pipe's (*{SUFFIX}) or a Chrome trace in JSON, plain or gzipped"
        raise BadInput(f"{path}: is {'not a trace' if begin else 'empty'}: {what}")
    return False


# ---- Chrome JSON


def _read_json_files(files: Sequence[Path], patterns: Patterns, report: Report) -> Trace:
    """Read one or several files of ours, or PyTorch's profiler's, one per rank."""
    ours: list[Trace] = []
    profiled: list[RankRecords] = []
    # without patterns of the user's none is expected to match
    names_passes = not patterns
    labels: set[str] = set()
    for path in files:
        records = _Records(path, patterns)
        try:
            # a record is taken as soon as it is parsed, so that millions of dictionaries are never
            # in memory
            keys, cut_at = parse_records(path, records.take, MOST_TEXT, report)
        except (OSError, EOFError, zlib.error) as error:
            # a damaged gzip header raises an OSError without an errno
            raise BadInput(
                f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from None
        except RecursionError:
            raise BadInput(
                f"{path}: cannot be read as a Chrome trace: is nested too deeply"
            ) from None
        # a `BadInput` is a ValueError, and names the place already
        except BadInput:
            raise
        except ValueError as error:
            raise BadInput(f"{path}: cannot be read as a Chrome trace: {error}") from None
        # a trace of ours may have no events, but it has our metadata
        if records.is_ours or (records.is_ours is None and "otherData" in keys):
            if cut_at >= 0:
                raise BadInput(f"{path}: ends at byte {cut_at}, before the trace does")
            ours.append(records.build_trace(keys))
            continue
        first, *others = records.profiler.finish(path, keys)
        names_passes |= records.profiler.names_passes
        labels |= records.profiler.labels
        if cut_at >= 0:
            note = f"breaks off (byte {cut_at} of its text), and is read as far as it goes"
            first = first._replace(notes=(note, *first.notes))
        profiled += [first, *others]
    if ours and profiled:
        raise BadInput(
            f"{profiled[0].path}: is not of ipu_pipe, as other files of {files[0].parent} are: "
            f"give one file"
        )
    if profiled and not names_passes:
        listed = f"its ranges are {list_some(sorted(labels))}" if labels else "it has no ranges"
        texts = " ".join(pattern.pattern for pattern in patterns)
        raise BadInput(f"--passes: {texts}: names no pass of {files[0]}: {listed}")
    return merge_traces(ours) if ours else merge_profiler_files(profiled)


class _Records:
    """The records of one file. The first event says whether they are ours or the profiler's
    (`is_ours`; None: no event).
    """

    def __init__(self, path: Path, patterns: Patterns) -> None:
        self.is_ours: bool | None = None
        self.profiler = ProfilerRecords(patterns)
        self._path = path
        self._parts: list[Events] = []
        self._rows: list[tuple[Any, ...]] = []
        self._packed = 0
        self._counters: list[Counter] = []

    def take(self, record: dict[str, Any]) -> None:
        """Take a record."""
        # a profiler's file has a million of them
        if self.is_ours is False:
            self.profiler.take(record)
            return
        phase = record.get("ph")
        # not by records of metadata, which both have
        if self.is_ours is None and phase in ("X", "B"):
            args = record.get("args")
            is_kind = isinstance(record.get("cat"), str) and record["cat"] in ev.KIND_CODE
            self.is_ours = is_kind and isinstance(args, dict) and "stage" in args
        if not self.is_ours:
            self.profiler.take(record)
        elif phase == "X":
            self._rows.append(self._read_row(record))
        if phase == "C":
            self._take_counter(record)
        if len(self._rows) == BATCH:
            self._pack()

    def _read_row(self, record: dict[str, Any]) -> tuple[Any, ...]:
        """Return the columns of one event of ours, its duration in the place of its end."""
        try:
            args = record["args"]
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
        except (KeyError, TypeError, AttributeError) as error:
            what = f"{error.args[0]!r} is missing or unknown" if error.args else "has no args"
            return self._reject(
                len(self._rows), what if isinstance(error, KeyError) else "args: must be an object"
            )

    def _reject(self, row: int, what: str) -> NoReturn:
        raise BadInput(f"{self._path}: event {self._packed + row}: {what}")

    def _take_counter(self, record: dict[str, Any]) -> None:
        try:
            (time,) = _build_times([record["ts"]]).tolist()
            (device,) = _build_integers([record["pid"]], np.int32).tolist()
            for name, value in record["args"].items():
                # memory has its categories in one record, any other counter a `value`
                name = str(record["name"] if name == "value" else name)
                self._counters.append(
                    Counter(device, name, time, float("nan" if value is None else value))
                )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else error
            raise BadInput(f"{self._path}: counter {len(self._counters)}: {what}") from None

    def _pack(self) -> None:
        """Make the rows that were taken into columns."""
        columns: dict[str, Any] = dict(zip(ev.EVENT_TYPES, zip(*self._rows)))
        if columns:
            try:
                start = _build_times(columns.pop("start"))
                end = start + _build_times(columns.pop("end"))
                integers = {
                    name: _build_integers(column, ev.EVENT_TYPES[name])
                    for name, column in columns.items()
                }
            except (ValueError, OverflowError):
                # columns are checked at once, and row by row only to name the fault
                self._locate_error()
            self._parts.append(Events(start=start, end=end, **integers))
        self._packed += len(self._rows)
        self._rows = []

    def _locate_error(self) -> NoReturn:
        """Raise `BadInput` for the first row that cannot be made into columns."""
        keys = {"start": "ts", "end": "dur", "device": "pid", "kind": "cat"}
        for row, values in enumerate(self._rows):
            for name, value in zip(ev.EVENT_TYPES, values):
                try:
                    if name in ("start", "end"):
                        _build_times([value])
                    else:
                        _build_integers([value], ev.EVENT_TYPES[name])
                except (ValueError, OverflowError) as error:
                    self._reject(row, f"{keys.get(name, name)}: {show(value)}: {error}")
        # every row is right by itself
        self._reject(0, "must have numbers of one type")

    def build_trace(self, keys: dict[str, Any]) -> Trace:
        """Return the trace that `write_chrome` wrote. Raise `BadInput` if it did not write it."""
        self._pack()
        metadata = keys.get("otherData", {})
        if not isinstance(metadata, dict):
            raise BadInput(f"{self._path}: otherData: {show(metadata)}: must be an object")
        trace = Trace(
            ev.concatenate_events(self._parts), Counters.from_rows(self._counters), metadata
        )
        ev.check_trace(self._path, *trace[:3])
        return trace


def _build_integers(values: Sequence[Any], kind: Any) -> NDArray[Any]:
    """Return integers as a column of the type `kind`. Raise ValueError for values that are not
    integers or do not fit.
    """
    column = np.array(values)
    if (
        column.dtype.kind not in "iu"
        or column.ndim != 1
        # a cast wraps what does not fit, without an error
        or not np.array_equal(column, column.astype(kind))
    ):
        raise ValueError(f"must be a whole number of {np.dtype(kind)}")
    return column.astype(kind)


def _build_times(microseconds: Sequence[Any]) -> NDArray[np.int64]:
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
        raise ValueError(f"must be a number of microseconds, below {ev.FARTHEST_NS // 1000:.0e}")
    return np.rint(column.astype(np.float64) * 1000).astype(np.int64)


# ---- the files of PyTorch's profiler, one per rank

NOTE = (
    "PyTorch's profiler: it does not record microbatches, versions and waits as such; a wait inside "
    "a collective is within its communication, except among the replicas of a stage"
)


def merge_profiler_files(files: Sequence[RankRecords]) -> Trace:
    """Return one trace of all ranks; times count from the first file's base, or from the least one
    where a float64 would not hold them exactly.

    Raise `BadInput` for two files of one rank, ranks of different runs, a base that is not an
    integer, and files without events.
    """
    first_path = files[0].path
    notes = [NOTE]
    ranks = _find_ranks(files, notes)
    size = _compare_sizes(files, notes)
    files, ranks = _number_devices(files, ranks, notes)
    files, shifted = _shift_to_one_clock(files)
    notes += shifted
    if not any(len(of_rank.events.start) for of_rank in files):
        reasons = _gather_notes(files)
        because = f" ({list_some(reasons, 2)})" if reasons else ""
        raise BadInput(
            f"{first_path}: contains neither events of ipu_pipe nor kernels or operations of "
            f"PyTorch's profiler{because}"
        )
    _compare_spans(files)
    pipeline = find_pipeline(ranks, files)
    notes += pipeline.notes
    # else a rank that waits for another one's compute would be told to send less
    events, why_no_waits = _tell_waits(pipeline.events, ranks, files)
    if why_no_waits is None:
        events = split_collectives(events, pipeline.replicas)
    if why_no_waits:
        notes.append(f"how much of the messages is waiting is not known: {why_no_waits}")
    notes += _gather_notes(files)
    empty = [of_rank.path.name for of_rank in files if not len(of_rank.events.start)]
    if empty:
        notes.append(f"{list_some(empty)}: contains no kernel and no operation")
    counters = [
        of_rank.counters._replace(device=np.full_like(of_rank.counters.device, rank))
        for rank, of_rank in zip(ranks, files)
    ]
    metadata = {
        "backend": "PyTorch profiler",
        "modelled": False,
        "accumulate": pipeline.microbatches,
        "ranks": size,
        "why_no_waits": why_no_waits,
        # a message of the host ends when it is waited for, not when it has arrived
        "messages_end_late": not any(of_rank.on_device for of_rank in files),
        "hosts": len({str(of_rank.keys.get("host_name", "")) for of_rank in files}),
    }
    trace = Trace(events, ev.concatenate_counters(counters), metadata, tuple(notes))
    ev.check_trace(first_path.parent, *trace[:3])
    return trace


def _gather_notes(files: Sequence[RankRecords]) -> list[str]:
    """Return what is noted of files, once for those of which it is the same."""
    names: dict[str, list[str]] = {}
    for of_rank in files:
        for note in of_rank.notes:
            names.setdefault(note, []).append(of_rank.path.name)
    return [f"{list_some(of, 2)}: {note}" for note, of in names.items()]


def _find_ranks(files: Sequence[RankRecords], notes: list[str]) -> list[int]:
    # a file of several devices has several records, and one rank
    keys = {of_rank.path: of_rank.keys for of_rank in files}
    named = [find_rank(path, of_file) for path, of_file in keys.items()]
    ranks = [rank for rank in named if rank is not None]
    if len(ranks) < len(keys):
        ranks = [*range(len(keys))]
        if len(keys) > 1:
            notes.append(
                "the files do not name their ranks, so they are numbered in the order of their "
                "names"
            )
    paths: dict[int, list[str]] = {}
    for rank, path in zip(ranks, keys):
        paths.setdefault(rank, []).append(str(path))
    for rank, same in sorted(paths.items()):
        if len(same) > 1:
            raise BadInput(f"{', '.join(same)}: are all of rank {rank}: must be one file a rank")
    rank_of = dict(zip(keys, ranks))
    return [rank_of[of_rank.path] for of_rank in files]


def _number_devices(
    files: Sequence[RankRecords], ranks: list[int], notes: list[str]
) -> tuple[Sequence[RankRecords], list[int]]:
    """Return the records and the number of each device: its rank, unless a process has several."""
    count = 1 + max(of_rank.device for of_rank in files)
    if count == 1:
        return files, ranks
    notes.append(
        f"a process has several devices: device {count} x rank + n is the n-th one of a rank"
    )
    numbered = []
    for of_rank in files:
        peer = of_rank.events.peer
        # a peer is named by its rank, for which its first device stands
        peer = np.where(peer >= 0, count * peer, peer).astype(np.int32)
        numbered.append(of_rank._replace(events=of_rank.events._replace(peer=peer)))
    return numbered, [count * rank + f.device for rank, f in zip(ranks, files)]


def _compare_sizes(files: Sequence[RankRecords], notes: list[str]) -> int | None:
    """Return the number of ranks of the run, None if not known, and note that there are fewer
    files. Raise `BadInput` for files whose runs have different numbers of ranks.
    """
    sizes: dict[int, Path] = {}
    for of_rank in files:
        info = of_rank.keys.get("distributedInfo")
        size = info.get("world_size") if isinstance(info, dict) else None
        if isinstance(size, int) and 0 < size < 1 << 30:
            sizes.setdefault(size, of_rank.path)
    if len(sizes) > 1:
        listed = ", ".join(f"{path.name} of {size} ranks" for size, path in sorted(sizes.items()))
        raise BadInput(
            f"{files[0].path.parent}: holds ranks of different runs ({listed}): give each run a "
            f"folder"
        )
    count = len({of_rank.path for of_rank in files})
    if max(sizes, default=0) > count:
        notes.append(
            f"the trace has {count} of {max(sizes)} ranks: who waits for the others is not known"
        )
    return max(sizes, default=None)


def _compare_spans(files: Sequence[RankRecords]) -> None:
    """Raise `BadInput` for ranks of one host that ran one after the other: they are of different
    runs.
    """
    hosts: dict[str, list[tuple[int, int, Path]]] = {}
    for of_rank in files:
        if len(of_rank.events.start):
            begin = int(of_rank.events.start.min())
            end = int(of_rank.events.end.max())
            host = str(of_rank.keys.get("host_name", ""))
            hosts.setdefault(host, []).append((begin, end, of_rank.path))
    # by host: clocks of different hosts may be apart without harm
    for spans in hosts.values():
        first = min(spans, key=lambda span: span[1])
        last = max(spans)
        longest = max(end - begin for begin, end, _ in spans)
        # a shorter gap may be a rank that began late
        if last[0] - first[1] > longest:
            raise BadInput(
                f"{first[2].parent}: holds ranks of different runs ({first[2].name} ends before "
                f"{last[2].name} begins): give each run a folder"
            )


def _shift_to_one_clock(
    files: Sequence[RankRecords],
) -> tuple[list[RankRecords], list[str]]:
    """Return the records of all files by the first one's base, and notes. Times are whole numbers
    of any size until the least one has been subtracted.
    """
    bases = [of_rank.keys.get("baseTimeNanoseconds") for of_rank in files]
    known = [base for base in bases if base is not None]
    # nanoseconds since 1970 are more than FARTHEST_NS, and stay below its fourfold until 2116
    if not all(type(base) is int and abs(base) < ev.FARTHEST_NS * 4 for base in known):
        raise BadInput(
            f"{files[0].path}: baseTimeNanoseconds: {show(known[0])}: must be a whole number of "
            f"nanoseconds in every file"
        )
    notes = []
    if known and len(known) < len(bases):
        notes.append("some files have no baseTimeNanoseconds, and are taken to have the others'")
    first_base = next((base for base in bases if base is not None), 0)
    # Python's integers: a time and a shift together may not fit into int64
    shifts = [0 if base is None else base - first_base for base in bases]
    least = []
    most = []
    for of_rank, shift in zip(files, shifts):
        columns = (of_rank.events.start, of_rank.events.end)
        if len(columns[0]):
            least.append(int(columns[0].min()) + shift)
            most.append(max(-least[-1], int(columns[1].max()) + shift))
    is_exact = max(most, default=0) < MOST_EXACT_NS
    origin = 0 if is_exact else min(least)
    if max(most, default=0) - origin >= ev.FARTHEST_NS:
        path = files[0].path if len(files) == 1 else files[0].path.parent
        raise BadInput(f"{path}: its times lie more than {ev.FARTHEST_NS // 10**9:.0e} s apart")
    moved = []
    for of_rank, shift in zip(files, shifts):
        if shift != origin:
            events, ranges = (
                part._replace(start=part.start + (shift - origin), end=part.end + (shift - origin))
                for part in (of_rank.events, of_rank.ranges)
            )
            counters = of_rank.counters._replace(time=of_rank.counters.time + (shift - origin))
            launched = None if of_rank.launched is None else of_rank.launched + (shift - origin)
            of_rank = of_rank._replace(
                events=events, ranges=ranges, counters=counters, launched=launched
            )
        moved.append(of_rank)
    return moved, notes


def _tell_waits(
    events: Events, ranks: Sequence[int], files: Sequence[RankRecords]
) -> tuple[Events, str | None]:
    """Return the events with their waits, and the reason why some messages are not divided."""
    matches = match_messages(events)
    if not len(matches.sends):
        has_messages = events.is_kind("send", "recv").any()
        return events, "no receive could be matched with its send" if has_messages else None
    names = [str(of_rank.keys.get("host_name", "")) for of_rank in files]
    hosts = dict(zip(ranks, names))
    offsets = estimate_offsets(events, matches, hosts)
    if offsets is None:
        return (
            events,
            "ranks on several hosts have messages in one direction alone, which do not tell how "
            "much their clocks differ",
        )
    if any(offsets.values()):
        shift = np.zeros(max(ranks) + 1, np.int64)
        shift[[*offsets]] = [*offsets.values()]
        moved = shift[events.device]
        events = events._replace(start=events.start + moved, end=events.end + moved)
    why = f"{matches.unmatched} of the sends and receives have no other end in the trace"
    # the host's records of a message end with its call to wait
    ends_late = not any(of_rank.on_device for of_rank in files)
    return split_waits(events, matches, ends_late), why if matches.unmatched else None
