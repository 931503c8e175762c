"""The commands: `ipu-pipe COMMAND`, `python -m ipu_pipe COMMAND`, in a clone `tools/COMMAND.py`.

Each command is a module of this package with the same name. Its `main` reads the command line's
arguments, or those passed to it, and raises the error that ends the command. No module is imported
before the command's own, so that Ctrl-C is handled first and --help does not wait for torch.

    arguments                    declares and parses arguments, and prints: `command`, `option`
    new, examples                a config for a model of one's own; loops and notebooks to copy
    train, compare, collect      train by a config, or by several methods
    plan, schedule, stability    what a run will be like
    rehearse                     tries a run without its devices and data
    analyze, export              what a run left: its trace, its weights
    fetch_data                   gets a data set
    measure_hardware             measures this machine, for plans
    check                        checks this machine against the emulator
    completion                   completes commands in a shell
"""

from __future__ import annotations

import importlib
import sys
from typing import NoReturn

from ipu_pipe import __version__, interrupts
from ipu_pipe.shipped import COMMAND, get_program

COMMANDS = {
    "new": "write a config for a model of your own on given hardware",
    "examples": "list the example loops and notebooks, or copy them",
    "train": "train by a config",
    "schedule": "print a method's schedule, its delays and versions",
    "plan": "rank configurations for given hardware by predicted throughput",
    "rehearse": "try a run without its devices and data, and judge whether it fits",
    "compare": "compare methods on a config's loop: losses against predicted time",
    "collect": "compare methods on the same work",
    "analyze": "analyze a trace: who waits for whom, and the bottleneck",
    "export": "write the weights of a run for use elsewhere",
    "stability": "find the learning rates that a run's delays allow",
    "fetch_data": "get a data set",
    "measure_hardware": "measure this machine, for plans",
    "check": "check this machine: small runs that must equal the emulator",
    "completion": "print a script that completes these commands in a shell",
}


def run(command: str | None = None) -> NoReturn:
    """Run a command, by default the one that the first argument names, and leave with its exit
    code.
    """
    # call it before the slow imports
    interrupts.install_end_at_interrupt()
    from ipu_pipe.errors import BadInput, Parser, run_command

    def run_first_argument() -> None:
        # in no list of choices: a wheel does not have it
        if sys.argv[1:2] == ["reproduce"]:
            raise BadInput(
                "COMMAND: reproduce: runs from a clone of the repository: python tools/reproduce.py"
            )
        summaries = {name.replace("_", "-"): summary for name, summary in COMMANDS.items()}
        parser = Parser(
            prog=get_program() or COMMAND,
            description="Train, plan and analyze pipelined models.",
            epilog="\n".join(
                [
                    "commands, each with --help:",
                    *(f"  {name:18}{summary}" for name, summary in summaries.items()),
                    "from a clone: python tools/reproduce.py runs the papers' experiments",
                ]
            ),
        )
        parser.add_argument("--version", action="version", version=f"ipu_pipe {__version__}")
        parser.add_argument(
            "command",
            metavar="COMMAND",
            # the module's and the tool's name has underscores
            type=lambda name: name.replace("_", "-"),
            choices=summaries,
        )
        # who types the name alone asks what there is
        chosen = parser.parse_args(sys.argv[1:2] or ["--help"]).command
        # the command reads the rest as a command line of its own
        del sys.argv[1]
        importlib.import_module(f"{__name__}.{chosen.replace('-', '_')}").main()

    run_command(
        run_first_argument
        if command is None
        else importlib.import_module(f"{__name__}.{command}").main
    )
