"""Completion of commands, options and methods for a shell, as a script that the shell reads."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from pathlib import Path
from typing import Dict, List

from ipu_pipe.cli.arguments import command, option, parse_folder
from ipu_pipe.errors import BadInput, Parser
from ipu_pipe.schedule.methods import METHODS
from ipu_pipe.shipped import COMMAND, find_configs

SHELLS = ("bash", "zsh", "fish")
EPILOG = """
examples:
  source <(ipu-pipe completion bash)                                          in ~/.bashrc
  ipu-pipe completion zsh > "${fpath[1]}/_ipu-pipe"                           once
  ipu-pipe completion fish > ~/.config/fish/completions/ipu-pipe.fish         once

It completes the command ipu-pipe, and is made by shtab (pip install shtab). Tested with bash.
"""


@command(__doc__, EPILOG, option("shell", metavar="SHELL", choices=SHELLS, help=f"one of {', '.join(SHELLS)}"))
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    if importlib.util.find_spec("shtab") is None:
        raise BadInput("completion is made by shtab, which is not installed: pip install shtab")
    import shtab

    if args.shell not in shtab.SUPPORTED_SHELLS:
        known = ", ".join(shtab.SUPPORTED_SHELLS)
        raise BadInput(f"SHELL: {args.shell}: this version of shtab supports {known}: pip install -U shtab")
    print(make_script(args.shell))


def make_script(shell: str) -> str:
    """Return the completion script of all commands for a shell."""
    import shtab

    from ipu_pipe.cli import COMMANDS
    from ipu_pipe.data.fetch import PACKAGES

    choices: Dict[str, List[str]] = {"method": [*METHODS], "methods": [*METHODS], "name": [*PACKAGES]}
    choices["hardware"] = sorted(path.stem for path in (find_configs() / "hardware").glob("*.yaml"))
    root = Parser(prog=COMMAND)
    root.add_argument("--version", action="store_true", help="print the version")
    subparsers = root.add_subparsers()
    for name, summary in COMMANDS.items():
        parent = importlib.import_module(f"ipu_pipe.cli.{name}").main.make_parser()
        for action in parent._actions:
            # --against names a method in train, a run in analyze
            if action.dest in choices or (action.dest == "against" and name == "train"):
                action.choices = choices.get(action.dest, choices["method"])
            elif action.type is parse_folder:
                action.complete = shtab.DIRECTORY
            elif action.type is Path or action.dest in ("config", "what", "against"):
                action.complete = shtab.FILE
        subparsers.add_parser(name.replace("_", "-"), parents=[parent], add_help=False, help=summary)
    script: str = shtab.complete(root, shell)
    return script
