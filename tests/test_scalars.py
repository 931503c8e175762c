"""Check the scalars that TensorBoard reads, also of a resumed run."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List, Tuple

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ipu_pipe.config.load import load_config
from ipu_pipe.run.train import train
from tests.interrupted import interrupt_at
from tests.support.runs import DIGITS, read_metrics


def read_scalars(folder: Path) -> Dict[str, List[Tuple[int, float]]]:
    """Return (step, value) pairs by scalar name, as TensorBoard shows them."""
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {
        name: [(event.step, event.value) for event in accumulator.Scalars(name)]
        for name in accumulator.Tags()["scalars"]
    }


def test_a_resumed_run_shows_each_update_once(tmp_path: Path) -> None:
    settings = [
        "method=gpipe",
        "steps=6",
        "log.every=1",
        "checkpoint.every=2",
        "evaluate.every=0",
        "gradient_accumulation=4",
    ]
    config = load_config(DIGITS, settings)
    with interrupt_at(5):
        train(config, tmp_path, quiet=True)
    assert [k for k, _ in read_scalars(tmp_path / "tensorboard")["train_loss"]] == [1, 2, 3, 4, 5]
    train(config, tmp_path, resume=True, quiet=True)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    expected = [
        (line["step"], pytest.approx(line["train_loss"]))
        for line in read_metrics(tmp_path)
        if "train_loss" in line
    ]
    assert read_scalars(tmp_path / "tensorboard")["train_loss"] == expected and len(expected) == 6
