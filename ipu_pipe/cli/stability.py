"""Find the learning rates that are stable under delay, for the stages of a run."""

from __future__ import annotations

import argparse
import json
import os

from ipu_pipe.cli.arguments import COMMON, CONFIG, JSON, command, int_in, option, parse_positive
from ipu_pipe.errors import BadInput
from ipu_pipe.shipped import find_config

EPILOG = """
examples:
  python tools/stability.py configs/mlp_digits.yaml             the stages of a run: delays, largest stable rates, what helps
  python tools/stability.py configs/mlp_digits.yaml --json --set method=pipemare optimizer.lr=0.5

The curvature is the largest eigenvalue of the training loss's Hessian at the start of the run (init_from sets another start),
found by power iteration, or given by --curvature. In place of CONFIG, a run's folder has it measured at the run's checkpoints
too, and the greatest counts. docs/stability.md states the theory's assumptions. The papers' figures are
drawn from a clone, as that page says.
"""
# those of tools/stability.py, too
CURVATURE = (
    option(
        "--samples",
        type=int_in(1, 10**6),
        default=128,
        metavar="N",
        help="training samples for the curvature (%(default)s)",
    ),
    option(
        "--iterations",
        type=int_in(1, 10**6),
        default=100,
        metavar="N",
        help="limit of power iterations (%(default)s)",
    ),
    option(
        "--seed",
        type=int_in(0, 2**63 - 1),
        default=0,
        metavar="S",
        help="seed of the power iteration (%(default)s)",
    ),
    option(
        "--curvature",
        type=parse_positive,
        metavar="X",
        help="use this curvature instead of measuring it",
    ),
    option(
        "--by-stage",
        action="store_true",
        help="measure the curvature of each stage instead of the model's",
    ),
)


@command(__doc__, EPILOG, *CONFIG, JSON, *CURVATURE, *COMMON)
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    examine_config(args.config_name, args)


def examine_config(name: str, args: argparse.Namespace) -> None:
    """Print the limits of each stage of the run that the config `name` describes, or that is in the
    folder `name`, by the options of `args`.
    """
    if args.by_stage and args.curvature is not None:
        why = "--by-stage measures one value per stage, --curvature gives one for all"
        raise BadInput(f"--by-stage: cannot be combined with --curvature: {why}")
    from ipu_pipe.config.load import load_config
    from ipu_pipe.run.stability import analyze_config, analyze_run, format_stability

    # once more, as other names than CONFIG come here: tools/stability.py takes several
    path = find_config(name)
    # os.path, because Path raises where a name is too long
    path = path / "config.yaml" if os.path.isdir(path) else path
    config = load_config(path, args.set)
    options = {
        key: getattr(args, key)
        for key in ("samples", "iterations", "seed", "curvature", "by_stage")
    }
    # every run begins with its record
    is_run = (path.parent / "record.json").is_file()
    analysis = (
        analyze_run(config, path.parent, **options) if is_run else analyze_config(config, **options)
    )
    result = {"config": name, **analysis}
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        args.print_result(format_stability(result))
