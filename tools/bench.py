"""Benchmark of the emulator against plain training of the same model, in one run: python
tools/bench.py
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Union

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ipu_pipe import interrupts  # noqa: E402

if __name__ == "__main__":
    interrupts.install_end_at_interrupt()  # before the imports that take time

from ipu_pipe.errors import BadInput, Parser, run_command  # noqa: E402

CASES = {
    "resnet20": ("models.resnet:preact_resnet20", {"classes": 10}, 8, 8),
    "resnet50": ("models.resnet:resnet50", {"classes": 10, "small_images": True}, 8, 8),
}
METHODS = (
    "pipemare",
    "pipelined_backprop",
    "pipedream",
    "pipemare+t1+t2",
    "pipelined_backprop+sc+lwp",
)
RULES: Dict[str, Dict[str, Any]] = {  # method_args that +NAME adds to a method
    "t1": {"t1": {"anneal_updates": 1000}},
    "t2": {"t2": {"decay": 0.135}},
    "sc": {"spike_compensation": {"scale": 1.0}},
    "lwp": {"weight_prediction": {"form": "velocity", "scale": 1.0}},
}


def make_parser() -> Parser:
    """Build the parser of the command line."""
    p = Parser(
        prog="tools/bench.py",
        description="Time steps of ipu_pipe.Pipeline on the emulator against a plain loop with the "
        "same microbatches and the\n"
        "same number of updates. Turns alternate, so that a slow moment of the machine hits both, "
        "and the ratio of CPU time\n"
        "leaves out what other processes take.",
    )
    p.add_argument(
        "--models",
        default="resnet20,resnet50",
        help=f"comma-separated: {', '.join(CASES)} (default: both)",
    )
    p.add_argument(
        "--methods",
        default=",".join(METHODS),
        help=f"methods, with rules added by + ({', '.join(RULES)}); default: {','.join(METHODS)}",
    )
    p.add_argument(
        "--stages",
        default="finest",
        help="numbers of stages, or finest, comma-separated (default finest)",
    )
    p.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="turns of each; the median ratio is printed (default 5)",
    )
    p.add_argument("--updates", type=int, default=3, help="updates per turn (default 3)")
    p.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    p.add_argument("--json", action="store_true", help="print JSON")
    return p


def main() -> None:
    """Run the command line."""
    args = make_parser().parse_args()
    faults = [
        f"--models: {m}: must be one of {', '.join(CASES)}"
        for m in args.models.split(",")
        if m not in CASES
    ]
    faults += [
        f"--methods: {m}: {rule}: must be one of {', '.join(RULES)}"
        for m in args.methods.split(",")
        for rule in m.split("+")[1:]
        if rule not in RULES
    ]
    faults += [
        f"--stages: {count}: must be a number from 1 on, or finest"
        for count in args.stages.split(",")
        if count != "finest" and not (count.isdecimal() and int(count))
    ]
    if faults or args.rounds < 1 or args.updates < 1:
        raise BadInput(faults or "--rounds and --updates must be at least 1")
    import torch  # imported after the arguments are read: --help must not wait for it

    if args.device == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device: cuda: this machine has no usable CUDA device: use cpu")
    rows: List[Dict[str, Any]] = []
    for name in args.models.split(","):
        for method in args.methods.split(","):
            for stages in args.stages.split(","):
                count = "finest" if stages == "finest" else int(stages)
                rows.append(measure(name, method, count, args.rounds, args.updates, args.device))
                if not args.json:
                    print(format_row(rows[-1]), flush=True)
    if args.json:
        print(json.dumps({"rows": rows}, indent=1))


def format_row(row: Dict[str, Any]) -> str:
    """Format the figures of a case."""
    return (
        f"{row['model']:9s} {row['stages']:4d} stages  {row['method']:25s} plain "
        f"{row['plain_ms']:8.1f} ms  emulator "
        f"{row['emulator_ms']:8.1f} ms a microbatch  ratio {row['ratio']:.3f} "
        f"(rounds {row['least']:.3f} to {row['most']:.3f}), of CPU time {row['cpu_ratio']:.3f} "
        f"({row['cpu_least']:.3f} to {row['cpu_most']:.3f})"
    )


def measure(
    name: str, label: str, stages: Union[str, int], rounds: int, updates: int, device: str
) -> Dict[str, Any]:
    """Return the median of the pipeline's time divided by plain time over `rounds` turns of
    `updates` updates.

    The turns begin after as many weight versions are stashed as there will ever be.
    """
    import torch
    from torch.nn.functional import cross_entropy

    import ipu_pipe
    from ipu_pipe.job.factories import resolve_entry

    entry, model_args, size, accumulate = CASES[name]
    torch.manual_seed(0)
    models = [resolve_entry(entry, "model")(**model_args).to(device) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9) for m in models]
    method, *added = label.split("+")
    example = torch.randn(size, 3, 32, 32).to(device)
    count = len(ipu_pipe.partition(models[0], example, stages))
    if method == "pipedream_2bw":  # N must be at least the number of stages
        accumulate = -(-count // accumulate) * accumulate
    data = [
        (torch.randn(size, 3, 32, 32).to(device), torch.randint(0, 10, (size,)).to(device))
        for _ in range(accumulate)
    ]
    pipe = ipu_pipe.Pipeline(
        models[0],
        cross_entropy,
        optimizers[0],
        method,
        stages=stages,
        microbatches=accumulate,
        method_args={key: value for rule in added for key, value in RULES[rule].items()},
        device=device,
    )

    def step() -> None:
        for _ in range(updates):
            pipe.step(microbatches=data)

    def train_plainly() -> None:
        for _ in range(updates):
            for x, y in data:
                (cross_entropy(models[1](x), y) / accumulate).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()

    pipe.step(microbatches=data)
    # until as many weight versions are stashed as ever
    for _ in range(int(pipe.versions.greatest_lag().max()) + 1):
        pipe.step(microbatches=data)
    train_plainly()
    times = [
        (_measure_seconds(train_plainly, device), _measure_seconds(step, device))
        for _ in range(rounds)
    ]
    ratios = [emulated.wall / plain.wall for plain, emulated in times]
    cpu_ratios = sorted(emulated.cpu / plain.cpu for plain, emulated in times)
    ms_per_microbatch = 1000 / (updates * accumulate)
    return {
        "model": name,
        "method": label,
        "stages": count,
        "micro_batch_size": size,
        "gradient_accumulation": accumulate,
        "plain_ms": statistics.median(plain.wall for plain, _ in times) * ms_per_microbatch,
        "emulator_ms": statistics.median(emulated.wall for _, emulated in times)
        * ms_per_microbatch,
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "cpu_ratio": statistics.median(cpu_ratios),
        "cpu_least": cpu_ratios[0],
        "cpu_most": cpu_ratios[-1],
        "version_bytes": pipe.memory()["emulator_bytes"],
    }


class Seconds(NamedTuple):
    """The time of some work by the clock on the wall, and by that of this process's CPUs."""

    wall: float
    cpu: float


def _measure_seconds(work: Callable[[], None], device: str) -> Seconds:
    """Return the seconds of `work`, with all its kernels finished."""
    import torch

    def finish() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    finish()  # kernels that were launched before do not count
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    finish()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


if __name__ == "__main__":
    run_command(main)
