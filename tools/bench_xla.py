"""Benchmark of XLA's devices, in one run: batch-one training by a dataflow pipeline on one of them, or
four stages on four: python tools/bench_xla.py [--models MODELS]
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ipu_pipe import interrupts  # noqa: E402

if __name__ == "__main__":
    interrupts.install_end_at_interrupt()  # before the imports that take time

from ipu_pipe.errors import BadInput, Parser, run_command  # noqa: E402

WIDTH = 128
CONTEXT = 32
CLASSES = 10
VOCABULARY = 64
RATE = 1e-3
# models of equal blocks, and models of four stages
BLOCKS = ("mlp", "transformer")
STAGED = ("digits", "resnet20")
# name in the output -> settings of the pipeline; the first that uses jax makes its devices
STAGES: Dict[str, Dict[str, Any]] = {
    "emulator": {"backend": "emulator"},
    "four": {"backend": "xla", "backend_args": {"devices": 4}},
    "one": {"backend": "xla", "backend_args": {"devices": 1}},
}
PIPELINES: Dict[str, Dict[str, Any]] = {
    "emulator": {"backend": "emulator"},
    "action": {"backend": "xla", "backend_args": {"devices": 1, "program": "action"}},
    "slot": {"backend": "xla", "backend_args": {"devices": 1, "program": "slot"}},
}
PLAIN = "plain"


class Task(NamedTuple):
    """A model of equal blocks, made anew for each contestant, with its loss and its microbatches."""

    make: Callable[[], Any]
    loss: Callable[[Any, Any], Any]
    data: List[Tuple[Any, Any]]


def make_parser() -> Parser:
    """Build the parser of the command line."""
    p = Parser(
        prog="tools/bench_xla.py",
        description="Time updates of pipelined backpropagation with one microbatch each: the "
        "emulator, XLA with a program\n"
        "for each action, XLA with a program for each slot, and plain SGD without a pipeline in "
        "PyTorch. Turns\n"
        "alternate, so that a slow moment of the machine hits all. Of the models of four stages: "
        "GPipe and PipeDream on the\n"
        "emulator, on four XLA devices and on one.",
    )
    p.add_argument(
        "--models",
        default="mlp,transformer",
        help="comma-separated (default mlp,transformer): equal blocks of mlp, transformer; four "
        "stages of digits (4 microbatches of 16), resnet20 (2 of 16)",
    )
    p.add_argument("--blocks", default="8,32,64", help="equal blocks (default 8,32,64)")
    p.add_argument("--sizes", default="1,8", help="samples of a microbatch (default 1,8)")
    p.add_argument("--rounds", type=int, default=5, help="turns of each (default 5)")
    p.add_argument("--updates", type=int, default=40, help="updates per turn (default 40)")
    p.add_argument("--threads", type=int, default=1, help="of PyTorch (default 1)")
    p.add_argument("--json", action="store_true", help="print JSON")
    return p


def main() -> None:
    """Run the command line."""
    args = make_parser().parse_args()
    models = args.models.split(",")
    faults = [
        f"--models: {m}: must be one of {', '.join(BLOCKS + STAGED)}"
        for m in models
        if m not in BLOCKS + STAGED
    ]
    numbers = {"--blocks": args.blocks, "--sizes": args.sizes}
    faults += [
        f"{name}: {text}: must be numbers from 1 on, comma-separated"
        for name, text in numbers.items()
        if not all(part.isdecimal() and int(part) for part in text.split(","))
    ]
    counts = {"--rounds": args.rounds, "--updates": args.updates, "--threads": args.threads}
    faults += [f"{name}: {n}: must be at least 1" for name, n in counts.items() if n < 1]
    if faults:
        raise BadInput(faults)
    import torch  # imported after the arguments are read: --help must not wait for it

    torch.set_num_threads(args.threads)
    rows: List[Dict[str, Any]] = []
    for name in [m for m in STAGED if m in models]:
        for method in ("gpipe", "pipedream"):
            contestants = make_staged(name, method)
            times = measure(*contestants, args.rounds, args.updates)
            rows.append({"model": name, "method": method, **times})
            if not args.json:
                figures = "  ".join(f"{key} {ms:7.2f}" for key, ms in times.items())
                print(f"{name:9s} {method:9s}  ms an update: {figures}", flush=True)
    for name in [m for m in BLOCKS if m in models]:
        for blocks in map(int, args.blocks.split(",")):
            for size in map(int, args.sizes.split(",")):
                times = measure(
                    *make_contestants(make_task(name, blocks, size)), args.rounds, args.updates
                )
                rows.append({"model": name, "blocks": blocks, "size": size, **times})
                if not args.json:
                    print(format_row(rows[-1]), flush=True)
    if args.json:
        print(json.dumps({"rows": rows}, indent=1))


def make_task(name: str, blocks: int, size: int) -> Task:
    """Return a model of equal blocks with random data."""
    import torch
    from torch.nn.functional import cross_entropy

    from models.mlp import mlp
    from models.transformer import transformer_lm

    if name == "mlp":
        data = [
            (torch.randn(size, WIDTH), torch.randint(0, CLASSES, (size,))) for _ in range(blocks)
        ]
        return Task(lambda: mlp(WIDTH, WIDTH, blocks, CLASSES), cross_entropy, data)
    shape = (size, CONTEXT)
    data = [
        (torch.randint(0, VOCABULARY, shape), torch.randint(0, VOCABULARY, shape))
        for _ in range(blocks)
    ]
    return Task(lambda: transformer_lm(VOCABULARY, WIDTH, 4, blocks, CONTEXT), cross_entropy, data)


def make_staged(name: str, method: str) -> Tuple[Dict[str, Callable[..., Any]], List[Any]]:
    """Return the steps of a model of four stages under a method, and its batch."""
    import torch
    from torch.nn.functional import cross_entropy

    import ipu_pipe
    from models.mlp import mlp
    from models.resnet import preact_resnet20

    count = 4 if name == "digits" else 2
    shape = (64,) if name == "digits" else (3, 32, 32)
    batch = (torch.randn(16 * count, *shape), torch.randint(0, CLASSES, (16 * count,)))
    contestants = {}
    for key, settings in STAGES.items():
        torch.manual_seed(0)
        model = mlp(64, 64, 4) if name == "digits" else preact_resnet20(norm="batch")
        optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
        pipe = ipu_pipe.Pipeline(
            model, cross_entropy, optimizer, method, stages=4, microbatches=count, **settings
        )
        contestants[key] = pipe.step
    return contestants, [batch] * 4


def make_contestants(task: Task) -> Tuple[Dict[str, Callable[..., Any]], List[Any]]:
    """Return the steps of pipelines, and of plain SGD, on a model of equal blocks, and its data."""
    import torch

    import ipu_pipe

    contestants: Dict[str, Callable[..., Any]] = {}
    for name, settings in PIPELINES.items():
        torch.manual_seed(0)
        model = task.make()
        optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
        pipe = ipu_pipe.Pipeline(
            model, task.loss, optimizer, "pipelined_backprop", microbatches=1, **settings
        )
        contestants[name] = pipe.step
    model = task.make()
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)

    def train_plainly(x: Any, y: Any) -> None:
        task.loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    contestants[PLAIN] = train_plainly
    return contestants, task.data


def measure(
    contestants: Dict[str, Callable[..., Any]], data: List[Any], rounds: int, updates: int
) -> Dict[str, float]:
    """Return the median milliseconds of an update of each contestant over `rounds` turns."""
    import jax

    # until all stages have work, and twice as long, so that the buffers are warm
    for step in contestants.values():
        for x, y in data * 3:
            step(x, y)
    times: Dict[str, List[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, step in contestants.items():
            start = time.perf_counter()
            for i in range(updates):
                step(*data[i % len(data)])
            for array in jax.live_arrays():
                array.block_until_ready()
            times[name].append(1000 * (time.perf_counter() - start) / updates)
    return {name: statistics.median(values) for name, values in times.items()}


def format_row(row: Dict[str, Any]) -> str:
    """Format the figures of a case."""
    names = [*PIPELINES, PLAIN]
    figures = "  ".join(f"{name} {row[name]:7.2f}" for name in names)
    ratios = "  ".join(f"{row[name] / row['slot']:.2f}" for name in names if name != "slot")
    return (
        f"{row['model']:11s} {row['blocks']:3d} blocks  microbatch {row['size']:2d}  ms an update: "
        f"{figures}  as many times the slot's: {ratios}"
    )


if __name__ == "__main__":
    run_command(main)
