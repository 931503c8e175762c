"""Test the hostile tool: it detects forbidden outcomes, and cases are reproducible."""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ipu_pipe.store import checkpoint  # noqa: E402
from tests.hostile import configs  # noqa: E402
from tests.hostile.cases import Bases, Case, damage_bytes  # noqa: E402
from tests.hostile.checkpoints import LAST, find_difference  # noqa: E402
from tests.hostile.running import KINDS, judge_case, list_cases, make_numbered_case  # noqa: E402

if sys.platform != "linux":
    pytest.skip("forks, pipes and limits of Linux", allow_module_level=True)

CASE = Case("train", [], "")


@pytest.mark.parametrize(
    ("code", "wrong", "bad"),
    [
        (0, "", ""),
        (2, "error: x.yaml: seed: -1: must be ...\n", ""),
        (1, "error: the disk is full\n", ""),
        (None, "", "hang"),
        (1, "Traceback (most recent call last):\n  ...\nKeyError: 3\n", "traceback: KeyError: 3"),
        (0, "Traceback (most recent call last):\n  ...\nKeyError: 3\n", "traceback"),  # of a thread
        (2, "", "no line"),
        (1, "killed\n", "no line"),
        (2, f"error: {'a' * 9000}\n", "no line: too long"),
        (2, "error: \x1b[31m\n", "no line: too long, or not printable"),
        (
            1,
            f"error: before training: KeyError: 3 ({checkpoint.__file__}:324, in load)\n",
            "our line: error",
        ),
        (1, "error: before training: KeyError: 3 (/x/ipu_pipe/my_model.py:3, in forward)\n", ""),
        (-11, "", "exit code: -11"),
        (3, "error: x\n", "exit code: 3"),
        (0, "x.py:3: RuntimeWarning: overflow\n  x * y\n", "warning: "),
        (0, "\x1b[31mred\n", "not printable"),
    ],
)
def test_forbidden_outcomes_are_detected(code: int, wrong: str, bad: str) -> None:
    verdict = judge_case(CASE, code, "", wrong)
    assert verdict.startswith(bad) and bool(verdict) == bool(bad)


def test_accepted_checkpoints_with_other_values_are_detected(tmp_path: Path) -> None:
    end, run = tmp_path / "end", tmp_path / "run"
    (end / LAST).mkdir(parents=True)
    for name in ("model", "optimizer"):
        save_file({"w": torch.arange(3.0)}, end / LAST / f"{name}.safetensors")
    figures = {"steps": 6, "samples": 192, "initial": {"loss": 2.0}, "final": {"loss": 1.0}}
    (end / "summary.json").write_text(json.dumps(figures))
    shutil.copytree(end, run)
    case = CASE._replace(find_difference=lambda printed: find_difference(end, run))
    assert judge_case(case, 0, "", "") == ""
    (run / "summary.json").write_text(json.dumps({**figures, "initial": {"loss": 2.5}}))
    assert judge_case(case, 0, "", "").startswith("differs: summary.json: initial")
    save_file({"w": torch.tensor([0.0, 1.0, 2.0000002])}, run / LAST / "optimizer.safetensors")
    assert "optimizer.safetensors" in judge_case(case, 0, "", "")
    assert judge_case(case, 2, "", "error: refused\n") == ""
    unread = CASE._replace(find_difference=json.loads)
    assert judge_case(unread, 0, "no JSON", "").startswith("differs: its result cannot be read")


def test_a_case_is_reproduced_from_its_name_alone(tmp_path: Path) -> None:
    bases = Bases(tmp_path, tmp_path)

    def make(kind: str, number: int, folder: Path) -> Any:
        folder.mkdir()
        case = make_numbered_case(kind, number, 7, folder, bases)
        return case, [(path.name, path.read_bytes()) for path in folder.glob("*.yaml")]

    for number in range(30):
        for kind in ("configs", "commands"):
            one, two = (make(kind, number, tmp_path / f"{kind}{number}{n}") for n in "ab")
            assert one == two
    assert {kind for kind, _ in list_cases(20)} == set(KINDS) and len(set(list_cases(2000))) == 2000


def test_mutations_reach_every_key_that_names_no_function() -> None:
    assert {"optimizer.lr", "backend.ipu.device_iterations"} <= {*configs.HARMLESS}
    assert not {"model.entry", "loss", "data.name"} & {*configs.HARMLESS}
    rng = random.Random(0)
    assert len({damage_bytes(b"seed: 3\nsteps: 4\n", rng) for _ in range(100)}) > 60
