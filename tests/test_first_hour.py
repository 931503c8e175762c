"""The first hour of a newcomer, in an empty home and without network: README's commands and the four guides in order, each step
with what it says, and the notebooks.

README's Python example is run by tests/test_train.py, the other tutorials by tests/test_tutorials.py, the guide of compare by
tests/test_compare.py.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Iterator

import pytest

from tests.support.runs import ROOT
from tests.test_tutorials import split_commands
from tools.documented import list_blocks

CONFIG = str(ROOT / "configs" / "mlp_digits.yaml")
MODEL = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
"""
# command of README -> what its output has
EXPECTED = {
    "train": r"test accuracy 0\.\d+ -> 0\.[5-9]",
    "analyze": r"Bottleneck: ",
    "plan": r"predicted",
    "stability": r"largest stable",
    "new": r"written: net_pod16\.yaml",
    "rehearse": r"emulator|fits",
}


def list_readme_commands() -> list[list[str]]:
    """List the commands under README's heading Commands, with files of ours for its placeholders."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Commands\n")[2]
    lines = re.findall(r"^    (ipu-pipe .*?)(?:  #.*)?$", text, re.MULTILINE)
    replaced = {"CONFIG": CONFIG, "configs/mlp_digits.yaml": CONFIG}
    return [[replaced.get(word, word) for word in shlex.split(line)] for line in lines]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Return the folder of somebody with a model in mine.py, and an empty home beside it."""
    folder = tmp_path / "here"
    for made in (folder, tmp_path / "home"):
        made.mkdir()
    (folder / "mine.py").write_text(MODEL)
    return folder


def run_as_newcomer(words: list[str], here: Path, code: int = 0) -> str:
    """Run a command as a page has it, without network; return all that it printed. Its exit code must
    be `code`.
    """
    modules = {"ipu-pipe": ["-m", "ipu_pipe"], "torchrun": ["-m", "torch.distributed.run"]}
    command = [sys.executable, *modules.get(words[0], []), *words[1:]]
    # nobody listens at this port
    proxies = {f"{name}_proxy": "http://127.0.0.1:9" for name in ("http", "https", "all")}
    environment = {
        **proxies, "HOME": str(here.with_name("home")), "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    done = subprocess.run(
        command, cwd=here, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600
    )  # fmt: skip
    # the command calls itself as it was called
    printed = done.stdout.replace("python -m ipu_pipe", "ipu-pipe")
    assert done.returncode == code, f"{' '.join(words)}: {printed}"
    return printed


def test_readmes_commands_work_in_an_empty_home(here: Path) -> None:
    commands = list_readme_commands()
    assert [words[1] for words in commands] == [*EXPECTED]
    for words in commands:
        if words[1] == "train":
            words += ["--out", "runs/mine"]
        if words[1] == "rehearse":
            words[2] = "net_pod16.yaml"
        printed = run_as_newcomer(words, here)
        assert re.search(EXPECTED[words[1]], printed), f"{' '.join(words)}: {printed}"


def matches(shown: str, printed: str) -> bool:
    """Return whether what was printed has the text that a page shows, where `...` is anything."""
    lines = "\n".join(line.rstrip() for line in printed.splitlines())
    pattern = re.escape(shown.strip()).replace(re.escape("..."), ".*?")
    return re.search(pattern, lines, re.DOTALL) is not None


def list_steps(page: Path, folder: Path) -> Iterator[tuple[list[str], str]]:
    """Yield the commands of a page in order, each with the text that the page shows as its output, ""
    for none; write its files, and its session as session.py, first."""
    blocks = list_blocks(page)
    session = "".join(
        block.text for block in blocks if block.language == "python" and not block.file
    )
    if session:
        (folder / "session.py").write_text(session, encoding="utf-8")
        yield ["python", "session.py"], ""
    for block, after in zip(blocks, [*blocks[1:], None]):
        if block.file:
            (folder / block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "bash":
            *first, last = split_commands(block.text)
            yield from ((words, "") for words in first)
            shown = after.text if after and after.language == "text" else ""
            # commands for a machine with IPUs, or with their output
            yield last, "" if shown.startswith(("$ ", "ipu-pipe ")) else shown
        elif block.text.startswith("$ "):
            for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                command, _, shown = part.partition("\n")
                yield shlex.split(command), shown


# guide -> what each step prints besides the text that the page shows; None: not run here
STEPS = {
    "own_loop.md": [
        r"\n43 [\d.]+\n.*'accuracy': 0\.[1-9].*Schedule\(pipemare",
        r"loss \d+\.\d{3}",
        # tests/test_example_loops.py runs two nodes
        None,
    ],
    "tutorials/pod.md": [
        r"fits pod4",
        r"written: ",
        r"needs 32 of 16 devices",
        r"fits pod16",
        r"pod4",
        r"pod16",
        r"stage 3  \.   \.   \.   F0  B0",
        r"stage 0",
        r"throughput: ",
    ],
    "tutorials/pytorch_pipeline.md": [
        r"",
        r"Bottleneck: stage 1",
        r"",
        r"both\.html",
        r"after\.sqlite",
        r"after\.csv",
    ],
    "tutorials/lesson.md": [
        r"stage 2",
        r"stage 2",
        # 2 sin(pi / (2 (2 d + 1))) for a delay d
        r"delay  0: stable up to (2\.0|1\.9).*delay  1: stable up to (1\.0|0\.99)",
        r"largest stable",
        r"test accuracy 0\.\d+ -> 0\.[1-9].*busy: .*greatest delay 0 updates",
        r"test accuracy 0\.\d+ -> 0\.[1-9].*busy: .*greatest delay 0 to 1 updates",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("page", STEPS)
def test_each_step_of_a_guide_says_what_the_page_shows(page: str, here: Path) -> None:
    steps = list(list_steps(ROOT / "docs" / page, here))
    assert len(steps) == len(STEPS[page])
    for (words, shown), expected in zip(steps, STEPS[page]):
        if expected is not None:
            printed = run_as_newcomer(words, here, 2 if shown.startswith("error: ") else 0)
            assert re.search(expected, printed, re.DOTALL), f"{words}: {printed}"
            assert matches(shown, printed), f"{words}: {printed}"
