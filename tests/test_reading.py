"""Check that losses are read from a GPU only when they are needed, and that no number changes.
The CPU stands in for the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ipu_pipe.backends.emulator import engine as engines
from ipu_pipe.backends.emulator.replay import Emulator
from ipu_pipe.config.load import load_config
from ipu_pipe.errors import RunFault
from ipu_pipe.job.evaluation import Tally, evaluate_sums
from ipu_pipe.job.metrics import DEFAULT
from ipu_pipe.pipeline.flow import Flow
from ipu_pipe.run.build import build
from ipu_pipe.run.train import train
from tests.support.runs import DIGITS, find_checkpoint, read_json, read_numbers

SHORT = [
    "steps=23", "optimizer.lr=0.02", "log.tensorboard=false", "gradient_accumulation=4", "micro_batch_size=8", "stages=2",
    "evaluate.subset=64", "backend.threads=1", "log.every=5", "checkpoint.every=8", "data.subset=320",
]  # fmt: skip


class ReadCounter(TorchDispatchMode):
    """A dispatch mode that counts reads of tensors, each of which waits for a GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "settings", [["method=pipemare"], ["method=local_greedy"], ["replicas=2", "method=gpipe"]]
)
def test_losses_read_rarely_give_the_same_numbers(
    settings: List[str], tmp_path: Path, monkeypatch: Any
) -> None:
    config, updates_read = load_config(DIGITS, [*SHORT, *settings]), []
    at_once = train(config, tmp_path / "a", quiet=True)
    monkeypatch.setattr(engines, "does_reading_synchronize", lambda device: True)
    read = Emulator.read
    monkeypatch.setattr(
        Emulator, "read", lambda self: updates_read.append(self.update) or read(self)
    )
    delayed = train(config, tmp_path / "b", quiet=True)
    assert delayed["final"] == at_once["final"]
    assert read_numbers(tmp_path / "a") == read_numbers(tmp_path / "b")
    epoch_updates = 320 // (8 * 4 * config.replicas)
    # the first update, log lines, checkpoints, evaluations
    needed = {1, 5, 10, 15, 20, 8, 16, 23, *range(epoch_updates, 23, epoch_updates)}
    # no update has left an asynchronous pipeline after the first
    assert set(updates_read) in (needed, needed - {1})
    assert len(set(updates_read)) == len(updates_read)
    positions = [
        read_json(find_checkpoint(tmp_path / run, 16) / "manifest.json")["position"] for run in "ab"
    ]
    assert all(position.pop("seconds") > 0 for position in positions)
    assert positions[0] == positions[1]


def test_a_loss_that_is_not_finite_is_reported_of_its_own_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, messages = load_config(DIGITS, [*SHORT, "optimizer.lr=1e18"]), []
    for run, waits in (("a", False), ("b", True)):
        monkeypatch.setattr(engines, "does_reading_synchronize", lambda device, waits=waits: waits)
        with pytest.raises(RunFault, match="the training loss is") as fault:
            train(config, tmp_path / run, quiet=True)
        messages.append(str(fault.value))
        assert not list((tmp_path / run / "checkpoints").glob("step-*"))
    assert messages[0] == messages[1] and "update 0" not in messages[0]


def test_updates_read_no_tensor_until_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "does_reading_synchronize", lambda device: True)
    config = load_config(DIGITS, [*SHORT, "method=gpipe", "clip={norm: 1.0, scope: stage}"])
    flow = Flow(build(config))
    flow.give()
    assert len(list(flow.take())) == 1
    with ReadCounter() as reads:
        for _ in range(4):
            flow.give()
    assert reads.count == 0
    assert [k for k, _ in flow.take()] == [1, 2, 3, 4]


def test_an_evaluation_reads_no_tensor_until_its_end() -> None:
    tally, y = Tally(nn.functional.cross_entropy), torch.tensor([0, 2, -100])
    none = torch.full((3,), -100)
    output = torch.randn(3, 4)
    with ReadCounter() as reads:
        for labels in (y, y, none):
            tally.add(output, labels, 3)
    assert reads.count == 0
    loss, result = evaluate_sums(DEFAULT, tally.sums)
    assert loss == float(nn.functional.cross_entropy(output, y))
    assert result["accuracy"] == float((output.argmax(1)[:2] == y[:2]).double().mean())
