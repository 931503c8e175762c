"""A count of stages gives exactly that many, with the best of all cuts; FLOPs are counted as PyTorch counts them."""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict
from typing import Any, List

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.model import flops, observation
from ipu_pipe.model.balance import SLACK, WeightedCuts, find_greatest
from ipu_pipe.model.observation import observe_costs, observe_execution
from ipu_pipe.model.stages import Partition, make_footprint, partition
from tests.support.models import Composed, take_output

IMAGES = torch.randn(2, 3, 8, 8)
needs_flop_counter = pytest.mark.skipif(
    flops.FlopCounterMode is None, reason="torch 2.0 has no counter"
)


def make_attention_block(width: int) -> nn.Module:
    """Make a block of attention and two linear layers, each with a skip connection."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        h = m.ln_1(x)
        x = x + m.attention(h, h, h, need_weights=False)[0]
        return x + m.mlp(m.ln_2(x))

    norms, attention = (
        [nn.LayerNorm(width) for _ in range(2)],
        nn.MultiheadAttention(width, 2, batch_first=True),
    )
    mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    return Composed(forward, ln_1=norms[0], ln_2=norms[1], attention=attention, mlp=mlp)


def make_vision_transformer(layers: int = 6, width: int = 8) -> nn.Module:
    """Make a vision transformer. The model itself has a weight, and all its layers are inside one child, which also has a
    weight."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        x = m.patches(x).flatten(2).transpose(1, 2)  # (b, 4, width)
        return m.heads(m.encoder(torch.cat([m.token.expand(len(x), -1, -1), x], dim=1))[:, 0])

    blocks = nn.Sequential(
        OrderedDict((f"layer_{i}", make_attention_block(width)) for i in range(layers))
    )
    encoder = Composed(
        lambda m, x: m.norm(m.layers(m.dropout(x + m.position))), position=nn.Parameter(torch.zeros(1, 5, width)),
        dropout=nn.Dropout(0.0), layers=blocks, norm=nn.LayerNorm(width),
    )  # fmt: skip
    patches, heads = nn.Conv2d(3, width, 4, 4), nn.Sequential(OrderedDict(head=nn.Linear(width, 4)))
    return Composed(
        forward,
        patches=patches,
        token=nn.Parameter(torch.zeros(1, 1, width)),
        encoder=encoder,
        heads=heads,
    )


def count_stage_weights(part: Partition, model: nn.Module) -> List[int]:
    """Return the number of weights of each stage."""
    return [
        sum(model.get_parameter(name).numel() for name in stage.parameters) for stage in part.stages
    ]


@pytest.mark.parametrize("by", ["flops", "parameters"])
def test_a_model_with_a_weight_of_its_own_gets_as_many_stages_as_requested(by: str) -> None:
    """Story: its weight became a separate stage before the first one, so that four stages became five."""
    model = make_vision_transformer()
    for count in range(1, 16):
        part = partition(model, IMAGES, {"count": count, "by": by})
        assert len(part) == count
        assert all(stage.parameters != ("token",) for stage in part.stages)
        assert sorted(n for s in part.stages for n in s.parameters) == sorted(
            n for n, _ in model.named_parameters()
        )


def test_a_small_count_divides_the_child_that_contains_everything() -> None:
    """Story: two stages had 1 % and 99 % of the weights, since a small count cut between the model's children alone."""
    model = make_vision_transformer()
    for count, begins in ((2, [3]), (3, [2, 4])):
        part = partition(model, IMAGES, count)
        assert part.begin_names() == [f"encoder.layers.layer_{i}" for i in begins]
        assert (
            max(count_stage_weights(part, model))
            < 1.25 * sum(count_stage_weights(part, model)) / count
        )
    best = [
        max(count_stage_weights(partition(model, IMAGES, {"count": n, "by": "parameters"}), model))
        for n in range(1, 12)
    ]
    assert best == sorted(best, reverse=True)  # more stages never make the greatest greater
    assert partition(model, IMAGES, 5) == partition(model, IMAGES, 5)


def test_cuts_between_top_children_are_enough_where_the_count_allows() -> None:
    """Check with two children, of which the second is three times as large and can be divided."""
    uneven = Composed(
        lambda m, x: m.large(m.small(x)), small=nn.Linear(16, 16), large=make_attention_block(16)
    )
    model, x, two = uneven, torch.randn(1, 3, 16), {"count": 2, "by": "parameters"}
    assert partition(model, x, two).begin_names() == ["large.mlp.0"]
    assert partition(model, x, two, between_top=True).begin_names() == ["large"]
    assert partition(model, x, 3, between_top=True) == partition(model, x, 3)


def test_a_cut_that_every_backend_can_make_is_preferred_unless_it_is_far_worse() -> None:
    """Three blocks on two stages are divided 2 to 1 instead of 1.5 to 1.5."""
    model = nn.Sequential(make_attention_block(8), make_attention_block(8), make_attention_block(8))
    assert partition(
        model, torch.randn(1, 3, 8), {"count": 2, "by": "parameters"}
    ).begin_names() in (["1"], ["2"])


def make_tied_layers(last: int = 2) -> nn.Module:
    """Make layers inside one child; the first and the layer `last` share a weight."""
    layers = [nn.Linear(8, 8, bias=False) for _ in range(5)]
    layers[last].weight = layers[0].weight
    return Composed(
        lambda m, x: functools.reduce(lambda h, layer: layer(h), m.inner, x),
        inner=nn.ModuleList(layers),
    )


def test_a_count_does_not_divide_a_shared_weight() -> None:
    """Story: the balanced cut went between two uses of one weight, and was refused where another was possible."""
    x = torch.randn(2, 8)
    for count, begins in ((2, ["inner.3"]), (3, ["inner.3", "inner.4"])):
        assert partition(make_tied_layers(), x, count).begin_names() == begins
    with pytest.raises(BadInput, match="are one shared weight"):
        partition(make_tied_layers(4), x, 2)


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 1), st.integers(0, 2)), min_size=1, max_size=9
    ),
    st.data(),
)
def test_the_search_is_exact(units: Any, data: Any) -> None:
    count = data.draw(st.integers(1, len(units)))
    costs, weights, through = (
        [float(unit[0]) for unit in units],
        [u[1] for u in units],
        [u[2] for u in units],
    )
    through[0] = 0
    cuts = WeightedCuts(costs, weights, through)
    ways = [[0, *cut] for cut in itertools.combinations(range(1, len(units)), count - 1)]
    # every stage has a weight
    allowed = [
        way for way in ways if all(sum(weights[a:b]) for a, b in zip(way, [*way[1:], len(units)]))
    ]
    best = cuts.find_best(count)
    if not allowed:
        assert best is None and cuts.find_least(count) == float("inf")
        return
    least = min(find_greatest(costs, way) for way in allowed)
    near = [way for way in allowed if find_greatest(costs, way) <= SLACK * least]
    assert cuts.find_least(count) == least
    assert best in near and sum(through[i] for i in best) == min(
        sum(through[i] for i in way) for way in near
    )


# ---- FLOPs


def forward(model: nn.Module, part: Partition, x: torch.Tensor) -> List[float]:
    return list(
        make_footprint(model, part, observe_execution(model, x, counted=True)).forward_flops
    )


@needs_flop_counter
def test_layers_with_fast_paths_in_evaluation_are_counted() -> None:
    b, n, w = 2, 5, 8
    layer = nn.TransformerEncoderLayer(w, 2, dim_feedforward=16, batch_first=True)
    expected = 2 * b * n * w * 4 * w + 4 * b * n * n * w + 2 * 2 * b * n * w * 16
    assert forward(layer, partition(layer, torch.randn(b, n, w), 1), torch.randn(b, n, w)) == [
        expected
    ]

    model, x = take_output(nn.LSTM(w, 4)), torch.randn(n, b, w)
    assert forward(model, partition(model, x, 1), x) == [2 * n * b * 4 * 4 * (w + 4)]


def test_linear_and_convolution_layers_have_the_same_count_by_formula(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch 2.0 counts by these formulas; flops.HOW states that they leave out attention."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5))
    part = partition(model, IMAGES, ["2"])
    expected = [2 * 2 * 4 * 36 * 27, 2 * 2 * 144 * 5]
    assert forward(model, part, IMAGES) == expected
    monkeypatch.setattr(flops, "FlopCounterMode", None)
    monkeypatch.setattr(observation, "FlopCounterMode", None)
    assert forward(model, part, IMAGES) == expected
    assert ("left out" in flops.HOW) == (torch.__version__.startswith("2.0"))


def make_conv1d(inputs: int, outputs: int) -> nn.Module:
    """Make Hugging Face's Conv1D: a linear layer with a transposed weight, computed by a function."""

    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(m.bias, x.flatten(0, -2), m.weight).unflatten(0, x.shape[:-1])

    weight = nn.Parameter(torch.randn(inputs, outputs) / 8)
    return Composed(forward, weight=weight, bias=nn.Parameter(torch.zeros(outputs)))


def make_gpt2_block(width: int) -> nn.Module:
    """Make a block of GPT-2 as Hugging Face writes it."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        q, k, v = (
            t.unflatten(-1, (2, -1)).transpose(1, 2) for t in m.c_attn(m.ln_1(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + m.c_proj(mixed.transpose(1, 2).flatten(2))
        return x + m.c_out(nn.functional.gelu(m.c_fc(m.ln_2(x))))

    factors = {"c_attn": (1, 3), "c_proj": (1, 1), "c_fc": (1, 4), "c_out": (4, 1)}
    products = {name: make_conv1d(a * width, b * width) for name, (a, b) in factors.items()}
    return Composed(forward, ln_1=nn.LayerNorm(width), ln_2=nn.LayerNorm(width), **products)


def compute_imbalance(model: nn.Module, count: int, x: torch.Tensor) -> float:
    """Return the FLOPs of the most expensive of `count` stages, divided by their mean."""
    observation = observe_costs(model, x, lambda: model(x))
    footprint = make_footprint(model, partition(model, x, count), observation)
    assert footprint.backward_flops is not None
    costs = [f + b for f, b in zip(footprint.forward_flops, footprint.backward_flops)]
    return max(costs) * count / sum(costs)


@needs_flop_counter
def test_layers_that_compute_by_functions_are_balanced() -> None:
    """Story: two stages of GPT-2 had 78 and 22 % of its work, since a layer that is a function call counted 2 FLOPs an output."""
    model = nn.Sequential(
        nn.Embedding(200, 32),
        *[make_gpt2_block(32) for _ in range(8)],
        nn.Linear(32, 200, bias=False),
    )
    assert compute_imbalance(model, 2, torch.randint(0, 200, (2, 16))) < 1.06


@needs_flop_counter
def test_encoder_layers_before_a_head_are_divided() -> None:
    """Story: all four layers came to stage 0, and the head alone to stage 1."""
    layers = [
        nn.TransformerEncoderLayer(16, 2, 64, dropout=0.0, batch_first=True) for _ in range(4)
    ]
    model, x = nn.Sequential(*layers, nn.Linear(16, 10)), torch.randn(2, 6, 16)
    assert partition(model, x, 2).begin_names() == ["2"]
    assert compute_imbalance(model, 2, x) < 1.06
