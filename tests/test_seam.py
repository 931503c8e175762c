"""Test what a caller may do between two calls of `Pipeline`: each act has plain PyTorch's weights, or
is refused by name. Acts are generated into walks; two ranks and xla are compared with the emulator."""

from __future__ import annotations

import copy
import io
import random
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ipu_pipe
from ipu_pipe.errors import BadInput
from tests.support.processes import run_in_group
from tests.support.runs import needs_processes

STEPS = 6
MICROBATCHES = 2
Weights = Dict[str, torch.Tensor]


class Scale(nn.Module):
    """Multiply by an attribute, by a number in a list and by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0
        self.factors = [1.0]
        self.register_buffer("gain", torch.ones(2, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor * self.factors[0] * self.gain[0]


class Scene(NamedTuple):
    """The objects that an act may touch; `pipe` is None in the plain loop. `box` is read by the loss."""

    model: nn.Sequential
    optimizer: torch.optim.Optimizer
    pipe: Optional[ipu_pipe.Pipeline]
    box: Dict[str, Any]


def make_scene(
    method: Optional[str], backend: str = "emulator", lr: Any = 0.05, **keys: Any
) -> Scene:
    """Return equal objects for each call; the second stage begins at the second linear layer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), Scale(), nn.Dropout(0.0), nn.BatchNorm1d(8),
        nn.Linear(8, 8), nn.Tanh(), Scale(), nn.Linear(8, 4),
    ).double()  # fmt: skip
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    box: Dict[str, Any] = {"weight": 1.0}
    pipe = None
    if method is not None:

        def compute_loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return box["weight"] * F.cross_entropy(output, y)

        pipe = ipu_pipe.Pipeline(
            model,
            compute_loss,
            optimizer,
            method,
            stages=["5"],
            microbatches=MICROBATCHES,
            backend=backend,
            **keys,
        )
    return Scene(model, optimizer, pipe, box)


# ---- the acts


def write_gradients(scene: Scene) -> None:
    """Leave gradients behind, as a learning-rate finder does."""
    if scene.pipe is not None:
        for p in scene.model.parameters():
            p.grad = torch.full_like(p, 7.0)


def clamp(scene: Scene) -> None:
    with torch.no_grad():
        for p in scene.model.parameters():
            p.clamp_(-0.2, 0.2)


def clamp_data(scene: Scene) -> None:
    for p in scene.model.parameters():
        p.data.clamp_(-0.2, 0.2)


def replace_data(scene: Scene) -> None:
    for p in scene.model.parameters():
        p.data = p.detach().clone() * 0.5


def load_own_weights(scene: Scene) -> None:
    scene.model.load_state_dict({n: 0.5 * t for n, t in scene.model.state_dict().items()})


def evaluate_in_evaluation_mode(scene: Scene) -> None:
    x, y = make_batch(100)
    scene.model.eval()
    if scene.pipe is not None:
        scene.pipe.evaluate([(x, y)])
    scene.model.train()


def hold_whole_model(scene: Scene) -> None:
    if scene.pipe is not None:
        with scene.pipe.whole_model(everywhere=True) as model:
            assert model is not None and not any(p.isnan().any() for p in model.parameters())


def clamp_in_whole_model(scene: Scene) -> None:
    if scene.pipe is None:
        clamp(scene)
        return
    with scene.pipe.whole_model(everywhere=True):
        clamp(scene)


def average_weights(scene: Scene) -> None:
    torch.optim.swa_utils.AveragedModel(scene.model).update_parameters(scene.model)


def scale_rate(scene: Scene) -> None:
    group = scene.optimizer.param_groups[0]
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].mul_(0.5)
    else:
        group["lr"] *= 0.5


def set_group(**settings: Any) -> Callable[[Scene], None]:
    """Return an act that changes settings of the optimizer's group."""
    return lambda scene: scene.optimizer.param_groups[0].update(settings)


def set_attribute(path: str, name: str, value: Any) -> Callable[[Scene], None]:
    """Return an act that sets an attribute of a module."""
    return lambda scene: setattr(scene.model.get_submodule(path), name, value)


def reset_weights(scene: Scene) -> None:
    torch.manual_seed(3)
    for module in scene.model:
        if isinstance(module, nn.Linear):
            module.reset_parameters()


def replace_module(scene: Scene) -> None:
    scene.model[6] = nn.ReLU()


def halve_output(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 0.5


ACTS: Dict[str, Callable[[Scene], Any]] = {
    "nothing": lambda scene: None,
    # values
    "attribute": set_attribute("2", "factor", 0.5),
    "attribute of the last stage": set_attribute("7", "factor", 0.5),
    "number in a list": lambda scene: scene.model[2].factors.__setitem__(0, 0.5),
    "dropout": set_attribute("3", "p", 1.0),
    "momentum of statistics": set_attribute("4", "momentum", 0.5),
    "number in the loss": lambda scene: scene.box.__setitem__("weight", 0.5),
    # modes
    "statistics frozen": lambda scene: scene.model[4].eval(),
    "evaluation": evaluate_in_evaluation_mode,
    # weights and buffers
    "clamp": clamp,
    "clamp data": clamp_data,
    "replace data": replace_data,
    "load weights": load_own_weights,
    "new weights": reset_weights,
    "buffer": lambda scene: scene.model[4].running_mean.fill_(0.5),
    "gain": lambda scene: scene.model[7].gain.mul_(0.5),
    "reset statistics": lambda scene: scene.model[4].reset_running_stats(),
    "clamp in whole_model": clamp_in_whole_model,
    # what is trained
    "freeze": lambda scene: scene.model[5].requires_grad_(False),
    "unfreeze": lambda scene: scene.model[0].requires_grad_(True),
    "replace a module": replace_module,
    # hooks
    "forward hook": lambda scene: scene.model[1].register_forward_hook(halve_output),
    "forward hook of the last stage": lambda s: s.model[6].register_forward_hook(halve_output),
    "gradient hook": lambda scene: scene.model[0].weight.register_hook(lambda g: g * 0.5),
    "hook of the optimizer": lambda scene: scene.optimizer.register_step_post_hook(
        lambda optimizer, args, kwargs: clamp_stepped(optimizer)
    ),
    # the optimizer
    "rate": scale_rate,
    "momentum": set_group(momentum=0.5),
    "weight decay": set_group(weight_decay=0.1),
    "clear state": lambda scene: scene.optimizer.state.clear(),
    "own state": lambda scene: scene.optimizer.load_state_dict(scene.optimizer.state_dict()),
    # gradients
    "zero_grad": lambda scene: scene.optimizer.zero_grad(),
    "model.zero_grad": lambda scene: scene.model.zero_grad(),
    "gradients left": write_gradients,
    # reads
    "state_dict": lambda scene: scene.model.state_dict(),
    "save": lambda scene: torch.save(scene.model.state_dict(), io.BytesIO()),
    "deepcopy": lambda scene: copy.deepcopy(scene.model),
    "average": average_weights,
    # calls
    "drain": lambda scene: scene.pipe and scene.pipe.drain(),
    "predict": lambda scene: scene.pipe and scene.pipe.predict(make_batch(100)[0]),
    "whole_model": hold_whole_model,
    "pipe.state_dict": lambda scene: scene.pipe and scene.pipe.state_dict(),
}


def clamp_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Clamp the weights that a step has written."""
    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.clamp_(-0.2, 0.2)


# ---- loops

# step -> the acts after it
Plan = Dict[int, List[str]]


def make_batch(k: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of update k."""
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(4 * MICROBATCHES, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 4, (4 * MICROBATCHES,), generator=generator)


def train_plainly(plan: Plan, **keys: Any) -> Weights:
    """Train by a plain loop with the acts of a plan. Return the weights and buffers."""
    scene = make_scene(None, **keys)
    for k in range(STEPS):
        scene.optimizer.zero_grad()
        x, y = make_batch(k)
        for part in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES)):
            loss = scene.box["weight"] * F.cross_entropy(scene.model(part[0]), part[1])
            (loss / MICROBATCHES).backward()
        scene.optimizer.step()
        for act in plan.get(k, []):
            ACTS[act](scene)
    return scene.model.state_dict()


class Refused(NamedTuple):
    """The line of a refused act."""

    line: str


def act_on_all_ranks(act: Callable[[Scene], Any], scene: Scene) -> None:
    """Do an act on every rank. Raise the error of one rank on all: a write to weights that are on
    another rank fails where they are not."""
    line = ""
    try:
        act(scene)
    except RuntimeError as error:
        line = str(error)
    lines = [line]
    if torch.distributed.is_initialized():
        lines = ["", ""]
        torch.distributed.all_gather_object(lines, line)
    if any(lines):
        raise RuntimeError(max(lines))


def train_by_pipeline(plan: Plan, method: str, reuses: bool = False, **keys: Any) -> Any:
    """Train by a pipeline with the acts of a plan. Return the weights and buffers, or `Refused` at
    the first act that is refused, by itself or at the next step.

    `reuses`: the caller overwrites the batch after its step.
    """
    scene = make_scene(method, **keys)
    pipe = scene.pipe
    assert pipe is not None
    try:
        for k in range(STEPS):
            x, y = make_batch(k)
            pipe.step(x, y)
            for act in plan.get(k, []):
                act_on_all_ranks(ACTS[act], scene)
            if reuses:
                x.fill_(9.0)
        pipe.close()
    except (RuntimeError, BadInput) as error:
        pipe.abort()
        # the third one is torch's, of weights that are elsewhere
        ours = (": was changed ", "model.state_dict(): ", "single memory location", "xla has no")
        if any(words in str(error) for words in ours):
            return Refused(str(error))
        raise
    return scene.model.state_dict()


def is_equal(first: Weights, second: Weights) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


# ---- the emulator


@pytest.mark.parametrize("act", ACTS)
def test_an_act_between_two_steps_has_plain_pytorchs_weights(act: str) -> None:
    plan = {2: [act]}
    assert is_equal(train_by_pipeline(plan, "gpipe"), train_plainly(plan))


@pytest.mark.parametrize("seed", range(60))
def test_walks_of_acts_have_plain_pytorchs_weights(seed: int) -> None:
    """Walks of one to four acts at drawn moments; a failure names the plan, whose acts are few."""
    draw = random.Random(seed)
    moments = sorted(draw.choices(range(STEPS - 1), k=draw.randint(1, 4)))
    plan: Plan = {}
    for moment in moments:
        plan.setdefault(moment, []).append(draw.choice(list(ACTS)))
    method = draw.choice(["gpipe", "pipedream_flush", "naive"])
    if method == "naive" or "hook of the optimizer" not in str(plan):
        weights = train_by_pipeline(plan, method)
        assert is_equal(weights, train_plainly(plan)), (method, plan)


@pytest.mark.parametrize("act", ACTS)
def test_with_updates_in_flight_an_act_is_refused_or_counts_from_the_next_batch(act: str) -> None:
    """What is taken over after a drain equals a new pipeline from that state with the act done."""
    weights = train_by_pipeline({2: [act]}, "pipedream")
    if isinstance(weights, Refused):
        assert "in flight: call pipe.drain()" in weights.line
        assert act in ("statistics frozen", "freeze", "unfreeze", "replace a module")
    drained = train_by_pipeline({2: ["drain", act]}, "pipedream")
    assert not isinstance(drained, Refused)


@pytest.mark.parametrize("act", ["unfreeze", "statistics frozen", "replace a module"])
@pytest.mark.parametrize("call", ["drain", "predict", "evaluation", "pipe.state_dict"])
def test_a_change_before_another_call_is_not_forgotten(act: str, call: str) -> None:
    plan = {2: [act, call]}
    assert is_equal(train_by_pipeline(plan, "gpipe"), train_plainly(plan))


def test_a_learning_rate_that_is_a_tensor_may_change_in_place() -> None:
    rate = torch.tensor(0.05, dtype=torch.float64)
    for method in ("gpipe", "pipedream"):
        changed, fixed = (
            train_by_pipeline({1: [act]}, method, lr=rate.clone()) for act in ("rate", "nothing")
        )
        by_number = train_by_pipeline({1: ["rate"]}, method, lr=0.05)
        assert not is_equal(changed, fixed)
        assert all(torch.allclose(changed[n], by_number[n], rtol=1e-12) for n in by_number)


def test_an_exception_of_the_loop_leaves_the_newest_weights() -> None:
    expected = make_scene("pipedream")
    assert expected.pipe is not None
    scene = make_scene("pipedream")
    for one in (expected, scene):
        for k in range(3):
            one.pipe.step(*make_batch(k))  # type: ignore[union-attr]
    with pytest.raises(KeyboardInterrupt):
        with scene.pipe:  # type: ignore[union-attr]
            raise KeyboardInterrupt
    with expected.pipe.whole_model() as model:
        assert is_equal(scene.model.state_dict(), model.state_dict())  # type: ignore[union-attr]


# ---- other backends against the emulator

METHODS = ("gpipe", "pipedream")
# where the emulator is right and the others must not differ in silence
MOMENTS: Sequence[Plan] = [{2: [act]} for act in ACTS]


def list_plans(acts: Sequence[str]) -> List[Tuple[str, Plan]]:
    return [(method, {2: [act]}) for act in acts for method in METHODS]


def compare_ranks(rank: int, folder: Path, acts: List[str]) -> None:
    for method, plan in list_plans(acts):
        weights = train_by_pipeline(plan, method, backend="distributed", deadline=60)
        torch.save((weights, method, plan), folder / f"{method}-{plan[2][0]}-{rank}.pt")


# what no rank refuses, in flight or not, and needs no refusal
HARMLESS = (
    "nothing", "evaluation", "rate", "momentum", "weight decay", "zero_grad", "model.zero_grad", "gradients left",
    "deepcopy", "drain", "predict", "whole_model", "pipe.state_dict", "clamp in whole_model", "own state",
)  # fmt: skip


@needs_processes
@pytest.mark.parametrize(
    "acts",
    [
        ["rate", "gradients left", "attribute", "number in the loss", "unfreeze", "state_dict"],
        pytest.param([a for a in ACTS if a not in ("replace a module",)], marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
def test_two_ranks_equal_the_emulator_or_refuse_by_name(acts: List[str], tmp_path: Path) -> None:
    run_in_group(2, compare_ranks, tmp_path, acts, seconds=900)
    for method, plan in list_plans(acts):
        expected = train_by_pipeline(plan, method)
        (act,) = plan[2]
        for rank in range(2):
            weights, *_ = torch.load(tmp_path / f"{method}-{act}-{rank}.pt", weights_only=False)
            if isinstance(weights, Refused):
                assert act not in HARMLESS, (rank, method, weights)
            elif not isinstance(expected, Refused):
                assert is_equal(weights, expected), (rank, method, act)


@pytest.mark.parametrize(
    "act",
    ["rate", "attribute", "number in the loss", "clamp data", "state_dict"]
    + [
        pytest.param(act, marks=pytest.mark.slow)
        for act in ACTS
        if act not in ("rate", "attribute", "number in the loss", "clamp data", "state_dict")
    ],
)
def test_xla_is_near_the_emulator_or_refuses_by_name(act: str) -> None:
    pytest.importorskip("jax")
    weights = train_by_pipeline({2: [act]}, "gpipe", backend="xla")
    if isinstance(weights, Refused):
        assert act not in HARMLESS, weights
        return
    expected = train_by_pipeline({2: [act]}, "gpipe")
    for name, value in expected.items():
        assert torch.allclose(weights[name], value, rtol=1e-11, atol=1e-12), (act, name)
