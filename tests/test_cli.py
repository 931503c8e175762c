"""The commands: one table, reached as tools/COMMAND.py and as python -m ipu_pipe COMMAND."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Tuple

import pytest

from ipu_pipe.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
ASKED = ["gpipe", "--stages", "2", "--microbatches", "3", "--format", "json"]


def ran(*arguments: str, cwd: Path = ROOT) -> Tuple[int, str, str]:
    """Exit code, standard output and error."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=str(cwd), capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


def test_every_command_has_its_tool_and_its_module() -> None:
    modules = {file.stem for file in (ROOT / "ipu_pipe" / "cli").glob("*.py")} - {"__init__", "arguments"}
    tools = {file.stem for file in (ROOT / "tools").glob("*.py") if f'cli.run("{file.stem}")' in file.read_text()}
    assert set(COMMANDS) == modules == tools


def test_a_command_is_the_same_by_both_ways() -> None:
    code, said, error = ran("-m", "ipu_pipe", "schedule", *ASKED)
    assert (code, error) == (0, "") and (code, said, error) == ran("tools/schedule.py", *ASKED)


@pytest.mark.parametrize("arguments, told", [([], "required: COMMAND"), (["trian", "--help"], "'trian'")])
def test_no_command_is_bad_input(arguments: Tuple[str, ...], told: str) -> None:
    code, said, error = ran("-m", "ipu_pipe", *arguments)
    assert (code, said, error.count("\n")) == (2, "", 1) and error.startswith("error: ") and told in error


def test_help_names_the_commands() -> None:
    code, said, error = ran("-m", "ipu_pipe", "--help")
    assert (code, error) == (0, "") and all(command.replace("_", "-") in said for command in COMMANDS)
