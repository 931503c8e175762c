"""Error of the planner's predictions on two processes of this machine: python tools/bench_plan.py

A profile holds the seconds of each part of a pre-activation ResNet-20, in a process of one thread,
for two sizes of microbatch. From it the planner predicts the throughput of six configurations that
were not timed: two methods, three cuts, two other sizes of microbatch. Then two processes (gloo)
train each configuration. Each round measures a new profile, since the speed of a shared machine
changes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Tuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ipu_pipe import interrupts  # noqa: E402

if __name__ == "__main__":
    interrupts.install_end_at_interrupt()  # before the imports that take time

from ipu_pipe.errors import Parser, RunFault, run_command  # noqa: E402

CONFIG = """\
model: {entry: "models.resnet:preact_resnet20", args: {classes: 10}}
data: {name: synthetic, shape: [3, 32, 32], classes: 10, subset: 4096, test_subset: 16}
backend: {threads: 1}
gradient_accumulation: 8
optimizer: {name: sgd, lr: 0.01, momentum: 0.9}
steps: 2
"""
PROFILED = (8, 32)  # samples per microbatch
CASES = [  # method, first module of the second stage, samples per microbatch
    ("pipedream_flush", "layer2.1", 16),
    ("pipedream", "layer2.1", 16),
    ("pipedream_flush", "layer1.2", 16),
    ("pipedream", "layer3.0", 16),
    ("pipedream", "layer2.1", 24),
    ("pipedream_flush", "layer3.0", 24),
]


def make_parser() -> Parser:
    """Build the parser of the command line."""
    p = Parser(prog="tools/bench_plan.py", description=__doc__)
    p.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="turns of each configuration; medians are printed (default 3)",
    )
    p.add_argument("--updates", type=int, default=12, help="updates per turn (default 12)")
    p.add_argument("--json", action="store_true", help="print JSON")
    return p


def main() -> None:
    """Run the command line."""
    args = make_parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(CONFIG)
        turns: List[List[Tuple[float, float]]] = [[] for _ in CASES]  # predicted, measured
        for number in range(args.rounds):
            problem = _profile(config)
            for k, case in enumerate(CASES):
                measured = _measure(config, Path(folder) / f"{number}-{k}", args.updates, *case)
                turns[k].append((_predict(problem, *case), measured))
    rows: List[Dict[str, Any]] = []
    for case, pairs in zip(CASES, turns):
        errors = [predicted / measured - 1 for predicted, measured in pairs]
        rows.append(
            {
                "method": case[0],
                "cut": case[1],
                "micro_batch_size": case[2],
                "predicted": statistics.median(predicted for predicted, _ in pairs),
                "measured": statistics.median(measured for _, measured in pairs),
                "error": statistics.median(errors),
                "errors": errors,
            }
        )
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    print(
        "method           cut        microbatch   predicted    measured samples/s   error (of all "
        "rounds)"
    )
    for row in rows:
        errors = row["errors"]
        case_text = f"{row['method']:16s} {row['cut']:10s} {row['micro_batch_size']:10d}"
        rates = f"{row['predicted']:11.1f} {row['measured']:11.1f} {row['error']:15.1%}"
        print(f"{case_text} {rates} ({min(errors):.1%} to {max(errors):.1%})")
    print(f"mean error {statistics.mean(abs(row['error']) for row in rows):.1%}")


def _predict(problem: Any, method: str, cut: str, size: int) -> float:
    """Return the predicted samples per second."""
    from ipu_pipe.plan.candidates import Candidate, list_layouts
    from ipu_pipe.plan.prediction import Costing, UnitSums, predict_cut

    names = [unit.name for unit in problem.units]
    candidate = Candidate(method, 2, 1, size, 8, False)
    costing = Costing(problem, candidate, list_layouts(2, 1)[0], UnitSums(problem, size))
    return predict_cut(costing, [0, names.index(cut)]).samples_per_second


def _profile(config: Path) -> Any:
    """Time the model's parts, and return the planner's problem for two processes of this
    machine.
    """
    import torch

    from ipu_pipe.config.load import load_config
    from ipu_pipe.hardware.description import read_hardware
    from ipu_pipe.hardware.model_units import count_units, measure_units
    from ipu_pipe.plan.prediction import Problem
    from ipu_pipe.run.setup import set_up

    torch.set_num_threads(1)
    setup = set_up(load_config(config))
    costed = None
    for size in PROFILED:
        x, y = setup.move_to_device(*setup.data.train_batch(0, 0, size))
        costed = measure_units(costed or count_units(setup.model, x), setup.model, setup.loss, x, y)
    assert costed is not None
    hardware = read_hardware("this").with_devices(2)
    return Problem(costed.units, 4.0 * 3 * 32 * 32, hardware, 1e12, "float32", 1)


def _measure(config: Path, out: Path, updates: int, method: str, cut: str, size: int) -> float:
    """Return the samples per second that two processes train."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        str(ROOT / "tools" / "train.py"),
        str(config),
        "--out",
        str(out),
        "--set",
        "backend.name=distributed",
        f"method={method}",
        f"stages=[{cut}]",
        f"micro_batch_size={size}",
        f"steps={updates}",
        "evaluate={every: 0}",
        "log={tensorboard: false}",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    finished = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if finished.returncode:
        raise RunFault(f"{method} cut at {cut}: {finished.stderr.strip().splitlines()[-1:]}")
    return float(json.loads((out / "summary.json").read_text())["throughput_samples_per_second"])


if __name__ == "__main__":
    run_command(main)
