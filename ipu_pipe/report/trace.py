"""Events as a Chrome trace file, which opens in Perfetto.

A trace file is gzipped JSON: a process a device with a track for computing and one for communicating, "X" events for
work, arrows ("s", "f") from a pass to the pass that its result lets run on the next stage, counters ("C"), and metadata
under "otherData".
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from itertools import islice
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, Optional, Sequence, Set

from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.schedule.actions import PASSES, Kind, pass_needs
from ipu_pipe.schedule.events import COMMUNICATION, KINDS, Counter, Event, Trace

LETTERS = {kind.word: kind.value for kind in (*PASSES, Kind.UPDATE)}
# Which way the result of a pass goes, in stages: to the pass of its kind that needs it.
TOWARDS = {need.kind.word: -need.offset for kind in PASSES for need in pass_needs(kind) if need.offset}


def write_chrome(path: Path, events: Sequence[Event], counters: Sequence[Counter], metadata: Dict[str, Any]) -> None:
    """Write a trace file, whole or not at all. Raises RunFault if the disk refuses.

    `metadata["modelled"]`, if true, is repeated on every event: its times come from a schedule, not from a clock.
    `metadata["gradients_cross"]`, if false: no arrows between backwards.
    """
    temporary = path.with_name(f".{path.name}.part")
    records = _records(events, counters, bool(metadata.get("modelled")), bool(metadata.get("gradients_cross", True)))
    try:
        with gzip.open(temporary, "wt", compresslevel=5, encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ms","otherData":' + json.dumps(metadata) + ',"traceEvents":[')
            separator = "\n"
            for some in iter(lambda: list(islice(records, 4096)), []):
                file.write(separator + ",\n".join(some))
                separator = ",\n"
            file.write("\n]}\n")
        os.replace(temporary, path)
    except OSError as error:
        raise RunFault(f"{path}: the trace cannot be written: {error.strerror or error}") from error
    finally:
        if temporary.exists():  # only where writing failed
            temporary.unlink()


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
    stage, device, kind, microbatch, start_ns, end_ns, version, size = event
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


def read_chrome(path: Path) -> Trace:
    """Events, counters and metadata of a trace file made by `write_chrome`. Raises BadInput where it is none."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            held = json.load(file)
        records = held["traceEvents"]
        events = [_event(r) for r in records if r["ph"] == "X"]
        counters = [
            Counter(r["pid"], r["name"], round(r["ts"] * 1000), _known(r["args"]["value"]))
            for r in records
            if r["ph"] == "C"
        ]
        return events, counters, dict(held.get("otherData", {}))
    except FileNotFoundError:
        raise BadInput(f"{path}: no such trace file") from None
    except OSError as error:  # a broken gzip header is an OSError too, without an errno
        raise BadInput(f"{path}: cannot be read as a gzipped Chrome trace: {error.strerror or error}") from None
    except (EOFError, zlib.error, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise BadInput(
            f"{path}: cannot be read as a gzipped Chrome trace of ipu_pipe: {type(error).__name__}: {error}"
        ) from None


def _event(r: Dict[str, Any]) -> Event:
    args, kind = r["args"], r["cat"]
    if kind not in KINDS:
        raise ValueError(f"cat: {kind}: must be one of {', '.join(KINDS)}")
    start, index = round(r["ts"] * 1000), args["k"] if kind == "update" else args["microbatch"]
    end = start + round(r["dur"] * 1000)
    event = Event(args["stage"], r["pid"], kind, index, start, end, args["version"], args.get("bytes"))
    for name in ("stage", "device", "microbatch", "version"):
        if not isinstance(getattr(event, name), int):
            raise ValueError(f"{name}: {getattr(event, name)}: must be a whole number")
    return event


def _known(value: Optional[float]) -> float:
    """A counter's value, written as null where it is not a number."""
    return float("nan") if value is None else value


def merge(traces: Sequence[Trace]) -> Trace:
    """One trace of several, such as one a rank: all events and counters by time, metadata joined, the first's winning.

    It is modelled if any of them is. All are taken to count time from one moment.
    """
    metadata: Dict[str, Any] = {}
    for _, _, held in reversed(traces):
        metadata.update(held)
    if any(held.get("modelled") for _, _, held in traces):
        metadata["modelled"] = True
    events = sorted((e for es, _, _ in traces for e in es), key=lambda e: (e.start_ns, e.stage))
    counters = sorted((c for _, cs, _ in traces for c in cs), key=lambda c: (c.time_ns, c.device))
    return events, counters, metadata
