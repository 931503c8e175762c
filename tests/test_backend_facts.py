"""Backends' facts: each backend's row in the table decides what is refused and what is advised."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Dict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ipu_pipe import from_loader
from ipu_pipe.backends.features import FEATURES, Feature, list_lacking
from ipu_pipe.backends.table import BACKENDS
from ipu_pipe.config.load import load_config
from ipu_pipe.errors import BadInput
from ipu_pipe.job.stability import explain_divergence
from ipu_pipe.refusals import Language, name_key
from ipu_pipe.run.build import build
from ipu_pipe.run.callbacks import Callback, require_supported_callbacks
from models.mlp import mlp
from tests.support.runs import DIGITS, ROOT
from tests.tied_models import make_language_model, make_random_tokens
from tools import write_keys

UNSUPPORTED = ROOT / "docs" / "reference" / "unsupported.md"
COMPILED = ("poptorch", "xla")  # weights and gradients stay on their devices


def build_job(backend: str, *settings: str, **objects: Any) -> Any:
    """Build the smallest config's job on the emulator, then state that it runs on `backend`.

    So only the backend's facts differ: neither its launcher nor its software is needed.
    """
    job = build(load_config(DIGITS, ["method=gpipe", *settings]), **objects)
    set_backend(job, backend)
    return job


def set_backend(job: Any, backend: str) -> None:
    settings = ["method=pipedream_flush", "gradient_accumulation=8", f"backend.name={backend}"]
    section = load_config(DIGITS, settings).backend
    job.config = job.config.model_copy(update={"backend": section})


class Scored(nn.Module):
    """Layers in a model that returns its input too, and its loss; it may get another input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(layers=4)

    def forward(self, x: torch.Tensor, other: Any = None, labels: Any = None) -> Any:
        if labels is not None:
            return {"loss": F.cross_entropy(self.layers(x), labels)}
        return {"logits": self.layers(x), "features": x}


def weigh_loss(output: Any, labels: torch.Tensor, *, weight: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output["logits"], labels) * weight.mean()


class CountingLoss(nn.Module):
    """Cross-entropy that is divided by the number of its calls."""

    calls = 0

    def forward(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return F.cross_entropy(output, labels) / self.calls


def make_objects(name: str) -> Dict[str, Any]:
    """Return the objects from Python that a job with a feature is built with."""
    model = mlp(layers=4)
    pairs = [(torch.randn(16, 64), torch.randint(10, (16,))) for _ in range(8)]
    if name == "hooks of modules":
        model[0].register_forward_hook(lambda module, args, output: None)
        return {"model": model}
    if name == "hooks of weights":
        next(model.parameters()).register_hook(lambda gradient: gradient)
        return {"model": model}
    if name == "complex buffers":
        model.register_buffer("phases", torch.ones(2, dtype=torch.complex64))
        return {"model": model}
    if "in two stages" in name:
        return {"model": make_language_model(), "data": make_random_tokens()}
    if name == "a model that returns its own loss":
        data = from_loader([{"x": x, "labels": y} for x, y in pairs])
        return {"model": Scored(), "data": data, "loss": "model"}
    if name.startswith("a model that returns"):
        return {"model": Scored(), "output": "logits"}
    if name.startswith("batches"):
        data = from_loader([((x, x), y) for x, y in pairs])
        return {"data": data, "model": Scored(), "output": "logits"}
    if name.startswith("a loss that takes"):
        batches = [{"x": x, "labels": y, "weight": x[:, 0]} for x, y in pairs]
        return {"data": from_loader(batches), "model": Scored(), "loss": weigh_loss}
    if name.startswith("a loss that keeps"):
        return {"loss": CountingLoss()}
    if name.startswith("data without"):
        return {"data": from_loader(iter(pairs), pairs)}
    return {}


SETTINGS = {
    "replicas that step by themselves (`local_sgd`)": ["method=local_sgd"],
    "stages that step in a drawn order (`randomized_pipedream`)": ["method=randomized_pipedream"],
    "blocks with losses of their own (`local_greedy` and others)": ["method=local_greedy"],
    "`method_args.hogwild`": ["method=pipemare", "method_args.hogwild={mean: 1.0, max: 3}"],
    "`method_args.constant_delay`": ["method=pipemare", "method_args.constant_delay={updates: 2}"],
    "`replicas`": ["replicas=2"],
    "`recompute`": ["recompute=true"],
    "`method_args.recompute`": ["method=pipemare", "method_args.recompute={segments: 2}"],
    "`clip`": ["clip={norm: 1.0}"],
    "`loss_weight`, an update of one microbatch": [
        "loss_weight=tokens",
        "method=pipedream",
        "gradient_accumulation=1",
    ],
    "`loss_weight`, updates of several": ["loss_weight=tokens"],
    "`precision` other than float32 and float64": ["precision=bfloat16_mixed"],
    "`ema`": ["ema={decay: 0.9}"],
    "`ema` of a weight in two stages": ["ema={decay: 0.9}"],
    "`lr_schedule.name: plateau`": ["lr_schedule.name=plateau", "evaluate.steps=4"],
    "a loss that keeps a state, with replicas or blocks with losses of their own": ["replicas=2"],
    "data without a length, by `train`": ["steps=4", "epochs=null", "evaluate.steps=4"],
    "learning rates of parameter groups, by `train`": [
        "optimizer.groups=[{ndim: 2, name: sgd, lr: 0.1}, {name: sgd, lr: 0.2}]"
    ],
}


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_a_feature_is_refused_by_the_backends_that_lack_it(feature: Feature) -> None:
    settings = SETTINGS.get(feature.name, [])
    job = build_job("emulator", *settings, **make_objects(feature.name))
    if feature.name == "`model.compile`":
        job.compiles_modules = True
    if feature.name == "hooks of the optimizer's step":
        job.optimizer.register_step_post_hook(lambda optimizer, args, keys: None)
    if feature.argument == "optimizer" and "switched" in feature.name:
        kind = type(job.optimizer)
        job.optimizer.__class__ = type("Switched", (kind,), {"eval": kind.zero_grad})
    plain = build_job("emulator")
    for backend in BACKENDS:
        set_backend(job, backend)
        set_backend(plain, backend)
        assert list_lacking(plain) == []
        place = Language.CONFIG.say(name_key(str(feature.argument)))
        why = feature.lacking.get(backend)
        refused = [line for line in list_lacking(job) if why is not None and why in line]
        assert (why is not None) == bool(refused), backend
        assert all(Language.CONFIG.say(line).startswith(place) for line in refused)


def test_the_page_of_what_backends_lack_is_the_table() -> None:
    assert write_keys.format_features() in UNSUPPORTED.read_text(encoding="utf-8")


class WatchGradients(Callback):
    def on_gradients(self, now: Any) -> None:
        """Read the gradients."""


@pytest.mark.parametrize("backend", BACKENDS)
def test_callbacks_on_gradients_and_clips_need_them_on_the_host(backend: str) -> None:
    job = build_job(backend)
    is_compiled = backend in COMPILED
    with pytest.raises(BadInput, match="on_gradients") if is_compiled else nullcontext():
        require_supported_callbacks(job, [WatchGradients()])
    assert ("clip:" in explain_divergence(job, 0)) == (not is_compiled)
