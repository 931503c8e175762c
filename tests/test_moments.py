"""Test weights and gradients that callbacks get, on the emulator, processes and plain PyTorch."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Dict, List

import pytest
import torch

import ipu_pipe
from ipu_pipe.config.load import load_config
from ipu_pipe.run.train import train
from tests.callbacks_of_runs import ChecksumRecorder
from tests.support.runs import assert_same
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
    moments = [moment for moment, *_ in watches.checksums]
    assert moments[0] == "start" and moments[-3:] == ["evaluation", "checkpoint", "end"]
    assert moments.count("gradients") == 6
    gradients = {str(tensors) for moment, _, tensors in watches.checksums if moment == "gradients"}
    assert len(gradients) == 6


def test_gradients_are_those_of_plain_accumulation_before_clipping(tmp_path: Path) -> None:
    seen: List[Dict[str, torch.Tensor]] = []
    callback = ipu_pipe.Callback()
    callback.on_gradients = lambda now: seen.append(now.gradients)  # type: ignore[method-assign]
    torch.manual_seed(0)
    layers = [torch.nn.Flatten(), torch.nn.Linear(64, 5), torch.nn.Tanh(), torch.nn.Linear(5, 10)]
    model = torch.nn.Sequential(*layers)
    twin = copy.deepcopy(model)
    sets = [
        "method=gpipe", "stages=2", "gradient_accumulation=2", "micro_batch_size=8", "clip={norm: 0.001}", "steps=1",
        "log.tensorboard=false",
    ]  # fmt: skip
    config = load_config(DIGITS, sets)
    train(config, tmp_path / "run", model=model, callbacks=[callback], quiet=True)
    data = ipu_pipe.load_data("digits", seed=config.seed)
    for m in range(2):
        x, y = data.train_batch(0, m, 8)
        (torch.nn.functional.cross_entropy(twin(x), y) / 2).backward()
    (gradients,) = seen
    assert_same(gradients, {name: p.grad for name, p in twin.named_parameters()})
