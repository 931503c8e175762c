"""The events file: what TensorBoard itself reads from it, after a resume too; faults of the disk."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Dict, List, Tuple

import pytest

pytest.importorskip("tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402

from ipu_pipe.config.load import load_config  # noqa: E402
from ipu_pipe.errors import RunFault  # noqa: E402
from ipu_pipe.run.progress import ScalarFile  # noqa: E402
from ipu_pipe.run.train import train  # noqa: E402
from tests.interrupted import interrupted_at  # noqa: E402

DIGITS = str(Path(__file__).resolve().parents[1] / "configs" / "mlp_digits.yaml")


def read(folder: Path) -> Dict[str, List[Tuple[int, float]]]:
    """(step, value) by name, as TensorBoard shows them."""
    found = EventAccumulator(str(folder))
    found.Reload()
    return {name: [(event.step, event.value) for event in found.Scalars(name)] for name in found.Tags()["scalars"]}


def test_each_scalar_is_readable_as_soon_as_it_is_added(tmp_path: Path) -> None:
    """Story: a thread wrote them out of a queue, every two minutes; closing waited for it, at times for ever so long."""
    before = threading.active_count()
    scalars = ScalarFile(tmp_path / "tensorboard")
    scalars.add("train_loss", 0.5, 1)
    scalars.add("block_train_loss/0", 0.25, 1)
    scalars.add("train_loss", 0.125, 2)
    assert read(tmp_path / "tensorboard") == {"train_loss": [(1, 0.5), (2, 0.125)], "block_train_loss/0": [(1, 0.25)]}
    assert threading.active_count() == before
    scalars.close()
    scalars.close()


def test_a_resumed_run_shows_each_update_once(tmp_path: Path) -> None:
    sets = ["steps=6", "log.every=1", "checkpoint.every=2", "evaluate.every=0", "gradient_accumulation=4"]
    chosen = load_config(DIGITS, sets)
    with interrupted_at(5):
        train(chosen, tmp_path, quiet=True)
    assert [k for k, _ in read(tmp_path / "tensorboard")["train_loss"]] == [1, 2, 3, 4, 5]
    train(chosen, tmp_path, resume=True, quiet=True)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    expected = [(line["step"], pytest.approx(line["train_loss"])) for line in lines if "train_loss" in line]
    assert read(tmp_path / "tensorboard")["train_loss"] == expected and len(expected) == 6


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device on which nothing can be written")
def test_a_full_disk_is_a_fault(tmp_path: Path) -> None:
    scalars = ScalarFile(tmp_path / "tensorboard")
    scalars._file.close()
    scalars._file = scalars._records._writer = open("/dev/full", "wb")
    with pytest.raises(RunFault, match="tensorboard: cannot be written: No space left on device"):
        scalars.add("train_loss", 0.5, 1)
    scalars.close()  # says nothing more
