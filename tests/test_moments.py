"""Test weights and gradients that callbacks get, on the emulator, processes and plain PyTorch."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, List

import pytest
import torch

import ipu_pipe
from ipu_pipe.config.load import load_config
from ipu_pipe.run.train import check, train
from tests.callbacks_of_runs import ChecksumRecorder
from tests.support.runs import list_faults
from tests.support.slow import mark_slow
from tests.test_processes import DIGITS, train_digits_on_emulator, train_digits_on_ranks

NEW = "tests.callbacks_of_runs"
CASES = {
    "pipedream": (2, ["gradient_accumulation=1", "stages=2", "clip={norm: 0.1, scope: stage}"]),
    # callbacks get the mean of two replicas
    "pipedream_2bw": (4, ["gradient_accumulation=2", "stages=2", "replicas=2"]),
}


@pytest.mark.parametrize("method", mark_slow(CASES, lambda method: method == "pipedream_2bw"))
def test_callbacks_get_the_same_tensors_on_processes_and_the_emulator(
    method: str, tmp_path: Path
) -> None:
    ranks, args = CASES[method]
    sets = [f"method={method}", *args, "steps=6", "log.trace=false"]
    callbacks = (
        f"callbacks=[{{entry: '{NEW}:ChecksumRecorder', args: {{file: {tmp_path}/ranks.json}}}}]"
    )
    code, _, error = train_digits_on_ranks(ranks, tmp_path / "ranks", *sets, callbacks)
    assert code == 0, error
    watches = ChecksumRecorder()
    train_digits_on_emulator(tmp_path / "one", *sets, callbacks=[watches])
    assert json.loads((tmp_path / "ranks.json").read_text()) == watches.checksums
    moments = [moment for moment, _, _ in watches.checksums]
    assert moments[:2] == ["start", "gradients"] and moments[-3:] == [
        "evaluation",
        "checkpoint",
        "end",
    ]
    gradients = [
        (step, tensors) for moment, step, tensors in watches.checksums if moment == "gradients"
    ]
    assert [step for step, _ in gradients] == list(range(1, 7))
    assert len({tuple(tensors.values()) for _, tensors in gradients}) == 6


def test_gradients_are_those_of_plain_accumulation_before_clipping(tmp_path: Path) -> None:
    class Keeps(ipu_pipe.Callback):
        gradients: List[Any] = []

        def on_gradients(self, now: ipu_pipe.Moment) -> None:
            self.gradients.append(now.gradients)

    torch.manual_seed(0)
    layers = [torch.nn.Flatten(), torch.nn.Linear(64, 5), torch.nn.Tanh(), torch.nn.Linear(5, 10)]
    model = torch.nn.Sequential(*layers)
    twin = copy.deepcopy(model)
    sets = [
        "method=gpipe",
        "stages=2",
        "gradient_accumulation=2",
        "micro_batch_size=8",
        "clip={norm: 0.001}",
        "steps=1",
    ]
    config = load_config(DIGITS, [*sets, "log.tensorboard=false"])
    keeps = Keeps()
    train(config, tmp_path / "run", model=model, callbacks=[keeps], quiet=True)
    data = ipu_pipe.load_data("digits", seed=config.seed)
    for m in range(2):
        x, y = data.train_batch(0, m, 8)
        (torch.nn.functional.cross_entropy(twin(x), y) / 2).backward()
    (gradients,) = keeps.gradients
    assert gradients.keys() == dict(twin.named_parameters()).keys()
    for name, parameter in twin.named_parameters():
        assert parameter.grad is not None and torch.equal(parameter.grad, gradients[name])


@pytest.mark.parametrize("method", ["local_sgd", "randomized_pipedream"])
def test_where_replicas_or_stages_step_one_by_one_gradients_are_refused(
    method: str, tmp_path: Path
) -> None:
    sets = [
        f"method={method}",
        "gradient_accumulation=1",
        "stages=2",
        "steps=4",
        f"callbacks=['{NEW}:ChecksumRecorder']",
    ]
    (fault,) = list_faults(check, load_config(DIGITS, sets), tmp_path / "run")
    assert fault.startswith("callbacks: ChecksumRecorder.on_gradients: ") and method in fault
