"""Check the stored results of `make sweep` and its table. The sweep itself takes an hour:
tools/sweep.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ipu_pipe.errors import BadInput
from tests.support.runs import ROOT, read_json
from tools import sweep

STORED = ROOT / "docs" / "results" / "third_party"


def test_no_stored_run_is_silently_wrong_or_crashes() -> None:
    """The table is that of the stored results."""
    stored = read_json(STORED / "results.json")
    assert (STORED / "table.md").read_text() == sweep.format_table(stored)
    assert len(stored["rows"]) >= 60
    for name, row in stored["rows"].items():
        assert tuple(row) == sweep.METHODS, name
        for pair in row.values():
            diverged = pair[0].startswith("diverged: ") and pair[1] == "-"
            assert diverged or all(word == "equal" or word.startswith("refused: ") for word in pair)


def test_a_difference_is_reported() -> None:
    row = {method: ["equal", "differs: 3 of 4 tensors"] for method in sweep.METHODS}
    table = sweep.format_table({"versions": {}, "rows": {"timm-x": row}})
    assert "| timm-x | equal / differs |" in table
    assert "- timm-x, processes, all methods: differs: 3 of 4 tensors" in table


@pytest.mark.parametrize("theirs, word", [
    ("differs: FAULT (allow_nonfinite)", "-"),
    ("differs: update 1 of pipemare: the training loss is nan", "differs: "),
    ("failed: out of time, or killed", "failed: "),
    ("", "differs: "),
])  # fmt: skip
def test_only_the_same_divergence_on_both_backends_passes(theirs: str, word: str) -> None:
    fault = "update 2 of pipemare: the training loss is nan; a smaller learning rate may help"
    ours, other = sweep.judge_divergence(fault, theirs.replace("FAULT", fault))
    assert ours == f"diverged: {fault}" and other.startswith(word)


def test_a_row_has_its_commit_and_rows_of_other_versions_are_not_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_sweep(*options: str) -> None:
        monkeypatch.setattr(sys, "argv", ["sweep.py", "--out", str(tmp_path), *options])
        sweep.main()

    row, zoo = {method: ["equal", "equal"] for method in sweep.METHODS}, SimpleNamespace()
    zoo.MODELS = ("a", "b")
    monkeypatch.setitem(sys.modules, "tests.third_party_zoo", zoo)
    monkeypatch.setattr(sweep, "_read_versions", lambda: {"torch": "1"})
    monkeypatch.setattr(sweep, "_run_model", lambda name, limit: row)
    for name in ("b", "a"):
        run_sweep("--models", name)
    file = tmp_path / "results.json"
    stored = read_json(file)
    assert list(stored["rows"]) == ["a", "b"] and stored["commits"].keys() == {"a", "b"}
    file.write_text(json.dumps({**stored, "versions": {"torch": "0"}}))
    with pytest.raises(BadInput, match="^--out: "):
        run_sweep("--models", "a")
    zoo.MODELS = ("a",)
    run_sweep()
    assert list(read_json(file)["rows"]) == ["a"]
