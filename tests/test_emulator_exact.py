"""The emulator's weights equal those of the literal replay, bit for bit, for every method, model and optimizer."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import pytest
import torch
from torch import nn

from ipu_pipe.backends.emulator.replay import Emulator
from ipu_pipe.errors import BadInput
from ipu_pipe.model.stages import begin_stage, partition
from ipu_pipe.replay.work import Work
from ipu_pipe.schedule.methods import METHODS, Method, Reads, resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.update.apply import UpdateRules, choose_rules
from ipu_pipe.update.optimizer import make_groups
from tests.literal_replay import LiteralRules, LiteralStage, replay
from tests.slot_simulation import PLAYED
from tests.staged_models import MODELS, draw_microbatches, join_stages
from tests.support.pairs import cover_pairs
from tests.support.runs import assert_same

OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.2, momentum=0.9, weight_decay=1e-3),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.02, weight_decay=1e-2),
}
cross_entropy = nn.functional.cross_entropy


def make_emulator(
    model: nn.Module,
    method: Method,
    schedule: Any,
    optimizer: Any,
    example: Any,
    args: Any = {},
    switch: int = 0,
) -> Emulator:
    part = partition(model, example[0], one_stage=method.one_stage_reason)
    table = VersionTable(schedule, method)
    rate = optimizer.param_groups[0]["lr"]
    rules = UpdateRules(
        choose_rules(args, method, table.rule_lag(), schedule.accumulate),
        optimizer,
        lambda k: rate,
        switch,
    )
    return Emulator(Work(cross_entropy, table, rules), model, part, example)


def train_on_emulator(
    model: nn.Module,
    method: Method,
    accumulate: int,
    data: Sequence[Any],
    make_optimizer: Any,
    drains: Sequence[int] = (),
    args: Any = {},
    switch: int = 0,
    losses: Optional[List[Optional[float]]] = None,
    weights: Optional[Sequence[float]] = None,
) -> Emulator:
    """Train `model` and append the loss of each update to `losses`. `weights`: the loss weight of each microbatch."""
    part = partition(model, data[0][0], one_stage=method.one_stage_reason)
    schedule = make_schedule(method, len(part), len(data), accumulate, drains, switch * accumulate)
    optimizer = make_optimizer(make_groups(model, part))
    emulator = make_emulator(model, method, schedule, optimizer, data[0], args, switch)
    for start in range(0, len(data), accumulate):
        batch = slice(start, start + accumulate)
        result = emulator.step(data[batch], None if weights is None else weights[batch])
        if losses is not None:
            losses.append(result.loss)
    emulator.close()
    return emulator


def train_literally(
    stages: List[nn.Module],
    method: Method,
    accumulate: int,
    data: Sequence[Any],
    make_optimizer: Any,
    drains: Sequence[int] = (),
    args: Any = None,
    switch: int = 0,
    ties: Mapping[int, Mapping[str, Tuple[int, str]]] = {},
    shares: Optional[Sequence[float]] = None,
) -> List[LiteralStage]:
    """Train the stages by the literal replay. `ties`: shared weights by stage, as in `tests.staged_models.TIES`."""
    P = len(stages)
    schedule = make_schedule(method, P, len(data), accumulate, drains, switch * accumulate)
    rules: List[Optional[LiteralRules]] = [None] * P
    if args is not None:
        lr = make_optimizer.keywords["lr"]
        rules = [LiteralRules(args, method, P, s, accumulate, lr, switch) for s in range(P)]
    literal_stages: List[LiteralStage] = []
    for s, (stage, rule) in enumerate(zip(stages, rules)):
        earlier = {
            name: (literal_stages[where], there) for name, (where, there) in ties.get(s, {}).items()
        }
        literal_stages.append(LiteralStage(stage, make_optimizer, rule, earlier))
    delays = None
    if method.delay is not None:
        table = VersionTable(schedule, method)
        delays = np.full((P, len(data)), method.delay.greatest)
        if method.delay.table is not None:
            delays = np.array(
                [[row[m % accumulate] for m in range(len(data))] for row in method.delay.table]
            )
        if method.delay.drawn:  # the draws are tested elsewhere
            delays = table.sampler(0, len(data))
    replay(literal_stages, schedule, method, data, cross_entropy, drains, delays, shares)
    return literal_stages


def assert_equals_stages(model: nn.Module, stages: List[nn.Module]) -> None:
    """Check that a model has the state of these stages, bit for bit."""
    assert_same(model.state_dict(), join_stages(stages).state_dict())


def make_seeded_stages(name: str, dtype: torch.dtype = torch.float64) -> List[nn.Module]:
    """Make the stages of a model, with the same weights in each call."""
    torch.manual_seed(3)
    return [stage.to(dtype) for stage in MODELS[name]()]


# other methods: spectrain in test_rules, local ones in test_local, the rest in test_asynchrony
WHOLE = [name for name, method in PLAYED.items() if name != "spectrain" and method.is_pipeline]
CHANGED: Dict[str, List[Dict[str, Any]]] = {
    "pipemare": [{"stash": True}, {"schedule": "1f1b"}],
    "pipelined_backprop": [
        {"stash": True},
        {"turn": 1},
        {"split_backward": True},
        {"stages_per_device": 2},
    ],
    "pipedream": [
        {"stash": False},
        {"schedule": "dataflow"},
        {"schedule": "1f1b_capped"},
        {"split_backward": True},
        {"split_backward": True, "activation_limit": 2},
        {"stages_per_device": 2},
        {"stages_per_device": 2, "split_backward": True},
    ],
}
VARIANTS = [(name, {}) for name in WHOLE] + [
    (name, args) for name, variants in CHANGED.items() for args in variants
]


ATTRIBUTES = {
    "-".join(map(str, [name, *args.values(), model, optimizer, accumulate])): (
        (name, args), model, optimizer, accumulate
    )
    for (name, args), model, optimizer, accumulate in itertools.product(
        VARIANTS, MODELS, OPTIMIZERS, (1, 3, 5)
    )
}  # fmt: skip


@pytest.mark.parametrize("name", cover_pairs(ATTRIBUTES))
def test_weights_equal_those_of_the_literal_replay(name: str) -> None:
    (method, args), model, optimizer, accumulate = ATTRIBUTES[name]
    stages = make_seeded_stages(model)
    if len(stages) % args.get("stages_per_device", 1):
        args = {**args, "stages_per_device": len(stages)}  # all on one device
    chosen = resolve_method(method, args)
    if chosen.forward_reads is Reads.DOUBLE_BUFFERED and accumulate < len(stages):
        accumulate += len(stages)
    data = draw_microbatches(accumulate * 9)
    twin = copy.deepcopy(stages)
    unsplit = join_stages(stages)
    emulator = train_on_emulator(unsplit, chosen, accumulate, data, OPTIMIZERS[optimizer])
    literal_stages = train_literally(twin, chosen, accumulate, data, OPTIMIZERS[optimizer])
    assert_equals_stages(unsplit, twin)
    ours = list(unsplit.parameters())
    theirs = [p for stage in literal_stages for p in stage.module.parameters()]
    states = {
        id(p): stage.optimizer.state[p]
        for stage in literal_stages
        if stage.optimizer
        for p in stage.module.parameters()
    }
    for p, q in zip(ours, theirs):
        for entry, value in emulator.work.rules.stages[0].state[p].items():
            assert torch.equal(value, states[id(q)][entry]), entry


@pytest.mark.parametrize(
    "name", [name for name, method in METHODS.items() if method.order and name != "rows"]
)
def test_orders_by_device_train_as_gpipe(name: str) -> None:
    """These methods flush, and every stage adds the gradients of a batch in the order of the microbatches."""
    model, gpipe = join_stages(make_seeded_stages("mlp")), join_stages(make_seeded_stages("mlp"))
    data = draw_microbatches(3 * 8)
    args = {} if METHODS[name].order.fixed else {"stages_per_device": 2}  # type: ignore[union-attr]
    train_on_emulator(model, resolve_method(name, args), 8, data, OPTIMIZERS["adamw"])
    train_on_emulator(gpipe, METHODS["gpipe"], 8, data, OPTIMIZERS["adamw"])
    assert_same(model.state_dict(), gpipe.state_dict())


@pytest.mark.parametrize("method", ["pipemare", "pipedream", "pipedream_2bw", "pipelined_backprop"])
def test_drains_empty_the_pipeline_as_in_the_literal_replay(method: str) -> None:
    data = draw_microbatches(5 * 12)
    stages, twin = make_seeded_stages("residual"), make_seeded_stages("residual")
    unsplit = join_stages(stages)
    chosen = resolve_method(method)
    train_on_emulator(unsplit, chosen, 5, data, OPTIMIZERS["sgd"], drains=[20, 25])
    train_literally(twin, chosen, 5, data, OPTIMIZERS["sgd"], drains=[20, 25])
    assert_equals_stages(unsplit, twin)


def test_methods_differ_so_that_equality_means_something() -> None:
    weights_by_method = {}
    for method, args in VARIANTS:
        stages = make_seeded_stages("mlp")
        train_on_emulator(
            join_stages(stages),
            resolve_method(method, args),
            5,
            draw_microbatches(40),
            OPTIMIZERS["sgd"],
        )
        weights_by_method[(method, str(args))] = torch.cat(
            [p.detach().flatten() for s in stages for p in s.parameters()]
        )
    assert (
        len(
            {
                tuple(weights_by_method[method, "{}"].tolist())
                for method in ("naive", "gpipe", "pipedream_flush")
            }
        )
        == 1
    )
    assert len({tuple(weights.tolist()) for weights in weights_by_method.values()}) >= 6


def train_in_plain_loop(
    model: nn.Module, data: Sequence[Any], accumulate: int, make_optimizer: Any
) -> List[float]:
    """Train a model without a pipeline; return the loss of each microbatch."""
    optimizer = make_optimizer(model.parameters())
    losses = []
    for m, (x, y) in enumerate(data):
        loss = cross_entropy(model(x), y)
        (loss / accumulate).backward()
        losses.append(float(loss.detach()))
        if (m + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("method", ["naive", "gpipe", "pipedream_flush"])
def test_synchronous_methods_are_plain_training(
    method: str, model: str, dtype: torch.dtype
) -> None:
    data = draw_microbatches(24, dtype=dtype)
    stages, twin = make_seeded_stages(model, dtype), join_stages(make_seeded_stages(model, dtype))
    unsplit = join_stages(stages)
    losses: List[float] = []
    train_on_emulator(unsplit, resolve_method(method), 4, data, OPTIMIZERS["sgd"], losses=losses)
    expected = train_in_plain_loop(twin, data, 4, OPTIMIZERS["sgd"])
    assert_equals_stages(unsplit, list(twin))
    for k, loss in enumerate(losses):  # a Python float is float64
        a, b, c, d = expected[4 * k : 4 * k + 4]
        assert loss == (((a + b) + c) + d) / 4


@pytest.mark.parametrize("method", WHOLE)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_one_stage_is_plain_training(method: str, accumulate: int) -> None:
    data = draw_microbatches(24)
    twin, unsplit = (
        join_stages(make_seeded_stages("convolution")),
        nn.Sequential(nn.Sequential(*make_seeded_stages("convolution"))),
    )
    train_on_emulator(unsplit, resolve_method(method), accumulate, data, OPTIMIZERS["adamw"])
    train_in_plain_loop(twin, data, accumulate, OPTIMIZERS["adamw"])
    assert_equals_stages(unsplit[0], list(twin))


def test_two_buffered_weights_are_delayed_by_one_update() -> None:
    """w_{t+1} = w_t - lr grad f(w_{t-1}), with w_{-1} = w_0 (PipeDream-2BW, section 3.1)."""
    data = draw_microbatches(4 * 8)
    stages, twin = make_seeded_stages("mlp"), join_stages(make_seeded_stages("mlp"))
    unsplit = join_stages(stages)
    train_on_emulator(
        unsplit,
        resolve_method("pipedream_2bw"),
        4,
        data,
        functools.partial(torch.optim.SGD, lr=0.3),
    )
    now = [p.detach().clone() for p in twin.parameters()]
    before = [w.clone() for w in now]
    for start in range(0, len(data), 4):
        for p, w in zip(twin.parameters(), before):
            p.data.copy_(w)
        for x, y in data[start : start + 4]:
            (cross_entropy(twin(x), y) / 4).backward()
        before = now
        now = [w.add(p.grad, alpha=-0.3) for w, p in zip(now, twin.parameters())]  # type: ignore[arg-type]
        twin.zero_grad()
    for p, w in zip(unsplit.parameters(), now):
        assert torch.equal(p.data, w)


@pytest.mark.parametrize(
    "method, most", [("pipemare", None), ("pipedream", None), ("pipedream_2bw", 1), ("gpipe", 0)]
)
def test_memory_has_only_versions_that_are_still_to_be_read(
    method: str, most: Optional[int]
) -> None:
    chosen, data = resolve_method(method), draw_microbatches(5 * 10)
    unsplit = join_stages(make_seeded_stages("residual"))
    part = partition(unsplit, data[0][0])
    schedule = make_schedule(chosen, len(part), len(data), 5)
    table = VersionTable(schedule, chosen)
    optimizer = OPTIMIZERS["sgd"](make_groups(unsplit, part))
    emulator = make_emulator(unsplit, chosen, schedule, optimizer, data[0])
    forward = table.forward(0, len(data))
    for k in range(10):
        emulator.step(data[5 * k : 5 * k + 5])
        counts = [
            len(versions) for versions in getattr(emulator.weights, "_stash", [()] * len(part))
        ]
        for s, count in enumerate(counts):
            still_read = {int(v) for v in forward[s, 5 * k + 5 :] if v <= k}
            assert count <= len(still_read)
            assert most is None or count <= most
    emulator.close()


class ChangeInPlace(nn.Module):
    """A layer whose first operation, `change`, writes into its input."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change, self.linear = change, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed = self.change(x)
        return self.linear(x if changed is None else changed)  # type: ignore[no-any-return]


IN_PLACE = {
    "leaky_relu": nn.LeakyReLU(inplace=True),
    "mul_": lambda x: x.mul_(2),
    "add_": lambda x: x.view(-1, 2).add_(1).view(-1, 4),
    "__setitem__": lambda x: x.__setitem__((slice(None), 0), 0.0),
}


@pytest.mark.parametrize("name", list(IN_PLACE))
def test_recomputation_names_an_operation_that_writes_into_an_earlier_segment(name: str) -> None:
    """Story: only names such as mul_ were recognized; others ended in torch's error about a view of _StraightThrough."""
    method = resolve_method("pipemare", {"recompute": {"segments": 2}})
    data = [(torch.ones(2, 4), torch.tensor([0, 1]))]

    def train_with_change(change: Any) -> None:
        model = nn.Sequential(nn.Linear(4, 4), ChangeInPlace(change))
        begin_stage(model[1])
        train_on_emulator(model, method, 1, data, OPTIMIZERS["sgd"])

    train_with_change(nn.LeakyReLU())
    with pytest.raises(BadInput, match=f"^method_args.recompute: {name}: "):
        train_with_change(IN_PLACE[name])
