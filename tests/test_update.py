"""Parameter groups by stage, decay left off, clipping, and what the optimizer holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ipu_pipe import update
from ipu_pipe.errors import BadInput
from ipu_pipe.stages import begin_stage, partition


def staged() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), begin_stage(nn.Linear(4, 4)), begin_stage(nn.ReLU()))
    return model, partition(model, torch.randn(2, 4))


def test_a_group_a_stage_and_one_more_without_decay() -> None:
    model, part = staged()
    groups = update.parameter_groups(model, part)
    assert [(g["stage"], len(g["params"])) for g in groups] == [(0, 4), (1, 2)]
    groups = update.parameter_groups(model, part, "norms_and_biases")
    assert [(g["stage"], len(g["params"]), g.get("weight_decay")) for g in groups] == [
        (0, 1, None), (0, 3, 0.0), (1, 1, None), (1, 1, 0.0)
    ]  # fmt: skip
    groups = update.parameter_groups(model, part, ["2.*"])
    assert [(g["stage"], g.get("weight_decay")) for g in groups] == [(0, None), (1, 0.0)]


def test_what_cannot_be_trained_is_refused() -> None:
    model, part = staged()
    with pytest.raises(BadInput, match=r"optimizer.no_decay: 7\.\*: matches no parameter"):
        update.parameter_groups(model, part, ["7.*"])
    with pytest.raises(BadInput, match="nothing to train"):
        update.parameter_groups(model.requires_grad_(False), part)


@pytest.mark.parametrize("scope", ["global", "stage"])
def test_clipping_bounds_the_norm_of_its_scope(scope: str) -> None:
    model, part = staged()
    optimizer = torch.optim.SGD(update.parameter_groups(model, part), lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model[0].weight.grad.mul_(10)
    update.clip(optimizer, 2.0, scope)
    norms = [torch.cat([p.grad.flatten() for p in g["params"]]).norm().item() for g in optimizer.param_groups]
    if scope == "stage":
        assert norms == pytest.approx([2.0, 2.0], rel=1e-4)
    else:
        assert sum(n * n for n in norms) ** 0.5 == pytest.approx(2.0, rel=1e-4) and norms[1] < 0.5


def test_optimizer_bytes_are_counted_by_stage() -> None:
    model, part = staged()
    optimizer = torch.optim.SGD(update.parameter_groups(model, part), lr=0.1, momentum=0.9)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    assert update.optimizer_bytes(optimizer, 3) == [4 * (16 + 4 + 4 + 4), 4 * 20, 0]


def test_unknown_optimizers_are_refused() -> None:
    with pytest.raises(BadInput, match="optimizer.name: lion: must be one of sgd, adam, adamw"):
        update.optimizer_factory("lion")
