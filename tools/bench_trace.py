"""Benchmark of tracing: the same run on two processes, traced and untraced in turns: python
tools/bench_trace.py
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import socket
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ipu_pipe import interrupts  # noqa: E402

if __name__ == "__main__":
    interrupts.install_end_at_interrupt()  # before the imports that take time

from ipu_pipe.errors import BadInput, Parser, RunFault, end_process, run_command  # noqa: E402

MODELS = {  # entry, arguments, stages, shape of a sample
    "mlp": (
        "models.mlp:mlp",
        {"inputs": 64, "width": 64, "layers": 4, "classes": 10},
        ["fc3"],
        (64,),
    ),
    "resnet20": ("models.resnet:preact_resnet20", {"classes": 10}, ["layer2.0"], (3, 32, 32)),
}
RESAMPLED = 2000  # medians of turns drawn again, for the interval


def make_parser() -> Parser:
    """Return the command line's parser."""
    p = Parser(
        prog="tools/bench_trace.py",
        description="Time steps of pipedream on two processes of one thread each, traced and not "
        "in turns within one run;\n"
        "prints the median overhead over the turns and its 95 % interval (bootstrap over turns): "
        "in time and, which other work\n"
        "on the machine disturbs less, in CPU time of the thread that trains. Untraced steps still "
        "keep the totals of busy\n"
        "time and waits, which every run has.",
    )
    p.add_argument("--model", choices=sorted(MODELS), default="resnet20")
    p.add_argument("--turns", type=int, default=15, help="turns each, at least 11 (default 15)")
    p.add_argument("--updates", type=int, default=20, help="updates a turn (default 20)")
    p.add_argument("--json", action="store_true", help="print JSON")
    return p


def main() -> None:
    """Run the command line."""
    args = make_parser().parse_args()
    if args.turns < 11 or args.updates < 1:
        raise BadInput("--turns: at least 11; --updates: at least 1")
    overhead = measure(args.model, args.turns, args.updates)
    if args.json:
        print(json.dumps(overhead, indent=1))
        return
    print(
        f"{args.model}: {overhead['events_an_update']:.1f} events an update; median of "
        f"{args.turns} turns, 95 % interval"
    )
    for clock, what in (("wall", "time"), ("cpu", "CPU time of the thread that trains")):
        row = overhead[clock]
        low, high = (100 * edge for edge in row["interval"])
        print(
            f"  {what}: {row['untraced_ms']:.3f} ms an update untraced, {row['traced_ms']:.3f} "
            f"traced: overhead "
            f"{100 * row['overhead']:.2f} % ({low:.2f} to {high:.2f} %)"
        )


def measure(model: str, turns: int, updates: int) -> Dict[str, Any]:
    """Measure the overhead of tracing as a share of the untraced time, on two processes."""
    with socket.socket() as listener, tempfile.TemporaryDirectory() as folder:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
        listener.close()
        context = multiprocessing.get_context("spawn")
        os.environ["OMP_NUM_THREADS"] = "1"
        ranks = [
            context.Process(target=_run_rank, args=(r, port, folder, model, turns, updates))
            for r in range(2)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise RunFault("a process of the benchmark failed: see above")
        times = [json.loads((Path(folder) / f"{r}.json").read_text()) for r in range(2)]
    # a turn's time is that of the slower process
    overhead: Dict[str, Any] = {"model": model, "turns": turns, "updates": updates}
    overhead["events_an_update"] = times[0]["events"] / ((turns + 1) * updates)
    for clock in ("wall", "cpu"):
        traced, untraced = (
            [max(pair) for pair in zip(*(rank[f"{how} {clock}"] for rank in times))]
            for how in ("traced", "untraced")
        )
        shares = [a / b - 1 for a, b in zip(traced, untraced)]
        overhead[clock] = {
            "traced_ms": 1e3 * statistics.median(traced) / updates,
            "untraced_ms": 1e3 * statistics.median(untraced) / updates,
            "overhead": statistics.median(shares),
            "interval": bootstrap_interval(shares),
            "shares": shares,
        }
    return overhead


def bootstrap_interval(shares: List[float]) -> Tuple[float, float]:
    """Return the 95 % interval of the median of `shares`, by bootstrap over turns."""
    rng = random.Random(0)
    medians = sorted(
        statistics.median(rng.choices(shares, k=len(shares))) for _ in range(RESAMPLED)
    )
    return medians[RESAMPLED * 25 // 1000], medians[RESAMPLED * 975 // 1000]


def _run_rank(rank: int, port: int, folder: str, model: str, turns: int, updates: int) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(port)
    )
    import time

    import torch
    import torch.distributed as dist

    from ipu_pipe.backends.table import launch
    from ipu_pipe.config.load import configure
    from ipu_pipe.data import TensorData
    from ipu_pipe.pipeline.flow import Flow
    from ipu_pipe.run.build import build
    from ipu_pipe.trace.store import read_store

    torch.set_num_threads(1)
    entry, args, stages, shape = MODELS[model]
    # a stretch of so many updates is traced, then as many are not
    total = 2 * updates * (turns + 1)
    config = configure(
        model={"entry": entry, "args": args},
        method="pipedream",
        stages=stages,
        micro_batch_size=8,
        gradient_accumulation=4,
        steps=total,
        backend={"name": "distributed", "threads": 1},
        optimizer={"lr": 1e-4},
        evaluate={"every": 0},
        log={"trace": {"end": total}},
    )
    launch(config, {})
    torch.manual_seed(0)  # both ranks must read the same data
    x, y = torch.randn(64, *shape), torch.randint(10, (64,))
    job = build(config, data=TensorData((x, y), (x, y), seed=0))
    job.folder = Path(folder)
    flow = Flow(job)
    engine: Any = flow.engine
    times: Dict[str, List[float]] = {
        f"{how} {clock}": [] for how in ("traced", "untraced") for clock in ("wall", "cpu")
    }
    recorder = engine._recorder
    for turn in range(2 * (turns + 1)):
        how = "traced" if turn % 4 in (0, 3) else "untraced"  # ABBA
        recorder._traced = range(total) if how == "traced" else range(0)
        recorder.begin_update(engine._interpreter.update)
        dist.barrier()
        begun, worked = time.perf_counter(), time.thread_time()
        for _ in range(updates):
            flow.give()
            list(flow.take())
        recorder.flush()
        if turn >= 2:  # the first turns fill pipelines and caches
            times[f"{how} wall"].append(time.perf_counter() - begun)
            times[f"{how} cpu"].append(time.thread_time() - worked)
    recorder.flush(wait=True)
    events = read_store(Path(folder) / "trace" / f"rank-{rank}.trace").events
    (Path(folder) / f"{rank}.json").write_text(json.dumps({**times, "events": len(events.start)}))
    dist.barrier()
    end_process(0)


if __name__ == "__main__":
    run_command(main)
