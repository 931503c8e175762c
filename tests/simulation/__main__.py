"""Run seeds of the simulated network: `python -m tests.simulation --seeds 1000 --start 0 --jobs 2`.

Each seed that fails is printed with what it did and the command that runs it alone. Exits 1 if any failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import List, Tuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

REPORTED = 80  # blocks of seeds, about a thousand seeds, after which the count is printed
LONGEST = 900  # seconds of a case, after which something waits outside of the network


def run_block_of_seeds(seeds: Tuple[int, ...]) -> List[str]:
    """Return the failures of seeds that share a case."""
    import torch

    from tests.simulation.ranks import run_seeds

    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    try:
        return run_seeds(seeds)
    finally:
        faulthandler.cancel_dump_traceback_later()


def main() -> int:
    """Run the seeds that the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    from tests.simulation.ranks import split_by_case

    blocks, begin, failed = (
        split_by_case(range(arguments.start, arguments.start + arguments.seeds)),
        time.monotonic(),
        0,
    )
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for number, failures in enumerate(pool.map(run_block_of_seeds, blocks)):
            for failure in failures:
                print(failure, flush=True)
            failed += len(failures)
            if number % REPORTED == 0 or number == len(blocks) - 1:
                seeds = blocks[number][-1] + 1 - arguments.start
                print(
                    f"{seeds - failed} of {seeds} seeds passed in {time.monotonic() - begin:.0f} s",
                    flush=True,
                )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
