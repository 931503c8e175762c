"""Run the tutorials' commands as a reader would, page by page, each in a folder of its own.

A block of ```bash is run line by line; a block with a title is written to the file of that name;
```text is not run.
Commands of this library and scripts run in this process, which is faster.
"""

from __future__ import annotations

import json
import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Iterator, List

import pytest

from ipu_pipe import cli
from tests.support.slow import mark_slow
from tools.documented import list_blocks

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "tutorials"
# tests/test_first_hour.py runs the commands of these, and reads what they print
READ = {"lesson", "pod", "pytorch_pipeline"}
PAGES = [page for page in sorted(FOLDER.glob("*.md")) if page.stem not in READ]
# pages whose commands `make test` runs.
QUICK = {"README"}
# the least test accuracy of the runs of a page that trains to the end; chance is 0.1
LEARNS = {"your_own_model": 0.6, "third_party": 0.25, "predict": 0.6}


def split_commands(text: str) -> Iterator[List[str]]:
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip():
            yield shlex.split(line)


def run_tutorial_command(words: List[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """Run a command in the current folder and return its exit code."""
    if words[0] == "ipu-pipe":
        monkeypatch.setattr(sys, "argv", list(words))
        with pytest.raises(SystemExit) as exit_info:
            cli.run()
        return exit_info.value.code
    if words[0] == "python":
        monkeypatch.setattr(sys, "argv", words[1:])
        runpy.run_path(words[1], run_name="__main__")
        return 0
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        words, env={**os.environ, "PATH": path}, stdin=subprocess.DEVNULL, timeout=240
    ).returncode


@pytest.mark.parametrize(
    "page", mark_slow(PAGES, lambda page: page.stem in QUICK), ids=lambda page: page.stem
)
def test_a_tutorial_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "torchvision" in page.read_text():
        assert pytest.importorskip("tests.vision_libraries").torchvision
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = set(sys.modules)
    for block in list_blocks(page):
        if block.file:
            Path(block.file).write_text(block.text)
        elif block.language == "bash":
            for words in split_commands(block.text):
                assert run_tutorial_command(words, monkeypatch) == 0, " ".join(words)
    summaries = {path: json.loads(path.read_text()) for path in Path("runs").glob("*/summary.json")}
    for path, summary in summaries.items():
        assert summary["final"]["test_accuracy"] >= LEARNS.get(page.stem, 0), path
    for name in set(sys.modules) - before:  # modules that the page wrote
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_all_pages_have_commands() -> None:
    pages_with_commands = {
        page.stem for page in PAGES if any(block.language == "bash" for block in list_blocks(page))
    }
    assert (
        pages_with_commands == {page.stem for page in PAGES} - {"README"}
        and len(pages_with_commands) == 4
    )
