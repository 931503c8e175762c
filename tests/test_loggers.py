"""Run the logger of docs/loop.md with the real package, offline: it records what the run's files do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Dict

import pytest

from ipu_pipe.config.load import load_config
from ipu_pipe.run.train import train
from tests.support.runs import DIGITS, read_json, read_metrics, read_summary
from tools.documented import list_blocks

SETS = [
    "method=pipedream", "stages=2", "gradient_accumulation=1", "micro_batch_size=8", "data.subset=256", "data.test_subset=64",
    "log.tensorboard=false", "log.trace=false", "backend.threads=1", "log.every=1", "checkpoint.every=2",
]  # fmt: skip
PAGE = Path(__file__).resolve().parents[1] / "docs" / "loop.md"
SETTINGS: Dict[str, Any] = {
    "project": "tests", "mode": "offline", "settings": {"silent": True, "console": "off"}
}  # fmt: skip


def join_blocks(file: Path) -> bytes:
    """Return a wandb file's records: each block of 32 KiB begins with a header of 7 bytes, which
    may lie within a record, and so within a number.
    """
    data, size = file.read_bytes(), 2**15
    return b"".join(data[begin + 7 : begin + size] for begin in range(0, len(data), size))


def test_wandb_has_config_lines_and_summary_in_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    (block,) = [b for b in list_blocks(PAGE) if b.file == "wandb_log.py"]
    (tmp_path / block.file).write_text(block.text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb_log", raising=False)
    out = tmp_path / "run"
    callbacks = json.dumps([{"entry": "wandb_log:WandbLog", "args": SETTINGS}])
    for steps in (4, 6):
        sets = [*SETS, f"steps={steps}", f"callbacks={callbacks}"]
        train(load_config(DIGITS, sets), out, quiet=True, resume=steps == 6)
    # the process that writes the files may still be at it after a run's finish: wait for its end
    wandb.teardown()
    files = sorted((out / "wandb").glob("offline-run-*/run-*.wandb"))
    (state,) = read_json(out / "checkpoints" / "step-6" / "manifest.json")["callbacks"]
    # the second start continues the run of the first
    assert [file.name for file in files] == [f"run-{state['state']}.wandb"] * 2
    logged = b"".join(map(join_blocks, files))
    lines = [line for line in read_metrics(out) if "train_loss" in line]
    assert len(lines) == 6 and all(repr(line["train_loss"]).encode() in logged for line in lines)
    final = read_summary(out)["final"]["test_loss"]
    assert b"micro_batch_size" in logged and b"planned_utilization" in logged
    assert repr(final).encode() in logged
