"""Damage traces, of a run and of Chrome's JSON, in bytes and values; then analyze them, also into odd output files."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any, List

from tests.hostile.cases import (
    FLOATS,
    Bases,
    Case,
    change_value,
    damage_bytes,
    damage_file,
    make_odd_output,
)

# kinds of events in traces of PyTorch's profiler and of another program
EVENTS = ["X", "X", "X", "B", "M", "?"]


def _make_foreign_trace(rng: random.Random) -> bytes:
    """Make the trace of another program, with odd events."""
    events: List[Any] = []
    for _ in range(rng.randrange(1, 6)):
        name = rng.choice(["aten::mm", "gemm", "process_name", "\x1b[31mred"])
        event = {"ph": rng.choice(EVENTS), "name": name, "cat": rng.choice(["cpu_op", "kernel"]), "pid": 1, "tid": 7,
                 "ts": rng.choice([0, 1, *FLOATS]), "dur": 2.0, "args": {"stream": 7}}  # fmt: skip
        change_value(event, rng)
        events.append(rng.choice([event, event, event, 3]))
    content = json.dumps({"traceEvents": events}).encode("utf-8", "surrogatepass")
    return damage_bytes(content, rng) if rng.random() < 0.3 else content


def _change_chrome(path: Path, rng: random.Random) -> str:
    """Change one value of a Chrome trace; the file stays valid JSON."""
    trace = json.loads(gzip.decompress(path.read_bytes()))
    key = change_value(rng.choice([trace, trace["otherData"]]), rng)
    text = json.dumps(trace)
    path.write_bytes(gzip.compress(text.encode("utf-8", "surrogatepass"), 1))
    return f"{path.name}: {key} changed"


def make_trace_case(rng: random.Random, folder: Path, bases: Bases) -> Case:
    """Make a case that analyzes a damaged trace, or a whole one into an odd file."""
    run = folder / "run"
    shutil.copytree(bases.end, run)
    stores = sorted(path for path in (run / "trace").rglob("*") if path.is_file())
    chrome = run / "trace.json.gz"
    target, how = "run", rng.random()
    if how < 0.35 and chrome.is_file():
        target = f"run/{chrome.name}"
        mutation = _change_chrome(chrome, rng) if rng.random() < 0.7 else damage_file(chrome, rng)
    elif how < 0.6 and stores:
        store = rng.choice(stores)
        target = rng.choice(["run", str(store.relative_to(folder))])
        mutation = damage_file(store, rng)
    elif how < 0.75:
        target = rng.choice(["profile.json", "ranks"])
        (folder / "ranks").mkdir()
        for name in ("profile.json", "ranks/0.json", "ranks/1.json"):
            (folder / name).write_bytes(_make_foreign_trace(rng))
        mutation = "another program's trace"
    else:
        mutation = "a whole trace"
    argv = [rng.choice([target] * 30 + ["", ".", "/dev/null", "gone", os.fsdecode(b"\xff")])]
    option = rng.choice(["", "--json", "--json", "--html", "--html", "--png", "--against"])
    if option:
        argv.append(option)
    if option in ("--html", "--png"):
        argv.append(make_odd_output(rng, folder, f"out.{option[2:]}"))
    elif option == "--against":
        argv.append(rng.choice([str(bases.end), "run", "gone"]))
    return Case("analyze", argv, mutation)
