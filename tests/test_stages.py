"""Check the division into stages: marks, names, counts, the finest division, and refusals."""

from __future__ import annotations

import copy
import functools
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.model.balance import balance
from ipu_pipe.model.stages import begin_stage, partition
from tests.support.models import Composed
from tests.support.runs import list_faults

X = torch.randn(2, 3, 8, 8)


def make_residual_block() -> nn.Module:
    """Return conv, norm and conv with a projection that is defined first and runs last."""
    conv = functools.partial(nn.Conv2d, 4, 4, 3, padding=1)
    parts = {
        "project": nn.Conv2d(4, 4, 1),
        "conv1": conv(),
        "norm": nn.GroupNorm(2, 4),
        "conv2": conv(),
    }
    return Composed(lambda m, x: m.conv2(m.norm(m.conv1(x))) + m.project(x), **parts)


def make_two_block_model() -> nn.Sequential:
    return nn.Sequential(OrderedDict(
        stem=nn.Conv2d(3, 4, 3, padding=1), layers=nn.Sequential(make_residual_block(), make_residual_block()),
        pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), head=nn.Linear(4, 10),
    ))  # fmt: skip


def list_weight_owners(part: Any) -> Any:
    return [
        [n.rpartition(".")[0] for n in stage.parameters if n.endswith("weight")]
        for stage in part.stages
    ]


def test_marks_begin_stages_in_the_order_of_execution() -> None:
    m = make_two_block_model()
    begin_stage(m.layers[0].norm)
    begin_stage(m.layers[1])
    begin_stage(m.pool)
    begin_stage(m.stem)  # the first module: stage 0 begins with it anyway
    part = partition(m, X)
    assert list_weight_owners(part) == [
        ["stem", "layers.0.conv1"],
        ["layers.0.project", "layers.0.norm", "layers.0.conv2"],
        ["layers.1.project", "layers.1.conv1", "layers.1.norm", "layers.1.conv2"],
        ["head"],
    ]
    assert [stage.name for stage in part.stages] == [
        "stem",
        "layers.0.norm",
        "layers.1.conv1",
        "pool",
    ]
    assert sum(len(stage.parameters) for stage in part.stages) == len(list(m.parameters()))


def test_marks_survive_copies_and_pickles_and_leave_state_dicts_alone() -> None:
    m = begin_stage(nn.Linear(2, 2))
    assert copy.deepcopy(m).begins_stage and pickle.loads(pickle.dumps(m)).begins_stage
    assert list(m.state_dict()) == ["weight", "bias"]


def test_names_take_the_place_of_marks() -> None:
    m = make_two_block_model()
    begin_stage(m.pool)
    assert list_weight_owners(partition(m, X, ["layers.1", "head"])) == [
        ["stem", "layers.0.project", "layers.0.conv1", "layers.0.norm", "layers.0.conv2"],
        ["layers.1.project", "layers.1.conv1", "layers.1.norm", "layers.1.conv2"],
        ["head"],
    ]


def test_finest_is_one_weight_a_stage_in_the_order_of_execution() -> None:
    part = partition(make_two_block_model(), X, "finest")
    order = ["conv1", "norm", "conv2", "project"]
    assert list_weight_owners(part) == [
        ["stem"],
        *[[f"layers.{b}.{n}"] for b in (0, 1) for n in order],
        ["head"],
    ]
    assert all(len(stage.parameters) == 2 for stage in part.stages)  # weight and bias together


@pytest.mark.parametrize("count", [10, 14, 23, 100])
def test_more_stages_than_weights_spread_them(count: int) -> None:
    part = partition(make_two_block_model(), X, {"finest": count})
    assert len(part) == count
    flat = [
        (stage.index, name)
        for stage in part.stages
        for name in list_weight_owners(part)[stage.index]
    ]
    assert [index for index, _ in flat] == [j * count // 10 for j in range(10)]


@pytest.mark.parametrize("by", ["flops", "parameters", "time"])
@pytest.mark.parametrize("count", [11, 40])
def test_a_count_of_more_stages_than_weights_is_refused(count: int, by: str) -> None:
    """A model of four layers with 40 stages once had 36 stages without weights."""
    (fault,) = list_faults(partition, make_two_block_model(), X, {"count": count, "by": by})
    assert fault.startswith(f"stages: {count}: must be at most 10")


def test_a_count_leaves_no_stage_without_weights() -> None:
    """With boundaries between top-level modules alone the activation would be the third stage."""
    block = Composed(lambda m, x: m.b(m.a(x)), a=nn.Linear(8, 64), b=nn.Linear(64, 1))
    m = nn.Sequential(block, nn.ReLU(), nn.Linear(1, 1))
    for between_top in (False, True):
        part = partition(m, torch.zeros(2, 8), 3, between_top=between_top)
        assert [len(stage.parameters) for stage in part.stages] == [2, 2, 2]


@pytest.mark.parametrize("count", range(1, 11))
@pytest.mark.parametrize("by", ["flops", "parameters", "time"])
def test_counts_give_as_many_stages_with_weights_in_order(count: int, by: str) -> None:
    m = make_two_block_model()
    part = partition(m, X, {"count": count, "by": by})
    assert len(part) == count
    assert sorted(n for s in part.stages for n in s.parameters) == sorted(
        n for n, _ in m.named_parameters()
    )


def test_counts_cut_at_top_level_children_and_balance_flops() -> None:
    part = partition(make_two_block_model(), X, 3)
    assert [stage.name for stage in part.stages] == ["stem", "layers.0.conv1", "layers.1.conv1"]


@given(st.lists(st.integers(0, 30).map(float), min_size=1, max_size=9), st.data())
def test_balance_is_optimal(costs: Any, data: Any) -> None:
    import itertools

    count = data.draw(st.integers(1, len(costs)))

    def compute_worst_sum(starts: Any) -> float:
        edges = [*starts, len(costs)]
        return max(sum(costs[a:b]) for a, b in zip(edges, edges[1:]))

    starts = balance(costs, count)
    assert len(starts) == count and starts[0] == 0 and sorted(set(starts)) == starts
    best = min(
        compute_worst_sum((0, *cuts))
        for cuts in itertools.combinations(range(1, len(costs)), count - 1)
    )
    assert compute_worst_sum(starts) == pytest.approx(best)


def test_attention_weights_belong_to_the_module_that_runs() -> None:
    attend = begin_stage(nn.MultiheadAttention(4, 2))
    model = Composed(
        lambda m, x: m.attend(*[m.embed(x)] * 3)[0], embed=nn.Embedding(5, 4), attend=attend
    )
    part = partition(model, torch.randint(0, 5, (3, 2)))
    assert "attend.out_proj.weight" in part.stages[1].parameters
    assert "attend.in_proj_weight" in part.stages[1].parameters


def make_tied_layers() -> nn.Module:
    m = nn.Sequential(nn.Linear(4, 4), begin_stage(nn.ReLU()), nn.Linear(4, 4))
    m[2].weight = m[0].weight
    return m


def test_a_weight_on_two_stages_is_refused_and_named() -> None:
    x = torch.randn(2, 4)
    with pytest.raises(
        BadInput, match=r"0\.weight on stage 0 and 2\.weight on stage 1 are one shared weight"
    ):
        partition(make_tied_layers(), x)
    assert len(partition(make_tied_layers(), x, 1)) == 1
    twice = nn.Linear(4, 4)
    with pytest.raises(BadInput, match=r"0 runs on stage 0 and again on stage 1"):
        partition(nn.Sequential(twice, begin_stage(nn.ReLU()), twice), x)


@pytest.mark.parametrize("stages, message", [
    (["layers.7"], "stages: layers.7: the model has no module of that name, nearest is layers"),
    (["stem"], "stages: stem: nothing runs between this boundary and the one before (the model begins at stem)"),
    (["head", "layers.1"], "stages: names must be in the order of execution: layers.1, head"),
    (["head", "head"], "stages: a module is named twice"),
    (0, "stages: 0: must be a whole number >= 1"),
    (-3, "stages: -3: must be a whole number >= 1"),
    ({"count": 2, "by": "colour"}, "stages: by: colour: must be one of flops, parameters, time"),
    ("coarse", "stages: coarse: must be a count"),
    ({"finest": "x"}, "stages: x: must be a whole number >= 1"),
])  # fmt: skip
def test_impossible_choices_are_refused(stages: Any, message: str) -> None:
    faults = list_faults(partition, make_two_block_model(), X, stages)
    assert any(fault.startswith(message) for fault in faults), faults


def make_auxiliary() -> nn.Module:
    """Return a model with a head that runs in training alone, a counter that every forward
    rebinds, and a norm."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        m.count = m.count + 1
        h = m.b(m.norm(m.a(x)))
        return m.c(h) + m.aux(h) if m.training else m.c(h)

    parts = {
        "a": nn.Linear(4, 4),
        "norm": nn.BatchNorm1d(4),
        "b": begin_stage(nn.Linear(4, 4)),
        "aux": nn.Linear(4, 3),
    }
    return Composed(forward, **parts, c=begin_stage(nn.Linear(4, 3)), count=torch.zeros(()))


def test_a_module_that_runs_in_training_alone_has_the_stage_where_it_runs() -> None:
    """The order was once observed in evaluation, and modules that do not run there got the first
    stage."""
    m = make_auxiliary()
    state = {name: value.clone() for name, value in m.state_dict().items()}
    for mode in (True, False):
        # one sample, which BatchNorm refuses in training
        part = partition(m.train(mode), torch.randn(1, 4))
        assert list_weight_owners(part) == [["a", "norm"], ["b"], ["aux", "c"]]
        assert all(module.training is mode for module in m.modules())
    assert all(torch.equal(value, state[name]) for name, value in m.state_dict().items())
    assert list_weight_owners(partition(m, torch.randn(2, 4), ["aux"])) == [
        ["a", "norm", "b", "c"],
        ["aux"],
    ]


def test_a_module_that_training_skips_at_random_keeps_its_stage() -> None:
    """An extreme stochastic depth: the block never runs in training, but runs in evaluation."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        h = m.first(x)
        return m.last(h if m.training else h + m.block(h))

    block, last = begin_stage(nn.Linear(4, 4)), begin_stage(nn.Linear(4, 3))
    model = Composed(forward, first=nn.Linear(4, 4), block=block, last=last)
    assert list_weight_owners(partition(model, torch.randn(2, 4))) == [
        ["first"],
        ["block"],
        ["last"],
    ]


@pytest.mark.parametrize("by", ["flops", "parameters", "time"])
def test_modules_called_by_keyword_or_working_in_place_can_be_counted(by: str) -> None:
    """`by: time` once called the module again without its keywords, and in place on a leaf of
    the graph."""
    parts = {"a": nn.ConvTranspose1d(4, 4, 1), "act": nn.ReLU(inplace=True), "b": nn.Linear(4, 3)}
    keywords = Composed(lambda m, x: m.b(input=m.act(m.a(input=x))), **parts)
    part = partition(keywords, torch.randn(2, 4, 4), {"count": 2, "by": by})
    assert sorted(n for s in part.stages for n in s.parameters) == [
        "a.bias",
        "a.weight",
        "b.bias",
        "b.weight",
    ]
