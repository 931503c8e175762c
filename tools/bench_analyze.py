"""Time and memory of the analysis of large traces: python tools/bench_analyze.py --events 10000000

It writes two synthetic traces: a run's folder with one file for each of eight ranks (passes,
messages, waits, updates and counters of memory), and one rank's Chrome trace as PyTorch's profiler
writes it. `tools/analyze.py --json` reads each in its own process, whose time and peak resident
memory are printed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ipu_pipe import interrupts  # noqa: E402

if __name__ == "__main__":
    interrupts.install_end_at_interrupt()  # before the imports that take time

import numpy as np  # noqa: E402

from ipu_pipe.errors import Parser, RunFault, run_command  # noqa: E402
from ipu_pipe.trace.events import KINDS, MEMORY, PAYLOADS, Counters, Events  # noqa: E402
from ipu_pipe.trace.store import TraceWriter  # noqa: E402

RANKS = 8
PER_MICROBATCH = ("wait", "forward", "send", "wait", "backward", "send", "update")
LIMIT_SECONDS, LIMIT_GB = 60, 4


def make_parser() -> Parser:
    """Return the command line's parser."""
    p = Parser(prog="tools/bench_analyze.py", description=__doc__)
    p.add_argument(
        "--events", type=int, default=10_000_000, help="of the run's folder (default 10,000,000)"
    )
    p.add_argument(
        "--foreign", type=int, default=1_000_000, help="of the Chrome trace (default 1,000,000)"
    )
    p.add_argument("--json", action="store_true", help="print JSON")
    return p


def main() -> None:
    """Run the command line."""
    args = make_parser().parse_args()
    rows: List[Dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, count, write in (
            ("own files", args.events, write_run),
            ("profiler's JSON", args.foreign, write_profiler_trace),
        ):
            if count:
                path = Path(folder) / name.replace(" ", "-").replace("'", "")
                path.mkdir()
                events = write(path, count)
                rows.append({"trace": name, "events": events, **measure(path)})
                if not args.json:
                    print(format_row(rows[-1]), flush=True)
    if args.json:
        print(json.dumps(rows, indent=1))


def format_row(row: Dict[str, Any]) -> str:
    """Format a measurement as a line."""
    return (
        f"{row['trace']}: {row['events']:,} events, {row['file_bytes'] / 1e6:,.0f} MB on disk, "
        f"analyzed in {row['seconds']:.1f} s"
        f" ({row['cpu_seconds']:.1f} s of a core; limit {LIMIT_SECONDS}) with "
        f"{row['peak_bytes'] / 1e9:.2f} GB (limit {LIMIT_GB})"
    )


def measure(path: Path) -> Dict[str, Any]:
    """Analyze a trace in another process. Return its seconds and bytes."""
    before = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CHILD, str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    seconds = time.perf_counter() - before
    if ended.returncode:
        raise RunFault(f"the analysis failed: {ended.stderr.strip().splitlines()[-1:]}")
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    peak, cpu = ended.stderr.splitlines()[-1].split()
    return {
        "file_bytes": size,
        "seconds": seconds,
        "cpu_seconds": float(cpu),
        "peak_bytes": int(peak),
    }


CHILD = f"""
import resource, sys
from ipu_pipe.cli.analyze import main
main([sys.argv[1], "--json"])
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_maxrss * {1 if sys.platform == "darwin" else 1024}, used.ru_utime + used.ru_stime, file=sys.stderr)
"""


def write_run(path: Path, events: int) -> int:
    """Write a run's folder of about `events` events. Return their number."""
    microbatches = max(1, events // (RANKS * len(PER_MICROBATCH)))
    rng = np.random.default_rng(0)
    metadata = {
        "method": "pipedream",
        "method_args": {},
        "stages": RANKS,
        "accumulate": 1,
        "microbatches": microbatches,
        "backend": "made up",
        "device_of_stage": list(range(RANKS)),
        "units": [
            {
                "name": f"layer{i}",
                "stage": i // 4,
                "forward_flops": 1e9,
                "backward_flops": 2e9,
                "crossing_bytes": 1 << 20,
            }
            for i in range(4 * RANKS)
        ],
    }
    for rank in range(RANKS):
        writer = TraceWriter(path / "trace" / f"rank-{rank}.trace", metadata)
        writer.write_events(_make_events(rank, microbatches, rng))
        writer.write_counters(_make_counters(rank, microbatches))
        writer.close()
    return microbatches * RANKS * len(PER_MICROBATCH)


def _make_events(rank: int, microbatches: int, rng: Any) -> Events:
    width = len(PER_MICROBATCH)
    count = microbatches * width
    lasts = rng.integers(50_000, 150_000, count)
    ends = np.cumsum(lasts) + rank * 1_000_000
    position = np.arange(count) % width
    kind = np.array([KINDS.index(word) for word in PER_MICROBATCH], np.int8)[position]
    before, after = max(rank - 1, 0), min(rank + 1, RANKS - 1)
    peer = np.array([before, -1, after, after, -1, before, -1], np.int32)[position]
    onward, back = PAYLOADS.index("activations"), PAYLOADS.index("gradients")
    carries = np.array([onward, 0, onward, back, 0, back, 0], np.int8)[position]
    microbatch = (np.arange(count) // width).astype(np.int32)
    version = np.where(
        position == width - 1, microbatch + 1, np.maximum(microbatch - (RANKS - rank), 0)
    ).astype(np.int32)
    size = np.where(kind == KINDS.index("send"), 1 << 20, -1).astype(np.int64)
    return Events.from_columns(
        count,
        stage=rank,
        device=rank,
        kind=kind,
        microbatch=microbatch,
        start=ends - lasts,
        end=ends,
        version=version,
        bytes=size,
        peer=peer,
        carries=carries,
    )


def _make_counters(rank: int, microbatches: int) -> Counters:
    count = microbatches // 10
    time_ns = np.arange(count, dtype=np.int64) * 7_000_000
    values = (np.arange(count) % 17).astype(np.float64) * 1e6
    names = np.array([MEMORY["activations"], MEMORY["gradients"]], object)[np.arange(count) % 2]
    return Counters(np.full(count, rank, np.int32), names, time_ns, values)


def write_profiler_trace(path: Path, events: int) -> int:
    """Write one rank's trace as PyTorch's profiler writes it. Return the number of events."""
    keys = {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "nccl", "rank": 0},
        "baseTimeNanoseconds": 17 * 10**17,
    }
    sends, computes = (
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
        "void gemm_kernel_{}<float>",
    )
    with (path / "rank0.json").open("w", encoding="utf-8") as file:
        file.write(json.dumps(keys)[:-1] + ', "traceEvents": [\n')
        for i in range(events):
            stream = 7 if i % 9 else 13
            record = {
                "ph": "X",
                "cat": "kernel",
                "name": computes.format(i % 50) if i % 9 else sends,
                "pid": 0,
                "tid": stream,
                "ts": round(4464592638518.35 + 12.5 * i, 3),
                "dur": 8.375 + i % 11,
                "args": {
                    "External id": i,
                    "device": 0,
                    "stream": stream,
                    "correlation": i,
                    "registers per thread": 64,
                    "grid": [128, 1, 1],
                    "block": [256, 1, 1],
                },
            }
            file.write((",\n" if i else "") + json.dumps(record))
        file.write("]}\n")
    return events


if __name__ == "__main__":
    run_command(main)
