"""Compare methods on the same work: throughput, memory, communication and a trace of each."""

from __future__ import annotations

import argparse
from typing import Optional, Sequence

from ipu_pipe.cli.arguments import add_quiet, add_set, add_traceback, folder, get_say, get_tell, take_config, whole
from ipu_pipe.config.values import MOST_UPDATES
from ipu_pipe.errors import BadInput, Parser, show_traceback

EPILOG = """
DIR gets throughput.json, memory.json, communication.json and a run for each method with its trace.

examples:
  python tools/collect.py configs/resnet34_ipu4.yaml --out runs/ipu4             the local-updates paper's Table 2
  python tools/collect.py configs/mlp_digits.yaml --methods gpipe,pipedream,pipemare --steps 50 --out runs/compared
  python tools/collect.py configs/mlp_digits.yaml --methods gpipe,pipedream --steps 50 --rounds 5 --out runs/two \
      --set backend.name=distributed stages=2                                    on two processes, which it starts
  python tools/collect.py configs/resnet50_ipu8.yaml --steps 0 --out runs/ipu8   plans only, in seconds
"""


def make_parser() -> Parser:
    """Return the command's parser."""
    p = Parser(prog="tools/collect.py", description=__doc__, epilog=EPILOG)
    p.add_argument("config", metavar="CONFIG", nargs="?", help="a YAML file")
    add_set(p)
    methods = "methods to compare (default: the config's, and local_chunked with the same stages)"
    p.add_argument("--methods", metavar="A,B,...", help=methods)
    steps = "updates of each run (default: the config's; at least 2 for a throughput; 0: plan only)"
    p.add_argument("--steps", type=whole(0, MOST_UPDATES), metavar="K", help=steps)
    rounds = "run every method N times, in turn, and report median and range of the throughput (default 1)"
    p.add_argument("--rounds", type=whole(1, 1000), default=1, metavar="N", help=rounds)
    p.add_argument("--out", type=folder, metavar="DIR", help="the folder to write into")
    p.add_argument("--overwrite", action="store_true", help="replace runs that DIR holds")
    add_quiet(p)
    add_traceback(p)
    return p


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Run the command."""
    args = make_parser().parse_args(arguments)
    args.config = take_config(args, "configs/resnet34_ipu4.yaml")
    if args.out is None:
        raise BadInput("--out: missing: must be the folder to write into")
    with show_traceback(args.traceback):
        _run(args)


def _run(args: argparse.Namespace) -> None:
    from ipu_pipe.backends.ranks import is_main, report_once
    from ipu_pipe.backends.table import leave
    from ipu_pipe.config.load import load_config
    from ipu_pipe.studies.collect import compare_methods, make_comparison_table, write_comparison

    config = load_config(args.config, args.set)
    methods = list(dict.fromkeys([config.method, "local_chunked"]))
    if args.methods is not None:
        methods = [name for name in args.methods.split(",") if name]
    if not methods:
        raise BadInput(f"--methods: {args.methods}: must be names of methods, by commas")
    with report_once():
        comparison = compare_methods(
            config, methods, args.out, args.steps, args.overwrite, get_say(args.quiet or not is_main()), args.rounds
        )
        leave()
    if is_main():
        files, tell = write_comparison(comparison, args.out), get_tell(args.quiet)
        tell(make_comparison_table(comparison))
        tell("where to look:\n  " + "\n  ".join(map(str, files)))
