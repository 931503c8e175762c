"""Test what a caller may do between two calls of `Pipeline`: each act has the weights of plain PyTorch,
or of the literal replay that does the act itself, or is refused by name (`tests/support/acts.py`)."""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, List, Sequence, Tuple
from unittest import mock

import pytest
import torch
from torch import nn

import ipu_pipe
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.pipeline import seam
from ipu_pipe.pipeline.absent import AbsentWeights
from ipu_pipe.pipeline.gradients import OwnGradients
from tests.support import rank_group
from tests.support.acts import (
    ACTS,
    CUTS,
    FLUSHING,
    KINDS,
    SPIKES,
    STALE,
    Outcome,
    Walk,
    compare_walk,
    draw_kind,
    draw_single,
    draw_walk,
    follow_remedies,
    is_equal,
    is_near,
    judge,
    make_batch,
    make_scene,
    train_by_pipeline,
    train_plainly,
)
from tests.support.models import Composed
from tests.support.rank_group import RankGroups
from tests.support.runs import needs_processes
from tests.support.slow import mark_slow

groups = rank_group.groups
pytest_plugins = ["poptorch_double"]  # the fixture `poptorch`

# seeds of walks that draw every method and act
WALKS = 200

# ---- the emulator


@pytest.mark.parametrize("act", ACTS)
def test_an_act_between_two_steps_has_plain_pytorchs_weights(act: str) -> None:
    walk = Walk("gpipe", {2: [act]})
    assert is_equal(train_by_pipeline(walk), train_plainly(walk))


def assert_equal(walk: Walk) -> None:
    outcome = judge(walk)
    assert outcome.kind == "equal", outcome


@pytest.mark.parametrize("seed", mark_slow(range(WALKS), range(30).__contains__))
def test_walks_of_acts_have_the_weights_of_the_literal_replay(seed: int) -> None:
    assert_equal(draw_walk(seed))


@pytest.mark.slow
@pytest.mark.parametrize("act", ACTS)
def test_each_act_has_the_weights_of_the_literal_replay(act: str) -> None:
    for seed in range(4):
        assert_equal(draw_single(act, seed))


LOCAL = {"replicas": 2, "local_steps": 2}
# seeds of a walk of each kind
OF_KIND = 40


@pytest.mark.parametrize("seed", mark_slow(range(OF_KIND), range(4).__contains__))
@pytest.mark.parametrize("kind", KINDS)
def test_walks_with_copies_of_weights_or_another_optimizer(kind: str, seed: int) -> None:
    """Plain loops of each replica, or the literal replay, with masters of rounded weights or an optimizer that
    keeps something of its own."""
    assert_equal(draw_kind(kind, seed))


# what walks once found, or seldom draw
STORIES = {
    # methods that overwrite weights wrote into the tensor that a parameter had at the first step
    "another tensor": Walk("pipemare", {2: ["replace data"]}),
    # a hook that clamps the weights ran before spike compensation had made the step's other part
    "clamps": Walk("pipelined_backprop", {1: ["hook of the optimizer"]}, SPIKES, microbatches=1),
    **{
        f"in flight, {method}": Walk(
            method,
            {
                0: ["rate"],
                1: ["gradients left"],
                2: ["drain", "momentum"],
                3: ["drain"],
                4: ["rate"],
            },
            begins=CUTS[-1],
            microbatches=1,
            steps=8,
        )
        for method in ("pipedream", "pipemare")
    },
    # a call that ends a round averaged what one replica had with what the other one had not
    "ends a round": Walk("local_sgd", {4: ["clamp", "predict"]}, LOCAL, microbatches=1),
    # a gradient of before the first step had the dtype of before
    "gradients": Walk("pipemare", {-1: ["gradients left"]}, has_masters=True),
    # a weight that was frozen for a while began again with an empty state
    "trains again": Walk("gpipe", {1: ["freeze"], 3: ["pipe.state_dict", "train again"]}),
    **{
        f"{act} before {call}": Walk("gpipe", {2: [act, call]})
        for act, call in [
            ("unfreeze", "drain"),
            ("unfreeze", "pipe.state_dict"),
            ("statistics frozen", "evaluation"),
            ("statistics frozen", "predict"),
            ("replace a module", "predict"),
            ("replace a module", "pipe.state_dict"),
        ]
    },
}


@pytest.mark.parametrize("story", STORIES)
def test_a_story_has_the_weights_of_the_literal_replay(story: str) -> None:
    assert_equal(STORIES[story])


@pytest.mark.parametrize("method", ["gpipe", "pipedream"])
def test_a_learning_rate_that_is_a_tensor_may_change_in_place(method: str) -> None:
    walk = Walk(method, {1: ["rate"]})
    trained = train_by_pipeline(walk, lr=torch.tensor(0.05, dtype=torch.float64))
    assert is_near(trained, train_by_pipeline(walk), 1e-12)


def test_an_exception_of_the_loop_leaves_the_newest_weights() -> None:
    expected, scene = (make_scene(Walk("pipedream", {})) for _ in range(2))
    for one in (expected, scene):
        for k in range(3):
            one.pipe.step(*make_batch(k))
    with pytest.raises(KeyboardInterrupt), scene.pipe:
        raise KeyboardInterrupt
    with pytest.raises(RunFault, match="closed"):
        scene.pipe.drain()
    with expected.pipe.whole_model() as model:
        assert is_equal(scene.model.state_dict(), model.state_dict())


class Failing:
    """A number in the loss that cannot be read."""

    def __mul__(self, other: Any) -> Any:
        raise ArithmeticError("the loss fails")


@pytest.mark.parametrize("method", ["gpipe", "pipedream", "pipemare"])
def test_an_exception_in_a_pass_leaves_the_newest_weights(method: str) -> None:
    """Story: until `close` the model had the weights that the pass had read."""
    scene = make_scene(Walk(method, {}))
    newest: Dict[int, List[torch.Tensor]] = {}
    scene.pipe.on_update(
        lambda _, stage, weights: newest.update({stage: [w.detach().clone() for w in weights]})
    )
    with pytest.raises(Exception, match="the loss fails"):
        for k in range(6):
            scene.box["weight"] = Failing() if k == 4 else 1.0
            scene.pipe.step(*make_batch(k))
    trained = [p for p in scene.model.parameters() if p.requires_grad]
    assert all(map(torch.equal, trained, [w for s in sorted(newest) for w in newest[s]]))


@pytest.mark.parametrize(
    "backend, method, args, setting, line",
    [
        ("emulator", "pipelined_backprop", SPIKES, "maximize", "defined on plain momentum"),
        ("emulator", "pipelined_backprop", SPIKES, "nesterov", "defined on plain momentum"),
        ("xla", "gpipe", {}, "maximize", "xla does not support it"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused_before_the_step(
    backend: str, method: str, args: Dict[str, Any], setting: str, line: str
) -> None:
    """Story: the emulator took over `maximize` under a rule that is defined without it, and xla refused it
    in the middle of an update, after which the pipeline was broken."""
    if backend == "xla":
        pytest.importorskip("jax")
    walk = Walk(method, {}, args, microbatches=1)
    scene, plain = make_scene(walk, backend), make_scene(walk, backend)
    for k in range(4):
        if k == 2:
            scene.optimizer.param_groups[0][setting] = True
            with pytest.raises(BadInput, match=f"optimizer.{setting}: .*{line}"):
                scene.pipe.step(*make_batch(k))
            scene.optimizer.param_groups[0][setting] = False
        for one in (scene, plain):
            one.pipe.step(*make_batch(k))
    for one in (scene, plain):
        one.pipe.close()
    assert is_equal(scene.model.state_dict(), plain.model.state_dict())


def test_the_callers_gradients_come_back_after_each_call() -> None:
    scene = make_scene(Walk("pipedream", {}))
    for k in range(4):
        gradients = {p: torch.full_like(p, float(k)) for p in scene.model.parameters()}
        for p, gradient in gradients.items():
            p.grad = gradient
        scene.pipe.step(*make_batch(k))
        for p, gradient in gradients.items():
            assert p.grad is gradient and bool((gradient == k).all())


def test_gradients_in_flight_wait_between_two_calls() -> None:
    weight, theirs, gathered = nn.Parameter(torch.ones(1)), torch.ones(1), torch.ones(1)
    own = OwnGradients([weight], [weight])
    weight.grad = theirs
    with own.lend():
        weight.grad = gathered
    assert weight.grad is theirs
    with own.lend():
        assert weight.grad is gathered


# ---- other backends

METHODS = ("gpipe", "pipedream")
# what no backend refuses, in flight or not
HARMLESS = (
    "nothing", "evaluation", "rate", "momentum", "weight decay", "zero_grad", "model.zero_grad", "gradients left",
    "deepcopy", "drain", "predict", "whole_model", "pipe.state_dict", "pipe.load_state_dict", "clamp in whole_model",
    "own state",
)  # fmt: skip


def list_walks(acts: Sequence[str]) -> List[Walk]:
    return [Walk(method, {2: [act]}) for act in acts for method in METHODS]


def train_walks_on_rank(rank: int, walks: List[Walk], drops: bool) -> List[Any]:
    """Train walks on this rank. Return what became of each."""
    train = functools.partial(train_by_pipeline, backend="distributed")
    return [follow_remedies(walk, train, drops) for walk in walks]


def compare_ranks(groups: RankGroups, walks: List[Walk], drops: bool = False) -> List[Outcome]:
    """Train walks on two ranks. Return what became of each, on both ranks."""
    ranks = groups.call(2, train_walks_on_rank, walks, drops, seconds=1800)
    return [compare_walk(weights, walk) for results in ranks for weights, walk in results]


@needs_processes
@pytest.mark.parametrize(
    "acts",
    [
        ["rate", "gradients left", "attribute", "number in the loss", "unfreeze", "state_dict"],
        pytest.param(list(ACTS)[::2] + ["train again"], marks=pytest.mark.slow),
    ],
    ids=["some", "half"],
)
def test_two_ranks_have_the_weights_of_the_literal_replay_or_refuse(
    acts: List[str], groups: RankGroups
) -> None:
    for outcome in compare_ranks(groups, list_walks(acts)):
        assert outcome.kind in ("equal", "refused"), outcome
        assert outcome.kind == "equal" or not set(outcome.walk.plan[2]) <= set(HARMLESS), outcome


@needs_processes
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", *KINDS])
def test_walks_on_two_ranks_have_the_weights_of_the_literal_replay(
    kind: str, groups: RankGroups
) -> None:
    # one stage a process, because a split backward takes no more
    walks = [draw_kind(kind, s, CUTS[:1]) if kind else draw_walk(s, CUTS[:1]) for s in range(20)]
    if kind == "replicas":
        walks = [walk._replace(begins=()) for walk in walks]
    for outcome in compare_ranks(groups, walks, drops=True):
        assert outcome.kind == "equal", outcome


TOLERANCES = {"xla": 1e-11, "poptorch": 1e-4}


def judge_on(backend: str, walk: Walk) -> Outcome:
    """Train a walk on a backend, and compare up to its rounding."""
    return compare_walk(train_by_pipeline(walk, backend=backend), walk, TOLERANCES[backend])


@pytest.mark.parametrize(
    "act",
    mark_slow(
        ACTS, ("rate", "attribute", "number in the loss", "clamp data", "state_dict").__contains__
    ),
)
def test_xla_is_near_plain_pytorch_or_refuses_by_name(act: str) -> None:
    pytest.importorskip("jax")
    outcome = judge_on("xla", Walk("gpipe", {2: [act]}))
    assert outcome.kind == "equal" or (outcome.kind == "refused" and act not in HARMLESS), outcome


# ---- IPUs, on the double of PopTorch: nothing here ran on an IPU

# PopTorch has compiled the optimizer's numbers, and takes no weights that are changed in `whole_model`
REFUSED_ON_IPUS = ("momentum", "weight decay", "clamp in whole_model")


@pytest.mark.parametrize("act", ACTS)
def test_ipus_are_near_plain_pytorch_or_refuse_by_name(poptorch: Any, act: str) -> None:
    outcome = judge_on("poptorch", Walk("gpipe", {2: [act]}, microbatches=4))
    may_refuse = act not in HARMLESS or act in REFUSED_ON_IPUS
    assert outcome.kind == "equal" or (outcome.kind == "refused" and may_refuse), outcome


# a kind of change -> an act that a backend would miss if it did not look at it; a replaced module is seen by its values and
# weights, too
MISSED = {
    "mode": "statistics frozen",
    "value": "attribute",
    "buffer": "buffer",
    "requires_grad": "unfreeze",
    "hook": "forward hook",
    "optimizer": "clear state",
    "loss": "number in the loss",
}
ON_IPUS = ("value", "buffer", "requires_grad", "optimizer")
LOOKED_AT = [("xla", kind) for kind in MISSED] + [("poptorch", kind) for kind in ON_IPUS]


@pytest.mark.slow
@pytest.mark.parametrize("backend, kind", LOOKED_AT)
def test_walks_notice_a_kind_of_change_that_is_not_looked_at(
    poptorch: Any, backend: str, kind: str
) -> None:
    pytest.importorskip("jax")
    row = {**seam.TAKEN_OVER[backend], kind: seam.LIVE}
    with mock.patch.dict(seam.TAKEN_OVER, {backend: row}):  # type: ignore[arg-type]
        walk = Walk("gpipe", {2: [MISSED[kind]]}, microbatches=4)
        assert judge_on(backend, walk).kind == "differs"


def test_weights_on_ipus_are_not_numbers_between_two_steps(poptorch: Any) -> None:
    """Story: `model.state_dict()` in the loop saved the weights of the start, without a word."""
    scene = make_scene(Walk("gpipe", {}, microbatches=4), "poptorch")
    x, y = make_batch(0)
    scene.pipe.step(x.float(), y)
    assert all(bool(p.isnan().all()) for p in scene.model.parameters())
    with pytest.raises(RuntimeError, match=r"^model.state_dict\(\): the newest weights are not"):
        scene.model.state_dict()
    with scene.pipe.whole_model() as model:
        assert all(bool(p.isfinite().all()) for p in model.parameters())
    scene.pipe.close()
    assert all(bool(p.isfinite().all()) for p in scene.model.parameters())


def test_the_state_of_a_model_inside_the_pipelines_module_is_refused() -> None:
    """Story: callbacks of Trainer, whose loss has the model, saved NaN."""
    net = nn.Linear(2, 2)
    absent = AbsentWeights(nn.Sequential(net, nn.ReLU()))
    absent.arm(hides_memory=False)
    with pytest.raises(RuntimeError, match="newest weights are not all"):
        net.state_dict()
    absent.end()
    net.state_dict()


def make_loop_pipeline(net: nn.Module, method: str, **keys: Any) -> Any:
    optimizer = torch.optim.SGD(net.double().parameters(), lr=0.1, momentum=0.9)
    return ipu_pipe.Pipeline(net, nn.functional.cross_entropy, optimizer, method, **keys)


def make_scaled(method: str, scale: float = 1.0) -> Tuple[Any, Any]:
    torch.manual_seed(0)
    # the model's own forward multiplies by a number between layers
    net: Any = Composed(
        lambda m, x: m.c(torch.tanh(m.b(torch.tanh(m.a(x)) * m.scale))),
        a=nn.Linear(8, 8),
        b=nn.Linear(8, 8),
        c=nn.Linear(8, 3),
    )
    net.scale = scale
    return net, make_loop_pipeline(net, method, stages=["b"], microbatches=1)


@pytest.mark.parametrize("method", ["local_greedy", "local_overlapping", "last_layers"])
def test_what_a_forward_between_blocks_reads_is_taken_over(method: str) -> None:
    """Story: blocks run recorded pieces, so that numbers and hooks of a module that is cut had no effect, and a replaced
    module got the weights of the old one."""
    net, pipe = make_scaled(method)
    batch = torch.randn(4, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    pipe.step(*batch)
    state = pipe.state_dict()
    net.scale = 0.5
    other, again = make_scaled(method, scale=0.5)
    again.load_state_dict(state)
    for one in (pipe, again):
        for _ in range(2):
            one.step(*batch)
        one.drain()
    assert is_equal(net.state_dict(), other.state_dict())
    first, net.b = net.b, nn.Linear(8, 8).double()
    with pytest.raises(RuntimeError, match="^step: model.b: was changed .* make a new pipeline"):
        pipe.step(*batch)
    net.b = first
    other.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(BadInput, match="has hooks, but stages begin inside it"):
        again.step(*batch)


def test_dropout_that_begins_later_draws_by_the_pipelines_seed() -> None:
    """Story: a dropout of 0 draws nothing, so its later draws were the caller's generator's, and a recomputation had another
    mask."""
    ends, state = [], None
    y = torch.tensor([0, 1, 2, 0])
    for begins in (0.0, 0.5):
        torch.manual_seed(0)
        drop = nn.Dropout(begins)
        net = nn.Sequential(nn.Linear(8, 8), drop, nn.Linear(8, 3))
        pipe = make_loop_pipeline(net, "gpipe", stages=["2"], microbatches=2, seed=5)
        if state is not None:
            pipe.load_state_dict(state)
        else:
            pipe.step(torch.randn(4, 8).double(), y)
            state = pipe.state_dict()
            drop.p = 0.5
        torch.manual_seed(int(10 * begins))
        for _ in range(2):
            pipe.step(torch.ones(4, 8).double(), y)
        pipe.close()
        ends.append(net.state_dict())
    assert is_equal(*ends)


def test_a_hook_of_a_weight_acts_on_both_blocks_that_train_it() -> None:
    """Story: with overlapping blocks, a weight whose gradient a hook set to 0 was trained by the other block."""
    net, pipe = make_scaled("local_overlapping")
    before = net.a.weight.clone()
    net.a.weight.register_hook(torch.zeros_like)
    batch = torch.randn(4, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    for _ in range(2):
        pipe.step(*batch)
    assert torch.equal(net.a.weight, before)


def test_walks_are_drawn_with_every_method_and_act() -> None:
    walks = [draw_walk(seed) for seed in range(WALKS)]
    assert {act for walk in walks for acts in walk.plan.values() for act in acts} == set(ACTS)
    drawn = {(walk.method, str(walk.args)) for walk in walks}
    assert drawn == {(name, str(args)) for name, args in STALE} | {(m, "{}") for m in FLUSHING}


# ---- what is looked at

factor = torch.ones(1)


def multiply(output: torch.Tensor, y: torch.Tensor, **keys: Any) -> torch.Tensor:
    return output.sum() * factor * keys["factor"]


def look_at(model: nn.Module, loss: Any = multiply) -> Callable[[], List[str]]:
    """Return a function that lists where a model or a loss has changed since."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    looked = seam.Seam("poptorch", seam.Objects(model, optimizer, loss))
    return lambda: [change.where for change in looked.list_changes()]


def test_an_attribute_that_becomes_true_and_a_mode_are_seen() -> None:
    """1 and True are equal, and not the same in every forward."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model.flag = 1
    list_changes = look_at(model)
    model.flag = True
    model[1].eval()
    assert set(list_changes()) == {"model.flag", "1.training"}


def test_values_of_a_loss_that_have_one_name_are_all_seen() -> None:
    """Story: a change of a bound argument was not seen beside a global of its name."""
    bound = torch.ones(1)
    list_changes = look_at(nn.Linear(2, 2), functools.partial(multiply, factor=bound))
    bound.mul_(2)
    assert list_changes() == ["loss.factor"]
    factor.mul_(2)
    assert list_changes() == ["loss.factor", "loss.factor (2)"]


# ---- changes in `whole_model`


def test_checksums_of_a_model_see_complex_buffers_and_the_order_of_rows() -> None:
    """Story: two sums told whether weights had changed: of real tensors alone, whatever the order."""
    model = nn.Linear(2, 2)
    model.register_buffer("phase", torch.tensor([1j]))
    before = seam.compute_checksums(model)
    model.weight.data.copy_(model.weight.data.flip(0))
    model.phase.data.mul_(2)
    after = seam.compute_checksums(model)
    assert [name for name in before if before[name] != after[name]] == ["weight", "phase"]
