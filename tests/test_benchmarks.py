"""The benchmarks run in their smallest form; no time is checked."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.runs import ROOT, needs_processes

PIPELINE = "--accumulate 2 --rounds 1 --microbatches 8 --methods pipedream --schedules zbv --models resnet --objects zbv"


@pytest.mark.slow
@pytest.mark.parametrize(
    "tool, arguments",
    [
        ("bench.py", "--models resnet20 --methods pipemare --stages 4 --rounds 1 --updates 1"),
        pytest.param("bench_trace.py", "--model mlp --turns 11 --updates 1", marks=needs_processes),
        pytest.param("bench_pipeline.py", PIPELINE, marks=needs_processes),
    ],
)
def test_benchmarks_run(tool: str, arguments: str) -> None:
    """Each benchmark prints JSON and ends with exit code 0."""
    command = [sys.executable, str(ROOT / "tools" / tool), *arguments.split(), "--json"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)
