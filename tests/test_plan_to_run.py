"""Run the loop of docs/planner.md: plan, write a config, train on processes, and compare
prediction and measurement."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ipu_pipe.cli import plan
from ipu_pipe.config.load import load_config
from tests import forked
from tests.support.runs import ROOT, needs_processes, read_summary

# a pipeline of two: all of the model with its gradients and state does not fit one device
HARDWARE = """\
devices: 2
device:
  memory_bytes: 200e3
  usable_share: 1.0
  memory_bandwidth: 5e9
  rates: {float32: {peak_flops: 2e9, achievable_share: 0.5}}
links: [{name: sockets, bandwidth: 1e9, latency: 100e-6}]
"""


@pytest.mark.slow
@needs_processes
def test_a_plan_trains_on_processes_and_is_compared_with_the_measurement(
    tmp_path: Path, capsys: Any
) -> None:
    hardware, config_file, out = (tmp_path / name for name in ("two.yaml", "planned.yaml", "run"))
    hardware.write_text(HARDWARE)
    digits = [
        str(ROOT / "configs" / "mlp_digits.yaml"),
        "--set",
        "steps=4",
        "backend.name=distributed",
        "backend.threads=1",
    ]
    plan.main(
        [
            *digits,
            "evaluate.every=0",
            "--hardware",
            str(hardware),
            "--json",
            "--write",
            str(config_file),
        ]
    )
    output = capsys.readouterr()
    best = json.loads(output.out)["plans"][0]
    assert (best["depth"], best["width"]) == (2, 1)
    assert f"torchrun --nproc_per_node 2 tools/train.py {config_file}" in output.err
    assert load_config(config_file).stages == best["stages"]

    launch = forked.run_ranks(
        2, "train", [str(config_file), "--out", str(out)], GLOO_SOCKET_IFNAME="lo"
    )
    assert launch.code == 0, launch.error[-2000:]
    measured = read_summary(out)["throughput_samples_per_second"]
    match = re.search(
        r"predicted on two: ([0-9.]+) samples/s, measured: ([0-9.]+); the prediction is",
        launch.printed,
    )
    assert match is not None, launch.printed
    assert float(match.group(1)) == pytest.approx(best["samples_per_second"], abs=0.06)
    assert float(match.group(2)) == pytest.approx(measured, abs=0.06)
    ratio = float(match.group(1)) / float(match.group(2))
    assert ("finding: the prediction is off" in launch.printed) == (not 0.5 <= ratio <= 2)
