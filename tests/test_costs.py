"""Cost laws of local-parallel training: the paper's numbers, limits in which laws agree, counts on modules, Pareto fronts."""

from __future__ import annotations

import pytest
import torch

from ipu_pipe.errors import BadInput
from ipu_pipe.local.blocks import Blocks, get_blocks
from ipu_pipe.local.structures import make_blocks
from ipu_pipe.schedule.methods import Structure
from models.mlp import mlp
from models.resnet import resnet18
from models.transformer import transformer_lm
from tools.experiments import costs
from tools.experiments.costs import BACKPROPAGATION, Flops, compute_per_example


def make_perceptron_blocks(inputs: int, width: int, layers: int) -> Blocks:
    x = torch.zeros(2, inputs)
    model, _ = make_blocks(
        mlp(inputs, width, layers), x, Structure(), [f"fc{i}" for i in range(2, layers + 1)]
    )
    blocks = get_blocks(model)
    assert blocks is not None
    return blocks


def test_the_papers_perceptron_has_the_papers_numbers() -> None:
    """The paper's appendix A.1 has 8 layers of 4096 on 3072 inputs."""
    with torch.device("meta"):
        blocks = make_perceptron_blocks(3072, 4096, 8)
        counts = costs.count_by_paper(blocks, torch.zeros(2, 3072), 10)
    assert (counts.forward, counts.auxiliary, counts.backward, counts.layers) == (
        32514176.0,
        77884.0,
        1.5,
        8,
    )


def test_a_transformer_is_counted_by_torch() -> None:
    """A character takes 12 w^2 products in a block, 2 t w of attention, and 7 w for the logits: width w = 8, context t = 4."""
    x = torch.zeros(3, 4, dtype=torch.int64)
    model, _ = make_blocks(transformer_lm(7, 8, 2, 2, 4), x, Structure(), ["block2"])
    blocks = get_blocks(model)
    assert blocks is not None
    counts = costs.count_by_torch(blocks, x)
    block, logits = 2 * 4 * (12 * 64 + 2 * 4 * 8), 2 * 4 * 8 * 7
    assert (counts.layers, counts.auxiliary, counts.backward) == (2, logits, 2.0)
    assert counts.forward == block


def test_the_laws_term_by_term() -> None:
    c = Flops(forward=100.0, auxiliary=7.0, backward=2.0, layers=5, parameters=1000)
    assert compute_per_example(BACKPROPAGATION, c) == 3 * (500 + 7)
    assert compute_per_example("local_greedy", c) == 3 * 107 * 5
    # each forward once; backwards of blocks of two layers, and of one block of one layer
    assert compute_per_example("local_overlapping", c) == 107 * 5 + 4 * 2 * 207 + 2 * 107
    assert compute_per_example("local_chunked", c, 2) == 3 * (500 + 14)
    assert compute_per_example("last_layers", c, 2) == 507 + 2 * 207
    assert costs.compute_total("local_greedy", c, 10, 32) == 3 * 107 * 5 * 320 + 10 * 10 * 1000
    assert (
        costs.compute_total("local_overlapping", c, 1, 1)
        - compute_per_example("local_overlapping", c)
        == 12 * 1000
    )
    for method, k, parallel in (
        (BACKPROPAGATION, 1, 1), ("local_greedy", 1, 5), ("local_overlapping", 1, 5), ("local_chunked", 3, 3),
        ("last_layers", 2, (5 + 4) / (2 * 3)),
    ):  # fmt: skip
        expected = costs.compute_total(method, c, 10, 32, k) / (32 * parallel)
        assert costs.compute_sequential(method, c, 10, 32, k) == pytest.approx(expected, rel=1e-15)


def test_the_laws_agree_where_the_methods_are_the_same() -> None:
    c = Flops(50.0, 9.0, 1.7, 6, 10)
    assert compute_per_example("local_chunked", c, 1) == compute_per_example(BACKPROPAGATION, c)
    assert compute_per_example("local_chunked", c, 6) == pytest.approx(
        compute_per_example("local_greedy", c), rel=1e-15
    )
    assert compute_per_example("last_layers", c, 6) == pytest.approx(
        compute_per_example(BACKPROPAGATION, c), rel=1e-15
    )
    whole = costs.compute_sequential(BACKPROPAGATION, c, 3, 4)
    assert costs.compute_sequential("last_layers", c, 3, 4, 6) == pytest.approx(whole, rel=1e-15)
    one = Flops(50.0, 9.0, 1.7, 1, 10)
    assert compute_per_example("local_overlapping", one) == pytest.approx(
        compute_per_example(BACKPROPAGATION, one), rel=1e-15
    )
    with pytest.raises(BadInput, match="pipedream: has no cost law"):
        costs.compute_sequential("pipedream", c, 1, 1)


def test_convolutions_have_no_count_by_the_paper() -> None:
    images = torch.randn(2, 3, 32, 32)
    model, _ = make_blocks(
        resnet18(classes=10), images, Structure(), ["layer1", "layer2", "layer3", "layer4"]
    )
    blocks = get_blocks(model)
    assert blocks is not None
    with pytest.raises(BadInput, match="^model: Conv2d: "):
        costs.count_by_paper(blocks, images, 10)


def test_a_front_has_the_points_that_no_other_dominates() -> None:
    points = [(1.0, 9.0), (2.0, 5.0), (2.0, 7.0), (3.0, 5.0), (4.0, 1.0), (0.5, 20.0), (5.0, 2.0)]
    assert costs.find_front(points) == [(0.5, 20.0), (1.0, 9.0), (2.0, 5.0), (4.0, 1.0)]
    assert costs.find_front([]) == []
