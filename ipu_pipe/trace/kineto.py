"""Read the records of PyTorch's profiler (Kineto), one file a rank: which are compute, which are
communication, and which are ranges that name a pass of a pipeline.

Where a rank used an accelerator, its time is that of kernels and copies; else that of the host's
operations, of which only the outermost ones count. A record whose time cannot be used is left out
and counted.

    ranges     PP:2F0, Forward 3, ...      |---- pass ----|        `Range`
    compute    kernels, or operations        |--| |-----|          `RankRecords.events`
    messages   gloo:recv, ncclSend, ...   |-|              |-|
"""

from __future__ import annotations

import functools
import re
from collections import Counter as Tally
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput
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

# the categories of today's Kineto, of torch 1.x (with a capital), and of other accelerators
ON_DEVICE = re.compile(r"(concurrent_)?kernel|(gpu_)?mem(cpy|set)|mtia_ccp_events", re.IGNORECASE)
ON_HOST = ("cpu_op", "Operator")
RANGES = ("user_annotation", "gpu_user_annotation")
MEMORY_RECORD = "[memory]"
COMMUNICATES = re.compile(r"nccl|gloo:|c10d::|record_param_comms|ncclx|rccl", re.IGNORECASE)
DIRECTIONS = (
    (re.compile("all_?|reduce|sendrecv", re.IGNORECASE), ev.COLLECTIVE),
    (re.compile("send|DtoH|PtoP"), "send"),
    (re.compile("recv|HtoD", re.IGNORECASE), "recv"),
)
# nccl:send 0->1, nccl:recv 1<-0
_PEER_IN_NAME = re.compile(r"(?:->|<-)(\d{1,6})$")
_BACKWARD = "autograd::engine::evaluate_function"
_OPTIMIZER = re.compile(r"Optimizer\.step#")
_TYPES_BY_BYTES = {
    1: "byte char bool float8",
    2: "half bfloat16 short",
    4: "float int",
    8: "double long",
}
_TYPE_BYTES = {name: size for size, names in _TYPES_BY_BYTES.items() for name in names.split()}

# PyTorch's names of passes: of its multi-stage runtime, which torchtitan uses too, and of
# ScheduleGPipe
PASS_NAMES = (
    re.compile(
        r"PP:(?P<stage>\d{1,6})"
        r"(?P<kind>SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(?P<microbatch>\d{1,6})"
    ),
    re.compile(r"(?P<kind>Forward|Backward) (?P<microbatch>\d{1,6})"),
)
# what the group `kind` of a name may say, in small letters: the kind of the pass or message, and
# what it carries
PASS_KINDS = {
    **dict.fromkeys(("f", "fwd", "forward"), (Kind.FORWARD.word, "")),
    **dict.fromkeys(("b", "bwd", "backward"), (Kind.BACKWARD.word, "")),
    **dict.fromkeys(("i", "input_gradient"), (Kind.INPUT_GRADIENT.word, "")),
    **dict.fromkeys(("w", "weight_gradient"), (Kind.WEIGHT_GRADIENT.word, "")),
    **dict.fromkeys(("u", "step", "update", "optimizer"), (Kind.UPDATE.word, "")),
    "send_f": ("send", "activations"),
    "recv_f": ("recv", "activations"),
    "send_b": ("send", "gradients"),
    "recv_b": ("recv", "gradients"),
}

# of a record: on a device, on the host, or a range of either
DEVICE = 0
HOST = 1
DEVICE_RANGE = 2
HOST_RANGE = 3
# columns of a record
PLACE, KIND, START, END, TRACK, STAGE, MICROBATCH, BYTES, PEER, CARRIES, IS_BACKWARD, IS_CALL = (
    range(12)
)
BATCH = 1 << 14
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


class RankRecords(NamedTuple):
    """The records of one file. `events`: compute and messages, of the file's own clock; `ranges`:
    the named passes and messages. `is_backward`: whether an event is an operation of autograd's
    backward; `is_call`: whether it is the call that posts a message. `on_device`: whether they are
    of an accelerator.
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


@functools.lru_cache(maxsize=1 << 16)
def identify(category: str, name: str, pattern: re.Pattern[str] | None) -> Meaning | None:
    """Return the meaning of a record; None if it says nothing of the time of a device. Names
    repeat, so each is parsed once.

    `pattern`: the user's, for names of passes, before PyTorch's own.
    """
    communicates = COMMUNICATES.search(name) is not None
    if category in RANGES:
        named = _identify_range(category, name, pattern)
        if named is not None or not communicates or category != RANGES[0]:
            return named
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
        peer=int(peer.group(1)) if peer else -1,
        is_backward=name.startswith(_BACKWARD),
        is_call=name.startswith("c10d::"),
    )


def _identify_range(category: str, name: str, pattern: re.Pattern[str] | None) -> Meaning | None:
    """Return the pass or message that a range names; None if it names neither."""
    place = HOST_RANGE if category == RANGES[0] else DEVICE_RANGE
    if _OPTIMIZER.match(name):
        return Meaning(place, KIND_CODE[Kind.UPDATE.word])
    for known in (pattern, *PASS_NAMES):
        match = (
            known.search(name) if known is pattern and known else known and known.fullmatch(name)
        )
        if match is None or not match:
            continue
        groups = match.groupdict()
        word = str(groups.get("kind", "")).lower()
        kind, carries = PASS_KINDS.get(word, (ev.UNSPECIFIED, ""))
        stage = _read_number(groups.get("stage"))
        microbatch = _read_number(groups.get("microbatch"))
        return Meaning(place, KIND_CODE[kind], stage, microbatch, carries=PAYLOAD_CODE[carries])
    return None


def _read_number(text: str | None) -> int:
    return int(text) if text and text.isdigit() and len(text) < 7 else -1


class ProfilerRecords:
    """The records of one file, taken one by one."""

    def __init__(self, pattern: re.Pattern[str] | None = None) -> None:
        self._pattern = pattern
        self._rows: list[tuple[Any, ...]] = []
        self._parts: list[NDArray[np.int64]] = []
        self._counters: list[Counter] = []
        self._tracks: dict[Any, int] = {}
        self._open: dict[int, list[tuple[Record, int]]] = {}
        self._on_device = False
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
        meaning = identify(category, str(record.get("name", "")), self._pattern)
        if meaning is None:
            return
        self._count[category] += 1
        missing = [key for key in ("name", "ts", "dur") if key not in record]
        if missing:
            self._leave_out(category, f"{missing[0]} is missing")
            return
        key = "ts"
        try:
            start = read_time(record["ts"])
            key = "dur"
            duration = read_time(record["dur"])
        except ValueError:
            self._leave_out(category, f"{key} is not a number of microseconds")
            return
        if duration < 0:
            self._leave_out(category, "dur is negative")
        else:
            self._add(record, meaning, start, start + duration)

    def _take_half(self, record: Record, phase: str) -> None:
        """Join a begin and the next end on its track to one record."""
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
        meaning = identify(category, str(record.get("name", "")), self._pattern)
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
            self._rows = [row for row in self._rows if row[PLACE] != HOST]
            self._parts = [part[part[:, PLACE] != HOST] for part in self._parts]
        if meaning.place == HOST and self._on_device:
            return
        kind = meaning.kind
        peer = meaning.peer
        size = -1
        if kind in _MESSAGE_CODES:
            kind, peer, size = _read_message(record.get("args"), meaning)
        track = self._number_track(record)
        self._rows.append(
            (meaning.place, kind, start, end, track, meaning.stage, meaning.microbatch)
            + (size, peer, meaning.carries, meaning.is_backward, meaning.is_call)
        )
        if len(self._rows) == BATCH:
            self._pack()

    def _pack(self) -> None:
        if self._rows:
            self._parts.append(np.array(self._rows, np.int64))
            self._rows = []

    def finish(self, path: Path, keys: dict[str, Any]) -> RankRecords:
        """Return all records as columns. Raise `BadInput` if none of them can be used."""
        self._pack()
        nothing = np.zeros((0, IS_CALL + 1), np.int64)
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
            rows, clipped = _keep_outermost(rows)
            if clipped:
                self._left_out["all", "clipped"] = clipped
        notes = [*self._describe_left_out(path)]
        is_range = rows[:, PLACE] >= DEVICE_RANGE
        on_device = self._on_device
        is_range_of_place = rows[:, PLACE] == (DEVICE_RANGE if on_device else HOST_RANGE)
        if len(rows) and not is_range.all() and not on_device:
            notes.append(f"{path.name}: no kernels: the host's operations are taken")
        events = rows[~is_range]
        counters = Counters.from_rows(c for c in self._counters if c.device == on_device)
        return RankRecords(
            path,
            keys,
            _make_events(events),
            events[:, IS_BACKWARD] > 0,
            events[:, IS_CALL] > 0,
            _make_events(rows[is_range_of_place]),
            counters._replace(device=np.zeros_like(counters.device)),
            on_device,
            tuple(notes),
        )

    def _describe_left_out(self, path: Path) -> list[str]:
        total = sum(self._count.values())
        notes = []
        for (category, reason), count in sorted(self._left_out.items()):
            what = f"{category!r} records" if category != "all" else "records"
            among = self._count[category] if category != "all" else total
            if reason == "clipped":
                notes.append(
                    f"{path.name}: {count} of {total} records overlap an earlier one on their "
                    f"track, and begin where it ends"
                )
            else:
                notes.append(
                    f"{path.name}: {count} of {max(among, count)} {what} are not read, because "
                    f"{reason}"
                )
        return notes


_MESSAGE_CODES = {KIND_CODE[kind] for kind in ("send", "recv", ev.COLLECTIVE)}


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
            peer = int(str(args[key])[:6])
    elements = args.get("In msg nelems") or args.get("Out msg nelems")
    width = _TYPE_BYTES.get(str(args.get("dtype", "")).lower())
    if isinstance(elements, int) and width and 0 <= elements < 1 << 50:
        size = elements * width
    inputs = args.get("Concrete Inputs")
    # c10d::send(tensors, group, peer, tag), where shapes are recorded
    if isinstance(inputs, list) and len(inputs) == 4 and str(inputs[2]).isdigit():
        peer = int(str(inputs[2])[:6])
    return kind, peer, size


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


def _keep_outermost(rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Drop compute inside other compute of its track, and let compute that begins inside other
    compute and ends after it begin at its end. Return the number of the latter, too.
    """
    is_compute = (rows[:, PLACE] <= HOST) & (rows[:, KIND] == KIND_CODE[ev.UNSPECIFIED])
    compute = rows[is_compute]
    parts = [rows[~is_compute]]
    overlaps = 0
    for _, places in group_indices(compute[:, TRACK]):
        of_track = compute[places]
        of_track = of_track[np.lexsort((-of_track[:, END], of_track[:, START]))]
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


def compile_pattern(text: str | None) -> re.Pattern[str] | None:
    """Compile the user's pattern for names of passes. Raise `BadInput` if it is not a regular
    expression with a group `kind` and a group `microbatch` or `stage`.
    """
    if text is None:
        return None
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise BadInput(f"--passes: {text}: is not a regular expression: {error}") from None
    if "kind" not in pattern.groupindex or not {"stage", "microbatch"} & {*pattern.groupindex}:
        raise BadInput(
            f"--passes: {text}: must have the groups (?P<kind>...) and (?P<microbatch>...) or "
            f"(?P<stage>...)"
        )
    return pattern
