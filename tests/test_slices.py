"""Models cut for devices: where they may be cut, how stages are taken together, what crosses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.slices import crossings, cuttable, links_of, merge_stages, pieces
from ipu_pipe.stages import begin_stage, partition, profile
from models.resnet import preact_resnet20, resnet18
from models.transformer import transformer_lm, transformer_translation
from tests.staged_models import residual, whole


def test_nested_sequences_are_unfolded_under_their_names() -> None:
    names = [name for name, _ in links_of(resnet18(classes=10, small_images=True))]
    assert names == [
        "conv1", "bn1", "relu", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer3.0", "layer3.1", "layer4.0",
        "layer4.1", "avgpool", "flatten", "fc",
    ]  # fmt: skip


def test_a_model_that_is_no_sequence_is_refused_with_the_remedy() -> None:
    with pytest.raises(BadInput, match="nn.Sequential at the top level"):
        links_of(transformer_translation(50, 50, width=16, heads=2, layers=1, feedforward=16))


def test_cuts_inside_a_block_are_left_out() -> None:
    model, x = preact_resnet20(), torch.randn(2, 3, 16, 16)
    part = partition(model, x)
    names = [name for name, _ in links_of(model)]
    starts = [names[index] for index in cuttable(profile(model, part, x, names))]
    assert len(part) == 34
    assert starts == [f"layer{i}.{j}" for i in (1, 2, 3) for j in range(3)] + ["norm", "avgpool", "fc", "loss"]
    assert merge_stages(model, part, 1, x) == []
    two = merge_stages(model, part, 2, x)
    assert len(two) == 1 and two[0] in starts
    assert merge_stages(model, part, len(starts) + 1, x) == starts
    with pytest.raises(BadInput, match="at most 14 devices' parts, 15 are asked for"):
        merge_stages(model, part, 15, x)


def test_stages_taken_together_balance_their_flops() -> None:
    widths = [8, 8, 8, 8, 8, 8, 8]
    for sizes, expected in ((widths, ["2", "4"]), ([8, 64, 8, 8, 8, 8, 64], ["1", "4"])):
        layers = [begin_stage(nn.Linear(a, b)) for a, b in zip(sizes, sizes[1:])]
        model, x = nn.Sequential(*layers), torch.randn(1, sizes[0])
        assert merge_stages(model, partition(model, x), 3, x) == expected


@pytest.mark.parametrize("count", [1, 2, 4])
def test_pieces_one_after_another_are_the_model(count: int) -> None:
    model, x = transformer_lm(vocabulary=11, width=8, heads=2, blocks=3, context=5), torch.randint(0, 11, (2, 5))
    part = partition(model, x)
    names = merge_stages(model, part, count, x)
    cut = pieces(model, names)
    assert len(cut) == count
    value: Any = x
    for piece in cut:
        value = piece(value)
    assert torch.equal(value, model(x))
    held = [
        name
        for piece in cut
        for link, m in zip(piece.names, piece.links)
        for name in (f"{link}.{k}" for k in m.state_dict())
    ]
    assert sorted(held) == sorted(model.state_dict())


def test_what_crosses_is_known_with_its_nesting() -> None:
    model = whole([stage.float() for stage in residual()])
    x = torch.randn(3, 12)
    cut = pieces(model, ["1", "2", "3"])
    model.train()
    across = crossings(cut, model, x)
    assert [[t.shape for t in c.tensors] for c in across] == [[(3, 4, 2, 2)], [(3, 4, 2, 2)] * 2, [(3, 4, 2, 2)] * 2]
    pair = (torch.ones(1), torch.zeros(2))
    again = across[1].unflatten(across[1].flatten(pair))
    assert isinstance(again, tuple) and torch.equal(again[1], pair[1])
    assert across[0].tensors[0].bytes == 3 * 4 * 4 * 4 and across[0].tensors[0].differentiable
    assert all(module.training for module in model.modules())
