"""XLA devices train to the emulator's weights; what the backend does not support is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ipu_pipe.config.load import load_config
from ipu_pipe.errors import BadInput
from ipu_pipe.pipeline.build import build
from tests.support.runs import DIGITS

pytest.importorskip("jax")

CASES = [
    "gpipe",
    "zb_h1",
    "pipedream",
    "pipedream_2bw",
    "pipemare",
    "pipelined_backprop",
    "spectrain",
]


def test_four_devices_train_to_the_emulators_weights_and_one_to_the_same_bits() -> None:
    command = [sys.executable, "-m", "tests.xla_runs", *CASES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert not done.returncode, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert sorted(results) == sorted(CASES)
    for name, result in results.items():
        assert result["weights"] < 1e-12 and result["losses"] < 1e-12, (name, result)
        assert result["optimizer"] < 1e-12 and result["names"] and result["one_device"], name


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["clip={norm: 1.0, scope: stage}"], "clip"),
        (["replicas=2"], "replicas"),
        (["optimizer={name: torch.optim.RMSprop}"], "optimizer.name"),
        (["precision=bfloat16"], "precision"),
        (["backend.devices=64"], "backend.devices"),
        (["backend.platform=tpu"], "backend.platform"),
    ],
)
def test_what_xla_does_not_support_is_refused(settings: list, key: str) -> None:
    with pytest.raises(BadInput) as caught:
        build(load_config(DIGITS, ["backend.name=xla", *settings]))
    assert any(fault.startswith(key) for fault in caught.value.faults), caught.value.faults
