"""Test tools/pareto.py on training losses that the test writes instead of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, List, Optional

import pytest

from tests.command_line import run_here
from tools import pareto
from tools.experiments import costs, training_grids

KINDS = ("backpropagation", "greedy", "3 chunks")


def train_as_written(grid: Any, out: Path, request: Any) -> None:
    """Write the log of every run of a grid: all losses fall below 1.5 but those of greedy
    training, of which one run diverges."""
    for label in grid.rows:
        # means of five: 1.9, 1.7, 1.5, 1.3
        losses: List[Optional[float]] = [2.3, 2.1, 1.9, 1.7, 1.5, 1.3, 1.1, 0.9]
        if label.startswith("greedy"):
            losses = [2.3, 2.2, 2.1, 2.0, 1.9, None, 1.8]
        if label == "greedy-b64-lr0.01":
            losses = [2.3, None, None]
        folder = out / label / "seed-0"
        folder.mkdir(parents=True)
        lines = [
            json.dumps({"step": 10 * i, "train_loss": loss}) for i, loss in enumerate(losses, 1)
        ]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_costs_are_those_of_the_first_update_whose_mean_of_five_losses_is_low_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training_grids, "run_grid", train_as_written)
    options = (
        "--batches 64 128 --rates 0.001 0.01 --examples 640 --width 8 --cutoffs 2.2 1.5 --json"
    )
    folders = ["--runs", tmp_path / "runs", "--out", tmp_path / "out"]
    arguments = ["--kinds", *KINDS, *options.split(), *folders]
    done = run_here(pareto, *arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert results == json.loads((tmp_path / "out" / "pareto.json").read_text())
    assert (tmp_path / "out" / "pareto.png").stat().st_size > 0

    counted = costs.Flops(**results["costs"])

    def price(law: str, k: int, update: int, batch: int) -> List[float]:
        work = (law, counted, update, batch, k)
        return [costs.compute_sequential(*work), costs.compute_total(*work)]

    high, low = (entry["kinds"] for entry in results["cutoffs"])
    for kind, law, k in (
        ("backpropagation", "backpropagation", 1),
        ("3 chunks", "local_chunked", 3),
    ):
        for row, update in ((high[kind], 50), (low[kind], 70)):
            assert (
                row["points"] == [price(law, k, update, 64)] * 2 + [price(law, k, update, 128)] * 2
            )
            # least sequential cost first
            assert row["front"] == [price(law, k, update, 128), price(law, k, update, 64)]
    assert high["greedy"]["points"] == [
        price("local_greedy", 1, 50, batch) for batch in (64, 128, 128)
    ]
    assert low["greedy"]["points"] == []
    assert results["least_losses"] == pytest.approx(
        {"backpropagation": 1.3, "greedy": 2.0, "3 chunks": 1.3}
    )

    table = (tmp_path / "out" / "table.md").read_text()
    cells = []
    for axis, batch in ((0, 128), (1, 64)):  # that of the least cost
        least = price("local_chunked", 3, 70, batch)[axis]
        base = price("backpropagation", 1, 70, batch)[axis]
        cells.append(f"{least:.2e} ({least / base:.2f})")
    assert f"| 1.5 | 3 chunks | 4 | {cells[0]} | {cells[1]} |" in table
    assert "| 1.5 | greedy | 0 | - | - |" in table and "| greedy | 2.000 |\n" in table
