"""Test the observation of a model: saved and sent bytes, random modules, and weights whose
version a backward would miss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipu_pipe.model.observation import Observation, observe_effects, observe_training
from ipu_pipe.model.randomness import find_unkeyed_draws
from ipu_pipe.model.stages import begin_stage, make_footprint, partition
from tests.support.models import Composed

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


def make_pooling_head(channels: int) -> Any:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 4))


def test_a_first_layer_is_free_to_derive_weights() -> None:
    """A first layer may derive weights: its input needs no gradient, so its backward reads no
    weight."""
    assert observe(make_scaled_weight(), IMAGES).derived == []


def make_normed_convolution() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 6, 3))


@pytest.mark.parametrize("model, guilty", [
    (nn.Sequential(nn.Conv2d(3, 3, 1), make_scaled_weight()), ["1.weight"]),
    (Composed(run_under_autocast, inner=nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Linear(8, 4))), ["inner.2.weight"]),
    (
        nn.Sequential(nn.Conv2d(3, 6, 3), nn.InstanceNorm2d(6, affine=True), nn.Flatten(), nn.Linear(216, 4)),
        ["1.weight"],
    ),
], ids=["product", "autocast", "instance norm"])  # fmt: skip
def test_derived_weights_are_named(model: nn.Module, guilty: Any) -> None:
    result = observe(model, IMAGES).derived
    assert result == guilty


@pytest.mark.skipif(
    not hasattr(nn.utils, "parametrizations") or torch.__version__ < "2.1",
    reason="torch 2.1's weight norm",
)
def test_weight_norm_is_named() -> None:
    result = observe(
        nn.Sequential(nn.Conv2d(3, 3, 1), make_normed_convolution(), make_pooling_head(6)), IMAGES
    ).derived
    assert result == ["1.parametrizations.weight.original0", "1.parametrizations.weight.original1"]


def make_ordinary_layers() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.3), nn.Conv2d(6, 6, 3), nn.GroupNorm(2, 6), nn.PReLU(),
        make_pooling_head(6),
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
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert observe(model, IMAGES).derived == []
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert observe(make_text_layers(), torch.randint(0, 9, (2, 5))).derived == []
    half, images = make_ordinary_layers().bfloat16(), IMAGES.bfloat16()
    assert observe(half, images).derived == []


def test_random_modules_are_those_that_draw() -> None:
    assert observe_effects(make_ordinary_layers(), IMAGES).draws == {"3": 1}
    assert list(observe_effects(make_text_layers(), torch.randint(0, 9, (2, 5))).draws) == [
        "attend"
    ]


def test_recurrent_layers_with_dropout_of_their_own_draw_unkeyed_on_a_gpu() -> None:
    model = nn.ModuleDict({
        "plain": nn.GRU(2, 2, num_layers=2), "one": nn.ModuleList([nn.LSTM(2, 2, num_layers=2, dropout=0.1)]),
    })  # fmt: skip
    assert find_unkeyed_draws(model, torch.device("cuda", 0)) == ["one.0"]
    assert find_unkeyed_draws(model, torch.device("cpu")) == []


def test_footprint_counts_saved_and_sent_bytes() -> None:
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(192, 10),
        nn.ReLU(),
        begin_stage(nn.Linear(10, 6)),
        begin_stage(nn.Linear(6, 4)),
    )
    footprint = make_footprint(model, partition(model, IMAGES), observe(model, IMAGES, LABELS))
    assert footprint.boundary_bytes == (2 * 10 * 4, 2 * 6 * 4)
    # the first stage keeps its input and ReLU's output; the second its input; the last its input, log-softmax and labels
    assert footprint.saved_bytes[0] == 2 * 192 * 4 + 2 * 10 * 4
    assert footprint.saved_bytes[1] == 2 * 10 * 4
