"""Read the records of PyTorch's profiler (Kineto), one file a rank: which are compute, which are
communication, and which are ranges that name a pass of a pipeline.

Where a rank used an accelerator, its time is that of kernels and copies; else that of the host's
operations, of which only the outermost ones count. A record whose time cannot be used is left out
and counted.

    ranges     PP:2F0, Forward 3, ...      |---- pass ----|         `RankRecords.ranges`
    compute    kernels, or operations        |--| |-----|           `RankRecords.events`
    calls      c10d::recv_               |-|              |-|
    messages   gloo:recv, or any label    |-----|          |-----|

A message of the host is a range of any name, such as one of `dist.record_comm`, that begins inside
the call that posts it: the call says what it is.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter as Tally
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.schedule.actions import Kind
from ipu_pipe.trace import events as ev
from ipu_pipe.trace.events import (
    ALLOCATED,
    KIND_CODE,
    PAYLOAD_CODE,
    Counter,
    Counters,
    Events,
    group_indices,
)
from ipu_pipe.trace.json_records import Record, read_time
from ipu_pipe.trace.pass_names import Patterns, find_pass

# the categories of today's Kineto, of torch 1.x (with a capital), and of other accelerators
ON_DEVICE = re.compile(r"(concurrent_)?kernel|(gpu_)?mem(cpy|set)|mtia_ccp_events", re.IGNORECASE)
ON_HOST = ("cpu_op", "Operator")
RANGES = ("user_annotation", "gpu_user_annotation")
# Python's own functions, where stacks are recorded
FUNCTIONS = "python_function"
# the host's calls that launch the kernels of an accelerator
LAUNCHES = ("cuda_runtime", "cuda_driver", "xpu_runtime", "mtia_runtime")
MEMORY_RECORD = "[memory]"
# nccl, rccl, ncclx, oneccl and ccl, xccl, hccl, msccl; hcom is Ascend's
COMMUNICATES = re.compile(
    r"(?<![a-z])(n|r|x|h|ms|one)?ccl|gloo:|c10d(_functional)?::|record_param_comms|hcom_|ucc:|\bmpi[:_]",
    re.IGNORECASE,
)
# the calls that post messages
CALLS = ("c10d::", "_c10d_functional::", "record_param_comms")
DIRECTIONS = (
    (re.compile("all_?|reduce|sendrecv", re.IGNORECASE), ev.COLLECTIVE),
    (re.compile("send|DtoH|PtoP", re.IGNORECASE), "send"),
    (re.compile("recv|HtoD", re.IGNORECASE), "recv"),
)
# nccl:send 0->1, nccl:recv 1<-0: ranks within the process group
_PEER_IN_NAME = re.compile(r"(?:->|<-)(\d{1,6})$")
_BACKWARD = "autograd::engine::evaluate_function"
_LOADER = "enumerate(DataLoader)#"
_OPTIMIZER = re.compile(r"Optimizer\.step#")
_TYPES_BY_BYTES = {
    1: "byte char bool float8",
    2: "half bfloat16 short",
    4: "float int",
    8: "double long",
}
_TYPE_BYTES = {name: size for size, names in _TYPES_BY_BYTES.items() for name in names.split()}

# DualPipeV runs a forward and a backward in one range
_OVERLAPPED = re.compile(r"PP:\((\d{1,6}F\d{1,6});(\d{1,6}B\d{1,6})\)OVERLAP_F_B")
# of a record: on a device, on the host, or a range of either, or a host's range of unknown name
DEVICE = 0
HOST = 1
DEVICE_RANGE = 2
HOST_RANGE = 3
LABEL = 4
# columns of a record
PLACE, KIND, START, END, TRACK, STAGE, MICROBATCH, BYTES, PEER, CARRIES, IS_BACKWARD, IS_CALL = (
    range(12)
)
# of an accelerator's files whose host's ranges name passes
LAUNCHED = 12
BATCH = 1 << 14
# a device with less than a 20th of the kernels of the busiest one is not a process's own
MOST_TOUCHED = 20
MOST_LABELS = 100
# how far away a time of 0 is taken for a missing one, as a multiple of the trace's span
FAR = 100


class Meaning(NamedTuple):
    """What a record's category and name say. `stage` and `microbatch` are -1 if not named."""

    place: int
    kind: int
    stage: int = -1
    microbatch: int = -1
    peer: int = -1
    carries: int = 0
    is_backward: bool = False
    is_call: bool = False
    # of a range around two passes: the other one
    twin: Any = None


class RankRecords(NamedTuple):
    """The records of one device in a file. `events`: compute and messages, of the file's own clock;
    `ranges`: the named passes and messages. `is_backward`: whether an event is an operation of
    autograd's backward; `is_call`: whether it is the call that posts a message. `on_device`:
    whether they are of an accelerator, of which `device` is the number in its process. A peer below
    -1 is of a rank within an unnamed process group, see `encode_local`. `notes`: about the file,
    without its name; `launched`: when the host launched each event, where the ranges are the host's
    and the events an accelerator's.
    """

    path: Path
    keys: dict[str, Any]
    events: Events
    is_backward: NDArray[np.bool_]
    is_call: NDArray[np.bool_]
    ranges: Events
    counters: Counters
    on_device: bool
    notes: tuple[str, ...]
    device: int = 0
    launched: NDArray[np.int64] | None = None


def encode_local(rank: Any) -> Any:
    """Return the peer that stands for a rank within a process group; its own inverse."""
    return -2 - rank


@functools.lru_cache(maxsize=1 << 16)
def identify(category: str, name: str, patterns: Patterns) -> Meaning | None:
    """Return the meaning of a record; None if it says nothing of the time of a device. Names
    repeat, so each is parsed once.

    `patterns`: the user's, for names of passes.
    """
    if category == FUNCTIONS:
        return _identify_range(category, name, patterns)
    communicates = COMMUNICATES.search(name) is not None
    if category in RANGES:
        named = _identify_range(category, name, patterns)
        if named is not None or category != RANGES[0]:
            return named
        if name.startswith(_LOADER):
            return Meaning(HOST, KIND_CODE[ev.WAIT], carries=PAYLOAD_CODE["data"])
        if not communicates:
            return Meaning(LABEL, KIND_CODE[ev.UNSPECIFIED])
    on_device = ON_DEVICE.fullmatch(category) is not None
    if not on_device and category not in (*ON_HOST, *RANGES):
        return None
    if category == "Operator" and _OPTIMIZER.match(name):
        return Meaning(HOST_RANGE, KIND_CODE[Kind.UPDATE.word])
    # copies between the host and a device
    communicates |= "memcpy" in category.lower() and "DtoD" not in name
    kind = ev.UNSPECIFIED
    if communicates:
        kind = next(
            (direction for pattern, direction in DIRECTIONS if pattern.search(name)), ev.COLLECTIVE
        )
    peer = _PEER_IN_NAME.search(name) if communicates else None
    return Meaning(
        DEVICE if on_device else HOST,
        KIND_CODE[kind],
        peer=encode_local(int(peer.group(1))) if peer else -1,
        is_backward=name.startswith(_BACKWARD),
        is_call=name.startswith(CALLS),
    )


def _identify_range(category: str, name: str, patterns: Patterns) -> Meaning | None:
    """Return the pass or message that a range or function names; None if it names neither."""
    place = DEVICE_RANGE if category == RANGES[1] else HOST_RANGE
    if _OPTIMIZER.match(name):
        return Meaning(place, KIND_CODE[Kind.UPDATE.word])
    pair = _OVERLAPPED.fullmatch(name)
    if pair is not None:
        forward, backward = (
            _identify_range(category, f"PP:{part}", patterns) for part in pair.groups()
        )
        return None if forward is None else forward._replace(twin=backward)
    named = find_pass(name, category == FUNCTIONS, patterns)
    if named is None:
        return None
    kind = KIND_CODE[named.kind]
    return Meaning(place, kind, named.stage, named.microbatch, carries=PAYLOAD_CODE[named.carries])


class ProfilerRecords:
    """The records of one file, taken one by one."""

    def __init__(self, patterns: Patterns = ()) -> None:
        self._patterns = patterns
        # some names that say nothing, for a message about the user's patterns
        self.labels: set[str] = set()
        self._rows: list[tuple[Any, ...]] = []
        self._parts: list[NDArray[np.int64]] = []
        self._counters: list[Counter] = []
        self._tracks: dict[Any, int] = {}
        self._open: dict[int, list[tuple[Record, int]]] = {}
        self._on_device = False
        # whether the host's ranges name passes, and then the launches of kernels: number, time
        self.names_passes = False
        self._launches: list[tuple[int, int]] = []
        # records by category, and those left out by category and reason
        self._count: Tally[str] = Tally()
        self._left_out: Tally[tuple[str, str]] = Tally()

    def take(self, record: Record) -> None:
        """Take a record."""
        phase = record.get("ph")
        if phase == "X":
            self._take_complete(record)
        elif phase in ("B", "E"):
            self._take_half(record, phase)
        elif phase in ("i", "I") and record.get("name") == MEMORY_RECORD:
            self._take_memory(record)

    def _take_complete(self, record: Record) -> None:
        category = str(record.get("cat", ""))
        meaning = identify(category, str(record.get("name", "")), self._patterns)
        if meaning is None:
            if self.names_passes and category in LAUNCHES:
                self._take_launch(record)
            return
        self._count[category] += 1
        key = "name"
        try:
            # without a name it is as damaged as without a time
            record[key]
            key = "ts"
            start = read_time(record[key])
            key = "dur"
            duration = read_time(record[key])
        except KeyError:
            self._leave_out(category, f"{key} is missing")
            return
        except ValueError:
            self._leave_out(category, f"{key} is not a number of microseconds")
            return
        if duration < 0:
            self._leave_out(category, "dur is negative")
        else:
            self._add(record, meaning, start, start + duration)

    def _take_launch(self, record: Record) -> None:
        try:
            number = record["args"]["correlation"]
            if type(number) is int and 0 < number < 1 << 31:
                self._launches.append((number, read_time(record["ts"])))
        except (KeyError, TypeError, ValueError, OverflowError):
            pass

    def _take_half(self, record: Record, phase: str) -> None:
        """Join a begin and the next end on its track to one record."""
        # the records of a track are nested, so that an end belongs to the begin before it
        begun = self._open.setdefault(self._number_track(record), [])
        try:
            time = read_time(record.get("ts"))
        except ValueError:
            self._leave_out(str(record.get("cat", "")), "ts is not a number of microseconds")
            return
        if phase == "B":
            begun.append((record, time))
            return
        if not begun:
            self._leave_out(str(record.get("cat", "")), "an end has no begin")
            return
        record, start = begun.pop()
        category = str(record.get("cat", ""))
        meaning = identify(category, str(record.get("name", "")), self._patterns)
        if meaning is not None:
            self._count[category] += 1
            if time < start:
                self._leave_out(category, "dur is negative")
            else:
                self._add(record, meaning, start, time)

    def _take_memory(self, record: Record) -> None:
        args = record.get("args")
        total = args.get("Total Allocated") if isinstance(args, dict) else None
        try:
            if isinstance(total, (int, float)):
                time = read_time(record.get("ts"))
                # the allocator of the host, and those of devices, which are counted together
                on_device = int(args.get("Device Type", 0) != 0)  # type: ignore[union-attr]
                self._counters.append(Counter(on_device, ALLOCATED, time, float(total)))
        except (ValueError, OverflowError):
            pass

    def _leave_out(self, category: str, reason: str) -> None:
        self._left_out[category, reason] += 1

    def _number_track(self, record: Record) -> int:
        track = record.get("pid"), record.get("tid")
        try:
            return self._tracks.setdefault(track, len(self._tracks))
        except TypeError:
            # a list or an object
            return self._tracks.setdefault(str(track), len(self._tracks))

    def _add(self, record: Record, meaning: Meaning, start: int, end: int) -> None:
        # the busy time of an accelerator includes only its kernels
        if meaning.place == DEVICE and not self._on_device:
            self._on_device = True
            # from the first kernel on the host's operations no longer count, also those before it
            self._rows = [row for row in self._rows if row[PLACE] != HOST or row[KIND] == _WAIT]
            self._parts = [
                part[(part[:, PLACE] != HOST) | (part[:, KIND] == _WAIT)] for part in self._parts
            ]
        kind = meaning.kind
        if meaning.place == HOST and self._on_device and kind != _WAIT:
            return
        peer = meaning.peer
        size = -1
        # a label may turn out to be a message (`_name_labels`)
        if kind in _MESSAGE_CODES or meaning.place == LABEL:
            kind, peer, size = _read_message(record.get("args"), meaning)
            if self._patterns and meaning.place == LABEL and len(self.labels) < MOST_LABELS:
                self.labels.add(str(record.get("name")))
        track = self._number_track(record)
        microbatch = meaning.microbatch
        if meaning.place in (DEVICE_RANGE, HOST_RANGE) and kind != _UPDATE:
            self.names_passes = True
        elif self.names_passes and meaning.place == DEVICE:
            # the number of its launch, in the place of a microbatch that no kernel names
            microbatch = _read_correlation(record.get("args"))
        self._rows.append(
            (meaning.place, kind, start, end, track, meaning.stage, microbatch)
            + (size, peer, meaning.carries, meaning.is_backward, meaning.is_call)
        )
        if len(self._rows) == BATCH:
            self._pack()
        if meaning.twin is not None:
            self._add(record, meaning.twin, start, end)

    def _pack(self) -> None:
        if self._rows:
            # packed: a tuple of Python's integers takes several times the memory of a row
            self._parts.append(np.array(self._rows, np.int64))
            self._rows = []

    def finish(self, path: Path, keys: dict[str, Any]) -> list[RankRecords]:
        """Return all records as columns, those of each accelerator of the process alone."""
        self._pack()
        nothing = np.zeros((0, IS_CALL + 1), np.int64)
        # `nothing` keeps the columns where there is no record
        rows = np.concatenate([nothing, *self._parts])
        self._parts = []
        for begun in self._open.values():
            for record, _ in begun:
                self._leave_out(str(record.get("cat", "")), "a begin has no end")
        is_zero = _find_zero_times(rows)
        if is_zero.any():
            self._left_out["all", "their ts is 0, far from all others"] = int(is_zero.sum())
            rows = rows[~is_zero]
        if len(rows):
            # a call has calls inside, as c10d::send has record_param_comms
            rows, _ = _keep_outermost(rows, rows[:, IS_CALL] > 0)
            rows = _name_labels(rows)
            # one damaged duration of 10 s would make a device busy all of the time
            self._left_out["all", "run over the next"] = _cut_kernels(rows)
            is_compute = (rows[:, PLACE] <= HOST) & (rows[:, KIND] == _COMPUTE)
            rows, self._left_out["all", "clipped"] = _keep_outermost(rows, is_compute)
        notes = [*self._describe_left_out()]
        is_range = rows[:, PLACE] >= DEVICE_RANGE
        on_device = self._on_device
        rows, has_launches = self._add_launches(rows)
        # the accelerator's own ranges, unless its launches tell in which of the host's they are
        place = DEVICE_RANGE if on_device and not has_launches else HOST_RANGE
        is_range_of_place = rows[:, PLACE] == place
        if len(rows) and not is_range.all() and not on_device:
            notes.append("no kernels: the host's operations are taken")
        # the counters of all devices are one sum, of the first one
        counters = Counters.from_rows(c for c in self._counters if c.device == on_device)
        parts = []
        for device, events in enumerate(self._divide_devices(rows[~is_range])):
            of_device = RankRecords(
                path,
                keys,
                _make_events(events),
                events[:, IS_BACKWARD] > 0,
                events[:, IS_CALL] > 0,
                _make_events(rows[is_range_of_place]),
                counters._replace(device=np.zeros_like(counters.device)),
                on_device,
                tuple(notes),
                device,
                events[:, LAUNCHED] if has_launches else None,
            )
            parts.append(of_device)
            counters = Counters.from_rows([])
            notes = []
        return parts

    def _add_launches(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], bool]:
        """Return the rows with a column of the times at which the host launched them, and whether
        these are known. They lie in the host's ranges, whichever thread launched a kernel.
        """
        is_kernel = rows[:, PLACE] == DEVICE
        number = np.where(is_kernel, rows[:, MICROBATCH], -1)
        rows[is_kernel, MICROBATCH] = -1
        launches = np.array(self._launches, np.int64).reshape(-1, 2)
        launches = launches[np.argsort(launches[:, 0], kind="stable")]
        place = np.searchsorted(launches[:, 0], number)
        # -2, which is no number, stands behind the last one
        known = np.append(launches[:, 0], -2)[place] == number
        if not known.any():
            return rows, False
        # what was launched before the trace began is in no range
        launched = np.where(is_kernel, -ev.FARTHEST_NS, rows[:, START])
        launched[known] = launches[place[known], 1]
        return np.column_stack([rows, launched]), True

    def _divide_devices(self, rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return the rows of each accelerator of the process. One with few kernels, such as of a
        process that touched another's device, is not taken for one.
        """
        # Kineto's process of a kernel is the number of its device
        device_of_track = np.array(
            [pid if type(pid) is int and 0 <= pid < 1 << 20 else 0 for pid, *_ in self._tracks]
        )
        is_kernel = (rows[:, PLACE] == DEVICE) & (rows[:, KIND] == _COMPUTE)
        kernels = device_of_track[rows[is_kernel, TRACK]] if is_kernel.any() else rows[:0, TRACK]
        numbers, counts = np.unique(kernels, return_counts=True)
        numbers = numbers[counts * MOST_TOUCHED >= counts.max(initial=0)]
        if len(numbers) < 2:
            return [rows]
        device = device_of_track[rows[:, TRACK]]
        # what is of no such device, such as a wait of the host, is of the first one
        device = np.where(np.isin(device, numbers), device, numbers[0])
        return [rows[device == number] for number in numbers]

    def _describe_left_out(self) -> list[str]:
        total = sum(self._count.values())
        notes = []
        # the plus leaves out counts of 0
        for (category, reason), count in sorted((+self._left_out).items()):
            what = f"{category!r} records" if category != "all" else "records"
            among = self._count[category] if category != "all" else total
            if reason == "clipped":
                notes.append(
                    f"{count} of {total} records overlap an earlier one on their "
                    f"track, and begin where it ends"
                )
            elif reason == "run over the next":
                notes.append(
                    f"{count} of {total} records run over the next one on their "
                    f"stream, and are cut where it begins"
                )
            else:
                notes.append(
                    f"{count} of {max(among, count)} {what} are not read, because {reason}"
                )
        return notes


def _read_correlation(args: Any) -> int:
    number = args.get("correlation") if isinstance(args, dict) else None
    return number if type(number) is int and 0 < number < 1 << 31 else -1


_MESSAGE_CODES = {KIND_CODE[kind] for kind in ("send", "recv", ev.COLLECTIVE)}
_WAIT = KIND_CODE[ev.WAIT]
_COMPUTE = KIND_CODE[ev.UNSPECIFIED]
_UPDATE = KIND_CODE[Kind.UPDATE.word]


def _read_message(args: Any, meaning: Meaning) -> tuple[int, int, int]:
    """Return a message's kind, peer and bytes, as NCCL's metadata or the recorded inputs of an
    operation say them; -1 where they do not.
    """
    kind = meaning.kind
    peer = meaning.peer
    size = -1
    if not isinstance(args, dict):
        return kind, peer, size
    collective = args.get("Collective name")
    if collective in ("send", "recv"):
        kind = KIND_CODE[collective]
    for word, key in (("send", "Dst Rank"), ("recv", "Src Rank")):
        if kind == KIND_CODE[word] and str(args.get(key, "")).isdigit():
            # a damaged file may have any number of digits
            peer = int(str(args[key])[:6])
    elements = args.get("In msg nelems") or args.get("Out msg nelems")
    width = _TYPE_BYTES.get(str(args.get("dtype", "")).lower())
    # a damaged number must fit into int64
    if isinstance(elements, int) and width and 0 <= elements < 1 << 50:
        size = elements * width
    if size < 0:
        size = _read_size(args.get("Input Dims"), args.get("Input type"))
    inputs = args.get("Concrete Inputs")
    # c10d::send(tensors, group, peer, tag), where shapes are recorded
    if isinstance(inputs, list) and len(inputs) == 4 and str(inputs[2]).isdigit():
        peer = encode_local(int(str(inputs[2])[:6]))
    return kind, peer, size


def _read_size(shapes: Any, types: Any) -> int:
    """Return the bytes of tensors by their recorded shapes and types, -1 if these are not known."""
    try:
        size = sum(_TYPE_BYTES[name] * math.prod(shape) for shape, name in zip(shapes, types))
    except (KeyError, TypeError):
        return -1
    return size if type(size) is int and 0 < size < 1 << 50 else -1


def _find_calls(rows: NDArray[np.int64], wanted: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return for each of the wanted rows the call on its track inside which it begins, -1 without
    one. Calls do not overlap.
    """
    calls = np.flatnonzero(rows[:, IS_CALL])
    calls = calls[np.lexsort((rows[calls, START], rows[calls, TRACK]))]
    call_of_row = np.full(len(wanted), -1)
    for track, places in group_indices(rows[wanted, TRACK]):
        of_track = calls[rows[calls, TRACK] == track]
        start = rows[wanted[places], START]
        place = np.searchsorted(rows[of_track, START], start, side="right") - 1
        places = places[place >= 0]
        call = of_track[place[place >= 0]]
        is_inside = rows[wanted[places], START] <= rows[call, END]
        call_of_row[places[is_inside]] = call[is_inside]
    return call_of_row


def _name_labels(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rows with the host's ranges of unknown name as messages, where they begin inside a
    call. A thread without any operation runs collectives, and its ranges are these.
    """
    ranges = np.flatnonzero((rows[:, PLACE] == LABEL) | (rows[:, PLACE] == HOST_RANGE))
    if not len(ranges):
        return rows
    call = _find_calls(rows, ranges)
    of_call = ranges[call >= 0]
    rows[of_call, KIND] = rows[call[call >= 0], KIND]
    rows[of_call, PLACE] = HOST
    labels = np.flatnonzero(rows[:, PLACE] == LABEL)
    is_collective = (rows[:, KIND] == KIND_CODE[ev.COLLECTIVE]) & (rows[:, IS_CALL] > 0)
    if len(labels) and is_collective.any():
        is_operation = (rows[:, PLACE] == HOST) & (rows[:, KIND] == _COMPUTE)
        of_worker = labels[~np.isin(rows[labels, TRACK], np.unique(rows[is_operation, TRACK]))]
        rows[of_worker, KIND] = KIND_CODE[ev.COLLECTIVE]
        rows[of_worker, PLACE] = HOST
    return rows[rows[:, PLACE] != LABEL]


def _cut_kernels(rows: NDArray[np.int64]) -> int:
    """Cut records of a device where the next one on their stream begins, and count them: the
    kernels of a stream follow one another, so that a longer duration is damaged.
    """
    places = np.flatnonzero(rows[:, PLACE] == DEVICE)
    places = places[np.lexsort((rows[places, START], rows[places, TRACK]))]
    earlier = places[:-1]
    later = places[1:]
    is_same = rows[earlier, TRACK] == rows[later, TRACK]
    runs_over = is_same & (rows[earlier, END] > rows[later, START])
    rows[earlier[runs_over], END] = rows[later[runs_over], START]
    return int(runs_over.sum())


def _find_zero_times(rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return a mask of records that begin at 0 where 0 is no time of the trace: they end FAR times
    as long before all other records as these last together.
    """
    is_zero = rows[:, START] == 0
    others = rows[~is_zero]
    if not is_zero.any() or not len(others):
        return np.zeros(len(rows), bool)
    first = int(others[:, START].min())
    last = int(others[:, END].max())
    return is_zero & (first - rows[:, END] > FAR * (last - first))


def _keep_outermost(
    rows: NDArray[np.int64], is_chosen: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], int]:
    """Drop chosen records inside other ones of their track, and let one that begins inside another
    one and ends after it begin at its end. Return the number of the latter, too.
    """
    chosen = rows[is_chosen]
    parts = [rows[~is_chosen]]
    overlaps = 0
    for _, places in group_indices(chosen[:, TRACK]):
        of_track = chosen[places]
        # of two records that begin together the longer one is the outer one
        of_track = of_track[np.lexsort((-of_track[:, END], of_track[:, START]))]
        # how far any earlier record of the track reaches
        reach = np.maximum.accumulate(of_track[:, END])[:-1]
        later = of_track[1:]
        is_inside = later[:, END] <= reach
        is_clipped = (later[:, START] < reach) & ~is_inside
        later[is_clipped, START] = reach[is_clipped]
        overlaps += int(is_clipped.sum())
        parts += [of_track[:1], later[~is_inside]]
    outermost = np.concatenate(parts)
    return outermost[np.argsort(outermost[:, START], kind="stable")], overlaps


def _make_events(rows: NDArray[np.int64]) -> Events:
    columns = {
        "kind": KIND,
        "start": START,
        "end": END,
        "stage": STAGE,
        "microbatch": MICROBATCH,
        "bytes": BYTES,
        "peer": PEER,
        "carries": CARRIES,
    }
    values = {name: rows[:, column] for name, column in columns.items()}
    return Events.from_columns(len(rows), device=0, **values)


def find_rank(path: Path, keys: dict[str, Any]) -> int | None:
    """Return the rank that a file or its name says; None where neither does."""
    info = keys.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    if isinstance(rank, int) and 0 <= rank < 1 << 20:
        return int(rank)
    match = _RANK_IN_NAME.search(path.name)
    return int(match.group(1)) if match else None


_RANK_IN_NAME = re.compile(r"rank[-_.]?(\d{1,6})", re.IGNORECASE)
