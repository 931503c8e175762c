"""What a caller may do between two calls of `Pipeline`, as a table of acts; walks of acts are drawn from it.

    a walk      a method, a cut, N, an optimizer, copies of the weights and a plan: step -> the acts after it
    trained     by a pipeline, which takes each act over or refuses it in a line
    expected    from the literal replay, which does each act itself (plain PyTorch for methods that flush)

A refused act is made again after the drain that the line asks for, so refusals hide nothing.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import random
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Sequence,
    Tuple,
)

import torch
from torch import nn
from torch.nn import functional as F

import ipu_pipe
from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.methods import resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.update.rules import select_rules
from tests.literal_replay import ActedStage, LiteralRules, average_nets, replay

SAMPLES = 12
Weights = Dict[str, torch.Tensor]
# step -> the acts after it
Plan = Dict[int, List[str]]


class Walk(NamedTuple):
    """A pipeline, and what its caller does after which step; `begins`: the modules at which the later stages begin.

    `replicas`: of pipelines whose gradients are averaged. `has_masters`: passes read bfloat16, updates change float32.
    """

    method: str
    plan: Plan
    args: Mapping[str, Any] = {}
    begins: Tuple[str, ...] = ("5",)
    microbatches: int = 2
    steps: int = 6
    optimizer: str = "momentum"
    replicas: int = 1
    has_masters: bool = False

    @property
    def copies(self) -> int:
        """How many models a plain loop has: replicas, or those of LocalSGD."""
        return int(self.args["replicas"]) if self.method == "local_sgd" else self.replicas


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
    pipe: Any
    box: Dict[str, Any]

    def get_loss(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return the loss with the numbers of now."""
        weight = self.box["weight"]
        return lambda output, y: weight * F.cross_entropy(output, y)


class Counting(torch.optim.Optimizer):
    """SGD whose rate falls with a count of its own, in its groups or under a key of its state."""

    def __init__(self, parameters: Any, lr: float, in_state: bool = False) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0})
        self.in_state = in_state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        shared = self.state["count"] if self.in_state else {}
        shared["k"] = shared.get("k", 0) + 1
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                # asks as many optimizers do
                entries = self.state.get(p)
                if p.grad is not None and entries is None:
                    entries = self.state[p] = {"sum": torch.zeros_like(p)}
                if p.grad is not None:
                    entries["sum"] += p.grad  # type: ignore[index]
                    count = shared["k"] if self.in_state else group["k"]
                    p.sub_(entries["sum"], alpha=group["lr"] / count)  # type: ignore[index]


OPTIMIZERS: Dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "counts in groups": Counting,
    "counts in its state": functools.partial(Counting, in_state=True),
}


BACKEND_KEYS: Dict[str, Dict[str, Any]] = {
    "distributed": {"deadline": 60},
    "poptorch": {"backend_args": {"ipu": {"device_iterations": 1}}},
}


def get_dtype(walk: Walk, backend: str = "emulator") -> torch.dtype:
    """Return the widest dtype of a walk on a backend."""
    return torch.float32 if backend == "poptorch" or walk.has_masters else torch.float64


def make_scene(
    walk: Walk, backend: str = "emulator", lr: Any = 0.05, is_plain: bool = False
) -> Scene:
    """Return equal objects for each call, with the pipeline of a walk, unless they are for a plain loop."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), Scale(), nn.Dropout(0.0), nn.BatchNorm1d(8),
        nn.Linear(8, 8), nn.Tanh(), Scale(), nn.Linear(8, 4),
    ).to(get_dtype(walk, backend))  # fmt: skip
    model[0].bias.requires_grad_(False)
    optimizer = OPTIMIZERS[walk.optimizer](model.parameters(), lr=lr)
    box: Dict[str, Any] = {"weight": 1.0}
    pipe = None
    if not is_plain:

        def compute_loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return box["weight"] * F.cross_entropy(output, y)

        pipe = ipu_pipe.Pipeline(
            model,
            compute_loss,
            optimizer,
            walk.method,
            stages=list(walk.begins) or 1,
            microbatches=None if walk.method == "local_sgd" else walk.microbatches,
            replicas=walk.replicas,
            method_args=walk.args,
            backend=backend,
            **BACKEND_KEYS.get(backend, {}),
            **({"precision": "bfloat16_mixed"} if walk.has_masters else {}),
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
            assert not any(p.isnan().any() for p in model.parameters())


def load_own_state(scene: Scene) -> None:
    if scene.pipe is not None:
        # every rank its own part
        scene.pipe.load_state_dict(
            scene.pipe.state_dict(sharded=torch.distributed.is_initialized())
        )


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


def replace_layer(scene: Scene) -> None:
    """Replace a layer by one that the optimizer does not know, which so is not trained."""
    torch.manual_seed(4)
    scene.model[5] = nn.Linear(8, 8).to(scene.model[8].weight.dtype)


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
    "train again": lambda scene: scene.model[5].requires_grad_(True),
    "replace a module": replace_module,
    "replace a layer": replace_layer,
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
    "maximize": set_group(maximize=True),
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
    "pipe.load_state_dict": load_own_state,
}


def clamp_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Clamp the weights that a step has written."""
    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.clamp_(-0.2, 0.2)


# acts that write weights; in `whole_model` these are not rounded
WRITES = ("clamp", "clamp data", "replace data", "load weights", "new weights", "replace a layer")
# calls that run the pipeline empty
DRAINS = (
    "drain",
    "predict",
    "evaluation",
    "whole_model",
    "clamp in whole_model",
    "pipe.state_dict",
    "pipe.load_state_dict",
)


# ---- a walk in plain PyTorch, by the literal replay, and by a pipeline


def make_batch(k: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of update k."""
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 4, (SAMPLES,), generator=generator)


def divide(k: int, walk: Walk) -> List[List[Tuple[torch.Tensor, torch.Tensor]]]:
    """Return the microbatches of update k, those of each copy."""
    N = walk.microbatches
    pairs = zip(*(t.chunk(walk.copies * N) for t in make_batch(k)))
    all_pairs = [(x.to(get_dtype(walk)), y) for x, y in pairs]
    return [all_pairs[r * N : (r + 1) * N] for r in range(walk.copies)]


def train_plainly(walk: Walk) -> Weights:
    """Train by a plain loop, one for each copy, with the acts of a walk. Return the weights and buffers of the first."""
    scenes = [make_scene(walk, is_plain=True) for _ in range(walk.copies)]
    models, optimizers = [s.model for s in scenes], [s.optimizer for s in scenes]
    is_local = walk.method == "local_sgd"
    since = 0
    for act in walk.plan.get(-1, []):
        for scene in scenes:
            ACTS[act](scene)
    for k in range(walk.steps):
        for scene, pairs in zip(scenes, divide(k, walk)):
            scene.optimizer.zero_grad()
            for x, y in pairs:
                (scene.get_loss()(scene.model(x), y) / (len(pairs) * walk.replicas)).backward()
        if walk.replicas > 1:
            add_gradients(models)
        for optimizer in optimizers:
            optimizer.step()
        since += 1
        acts = [*walk.plan.get(k, []), *["drain"] * (k == walk.steps - 1)]
        if is_local and since == walk.args["local_steps"]:
            average_nets(models, optimizers)
            since = 0
        before = describe_structure(models[0])
        for act in acts:
            # a drain ends a round of LocalSGD
            if is_local and since and act in DRAINS:
                average_nets(models, optimizers)
                since = 0
            for scene in scenes:
                ACTS[act](scene)
        if describe_structure(models[0]) != before or (
            not is_local and "pipe.load_state_dict" in acts
        ):
            share_buffers(models)
    return scenes[0].model.state_dict()


def describe_structure(model: nn.Module) -> Any:
    """Return what a pipeline is built again for, if it changes."""
    modules = [(module, module.training) for module in model.modules()]
    return modules, [p.requires_grad for p in model.parameters()]


def share_buffers(models: Sequence[nn.Module]) -> None:
    """Give all models the first one's buffers, as a checkpoint does."""
    for model in models[1:]:
        for buffer, first in zip(model.buffers(), models[0].buffers()):
            buffer.copy_(first)


def add_gradients(models: Sequence[nn.Module]) -> None:
    """Give each model the sum of all gradients, in the order of the models."""
    for parameters in zip(*(model.parameters() for model in models)):
        gradients = [p.grad for p in parameters if p.grad is not None]
        for p in parameters if gradients else ():
            p.grad = functools.reduce(torch.add, gradients).clone()


def get_low_dtype(module: nn.Module, tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype that passes read of a weight or buffer of a module, where updates change float32."""
    is_kept = isinstance(module, nn.BatchNorm1d) or not tensor.is_floating_point()
    return tensor.dtype if is_kept else torch.bfloat16


def round_buffers(model: nn.Module) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(get_low_dtype(module, buffer))


@contextlib.contextmanager
def round_weights(model: nn.Module) -> Iterator[None]:
    """Let a caller write the weights that passes read. One that keeps its value keeps its exact one."""
    exact = {p: p.data for p in model.parameters()}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            p.data = p.data.to(get_low_dtype(module, p))
    yield
    for p in model.parameters():
        value = p.data.float()
        kept = exact.get(p, value)
        p.data = torch.where(p.data == kept.to(p.dtype), kept, value)


def replay_walk(walk: Walk) -> Weights:
    """Train by the literal replay with the acts of a walk. Return the weights and buffers."""
    method = resolve_method(walk.method, walk.args)
    N = walk.microbatches
    ends = [0, *map(int, walk.begins), len(make_scene(walk, is_plain=True).model)]
    parts = [slice(*pair) for pair in zip(ends, ends[1:])]

    def act(k: int, scene: Scene) -> None:
        for name in walk.plan[k]:
            # before the first step weights are as the caller made them
            rounds = walk.has_masters and k >= 0 and name in WRITES
            with round_weights(scene.model) if rounds else contextlib.nullcontext():
                ACTS[name](scene)

    def make_objects() -> Scene:
        scene = make_scene(walk, is_plain=True)
        if walk.has_masters:
            round_buffers(scene.model)
        return scene

    stages = [
        ActedStage(
            make_objects,
            part,
            act,
            walk.plan.__contains__,
            LiteralRules(walk.args, method, len(parts), s, N, 0.05),
            get_low_dtype if walk.has_masters else lambda module, p: p.dtype,
        )
        for s, part in enumerate(parts)
    ]
    drains = [
        (k + 1) * N for k in sorted(walk.plan) if any(name in DRAINS for name in walk.plan[k])
    ]
    schedule = make_schedule(method, len(parts), walk.steps * N, N, drains)
    # a label carries the number of its batch, whose loss it gets
    batches = [(x, (k, y)) for k in range(walk.steps) for x, y in divide(k, walk)[0]]
    if walk.has_masters:
        batches = [(x.bfloat16(), pair) for x, pair in batches]
    losses = stages[-1].losses

    def compute_loss(output: torch.Tensor, pair: Any) -> torch.Tensor:
        return losses[pair[0]](output.float() if walk.has_masters else output, pair[1])

    replay(stages, schedule, method, batches, compute_loss, drains)  # type: ignore[arg-type]
    trained = {name: tensor for stage in stages for name, tensor in stage.export().items()}
    return widen(trained, walk)


def widen(weights: Weights, walk: Walk) -> Weights:
    """Return weights and buffers in the dtype of a walk: beside masters there are bfloat16 buffers."""
    return {n: t.to(get_dtype(walk)) if t.is_floating_point() else t for n, t in weights.items()}


class Refused(NamedTuple):
    """The line of a refused act, and the step after which it was made."""

    line: str
    after: int


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


def train_by_pipeline(walk: Walk, **keys: Any) -> Any:
    """Train by a pipeline with the acts of a walk. Return the weights and buffers, or `Refused` at
    the first act that is refused, by itself or at the next step. The caller overwrites each batch after its step.
    """
    scene = make_scene(walk, **keys)
    pipe, after = scene.pipe, -1
    try:
        for act in walk.plan.get(-1, []):
            act_on_all_ranks(ACTS[act], scene)
        for k in range(walk.steps):
            x, y = make_batch(k)
            x = x.to(get_dtype(walk, keys.get("backend", "")))
            if keys.get("backend") == "distributed":
                # each pipeline gets its own part
                x, y = (t.chunk(walk.replicas)[pipe.replica] for t in (x, y))
            pipe.step(x, y)
            after = k
            for act in walk.plan.get(k, []):
                act_on_all_ranks(ACTS[act], scene)
            x.fill_(9.0)
        if walk.has_masters:
            # the model has its masters inside this context alone
            with pipe.whole_model(everywhere=True) as model:
                masters = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        pipe.close()
    except (RuntimeError, BadInput) as error:
        pipe.abort()
        # the third one is torch's, of weights that are elsewhere
        ours = (
            ": was changed ",
            "were changed, which the IPUs",
            "model.state_dict(): ",
            "single memory location",
            "xla has no",
            "xla does not support it",
            "PopTorch compiled it",
        )
        if any(words in str(error) for words in ours):
            return Refused(str(error), after)
        raise
    return widen(masters if walk.has_masters else scene.model.state_dict(), walk)


def is_equal(first: Weights, second: Weights) -> bool:
    """Return whether weights and buffers are the same to the last bit."""
    return is_near(first, second, 0.0)


def is_near(first: Weights, second: Weights, tolerance: float) -> bool:
    """Return whether weights and buffers are the same up to rounding."""
    return first.keys() == second.keys() and all(
        torch.allclose(first[name], second[name], rtol=tolerance, atol=tolerance) for name in first
    )


# ---- drawing walks, and judging them

FLUSHING = ("naive", "gpipe", "pipedream_flush", "zb_h1")
SPIKES: Mapping[str, Any] = {"spike_compensation": {"scale": 1.0}}
PREDICTION: Mapping[str, Any] = {"weight_prediction": {"form": "velocity", "scale": 1.0}}
T1: Mapping[str, Any] = {"t1": {"anneal_updates": 5}}
T2: Mapping[str, Any] = {"t2": {"decay": 0.5}}
STALE: Sequence[Tuple[str, Mapping[str, Any]]] = (
    ("pipedream", {}),
    ("pipedream", {"stash": False}),
    ("pipedream_2bw", {}),
    ("pipemare", {}),
    ("pipemare", T2),
    ("pipemare", {**T1, **T2}),
    ("pipemare", {"recompute": {"segments": 2}}),
    ("pipelined_backprop", {}),
    ("pipelined_backprop", SPIKES),
    ("pipelined_backprop", PREDICTION),
    ("pipelined_backprop", {**SPIKES, **PREDICTION}),
    ("spectrain", {}),
)
CUTS: Sequence[Tuple[str, ...]] = (("5",), ("2", "5"), ("2", "5", "8"))


def draw_pipeline(draw: random.Random, cuts: Sequence[Tuple[str, ...]] = CUTS) -> Walk:
    """Draw a method, a cut and N, without acts; a quarter of the methods flush."""
    begins = draw.choice(cuts)
    if draw.random() < 0.25:
        method, args = draw.choice(FLUSHING), {}
    else:
        method, args = draw.choice(STALE)  # type: ignore[assignment]
    # 2BW needs as many microbatches as stages, a split backward has them by default
    counts = [1, 2, 4]
    if method in ("pipedream_2bw", "zb_h1"):
        counts = [n for n in (2, 3, 4, 6) if n % (len(begins) + 1) == 0]
    return Walk(method, {}, args, begins, draw.choice(counts), steps=8)


def has_rules(walk: Walk) -> bool:
    """Return whether rules act in a walk, some of which are defined without maximize, and refuse it."""
    return bool(select_rules(walk.args, resolve_method(walk.method, walk.args)))


def draw_walk(seed: int, cuts: Sequence[Tuple[str, ...]] = CUTS) -> Walk:
    """Draw a pipeline and one to four acts at drawn moments, half of them right after a drain."""
    draw = random.Random(seed)
    walk = draw_pipeline(draw, cuts)
    plan: Plan = {}
    # -1: before the first step
    for moment in sorted(draw.choices(range(-1, walk.steps - 1), k=draw.randint(1, 4))):
        before = ["drain"] if moment >= 0 and draw.random() < 0.5 else []
        act = draw.choice(list(ACTS))
        if moment < 0 and act in DRAINS:
            act = "nothing"
        act = "momentum" if act == "maximize" and has_rules(walk) else act
        plan.setdefault(moment, []).extend([*before, act])
    return walk._replace(plan=plan)


def draw_single(act: str, seed: int, cuts: Sequence[Tuple[str, ...]] = CUTS) -> Walk:
    """Draw a pipeline whose caller does one act at a drawn moment, in half of the seeds right after a drain."""
    draw = random.Random(f"{act} {seed}")
    walk = draw_pipeline(draw, cuts)
    while act == "maximize" and has_rules(walk):
        walk = draw_pipeline(draw, cuts)
    before = ["drain"] if draw.random() < 0.5 else []
    return walk._replace(plan={draw.randrange(1, walk.steps - 2): [*before, act]})


# methods whose passes read bfloat16 beside masters
ROUNDED = ("pipemare", "pipelined_backprop")
# what a walk has copies of, or an optimizer's own state
KINDS = ("masters", "replicas", "local_sgd", *[name for name in OPTIMIZERS if name != "momentum"])


def draw_kind(kind: str, seed: int, cuts: Sequence[Tuple[str, ...]] = CUTS) -> Walk:
    """Draw a walk of a kind of `KINDS`."""
    draw = random.Random(f"{kind} {seed}")
    walk = draw_walk(seed, cuts)
    # a write through `data` is not noticed, and would reach one copy alone
    plan = {
        k: ["clamp" if one == "clamp data" else one for one in acts]
        for k, acts in walk.plan.items()
    }
    if kind == "masters":
        # the replay adds the two terms of spike compensation in another order, and a last bit may round to another bfloat16
        method, rules = draw.choice(
            [row for row in STALE if row[0] in ROUNDED and not SPIKES.keys() & row[1].keys()]
        )
        return walk._replace(plan=plan, method=method, args=rules, has_masters=True)
    if kind == "replicas":
        N = draw.choice([1, 2, 3])
        return walk._replace(method=draw.choice(FLUSHING[:3]), args={}, microbatches=N, replicas=2)
    if kind == "local_sgd":
        args = {"replicas": 2, "local_steps": draw.choice([1, 2, 3])}
        return walk._replace(plan=plan, method=kind, args=args, microbatches=1)
    # rules know momentum
    method = draw.choice(["gpipe", "pipedream", "pipemare"])
    return walk._replace(method=method, args={}, optimizer=kind)


def compute_expected(walk: Walk) -> Weights:
    """Return the weights that a walk must have."""
    if walk.method == "local_sgd" or resolve_method(walk.method, walk.args).flushes:
        return train_plainly(walk)
    return replay_walk(walk)


class Outcome(NamedTuple):
    """What became of a walk: "equal", "differs", "refused" or "failed"; the line of a refusal or an
    error; the walk as it was trained, with the drains that refusals asked for."""

    kind: str
    line: str
    walk: Walk


Train = Callable[[Walk], Any]


def follow_remedies(walk: Walk, train: Train, drops: bool = False) -> Tuple[Any, Walk]:
    """Train a walk; where an act is refused while updates are in flight, drain before it and train
    again. Return the weights or `Refused`, and the walk that was trained.

    `drops`: leave out the acts after a step of which one is refused whatever is in flight.
    """
    while True:
        weights = train(walk)
        if not isinstance(weights, Refused):
            return weights, walk
        acts = walk.plan[weights.after]
        if "call pipe.drain() before" in weights.line:
            assert acts[0] != "drain", (walk, weights)
            acts = ["drain", *acts]
        elif drops:
            acts = []
        else:
            return weights, walk
        walk = walk._replace(plan={**walk.plan, weights.after: acts})


def judge(walk: Walk, train: Train = train_by_pipeline) -> Outcome:
    """Train a walk, and compare it with what it must be."""
    try:
        weights, walk = follow_remedies(walk, train)
    except Exception as error:
        return Outcome("failed", f"{type(error).__name__}: {error}", walk)
    return compare_walk(weights, walk)


def compare_walk(weights: Any, walk: Walk, tolerance: float = 0.0) -> Outcome:
    """Compare the weights of a walk with what they must be."""
    if isinstance(weights, Refused):
        return Outcome("refused", weights.line, walk)
    # the literal replay adds the two terms of spike compensation in another order
    tolerance = max(tolerance, 1e-12 if "spike_compensation" in walk.args else 0.0)
    is_right = is_near(weights, compute_expected(walk), tolerance)
    return Outcome("equal" if is_right else "differs", "", walk)
