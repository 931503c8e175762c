"""Benchmark of XLA's devices, in one run: batch-one training by a dataflow pipeline on one of them, or
four stages on four: python tools/bench_xla.py [--models MODELS]
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

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
MOMENTUM = 0.9
PLAIN = "plain"
# name in the output -> whether neighboring equal blocks are one loop of XLA
COMPILED = {"jit": False, "scan": True}
CONTESTANTS = (*PIPELINES, PLAIN, *COMPILED)
# name -> seconds of a clock
CLOCKS: Dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


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
        "for each action, XLA with a program for each slot; and plain SGD without a pipeline: in "
        "PyTorch, and compiled by XLA\n"
        "into one program (jit; scan: with a loop over equal blocks). Turns alternate, so that a slow "
        "moment of the machine\n"
        "hits all. Of the models of four stages: GPipe and PipeDream on the emulator, on four XLA "
        "devices and on one.",
    )
    p.add_argument(
        "--models",
        default="mlp,transformer",
        help="comma-separated (default mlp,transformer): equal blocks of mlp, transformer; four "
        "stages of digits (4 microbatches of 16), resnet20 (2 of 16)",
    )
    p.add_argument(
        "--contestants",
        default=",".join(CONTESTANTS),
        help=f"of models of equal blocks, comma-separated, slot among them (default "
        f"{','.join(CONTESTANTS)})",
    )
    p.add_argument("--blocks", default="8,32,64", help="equal blocks (default 8,32,64)")
    p.add_argument("--sizes", default="1,8", help="samples of a microbatch (default 1,8)")
    p.add_argument("--rounds", type=int, default=5, help="turns of each (default 5)")
    p.add_argument("--updates", type=int, default=40, help="updates per turn (default 40)")
    p.add_argument("--threads", type=int, default=1, help="of PyTorch (default 1)")
    p.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="wall, or the processor time of all threads, which a busy machine changes less "
        "(default wall)",
    )
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
    chosen = args.contestants.split(",")
    if "slot" not in chosen or not set(chosen) <= set(CONTESTANTS):
        allowed = f"must be slot and others of {', '.join(CONTESTANTS)}"
        faults.append(f"--contestants: {args.contestants}: {allowed}")
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
            medians = find_medians(
                measure(*contestants, args.rounds, args.updates, CLOCKS[args.clock])
            )
            rows.append({"model": name, "method": method, **medians})
            if not args.json:
                figures = "  ".join(f"{key} {ms:7.2f}" for key, ms in medians.items())
                print(f"{name:9s} {method:9s}  ms an update: {figures}", flush=True)
    for name in [m for m in BLOCKS if m in models]:
        for blocks in map(int, args.blocks.split(",")):
            for size in map(int, args.sizes.split(",")):
                steps, data = make_contestants(make_task(name, blocks, size), chosen)
                times = measure(steps, data, args.rounds, args.updates, CLOCKS[args.clock])
                row = {"model": name, "blocks": blocks, "size": size}
                rows.append({**row, **find_medians(times), "ratios": compare_turns(times)})
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
        optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM)
        pipe = ipu_pipe.Pipeline(
            model, cross_entropy, optimizer, method, stages=4, microbatches=count, **settings
        )
        contestants[key] = pipe.step
    return contestants, [batch] * 4


def make_contestants(
    task: Task, chosen: Sequence[str]
) -> Tuple[Dict[str, Callable[..., Any]], List[Any]]:
    """Return the steps of pipelines, and of plain SGD, on a model of equal blocks, and its data."""
    import torch

    import ipu_pipe

    def make_step(name: str) -> Callable[..., Any]:
        torch.manual_seed(0)
        if name in COMPILED:
            return CompiledTraining(task, COMPILED[name]).step
        model = task.make()
        optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM)
        if name in PIPELINES:
            return ipu_pipe.Pipeline(
                model,
                task.loss,
                optimizer,
                "pipelined_backprop",
                microbatches=1,
                **PIPELINES[name],
            ).step

        def train_plainly(x: Any, y: Any) -> None:
            task.loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

        return train_plainly

    return {name: make_step(name) for name in chosen}, task.data


class CompiledTraining:
    """Plain SGD with momentum on a model of equal blocks, without a pipeline: forward, backward and
    update of the whole model are one program of XLA.

    It is made of the same operations as the pipelines' passes. `scans`: neighboring equal stages are
    a loop (`jax.lax.scan`) over their stacked weights.
    """

    def __init__(self, task: Task, scans: bool) -> None:
        import numpy as np

        from ipu_pipe import trace_stages
        from ipu_pipe.backends.xla.devices import import_jax
        from ipu_pipe.backends.xla.player import make_passes
        from ipu_pipe.model.stages import partition

        jax = import_jax()
        model = task.make()
        begins = partition(model, task.data[0][0]).begin_names()
        stages = trace_stages(model, begins, task.data[0], task.loss)
        all_passes = make_passes(stages, jax.devices("cpu")[:1] * len(stages), is_split=False)
        parameters = {name: p.detach().numpy() for name, p in model.named_parameters()}
        self.groups: List[List[Any]] = []
        for passes in all_passes:
            if scans and self.groups and self.groups[-1][0].description == passes.description:
                self.groups[-1].append(passes)
            else:
                self.groups.append([passes])
        # of each group the weights of its stages, stacked (stages, ...)
        self._weights: List[List[Any]] = []
        for group in self.groups:
            by_stage = [[parameters[name] for name in passes.graphs.weights] for passes in group]
            self._weights.append([np.stack(same) for same in zip(*by_stage)])
        self._momenta = jax.tree.map(np.zeros_like, self._weights)
        self._update = jax.jit(self._make_update, donate_argnums=(0, 1))

    def step(self, x: Any, y: Any) -> Any:
        """Queue an update; return its loss."""
        self._weights, self._momenta, loss = self._update(
            self._weights, self._momenta, x.numpy(), y.numpy()
        )
        return loss

    def export_weights(self) -> Dict[str, Any]:
        """Return the newest weights by name."""
        return {
            name: weight[i]
            for group, weights in zip(self.groups, self._weights)
            for i, passes in enumerate(group)
            for name, weight in zip(passes.graphs.weights, weights)
        }

    def _make_update(self, weights: Any, momenta: Any, x: Any, y: Any) -> Any:
        """Return the weights and momenta after an update, and its loss; jax traces it."""
        import jax.numpy as jnp

        value = x
        all_saved = []
        for group, stacked in zip(self.groups, weights):
            passes = group[0]

            def forward(entering: Any, mine: Any, passes: Any = passes) -> Any:
                labels = [y] if passes.graphs.labels else []
                (leaving, *_), _, saved = passes.forward(mine, [], [entering, *labels])
                return leaving, saved

            value, saved = run_stages(forward, value, stacked)
            all_saved.append(saved)
        loss, gradient = value, jnp.ones_like(value)
        for i, group in reversed(list(enumerate(self.groups))):
            passes = group[0]

            def backward(leaving: Any, mine: Any, passes: Any = passes) -> Any:
                gradients, entering = passes.backward(*mine, [leaving])
                # the first stage has nothing to return
                return (entering or [leaving])[0], gradients

            gradient, gradients = run_stages(
                backward, gradient, (weights[i], all_saved[i]), reverse=True
            )
            momenta[i] = [MOMENTUM * m + g for m, g in zip(momenta[i], gradients)]
            weights[i] = [w - RATE * m for w, m in zip(weights[i], momenta[i])]
        return weights, momenta, loss


def run_stages(run: Callable[..., Any], carry: Any, stacked: Any, reverse: bool = False) -> Any:
    """Run neighboring equal stages one after another, with the arrays of each in `stacked`. Return
    what leaves the last, and what each one gives, stacked."""
    import jax

    if len(jax.tree.leaves(stacked)[0]) > 1:
        return jax.lax.scan(run, carry, stacked, reverse=reverse)
    carry, given = run(carry, jax.tree.map(lambda array: array[0], stacked))
    return carry, jax.tree.map(lambda array: array[None], given)


def measure(
    contestants: Dict[str, Callable[..., Any]],
    data: List[Any],
    rounds: int,
    updates: int,
    clock: Callable[[], float],
) -> Dict[str, List[float]]:
    """Return the milliseconds of an update of each contestant in each of `rounds` turns."""
    import jax

    # until all stages have work, and twice as long, so that the buffers are warm
    for step in contestants.values():
        for x, y in data * 3:
            step(x, y)
    times: Dict[str, List[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, step in contestants.items():
            start = clock()
            for i in range(updates):
                step(*data[i % len(data)])
            for array in jax.live_arrays():
                array.block_until_ready()
            times[name].append(1000 * (clock() - start) / updates)
    return times


def find_medians(times: Dict[str, List[float]]) -> Dict[str, float]:
    """Return the median of each contestant's turns."""
    return {name: statistics.median(values) for name, values in times.items()}


def compare_turns(times: Dict[str, List[float]]) -> Dict[str, List[float]]:
    """Return how many times the slot's time each contestant takes: least, median and greatest of
    the turns, of which each has its own ratio."""
    ratios = {}
    for name, values in times.items():
        by_turn = sorted(ms / slot for ms, slot in zip(values, times["slot"]))
        ratios[name] = [by_turn[0], statistics.median(by_turn), by_turn[-1]]
    return ratios


def format_row(row: Dict[str, Any]) -> str:
    """Format the figures of a case."""
    figures = "  ".join(f"{name} {row[name]:7.2f}" for name in row["ratios"])
    ratios = "  ".join(
        f"{name} {median:.2f} ({least:.2f} to {greatest:.2f})"
        for name, (least, median, greatest) in row["ratios"].items()
        if name != "slot"
    )
    return (
        f"{row['model']:11s} {row['blocks']:3d} blocks  microbatch {row['size']:2d}  ms an update: "
        f"{figures}\n  as many times the slot's, median (least to greatest of the turns): {ratios}"
    )


if __name__ == "__main__":
    run_command(main)
