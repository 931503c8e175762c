"""Train a staged model from a config file: python tools/train.py configs/mlp_digits.yaml"""

from __future__ import annotations

import argparse
import datetime
import glob
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ipu_pipe.cli.arguments import (
    COMMON,
    CONFIG,
    command,
    int_in,
    option,
    parse_counts,
    parse_file,
    parse_folder,
    print_result,
)
from ipu_pipe.errors import raise_faults

# for annotations, which are not evaluated: --help must not wait for it
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

Data sets are looked up in data.root, in the folder $IPU_PIPE_DATA and in the cache that tools/fetch_data.py fills.
Exit codes: 0 done, 2 bad input, 1 fault while running, 130 Ctrl-C.
"""


@command(
    "Train a staged model from a config file.",
    EPILOG,
    *CONFIG,
    option(
        "--out",
        type=parse_folder,
        metavar="DIR",
        help="folder of the run (default: a dated folder under runs/)",
    ),
    option("--resume", action="store_true", help="continue from the newest checkpoint in DIR"),
    option(
        "--resume-from",
        type=int_in(0),
        metavar="STEP",
        help="continue from the checkpoint of this step, delete later ones",
    ),
    option("--overwrite", action="store_true", help="delete the run in DIR and start again"),
    option(
        "--dry-run",
        action="store_true",
        help="print stages, schedule, delays and memory; train nothing, write nothing",
    ),
    option(
        "--evaluate",
        type=parse_file,
        metavar="PATH",
        help="evaluate a run, a checkpoint or a state dict; print JSON",
    ),
    option(
        "--against",
        metavar="METHOD",
        help="also train by METHOD, into DIR/METHOD: on as many samples, and for as much time",
    ),
    option(
        "--accumulate",
        type=parse_counts,
        default=(),
        metavar="K,...",
        help="with --against: microbatches per update of METHOD at equal time (default, if it "
        "flushes: 1, 2, 4 and 8 "
        "times the config's)",
    ),
    *COMMON,
)
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    option_used = (
        "--resume" if args.resume else "--resume-from" if args.resume_from is not None else ""
    )
    raise_faults(
        {
            # a dated folder would be a new one, with nothing to resume
            f"{option_used}: needs --out DIR, the folder of the run to resume": option_used
            and args.out is None,
            f"{option_used}: cannot be combined with --overwrite": option_used and args.overwrite,
            "--resume-from: cannot be combined with --resume": args.resume
            and args.resume_from is not None,
            "--resume-from: cannot be combined with --against, which has two runs": args.resume_from
            is not None
            and args.against,
            "--accumulate: requires --against METHOD": args.accumulate and not args.against,
        }
    )
    # import after parsing, because --help must not wait for torch
    from ipu_pipe.config.load import load_config
    from ipu_pipe.schedule.methods import require_known_methods

    if args.against is not None:
        # before a config is made with it, whose fault would name the key `method`
        require_known_methods([args.against], "--against")
    config = load_config(args.config, args.set)
    other = (
        load_config(
            args.config,
            # the last two settings are the config's own method's, and another one may refuse them
            [*args.set, f"method={args.against}", "method_args={}", "stages_per_device=null"],
        )
        if args.against
        else None
    )

    from ipu_pipe.backends.ranks import is_main, report_once
    from ipu_pipe.backends.table import launch, leave

    # all processes of a run must agree on these options
    options = (
        "out",
        "resume",
        "resume_from",
        "overwrite",
        "dry_run",
        "evaluate",
        "against",
        "accumulate",
    )
    with report_once():
        launch(config, {f"--{name.replace('_', '-')}": getattr(args, name) for name in options})
        result = _train(args, config, other)
        leave()
        # the JSON of an evaluation was asked for, and --quiet does not mute it
        if result is not None and is_main() and (args.evaluate or not args.quiet):
            print_result(result)


def _train(args: argparse.Namespace, config: Config, other: Config | None) -> str | None:
    """Run the mode that the options choose and return the text to print. `other`: the config of the
    run to compare with.
    """
    from ipu_pipe.backends.ranks import run_on_main
    from ipu_pipe.report.run_text import format_plan
    from ipu_pipe.run.planning import build_for_planning
    from ipu_pipe.run.train import evaluate_checkpoint, get_starting_config, train

    if args.dry_run:
        # without a folder there is no start to plan from
        if args.out is not None:
            how = {
                "resume": args.resume,
                "resume_from": args.resume_from,
                "overwrite": args.overwrite,
            }
            # a resumed run has its stages and rates from its folder, and so has its plan
            config = get_starting_config(config, args.out, **how)
        return format_plan(build_for_planning(config))
    if args.evaluate:
        return json.dumps(evaluate_checkpoint(config, args.evaluate), indent=1)
    # all processes must use the same folder
    out = args.out or run_on_main(lambda: _choose_folder(Path(args.config).stem))
    if other is None:
        train(
            config,
            out,
            resume=args.resume,
            resume_from=args.resume_from,
            overwrite=args.overwrite,
            quiet=args.quiet,
        )
        return None
    from ipu_pipe.comparison.equal_time import train_against

    return train_against(
        config, other, out, args.accumulate, args.resume, args.overwrite, args.quiet
    )


def _choose_folder(name: str) -> Path:
    """Return a dated folder under `runs` for a run of the config `name`, or the one that the
    launcher's earlier attempt began.
    """
    from ipu_pipe.store.folder import is_restarted

    dated = Path("runs") / f"{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}_{name}"
    # names begin with the date, so that the greatest is the newest
    return max(filter(is_restarted, Path("runs").glob(f"*_{glob.escape(name)}")), default=dated)
