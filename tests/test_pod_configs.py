"""Configs for pods and the papers' tables train, evaluate, save and resume on the double of
PopTorch, small. Nothing here ran on an IPU."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from ipu_pipe.config.load import load_config
from ipu_pipe.run.train import train
from tests.support.ipu_runs import PODS
from tests.support.runs import ROOT, read_json
from tests.support.slow import mark_slow

pytest_plugins = ["poptorch_double"]  # the fixture `poptorch`
TABLES = sorted((ROOT / "configs").glob("resnet*_ipu*.yaml"))
# its blocks are processes: tests/test_poptorch_starts.py compiles them
FUSED = [path for path in [*PODS, *TABLES] if "decoupled" not in path.stem]
# of about 40 s each, CI trains one of each kind; ALL_CONFIGS=1 trains all
KINDS = ("pod16_resnet18_local", "pod16_resnet18_pipelined", "graphcore_pod16_resnet50")
TRAINED = [path for path in FUSED if "ALL_CONFIGS" in os.environ or path.stem in KINDS]


def make_small(path: Path) -> Any:
    """Return the config with images of 32x32, few microbatches and at most two replicas."""
    config = load_config(path, ["backend.name=poptorch", "precision=16.16"])
    stages = len(config.stages) + 1 if isinstance(config.stages, list) else config.stages
    args = config.model.args
    has_batch_norm = args.get("norm") != "group"
    data = "name: synthetic, shape: [3, 32, 32], classes: 1000, subset: 512, test_subset: 8"
    data += f", bytes: {str(bool(args.get('bytes'))).lower()}, root: null, threads: null"
    changes = [
        "backend.name=poptorch",
        "precision=16.16",
        "hardware=null",
        "backend.ipu.data_loading.mode=sync",
        "backend.ipu.executable_cache=null",
        f"data={{{data}}}",
        # BatchNorm of few numbers is not a number in half precision
        f"micro_batch_size={8 if has_batch_norm else 2}",
        f"gradient_accumulation={max(2 * stages - 1, 2)}",
        f"replicas={min(config.replicas, 2)}",
        "steps=2",
        "checkpoint={every: 1}",
        # until its running statistics have settled, an evaluation overflows half precision: each
        # block of ResNet-101 doubles the variance, unless its branch starts at zero
        *(["model.args.zero_init=true"] if has_batch_norm else []),
    ]
    return load_config(path, changes)


@pytest.mark.parametrize(
    "path",
    mark_slow(TRAINED, lambda path: False),
    ids=lambda path: str(path.stem),
)
def test_a_config_trains_saves_and_resumes_on_the_double(
    path: Path, poptorch: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setenv("POPTORCH_DOUBLE_IPUS", "64")
    config = make_small(path)
    first = train(config, tmp_path / "run", quiet=True)
    assert first["steps"] == 2 and math.isfinite(first["final"]["train_loss"])
    assert math.isfinite(first["final"]["test_loss"])
    resumed = train(config, tmp_path / "run", quiet=True, resume_from=1)
    assert resumed["final"]["test_loss"] == pytest.approx(first["final"]["test_loss"], rel=1e-3)
    assert (tmp_path / "run" / "checkpoints" / "step-2" / "model.safetensors").is_file()
    assert read_json(tmp_path / "run" / "summary.json")["backend"] == "poptorch"
