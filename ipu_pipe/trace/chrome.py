"""Events as a Chrome trace file, which Perfetto and chrome://tracing open.

The file is gzipped JSON in the Trace Event Format. A process is a device. Its first track holds
passes and waits, which never overlap, another one communication. "X" records are events, pairs of
"s" and "f" are arrows from sends to the passes that they enable, "C" records are counters (the
categories of memory in one record, so that viewers stack them), and "otherData" holds the metadata.
Times are microseconds with three decimals, so exact nanoseconds.
"""

from __future__ import annotations

import gzip
import json
import math
from itertools import count
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Sequence

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.files import atomic_file
from ipu_pipe.schedule.actions import PASSES, SPLIT_PASSES, Kind, get_pass_needs
from ipu_pipe.trace import events as ev
from ipu_pipe.trace.events import (
    KIND_CODE,
    KINDS,
    PAYLOAD_CODE,
    PAYLOADS,
    WAIT,
    Counter,
    Counters,
    Event,
    Events,
)

LETTERS = {kind.word: kind.value for kind in (*PASSES, *SPLIT_PASSES, Kind.UPDATE)}
# names of events, followed by the number of their microbatch
NAMES = [LETTERS.get(kind, f"{kind} ") for kind in KINDS]
GZIP_LEVEL = 5
RECORDS_AT_ONCE = 1 << 14

# what a pass hands on to the pass of its kind on the neighbouring stage
HANDS_ON = {
    Kind.FORWARD: "activations",
    Kind.RECOMPUTE: "recomputed activations",
    Kind.BACKWARD: "gradients",
    Kind.INPUT_GRADIENT: "gradients",
}
# the same as codes: of the payload by the kind; and by the payload, how many stages on it goes (0:
# not from stage to stage)
PAYLOAD_OF_KIND = np.zeros(len(KINDS), np.int64)
STAGES_ON = np.zeros(len(PAYLOADS), np.int64)
for _kind, _payload in HANDS_ON.items():
    PAYLOAD_OF_KIND[KIND_CODE[_kind.word]] = PAYLOAD_CODE[_payload]
    STAGES_ON[PAYLOAD_CODE[_payload]] = -sum(need.offset for need in get_pass_needs(_kind))


def write_chrome(
    path: Path,
    events: Events | Sequence[Event],
    counters: Counters | Sequence[Counter],
    metadata: dict[str, Any],
) -> None:
    """Write a trace file, completely or not at all. Raise `RunFault` if the disk refuses.

    A true `metadata["modelled"]` is repeated on every event. A false `metadata["gradients_cross"]`
    omits the arrows between backwards. Times should count from the run's first event: viewers hold
    microseconds as floats, exact up to 52 days.
    """
    events = events if isinstance(events, Events) else Events.from_rows(events)
    counters = counters if isinstance(counters, Counters) else Counters.from_rows(counters)
    with atomic_file(path, "the trace") as temporary, gzip.open(
        temporary, "wb", compresslevel=GZIP_LEVEL
    ) as file:
        file.write(
            (
                '{"displayTimeUnit":"ms","otherData":' + json.dumps(metadata) + ',"traceEvents":['
            ).encode()
        )
        separator = "\n"
        # piece by piece, so that a long trace is never one text in memory
        for record in _format_records(events, counters, metadata):
            file.write((separator + record).encode())
            separator = ",\n"
        file.write(b"\n]}\n")


def _format_records(events: Events, counters: Counters, metadata: dict[str, Any]) -> Iterator[str]:
    """Yield the file's records as JSON texts, some of them several at once."""
    # viewers identify threads by their number only, and show first the thread with the number of
    # the process
    is_message = events.is_kind(*ev.COMMUNICATION)
    thread = events.device + is_message * (events.device.max(initial=0) + 1)
    yield from _name_tracks(events, thread)
    modelled_arg = ',"modelled":true' if metadata.get("modelled") else ""
    named = find_named_stages(events)
    for begin in range(0, len(thread), RECORDS_AT_ONCE):
        window = slice(begin, begin + RECORDS_AT_ONCE)
        yield ",\n".join(
            _format_events(events.select(window), thread[window], named[window], modelled_arg)
        )
    yield from _format_arrows(events, thread, find_arrows(events, metadata))
    yield from _format_counters(counters)


def _name_tracks(events: Events, thread: NDArray[np.int64]) -> Iterator[str]:
    """Yield the records that name the devices and their tracks: passes and waits on one, messages
    on another.
    """
    for device in np.unique(events.device).tolist():
        is_of_device = events.device == device
        names = {device: describe_stages(events.stage[is_of_device])}
        names.update(
            {
                number: "communication"
                for number in np.unique(thread[is_of_device]).tolist()
                if number != device
            }
        )
        records: list[tuple[int, str, dict[str, Any]]] = [
            (device, "process_name", {"name": f"device {device}"}),
            (device, "process_sort_index", {"sort_index": device}),
            *((number, "thread_name", {"name": name}) for number, name in names.items()),
        ]
        for number, name, args in records:
            yield json.dumps({"ph": "M", "pid": device, "tid": number, "name": name, "args": args})


def describe_stages(column: NDArray[np.int32]) -> str:
    """Return the name of a track with the passes of these stages."""
    stages = [str(stage) for stage in np.unique(column).tolist() if stage >= 0]
    return f"compute, stage{'s' * (len(stages) > 1)} {', '.join(stages)}" if stages else "compute"


def find_named_stages(events: Events) -> NDArray[np.int32]:
    """Return the stage of each event that its name says: that of a device with several, else -1."""
    named = np.full_like(events.stage, -1)
    for _, places in ev.group_indices(events.device):
        stages = events.stage[places]
        if len(np.unique(stages[stages >= 0])) > 1:
            named[places] = stages
    return named


def make_name(kind: str, microbatch: int, stage: int, peer: int) -> str:
    """Return the name of an event, such as F0, F0@3 of stage 3, or wait for device 1."""
    if kind == WAIT and peer >= 0:
        return f"wait for device {peer}"
    name = kind if microbatch < 0 else f"{NAMES[KIND_CODE[kind]]}{microbatch}"
    return name if stage < 0 else f"{name}@{stage}"


# ---- arrows


class Arrows(NamedTuple):
    """Columns of one length: the indices of two events, and what goes from the first to the second
    as an index into PAYLOADS.
    """

    source: NDArray[np.int64]
    target: NDArray[np.int64]
    carries: NDArray[np.int64]


def find_arrows(events: Events, metadata: dict[str, Any]) -> Arrows:
    """Return which event enables which other one.

        device 0    F0   send                  a send enables the pass on the receiving device that takes its payload; if that is
        device 1         wait   recv   F0      not recorded, the receive, and if that is not recorded either, the wait

    Where no sends are recorded, and between stages of one device, a pass enables the pass of its
    kind on the next stage.
    """
    is_pass = events.is_kind(*(kind.word for kind in HANDS_ON))
    sends = np.flatnonzero(events.is_kind("send") & (events.peer >= 0))
    passes = np.flatnonzero(is_pass)
    # [1] a payload between stages is for a stage; any other one, such as norms, is of the device
    # that sent it: -2 - device
    carries = np.where(is_pass, PAYLOAD_OF_KIND[events.kind], events.carries)
    stages_on = STAGES_ON[carries]
    sent_to = np.where(stages_on != 0, events.stage + stages_on, -2 - events.device)
    taken_by = np.where(stages_on != 0, events.stage, -2 - events.peer)

    def match(
        sources: NDArray[Any],
        source_key: NDArray[Any],
        targets: NDArray[Any],
        target_key: NDArray[Any],
    ) -> NDArray[Any]:
        """Return the first target of each source with an equal key (a device, or a replica); -1 if
        there is none.
        """
        index = match_first(
            [source_key[sources], sent_to[sources], events.microbatch[sources], carries[sources]],
            [target_key[targets], taken_by[targets], events.microbatch[targets], carries[targets]],
            events.start[targets],
        )
        # an index of -1 reads the -1 at the end
        return np.append(targets, -1)[index]

    # [2] from sends
    target_of_send = np.full(len(sends), -1)
    for targets in (
        passes,
        np.flatnonzero(events.is_kind("recv")),
        np.flatnonzero(events.is_kind(WAIT)),
    ):
        is_open = target_of_send < 0
        target_of_send[is_open] = match(sends[is_open], events.peer, targets, events.device)
    # [3] from pass to pass, within a replica
    devices = max(metadata.get("device_of_stage") or [-1]) + 1
    replica = events.device // devices if devices else np.zeros_like(events.device)
    if not metadata.get("gradients_cross", True):
        passes = passes[carries[passes] != PAYLOAD_CODE["gradients"]]
    next_pass = match(passes, replica, passes, replica)
    if len(sends):
        # sends tell the arrows between devices
        next_pass[events.device[next_pass] != events.device[passes]] = -1
    source = np.concatenate([sends, passes])
    target = np.concatenate([target_of_send, next_pass])
    has_target = target >= 0
    return Arrows(source[has_target], target[has_target], carries[source[has_target]])


def match_first(
    wanted: Sequence[NDArray[Any]], rows: Sequence[NDArray[Any]], start: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return for each row of the columns `wanted` the index of the equal row of `rows` with the
    least start; -1 without one.
    """
    if not len(rows[0]):
        return np.full(len(wanted[0]), -1)
    # one integer for a row, like the digits of a number: each column has the base of its range
    keys = np.zeros(len(wanted[0]), np.int64)
    row_keys = np.zeros(len(rows[0]), np.int64)
    for column, row_column in zip(wanted, rows):
        least = min(int(column.min(initial=0)), int(row_column.min()))
        base = max(int(column.max(initial=0)), int(row_column.max())) - least + 1
        keys = keys * base + column - least
        row_keys = row_keys * base + row_column - least
    # by key, and then by start: searchsorted finds the first of equal keys
    order = np.lexsort((start, row_keys))
    # a key beyond all others would lie one past the end
    first = np.minimum(np.searchsorted(row_keys[order], keys), len(order) - 1)
    return np.where(row_keys[order][first] == keys, order[first], -1)


# ---- records as text, which is several times as fast as json.dumps of each


def _format_time(ns: int) -> str:
    """Return nanoseconds as microseconds."""
    return f"{ns // 1000}.{ns % 1000:03d}"


def _format_events(
    events: Events, thread: NDArray[np.int64], named: NDArray[np.int32], modelled_arg: str
) -> Iterator[str]:
    columns = [column.tolist() for column in (thread, named, *events)]
    for tid, at, stage, device, kind, microbatch, start, end, version, size, peer, carries in zip(
        *columns
    ):
        word = KINDS[kind]
        number = "k" if KINDS[kind] == Kind.UPDATE.word else "microbatch"
        # chrome://tracing reads this; Perfetto colours by name
        colour = '"cname":"grey",' if word == WAIT else ""
        # of our own words and numbers, which JSON need not escape
        name = make_name(word, microbatch, at, peer)
        more_args = f',"bytes":{size}' if size >= 0 else ""
        more_args += f',"peer":{peer}' if peer >= 0 else ""
        more_args += f',"carries":"{PAYLOADS[carries]}"' if carries else ""
        yield (
            f'{{"ph":"X","pid":{device},"tid":{tid},"name":"{name}","cat":"{word}","ts":{_format_time(start)},'
            f'"dur":{_format_time(end - start)},{colour}"args":{{"stage":{stage},"{number}":{microbatch},'
            f'"version":{version}{more_args}{modelled_arg}}}}}'
        )


def _format_arrows(events: Events, thread: NDArray[np.int64], arrows: Arrows) -> Iterator[str]:
    source = events.select(arrows.source)
    target = events.select(arrows.target)
    to_pass = ~target.is_kind("recv", WAIT)
    # a nanosecond inside the events, because viewers tie an arrow's end to the event around it; and
    # never back in time
    end = np.where(
        to_pass,
        np.minimum(np.maximum(target.start + 1, source.start), target.end - 1),
        target.end - 1,
    )
    begin = np.maximum(source.start, np.minimum(source.end - 1, end))
    # an arrow whose ends lie outside of their events would be tied to others
    shown = (begin <= end) & (begin < source.end) & (end >= target.start)
    # (device, thread, time) of both ends
    tails, heads = (
        zip(*(column[shown].tolist() for column in (event.device, thread[index], time)))
        for event, index, time in ((source, arrows.source, begin), (target, arrows.target, end))
    )
    for number, payload, tail, head in zip(count(1), arrows.carries[shown].tolist(), tails, heads):
        shared = f'"cat":"{PAYLOADS[payload]}","name":"sends","id":{number}}}'
        for kind, (device, tid, time) in (('"s"', tail), ('"f","bp":"e"', head)):
            yield f'{{"ph":{kind},"pid":{device},"tid":{tid},"ts":{_format_time(time)},{shared}'


def _format_counters(counters: Counters) -> Iterator[str]:
    """Yield counters, those of memory in one record a moment; where a category has no value yet, it
    is left out, and where another counter has none, it is null."""
    for name, device, times, values in ev.build_counter_series(counters):
        for row, time in enumerate(times.tolist()):
            moment = {key: column[row] for key, column in values.items()}
            args: dict[str, Any] = {
                key: value for key, value in moment.items() if math.isfinite(value)
            }
            if name != "memory":
                args = {"value": args.get(name)}
            args = {
                key: int(v) if v is not None and v.is_integer() else v for key, v in args.items()
            }
            head = f'{{"ph":"C","pid":{device},"name":{json.dumps(name)},"ts":{_format_time(time)},"args":'
            yield f"{head}{json.dumps(args)}}}"
