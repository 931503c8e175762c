"""Compare methods on a config's loop: each at its best learning rate, against samples and against
predicted time.
"""

from __future__ import annotations

import argparse

from ipu_pipe.cli.arguments import (
    COMMON,
    CONFIG,
    JSON,
    command,
    int_in,
    option,
    parse_folder,
    parse_names,
    parse_positive,
)

EPILOG = """
The first method is the baseline. DIR receives every training and compare.html; the same command
continues after Ctrl-C.

examples:
  ipu-pipe compare mlp_digits --methods gpipe,pipedream_2bw,pipemare --out runs/compared
  ipu-pipe compare mlp_digits --methods gpipe,pipedream --seeds 1 --rates 1 --set steps=50 --json
"""


def parse_rates(text: str) -> tuple[float, ...]:
    """Convert an argument to numbers above 0 separated by commas."""
    return tuple(map(parse_positive, text.split(",")))


@command(
    __doc__,
    EPILOG,
    *CONFIG,
    option(
        "--methods",
        metavar="A,B,...",
        type=parse_names,
        help="methods (default: gpipe, pipedream_2bw and the config's)",
    ),
    option(
        "--seeds",
        type=int_in(1, 1000),
        default=3,
        metavar="N",
        help="trainings of each method and rate, from the config's seed on (default 3)",
    ),
    option(
        "--rates",
        type=parse_rates,
        default=(1.0, 0.3, 0.1),
        metavar="A,B,...",
        help="multiples of the config's learning rate (default 1,0.3,0.1)",
    ),
    option(
        "--processes",
        type=int_in(1, 1000),
        metavar="N",
        help="most trainings at once (default: the cores, if backend.threads is 1)",
    ),
    option("--out", type=parse_folder, metavar="DIR", help="keep the trainings and the page here"),
    JSON,
    *COMMON,
)
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    from ipu_pipe.comparison.comparing import compare
    from ipu_pipe.comparison.config_loop import ConfigLoop
    from ipu_pipe.config.load import load_config
    from ipu_pipe.schedule.methods import require_known_methods

    config = load_config(args.config, args.set)
    loop = ConfigLoop(config)
    # the config's own method may be one of the first two, and must not be trained twice
    names = args.methods or list(dict.fromkeys(["gpipe", "pipedream_2bw", config.method]))
    # describing a method looks it up, too, but would not name the option
    require_known_methods(names, "--methods")
    result = compare(
        loop,
        loop.describe_methods(names),
        stages=config.stages,
        seeds=range(config.seed, config.seed + args.seeds),
        rates=args.rates,
        hardware=config.hardware,
        out=args.out,
        processes=args.processes,
        # `Progress` prints to standard output, where JSON must be alone
        quiet=args.quiet or args.json,
    )
    # the page first: printing ends the command if the reader of its output has exited
    page = result.save(args.out / "compare.html") if args.out is not None else None
    if args.json:
        print(result.to_json())
    args.print_result(repr(result))
    if page is not None:
        args.print_result(f"page: {page}")
