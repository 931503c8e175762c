"""Benchmark of the emulator against plain training of the same model, in one run: python tools/bench.py"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ipu_pipe import interrupts  # noqa: E402

if __name__ == "__main__":
    interrupts.install_end_at_interrupt()  # before the imports that take time

from ipu_pipe.errors import BadInput, Parser, run_command  # noqa: E402

CASES = {
    "resnet20": ("models.resnet:preact_resnet20", {"classes": 10}, 8, 8),
    "resnet50": ("models.resnet:resnet50", {"classes": 10, "small_images": True}, 8, 8),
}
METHODS = ("pipemare", "pipelined_backprop", "pipedream", "pipemare+t1+t2", "pipelined_backprop+sc+lwp")
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
        description="Time the emulator's asynchronous methods at the finest partition against plain training with the same\n"
        "microbatches and the same number of updates. Turns alternate, so that a slow moment of the machine hits both.",
    )
    p.add_argument("--models", default="resnet20,resnet50", help=f"comma-separated: {', '.join(CASES)} (default: both)")
    p.add_argument(
        "--methods",
        default=",".join(METHODS),
        help=f"methods, with rules added by + ({', '.join(RULES)}); default: {','.join(METHODS)}",
    )
    p.add_argument("--rounds", type=int, default=5, help="turns of each; the median ratio is printed (default 5)")
    p.add_argument("--updates", type=int, default=3, help="updates per turn (default 3)")
    p.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    p.add_argument("--json", action="store_true", help="print JSON")
    return p


def main() -> None:
    """Run the command line."""
    args = make_parser().parse_args()
    faults = [f"--models: {m}: must be one of {', '.join(CASES)}" for m in args.models.split(",") if m not in CASES]
    faults += [
        f"--methods: {m}: {rule}: must be one of {', '.join(RULES)}"
        for m in args.methods.split(",")
        for rule in m.split("+")[1:]
        if rule not in RULES
    ]
    if faults or args.rounds < 1 or args.updates < 1:
        raise BadInput(faults or "--rounds and --updates must be at least 1")
    import torch  # imported after the arguments are read: --help must not wait for it

    if args.device == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device: cuda: this machine has no usable CUDA device: use cpu")
    rows: List[Dict[str, Any]] = []
    for name in args.models.split(","):
        for method in args.methods.split(","):
            rows.append(measure(name, method, args.rounds, args.updates, args.device))
            if not args.json:
                r = rows[-1]
                print(
                    f"{name:9s} {r['stages']:4d} stages  {method:25s} plain {r['plain_ms']:8.1f} ms  emulator "
                    f"{r['emulator_ms']:8.1f} ms a microbatch  ratio {r['ratio']:.3f} "
                    f"(rounds {r['least']:.3f} to {r['most']:.3f})",
                    flush=True,
                )
    if args.json:
        print(json.dumps({"rows": rows}, indent=1))


def measure(name: str, label: str, rounds: int, updates: int, device: str) -> Dict[str, Any]:
    """Return the median of emulator time divided by plain time over `rounds` turns of `updates` updates.

    The turns begin after as many weight versions are stashed as there will ever be.
    """
    import torch
    from torch.nn.functional import cross_entropy

    from ipu_pipe.backends.emulator.replay import Emulator
    from ipu_pipe.backends.work import Work
    from ipu_pipe.job.factories import resolve_entry
    from ipu_pipe.model.stages import partition
    from ipu_pipe.schedule.methods import Reads, resolve_method
    from ipu_pipe.schedule.timelines import make_schedule
    from ipu_pipe.schedule.versions import VersionTable
    from ipu_pipe.update.apply import UpdateRules
    from ipu_pipe.update.optimizer import make_groups

    entry, model_args, size, accumulate = CASES[name]
    torch.manual_seed(0)
    models = [resolve_entry(entry, "model")(**model_args).to(device) for _ in range(2)]
    data = [
        (torch.randn(size, 3, 32, 32).to(device), torch.randint(0, 10, (size,)).to(device)) for _ in range(accumulate)
    ]
    method_name, *added = label.split("+")
    method = resolve_method(method_name)
    args = {key: value for rule in added for key, value in RULES[rule].items()}
    part = partition(models[0], data[0][0], "finest")
    if method.forward_reads is Reads.DOUBLE_BUFFERED:  # N must be at least the number of stages
        accumulate = -(-len(part) // accumulate) * accumulate
        data = data * (accumulate // len(data))
    lag = VersionTable(make_schedule(method, len(part), accumulate, accumulate), method).greatest_lag().max()
    fill = int(lag) + 2  # updates until as many weight versions are stashed as ever
    total = (fill + rounds * updates) * accumulate
    schedule = make_schedule(method, len(part), total, accumulate)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9) for m in models[1:]]
    staged = torch.optim.SGD(make_groups(models[0], part), lr=1e-3, momentum=0.9)
    table = VersionTable(schedule, method)
    rules = UpdateRules(args, method, table.rule_lag(), accumulate, staged, lambda k: 1e-3)
    emulator = Emulator(Work(cross_entropy, table, rules), models[0], part, data[0])

    def emulate() -> None:
        for _ in range(updates):
            emulator.step(data)

    def train_plainly() -> None:
        for _ in range(updates):
            for x, y in data:
                (cross_entropy(models[1](x), y) / accumulate).backward()
            optimizers[0].step()
            optimizers[0].zero_grad()

    for _ in range(fill):
        emulator.step(data)
    train_plainly()
    times = [(_measure_seconds(train_plainly, device), _measure_seconds(emulate, device)) for _ in range(rounds)]
    ratios = [b / a for a, b in times]
    ms_per_microbatch = 1000 / (updates * accumulate)
    return {
        "model": name, "method": label, "stages": len(part), "micro_batch_size": size, "gradient_accumulation": accumulate,
        "plain_ms": statistics.median(a for a, _ in times) * ms_per_microbatch,
        "emulator_ms": statistics.median(b for _, b in times) * ms_per_microbatch,
        "ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios),
        "version_bytes": emulator.weights.peak_bytes,
    }  # fmt: skip


def _measure_seconds(work: Callable[[], None], device: str) -> float:
    """Return the wall-clock seconds of `work`, with all its kernels finished."""
    import torch

    def finish() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    finish()  # kernels that were launched before do not count
    start = time.perf_counter()
    work()
    finish()
    return time.perf_counter() - start


if __name__ == "__main__":
    run_command(main)
