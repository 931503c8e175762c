"""Compare methods on the same work: run each on the config and write its throughput, memory,
communication and trace.
"""

from __future__ import annotations

import argparse

from ipu_pipe.cli.arguments import (
    COMMON,
    CONFIG,
    command,
    int_in,
    option,
    parse_folder,
    parse_names,
)
from ipu_pipe.config.values import MOST_UPDATES
from ipu_pipe.errors import raise_faults

EPILOG = """
DIR receives throughput.json, memory.json, communication.json and, for each method, a run folder with its trace.

examples:
  python tools/collect.py configs/resnet34_ipu4.yaml --out runs/ipu4             Laskin et al. 2020, Table 2
  python tools/collect.py configs/mlp_digits.yaml --methods gpipe,pipedream,pipemare --steps 50 --out runs/compared
  python tools/collect.py configs/mlp_digits.yaml --methods gpipe,pipedream --steps 50 --rounds 5 --out runs/two \\
      --set backend.name=distributed stages=2                                    on two processes, which it starts
  python tools/collect.py configs/resnet50_ipu8.yaml --steps 0 --out runs/ipu8   plans only, in seconds
"""


@command(
    __doc__,
    EPILOG,
    *CONFIG,
    option(
        "--methods",
        metavar="A,B,...",
        type=parse_names,
        help="methods (default: the config's and local_chunked)",
    ),
    option(
        "--steps",
        type=int_in(0, MOST_UPDATES),
        metavar="K",
        help="updates of each run (default: the config's; 0: predict without running)",
    ),
    option(
        "--rounds",
        type=int_in(1, 1000),
        default=1,
        metavar="N",
        help="runs of each method, for median and range (default 1)",
    ),
    option("--out", type=parse_folder, metavar="DIR", help="the folder to write into (required)"),
    option("--overwrite", action="store_true", help="replace the runs in DIR"),
    *COMMON,
)
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    raise_faults({"--out: missing: name the folder to write into": args.out is None})
    from ipu_pipe.backends.ranks import is_main, report_once
    from ipu_pipe.backends.table import leave
    from ipu_pipe.comparison.method_comparison import (
        compare_methods,
        make_comparison_table,
        write_comparison,
    )
    from ipu_pipe.config.load import load_config

    config = load_config(args.config, args.set)
    # the config's own method may be local_chunked
    methods = args.methods or list(dict.fromkeys([config.method, "local_chunked"]))
    with report_once():
        # under torchrun every process runs this command, and one of them speaks for all
        say = args.print_progress if is_main() else (lambda text: None)
        comparison = compare_methods(
            config, methods, args.out, args.steps, args.overwrite, say, args.rounds
        )
        leave()
    if is_main():
        # outside of the group: the other processes need not wait for files
        files = write_comparison(comparison, args.out)
        args.print_result(make_comparison_table(comparison))
        args.print_result("files:\n  " + "\n  ".join(map(str, files)))
