"""Damage traces, of a run and of Chrome's JSON, in bytes and values; then analyze them, also into odd output files."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
from pathlib import Path

from tests.hostile.cases import (
    FLOATS,
    Bases,
    Case,
    change_value,
    damage_bytes,
    damage_file,
    make_odd_output,
)

# events of PyTorch's profiler, of another program, and invalid ones
FOREIGN = [
    {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0},
    {
        "ph": "X",
        "name": "gemm",
        "cat": "kernel",
        "pid": 0,
        "tid": 7,
        "ts": 3.5,
        "dur": 1e9,
        "args": {"stream": 7},
    },
    {"ph": "B", "name": "open for ever", "pid": 1, "tid": 1, "ts": 0},
    {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "\x1b[31mred"}},
    {"ph": "X"},
    3,
]


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
            events = [{**event, "ts": rng.choice([0, 1, *FLOATS])} if isinstance(event, dict) else event
                      for event in rng.sample(FOREIGN, rng.randrange(1, len(FOREIGN)))]  # fmt: skip
            content = json.dumps({"traceEvents": events}).encode()
            (folder / name).write_bytes(
                damage_bytes(content, rng) if rng.random() < 0.3 else content
            )
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
