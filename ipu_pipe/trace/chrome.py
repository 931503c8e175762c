"""Events as a Chrome trace file, which Perfetto and chrome://tracing open.

The file is gzipped JSON in the Trace Event Format. A process is a device. Its first track holds passes and waits, which never
overlap, another one communication. "X" records are events, pairs of "s" and "f" are arrows from sends to the passes that they
enable, "C" records are counters (the categories of memory in one record, so that viewers stack them), and "otherData" holds the
metadata. Times are microseconds with three decimals, so exact nanoseconds.
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
ROWS = 1 << 14  # records that are formatted at once

# What a pass hands on to a pass of its kind on another stage, as an index into PAYLOADS, and how many stages on that is.
HANDS_ON = {
    kind: (PAYLOADS.index(payload), -need.offset)
    for kind, payload in (
        (Kind.FORWARD, "activations"),
        (Kind.RECOMPUTE, "recomputed activations"),
        (Kind.BACKWARD, "gradients"),
        (Kind.INPUT_GRADIENT, "gradients"),
    )
    for need in pass_needs(kind)
    if need.offset
}


def write_chrome(
    path: Path,
    events: Union[Events, Sequence[Event]],
    counters: Union[Counters, Sequence[Counter]],
    metadata: Dict[str, Any],
) -> None:
    """Write a trace file, completely or not at all. Raise `RunFault` if the disk refuses.

    A true `metadata["modelled"]` is repeated on every event. A false `metadata["gradients_cross"]` omits the arrows between
    backwards. Times should count from the run's first event: viewers hold microseconds as floats, exact up to 52 days.
    """
    events = events if isinstance(events, Events) else Events.from_rows(events)
    counters = counters if isinstance(counters, Counters) else Counters.from_rows(counters)
    with atomic_file(path, "the trace") as temporary, gzip.open(temporary, "wb", compresslevel=LEVEL) as file:
        file.write(('{"displayTimeUnit":"ms","otherData":' + json.dumps(metadata) + ',"traceEvents":[').encode())
        separator = "\n"
        for records in filter(None, _format_records(events, counters, metadata)):
            file.write((separator + records).encode())
            separator = ",\n"
        file.write(b"\n]}\n")


def _format_records(events: Events, counters: Counters, metadata: Dict[str, Any]) -> Iterator[str]:
    """Yield the file's records as JSON texts, many at a time."""
    track, thread = _assign_tracks(events)
    if len(track):
        yield ",\n".join(json.dumps({"ph": "M", **name}) for name in _name_tracks(events, track, thread))
    mark = ',"modelled":true' if metadata.get("modelled") else ""
    for begin in range(0, len(track), ROWS):
        some = slice(begin, begin + ROWS)
        yield _format_events(events.select(some), thread[some], mark)
    arrows = find_arrows(events, metadata)
    for begin in range(0, len(arrows.source), ROWS):
        yield _format_arrows(
            events, thread, Arrows(*(column[begin : begin + ROWS] for column in arrows)), first=begin + 1
        )
    yield from _format_counters(counters)


# ---- tracks


def _assign_tracks(events: Events) -> Tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return each event's track on its device (0: passes and waits, 1: communication) and its thread number.

    Viewers tell threads apart by their number alone, and show first a process's thread with the same number: passes and waits.
    They drop events that overlap on one track, which no two of a device do.
    """
    track = events.is_kind(*COMMUNICATION).astype(np.int64)
    return track, track * (int(events.device.max(initial=0)) + 1) + events.device


def _name_tracks(events: Events, track: NDArray[np.int64], thread: NDArray[np.int64]) -> Iterator[Dict[str, Any]]:
    """Yield the records that name the devices and their tracks."""
    stages: Dict[int, List[int]] = {}
    for device, stage in np.unique(np.stack([events.device, events.stage]), axis=1).T.tolist():
        stages.setdefault(device, []).extend([stage] if stage >= 0 else [])
    threads: Dict[int, Dict[int, int]] = {}
    for device, on, number in np.unique(np.stack([events.device, track, thread]), axis=1).T.tolist():
        threads.setdefault(device, {0: device})[on] = number
    for device, stages_of_device in stages.items():
        yield {"pid": device, "tid": device, "name": "process_name", "args": {"name": f"device {device}"}}
        yield {"pid": device, "tid": device, "name": "process_sort_index", "args": {"sort_index": device}}
        for on, number in threads[device].items():
            name = "communication" if on else "compute"
            name += f", stage {', '.join(map(str, stages_of_device))}" if stages_of_device and not on else ""
            yield {"pid": device, "tid": number, "name": "thread_name", "args": {"name": name}}


# ---- arrows


class Arrows(NamedTuple):
    """Columns of one length: the indices of two events, and what goes from the first to the second as an index into PAYLOADS."""

    source: NDArray[np.int64]
    target: NDArray[np.int64]
    carries: NDArray[np.int64]


def find_arrows(events: Events, metadata: Dict[str, Any]) -> Arrows:
    """Return which event enables which other one: from a send to the pass that it is for, else to the receive or the wait; and
    from pass to pass where no sends are recorded, or within a device."""
    sends = np.flatnonzero(events.is_kind("send") & (events.peer >= 0))
    arrows = [_find_arrows_of_sends(events, sends)] if len(sends) else []
    devices = max(metadata.get("device_of_stage") or [-1]) + 1  # of a replica
    for kind, (payload, offset) in HANDS_ON.items():
        if PAYLOADS[payload] != "gradients" or metadata.get("gradients_cross", True):
            passes = np.flatnonzero(events.is_kind(kind.word))
            device, stage, microbatch = events.device[passes], events.stage[passes], events.microbatch[passes]
            replica = device // devices if devices else np.zeros_like(device)
            targets = [replica, stage, microbatch]
            index = _match_first([replica, stage + offset, microbatch], targets, events.start[passes])
            known = (index >= 0) & (device == device[index]) if len(sends) else index >= 0
            arrows.append(Arrows(passes[known], passes[index[known]], np.full(int(known.sum()), payload)))
    return Arrows(*(np.concatenate(columns) for columns in zip(*arrows)))


def _find_arrows_of_sends(events: Events, sends: NDArray[np.int64]) -> Arrows:
    offsets = np.zeros(len(PAYLOADS), int)
    payload_of_kind = np.zeros(len(KINDS), int)
    for kind, (payload, offset) in HANDS_ON.items():
        offsets[payload], payload_of_kind[KINDS.index(kind.word)] = offset, payload
    carries = events.carries[sends].astype(np.int64)
    # a message between stages is known by its target stage, any other one by the device that sent it
    goal = np.where(offsets[carries] != 0, events.stage[sends] + offsets[carries], -2 - events.device[sends])
    wanted = [events.peer[sends], goal, events.microbatch[sends], carries]
    target = np.full(len(sends), -1)
    passes = tuple(kind.word for kind in HANDS_ON)
    for kinds in (passes, ("recv",), (WAIT,)):
        at = np.flatnonzero(events.is_kind(*kinds))
        if not len(at):
            continue
        if kinds is passes:
            payloads, place = payload_of_kind[events.kind[at]], events.stage[at]
        else:
            payloads = events.carries[at].astype(np.int64)
            place = np.where(offsets[payloads] != 0, events.stage[at], -2 - events.peer[at])
        index = _match_first(wanted, [events.device[at], place, events.microbatch[at], payloads], events.start[at])
        target = np.where((target < 0) & (index >= 0), at[index], target)
    known = target >= 0
    return Arrows(sends[known], target[known], carries[known])


def _match_first(
    wanted: Sequence[NDArray[Any]], rows: Sequence[NDArray[Any]], start: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return for each row of the columns `wanted` the index of the equal row of `rows` with the least start; -1 without one."""
    if not len(rows[0]):
        return np.full(len(wanted[0]), -1)
    # one integer for a row, by the ranges of the columns
    keys, row_keys = np.zeros(len(wanted[0]), np.int64), np.zeros(len(rows[0]), np.int64)
    for left, right in zip(wanted, rows):
        least = min(int(left.min(initial=0)), int(right.min()))
        count = max(int(left.max(initial=0)), int(right.max())) - least + 1
        keys, row_keys = (k * count + column - least for k, column in ((keys, left), (row_keys, right)))
    order = np.lexsort((start, row_keys))
    place = np.minimum(np.searchsorted(row_keys[order], keys), len(order) - 1)
    return np.where(row_keys[order][place] == keys, order[place], -1)


# ---- records as text: one format for thousands at once, which is many times as fast as json.dumps of each


def _fill(form: str, *columns: NDArray[Any]) -> str:
    """Return a record for each row of columns of one length."""
    rows = chain.from_iterable(zip(*(column.tolist() for column in columns)))
    return ",\n".join([form] * len(columns[0])) % tuple(rows)


def _look_up(texts: Sequence[str], indices: NDArray[Any]) -> NDArray[Any]:
    return np.array(texts, object)[indices]


def _format_argument(key: str, column: NDArray[Any]) -> NDArray[Any]:
    """Return an argument for each value, and no text for unknown values."""
    values, indices = np.unique(column, return_inverse=True)
    return _look_up([f',"{key}":{value}' if value >= 0 else "" for value in values.tolist()], indices)


def _format_events(events: Events, thread: NDArray[np.int64], mark: str) -> str:
    is_update, is_wait = events.is_kind(Kind.UPDATE.word), events.is_kind(WAIT)
    for_device = is_wait & (events.peer >= 0)
    number = np.where(for_device, events.peer, events.microbatch)
    names = [*(LETTERS.get(kind, kind + " ") for kind in KINDS), *KINDS, "wait for device "]
    name = np.where(for_device, 2 * len(KINDS), events.kind + len(KINDS) * (number < 0))
    number_text = number.astype(object)
    number_text[number < 0] = ""
    return _fill(
        '{"ph":"X","pid":%d,"tid":%d,"name":"%s%s","cat":"%s","ts":%d.%03d,"dur":%d.%03d,%s"args":{'
        '"stage":%d,"%s":%d,"version":%d%s%s%s' + mark + "}}",
        events.device, thread, _look_up(names, name), number_text, _look_up(KINDS, events.kind),
        *np.divmod(events.start, 1000), *np.divmod(events.end - events.start, 1000),
        _look_up(["", WAIT_COLOUR], is_wait.astype(int)), events.stage,
        _look_up(["microbatch", "k"], is_update.astype(int)), events.microbatch, events.version,
        _format_argument("bytes", events.bytes), _format_argument("peer", events.peer),
        _look_up([f',"carries":"{payload}"' if payload else "" for payload in PAYLOADS], events.carries),
    )  # fmt: skip


def _format_arrows(events: Events, thread: NDArray[np.int64], arrows: Arrows, first: int) -> str:
    source, target = events.select(arrows.source), events.select(arrows.target)
    to_pass = ~target.is_kind("recv", WAIT)
    # a nanosecond inside the events, because viewers tie an arrow's end to the event around it; and never back in time
    end = np.where(to_pass, np.minimum(np.maximum(target.start + 1, source.start), target.end - 1), target.end - 1)
    begin = np.maximum(source.start, np.minimum(source.end - 1, end))
    shown = (begin <= end) & (begin < source.end) & (end >= target.start)
    shared = (_look_up(PAYLOADS, arrows.carries)[shown], np.arange(first, first + len(end))[shown])
    form = '"pid":%d,"tid":%d,"ts":%d.%03d,"cat":"%s","name":"sends","id":%d}'
    return _fill(
        '{"ph":"s",' + form + ',\n{"ph":"f","bp":"e",' + form,
        source.device[shown], thread[arrows.source][shown], *np.divmod(begin[shown], 1000), *shared,
        target.device[shown], thread[arrows.target][shown], *np.divmod(end[shown], 1000), *shared,
    )  # fmt: skip


def _format_counters(counters: Counters) -> Iterator[str]:
    """Yield counters, those of memory in one record a moment; where a category has no value yet, it is left out, and where
    another counter has none, it is null."""
    for name, device, times, values in build_counter_series(counters):
        args = np.full(len(times), "", object)
        for key, column in values.items():
            label = json.dumps(key if name == "memory" else "value")
            unknown = "" if name == "memory" else f",{label}:null"
            texts = [f",{label}:{_format_number(v)}" if math.isfinite(v) else unknown for v in column.tolist()]
            args += np.array(texts, object)
        form = '{"ph":"C","pid":%d,"name":' + json.dumps(name).replace("%", "%%") + ',"ts":%d.%03d,"args":{%s}}'
        for begin in range(0, len(times), ROWS):
            some = times[begin : begin + ROWS]
            texts = [text[1:] for text in args[begin : begin + ROWS]]
            yield _fill(form, np.full(len(some), device), *np.divmod(some, 1000), np.array(texts, object))


def _format_number(value: float) -> str:
    """Return a JSON number; an integer without a point."""
    return str(int(value)) if value.is_integer() else repr(value)
