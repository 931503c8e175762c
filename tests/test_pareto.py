"""Test tools/pareto.py on training losses that the test writes instead of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, List, Optional

import pytest

from tests.command_line import run_here
from tests.support.runs import read_json
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
        with (folder / "metrics.jsonl").open("w") as file:
            for i, loss in enumerate(losses, 1):
                file.write(json.dumps({"step": 10 * i, "train_loss": loss}) + "\n")


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
    assert results == read_json(tmp_path / "out" / "pareto.json")
    assert (tmp_path / "out" / "pareto.png").stat().st_size > 0

    counted = costs.Flops(**results["costs"])

    def price(law: str, k: int, update: int, batch: int) -> List[float]:
        work = (law, counted, update, batch, k)
        return [costs.compute_sequential(*work), costs.compute_total(*work)]

    high, low = (entry["kinds"] for entry in results["cutoffs"])
    laws = (("backpropagation", "backpropagation", 1), ("3 chunks", "local_chunked", 3))
    for kind, law, k in laws:
        for row, update in ((high[kind], 50), (low[kind], 70)):
            small, large = (price(law, k, update, batch) for batch in (64, 128))
            assert row["points"] == [small, small, large, large]
            # least sequential cost first
            assert row["front"] == [large, small]
    points = [price("local_greedy", 1, 50, batch) for batch in (64, 128, 128)]
    assert (high["greedy"]["points"], low["greedy"]["points"]) == (points, [])
    assert results["least_losses"] == pytest.approx(dict(zip(KINDS, (1.3, 2.0, 1.3))))

    table = (tmp_path / "out" / "table.md").read_text()
    # the batches of the least sequential and of the least total cost
    base, least = ([price(law, k, 70, 128)[0], price(law, k, 70, 64)[1]] for _, law, k in laws)
    cells = " | ".join(f"{ours:.2e} ({ours / theirs:.2f})" for ours, theirs in zip(least, base))
    assert f"| 1.5 | 3 chunks | 4 | {cells} |" in table
