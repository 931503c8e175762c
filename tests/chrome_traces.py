"""Trace files read again, and several joined."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ipu_pipe.errors import BadInput
from ipu_pipe.trace.events import KINDS, Counter, Event

Trace = Tuple[List[Event], List[Counter], Dict[str, Any]]


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
