"""Check models cut for devices: where they may be cut, how stages are merged, which tensors
cross."""

from __future__ import annotations

from typing import Any, List

import pytest
import torch
from torch import nn

from ipu_pipe.cut.cutting import cut_model, list_crossings
from ipu_pipe.errors import BadInput
from ipu_pipe.model.observation import observe_execution
from ipu_pipe.model.stages import (
    Partition,
    begin_stage,
    find_top_cut_points,
    group_stages,
    partition,
)
from models.resnet import preact_resnet20
from tests.staged_models import SkippingModel


def merge_stages(
    model: nn.Module, part: Partition, count: int, x: Any, where: Any = None
) -> List[str]:
    return list(group_stages(model, part, count, x, where).values())


def test_values_that_skip_pieces_are_handed_on() -> None:
    model, x = SkippingModel(), torch.randn(5, 12)
    pieces = cut_model(model, ["b", "c", "d"], x)
    names = [name for piece in pieces for name in piece.names]
    assert names == ["a", "b", "c", "norm", "d", "head"]
    # first, scale | + second | third, first, second
    assert [len(c.tensors) for c in list_crossings(pieces)] == [2, 3, 3]
    assert [piece.list_passed_weights() for piece in pieces] == [["scale"], [], [], []]
    assert all(module.training for module in model.modules())


def test_few_devices_cut_between_blocks_many_inside_them() -> None:
    model, x = preact_resnet20(), torch.randn(2, 3, 16, 16)
    part = partition(model, x)
    tops = find_top_cut_points(observe_execution(model, x), part.begin_names())
    starts = list(tops.values())
    assert len(part) == 34
    assert starts == [f"layer{i}.{j}" for i in (1, 2, 3) for j in range(3)] + [
        "norm",
        "avgpool",
        "fc",
        "loss",
    ]
    assert merge_stages(model, part, 1, x) == []
    two = merge_stages(model, part, 2, x)
    assert len(two) == 1 and two[0] in starts
    assert merge_stages(model, part, len(starts) + 1, x) == starts
    starts_of_20 = merge_stages(model, part, 20, x)
    assert len(starts_of_20) == 19 and "layer1.0.norm2" in starts_of_20
    assert merge_stages(model, part, 34, x) == part.begin_names()
    with pytest.raises(BadInput, match="at most 34 devices, not 35"):
        merge_stages(model, part, 35, x)
    with pytest.raises(BadInput, match="at most 3 devices, not 4: 31 of its stages"):
        merge_stages(model, part, 4, x, list(tops)[:2])


def test_merged_stages_balance_their_flops() -> None:
    widths = [8, 8, 8, 8, 8, 8, 8]
    for sizes, expected in ((widths, ["2", "4"]), ([8, 64, 8, 8, 8, 8, 64], ["1", "4"])):
        layers = [begin_stage(nn.Linear(a, b)) for a, b in zip(sizes, sizes[1:])]
        model, x = nn.Sequential(*layers), torch.randn(1, sizes[0])
        assert merge_stages(model, partition(model, x), 3, x) == expected
