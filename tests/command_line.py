"""Run a command in this process, which is faster than to start Python for each test."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import NamedTuple

import pytest

from ipu_pipe.errors import run_command


class CommandResult(NamedTuple):
    """Exit code and output of a command."""

    returncode: int
    stdout: str
    stderr: str


def run_here(
    command: ModuleType,
    *arguments: object,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> CommandResult:
    """Call `command.main` with these arguments on its command line."""
    monkeypatch.setattr(sys, "argv", [command.__name__, *map(str, arguments)])
    with pytest.raises(SystemExit) as raised:
        run_command(command.main)
    output = capsys.readouterr()
    assert isinstance(raised.value.code, int)
    return CommandResult(raised.value.code, output.out, output.err)
