"""Whole runs of language models whose head is the embedding: plain PyTorch's numbers, one copy in what is counted and kept."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.job.config import configure
from ipu_pipe.run.training import train
from tests.tied_models import Gpt2, lm, tokens

ADAM = {"name": "adam", "lr": 0.01, "weight_decay": 0.01}
SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
third_party = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")


def config(method: str, **keys: Any) -> Any:
    """Six updates of 4 microbatches of 2."""
    base: Dict[str, Any] = {
        "micro_batch_size": 2, "gradient_accumulation": 4, "steps": 6, "optimizer": ADAM,
        "log": {"every": 1, "tensorboard": False}, "checkpoint": {"every": 3, "keep": 9},
    }  # fmt: skip
    return configure(method=method, **{**base, **keys})


def model(kind: str, **args: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return lm(**args) if kind == "lm" else Gpt2(**args)


def plainly(trained: nn.Module, updates: int, optimizer: Dict[str, Any], norm: float) -> None:
    """The same run in plain PyTorch."""
    kinds = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    settings = {key: value for key, value in optimizer.items() if key != "name"}
    steps: Any = kinds[optimizer["name"]](trained.parameters(), **settings)
    data = tokens()
    for k in range(updates):
        for m in range(4 * k, 4 * k + 4):
            epoch, index = divmod(m, data.train_batches_per_epoch(2))
            x, y = data.train_batch(epoch, index, 2)
            (nn.functional.cross_entropy(trained(x), y) / 4).backward()
        nn.utils.clip_grad_norm_(trained.parameters(), norm, foreach=False)
        steps.step()
        steps.zero_grad()


def kept(out: Path, step: int = 6) -> Dict[str, torch.Tensor]:
    return load_file(out / "checkpoints" / f"step-{step}" / "model.safetensors")


@pytest.mark.parametrize(
    "method, kind, optimizer",
    [
        ("naive", "lm", ADAM),
        ("pipedream_flush", "lm", SGD),
        ("gpipe", "lm", ADAM),
        pytest.param("gpipe", "gpt2", ADAM, marks=third_party),
    ],
)
def test_a_run_is_plain_training_and_its_checkpoint_fits_the_plain_model(
    tmp_path: Path, method: str, kind: str, optimizer: Dict[str, Any]
) -> None:
    ours, plain = model(kind), model(kind)
    norm = 0.3
    settings = config(method, optimizer=optimizer, clip={"norm": norm, "scope": "global"})
    summary = train(settings, tmp_path, model=ours, data=tokens(), quiet=True)
    plainly(plain, 6, optimizer, norm)
    assert len(summary["stages"]) >= 3
    for (name, a), b in zip(ours.named_parameters(), plain.parameters()):
        assert torch.equal(a, b), name
    held = kept(tmp_path)
    assert held.keys() == plain.state_dict().keys()
    loaded = model(kind)
    loaded.load_state_dict(held, strict=True)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), plain.parameters()))


def test_a_weight_is_counted_once_and_its_replica_is_held(tmp_path: Path) -> None:
    tied, own = (model("lm", tied=tied) for tied in (True, False))
    told: List[Any] = []
    for place, made in (("tied", tied), ("own", own)):
        train(config("gpipe"), tmp_path / place, model=made, data=tokens(), quiet=True)
        told.append(json.loads((tmp_path / place / "memory.json").read_text())["stages"])
    size = tied.embedding.tokens.weight.numel()  # type: ignore[union-attr, operator]
    for before, (ours, theirs) in enumerate(zip(*told)):
        is_last = before == len(told[0]) - 1
        assert ours["parameters"] == theirs["parameters"] - is_last * size
        assert [ours[key] for key in ("weight_bytes", "gradient_bytes")] == [  # the replica is there
            theirs[key] for key in ("weight_bytes", "gradient_bytes")
        ]
        assert ours["optimizer_bytes"] == theirs["optimizer_bytes"] - is_last * (2 * 4 * size + 4)
    names = set(load_file(tmp_path / "tied" / "checkpoints" / "step-6" / "optimizer.safetensors"))
    assert {n for n in names if n.startswith(("embedding.tokens", "head"))} == {
        f"embedding.tokens.weight/{entry}" for entry in ("exp_avg", "exp_avg_sq", "step")
    }


@pytest.mark.parametrize("method", ["gpipe", "pipedream_2bw"])
def test_a_run_goes_on_as_if_never_interrupted(tmp_path: Path, method: str) -> None:
    how = config(method, optimizer=SGD)
    train(how, tmp_path, model=model("lm"), data=tokens(), quiet=True)
    whole = kept(tmp_path)
    other = model("lm", gpt2=False)  # begins otherwise
    train(how, tmp_path, model=other, data=tokens(), quiet=True, resume=True, resume_from=3)
    again = kept(tmp_path)
    assert all(torch.equal(again[name], value) for name, value in whole.items())


@pytest.mark.parametrize(
    "method, why",
    [("pipedream", "two delays"), ("local_greedy", "two gradients"), ("randomized_pipedream", "single stages")],
)
def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path: Path, method: str, why: str) -> None:
    with pytest.raises(BadInput) as refused:
        train(config(method, gradient_accumulation=1), tmp_path / "run", model=model("lm"), data=tokens(), quiet=True)
    (fault,) = refused.value.faults
    assert not (tmp_path / "run").exists()
    assert "embedding.tokens.weight on stage 0 and head.weight on stage 3 are one shared weight" in fault
    assert why in fault and "gpipe" in fault and method in fault
