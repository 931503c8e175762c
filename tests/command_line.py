"""A command run in this process, which is faster than starting Python for each test."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import NamedTuple

import pytest

from ipu_pipe.errors import run_command


class Done(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def run_here(
    command: ModuleType,
    *arguments: object,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Done:
    """`command.main` on a command line of these arguments."""
    monkeypatch.setattr(sys, "argv", [command.__name__, *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        run_command(command.main)
    printed = capsys.readouterr()
    assert isinstance(left.value.code, int)
    return Done(left.value.code, printed.out, printed.err)
