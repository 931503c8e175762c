"""Run the commands of README, the guides and `train --help` that train the smallest config to its end, and see that they learn.

tests/test_tutorials.py runs those of the tutorials, tests/test_examples.py the notebooks, and
tests/test_example_loops.py the loops.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import List

import pytest

from ipu_pipe.cli import train
from tests.support.runs import ROOT, read_summary

COMMAND = re.compile(
    r"(torchrun --nproc_per_node \d+ )?(?:ipu-pipe train|(?:python )?tools/train\.py)"
    r" (?:configs/)?mlp_digits(?:\.yaml)?\b([^`#\n]*)"
)
# the least test accuracy: five times that of guessing, 0.1
LEAST = 0.5
# what these options do is not training to the end
OTHERS = ("--dry-run", "--evaluate", "--resume", "--resume-from", "--against")


def list_commands() -> List[List[str]]:
    """Return the documented commands, each as the arguments of Python."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    found = [match for text in [*texts, train.EPILOG] for match in COMMAND.findall(text)]
    commands = []
    for launcher, options in found:
        words = shlex.split(options)
        if not any(option in words for option in OTHERS):
            start = ["-m", "torch.distributed.run", *launcher.split()[1:]] if launcher else []
            command = [*start, "tools/train.py", "configs/mlp_digits.yaml", *words]
            commands += [] if command in commands else [command]
    return commands


COMMANDS = list_commands()


def test_the_documented_commands_are_found() -> None:
    assert 5 <= len(COMMANDS) <= 20
    assert any("method=pipemare" in command for command in COMMANDS)
    assert any("torch.distributed.run" in command for command in COMMANDS)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_documented_command_learns(command: List[str], tmp_path: Path) -> None:
    """Story: README's first command ended at an accuracy of 0.083."""
    if "backend.name=xla" in command:
        pytest.importorskip("jax")
    # the last --out counts
    words = [sys.executable, *command, "--out", str(tmp_path / "run")]
    process = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert process.returncode == 0, process.stderr
    assert read_summary(tmp_path / "run")["final"]["test_accuracy"] >= LEAST
