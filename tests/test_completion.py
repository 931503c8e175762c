"""Completion in a shell: bash lists the right words for the beginning of a line."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import List

import pytest

from ipu_pipe.cli import COMMANDS, completion
from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.methods import METHODS

BASH = shutil.which("bash")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("shtab")
    file = tmp_path_factory.mktemp("completion") / "ipu-pipe.bash"
    file.write_text(completion.make_script("bash"))
    return file


def list_completions(script: Path, line: str, folder: Path) -> List[str]:
    """Return the completions that bash lists for the last word of `line`, in `folder`."""
    commands = f"""
        source {script}
        COMP_WORDS=({line.rpartition(" ")[0]} "{line.rpartition(" ")[2]}"); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
        registered=($(complete -p ipu-pipe)); called="${{registered[@]: -2:1}}"
        "$called" ipu-pipe "${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[COMP_CWORD-1]}}"
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    process = subprocess.run(
        [BASH, "--norc", "-c", commands],
        cwd=str(folder),
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stderr == ""
    return process.stdout.split()


@pytest.mark.skipif(BASH is None, reason="no bash")
def test_bash_completes(script: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("")
    assert {name.replace("_", "-") for name in COMMANDS} <= set(
        list_completions(script, "ipu-pipe ", tmp_path)
    )
    assert list_completions(script, "ipu-pipe measure", tmp_path) == ["measure-hardware"]
    assert list_completions(script, "ipu-pipe schedule pipedream", tmp_path) == [
        n for n in METHODS if n.startswith("pipedream")
    ]
    assert list_completions(script, "ipu-pipe train --against loc", tmp_path) == [
        n for n in METHODS if n.startswith("loc")
    ]
    assert list_completions(script, "ipu-pipe train --res", tmp_path) == [
        "--resume",
        "--resume-from",
    ]
    assert "mine.yaml" in list_completions(script, "ipu-pipe train ", tmp_path)
    assert list_completions(script, "ipu-pipe plan --hardware v100", tmp_path) == ["v100x8"]
    assert "mine.yaml" in list_completions(script, "ipu-pipe train --evaluate ", tmp_path)
    assert list_completions(script, "ipu-pipe completion f", tmp_path) == ["fish"]


def test_every_shell_gets_all_commands() -> None:
    shtab = pytest.importorskip("shtab")
    for shell in set(completion.SHELLS) & set(shtab.SUPPORTED_SHELLS):
        script = completion.make_script(shell)
        assert all(f"{name.replace('_', '-')}" in script for name in COMMANDS)


def test_without_shtab_the_fault_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    monkeypatch.setattr(completion.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match="pip install shtab"):
        completion.main(["bash"])
