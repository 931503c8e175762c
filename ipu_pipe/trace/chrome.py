"""Events as a Chrome trace file, which opens in Perfetto.

A trace file is gzipped JSON in the Trace Event Format: a process a device, with a track for passes and waits, which never
overlap, and one for communication; "X" events for what was done, arrows ("s", "f") from sends to passes, counters ("C"), those of
memory in one record, so that viewers stack them, and metadata under "otherData". Times are in microseconds with three
decimals: nanoseconds, exactly.
"""

from __future__ import annotations

import gzip
import json
import math
from itertools import chain
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence, Tuple, Union

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.files import atomic_file
from ipu_pipe.schedule.actions import PASSES, Kind, pass_needs
from ipu_pipe.trace.events import (
    COMMUNICATION,
    KINDS,
    PAYLOADS,
    WAIT,
    Counter,
    Counters,
    Event,
    Events,
    build_counter_series,
)

LETTERS = {kind.word: kind.value for kind in (*PASSES, Kind.UPDATE)}
WAIT_COLOUR = '"cname":"grey",'  # for chrome://tracing; Perfetto colours by name
LEVEL = 5  # of gzip
ROWS = 1 << 14  # put together at a time
# A viewer counts microseconds in floats, which tell nanoseconds apart up to here. Later times are counted from the first.
MOST_NS = 1 << 52


def write_chrome(
    path: Path,
    events: Union[Events, Sequence[Event]],
    counters: Union[Counters, Sequence[Counter]],
    metadata: Dict[str, Any],
) -> None:
    """Write a trace file, whole or not at all. Raises RunFault if the disk refuses.

    `metadata["modelled"]`, if true, is repeated on every event: its times come from a schedule, not from a clock.
    `metadata["gradients_cross"]`, if false: no arrows between backwards. Where times are too great for a viewer's floats, they
    count from the first, which "otherData" then has as "begin_ns".
    """
    events = events if isinstance(events, Events) else Events.from_rows(events)
    counters = counters if isinstance(counters, Counters) else Counters.from_rows(counters)
    events, counters, metadata = _countable(events, counters, metadata)
    with atomic_file(path, "the trace") as temporary, gzip.open(temporary, "wb", compresslevel=LEVEL) as file:
        file.write(('{"displayTimeUnit":"ms","otherData":' + json.dumps(metadata) + ',"traceEvents":[').encode())
        separator = "\n"
        for records in filter(None, _records(events, counters, metadata)):
            file.write((separator + records).encode())
            separator = ",\n"
        file.write(b"\n]}\n")


def _countable(events: Events, counters: Counters, metadata: Dict[str, Any]) -> Tuple[Events, Counters, Dict[str, Any]]:
    times = [column for column in (events.start, events.end, counters.time) if len(column)]
    if not times or max(int(column.max()) for column in times) < MOST_NS:
        return events, counters, metadata
    begin = min(int(column.min()) for column in times)
    events = events._replace(start=events.start - begin, end=events.end - begin)
    return events, counters._replace(time=counters.time - begin), {**metadata, "begin_ns": begin}


def _records(events: Events, counters: Counters, metadata: Dict[str, Any]) -> Iterator[str]:
    """The file's records, as JSON texts, many at a time."""
    track, thread = _tracks(events)
    if len(track):
        yield ",\n".join(json.dumps({"ph": "M", **name}) for name in _names(events, track, thread))
    mark = ',"modelled":true' if metadata.get("modelled") else ""
    for begin in range(0, len(track), ROWS):
        some = slice(begin, begin + ROWS)
        yield _work(events.select(some), thread[some], mark)
    found = find_arrows(events, metadata)
    for begin in range(0, len(found.source), ROWS):
        yield _drawn(events, thread, Arrows(*(column[begin : begin + ROWS] for column in found)), begin + 1)
    yield from _counted(counters)


def _tracks(events: Events) -> Tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each event its track on its device (even: passes and waits, odd: communication) and the thread's number.

    A viewer drops what overlaps on one track: that goes to further ones. And it tells threads apart by their number alone, and
    puts a process's thread of the same number first: passes and waits.
    """
    track = events.is_kind(*COMMUNICATION).astype(np.int64)
    order = np.lexsort((events.end, events.start, track, events.device))
    device, on, start, end = events.device[order], track[order], events.start[order], events.end[order]
    overlap = (device[1:] == device[:-1]) & (on[1:] == on[:-1]) & (start[1:] < end[:-1])
    for where, kind in {*zip(device[1:][overlap].tolist(), on[1:][overlap].tolist())}:
        mine = order[(device == where) & (on == kind)]
        track[mine] += 2 * np.array(_lanes(events.start[mine].tolist(), events.end[mine].tolist()))
    return track, track * (int(events.device.max(initial=0)) + 1) + events.device


def _lanes(starts: List[int], ends: List[int]) -> List[int]:
    """Of each event, in order of start, the first lane that is free."""
    free_from: List[int] = []
    lanes = []
    for start, end in zip(starts, ends):
        lane = next((lane for lane, free in enumerate(free_from) if free <= start), len(free_from))
        free_from[lane : lane + 1] = [end]
        lanes.append(lane)
    return lanes


def _names(events: Events, track: NDArray[np.int64], thread: NDArray[np.int64]) -> Iterator[Dict[str, Any]]:
    """Names of the devices and of their tracks."""
    stages: Dict[int, List[int]] = {}
    for device, stage in np.unique(np.stack([events.device, events.stage]), axis=1).T.tolist():
        stages.setdefault(device, []).extend([stage] if stage >= 0 else [])
    threads: Dict[int, Dict[int, int]] = {}
    for device, on, number in np.unique(np.stack([events.device, track, thread]), axis=1).T.tolist():
        threads.setdefault(device, {0: device})[on] = number
    for device, held in stages.items():
        yield {"pid": device, "tid": device, "name": "process_name", "args": {"name": f"device {device}"}}
        yield {"pid": device, "tid": device, "name": "process_sort_index", "args": {"sort_index": device}}
        for on, number in threads[device].items():
            name = ("communication" if on % 2 else "compute") + (f" {on // 2 + 1}" if on > 1 else "")
            name += f", stage {', '.join(map(str, held))}" if held and not on % 2 else ""
            yield {"pid": device, "tid": number, "name": "thread_name", "args": {"name": name}}


# The records below are put together as text, thousands by one format: json.dumps of a dictionary each takes many times as long.


def _text(form: str, *columns: NDArray[Any]) -> str:
    """A record a row, of columns of one length."""
    rows = chain.from_iterable(zip(*(column.tolist() for column in columns)))
    return ",\n".join([form] * len(columns[0])) % tuple(rows)


def _words(words: Sequence[str], places: NDArray[Any]) -> NDArray[Any]:
    return np.array(words, object)[places]


def _argument(key: str, column: NDArray[Any]) -> NDArray[Any]:
    """Nothing, where it is not known."""
    values, places = np.unique(column, return_inverse=True)
    return _words([f',"{key}":{value}' if value >= 0 else "" for value in values.tolist()], places)


def _work(events: Events, thread: NDArray[np.int64], mark: str) -> str:
    """What was done."""
    update, wait = (events.kind == KINDS.index(kind) for kind in (Kind.UPDATE.word, WAIT))
    for_device = wait & (events.peer >= 0)
    number = np.where(for_device, events.peer, events.microbatch)
    begins = [*(LETTERS.get(kind, kind + " ") for kind in KINDS), *KINDS, "wait for device "]
    begin = np.where(for_device, 2 * len(KINDS), events.kind + len(KINDS) * (number < 0))
    numbers = number.astype(object)
    numbers[number < 0] = ""
    return _text(
        '{"ph":"X","pid":%d,"tid":%d,"name":"%s%s","cat":"%s","ts":%d.%03d,"dur":%d.%03d,%s"args":{'
        '"stage":%d,"%s":%d,"version":%d%s%s%s' + mark + "}}",
        events.device, thread, _words(begins, begin), numbers, _words(KINDS, events.kind), *np.divmod(events.start, 1000),
        *np.divmod(events.end - events.start, 1000), _words(["", WAIT_COLOUR], wait.astype(int)),
        events.stage, _words(["microbatch", "k"], update.astype(int)), events.microbatch, events.version,
        _argument("bytes", events.bytes), _argument("peer", events.peer),
        _words([f',"carries":"{what}"' if what else "" for what in PAYLOADS], events.carries),
    )  # fmt: skip


def _drawn(events: Events, thread: NDArray[np.int64], some: Arrows, number: int) -> str:
    """Arrows, numbered from `number`."""
    source, target = events.select(some.source), events.select(some.target)
    passes = ~target.is_kind("recv", WAIT)
    # a nanosecond inside the events, because an arrow is tied to the event around its end; and never back in time
    end = np.where(passes, np.minimum(np.maximum(target.start + 1, source.start), target.end - 1), target.end - 1)
    begin = np.maximum(source.start, np.minimum(source.end - 1, end))
    drawn = (begin <= end) & (begin < source.end) & (end >= target.start)
    shared = (_words(PAYLOADS, some.carries)[drawn], np.arange(number, number + len(end))[drawn])
    same = '"pid":%d,"tid":%d,"ts":%d.%03d,"cat":"%s","name":"sends","id":%d}'
    return _text(
        '{"ph":"s",' + same + ',\n{"ph":"f","bp":"e",' + same,
        source.device[drawn], thread[some.source][drawn], *np.divmod(begin[drawn], 1000), *shared,
        target.device[drawn], thread[some.target][drawn], *np.divmod(end[drawn], 1000), *shared,
    )  # fmt: skip


def _counted(counters: Counters) -> Iterator[str]:
    """Counters, those of memory in one record, each with its last value."""
    for name, device, times, values in build_counter_series(counters):
        args = np.full(len(times), "", object)
        for key, column in values.items():
            label = json.dumps(key if name == "memory" else "value")
            unknown = "" if name == "memory" else f",{label}:null"
            args += np.array(
                [f",{label}:{_number(v)}" if math.isfinite(v) else unknown for v in column.tolist()], object
            )
        form = '{"ph":"C","pid":%d,"name":' + json.dumps(name).replace("%", "%%") + ',"ts":%d.%03d,"args":{%s}}'
        for begin in range(0, len(times), ROWS):
            part, told = times[begin : begin + ROWS], [text[1:] for text in args[begin : begin + ROWS]]
            yield _text(form, np.full(len(part), device), *np.divmod(part, 1000), np.array(told, object))


def _number(value: float) -> str:
    """As JSON, whole ones without a point."""
    return str(int(value)) if value.is_integer() else repr(value)


# What a pass hands on to the pass of its kind on another stage, and how many stages on that is.
HANDS_ON = {
    kind: (what, -need.offset)
    for kind, what in (
        (Kind.FORWARD, "activations"),
        (Kind.RECOMPUTE, "recomputed activations"),
        (Kind.BACKWARD, "gradients"),
        (Kind.INPUT_GRADIENT, "gradients"),
    )
    for need in pass_needs(kind)
    if need.offset
}


class Arrows(NamedTuple):
    """Columns of one length: places among the events, and what goes from one to the other, as a place in CARRIED."""

    source: NDArray[np.int64]
    target: NDArray[np.int64]
    carries: NDArray[np.int64]


def find_arrows(events: Events, metadata: Dict[str, Any]) -> Arrows:
    """Of all events. `metadata`: "device_of_stage" tells replicas apart; where "gradients_cross" is false, no gradients go."""
    sends = np.flatnonzero(events.is_kind("send") & (events.peer >= 0))
    found = _of_sends(events, sends) if len(sends) else []
    devices = max(metadata.get("device_of_stage") or [-1]) + 1
    for kind, (what, towards) in HANDS_ON.items():
        if what != "gradients" or metadata.get("gradients_cross", True):
            found.append(_of_passes(events, kind, PAYLOADS.index(what), towards, devices, bool(len(sends))))
    return Arrows(*(np.concatenate(columns) for columns in zip(*found)))


def _of_sends(events: Events, sends: NDArray[np.int64]) -> List[Arrows]:
    """To the pass that could run then; where it was for none, to the receive or to the wait."""
    carries = events.carries[sends].astype(np.int64)
    towards = np.zeros(len(PAYLOADS), int)
    for what, offset in HANDS_ON.values():
        towards[PAYLOADS.index(what)] = offset
    # a message between stages is known by the stage that it is for, any other one by the device that sent it
    for_stage = np.where(towards[carries] != 0, events.stage[sends] + towards[carries], -2 - events.device[sends])
    wanted = [events.peer[sends], for_stage, events.microbatch[sends], carries]
    target = np.full(len(sends), -1)
    for kinds in (tuple(kind.word for kind in HANDS_ON), ("recv",), (WAIT,)):
        there = np.flatnonzero(events.is_kind(*kinds))
        if kinds[0] == Kind.FORWARD.word:
            of_kind = np.zeros(len(KINDS), int)
            for kind, (what, _) in HANDS_ON.items():
                of_kind[KINDS.index(kind.word)] = PAYLOADS.index(what)
            what_came, where = of_kind[events.kind[there]], events.stage[there]
        else:
            what_came = events.carries[there].astype(np.int64)
            where = np.where(towards[what_came] != 0, events.stage[there], -2 - events.peer[there])
        some = _first(wanted, [events.device[there], where, events.microbatch[there], what_came], events.start[there])
        target = np.where((target < 0) & (some >= 0), there[some], target) if len(there) else target
    known = target >= 0
    return [Arrows(sends[known], target[known], carries[known])]


def _of_passes(events: Events, kind: Kind, what: int, towards: int, devices: int, sent: bool) -> Arrows:
    """From each pass of `kind` to the one that its result lets run; `sent`: only where that is on the same device."""
    of_kind = np.flatnonzero(events.is_kind(kind.word))
    device, stage, microbatch = events.device[of_kind], events.stage[of_kind], events.microbatch[of_kind]
    replica = device // devices if devices else np.zeros_like(device)
    found = _first([replica, stage + towards, microbatch], [replica, stage, microbatch], events.start[of_kind])
    known = np.flatnonzero(found >= 0)
    known = known[device[known] == device[found[known]]] if sent else known
    return Arrows(of_kind[known], of_kind[found[known]], np.full(len(known), what))


def _first(
    wanted: Sequence[NDArray[Any]], there: Sequence[NDArray[Any]], start: NDArray[np.int64]
) -> NDArray[np.int64]:
    """For each row of the columns `wanted` its place in `there`, of several the one that began first; -1: none."""
    if not len(there[0]):
        return np.full(len(wanted[0]), -1)
    one, other = np.zeros(len(wanted[0]), np.int64), np.zeros(len(there[0]), np.int64)
    for left, right in zip(wanted, there):  # of a row one number, by the columns' ranges
        least = min(int(left.min()) if len(left) else 0, int(right.min()))
        most = max(int(left.max()) if len(left) else 0, int(right.max()))
        one, other = (rows * (most - least + 1) + column - least for rows, column in ((one, left), (other, right)))
    order = np.lexsort((start, other))
    place = np.minimum(np.searchsorted(other[order], one), len(order) - 1)
    return np.where(other[order][place] == one, order[place], -1)
