"""The benchmarks run in their smallest form; no time is checked."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.support.runs import ROOT, assert_states_close, needs_processes

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


@needs_jax
@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_plain_training_compiled_by_xla_is_plain_training(name: str) -> None:
    """Slots were compared with PyTorch's plain SGD alone, which XLA did not compile."""
    from tools import bench_xla

    task = bench_xla.make_task(name, 4, 2)
    torch.manual_seed(0)
    model = task.make()
    optimizer = torch.optim.SGD(model.parameters(), bench_xla.RATE, momentum=bench_xla.MOMENTUM)
    for x, y in task.data:
        optimizer.zero_grad()
        task.loss(model(x), y).backward()
        optimizer.step()
    stages = {}
    for way, scans in bench_xla.COMPILED.items():
        torch.manual_seed(0)
        training = bench_xla.CompiledTraining(task, scans)
        for x, y in task.data:
            training.step(x, y)
        weights = {
            weight_name: torch.from_numpy(np.array(value))
            for weight_name, value in training.export_weights().items()
        }
        assert_states_close(weights, dict(model.named_parameters()), atol=1e-6)
        stages[way] = [len(group) for group in training.groups]
    # the perceptron's first block returns no gradient of its input
    assert max(stages["jit"]) == 1
    assert max(stages["scan"]) == {"mlp": 3, "transformer": 4}[name]
