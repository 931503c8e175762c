"""XLA devices train to the emulator's weights; what the backend does not support is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, Dict

import pytest

from ipu_pipe.config.load import load_config
from ipu_pipe.errors import BadInput
from ipu_pipe.pipeline.build import build
from tests.support.runs import DIGITS

jax = pytest.importorskip("jax", reason="xla needs jax: pip install 'ipu_pipe[xla]'")

CASES = ["gpipe", "zb_h1", "pipedream_2bw", "pipemare", "spectrain"]


def run_cases(work: str, *cases: str) -> Dict[str, Any]:
    """Return the results of tests/xla_runs.py, whose process begins jax with its own devices."""
    command = [sys.executable, "-m", "tests.xla_runs", work, *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert not done.returncode, done.stderr
    results: Dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert sorted(results) == sorted(cases)
    return results


def test_two_devices_train_to_the_emulators_weights() -> None:
    for case, result in run_cases("compare_short", "gpipe", "pipedream").items():
        assert max(result.values()) < 1e-12, (case, result)


@pytest.mark.slow
def test_four_devices_train_to_the_emulators_weights_and_one_to_the_same_bits() -> None:
    for case, result in run_cases("compare", *CASES).items():
        assert result.pop("one_device") is True, case
        assert max(result.values()) < 1e-12, (case, result)


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit() -> None:
    for case, result in run_cases("resume", "pipemare").items():
        assert result["state"] == 0 and result["losses"] and result["moved"] > 1e-6, (case, result)


@pytest.mark.slow
def test_a_run_goes_on_another_backend_with_the_same_numbers() -> None:
    for case, result in run_cases("move", "pipemare").items():
        assert max(result.values()) < 1e-12, (case, result)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["method=local_greedy"], "method: local_greedy: blocks"),
        (["method=local_sgd"], "method: local_sgd: replicas"),
        (["method=randomized_pipedream"], "method: randomized_pipedream: delays"),
        (["clip={norm: 1.0, scope: stage}"], "clip"),
        (["replicas=2"], "replicas"),
        (["optimizer={name: torch.optim.RMSprop}"], "optimizer.name"),
        (["precision=bfloat16"], "precision"),
        (["backend.devices=64"], "backend.devices"),
        (["backend.platform=tpu"], "backend.platform"),
    ],
)
def test_what_xla_does_not_support_is_refused(settings: list, key: str) -> None:
    jax.devices("cpu")  # jax has begun, so it makes no more devices
    with pytest.raises(BadInput) as caught:
        build(load_config(DIGITS, ["backend.name=xla", *settings]))
    assert any(fault.startswith(key) for fault in caught.value.faults), caught.value.faults
