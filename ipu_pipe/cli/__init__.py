"""The commands: `python tools/COMMAND.py ...` in a clone, `python -m ipu_pipe COMMAND ...` anywhere.

A command is the module here of its name; its `main` reads the command line's arguments (or those it is given) and raises what
ends it. Nothing is imported ahead of it: Ctrl-C is handed over first, and --help does not wait for torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import NoReturn, Optional

from ipu_pipe import interrupts

COMMANDS = ("train", "schedule", "collect", "reproduce", "plan", "stability", "fetch_data", "measure_hardware")


def run(command: Optional[str] = None) -> NoReturn:
    """Run a command, by default the one that the first argument names, and leave with its exit code."""
    interrupts.end_at_once()  # before the imports that take time
    from ipu_pipe.errors import Parser, run_command

    def named() -> None:
        parser = Parser(prog="python -m ipu_pipe", description="Run a command: tools/COMMAND.py of a clone.")
        parser.add_argument(
            "command", metavar="COMMAND", choices=COMMANDS, help=f"{', '.join(COMMANDS)}; each has --help"
        )
        chosen = parser.parse_args(sys.argv[1:2]).command
        del sys.argv[1]
        importlib.import_module(f"{__name__}.{chosen}").main()

    run_command(named if command is None else importlib.import_module(f"{__name__}.{command}").main)
