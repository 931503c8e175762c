"""Run the papers' experiments: python tools/reproduce.py pb_resnet20"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from ipu_pipe.cli.arguments import (
    JSON,
    QUIET,
    command,
    int_in,
    option,
    parse_folder,
    parse_positive,
)
from ipu_pipe.errors import BadInput

RUNS = Path("runs/experiments")
EPILOG = """\
examples:
  python tools/reproduce.py                          list the experiments
  python tools/reproduce.py pb_resnet20              run one; its tables and plots go to runs/experiments/pb_resnet20
  python tools/reproduce.py all --out docs/results   run all
  python tools/reproduce.py all --at-most 0.5        run those of at most half an hour of one core
  python tools/reproduce.py pb_resnet20 --full       at the paper's size, for a GPU

An experiment is a file in configs/experiments/ (or any other, by its path) or a record in tools/experiments. An
interrupted experiment continues where it was. Those whose names begin with plan_ run nothing: they compare the
planner's predictions with the numbers printed in the papers.
Exit codes: 0 done (also where results differ from the paper: the table says so), 2 bad input, 1 fault, 130 Ctrl-C.
"""


@command(
    "Run the papers' experiments.",
    EPILOG,
    option(
        "experiment", metavar="EXPERIMENT", nargs="*", help="names, files, or all; none lists them"
    ),
    JSON,
    option(
        "--out",
        type=parse_folder,
        metavar="DIR",
        help="write tables and plots to DIR/EXPERIMENT (default: with the runs)",
    ),
    option(
        "--runs",
        type=parse_folder,
        default=RUNS,
        metavar="DIR",
        help="folder of runs (default %(default)s)",
    ),
    option(
        "--seeds",
        type=int_in(0, 2**63 - 1),
        nargs="+",
        metavar="S",
        help="instead of the experiment's own",
    ),
    option("--rows", nargs="+", metavar="LABEL", help="only these rows"),
    option(
        "--jobs",
        type=int_in(1, 1024),
        default=os.cpu_count() or 1,
        metavar="N",
        help="runs at a time (default: the cores)",
    ),
    option(
        "--at-most",
        type=parse_positive,
        metavar="HOURS",
        help="of all, only experiments that take one core so long, about",
    ),
    option("--full", action="store_true", help="at the paper's size"),
    option(
        "--epochs",
        type=int_in(1, 100_000),
        metavar="N",
        help="shorter or longer runs, in a folder of their own",
    ),
    QUIET,
)
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    if args.seeds and len(set(args.seeds)) < len(args.seeds):
        raise BadInput(f"--seeds: {' '.join(map(str, args.seeds))}: must be different")
    # imported here because it imports torch
    from tools.experiments.catalogue import find_experiments
    from tools.experiments.experiment import Request

    if not args.experiment:
        all_experiments = find_experiments([])
        if args.json:
            print(json.dumps([e.describe() for e in all_experiments], indent=1))
        for e in all_experiments:
            args.print_result(f"{e.name:30s} {e.title} ({e.source}); {e.size}")
        return
    request = Request(
        args.runs,
        args.seeds or (),
        args.rows or (),
        args.full,
        args.epochs,
        args.jobs,
        args.print_progress,
    )
    runs_all = args.experiment == ["all"]
    if args.at_most is not None and not runs_all:
        raise BadInput(
            f"--at-most: {args.at_most:g}: chooses of all experiments; name all in place of "
            f"{args.experiment[0]}"
        )
    experiments = find_experiments([] if runs_all else args.experiment)
    if args.at_most is not None:
        experiments = [experiment for experiment in experiments if experiment.hours <= args.at_most]
    # refuse options that the experiment does not use; with all experiments each option is used by
    # some
    if not runs_all:
        for experiment in experiments:
            experiment.check(request)
    all_results = [
        experiment.publish(request, args.out, args.print_result) for experiment in experiments
    ]
    if args.json:
        print(json.dumps(all_results[0] if len(all_results) == 1 else all_results, indent=1))
