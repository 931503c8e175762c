"""Run seeds of the simulated network: `python -m tests.simulation --seeds 1000 --start 0 --jobs 2`.

Each seed that fails is printed with what it did and the command that runs it alone. Exits 1 if any failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import List, Tuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

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
    for name, usual in {"--seeds": 1000, "--start": 0, "--jobs": 2}.items():
        parser.add_argument(name, type=int, default=usual)
    arguments = parser.parse_args()
    from tests.simulation.ranks import split_by_case

    blocks = split_by_case(range(arguments.start, arguments.start + arguments.seeds))
    done = failed = 0
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for block, failures in zip(blocks, pool.map(run_block_of_seeds, blocks)):
            done, failed = done + len(block), failed + len(failures)
            print(*failures, f"{done - failed} of {done} seeds passed", sep="\n", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
