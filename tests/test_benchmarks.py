"""The benchmarks run, in their smallest form; what they time is theirs to print."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import List

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    "tool, arguments",
    [
        ("bench.py", ["--models", "resnet20", "--methods", "pipemare", "--rounds", "1", "--updates", "1"]),
        ("bench_trace.py", ["--model", "mlp", "--turns", "11", "--updates", "1"]),
        (
            "bench_pipeline.py",
            [
                "--accumulate",
                "2",
                "--rounds",
                "1",
                "--microbatches",
                "8",
                "--methods",
                "pipedream",
                "--schedules",
                "zbv",
                "--models",
                "resnet",
            ],
        ),
    ],
)
def test_benchmarks_run(tool: str, arguments: List[str]) -> None:
    """Each ends with JSON that names what it compared."""
    if tool != "bench.py" and tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < (2, 4):
        pytest.skip("processes need torch 2.4 or later")
    command = [sys.executable, str(ROOT / "tools" / tool), *arguments, "--json"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)
