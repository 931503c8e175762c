"""Check the stored results of `make sweep` and its table. The sweep itself takes an hour:
tools/sweep.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ipu_pipe.errors import BadInput
from tools import sweep

STORED = Path(__file__).resolve().parents[1] / "docs" / "results" / "third_party"


def test_no_stored_run_is_silently_wrong_or_crashes() -> None:
    rows = json.loads((STORED / "results.json").read_text())["rows"]
    assert len(rows) >= 60 and {name.partition("-")[0] for name in rows} == {
        "torchvision",
        "timm",
        "transformers",
    }
    for name, row in rows.items():
        assert tuple(row) == sweep.METHODS, name
        for pair in row.values():
            diverged = pair[0].startswith("diverged: ") and pair[1] == "-"
            assert diverged or all(
                verdict == "equal" or verdict.startswith("refused: ") for verdict in pair
            ), name


def test_the_table_matches_the_stored_results() -> None:
    assert (STORED / "table.md").read_text() == sweep.format_table(
        json.loads((STORED / "results.json").read_text())
    )


def test_a_difference_is_reported() -> None:
    row = {method: ["equal", "differs: 3 of 4 tensors"] for method in sweep.METHODS}
    table = sweep.format_table({"versions": {}, "rows": {"timm-x": row}})
    assert (
        "| timm-x | equal / differs |" in table
        and "- timm-x, processes, all methods: differs: 3 of 4 tensors" in table
    )


def test_only_the_same_divergence_on_both_backends_passes() -> None:
    fault = (
        "update 2 of method pipemare: the training loss is nan; a smaller learning rate may help"
    )
    assert sweep.judge_divergence(fault, f"differs: {fault} (allow_nonfinite)") == [
        f"diverged: {fault}",
        "-",
    ]
    for theirs in (
        "",
        "failed: out of time, or killed",
        f"differs: {fault.replace('update 2', 'update 1')}",
    ):
        ours, other = sweep.judge_divergence(fault, theirs)
        assert ours == f"diverged: {fault}" and other.startswith(("differs: ", "failed: "))


def test_a_row_has_its_commit_and_rows_of_other_versions_are_not_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_sweep(*models: str) -> None:
        monkeypatch.setattr(
            sys,
            "argv",
            ["sweep.py", "--out", str(tmp_path), *(["--models", *models] if models else [])],
        )
        sweep.main()

    monkeypatch.setitem(sys.modules, "tests.third_party_zoo", SimpleNamespace(MODELS=("a", "b")))
    monkeypatch.setattr(sweep, "_read_versions", lambda: {"torch": "1"})
    monkeypatch.setattr(
        sweep,
        "_run_model",
        lambda name, limit: {method: ["equal", "equal"] for method in sweep.METHODS},
    )
    for name in ("b", "a"):
        run_sweep(name)
    file = tmp_path / "results.json"
    stored = json.loads(file.read_text())
    assert list(stored["rows"]) == ["a", "b"] and stored["commits"].keys() == {"a", "b"}
    file.write_text(json.dumps({**stored, "versions": {"torch": "0"}}))
    with pytest.raises(BadInput, match="^--out: "):
        run_sweep("a")
    monkeypatch.setattr(sys.modules["tests.third_party_zoo"], "MODELS", ("a",))
    run_sweep()
    assert list(json.loads(file.read_text())["rows"]) == ["a"]
