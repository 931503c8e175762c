"""The stored results of `make sweep`, and its table. The sweep itself takes an hour: tools/sweep.py."""

from __future__ import annotations

import json
from pathlib import Path

from tools import sweep

STORED = Path(__file__).resolve().parents[1] / "docs" / "results" / "third_party"


def test_no_stored_run_is_silently_wrong_or_crashes() -> None:
    rows = json.loads((STORED / "results.json").read_text())["rows"]
    assert len(rows) >= 60 and {name.partition("-")[0] for name in rows} == {"torchvision", "timm", "transformers"}
    for name, row in rows.items():
        assert tuple(row) == sweep.METHODS, name
        for pair in row.values():
            diverged = pair[0].startswith("diverged: ") and pair[1] == "-"
            assert diverged or all(verdict == "equal" or verdict.startswith("refused: ") for verdict in pair), name


def test_the_table_is_that_of_the_stored_results() -> None:
    assert (STORED / "table.md").read_text() == sweep.format_table(json.loads((STORED / "results.json").read_text()))


def test_a_difference_is_told() -> None:
    row = {method: ["equal", "differs: 3 of 4 tensors"] for method in sweep.METHODS}
    table = sweep.format_table({"versions": {}, "rows": {"timm-x": row}})
    assert "| timm-x | equal / differs |" in table and "- timm-x, processes, all methods: differs: 3 of 4 tensors" in table
