"""The loops over `Pipeline` in examples/ and docs/own_loop.md run as a user runs them."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import List

import pytest
import torch

import ipu_pipe
from tests.support.slow import mark_slow
from tests.test_examples import EXAMPLES, run_script
from tools.documented import list_blocks

TWO_RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@pytest.mark.parametrize(
    "name", mark_slow(["plain_loop", "own_loop"], lambda name: name == "own_loop")
)
def test_a_loop_runs(name: str, tmp_path: Path) -> None:
    printed = run_script([str(EXAMPLES / f"{name}.py")], tmp_path)
    # 0.1 by chance
    assert printed.startswith("test accuracy ") and float(printed.split()[-1]) > 0.8


@pytest.mark.slow
def test_accelerate_has_the_same_losses_and_rates_on_two_ranks(tmp_path: Path) -> None:
    """Accelerate's own scheduler steps once for each process, so on two ranks its rates would fall twice as fast."""
    pytest.importorskip("accelerate")
    script = [str(EXAMPLES / "accelerate_loop.py"), "2"]
    one = run_script(script, tmp_path)
    two = run_script([*TWO_RANKS, *script], tmp_path)
    assert one == two
    lines = one.splitlines()
    assert [line.split()[-1] for line in lines[:-1]] == ["0.010000", "0.000000"]
    assert lines[-1].startswith("test accuracy ")


INTERRUPTED = """
import builtins, runpy, sys
show = builtins.print
def show_and_interrupt(text, **keys):
    show(text, **keys)
    if text.startswith("epoch 2:"):
        raise KeyboardInterrupt
builtins.print = show_and_interrupt
sys.argv = [{0!r}, {1!r}]
runpy.run_path({0!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_a_long_loop_prints_the_same_on_two_ranks_and_after_ctrl_c(tmp_path: Path) -> None:
    script = [str(EXAMPLES / "vit_loop.py"), "3"]
    straight = run_script(script, tmp_path).splitlines()
    assert [line.split(":")[0] for line in straight[:3]] == ["epoch 1", "epoch 2", "epoch 3"]
    # 0.1 by chance
    assert float(straight[-1].split()[5].strip(",")) > 0.2
    assert run_script([*TWO_RANKS, *script], tmp_path).splitlines() == straight
    # Ctrl-C comes with a line, so that it depends on no clock
    code = INTERRUPTED.format(script[0], script[1])
    with pytest.raises(AssertionError):
        run_script(["-c", code], tmp_path)
    first, *rest = run_script(script, tmp_path).splitlines()
    # the checkpoint of epoch 2 comes after its line
    assert first == "goes on after epoch 1"
    assert rest == straight[1:]


README = EXAMPLES.parent / "README.md"


def read_loop(name: str) -> List[str]:
    """Read the lines of an example after its docstring."""
    return (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()[1:]


def test_three_lines_make_a_pipeline_of_a_loop() -> None:
    changed = [
        f"{one[0]}{one[2:]}"
        for one in difflib.ndiff(read_loop("plain_loop"), read_loop("own_loop"))
        if one[0] in "+-" and one[2:] and not one[2:].startswith("import ")
    ]
    added = [line[1:].split("(")[0].strip() for line in changed if line[0] == "+"]
    assert added == ["pipe = ipu_pipe.Pipeline", "pipe.step", "pipe.close"]
    # README shows the changed lines
    (shown,) = re.findall(r"```diff\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.S)
    assert sorted(shown.splitlines()) == sorted(changed)


# ---- docs/own_loop.md

PAGE = EXAMPLES.parent / "docs" / "own_loop.md"


def test_updates_leave_as_the_page_states() -> None:
    rows = re.findall(
        r"^\| `(\w+)`.* \| (\d) \| `(\[.*\])` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(rows) == 7
    batch = torch.ones(8, 4)
    for method, count, cell in rows:
        model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        keys = {"stages": 4, "microbatches": None if method == "local_sgd" else int(count)}
        pipe = ipu_pipe.Pipeline(model, torch.nn.functional.mse_loss, optimizer, method, **keys)
        expected = json.loads(f"[{cell.replace('] [', '], [')}]")
        left = [[update.index for update in pipe.step(batch, batch)] for _ in expected]
        assert left == expected
        pipe.close()


LAST = """
import atexit
import sys

import torch


def print_group() -> None:
    # one write: print writes piece by piece under torchrun, and two ranks' pieces mix
    sys.stdout.write(f"group: {torch.distributed.is_initialized()}\\n")


# called last, since the Pipeline registers later
atexit.register(print_group)
"""


@pytest.mark.slow
def test_a_loop_destroys_its_process_group_before_the_interpreter_ends(tmp_path: Path) -> None:
    """Story: the end of the interpreter among gloo's threads aborted every third run, after all its work was done."""
    (block,) = [block for block in list_blocks(PAGE) if block.file == "two_ranks.py"]
    script = tmp_path / block.file
    script.write_text(LAST + block.text, encoding="utf-8")
    assert run_script([*TWO_RANKS, str(script)], tmp_path).count("group: False") == 2
