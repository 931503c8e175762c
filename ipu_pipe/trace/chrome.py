"""Events as a Chrome trace file, which opens in Perfetto.

A trace file is gzipped JSON: a process a device with a track for computing and one for communicating, "X" events for
work, arrows ("s", "f") from a pass to the pass that its result lets run on the next stage, counters ("C"), and metadata
under "otherData".
"""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, Sequence, Set

from ipu_pipe.schedule.actions import PASSES, Kind, pass_needs
from ipu_pipe.trace import events as words
from ipu_pipe.trace.events import KINDS, Counter, Event
from ipu_pipe.written import whole

COMMUNICATION = (
    *words.COMMUNICATION,
    words.WAIT,
)  # they overlap computation, so they are drawn on a track of their own
LETTERS = {kind.word: kind.value for kind in (*PASSES, Kind.UPDATE)}
# Which way the result of a pass goes, in stages: to the pass of its kind that needs it.
TOWARDS = {need.kind.word: -need.offset for kind in PASSES for need in pass_needs(kind) if need.offset}


def write_chrome(path: Path, events: Sequence[Event], counters: Sequence[Counter], metadata: Dict[str, Any]) -> None:
    """Write a trace file, whole or not at all. Raises RunFault if the disk refuses.

    `metadata["modelled"]`, if true, is repeated on every event: its times come from a schedule, not from a clock.
    `metadata["gradients_cross"]`, if false: no arrows between backwards.
    """
    records = _records(events, counters, bool(metadata.get("modelled")), bool(metadata.get("gradients_cross", True)))
    with whole(path, "the trace") as temporary, gzip.open(temporary, "wt", compresslevel=5, encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","otherData":' + json.dumps(metadata) + ',"traceEvents":[')
        separator = "\n"
        for some in iter(lambda: list(islice(records, 4096)), []):
            file.write(separator + ",\n".join(some))
            separator = ",\n"
        file.write("\n]}\n")


# The records below are put together as text: json.dumps of a dictionary an event takes three times as long.


def _records(events: Sequence[Event], counters: Sequence[Counter], modelled: bool, gradients: bool) -> Iterator[str]:
    """The file's records, as JSON texts."""
    yield from _names(events)
    mark = ',"modelled":true' if modelled else ""
    for event in events:
        yield _work(event, mark)
    yield from _arrows(events if gradients else [event for event in events if event.kind != "backward"])
    names = {name: json.dumps(name) for name in {counter.name for counter in counters}}
    for device, name, time_ns, value in counters:
        held = json.dumps(value if value == value else None)
        yield f'{{"ph":"C","pid":{device},"name":{names[name]},"ts":{time_ns / 1000},"args":{{"value":{held}}}}}'


def _names(events: Iterable[Event]) -> Iterator[str]:
    """Names of the devices and of their tracks."""
    stages: Dict[int, Set[int]] = {}
    communicate: Set[int] = set()
    for event in events:
        stages.setdefault(event.device, set()).add(event.stage)
        if event.kind in COMMUNICATION:
            communicate.add(event.device)
    for device in sorted(stages):
        on = ", ".join(str(stage) for stage in sorted(stages[device]) if stage >= 0)
        yield _name(device, 0, "process_name", {"name": f"device {device}"})
        yield _name(device, 0, "process_sort_index", {"sort_index": device})
        yield _name(device, 0, "thread_name", {"name": f"compute, stage {on}" if on else "compute"})
        if device in communicate:
            yield _name(device, 1, "thread_name", {"name": "communication"})


def _name(device: int, track: int, what: str, args: Dict[str, Any]) -> str:
    return json.dumps({"ph": "M", "pid": device, "tid": track, "name": what, "args": args})


def _work(event: Event, mark: str) -> str:
    stage, device, kind, microbatch, start_ns, end_ns, version, size = event[:8]
    assert kind in KINDS, kind
    key = "k" if kind == "update" else "microbatch"
    name = LETTERS.get(kind, kind + " ") + str(microbatch)
    if microbatch < 0:
        name = kind
    sent = "" if size is None else f',"bytes":{size}'
    return (
        f'{{"ph":"X","pid":{device},"tid":{1 if kind in COMMUNICATION else 0},"name":"{name}","cat":"{kind}",'
        f'"ts":{start_ns / 1000},"dur":{(end_ns - start_ns) / 1000},'
        f'"args":{{"stage":{stage},"{key}":{microbatch},"version":{version}{sent}{mark}}}}}'
    )


def _arrows(events: Iterable[Event]) -> Iterator[str]:
    """From each forward to the next stage's, and from each backward to the stage's before."""
    passes = {(e.kind, e.stage, e.microbatch): e for e in events if e.kind in TOWARDS}
    number = 0
    for (kind, stage, microbatch), event in passes.items():
        towards = TOWARDS[kind]
        reached = passes.get((kind, stage + towards, microbatch))
        if reached is not None:
            number += 1
            category = "activations" if towards > 0 else "gradients"
            same = f'"tid":0,"cat":"{category}","name":"sends","id":{number}'
            # a nanosecond inside the events, because an arrow is tied to the event that encloses its end
            yield f'{{"ph":"s","pid":{event.device},"ts":{(event.end_ns - 1) / 1000},{same}}}'
            yield f'{{"ph":"f","bp":"e","pid":{reached.device},"ts":{(reached.start_ns + 1) / 1000},{same}}}'
