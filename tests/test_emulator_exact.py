"""The emulator's weights equal those of the literal replay, bit for bit: a table of methods, models, optimizers, features."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import pytest
import torch
from torch import nn

from ipu_pipe.backends.emulator.replay import Emulator
from ipu_pipe.errors import BadInput
from ipu_pipe.hardware.precision import MIXED, resolve_precision
from ipu_pipe.job.record import DTYPES
from ipu_pipe.model.precision import ModelPrecision
from ipu_pipe.model.stages import begin_stage, partition
from ipu_pipe.schedule.methods import METHODS, Method, Reads, resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.update.optimizer import replace_parameters
from tests.literal_replay import LiteralRules, LiteralStage, replay
from tests.slot_simulation import PLAYED
from tests.staged_models import (
    MODELS,
    TIED,
    TIES,
    draw_microbatches,
    join_stages,
    make_repeating_model,
)
from tests.support.emulating import make_emulator
from tests.support.models import Composed
from tests.support.pairs import cover_pairs
from tests.support.runs import assert_same

OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.2, momentum=0.9, weight_decay=1e-3),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.02, weight_decay=1e-2),
}
cross_entropy = nn.functional.cross_entropy
LOW = torch.bfloat16
autocast = functools.partial(torch.autocast, "cpu", LOW)


def train_on_emulator(
    model: nn.Module,
    method: Method,
    accumulate: int,
    data: Sequence[Any],
    make_optimizer: Any,
    drains: Sequence[int] = (),
    args: Any = {},
    switch: int = 0,
    weights: Optional[Sequence[float]] = None,
    numbers: Optional[ModelPrecision] = None,
    watch: Callable[[Emulator, Any], Any] = lambda emulator, result: None,
) -> Emulator:
    """Train `model`. `weights`: the loss weight of each microbatch; `numbers`: the precision of the
    model; `watch` is called after each update."""
    part = partition(model, data[0][0], one_stage=method.one_stage_reason)
    schedule = make_schedule(method, len(part), len(data), accumulate, drains, switch * accumulate)
    loss: Any = cross_entropy
    settings: Dict[str, Any] = {"switch": switch}
    make = make_optimizer
    if numbers is not None:
        make = lambda groups: make_optimizer(replace_parameters(groups, numbers.get_trained))  # noqa: E731
        loss, settings["masters"] = numbers.convert_loss(loss), numbers.masters
    table = VersionTable(schedule, method)
    emulator = make_emulator(model, part, table, data[0], make, loss, args, **settings)
    for start in range(0, len(data), accumulate):
        batch = slice(start, start + accumulate)
        watch(emulator, emulator.step(data[batch], None if weights is None else weights[batch]))
    emulator.close()
    return emulator


def train_literally(
    stages: List[nn.Module],
    method: Method,
    accumulate: int,
    data: Sequence[Any],
    make_optimizer: Any,
    drains: Sequence[int] = (),
    args: Mapping[str, Any] = {},
    switch: int = 0,
    ties: Mapping[int, Mapping[str, Tuple[int, str]]] = {},
    shares: Optional[Sequence[float]] = None,
    is_mixed: bool = False,
) -> List[LiteralStage]:
    """Train the stages by the literal replay. `ties`: shared weights by stage, as in `tests.staged_models.TIES`.

    `is_mixed`: where a backward reads other weights than its forward, passes read weights in bfloat16 and updates change
    float32 ones; BatchNorm keeps float32. Elsewhere each stage's forward and the loss run under autocast.
    """
    P = len(stages)
    schedule = make_schedule(method, P, len(data), accumulate, drains, switch * accumulate)
    is_low = is_mixed and reads_newer_weights(method)
    literal_stages: List[LiteralStage] = []
    for s, stage in enumerate(stages):
        rule = LiteralRules(args, method, P, s, accumulate, make_optimizer.keywords["lr"], switch)
        earlier = {
            name: (literal_stages[where], there) for name, (where, there) in ties.get(s, {}).items()
        }
        how: Dict[str, Any] = {}
        if is_low:
            how["reads"] = {
                f"{place}.{name}".strip("."): torch.float32 if is_norm(module) else LOW
                for place, module in stage.named_modules()
                for name, _ in module.named_parameters(recurse=False)
            }
        elif is_mixed:
            how["around"] = autocast
        literal_stages.append(LiteralStage(stage, make_optimizer, rule, earlier, **how))

    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not is_mixed:
            return cross_entropy(output, y)
        with autocast(enabled=not is_low):
            return cross_entropy(output.float() if is_low else output, y)

    delays: Any = None
    if method.delay is not None and method.delay.drawn:  # the draws are tested elsewhere
        delays = VersionTable(schedule, method).sampler(0, len(data))
    elif method.delay is not None:
        rows = method.delay.table or [[method.delay.greatest] * accumulate] * P
        delays = [[row[m % accumulate] for m in range(len(data))] for row in rows]
    replay(literal_stages, schedule, method, data, loss, drains, delays, shares)
    return literal_stages


def reads_newer_weights(method: Method) -> bool:
    return method.backward_reads is Reads.NEWEST and not method.flushes


def is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.BatchNorm2d)


def assert_equals_stages(model: nn.Module, stages: List[nn.Module]) -> None:
    """Check that a model has the state of these stages, bit for bit."""
    assert_same(model.state_dict(), join_stages(stages).state_dict())


def make_seeded_stages(name: str, dtype: torch.dtype = torch.float64) -> List[nn.Module]:
    """Make the stages of a model, with the same weights in each call."""
    torch.manual_seed(3)
    return [stage.to(dtype) for stage in {**MODELS, **TIED}[name]()]


def separate_replicas(stages: List[nn.Module], name: str) -> List[nn.Module]:
    """Replace each replica of a shared weight by a copy, and return the stages."""
    for s, ties in TIES.get(name, {}).items():
        for weight in ties:
            module, _, leaf = weight.rpartition(".")
            submodule = stages[s].get_submodule(module)
            setattr(submodule, leaf, nn.Parameter(getattr(submodule, leaf).detach().clone()))
    return stages


# what a row has besides: nothing, an empty pipeline twice, loss weights of which some are 0, or bfloat16_mixed
FEATURES = ("plain", "drains", "loss weights", "mixed")


def compare_with_literal_replay(
    name: str,
    args: Mapping[str, Any],
    model: str,
    make_optimizer: Any,
    accumulate: int,
    feature: str,
    switch: int = 0,
    tolerance: float = 0.0,
) -> None:
    """Train on the emulator and by the literal replay, and compare weights, buffers and the optimizer's state."""
    is_mixed = feature == "mixed"
    stages = make_seeded_stages(model, torch.float32 if is_mixed else torch.float64)
    if len(stages) % args.get("stages_per_device", 1):
        args = {**args, "stages_per_device": len(stages)}  # all on one device
    method = resolve_method(name, args)
    if method.forward_reads is Reads.DOUBLE_BUFFERED and accumulate < len(stages):
        accumulate += len(stages)
    data = draw_microbatches(accumulate * 9)
    twin = separate_replicas(copy.deepcopy(stages), model)
    unsplit = join_stages(stages)
    numbers = weights = shares = None
    if is_mixed:
        row = resolve_precision(MIXED, method)
        numbers = ModelPrecision(unsplit, row, DTYPES[row], torch.device("cpu"), is_given=False)
        data = [(x.float().to(numbers.inputs), y) for x, y in data]
    if feature == "loss weights":
        # the labels of the first microbatch cannot be read, so its loss must not be
        data[0] = data[0][0], torch.full_like(data[0][1], 99)
        weights = [float(m * 7 % 5) for m in range(len(data))]
        starts = range(0, len(data), accumulate)
        totals = [sum(weights[start : start + accumulate]) for start in starts]
        shares = [weight / (totals[m // accumulate] or 1.0) for m, weight in enumerate(weights)]
    drains = [accumulate * 4, accumulate * 5] if feature == "drains" else []
    both = method, accumulate, data, make_optimizer, drains, args, switch
    emulator = train_on_emulator(unsplit, *both, weights, numbers)
    replayed = train_literally(twin, *both, TIES.get(model, {}), shares, is_mixed)

    def assert_near(ours: torch.Tensor, theirs: torch.Tensor, key: str) -> None:
        """Check equality to the last bit, unless the row has a tolerance."""
        near = functools.partial(torch.allclose, rtol=tolerance, atol=tolerance)
        same = near if tolerance else torch.equal
        assert ours.dtype == theirs.dtype and same(ours, theirs), key

    literal = [(stage, p) for stage in replayed for p in stage.parameters.values()]
    named = dict(unsplit.named_parameters())
    assert len(named) == len(literal)
    for (key, weight), (stage, theirs) in zip(named.items(), literal):
        ours = numbers.get_trained(weight) if numbers else weight
        assert_near(ours, theirs, key)
        if numbers:
            assert torch.equal(weight, ours.to(weight.dtype)), key
            module = unsplit.get_submodule(key.rpartition(".")[0])
            keeps = not reads_newer_weights(method) or is_norm(module)
            assert weight.dtype == (torch.float32 if keeps else LOW), key
        state = emulator.work.rules.optimizer.state[ours]
        for entry, value in stage.optimizer.state[theirs].items():
            assert_near(state[entry], value, f"{key}/{entry}")
    for s, stage in enumerate(replayed):
        for key, buffer in stage.module.named_buffers():
            assert_near(unsplit.get_buffer(f"{s}.{key}"), buffer, key)


# other methods: spectrain in test_rules, local ones in test_local, the rest in test_asynchrony
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
WHOLE = [name for name, method in PLAYED.items() if name != "spectrain" and method.is_pipeline]
SHARING = [name for name, method in PLAYED.items() if method.one_version]
VARIANTS: List[Tuple[str, Dict[str, Any]]] = [(name, {}) for name in WHOLE] + [
    (name, args) for name, variants in CHANGED.items() for args in variants
]
ATTRIBUTES = {
    # a switch has the name of its argument
    "-".join(
        map(str, [name, *(key if value is True else value for key, value in args.items()), *others])
    ): ((name, args), *others)
    for (name, args), *others in [
        *itertools.product(VARIANTS, MODELS, OPTIMIZERS, (1, 3, 5), FEATURES),
        # autocast adds up the gradients of a shared weight's uses in bfloat16, as in plain PyTorch
        *itertools.product(
            [(name, {}) for name in SHARING], TIED, OPTIMIZERS, (1, 5), FEATURES[:3]
        ),
    ]
}


@pytest.mark.parametrize("case", cover_pairs(ATTRIBUTES))
def test_weights_equal_those_of_the_literal_replay(case: str) -> None:
    (name, args), model, optimizer, accumulate, feature = ATTRIBUTES[case]
    compare_with_literal_replay(name, args, model, OPTIMIZERS[optimizer], accumulate, feature)


@pytest.mark.parametrize(
    "name", [name for name, method in METHODS.items() if method.order and name != "rows"]
)
def test_orders_by_device_train_as_gpipe(name: str) -> None:
    """These methods flush, and every stage adds the gradients of a batch in the order of the microbatches."""
    model, gpipe = join_stages(make_seeded_stages("mlp")), join_stages(make_seeded_stages("mlp"))
    data = draw_microbatches(2 * 8)
    args = {} if METHODS[name].order.fixed else {"stages_per_device": 2}  # type: ignore[union-attr]
    train_on_emulator(model, resolve_method(name, args), 8, data, OPTIMIZERS["adamw"])
    train_on_emulator(gpipe, METHODS["gpipe"], 8, data, OPTIMIZERS["adamw"])
    assert_same(model.state_dict(), gpipe.state_dict())


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


DTYPES_OF_MODELS = (torch.float32, torch.float64, LOW)
PLAIN = {
    f"{method}-{model}-{dtype}": (method, model, dtype)
    for method, model, dtype in itertools.product(
        ("naive", "gpipe", "pipedream_flush"), (*MODELS, *TIED, "twice"), DTYPES_OF_MODELS
    )
}


@pytest.mark.parametrize("case", cover_pairs(PLAIN))
def test_synchronous_methods_are_plain_training(case: str) -> None:
    """Weights, and the reported losses, a Python float being float64; also where stages share a weight or a module."""
    method, model, dtype = PLAIN[case]
    unsplit = (
        make_repeating_model().to(dtype)
        if model == "twice"
        else join_stages(make_seeded_stages(model, dtype))
    )
    data, twin = draw_microbatches(12, dtype=dtype), copy.deepcopy(unsplit)
    losses: List[float] = []
    train_on_emulator(
        unsplit, resolve_method(method), 4, data, OPTIMIZERS["sgd"],
        watch=lambda emulator, result: losses.append(result.loss),
    )  # fmt: skip
    expected = train_in_plain_loop(twin, data, 4, OPTIMIZERS["sgd"])
    assert_same(unsplit.state_dict(), twin.state_dict())
    assert losses == [sum(expected[k : k + 4]) / 4 for k in (0, 4, 8)]


def test_two_buffered_weights_are_delayed_by_one_update() -> None:
    """w_{t+1} = w_t - lr grad f(w_{t-1}), with w_{-1} = w_0 (PipeDream-2BW, section 3.1)."""
    data, twin = draw_microbatches(4 * 8), join_stages(make_seeded_stages("mlp"))
    unsplit = join_stages(make_seeded_stages("mlp"))
    make_optimizer = functools.partial(torch.optim.SGD, lr=0.3)
    train_on_emulator(unsplit, resolve_method("pipedream_2bw"), 4, data, make_optimizer)
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
    P, updates = 5, 10
    data, chosen = draw_microbatches(5 * updates), resolve_method(method)
    forward = VersionTable(make_schedule(chosen, P, 5 * updates, 5), chosen).forward(0, 5 * updates)
    counts: List[List[int]] = []

    def watch(emulator: Emulator, result: Any) -> None:
        stash = getattr(emulator.weights, "_stash", [()] * P)
        counts.append([len(versions) for versions in stash])

    model = join_stages(make_seeded_stages("residual"))
    train_on_emulator(model, chosen, 5, data, OPTIMIZERS["sgd"], watch=watch)
    for k, of_stages in enumerate(counts):
        for s, count in enumerate(of_stages):
            assert count <= len({int(v) for v in forward[s, 5 * k + 5 :] if v <= k})
            assert most is None or count <= most


IN_PLACE: Dict[str, Any] = {
    "leaky_relu": nn.LeakyReLU(inplace=True),
    "add_": lambda x: x.view(-1, 2).add_(1).view(-1, 4),
    "__setitem__": lambda x: x.__setitem__((slice(None), 0), 0.0),
}


@pytest.mark.parametrize("name", list(IN_PLACE))
def test_recomputation_names_an_operation_that_writes_into_an_earlier_segment(name: str) -> None:
    """Story: only names such as mul_ were recognized; others ended in torch's error about a view of _StraightThrough."""
    method = resolve_method("pipemare", {"recompute": {"segments": 2}})
    data = [(torch.ones(2, 4), torch.tensor([0, 1]))]

    def forward(m: Any, x: torch.Tensor) -> Any:
        changed = IN_PLACE[name](x)
        return m.linear(x if changed is None else changed)

    second = begin_stage(Composed(forward, linear=nn.Linear(4, 4)))
    with pytest.raises(BadInput, match=f"^method_args.recompute: {name}: "):
        train_on_emulator(
            nn.Sequential(nn.Linear(4, 4), second), method, 1, data, OPTIMIZERS["sgd"]
        )
