"""Test the observation of a model: saved and sent bytes, random modules, and weights whose
version a backward would miss."""

from __future__ import annotations

import copy
from typing import Any, Dict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipu_pipe.model.observation import Observation, observe_effects, observe_training
from ipu_pipe.model.randomness import find_unkeyed_draws
from ipu_pipe.model.stages import begin_stage, make_footprint, partition
from tests.support.models import Composed
from tests.support.runs import assert_same

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([0, 1])


def observe(model: nn.Module, x: torch.Tensor, y: torch.Tensor = LABELS) -> Observation:
    return observe_training(model, x, y, lambda x, y: F.cross_entropy(model(x), y))


def make_scaled_weight() -> nn.Module:
    """Return a layer that multiplies its weight before it uses it."""
    return Composed(
        lambda m, x: F.linear(x.flatten(1), m.weight * 1), weight=nn.Parameter(torch.randn(4, 192))
    )


def run_under_autocast(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return m.inner(x).float()  # type: ignore[no-any-return]


def make_pooling_head() -> Any:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))


def make_normed_convolution() -> nn.Module:
    normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 6, 3))
    return nn.Sequential(nn.Conv2d(3, 3, 1), normed, make_pooling_head())


def make_instance_norm() -> nn.Module:
    norm = nn.InstanceNorm2d(6, affine=True)
    return nn.Sequential(nn.Conv2d(3, 6, 3), norm, make_pooling_head())


def make_autocast() -> nn.Module:
    layers = nn.Flatten(), nn.Linear(192, 8), nn.Linear(8, 4)
    return Composed(run_under_autocast, inner=nn.Sequential(*layers))


# the models' weights that are derived before they are used
DERIVED: Dict[str, Any] = {
    "product": (lambda: nn.Sequential(nn.Conv2d(3, 3, 1), make_scaled_weight()), ["1.weight"]),
    # the input of a first layer needs no gradient, so that its backward reads no weight
    "first layer": (make_scaled_weight, []),
    "autocast": (make_autocast, ["inner.2.weight"]),
    "instance norm": (make_instance_norm, ["1.weight"]),
}
if hasattr(nn.utils, "parametrizations") and torch.__version__ >= "2.1":
    originals = [f"1.parametrizations.weight.original{n}" for n in (0, 1)]
    DERIVED["weight norm"] = (make_normed_convolution, originals)


@pytest.mark.parametrize("name", DERIVED)
def test_derived_weights_are_named(name: str) -> None:
    make, guilty = DERIVED[name]
    assert observe(make(), IMAGES).derived == guilty


def make_ordinary_layers() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.3), nn.Conv2d(6, 6, 3), nn.GroupNorm(2, 6), nn.PReLU(),
        make_pooling_head(),
    )  # fmt: skip


def make_text_layers() -> nn.Module:
    """Return a model with attention, recurrence and embedding."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        h = m.norm(m.embed(x))
        return m.head(m.recur(h + m.attend(h, h, h)[0])[0]).mean(1)

    attend = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True)
    parts = {"embed": nn.Embedding(9, 4), "norm": nn.LayerNorm(4), "attend": attend}
    return Composed(forward, **parts, recur=nn.GRU(4, 4, batch_first=True), head=nn.Linear(4, 4))


def test_ordinary_layers_derive_no_weights_and_are_unchanged() -> None:
    model = make_ordinary_layers()
    before = copy.deepcopy(model.state_dict())
    assert observe(model, IMAGES).derived == []
    assert_same(before, model.state_dict())
    assert all(p.grad is None for p in model.parameters())
    assert observe(make_text_layers(), torch.randint(0, 9, (2, 5))).derived == []
    assert observe(make_ordinary_layers().bfloat16(), IMAGES.bfloat16()).derived == []


def test_random_modules_are_those_that_draw() -> None:
    assert observe_effects(make_ordinary_layers(), IMAGES).draws == {"3": 1}
    draws = observe_effects(make_text_layers(), torch.randint(0, 9, (2, 5))).draws
    assert list(draws) == ["attend"]


def test_recurrent_layers_with_dropout_of_their_own_draw_unkeyed_on_a_gpu() -> None:
    model = nn.ModuleDict({
        "plain": nn.GRU(2, 2, num_layers=2), "one": nn.ModuleList([nn.LSTM(2, 2, num_layers=2, dropout=0.1)]),
    })  # fmt: skip
    assert find_unkeyed_draws(model, torch.device("cuda", 0)) == ["one.0"]
    assert find_unkeyed_draws(model, torch.device("cpu")) == []


def test_footprint_counts_saved_and_sent_bytes() -> None:
    parts = begin_stage(nn.Linear(10, 6)), begin_stage(nn.Linear(6, 4))
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 10), nn.ReLU(), *parts)
    footprint = make_footprint(model, partition(model, IMAGES), observe(model, IMAGES, LABELS))
    assert footprint.boundary_bytes == (2 * 10 * 4, 2 * 6 * 4)
    # the first stage keeps its input and ReLU's output; the second its input
    assert footprint.saved_bytes[:2] == (2 * 192 * 4 + 2 * 10 * 4, 2 * 10 * 4)
