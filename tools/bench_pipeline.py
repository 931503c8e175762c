"""Benchmark of the distributed backend against PyTorch's own pipeline schedule, in one run: python tools/bench_pipeline.py"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ipu_pipe import interrupts  # noqa: E402

if __name__ == "__main__":
    interrupts.end_at_once()  # before the imports that take time

from ipu_pipe.errors import BadInput, Parser, RunFault, end_process, run_command  # noqa: E402

SIZE = 8  # samples per microbatch
RATE = 1e-3


def make_parser() -> Parser:
    """Build the parser of the command line."""
    p = Parser(
        prog="tools/bench_pipeline.py",
        description="Time a pre-activation ResNet-20 in two stages on two processes of one thread each (gloo): with PyTorch's\n"
        "Schedule1F1B, with this package's pipedream_flush, and with asynchronous methods. Turns alternate within one run.",
    )
    p.add_argument(
        "--accumulate",
        type=int,
        nargs="+",
        default=[2, 4, 8],
        metavar="N",
        help="microbatches per update (default 2 4 8)",
    )
    p.add_argument(
        "--methods",
        nargs="+",
        default=["pipedream", "pipemare"],
        help="asynchronous methods (default pipedream pipemare)",
    )
    p.add_argument("--rounds", type=int, default=7, help="turns of each method; medians are printed (default 7)")
    p.add_argument("--microbatches", type=int, default=32, help="microbatches per turn (default 32)")
    p.add_argument("--json", action="store_true", help="print JSON")
    return p


def main() -> None:
    """Run the command line."""
    args = make_parser().parse_args()
    from ipu_pipe.schedule.methods import resolve_method

    if args.rounds < 1 or min(args.accumulate) < 1 or any(args.microbatches % n for n in args.accumulate):
        raise BadInput(
            f"--microbatches: {args.microbatches}: must be a multiple of every --accumulate; --rounds at least 1"
        )
    for name in args.methods:
        resolve_method(name)
    rows = []
    for accumulate in args.accumulate:
        rows.append(measure(accumulate, args.methods, args.rounds, args.microbatches))
        if not args.json:
            r = rows[-1]
            print(
                f"N = {accumulate}: PyTorch 1F1B {r['torch_ms']:.1f} ms a microbatch; pipedream_flush {r['ratio_flush']:.3f}"
            )
            print("  stage times: " + ", ".join(f"{t:.1f} ms" for t in r["stage_ms"]))
            for name, m in r["methods"].items():
                gain = f"{m['gain']:.3f} times PyTorch's speed; the stage times allow {m['allowed']:.3f}"
                print(f"  {name}: {gain}: {m['share']:.3f} of it", flush=True)
    if args.json:
        print(json.dumps({"rows": rows}, indent=1))


def measure(accumulate: int, methods: List[str], rounds: int, microbatches: int) -> Dict[str, Any]:
    """Time all methods with N = `accumulate` on two new processes; return medians over the turns."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        work = functools.partial(
            _time_rank, folder=folder, accumulate=accumulate, methods=methods, rounds=rounds, count=microbatches
        )
        os.environ["OMP_NUM_THREADS"] = "1"
        processes = [context.Process(target=work, args=(rank,)) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise RunFault("a process of the benchmark failed: see above")
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2)]
    return _summarize(accumulate, methods, microbatches, ranks)


def _summarize(accumulate: int, methods: List[str], count: int, ranks: List[Dict[str, Any]]) -> Dict[str, Any]:
    """Return milliseconds, ratios to PyTorch's time, and the speed that the stage times allow each asynchronous method."""
    from ipu_pipe.schedule.clock import Costs, clock
    from ipu_pipe.schedule.methods import resolve_method
    from ipu_pipe.schedule.timelines import make_schedule

    # the slower process decides the time of a turn
    times = {name: [max(pair) for pair in zip(*(rank["times"][name] for rank in ranks))] for name in ranks[0]["times"]}
    costs = [[rank["costs"][kind] for rank in ranks] for kind in ("forward", "backward", "update")]
    schedule = make_schedule(resolve_method("pipedream_flush"), 2, accumulate, accumulate)
    flush = clock(schedule, Costs(costs[0], costs[1], costs[2])).finish * count / accumulate
    ratios = {
        name: statistics.median(a / b for a, b in zip(times["torch"], seconds)) for name, seconds in times.items()
    }
    gains = {}
    for name in methods:
        steady = max(f + b + u / accumulate for f, b, u in zip(*costs)) * count
        allowed = flush / steady
        gains[name] = {"gain": ratios[name], "allowed": allowed, "share": ratios[name] / allowed}
    return {
        "accumulate": accumulate,
        "torch_ms": statistics.median(times["torch"]) * 1e3 / count,
        "ratio_flush": ratios["pipedream_flush"],
        "stage_ms": [1e3 * (f + b) for f, b, _ in zip(*costs)],
        "methods": gains,
    }


def _time_rank(rank: int, folder: str, accumulate: int, methods: List[str], rounds: int, count: int) -> None:
    """Time the turns of one rank and write seconds by method, and by pass, into the folder."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    data = [(torch.randn(SIZE, 3, 32, 32), torch.randint(0, 10, (SIZE,))) for _ in range(accumulate)]
    turns: Dict[str, Callable[[], None]] = {"torch": _make_torch_turn(rank, data, accumulate, count)}
    engines: Dict[str, Any] = {}
    for name in ["pipedream_flush", *methods]:
        engines[name] = _make_engine(rank, name, data, accumulate, count * (rounds + 2), dist.new_group([0, 1]))
        turns[name] = functools.partial(_run_our_turn, engines[name], count // accumulate)
    times: Dict[str, List[float]] = {name: [] for name in turns}
    for number in range(rounds + 2):
        for name, turn in turns.items():
            dist.barrier()
            begun = time.perf_counter()
            turn()
            if number >= 2:  # the first turns fill pipelines and caches
                times[name].append(time.perf_counter() - begun)
    events = engines["pipedream_flush"].recorder.events()
    events = events.select(events.microbatch >= accumulate)
    costs = {kind: _compute_pass_seconds(events, kind) for kind in ("forward", "backward", "update")}
    (Path(folder) / f"{rank}.json").write_text(json.dumps({"times": times, "costs": costs}))
    dist.barrier()
    end_process(0)


def _compute_pass_seconds(events: Any, kind: str) -> float:
    """Return the median seconds of a pass of this kind."""
    passes = events.select(events.is_kind(kind))
    return statistics.median(((passes.end - passes.start) / 1e9).tolist()) if len(passes.start) else 0.0


def _make_model() -> Any:
    """Build the model with the same initial weights each time."""
    import torch

    from models.resnet import preact_resnet20

    torch.manual_seed(0)
    return preact_resnet20()


CUT = ["layer2.0"]


def _make_engine(rank: int, name: str, data: List[Any], accumulate: int, count: int, group: Any) -> Any:
    """Build this rank's interpreter of a method's schedule of `count` microbatches."""
    import torch

    from ipu_pipe.backends.processes.interpreter import Interpreter
    from ipu_pipe.backends.processes.layout import RankLayout
    from ipu_pipe.backends.processes.mail import TorchMail
    from ipu_pipe.backends.processes.stage import Stage, StageModel
    from ipu_pipe.backends.processes.trace import TraceRecorder
    from ipu_pipe.backends.work import Work
    from ipu_pipe.model.cutting import cut_model, list_crossings
    from ipu_pipe.model.stages import partition
    from ipu_pipe.schedule.methods import resolve_method
    from ipu_pipe.schedule.timelines import make_schedule
    from ipu_pipe.schedule.versions import VersionTable
    from ipu_pipe.update.apply import UpdateRules
    from ipu_pipe.update.groups import make_groups, select_stage

    model, method = _make_model(), resolve_method(name)
    part = partition(model, data[0][0], CUT)
    table = VersionTable(make_schedule(method, 2, count, accumulate), method)
    cut = cut_model(model, CUT, data[0][0])
    optimizer = torch.optim.SGD(select_stage(make_groups(model, part), rank), lr=RATE, momentum=0.9)
    rules = UpdateRules({}, method, table.rule_lag(), accumulate, optimizer, lambda k: RATE)
    work, cpu = Work(torch.nn.functional.cross_entropy, table, rules), torch.device("cpu")
    layout = RankLayout(rank, (0, 1))
    stage_model = StageModel(layout, rank, cut[rank], list_crossings(cut), lambda m: data[m % len(data)], cpu)
    recorder = TraceRecorder(rank, rank, range(count))
    mail = TorchMail(layout, cpu, recorder, 300.0, group)
    return Interpreter(work, {rank: Stage(work, stage_model, mail, recorder)}, mail, recorder)


def _run_our_turn(engine: Any, updates: int) -> None:
    """Carry out the next updates."""
    for _ in range(updates):
        engine.step(engine.update)


def _make_torch_turn(rank: int, data: List[Any], accumulate: int, count: int) -> Callable[[], None]:
    """Return a function that trains `count` microbatches with PyTorch's Schedule1F1B."""
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from ipu_pipe.model.cutting import cut_model

    piece = cut_model(_make_model(), CUT, data[0][0])[rank]
    optimizer = torch.optim.SGD(piece.parameters(), lr=RATE, momentum=0.9)
    stage = PipelineStage(piece, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=accumulate, loss_fn=torch.nn.functional.cross_entropy)
    x, y = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])

    def turn() -> None:
        for _ in range(count // accumulate):
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=y)
            optimizer.step()
            optimizer.zero_grad()

    return turn


if __name__ == "__main__":
    run_command(main)
