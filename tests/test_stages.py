"""Check the division into stages: marks, names, counts, the finest division, the best of all cuts, FLOPs, and refusals."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from collections import OrderedDict
from typing import Any, Callable, List, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ipu_pipe.model import flops, observation
from ipu_pipe.model.balance import SLACK, WeightedCuts, balance, find_best_cut, find_greatest
from ipu_pipe.model.observation import observe_costs, observe_execution
from ipu_pipe.model.stages import begin_stage, make_footprint, partition
from tests.support.models import Composed, take_output
from tests.support.runs import list_faults

X = torch.randn(2, 3, 8, 8)
needs_flop_counter = pytest.mark.skipif(
    flops.FlopCounterMode is None, reason="torch 2.0 has no counter"
)


def make_residual_block() -> nn.Module:
    """Return conv, norm and conv with a projection that is defined first and runs last."""
    conv = functools.partial(nn.Conv2d, 4, 4, 3, padding=1)
    parts = {"project": nn.Conv2d(4, 4, 1), "conv1": conv(), "norm": nn.GroupNorm(2, 4)}
    return Composed(lambda m, x: m.conv2(m.norm(m.conv1(x))) + m.project(x), **parts, conv2=conv())


def make_two_block_model() -> nn.Sequential:
    """Return a stem, two residual blocks, a pool and a head."""
    return nn.Sequential(OrderedDict(
        stem=nn.Conv2d(3, 4, 3, padding=1), layers=nn.Sequential(make_residual_block(), make_residual_block()),
        pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), head=nn.Linear(4, 10),
    ))  # fmt: skip


def list_weight_owners(part: Any) -> Any:
    """Return for each stage the modules that own its weights."""
    return [
        [n.rpartition(".")[0] for n in stage.parameters if n.endswith("weight")]
        for stage in part.stages
    ]


# ---- marks, names and the finest division


def test_marks_begin_stages_in_the_order_of_execution_and_names_take_their_place() -> None:
    m = make_two_block_model()
    # stage 0 begins with the stem anyway
    for module in (m.layers[0].norm, m.layers[1], m.pool, m.stem):
        begin_stage(module)
    part = partition(m, X)
    block = ["layers.1.project", "layers.1.conv1", "layers.1.norm", "layers.1.conv2"]
    first = ["layers.0.project", "layers.0.norm", "layers.0.conv2"]
    assert list_weight_owners(part) == [["stem", "layers.0.conv1"], first, block, ["head"]]
    names = [stage.name for stage in part.stages]
    assert names == ["stem", "layers.0.norm", "layers.1.conv1", "pool"]
    owners = list_weight_owners(partition(m, X, ["layers.1", "head"]))
    assert sorted(owners[0]) == sorted(["stem", "layers.0.conv1", *first])
    assert owners[1:] == [block, ["head"]]


def test_marks_survive_copies_and_pickles_and_leave_state_dicts_alone() -> None:
    m = begin_stage(nn.Linear(2, 2))
    assert copy.deepcopy(m).begins_stage and pickle.loads(pickle.dumps(m)).begins_stage
    assert list(m.state_dict()) == ["weight", "bias"]


def test_finest_is_one_weight_a_stage_in_the_order_of_execution() -> None:
    """More stages than weights spread them."""
    part = partition(make_two_block_model(), X, "finest")
    order = ["conv1", "norm", "conv2", "project"]
    blocks = [[f"layers.{b}.{n}"] for b in (0, 1) for n in order]
    assert list_weight_owners(part) == [["stem"], *blocks, ["head"]]
    assert all(len(stage.parameters) == 2 for stage in part.stages)  # weight and bias together
    for count in (10, 100):
        owners = list_weight_owners(partition(make_two_block_model(), X, {"finest": count}))
        assert len(owners) == count
        places = [s for s, names in enumerate(owners) for _ in names]
        assert places == [j * count // 10 for j in range(10)]


def test_attention_weights_belong_to_the_module_that_runs() -> None:
    attend = begin_stage(nn.MultiheadAttention(4, 2))
    model = Composed(
        lambda m, x: m.attend(*[m.embed(x)] * 3)[0], embed=nn.Embedding(5, 4), attend=attend
    )
    names = partition(model, torch.randint(0, 5, (3, 2))).stages[1].parameters
    assert {"attend.out_proj.weight", "attend.in_proj_weight"} <= set(names)


def test_a_module_that_runs_in_training_alone_has_the_stage_where_it_runs() -> None:
    """The order was once observed in evaluation, and modules that do not run there got the first
    stage. The model is left unchanged."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        m.count = m.count + 1
        h = m.b(m.norm(m.a(x)))
        return m.c(h) + m.aux(h) if m.training else m.c(h)

    linear = functools.partial(nn.Linear, 4, 4)
    parts = {"a": linear(), "norm": nn.BatchNorm1d(4), "b": begin_stage(linear()), "aux": linear()}
    m = Composed(forward, **parts, c=begin_stage(linear()), count=torch.zeros(()))
    state = {name: value.clone() for name, value in m.state_dict().items()}
    for mode in (True, False):
        # one sample, which BatchNorm refuses in training
        part = partition(m.train(mode), torch.randn(1, 4))
        assert list_weight_owners(part) == [["a", "norm"], ["b"], ["aux", "c"]]
        assert all(module.training is mode for module in m.modules())
    assert all(torch.equal(value, state[name]) for name, value in m.state_dict().items())
    owners = list_weight_owners(partition(m, torch.randn(2, 4), ["aux"]))
    assert owners == [["a", "norm", "b", "c"], ["aux"]]


def test_a_module_that_training_skips_at_random_keeps_its_stage() -> None:
    """An extreme stochastic depth: the block never runs in training, but runs in evaluation."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        h = m.first(x)
        return m.last(h if m.training else h + m.block(h))

    block, last = begin_stage(nn.Linear(4, 4)), begin_stage(nn.Linear(4, 3))
    model = Composed(forward, first=nn.Linear(4, 4), block=block, last=last)
    owners = list_weight_owners(partition(model, torch.randn(2, 4)))
    assert owners == [["first"], ["block"], ["last"]]


# ---- counts


make_attention_block = functools.partial(nn.TransformerEncoderLayer, 8, 2, 32, batch_first=True)


def make_vision_transformer() -> nn.Module:
    """Make a vision transformer. The model itself has a weight, and all its layers are inside one child, which also has a
    weight."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        return m.head(m.encoder(m.patches(x).flatten(2).transpose(1, 2) + m.token)[:, 0])

    weight = functools.partial(torch.zeros, 1, 4, 8)
    encoder = Composed(
        lambda m, x: m.norm(m.layers(x + m.position)), position=nn.Parameter(weight()),
        layers=nn.Sequential(*(make_attention_block() for _ in range(6))), norm=nn.LayerNorm(8),
    )  # fmt: skip
    patches, head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 4)
    return Composed(
        forward, token=nn.Parameter(weight()), patches=patches, encoder=encoder, head=head
    )


@pytest.mark.parametrize("make, counts, by", [
    (make_vision_transformer, range(1, 16), "flops"),
    (make_vision_transformer, (1, 4, 15), "parameters"),
    (make_two_block_model, (1, 3, 10), "time"),
])  # fmt: skip
def test_counts_give_as_many_stages_with_weights(make: Any, counts: Any, by: str) -> None:
    """Story: the model's own weight became a separate stage before the first one, so that four stages became five."""
    model = make()
    names = sorted(n for n, _ in model.named_parameters())
    for count in counts:
        part = partition(model, X, {"count": count, "by": by})
        assert len(part) == count
        assert all(set(stage.parameters) - {"token"} for stage in part.stages)
        assert sorted(n for s in part.stages for n in s.parameters) == names


def test_a_small_count_divides_the_child_that_contains_everything() -> None:
    """Story: two stages had 1 % and 99 % of the weights, since a small count cut between the model's children alone."""
    model = make_vision_transformer()
    for count, begins in ((2, [3]), (3, [2, 4])):
        names = partition(model, X, count).begin_names()
        assert names == [f"encoder.layers.{i}" for i in begins]


def test_cuts_that_every_backend_can_make_are_preferred_unless_they_are_far_worse() -> None:
    """Three blocks on two stages are divided 2 to 1 instead of 1.5 to 1.5. Of two children, the second is three times as
    large and can be divided."""
    x, two = torch.randn(1, 3, 8), {"count": 2, "by": "parameters"}
    blocks = nn.Sequential(*(make_attention_block() for _ in range(3)))
    assert partition(blocks, x, two).begin_names() in (["1"], ["2"])
    small, large = nn.Linear(8, 8), make_attention_block()
    model = Composed(lambda m, x: m.large(m.small(x)), small=small, large=large)
    assert partition(model, x, two).begin_names() == ["large.linear1"]
    assert partition(model, x, two, between_top=True).begin_names() == ["large"]
    assert partition(model, x, 3, between_top=True) == partition(model, x, 3)


def test_a_count_leaves_no_stage_without_weights() -> None:
    """With boundaries between top-level modules alone the activation would be the third stage."""
    block = Composed(lambda m, x: m.b(m.a(x)), a=nn.Linear(8, 64), b=nn.Linear(64, 1))
    m = nn.Sequential(block, nn.ReLU(), nn.Linear(1, 1))
    for between_top in (False, True):
        part = partition(m, torch.zeros(2, 8), 3, between_top=between_top)
        assert [len(stage.parameters) for stage in part.stages] == [2, 2, 2]


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
    assert len(partition(make_tied_layers(4), x, 1)) == 1


@pytest.mark.parametrize("by", ["flops", "parameters", "time"])
def test_modules_called_by_keyword_or_working_in_place_can_be_counted(by: str) -> None:
    """`by: time` once called the module again without its keywords, and in place on a leaf of
    the graph."""
    parts = {"a": nn.ConvTranspose1d(4, 4, 1), "act": nn.ReLU(inplace=True), "b": nn.Linear(4, 3)}
    keywords = Composed(lambda m, x: m.b(input=m.act(m.a(input=x))), **parts)
    part = partition(keywords, torch.randn(2, 4, 4), {"count": 2, "by": by})
    assert list_weight_owners(part) == [["a"], ["b"]]


def call_twice() -> nn.Module:
    """Make a model that runs one layer in two stages."""
    twice = nn.Linear(8, 8)
    return nn.Sequential(twice, begin_stage(nn.ReLU()), twice)


@pytest.mark.parametrize("make, x, stages, message", [
    (make_two_block_model, X, ["layers.7"], "stages: layers.7: the model has no module of that name, nearest is layers"),
    (make_two_block_model, X, ["stem"], "stages: stem: nothing runs between this boundary and the one before"),
    (make_two_block_model, X, ["head", "layers.1"], "stages: names must be in the order of execution: layers.1, head"),
    (make_two_block_model, X, ["head", "head"], "stages: a module is named twice"),
    (make_two_block_model, X, 0, "stages: 0: must be a whole number >= 1"),
    (make_two_block_model, X, 11, "stages: 11: must be at most 10"),  # once 40 stages, 36 of them without weights
    (make_two_block_model, X, {"count": 2, "by": "colour"}, "stages: by: colour: must be one of flops, parameters, time"),
    (make_two_block_model, X, "coarse", "stages: coarse: must be a count"),
    (lambda: make_tied_layers(4), torch.randn(2, 8), 2,
     "stages: inner.0.weight on stage 0 and inner.4.weight on stage 1 are one shared weight"),
    (call_twice, torch.randn(2, 8), None, "stages: 0 runs on stage 0 and again on stage 1"),
])  # fmt: skip
def test_impossible_choices_are_refused(make: Any, x: Any, stages: Any, message: str) -> None:
    faults = list_faults(partition, make(), x, stages)
    assert any(fault.startswith(message) for fault in faults), faults


# ---- the best of all cuts


def list_cuts(units: int, count: int) -> List[List[int]]:
    """Return the first units of the stages of every cut."""
    return [[0, *inner] for inner in itertools.combinations(range(1, units), count - 1)]


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 1), st.integers(0, 2)), min_size=1, max_size=9
    ),
    st.data(),
)
def test_the_search_is_exact(units: Any, data: Any) -> None:
    """Every stage has a weight, and among cuts that are nearly as good the fewest pass through modules."""
    count = data.draw(st.integers(1, len(units)))
    costs, weights, through = (list(column) for column in zip(*units))
    costs, through[0] = [float(cost) for cost in costs], 0
    ways = list_cuts(len(units), count)
    greatest = [find_greatest(costs, way) for way in ways]
    assert find_greatest(costs, balance(costs, count)) == min(greatest)
    cuts = WeightedCuts(costs, weights, through)
    allowed = [
        way for way in ways if all(sum(weights[a:b]) for a, b in zip(way, [*way[1:], len(units)]))
    ]
    best = cuts.find_best(count)
    if not allowed:
        assert best is None and cuts.find_least(count) == float("inf")
        return
    least = min(find_greatest(costs, way) for way in allowed)
    near = [way for way in allowed if find_greatest(costs, way) <= SLACK * least]
    assert cuts.find_least(count) == least and best in near
    assert sum(through[i] for i in best) == min(sum(through[i] for i in way) for way in near)


def sum_by_stage(costs: Callable[..., Any], starts: Sequence[int], units: int) -> List[float]:
    """Return the costs of the stages."""
    edges, count = [*starts, units], len(starts)
    return [
        float(costs(np.array([a]), np.array([b]))(count - s)[0])
        for s, (a, b) in enumerate(zip(edges, edges[1:]))
    ]


@pytest.mark.parametrize("limit", [1e9, 40.0, 12.0])
@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_the_cut_is_the_best_of_all(count: int, limit: float) -> None:
    """Stages have random work, transfers at both boundaries, and memory that grows with the number of later stages; of
    cuts with the same greatest cost the least sum of squares is taken."""
    rng = np.random.default_rng(count)
    for units in [count, 9, 10] * 4:
        work, stored = (np.cumsum([0.0, *rng.integers(1, most, units)]) for most in (9, 5))
        crossing = np.array([0.0, *rng.integers(0, 9, units - 1), 0.0])

        def compute_costs(first: Any, end: Any) -> Callable[[int], Any]:
            seconds = np.maximum(work[end] - work[first], 0) + crossing[first] + crossing[end]
            return lambda k: np.where(k * (stored[end] - stored[first]) <= limit, seconds, np.inf)

        ways = [sum_by_stage(compute_costs, way, units) for way in list_cuts(units, count)]
        least = min((max(way), sum(x * x for x in way)) for way in ways)
        starts = find_best_cut(np.diff(work), count, compute_costs)
        assert find_best_cut(np.diff(work), units + 1, compute_costs) is None
        if least[0] == np.inf:
            assert starts is None
            continue
        assert starts[0] == 0 and len(starts) == count
        ours = sum_by_stage(compute_costs, starts, units)
        assert max(ours) == least[0] and sum(x * x for x in ours) == pytest.approx(least[1])


# ---- FLOPs


def count_forward_flops(model: nn.Module, x: torch.Tensor, stages: Any = 1) -> List[float]:
    """Return the FLOPs of each stage's forward."""
    part = partition(model, x, stages)
    observed = observe_execution(model, x, counted=True)
    return list(make_footprint(model, part, observed).forward_flops)


@needs_flop_counter
def test_layers_with_fast_paths_in_evaluation_are_counted() -> None:
    b, n, w = 2, 5, 8
    layer = nn.TransformerEncoderLayer(w, 2, dim_feedforward=16, batch_first=True)
    expected = 2 * b * n * w * 4 * w + 4 * b * n * n * w + 2 * 2 * b * n * w * 16
    assert count_forward_flops(layer, torch.randn(b, n, w)) == [expected]
    recurrent = take_output(nn.LSTM(w, 4))
    assert count_forward_flops(recurrent, torch.randn(n, b, w)) == [2 * n * b * 4 * 4 * (w + 4)]


def test_linear_and_convolution_layers_have_the_same_count_by_formula(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch 2.0 counts by these formulas; flops.HOW states that they leave out attention."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5))
    expected = [2 * 2 * 4 * 36 * 27, 2 * 2 * 144 * 5]
    assert count_forward_flops(model, X, ["2"]) == expected
    for module in (flops, observation):
        monkeypatch.setattr(module, "FlopCounterMode", None)
    assert count_forward_flops(model, X, ["2"]) == expected
    assert ("left out" in flops.HOW) == (torch.__version__.startswith("2.0"))


def call_products(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute a layer of Hugging Face's GPT-2, a function call instead of modules."""
    h = torch.addmm(m.bias, x.flatten(0, -2), m.up)
    return x + torch.addmm(m.bias[:32], h, m.down).unflatten(0, x.shape[:-1])


@needs_flop_counter
@pytest.mark.parametrize("make, size, begins", [
    # story: two stages had 78 and 22 % of the work, since a layer that is a function call counted 2 FLOPs an output
    (lambda: Composed(call_products, up=nn.Parameter(torch.randn(32, 128) / 8), down=nn.Parameter(torch.randn(128, 32) / 8),
                      bias=nn.Parameter(torch.zeros(128))), 32, None),
    # story: all four layers came to stage 0, and the head alone to stage 1
    (lambda: nn.TransformerEncoderLayer(16, 2, 64, dropout=0.0, batch_first=True), 16, ["2"]),
])  # fmt: skip
def test_layers_before_a_head_are_balanced(make: Any, size: int, begins: Any) -> None:
    model = nn.Sequential(*(make() for _ in range(4)), nn.Linear(size, 10))
    x = torch.randn(2, 6, size)
    part = partition(model, x, 2)
    assert begins is None or part.begin_names() == begins
    footprint = make_footprint(model, part, observe_costs(model, x, lambda: model(x)))
    costs = np.add(footprint.forward_flops, footprint.backward_flops)
    assert costs.max() / costs.mean() < 1.06
