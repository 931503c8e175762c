"""Build small runs for the double of PopTorch that the emulator can train, too."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict

import torch
from torch import nn

from ipu_pipe.config.load import configure, read_yaml
from ipu_pipe.data.sources import TensorData
from ipu_pipe.run.build import build
from ipu_pipe.run.train import train
from tests.staged_models import MODELS, TIED, SkippingModel, join_stages
from tests.support.models import Versioned
from tests.support.runs import ROOT

PODS = sorted((ROOT / "configs" / "pod").glob("*pod*.yaml"))
SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}


class Own(torch.autograd.Function):
    """Double the gradient in the backward; an autograd function as users write them."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


class Source(TensorData):
    """A data source of 700 samples that raises `error` when microbatch `at` is read."""

    def __init__(self, at: int = -1, error: Any = None) -> None:
        generator = torch.Generator().manual_seed(5)
        x, y = (
            torch.randn(700, 12, generator=generator),
            torch.randint(0, 4, (700,), generator=generator),
        )
        super().__init__((x[:650], y[:650]), (x[650:], y[650:]), 5)
        self.at, self.error = at, error

    def train_batch(self, epoch: int, index: int, size: int) -> Any:
        if index == self.at:
            raise self.error
        return super().train_batch(epoch, index, size)


def make_ipu_model(name: str) -> nn.Module:
    """Return a model of tests.staged_models, or two layers in two stages, with fixed weights."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        if name in ("two", "versioned"):
            kind = nn.Sequential if name == "two" else Versioned
            return kind(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))
        return SkippingModel() if name == "skipping" else join_stages({**MODELS, **TIED}[name]())


def make_ipu_config(
    method: str = "gpipe", on: str = "emulator", ipu: Any = None, **keys: Any
) -> Any:
    """Return a config of six updates of 16 microbatches of 2 samples."""
    section: Dict[str, Any] = {"name": on}
    if on == "poptorch":
        section["ipu"] = ipu or {}
    base = {
        "micro_batch_size": 2, "gradient_accumulation": 16, "steps": 6, "optimizer": SGD,
        "log": {"every": 1, "tensorboard": False}, "checkpoint": {"every": 2, "keep": 9},
    }  # fmt: skip
    return configure(method=method, backend=section, **{**base, **keys})


def train_small_run(
    settings: Any, out: Path, name: str = "residual", **keys: Any
) -> Dict[str, Any]:
    """Train and return the summary."""
    keys = {
        "model": make_ipu_model(name),
        "data": Source(),
        "overwrite": not keys.get("resume"),
        "quiet": True,
        **keys,
    }
    return train(settings, out, **keys)


def simulate_poprun(monkeypatch: Any, instances: int, index: int, replicas: int) -> None:
    """Set the variables of poprun, in instance `index` with `replicas` of its own."""
    values = {"NUM_INSTANCES": instances, "INSTANCE_INDEX": index, "NUM_LOCAL_REPLICAS": replicas}
    for name, value in values.items():
        monkeypatch.setenv(f"POPDIST_{name}", str(value))


def find_compilation(poptorch: Any, training: bool = True) -> Any:
    """Return the record of the first compiled model of this kind."""
    return next(one for one in poptorch.recorded.compilations if one.training == training)


@functools.lru_cache(maxsize=None)
def build_cached_job(raw: str) -> Any:
    """Return the job of a config given as JSON; jobs are cached by the text of the config."""
    return build(configure(**json.loads(raw)))


def build_small_pod_job(path: Path) -> Any:
    """Build the job of a pod's config with ResNet-18 on 8 x 8 images.

    Options, loader, method, stages, batch and optimizer are the config's own. Configs that differ
    only in batch and replicas share one built job.
    """
    raw = read_yaml(path)
    raw["model"]["entry"] = "models.resnet:resnet18"
    byte_keys = {key: value for key, value in raw["data"].items() if key == "bytes"}
    raw["data"] = {
        "name": "synthetic", "shape": [3, 8, 8], "classes": 1000, "subset": 65536, "test_subset": 8, **byte_keys,
    }  # fmt: skip
    raw["steps"] = 1
    del raw["lr_schedule"], raw["optimizer"]["lr"]
    local = raw["backend"]["ipu"].get("local", "fused")
    same = {**raw, "micro_batch_size": 2, "replicas": 1, "gradient_accumulation": 16}
    same["backend"] = {"name": "poptorch", "ipu": {"local": local}}
    return replace(build_cached_job(json.dumps(same, sort_keys=True)), config=configure(**raw))
