"""Train a staged model as a config file says: python tools/train.py configs/mlp_digits.yaml"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import TYPE_CHECKING, Optional, Sequence

from ipu_pipe.cli.arguments import add_quiet, add_set, add_traceback, counts, folder, take_config, tell, whole
from ipu_pipe.errors import BadInput, Parser, show_traceback

if TYPE_CHECKING:
    from ipu_pipe.config.schema import Config

EPILOG = """\
examples:
  python tools/train.py configs/mlp_digits.yaml
  python tools/train.py configs/mlp_digits.yaml --set method=pipedream --set optimizer.lr=0.05 --out runs/digits
  python tools/train.py configs/mlp_digits.yaml --dry-run
  python tools/train.py configs/mlp_digits.yaml --out runs/digits --resume
  python tools/train.py configs/mlp_digits.yaml --out runs/digits --resume-from 100
  python tools/train.py configs/mlp_digits.yaml --evaluate runs/digits/checkpoints/step-100

Data that the config names is looked for in its data.root, in the folder $IPU_PIPE_DATA, or in the cache that
tools/fetch_data.py fills. Exit codes: 0 done, 2 bad input, 1 fault while running, 130 Ctrl-C.
"""


def make_parser() -> Parser:
    """Return the command's parser."""
    p = Parser(prog="tools/train.py", description="Train a staged model as a config file says.", epilog=EPILOG)
    p.add_argument("config", metavar="CONFIG", nargs="?", help="a YAML file, such as those in configs/")
    add_set(p)
    p.add_argument("--out", type=folder, metavar="DIR", help="folder of the run (default: a dated folder under runs/)")
    how = p.add_mutually_exclusive_group()
    how.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in DIR")
    resume_from = "go on from the checkpoint of this step in DIR; later checkpoints and lines of metrics are deleted"
    how.add_argument("--resume-from", type=whole(0), metavar="STEP", help=resume_from)
    how.add_argument("--overwrite", action="store_true", help="delete the run that DIR holds")
    dry_run = "print stages, schedule, delays and memory; train nothing, write nothing"
    p.add_argument("--dry-run", action="store_true", help=dry_run)
    p.add_argument("--evaluate", type=Path, metavar="PATH", help="evaluate a run, a checkpoint or a state dict; print JSON")
    against = "then train by METHOD in DIR/METHOD, with as many samples and with as much time, and print how far apart they end"
    p.add_argument("--against", metavar="METHOD", help=against)
    accumulate = (
        "with --against: the microbatches an update that METHOD is tried with at equal time (default, for a method that "
        "empties the pipeline: 1, 2, 4 and 8 times the config's)"
    )
    p.add_argument("--accumulate", type=counts, default=(), metavar="K,...", help=accumulate)
    add_quiet(p)
    add_traceback(p)
    return p


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Run the command."""
    args = make_parser().parse_args(arguments)
    args.config = take_config(args, "configs/mlp_digits.yaml")
    option = "--resume" if args.resume else "--resume-from"
    if (args.resume or args.resume_from is not None) and args.out is None:
        raise BadInput(f"{option}: needs --out DIR, the folder of the run to resume")
    if args.resume_from is not None and args.against:
        raise BadInput(f"--resume-from: {args.resume_from}: not together with --against, which has two runs")
    if args.accumulate and not args.against:
        raise BadInput("--accumulate: goes with --against METHOD")
    with show_traceback(args.traceback):
        _run(args)


def _run(args: argparse.Namespace) -> None:
    """Run the command with its arguments parsed."""
    from ipu_pipe.config.load import load_config  # after the arguments are read: --help must not wait for torch

    config = load_config(args.config, args.set)
    other = load_config(args.config, [*args.set, f"method={args.against}", "method_args={}"]) if args.against else None

    from ipu_pipe.backends.ranks import is_main, report_once
    from ipu_pipe.backends.table import launch, leave

    # what must be the same for all processes of a run
    options = ("out", "resume", "resume_from", "overwrite", "dry_run", "evaluate", "against", "accumulate")
    with report_once():
        launch(config, {f"--{name.replace('_', '-')}": getattr(args, name) for name in options})
        result = _train(args, config, other)
        leave()
        if result is not None and is_main() and (args.evaluate or not args.quiet):
            tell(result)


def _train(args: argparse.Namespace, config: Config, other: Optional[Config]) -> Optional[str]:
    """Do what is asked for and return what is to be printed at the end. `other`: the config of the run to compare with."""
    from ipu_pipe.backends.ranks import run_on_main
    from ipu_pipe.report.run_text import format_plan
    from ipu_pipe.run.planning import build_for_planning
    from ipu_pipe.run.train import evaluate_checkpoint, train

    if args.dry_run:
        return format_plan(build_for_planning(config))
    if args.evaluate:
        return json.dumps(evaluate_checkpoint(config, args.evaluate), indent=1)
    dated = f"{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}_{Path(args.config).stem}"
    out = args.out or run_on_main(lambda: Path("runs") / dated)  # the same on all processes
    if other is None:
        train(config, out, resume=args.resume, resume_from=args.resume_from, overwrite=args.overwrite, quiet=args.quiet)
        return None
    from ipu_pipe.studies.against import train_against

    return train_against(config, other, out, args.accumulate, args.resume, args.overwrite, args.quiet)
