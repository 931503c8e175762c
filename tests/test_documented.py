"""Run the commands of README, the guides and `train --help` that train the smallest config to its end, and see that they learn.

`make documented` runs all of them, those of the tutorials too. tests/test_tutorials.py runs the pages of the tutorials,
tests/test_examples.py the notebooks, and tests/test_example_loops.py the loops.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import List

import pytest

from ipu_pipe.errors import RunFault
from tests.support.runs import ROOT, list_faults, read_summary
from tools import documented
from tools.documented import Command, Outcome, find_commands, find_obstacle, list_commands

# the least test accuracy: five times that of guessing, 0.1
LEAST = 0.5


# outside the tutorials, those that train the smallest config once
COMMANDS = [
    command
    for command in list_commands()
    if command.words[0] in ("mlp_digits", "configs/mlp_digits.yaml")
    and "--against" not in command.words
    and "tutorials" not in command.page
    and not find_obstacle(command, ROOT)
]


def test_the_documented_commands_are_found() -> None:
    assert {command.page for command in COMMANDS} >= {"README.md", "docs/rules.md", "train --help"}
    assert any(command.launcher for command in COMMANDS)
    pages = {command.page for command in list_commands()}
    assert {"docs/ipu.md", "docs/tutorials/your_own_model.md"} <= pages


PAGE = """\
`ipu-pipe train` runs a config, `ipu-pipe train inline.yaml --set
epochs=2` this one, and `tools/train.py` is the same.

    python tools/train.py indented.yaml     # a comment

```bash
ipu-pipe train fenced.yaml --set 'stages=[fc2]' \\
    epochs=3
torchrun --nproc_per_node 2 -m ipu_pipe train ranks.yaml
ipu-pipe train dry.yaml --dry-run
ipu-pipe train old.yaml --out runs/a --resume
ipu-pipe train old.yaml --evaluate runs/a
ipu-pipe plan plan.yaml
```
"""


def test_commands_are_found_wherever_a_page_has_them() -> None:
    commands = {command.words[0]: command for command in find_commands("page.md", PAGE)}
    assert {name: command.words[1:] for name, command in commands.items()} == {
        "inline.yaml": ("--set", "epochs=2"),
        "indented.yaml": (),
        "fenced.yaml": ("--set", "stages=[fc2]", "epochs=3"),
        "ranks.yaml": (),
    }
    assert commands["indented.yaml"].text == "python tools/train.py indented.yaml"
    assert commands["ranks.yaml"].launcher == ("torchrun", "--nproc_per_node", "2")


@pytest.mark.parametrize("line, reason", [
    ("ipu-pipe train mlp_digits", ""),
    ("ipu-pipe train CONFIG", ""),
    ("ipu-pipe train mlp_digits --set method=METHOD", "METHOD: left to the reader"),
    ("ipu-pipe train my.yaml", "my.yaml: a config of the reader's"),
    ("ipu-pipe train configs/pod/pod4_resnet18_pipelined.yaml", "needs IPUs"),
    ("poprun --num-instances 2 tools/train.py mlp_digits", "needs IPUs"),
])  # fmt: skip
def test_what_this_machine_does_not_have_is_named(line: str, reason: str, tmp_path: Path) -> None:
    (command,) = find_commands("page.md", f"    {line}\n")
    obstacle = find_obstacle(command, tmp_path)
    assert obstacle.startswith(reason) and bool(obstacle) == bool(reason)


def run_tool(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tools/documented.py", *arguments])
    documented.main()


def test_a_page_lists_every_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = {
        "train mine.yaml --out runs/mine": Outcome("", False, "accuracy 0.050", 0.1, False, 3.0),
        "train mine.yaml --out runs/gpipe": Outcome("over the limit of 15 minutes"),
    }

    def take_outcome(command: Command, limit: float) -> Outcome:
        known = [one for text, one in outcomes.items() if text in command.text]
        return known[0] if known else Outcome("exit code 1: it broke", is_fault=True)

    monkeypatch.setattr(documented, "run_documented", take_outcome)
    page = tmp_path / "page.md"
    with pytest.raises(RunFault, match=r"1 of 3 commands failed: torchrun .* mine\.yaml"):
        run_tool("--only", "mine.yaml", "--out", str(page), monkeypatch=monkeypatch)
    rows = [line for line in page.read_text().splitlines() if line.startswith("| `")]
    where = "| docs/tutorials/your_own_model.md |"
    ends = [row.partition(where)[2] for row in rows if " left out by --only mine" not in row]
    assert [end.strip(" |") for end in ends] == [
        "accuracy 0.050 | 0.100 | no | 3", "over the limit of 15 minutes", "exit code 1: it broke",
    ]  # fmt: skip
    assert len(rows) == len(list_commands())


@pytest.mark.parametrize("arguments", [["--limit", "0"], ["--limit", "nan"], ["--only", "absent"]])
def test_a_wrong_option_is_one_line(arguments: List[str], monkeypatch: pytest.MonkeyPatch) -> None:
    faults = list_faults(run_tool, *arguments, monkeypatch=monkeypatch)
    assert len(faults) == 1 and faults[0].startswith(f"{arguments[0]}: ")


@pytest.mark.slow
@pytest.mark.parametrize("options, fault, limit", [
    ("model.entry=absent_package:net", "no module absent_package", 5),
    ("data.name=cifar10 data.root=absent", "data: cifar10: absent/", 5),
    ("epochs=100000", "over the limit of 0.001 minutes", 1e-3),
    ("data.name=digits data.subset=0", "data.subset", 5),
])  # fmt: skip
def test_absent_packages_and_data_are_reasons_and_wrong_commands_faults(
    options: str, fault: str, limit: float
) -> None:
    (command,) = find_commands("page.md", f"    ipu-pipe train mlp_digits --set {options}\n")
    outcome = documented.run_documented(command, limit)
    assert fault in outcome.reason and outcome.is_fault == (fault == "data.subset")


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["epochs=1 optimizer.lr=1e-9", "epochs=6"])
def test_a_run_is_judged_by_guessing(settings: str) -> None:
    """A learning rate of nearly zero learns nothing."""
    text = f"    ipu-pipe train digits.yaml --set {settings}\n"
    (command,) = find_commands("docs/tutorials/predict.md", text)
    outcome = documented.run_documented(command, limit=5)
    assert outcome.is_above is (settings == "epochs=6") and not outcome.reason
    assert outcome.guessing is not None and 0.1 <= outcome.guessing < 0.15


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.text)
def test_a_documented_command_learns(command: Command, tmp_path: Path) -> None:
    """Story: README's first command ended at an accuracy of 0.083."""
    # the last --out counts
    words = [sys.executable, *command.make_arguments(), "--out", str(tmp_path / "run")]
    process = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert process.returncode == 0, process.stderr
    assert read_summary(tmp_path / "run")["final"]["test_accuracy"] >= LEAST
