"""Fuzzing by seeded mutations of configs, command lines, checkpoints, run folders and data files.

python tools/hostile.py                            2,000 cases, as in CI
python tools/hostile.py --cases 20000 --seed 7     more cases
python tools/hostile.py --only configs:17          a single case, with its whole output

Every case must end within 30 s, with exit code 0, or with 1 or 2 and a line that gives the reason.
A resumed run must continue from the saved state. Any other outcome is printed with the case's name,
and the exit code is 1. Linux only.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from ipu_pipe import interrupts  # noqa: E402

if __name__ == "__main__":
    interrupts.install_end_at_interrupt()  # before the imports that take time

import tempfile  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported

from ipu_pipe.errors import BadInput, Parser, RunFault, run_command  # noqa: E402


def main() -> None:
    """Run the command line."""
    parser = Parser(prog="tools/hostile.py", description=__doc__)
    parser.add_argument(
        "--cases",
        type=int,
        default=2000,
        metavar="N",
        help="number of cases, the kinds in turn (default: 2000)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the mutations (default: 0)")
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        help="cases in parallel (default: number of cores)",
    )
    parser.add_argument("--only", metavar="KIND:NUMBER", help="run a single case")
    args = parser.parse_args()

    from tests.hostile.running import (
        KINDS,
        format_results,
        import_everything,
        list_cases,
        run_cases,
    )

    wanted = list_cases(args.cases)
    if args.only:
        kind, _, number = args.only.partition(":")
        if kind not in KINDS or not number.isdecimal():
            raise BadInput(f"--only: {args.only}: must be KIND:NUMBER, of {', '.join(KINDS)}")
        wanted = [(kind, int(number))]
    if not wanted or args.workers < 1:
        raise BadInput(f"--cases: {args.cases}, --workers: {args.workers}: must be at least 1")
    start, results, bad = time.monotonic(), [], 0
    import_everything()
    with tempfile.TemporaryDirectory(prefix="hostile-") as scratch:
        for result in run_cases(wanted, args.seed, Path(scratch), args.workers):
            results.append(result)
            if result.bad:
                bad += 1
                again = f"tools/hostile.py --seed {args.seed} --only {result.kind}:{result.number}"
                print(
                    f"{result.kind}:{result.number} ({result.mutation}): {result.bad}\n    {again}",
                    flush=True,
                )
            if args.only:
                print(
                    f"{result.argv}\nexit code {result.code} after {result.seconds:.1f} "
                    f"s\n{result.error_output}",
                    end="",
                )
    slowest = max(results, key=lambda result: result.seconds)
    print(f"\n{format_results(results)}\n")
    print(
        f"seed {args.seed}, {time.monotonic() - start:.0f} s; the slowest took "
        f"{slowest.seconds:.1f} s: "
        f"{slowest.kind}:{slowest.number} ({slowest.mutation})"
    )
    if bad:
        raise RunFault(f"{bad} of {len(results)} hostile cases did not end as they should")


if __name__ == "__main__":
    run_command(main)
