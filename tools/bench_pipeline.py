"""Benchmark of the distributed backend against PyTorch's own pipeline schedules, in one run: python
tools/bench_pipeline.py
"""

from __future__ import annotations

import functools
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Sequence, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ipu_pipe import interrupts  # noqa: E402

if __name__ == "__main__":
    interrupts.install_end_at_interrupt()  # before the imports that take time

from ipu_pipe.errors import BadInput, Parser, RunFault, end_process, run_command  # noqa: E402

SIZE = 8  # samples per microbatch
RATE = 1e-3
RANKS = 2
THEIRS = {  # PyTorch's class of the same schedule
    "pipedream_flush": "Schedule1F1B",
    "gpipe": "ScheduleGPipe",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_zb": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}
BY_DEVICE = ["interleaved_1f1b", "zbv", "dualpipe_v"]
OBJECTS = ["pipedream_flush", "pipedream", "zbv"]
MODELS = ["resnet", "transformer"]
DEFAULT_WARM_UP = 2  # turns that fill pipelines and caches


class Case(NamedTuple):
    """The runs that are timed in turns: `methods` with PyTorch's class of the same schedule, and
    `asynchronous` methods.
    """

    model: str
    stages: int
    methods: Sequence[str]
    asynchronous: Sequence[str]
    accumulate: int
    rounds: int
    microbatches: int


def make_parser() -> Parser:
    """Build the parser of the command line."""
    p = Parser(
        prog="tools/bench_pipeline.py",
        description="Time pipelines on two processes of one thread each (gloo), in turns that "
        "alternate within one run.\n\n"
        "1. A pre-activation ResNet-20 in two stages: PyTorch's Schedule1F1B, this package's "
        "pipedream_flush, and asynchronous\n"
        "   methods.\n"
        "2. Models in four stages, two on each process: schedules by device beside PyTorch's "
        "classes, with the bubble that the\n"
        "   trace measures, that of the clock with the measured times, and that of the schedule in "
        "unit slots.\n"
        "3. A step of ipu_pipe.Pipeline against a step of the engine of `train`, each on two "
        "processes of its own.",
    )
    p.add_argument(
        "--accumulate",
        type=int,
        nargs="*",
        default=[2, 4, 8],
        metavar="N",
        help="microbatches per update of part 1; none leaves it out (default 2 4 8)",
    )
    p.add_argument(
        "--methods",
        nargs="+",
        default=["pipedream", "pipemare"],
        help="asynchronous methods of part 1 (default pipedream pipemare)",
    )
    p.add_argument(
        "--schedules",
        nargs="*",
        default=BY_DEVICE,
        choices=[*THEIRS][2:],
        metavar="NAME",
        help=f"schedules of part 2, of {', '.join([*THEIRS][2:])}; none leaves it out (default "
        f"{' '.join(BY_DEVICE)})",
    )
    p.add_argument(
        "--objects",
        nargs="*",
        default=OBJECTS,
        metavar="NAME",
        help=f"methods of part 3; none leaves it out (default {' '.join(OBJECTS)})",
    )
    p.add_argument(
        "--models",
        nargs="+",
        default=MODELS,
        choices=MODELS,
        help="models of part 2 (default both)",
    )
    p.add_argument(
        "--rounds", type=int, default=7, help="turns of each; medians are printed (default 7)"
    )
    p.add_argument(
        "--microbatches", type=int, default=32, help="microbatches per turn (default 32)"
    )
    p.add_argument("--json", action="store_true", help="print JSON")
    return p


def main() -> None:
    """Run the command line."""
    args = make_parser().parse_args()
    from ipu_pipe.schedule.methods import METHODS, resolve_method

    batch = 8  # microbatches per update of part 2
    sizes = [*args.accumulate, *[batch] * bool(args.schedules)]
    if args.rounds < 1 or min(sizes, default=1) < 1 or any(args.microbatches % n for n in sizes):
        raise BadInput(
            f"--microbatches: {args.microbatches}: must be a multiple of "
            f"{', '.join(map(str, sizes))}; --rounds at least 1"
        )
    for name in [*args.methods, *args.objects]:
        resolve_method(name)
    cases = [
        Case("resnet", RANKS, ["pipedream_flush"], args.methods, n, args.rounds, args.microbatches)
        for n in args.accumulate
    ]
    if args.schedules:
        cases += [
            Case(model, 2 * RANKS, args.schedules, [], batch, args.rounds, args.microbatches)
            for model in args.models
        ]
    rows = []
    for case in cases:
        rows.append(measure(case))
        if not args.json:
            print(format_row(rows[-1]), flush=True)
    for name in args.objects:
        # asynchronous methods update after each microbatch, where a step's own cost weighs most
        accumulate = min(sizes, default=batch) if METHODS[name].flushes else 1
        stages = RANKS * (1 if METHODS[name].order is None else 2)
        row = measure_object(
            Case("resnet", stages, [name], [], accumulate, args.rounds, args.microbatches)
        )
        rows.append(row)
        if not args.json:
            print(format_object(row), flush=True)
    if args.json:
        print(json.dumps({"rows": rows}, indent=1))


def format_row(row: Dict[str, Any]) -> str:
    """Format the figures of a case."""
    lines = [f"{row['model']} in {row['stages']} stages, N = {row['accumulate']}"]
    lines.append("  stage times: " + ", ".join(f"{t:.1f} ms" for t in row["stage_ms"]))
    for name, m in row["methods"].items():
        lines.append(
            f"  {name}: {m['ratio']:.3f} times PyTorch's speed ({THEIRS[name]}: "
            f"{m['torch_ms']:.2f} ms a microbatch); "
            f"bubble {m['bubble_measured']:.1%} measured, {m['bubble_clock']:.1%} by the clock, "
            f"{m['bubble_planned']:.1%} planned"
        )
    for name, m in row["asynchronous"].items():
        gain = f"{m['gain']:.3f} times PyTorch's speed; the stage times allow {m['allowed']:.3f}"
        lines.append(f"  {name}: {gain}: {m['share']:.3f} of it")
    return "\n".join(lines)


def measure(case: Case) -> Dict[str, Any]:
    """Time a case on new processes; return medians over the turns."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        os.environ["OMP_NUM_THREADS"] = "1"
        processes = [
            context.Process(target=_time_rank, args=(rank, case, folder)) for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise RunFault("a process of the benchmark failed: see above")
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return _summarize(case, ranks)


def _summarize(case: Case, ranks: List[Dict[str, Any]]) -> Dict[str, Any]:
    """Return ratios to PyTorch's times, bubbles, and the speed that the stage times allow each
    asynchronous method.
    """
    from ipu_pipe.schedule.clock import Costs, clock
    from ipu_pipe.schedule.timelines import make_schedule

    # the slower process decides the time of a turn
    times = {
        name: [max(pair) for pair in zip(*(rank["times"][name] for rank in ranks))]
        for name in ranks[0]["times"]
    }
    costs_by_method, methods = {}, {}
    for name in case.methods:
        by_stage = {int(s): costs for rank in ranks for s, costs in rank["costs"][name].items()}
        forward, backward, weight, update = zip(*(by_stage[s] for s in range(case.stages)))
        costs_by_method[name] = costs = Costs(
            forward, backward, update, weight_gradient=weight if any(weight) else ()
        )
        schedule = make_schedule(
            _resolve(case, name), case.stages, case.accumulate, case.accumulate
        )
        busy = case.accumulate * (sum(forward) + sum(backward)) + sum(update)
        spans = zip(*(rank["spans"][name] for rank in ranks))
        bubbles = [
            1
            - sum(b for _, _, b in turn)
            / (max(e for _, e, _ in turn) - min(s for s, _, _ in turn))
            / RANKS
            for turn in spans
        ]
        methods[name] = {
            "ratio": statistics.median(a / b for a, b in zip(times[THEIRS[name]], times[name])),
            "torch_ms": statistics.median(times[THEIRS[name]]) * 1e3 / case.microbatches,
            "ms": statistics.median(times[name]) * 1e3 / case.microbatches,
            "bubble_measured": statistics.median(bubbles),
            "bubble_clock": 1 - busy / RANKS / clock(schedule, costs).finish,
            "bubble_planned": 1 - schedule.busy_share(),
        }
    first = case.methods[0]
    costs, asynchronous = costs_by_method[first], {}
    for name in case.asynchronous:
        gain = statistics.median(a / b for a, b in zip(times[THEIRS[first]], times[name]))
        schedule = make_schedule(
            _resolve(case, first), case.stages, case.accumulate, case.accumulate
        )
        flush = clock(schedule, costs).finish / case.accumulate
        allowed = flush / max(
            f + b + u / case.accumulate
            for f, b, u in zip(costs.forward, costs.backward, costs.update)
        )
        asynchronous[name] = {"gain": gain, "allowed": allowed, "share": gain / allowed}
    return {
        "model": case.model,
        "stages": case.stages,
        "accumulate": case.accumulate,
        "stage_ms": [1e3 * (f + b) for f, b in zip(costs.forward, costs.backward)],
        "methods": methods,
        "asynchronous": asynchronous,
    }


# ---- part 3: the object against the engine
#
# Both have messages in flight between their steps, so each has two processes and a group of its
# own. They take turns: the ones # that wait sleep.


def measure_object(case: Case) -> Dict[str, Any]:
    """Time a step of the object against one of the engine; return the median and the range of the
    ratio of their speeds.
    """
    context = multiprocessing.get_context("spawn")
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        ends: Dict[str, List[Any]] = {"engine": [], "object": []}
        processes = []
        for kind, connections in ends.items():
            for rank in range(RANKS):
                ours, theirs = context.Pipe()
                connections.append(ours)
                arguments = (rank, kind, case, str(Path(folder) / kind), theirs)
                processes.append(context.Process(target=_serve_turns, args=arguments))
        for process in processes:
            process.start()
        times: Dict[str, List[float]] = {kind: [] for kind in ends}
        cpu_times: Dict[str, List[float]] = {kind: [] for kind in ends}
        try:
            for number in range(case.rounds + DEFAULT_WARM_UP):
                for kind in sorted(ends, reverse=number % 2 == 0):
                    for connection in ends[kind]:
                        connection.send(True)
                    seconds, cpu_seconds = zip(*(connection.recv() for connection in ends[kind]))
                    if number >= DEFAULT_WARM_UP:
                        # the slower process decides the time of a turn
                        times[kind].append(max(seconds))
                        cpu_times[kind].append(sum(cpu_seconds))
            for connection in [*ends["engine"], *ends["object"]]:
                connection.send(False)
        except EOFError:
            raise RunFault("a process of the benchmark failed: see above") from None
        for process in processes:
            process.join()
    steps = case.microbatches // case.accumulate
    ratios = sorted(engine / pipe for engine, pipe in zip(times["engine"], times["object"]))
    cpu_ratios = sorted(
        engine / pipe for engine, pipe in zip(cpu_times["engine"], cpu_times["object"])
    )
    return {
        "object": case.methods[0],
        "stages": case.stages,
        "accumulate": case.accumulate,
        "ratio": statistics.median(ratios),
        "least": ratios[0],
        "most": ratios[-1],
        "cpu_ratio": statistics.median(cpu_ratios),
        "cpu_least": cpu_ratios[0],
        "cpu_most": cpu_ratios[-1],
        "engine_ms": statistics.median(times["engine"]) * 1e3 / steps,
        "object_ms": statistics.median(times["object"]) * 1e3 / steps,
        "engine_least_ms": min(times["engine"]) * 1e3 / steps,
        "object_least_ms": min(times["object"]) * 1e3 / steps,
    }


def format_object(row: Dict[str, Any]) -> str:
    """Format the figures of a case of part 3."""
    return (
        f"Pipeline, {row['object']} in {row['stages']} stages, N = {row['accumulate']}: "
        f"{row['ratio']:.3f} times the engine's"
        f" speed (rounds {row['least']:.3f} to {row['most']:.3f}; medians {row['object_ms']:.2f} "
        f"and {row['engine_ms']:.2f} ms"
        f" a step, least {row['object_least_ms']:.2f} and {row['engine_least_ms']:.2f}); by CPU "
        f"time {row['cpu_ratio']:.3f}"
        f" ({row['cpu_least']:.3f} to {row['cpu_most']:.3f})"
    )


def _serve_turns(rank: int, kind: str, case: Case, store: str, connection: Any) -> None:
    """Make a turn whenever the connection asks for one, and answer its seconds."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    step = (_make_object_step if kind == "object" else _make_engine_step)(case)
    while connection.recv():
        dist.barrier()
        begun, cpu_begun = time.perf_counter(), time.process_time()
        for _ in range(case.microbatches // case.accumulate):
            step()
        connection.send((time.perf_counter() - begun, time.process_time() - cpu_begun))
    end_process(0)


def _make_object_step(case: Case) -> Callable[[], Any]:
    """Return a step of the object."""
    import torch

    import ipu_pipe

    # the model's seed makes the data alike on both ranks
    model = _make_model(case)
    data = _make_data(case)
    pipe = ipu_pipe.Pipeline(
        model,
        torch.nn.functional.cross_entropy,
        torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9),
        case.methods[0],
        stages=_find_begins(case, model, data[0][0]),
        microbatches=case.accumulate,
        backend="distributed",
    )
    return lambda: pipe.step(microbatches=data)


def _make_engine_step(case: Case) -> Callable[[], Any]:
    """Return a step of the engine that `train` has, for the same training."""
    import torch

    from ipu_pipe.backends.table import launch
    from ipu_pipe.config.load import configure
    from ipu_pipe.pipeline.flow import Flow
    from ipu_pipe.run.build import build

    # the model's seed makes the data alike on both ranks
    model = _make_model(case)
    data = _make_data(case)

    class Source:
        def train_batches_per_epoch(self, batch_size: int) -> int:
            return 10**6 * case.accumulate

        def train_batch(self, epoch: int, index: int, batch_size: int) -> Any:
            return data[index % len(data)]

        def test_batches(self, batch_size: int) -> Any:
            return iter(data[:1])

    config = configure(
        method=case.methods[0],
        stages=_find_begins(case, model, data[0][0]),
        gradient_accumulation=case.accumulate,
        micro_batch_size=SIZE,
        backend={"name": "distributed"},
        steps=10**5,
        evaluate={"every": 0},
        checkpoint=None,
        metrics=[],
        log={"trace": None, "tensorboard": False},
    )
    launch(config, {})
    job = build(
        config,
        model,
        Source(),  # type: ignore[arg-type]
        torch.nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=RATE, momentum=0.9),
    )
    flow = Flow(job)

    def step() -> None:
        flow.give()
        list(flow.take())

    return step


# ---- in the processes


def _time_rank(rank: int, case: Case, folder: str) -> None:
    """Time the turns of one rank; write seconds by turn, spans by turn, and costs by stage into the
    folder.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    data = _make_data(case)
    updates = case.microbatches // case.accumulate  # of a turn
    turns: Dict[str, Callable[[], None]] = {}
    engines: Dict[str, Any] = {}
    for name in [*case.methods, *case.asynchronous]:
        if name in THEIRS:
            turns[THEIRS[name]] = _make_torch_turn(rank, case, name, data)
        engines[name] = _make_engine(rank, case, name, data, dist.new_group(range(RANKS)))
        turns[name] = functools.partial(
            _run_our_turn, engines[name][0], enumerate(engines[name][1]), updates
        )
    times: Dict[str, List[float]] = {name: [] for name in turns}
    for number in range(case.rounds + DEFAULT_WARM_UP):
        for name, turn in turns.items():
            dist.barrier()
            begun = time.perf_counter()
            turn()
            if number >= DEFAULT_WARM_UP:
                times[name].append(time.perf_counter() - begun)
    spans, costs = {}, {}
    for name in case.methods:
        events = engines[name][0].recorder.read_events()
        spans[name] = _measure_turns(events, case, updates)
        costs[name] = _measure_costs(events.select(events.microbatch >= 2 * updates))
    (Path(folder) / f"{rank}.json").write_text(
        json.dumps({"times": times, "costs": costs, "spans": spans})
    )
    dist.barrier()
    end_process(0)


def _measure_turns(events: Any, case: Case, updates: int) -> List[Tuple[int, int, int]]:
    """Return the begin, the end and the time in passes and updates of each turn, in nanoseconds of
    the host's clock.
    """
    from ipu_pipe.trace.events import COMPUTE

    passes = events.select(events.is_kind(*COMPUTE))
    update = passes.microbatch.copy()
    update[~passes.is_kind("update")] //= case.accumulate
    turns = []
    for number in range(DEFAULT_WARM_UP, case.rounds + DEFAULT_WARM_UP):
        of_turn = passes.select(update // updates == number)
        turns.append(
            (
                int(of_turn.start.min()),
                int(of_turn.end.max()),
                int((of_turn.end - of_turn.start).sum()),
            )
        )
    return turns


def _measure_costs(events: Any) -> Dict[int, Tuple[float, ...]]:
    """Return the median seconds of a forward, a backward, its weight gradient and an update, by
    stage.
    """
    costs: Dict[int, Tuple[float, ...]] = {}
    for stage in sorted(set(events.stage[events.is_kind("forward")].tolist())):
        of_stage = events.select(events.stage == stage)
        medians = [
            _find_median(of_stage, kind)
            for kind in ("forward", "backward", "input gradient", "weight gradient")
        ]
        forward, backward, input_gradient, weight_gradient = medians
        backward = input_gradient + weight_gradient or backward
        costs[stage] = (forward, backward, weight_gradient, _find_median(of_stage, "update"))
    return costs


def _find_median(events: Any, kind: str) -> float:
    chosen = events.select(events.is_kind(kind))
    return (
        statistics.median(((chosen.end - chosen.start) / 1e9).tolist())
        if len(chosen.start)
        else 0.0
    )


def _make_model(case: Case) -> Any:
    """Build the model with the same initial weights each time."""
    import torch

    from models.resnet import preact_resnet20
    from models.transformer import transformer_lm

    torch.manual_seed(0)
    return preact_resnet20() if case.model == "resnet" else transformer_lm()


def _make_data(case: Case) -> List[Any]:
    import torch

    if case.model == "resnet":
        return [
            (torch.randn(SIZE, 3, 32, 32), torch.randint(0, 10, (SIZE,)))
            for _ in range(case.accumulate)
        ]
    return [
        (torch.randint(0, 256, (SIZE, 64)), torch.randint(0, 256, (SIZE, 64)))
        for _ in range(case.accumulate)
    ]


def _find_begins(case: Case, model: Any, x: Any) -> List[str]:
    """Return the modules at which stages begin: balanced by FLOPs."""
    from ipu_pipe.model.stages import partition

    if case.model == "resnet" and case.stages == 2:
        return ["layer2.0"]
    return list(partition(model, x, case.stages).begins)


def _resolve(case: Case, name: str) -> Any:
    from ipu_pipe.schedule.methods import resolve_method

    return resolve_method(name, {"stages_per_device": case.stages // RANKS})


def _place(case: Case, name: str) -> Tuple[int, ...]:
    """Return the device of each stage."""
    order = _resolve(case, name).order
    return tuple(range(case.stages)) if order is None else tuple(order.place(case.stages))


def _make_engine(rank: int, case: Case, name: str, data: List[Any], group: Any) -> Any:
    """Build this rank's interpreter of a method's schedule of all turns."""
    import torch

    from ipu_pipe.backends.processes.interpreter import Interpreter
    from ipu_pipe.backends.processes.layout import RankLayout
    from ipu_pipe.backends.processes.mail import Mail
    from ipu_pipe.backends.processes.stage import Stage, StageModel
    from ipu_pipe.backends.processes.trace import TraceRecorder
    from ipu_pipe.cut.cutting import cut_model, list_crossings
    from ipu_pipe.model.stages import partition
    from ipu_pipe.replay.work import Work
    from ipu_pipe.schedule.actions import Kind
    from ipu_pipe.schedule.timelines import make_schedule
    from ipu_pipe.schedule.versions import VersionTable
    from ipu_pipe.update.apply import UpdateRules, choose_rules
    from ipu_pipe.update.optimizer import make_groups, select_stage

    count = case.microbatches * (case.rounds + DEFAULT_WARM_UP)
    model, method = _make_model(case), _resolve(case, name)
    begins = _find_begins(case, model, data[0][0])
    part = partition(model, data[0][0], begins)
    table = VersionTable(make_schedule(method, case.stages, count, case.accumulate), method)
    cut, layout = cut_model(model, begins, data[0][0]), RankLayout(rank, _place(case, name))
    groups = make_groups(model, part)
    optimizer = torch.optim.SGD(
        [g for s in layout.stages_of_rank for g in select_stage(groups, s)], lr=RATE, momentum=0.9
    )
    rules = UpdateRules(
        choose_rules({}, method, table.rule_lag(), case.accumulate), optimizer, lambda k: RATE
    )
    work, cpu = Work(torch.nn.functional.cross_entropy, table, rules), torch.device("cpu")
    crossings = list_crossings(cut)
    recorder = TraceRecorder(rank, layout.stages_of_rank[0], range(count))
    mail = Mail(layout, cpu, recorder, 300.0, group)
    models = [
        StageModel(layout, s, cut[s], crossings, lambda m: data[m % len(data)], cpu)
        for s in layout.stages_of_rank
    ]
    interpreter = Interpreter(
        work, {m.stage: Stage(work, m, mail, recorder) for m in models}, mail, recorder
    )
    # a batch ends where the next one enters
    entries = table.schedule.slots(Kind.FORWARD, 0, count, slice(0, 1))[0, :: case.accumulate]
    return interpreter, [*entries[1:].tolist(), float("inf")]


def _run_our_turn(engine: Any, batches: Iterator[Tuple[int, float]], updates: int) -> None:
    """Give the batches of the next updates; `batches`: (number, slot at which it ends)."""
    for batch, cut in itertools.islice(batches, updates):
        list(engine.advance(cut, batch + 1))


def _make_torch_turn(rank: int, case: Case, name: str, data: List[Any]) -> Callable[[], None]:
    """Return a function that trains the microbatches of a turn with PyTorch's class of a
    schedule.
    """
    import torch
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    from ipu_pipe.cut.cutting import cut_model

    model = _make_model(case)
    cut = cut_model(model, _find_begins(case, model, data[0][0]), data[0][0])
    own_stages = [stage for stage, device in enumerate(_place(case, name)) if device == rank]
    optimizer = torch.optim.SGD(
        [p for s in own_stages for p in cut[s].parameters()], lr=RATE, momentum=0.9
    )
    stages = [
        pipelining.PipelineStage(cut[s], s, case.stages, torch.device("cpu")) for s in own_stages
    ]
    make = getattr(schedules, THEIRS[name])
    schedule = make(
        stages if case.stages > RANKS else stages[0],
        n_microbatches=case.accumulate,
        loss_fn=torch.nn.functional.cross_entropy,
    )
    x, y = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    inputs, targets = [x] if 0 in own_stages else [], y if case.stages - 1 in own_stages else None

    def turn() -> None:
        for _ in range(case.microbatches // case.accumulate):
            schedule.step(*inputs, target=targets, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()

    return turn


if __name__ == "__main__":
    run_command(main)
