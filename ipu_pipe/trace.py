"""What happened: one event record for all backends, and its Chrome trace file, which opens in Perfetto.

A trace file is gzipped JSON: a process a device, "X" events for work, arrows ("s", "f") from a pass to the pass that its
result lets run on the next stage, counters ("C"), and metadata under "otherData".
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ipu_pipe.errors import BadInput, RunFault

KINDS = ("forward", "backward", "update", "send", "recv", "wait", "evaluate", "checkpoint")


class Event(NamedTuple):
    """Something that a device did for a stage. Times in nanoseconds; -1 or None: does not apply or not known."""

    stage: int
    device: int
    kind: str
    microbatch: int  # for updates: the update's index
    start_ns: int
    end_ns: int
    version: int  # of the weights read; for updates: made
    bytes: Optional[int]  # that the result takes to the next stage


class Counter(NamedTuple):
    """A device's value from a time on."""

    device: int
    name: str
    time_ns: int
    value: float


Trace = Tuple[List[Event], List[Counter], Dict[str, Any]]


def modelled_events(
    forward_slots: np.ndarray,
    backward_slots: np.ndarray,
    forward_versions: np.ndarray,
    backward_versions: np.ndarray,
    first_microbatch: int,
    accumulate: int,
    slot_ns: float,
    slot_holds: str,
    device_of_stage: Sequence[int],
    boundary_bytes: Sequence[int],
) -> Tuple[List[Event], List[Counter]]:
    """Events and in-flight counters of a window of a schedule whose slots all take `slot_ns`.

    The four arrays are (P, n): slot and weight version of each pass of microbatches `first_microbatch` and on. Where a
    slot holds "both", the forward takes its first half. `boundary_bytes[s]`: what goes from stage s to s + 1. An update
    takes no time of its own: it is marked at the end of the backward that completes its batch.
    """
    stages, count = forward_slots.shape
    half = 0.5 if slot_holds == "both" else 1.0
    events: List[Event] = []
    counters: List[Counter] = []
    for s in range(stages):
        device = device_of_stage[s]
        f_start = np.rint(forward_slots[s] * slot_ns).astype(np.int64)
        f_end = np.rint((forward_slots[s] + half) * slot_ns).astype(np.int64)
        b_start = np.rint((backward_slots[s] + 1 - half) * slot_ns).astype(np.int64)
        b_end = np.rint((backward_slots[s] + 1) * slot_ns).astype(np.int64)
        onward = boundary_bytes[s] if s < stages - 1 else None
        back = boundary_bytes[s - 1] if s else None
        microbatches = range(first_microbatch, first_microbatch + count)
        for m, a, b, v in zip(microbatches, f_start.tolist(), f_end.tolist(), forward_versions[s].tolist()):
            events.append(Event(s, device, "forward", m, a, b, v, onward))
        for m, a, b, v in zip(microbatches, b_start.tolist(), b_end.tolist(), backward_versions[s].tolist()):
            events.append(Event(s, device, "backward", m, a, b, v, back))
            if (m + 1) % accumulate == 0:
                k = m // accumulate
                events.append(Event(s, device, "update", k, b, b, k + 1, None))
        counters += _in_flight(device, f_end, b_end)
    return events, counters


def _in_flight(device: int, f_end: np.ndarray, b_end: np.ndarray) -> List[Counter]:
    """Microbatches whose activations a stage holds: from the end of the forward to the end of the backward."""
    times = np.concatenate([f_end, b_end])
    steps = np.concatenate([np.ones(len(f_end), np.int64), -np.ones(len(b_end), np.int64)])
    order = np.argsort(times, kind="stable")
    values, times = np.cumsum(steps[order]), times[order]
    last = np.append(times[1:] != times[:-1], True)  # of those at one time, the last stands
    return [
        Counter(device, "microbatches in flight", t, v) for t, v in zip(times[last].tolist(), values[last].tolist())
    ]


def write_chrome(path: Path, events: Sequence[Event], counters: Sequence[Counter], metadata: Dict[str, Any]) -> None:
    """Write a trace file, whole or not at all. Raises RunFault if the disk refuses."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        with gzip.open(temporary, "wt", compresslevel=5) as file:
            file.write('{"displayTimeUnit":"ms","otherData":' + json.dumps(metadata) + ',"traceEvents":[\n')
            separator = ""
            for record in _records(events, counters, bool(metadata.get("modelled"))):
                file.write(separator + json.dumps(record, separators=(",", ":")))
                separator = ",\n"
            file.write("\n]}\n")
        os.replace(temporary, path)
    except OSError as error:
        raise RunFault(f"{path}: the trace cannot be written: {error.strerror or error}") from error


def _records(events: Sequence[Event], counters: Sequence[Counter], modelled: bool) -> Iterator[Dict[str, Any]]:
    for device in sorted({event.device for event in events}):
        stages = sorted({event.stage for event in events if event.device == device}) if len(events) < 5000 else [device]
        yield {"ph": "M", "pid": device, "name": "process_name", "args": {"name": f"device {device}"}}
        yield {"ph": "M", "pid": device, "name": "process_sort_index", "args": {"sort_index": device}}
        yield {
            "ph": "M",
            "pid": device,
            "tid": 0,
            "name": "thread_name",
            "args": {"name": f"stage {', '.join(map(str, stages))}"},
        }
    for event in events:
        yield _work(event, modelled)
    yield from _arrows(events)
    for counter in counters:
        yield {
            "ph": "C",
            "pid": counter.device,
            "name": counter.name,
            "ts": counter.time_ns / 1000,
            "args": {"value": counter.value},
        }


def _work(event: Event, modelled: bool) -> Dict[str, Any]:
    label = "k" if event.kind == "update" else "microbatch"
    args: Dict[str, Any] = {"stage": event.stage, label: event.microbatch, "version": event.version}
    if event.bytes is not None:
        args["bytes"] = event.bytes
    if modelled:
        args["modelled"] = True
    name = {"forward": "F", "backward": "B", "update": "U"}.get(event.kind, event.kind + " ") + str(event.microbatch)
    start, length = event.start_ns / 1000, (event.end_ns - event.start_ns) / 1000
    return {
        "ph": "X",
        "pid": event.device,
        "tid": 0,
        "name": name,
        "cat": event.kind,
        "ts": start,
        "dur": length,
        "args": args,
    }


def _arrows(events: Iterable[Event]) -> Iterator[Dict[str, Any]]:
    """From each forward to the next stage's, and from each backward to the stage's before."""
    passes = {(e.kind, e.stage, e.microbatch): e for e in events if e.kind in ("forward", "backward")}
    number = 0
    for (kind, stage, microbatch), event in passes.items():
        reached = passes.get((kind, stage + (1 if kind == "forward" else -1), microbatch))
        if reached is not None:
            number += 1
            common = {
                "cat": "activations" if kind == "forward" else "gradients",
                "name": "sends",
                "id": number,
                "tid": 0,
            }
            yield {"ph": "s", "pid": event.device, "ts": event.end_ns / 1000 - 0.001, **common}
            yield {"ph": "f", "bp": "e", "pid": reached.device, "ts": reached.start_ns / 1000 + 0.001, **common}


def read_chrome(path: Path) -> Trace:
    """Events, counters and metadata of a trace file made by `write_chrome`. Raises BadInput where it is none."""
    try:
        with gzip.open(path, "rt") as file:
            held = json.load(file)
        records = held["traceEvents"]
        events = [_event(r) for r in records if r["ph"] == "X"]
        counters = [
            Counter(r["pid"], r["name"], round(r["ts"] * 1000), r["args"]["value"]) for r in records if r["ph"] == "C"
        ]
        return events, counters, dict(held.get("otherData", {}))
    except FileNotFoundError:
        raise BadInput(f"{path}: no such trace file") from None
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path}: cannot be read as a gzipped Chrome trace: {error}") from None


def _event(r: Dict[str, Any]) -> Event:
    args = r["args"]
    start, index = round(r["ts"] * 1000), args["k"] if "k" in args else args["microbatch"]
    end = start + round(r["dur"] * 1000)
    return Event(args["stage"], r["pid"], r["cat"], index, start, end, args["version"], args.get("bytes"))


def merge(traces: Sequence[Trace]) -> Trace:
    """One trace of several, such as one a rank: all events and counters by time, metadata joined, the first's winning."""
    metadata: Dict[str, Any] = {}
    for _, _, held in reversed(traces):
        metadata.update(held)
    events = sorted((e for es, _, _ in traces for e in es), key=lambda e: (e.start_ns, e.stage))
    counters = sorted((c for _, cs, _ in traces for c in cs), key=lambda c: (c.time_ns, c.device))
    return events, counters, metadata
