"""Benchmark of randomized PipeDream on the random quadratic, delay bound 420: python
tools/bench_rpd.py

It compares block updates per second of the vectorized runs (all learning rates of the grid at once,
alone and together with the other delay bounds of the experiment, float64) with a plain replay that
copies its history of 420 iterates for each block update. Both use the same draws, and the
difference of their last iterates is printed. Times are processor time of one thread, which other
processes disturb less than wall-clock time.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

for library in (
    "OMP",
    "OPENBLAS",
    "MKL",
):  # before NumPy is imported, so that its products use one thread
    os.environ[f"{library}_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ipu_pipe import interrupts  # noqa: E402

if __name__ == "__main__":
    interrupts.install_end_at_interrupt()  # before the imports that take time

import numpy as np  # noqa: E402

from ipu_pipe.errors import Parser, run_command  # noqa: E402
from tests.support.vectors import PLAIN  # noqa: E402
from tools.experiments.vector_runs import (  # noqa: E402
    make_random_quadratic,
    make_randomized_source,
    run_randomized,
)

STAGES, MICROBATCHES, BOUND = 8, 400, 420
OTHER_BOUNDS = (8, 30, 60, 180)
RATES = np.asarray(2.0 ** np.arange(-8, 1))
COMPARED = 3  # learning rates: the smallest ones, which do not diverge


def make_parser() -> Parser:
    """Build the parser of the command line."""
    p = Parser(prog="tools/bench_rpd.py", description=__doc__)
    p.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="turns of the vectorized runs; the fastest counts (default 5)",
    )
    return p


def main() -> None:
    """Time both kinds of runs, and compare their iterates."""
    args = make_parser().parse_args()
    objective = make_random_quadratic(2000, 512, 100)
    objective.compute_gradient(np.zeros((512, 1)), 0)  # computes the products that all runs share
    sources = [
        make_randomized_source(STAGES, MICROBATCHES, objective.batches, {"delay_bound": bound}, 0)
        for bound in (BOUND, *OTHER_BOUNDS)
    ]
    source, count = sources[0], sources[0].count
    for name, chosen in (("grid", sources[:1]), ("grid and bounds", sources)):
        seconds, runs = [], []
        for _ in range(args.rounds):
            start = time.process_time()
            runs = run_randomized(objective, chosen, RATES, 0, points=1)
            seconds.append(time.process_time() - start)
        updates = count * len(RATES) * len(chosen)
        print(f"fast, {name}: {updates / min(seconds):,.0f} block updates/s ({updates:,} of them)")
        fast = updates / min(seconds)
    difference, plain = 0.0, {}
    for name, replay in PLAIN.items():
        seconds = []
        for g in range(COMPARED):
            start = time.process_time()
            x = replay(objective, source, BOUND, float(RATES[g]), count)
            seconds.append(time.process_time() - start)
            difference = max(difference, float(np.abs(runs[0].x[:, g] - x).max() / np.abs(x).max()))
        plain[name] = count / min(seconds)
        print(
            f"plain, history copied as {name}: {plain[name]:,.0f} block updates/s: ratio "
            f"{fast / plain[name]:.1f}"
        )
    print(f"last iterates differ by {difference:.1e} of the greatest coordinate")


if __name__ == "__main__":
    run_command(main)
