"""The commands are one table, called as tools/COMMAND.py and as python -m ipu_pipe COMMAND."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import List, Tuple

import pytest

from ipu_pipe.cli import COMMANDS, completion
from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.methods import METHODS

ROOT = Path(__file__).resolve().parents[1]
SCHEDULE_ARGUMENTS = ["gpipe", "--stages", "2", "--microbatches", "3", "--format", "json"]


def run_python(*arguments: str) -> Tuple[int, str, str]:
    """Run Python with these arguments; return exit code, standard output and standard error."""
    command = [sys.executable, *arguments]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    return process.returncode, process.stdout, process.stderr


# tools/stability.py also draws the papers' figures
MORE_IN_A_CLONE = {"stability"}


def test_every_command_has_its_tool_and_its_module() -> None:
    modules = {file.stem for file in (ROOT / "ipu_pipe" / "cli").glob("*.py")}
    tools = (ROOT / "tools").glob("*.py")
    called = {file.stem for file in tools if f'cli.run("{file.stem}")' in file.read_text()}
    assert set(COMMANDS) == modules - {"__init__", "arguments"} == called | MORE_IN_A_CLONE


def test_the_tool_with_more_takes_all_options_of_its_command() -> None:
    for name in MORE_IN_A_CLONE:
        command, tool = (
            importlib.import_module(f"{place}.{name}").main.make_parser()
            for place in ("ipu_pipe.cli", "tools.experiments")
        )
        assert set(command.list_options()) <= set(tool.list_options()) and command.prog == tool.prog


@pytest.mark.parametrize("words, parts", [
    (["reproduce", "--help"], ["error: COMMAND: reproduce: ", "from a clone", "python tools/reproduce.py"]),
    (["trian", "--help"], ["error: ", "'trian'"]),
])  # fmt: skip
def test_what_is_no_command_of_the_package_is_bad_input(words: List[str], parts: List[str]) -> None:
    code, printed, error = run_python("-m", "ipu_pipe", *words)
    assert (code, printed, error.count("\n")) == (2, "", 1)
    assert error.startswith(parts[0]) and all(part in error for part in parts)


@pytest.mark.parametrize("name, arguments", [
    ("schedule", SCHEDULE_ARGUMENTS),
    pytest.param("stability", ["mlp_digits", "--curvature", "1", "--json"], marks=pytest.mark.slow),
])  # fmt: skip
def test_both_ways_to_call_a_command_are_the_same(name: str, arguments: List[str]) -> None:
    code, printed, error = run_python("-m", "ipu_pipe", name, *arguments)
    assert (code, error) == (0, "") and (code, printed, error) == run_python(
        f"tools/{name}.py", *arguments
    )


def test_help_names_the_commands() -> None:
    """The name alone was an error, `required: COMMAND`, that named no command."""
    code, printed, error = run_python("-m", "ipu_pipe")
    assert (code, error) == (0, "") and "--help" in printed
    assert all(command.replace("_", "-") in printed for command in COMMANDS)


# ---- completion in a shell

BASH = shutil.which("bash")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("shtab")
    file = tmp_path_factory.mktemp("completion") / "ipu-pipe.bash"
    file.write_text(completion.make_script("bash"))
    return file


def list_completions(script: Path, line: str, folder: Path) -> List[str]:
    """Return the completions that bash lists for the last word of `line`, in `folder`."""
    before, _, last = line.rpartition(" ")
    commands = f"""
        source {script}
        COMP_WORDS=({before} "{last}"); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
        registered=($(complete -p ipu-pipe)); called="${{registered[@]: -2:1}}"
        "$called" ipu-pipe "${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[COMP_CWORD-1]}}"
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    words = [str(BASH), "--norc", "-c", commands]
    process = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    assert process.stderr == ""
    return process.stdout.split()


@pytest.mark.skipif(BASH is None, reason="no bash")
@pytest.mark.parametrize("line, words", [
    ("", [name.replace("_", "-") for name in COMMANDS]), ("completion f", ["fish"]),
    ("schedule pipedream", [name for name in METHODS if name.startswith("pipedream")]),
    ("train --res", ["--resume", "--resume-from"]), ("train ", ["mine.yaml"]), ("plan --hardware v100", ["v100x8"]),
    ("train --evaluate ", ["mine.yaml"]),
])  # fmt: skip
def test_bash_completes(line: str, words: List[str], script: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("")
    listed = list_completions(script, f"ipu-pipe {line}", tmp_path)
    # files are listed beside words
    assert {*words} <= {*listed} if line[-1:] in ("", " ") else listed == words


def test_without_shtab_the_fault_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    monkeypatch.setattr(completion.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match="pip install shtab"):
        completion.main(["bash"])
