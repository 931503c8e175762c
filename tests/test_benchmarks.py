"""The benchmarks run in their smallest form; no time is checked."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.support.runs import ROOT, needs_processes

PIPELINE = "--accumulate 2 --rounds 1 --microbatches 8 --methods pipedream --schedules zbv --models resnet --objects zbv"

XLA = "--models mlp,digits --blocks 4 --sizes 1 --rounds 1 --updates 1"
needs_jax = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="xla needs jax: pip install 'ipu_pipe[xla]'"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tool, arguments",
    [
        ("bench.py", "--models resnet20 --methods pipemare --stages 4 --rounds 1 --updates 1"),
        pytest.param("bench_xla.py", XLA, marks=needs_jax),
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
