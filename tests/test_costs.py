"""Cost laws of local-parallel training: the paper's numbers, limits in which laws agree, counts on modules, Pareto fronts."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any, Sequence

import pytest
import torch
from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.local.blocks import get_blocks
from ipu_pipe.local.structures import make_blocks
from ipu_pipe.schedule.methods import Structure
from models.mlp import mlp
from models.transformer import transformer_lm
from tools.experiments import costs
from tools.experiments.costs import BACKPROPAGATION, Flops, compute_per_example


def cut_into_blocks(model: nn.Module, x: torch.Tensor, begins: Sequence[str]) -> Any:
    return get_blocks(make_blocks(model, x, Structure(), begins)[0])


def test_the_papers_perceptron_has_the_papers_numbers() -> None:
    """The paper's appendix A.1 has 8 layers of 4096 on 3072 inputs; convolutions have no count by it."""
    with torch.device("meta"):
        x, names = torch.zeros(2, 3072), [f"fc{i}" for i in range(2, 9)]
        counts = costs.count_by_paper(cut_into_blocks(mlp(3072, 4096, 8), x, names), x, 10)
    assert astuple(counts)[:4] == (32514176.0, 77884.0, 1.5, 8)
    layers = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten(), nn.Linear(32, 10))
    images = torch.randn(2, 1, 4, 4)
    with pytest.raises(BadInput, match="^model: Conv2d: "):
        costs.count_by_paper(cut_into_blocks(layers, images, ["2"]), images, 10)


def test_a_transformer_is_counted_by_torch() -> None:
    """A character takes 12 w^2 products in a block, 2 t w of attention, and 7 w for the logits: width w = 8, context t = 4."""
    x = torch.zeros(3, 4, dtype=torch.int64)
    counts = costs.count_by_torch(cut_into_blocks(transformer_lm(7, 8, 2, 2, 4), x, ["block2"]), x)
    block, logits = 2 * 4 * (12 * 64 + 2 * 4 * 8), 2 * 4 * 8 * 7
    assert astuple(counts)[:4] == (block, logits, 2.0, 2)


def test_the_laws_term_by_term() -> None:
    c = Flops(forward=100.0, auxiliary=7.0, backward=2.0, layers=5, parameters=1000)
    assert compute_per_example(BACKPROPAGATION, c) == 3 * (500 + 7)
    assert compute_per_example("local_greedy", c) == 3 * 107 * 5
    # each forward once; backwards of blocks of two layers, and of one block of one layer
    assert compute_per_example("local_overlapping", c) == 107 * 5 + 4 * 2 * 207 + 2 * 107
    for k in (1, 2, 5):
        assert compute_per_example("local_chunked", c, k) == 3 * (500 + 7 * k)
        # the last layer of k also has the backward of the loss
        assert compute_per_example("last_layers", c, k) == 507 + 2 * (100 * k + 7)
    assert compute_per_example("local_overlapping", replace(c, layers=1)) == 3 * 107
    assert costs.compute_total("local_greedy", c, 10, 32) == 3 * 107 * 5 * 320 + 10 * 10 * 1000
    one = costs.compute_total("local_overlapping", c, 1, 1)
    assert one == compute_per_example("local_overlapping", c) + 12 * 1000
    for method, k, parallel in (
        (BACKPROPAGATION, 1, 1), ("local_greedy", 1, 5), ("local_overlapping", 1, 5), ("local_chunked", 3, 3),
        ("last_layers", 2, (5 + 4) / (2 * 3)),
    ):  # fmt: skip
        expected = costs.compute_total(method, c, 10, 32, k) / (32 * parallel)
        assert costs.compute_sequential(method, c, 10, 32, k) == pytest.approx(expected, rel=1e-15)


def test_a_method_without_a_law_is_refused() -> None:
    with pytest.raises(BadInput, match="pipedream: has no cost law"):
        costs.compute_sequential("pipedream", Flops(50.0, 9.0, 1.7, 6, 10), 1, 1)


def test_a_front_has_the_points_that_no_other_dominates() -> None:
    points = [(1.0, 9.0), (2.0, 5.0), (2.0, 7.0), (3.0, 5.0), (4.0, 1.0), (0.5, 20.0), (5.0, 2.0)]
    assert costs.find_front(points) == [(0.5, 20.0), (1.0, 9.0), (2.0, 5.0), (4.0, 1.0)]
    assert costs.find_front([]) == []
