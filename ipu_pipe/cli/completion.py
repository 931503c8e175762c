"""Completion of commands, options, methods and configs for a shell, as a script that the shell reads."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Sequence

from ipu_pipe.cli.arguments import folder
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
# of each shell: a function that completes one of some words or a YAML file, and how an argument asks for it
FUNCTIONS = {
    "bash": """{name}() {{
  local IFS=$' \n'
  compgen -W "{words}" -- $1
  compgen -f -X '!*.y*ml' -- $1
  compgen -d -- $1
}}""",
    "zsh": "{name}() {{ compadd -- {words}; _files -g '*.(yaml|yml)' }}",
    "fish": "function {name}; printf '%s\\n' {words}; __fish_complete_path (commandline -ct); end",
}
CALLS = {"bash": "{name}", "zsh": "{name}", "fish": "({name})"}


def parser() -> Parser:
    """The command line."""
    p = Parser(prog="tools/completion.py", description=__doc__, epilog=EPILOG)
    p.add_argument("shell", metavar="SHELL", choices=SHELLS, help=f"one of {', '.join(SHELLS)}")
    return p


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Run the command."""
    shell = parser().parse_args(arguments).shell
    if importlib.util.find_spec("shtab") is None:
        raise BadInput("completion is made by shtab, which is not installed: pip install shtab")
    import shtab

    if shell not in shtab.SUPPORTED_SHELLS:
        raise BadInput(
            f"SHELL: {shell}: this version of shtab has {', '.join(shtab.SUPPORTED_SHELLS)}: pip install -U shtab"
        )
    print(script(shell))


def script(shell: str) -> str:
    """What the shell reads."""
    import shtab

    from ipu_pipe.cli import COMMANDS

    functions: Dict[str, str] = {}
    whole = Parser(prog=COMMAND)
    whole.add_argument("--version", action="store_true", help="print the version")
    each = whole.add_subparsers()
    for command, says in COMMANDS.items():
        own = importlib.import_module(f"ipu_pipe.cli.{command}").parser()
        for action in own._actions:
            _complete(action, command, functions)
        each.add_parser(command.replace("_", "-"), parents=[own], add_help=False, help=says)
    preamble: Any = {
        shell: "\n".join(FUNCTIONS[shell].format(name=name, words=words) for name, words in functions.items())
    }
    made: str = shtab.complete(whole, shell, preamble=preamble)
    return made


def _complete(action: Any, command: str, functions: Dict[str, str]) -> None:
    """Say what completes an argument. `functions`: those needed for it, with their words."""
    import shtab

    from ipu_pipe.data.fetch import PACKAGES

    words: Dict[str, Iterable[str]] = {"method": METHODS, "methods": METHODS, "against": METHODS, "name": PACKAGES}
    files = {
        "config": _shipped(""),
        "what": _shipped(""),
        "hardware": _stems("hardware"),
        "experiment": _stems("experiments"),
    }
    if action.dest in files:
        name = f"_ipu_pipe_{action.dest}"
        functions[name] = " ".join(files[action.dest])
        action.complete = {shell: call.format(name=name) for shell, call in CALLS.items()}
    elif action.dest in words and command != "analyze":  # whose --against is a run
        action.choices = list(words[action.dest])
    elif action.type is folder:
        action.complete = shtab.DIRECTORY
    elif action.type is Path:
        action.complete = shtab.FILE


def _shipped(under: str) -> List[str]:
    """The configs that come with the library, by the names that commands take, but for what is no run's."""
    found = sorted(path.relative_to(find_configs()) for path in (find_configs() / under).rglob("*.yaml"))
    return [f"configs/{path.as_posix()}" for path in found if path.parts[0] not in ("hardware", "experiments")]


def _stems(under: str) -> List[str]:
    return sorted(path.stem for path in (find_configs() / under).glob("*.yaml"))
