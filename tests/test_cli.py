"""The commands are one table, called as tools/COMMAND.py and as python -m ipu_pipe COMMAND."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import List, Tuple

import pytest

from ipu_pipe.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
SCHEDULE_ARGUMENTS = ["gpipe", "--stages", "2", "--microbatches", "3", "--format", "json"]


def run_python(*arguments: str, cwd: Path = ROOT) -> Tuple[int, str, str]:
    """Run Python with these arguments; return exit code, standard output and standard error."""
    command = [sys.executable, *arguments]
    process = subprocess.run(
        command, cwd=str(cwd), capture_output=True, text=True, timeout=120, check=False
    )
    return process.returncode, process.stdout, process.stderr


# tools/stability.py also draws the papers' figures
MORE_IN_A_CLONE = {"stability"}


def test_every_command_has_its_tool_and_its_module() -> None:
    modules = {file.stem for file in (ROOT / "ipu_pipe" / "cli").glob("*.py")} - {
        "__init__",
        "arguments",
    }
    tools = {
        file.stem
        for file in (ROOT / "tools").glob("*.py")
        if f'cli.run("{file.stem}")' in file.read_text()
    }
    assert set(COMMANDS) == modules == tools | MORE_IN_A_CLONE


def test_the_tool_with_more_takes_all_options_of_its_command() -> None:
    for name in MORE_IN_A_CLONE:
        command, tool = (
            importlib.import_module(f"{place}.{name}").main.make_parser()
            for place in ("ipu_pipe.cli", "tools.experiments")
        )
        assert set(command.list_options()) <= set(tool.list_options()) and command.prog == tool.prog


@pytest.mark.parametrize("arguments", [[], ["pb_vgg11"], ["--help"]])
def test_experiments_run_from_a_clone(arguments: List[str]) -> None:
    code, printed, error = run_python("-m", "ipu_pipe", "reproduce", *arguments)
    assert (code, printed, error.count("\n")) == (2, "", 1)
    assert error.startswith("error: COMMAND: reproduce: ") and "from a clone" in error
    # the line names the tool itself, for which the wheel has no command
    assert "python tools/reproduce.py" in error


@pytest.mark.parametrize("name, arguments", [
    ("schedule", SCHEDULE_ARGUMENTS),
    pytest.param("stability", ["mlp_digits", "--curvature", "1", "--json"], marks=pytest.mark.slow),
])  # fmt: skip
def test_both_ways_to_call_a_command_are_the_same(name: str, arguments: List[str]) -> None:
    code, printed, error = run_python("-m", "ipu_pipe", name, *arguments)
    assert (code, error) == (0, "") and (code, printed, error) == run_python(
        f"tools/{name}.py", *arguments
    )


def test_an_unknown_command_is_bad_input() -> None:
    code, printed, error = run_python("-m", "ipu_pipe", "trian", "--help")
    assert (code, printed, error.count("\n")) == (2, "", 1)
    assert error.startswith("error: ") and "'trian'" in error


def test_help_names_the_commands() -> None:
    code, printed, error = run_python("-m", "ipu_pipe", "--help")
    assert (code, error) == (0, "") and all(
        command.replace("_", "-") in printed for command in COMMANDS
    )


def test_the_name_alone_prints_the_help() -> None:
    """It was an error, `required: COMMAND`, that named no command."""
    assert run_python("-m", "ipu_pipe") == run_python("-m", "ipu_pipe", "--help")
