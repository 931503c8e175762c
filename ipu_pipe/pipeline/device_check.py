"""Check the device that a run names, before anything trains on it.

A pipeline writes weights behind autograd's back (`ipu_pipe.replay.weights`), and must find on every
device what it finds on the CPU:

    swapping      p.data = other        a forward after it reads `other`; a backward reads the
                                        weights of its forward, which were put back before it
    overwriting   p.data.copy_(other)   a forward and a backward after it read `other`, that of
                                        an earlier forward too

So it does not matter whether a kernel saves the parameter or the tensor that it had: on the CPU a
linear layer saves the tensor, and a convolution the parameter.

`try_device` tries both on single operations, in the order in which a process runs passes, and
trains a tiny model of four stages on the emulator. What they must give is computed on the CPU with
new tensors for every pass, where nothing is ever written. The operations have whole numbers, which
any arithmetic adds up exactly.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Iterator, List, NamedTuple, Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ipu_pipe.backends.emulator.replay import Emulator
from ipu_pipe.backends.processes.update import keep_version_counters
from ipu_pipe.config.backend_facts import BACKEND_FACTS
from ipu_pipe.errors import BadInput, summarize
from ipu_pipe.model.devices import DeviceKind, fork_random, get_kind, list_accelerators
from ipu_pipe.model.stages import partition
from ipu_pipe.refusals import Argument, name_key
from ipu_pipe.replay.replays import ReplayPlan, Views
from ipu_pipe.replay.weights import OverwritingStore, SwappingStore
from ipu_pipe.replay.work import Work
from ipu_pipe.schedule.methods import resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.text import find_alias
from ipu_pipe.update.apply import PLAIN, UpdateRules, choose_rules
from ipu_pipe.update.optimizer import make_groups

# of whole numbers up to 100, in float32
MOST_DIFFERENCE = 1e-5
# of trained weights, as a share of how far they moved, in float32
MOST_SHARE = 1e-4
Weights = List[torch.Tensor]


def require_device(name: str) -> DeviceKind:
    """Return the kind of device that `backend.device` names. Raise `BadInput` if torch has none
    here.
    """
    kind = get_kind(name)
    if kind.is_available():
        return kind
    if kind.is_cuda:
        raise BadInput(
            f"{Argument('device')}: cuda: this machine has no usable CUDA device: use cpu"
        )
    known = " or ".join(["cpu", *(one.name for one in list_accelerators())])
    meant = name if name in BACKEND_FACTS else find_alias(name, BACKEND_FACTS)
    platform = f" {name_key('backend.platform')}=tpu" if name == "tpu" else ""
    hint = f"; did you mean {name_key('backend.name')}={meant}{platform}?" if meant else ""
    raise BadInput(
        f"{Argument('device')}: {name}: torch has no such device here: must be {known}{hint}"
    )


@functools.lru_cache(maxsize=None)
def try_new_device(name: str) -> None:
    """Check a device on which this library was never run, once in a process; see `try_device`."""
    kind = get_kind(name)
    if kind.is_accelerator and not kind.is_cuda:
        try_device(torch.device(name))


def try_device(device: torch.device) -> None:
    """Raise `BadInput` unless passes on a device read the weights that a pipeline gives them."""
    try:
        with fork_random(device):
            fault = next(_find_deviations(device), "")
    # an operation that the device lacks may raise anything
    except Exception as error:
        fault = f"a tiny pipeline does not train on it: {summarize(error)}"
    if fault:
        raise BadInput(f"{Argument('device')}: {device.type}: {fault}")


def _find_deviations(device: torch.device) -> Iterator[str]:
    """Yield what is wrong with a device, the plainest fault first."""
    for trick in TRICKS:
        for operation in OPERATIONS:
            yield from _try_trick(trick, operation, device)
    for method in METHODS:
        yield from _try_method(method, device)


# ---- single operations


class Operation(NamedTuple):
    """An operation that is linear in its input and in its weight, so that the gradient of its input
    depends on the weight that the backward reads, and on nothing else of the forward.
    """

    name: str
    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    input_shape: Sequence[int]
    weight_shape: Sequence[int]


class Trick(NamedTuple):
    """A way to put weights into parameters: the store that does it, and passes in the order of a
    process with microbatches in flight. "B1:2" is the backward of microbatch 1, which reads version
    2 of the weights; "U" makes the next version.
    """

    name: str
    store: Any
    steps: str


# looked up when it runs, as a module does
OPERATIONS = (
    Operation("linear", lambda x, w: functional.linear(x, w), (2, 3), (4, 3)),
    Operation("conv2d", lambda x, w: functional.conv2d(x, w), (1, 2, 4, 4), (3, 2, 3, 3)),
    Operation("a product", lambda x, w: x * w, (2, 3), (3,)),
)
TRICKS = (
    Trick(
        "swapping weights (p.data = other)",
        SwappingStore,
        "F0:0 U F1:1 B0:0 F2:1 B1:1 U F3:2 B2:1 B3:2",
    ),
    Trick(
        "overwriting weights (p.data.copy_(other))",
        OverwritingStore,
        "F0:0 U F1:0 B0:1 F2:1 U F3:1 B1:2 B2:2 B3:2",
    ),
)
MICROBATCHES = 4
VERSIONS = 3


def _draw(count: int, shape: Sequence[int], seed: int) -> Weights:
    """Return `count` tensors of small whole numbers on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-3, 4, tuple(shape), generator=generator).float() for _ in range(count)]


def _try_trick(trick: Trick, operation: Operation, device: torch.device) -> Iterator[str]:
    """Yield a fault for each pass on `device` that does not read its weights."""
    inputs = _draw(MICROBATCHES, operation.input_shape, 1)
    versions = _draw(VERSIONS, operation.weight_shape, 2)
    parameter = nn.Parameter(versions[0].to(device, copy=True))
    store = trick.store([[parameter]], [0])
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    in_flight: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    newest = 0
    for step in trick.steps.split():
        if step == "U":
            store.stash_before_update([{PLAIN}])
            parameter.grad = (versions[newest] - versions[newest + 1]).to(device)
            with keep_version_counters([parameter]):
                optimizer.step()
            newest += 1
            continue
        m, version = (int(number) for number in step[1:].split(":"))
        store.load(Views(np.array([version]), np.array([PLAIN])))
        x = inputs[m].to(device, copy=True).requires_grad_()
        expected, of_x, of_w = _run_alone(operation, inputs[m], versions[version])
        place = f"{operation.name}, after {trick.name}"
        if step[0] == "F":
            in_flight[m] = (x, operation.run(x, parameter))
            rule = "a forward must read the weights that the parameter holds"
            yield from _compare(in_flight[m][1], expected, f"{place}: the forward", rule)
            continue
        x, output = in_flight.pop(m)
        parameter.grad = None
        output.backward(torch.ones_like(output))
        rule = "a backward must read the weights that were put into the parameter before it"
        yield from _compare(x.grad, of_x, f"{place}: the gradient of the input", rule)
        yield from _compare(parameter.grad, of_w, f"{place}: the gradient of the weight", rule)


def _run_alone(
    operation: Operation, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output and the gradients of input and weight, of new tensors on the CPU."""
    x, weight = (t.clone().requires_grad_() for t in (x, weight))
    output = operation.run(x, weight)
    gradients = torch.autograd.grad(output, (x, weight), torch.ones_like(output))
    return output.detach(), gradients[0], gradients[1]


def _compare(got: Any, expected: torch.Tensor, what: str, rule: str) -> Iterator[str]:
    """Yield a fault if a tensor of a device has not the expected whole numbers."""
    values = torch.zeros_like(expected) if got is None else got.detach().cpu()
    difference = float((values - expected).abs().max())
    # a value that is not a number is a fault too
    if not difference <= MOST_DIFFERENCE:
        yield (
            f"{what} differs from that of the CPU by {difference:.3g} (at most "
            f"{MOST_DIFFERENCE:g}): {rule}"
        )


# ---- a tiny model on the emulator

# one that swaps, and one that overwrites
METHODS = ("pipedream", "pipemare")
STAGES = 4
WIDTH = 8
UPDATES = 6
# microbatches of an update
ACCUMULATE = 2
RATE = 0.5
MOMENTUM = 0.9


def _try_method(name: str, device: torch.device) -> Iterator[str]:
    """Yield a fault if training on the emulator does not give the weights of the method."""
    data = _draw_data()
    weights = [w / 4 for w in _draw(STAGES, (WIDTH, WIDTH), 3)]
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in weights]
    for layer, weight in zip(layers, weights):
        layer.weight = nn.Parameter(weight.to(device, copy=True))
    blocks = [nn.Sequential(layer, nn.Tanh()) for layer in layers[:-1]]
    model = nn.Sequential(*blocks, layers[-1])
    inputs = [(x.to(device), y.to(device)) for x, y in data]
    part = partition(model, inputs[0][0], [f"{i}" for i in range(1, STAGES)])
    method = resolve_method(name)
    table = VersionTable(make_schedule(method, STAGES, len(data), ACCUMULATE), method)
    optimizer = torch.optim.SGD(make_groups(model, part), lr=RATE, momentum=MOMENTUM)
    chosen = choose_rules({}, method, table.rule_lag(), ACCUMULATE)
    work = Work(functional.cross_entropy, table, UpdateRules(chosen, optimizer, lambda k: RATE))
    emulator = Emulator(work, model, part, inputs[0], draws={})
    for update in range(UPDATES):
        emulator.step(inputs[update * ACCUMULATE : (update + 1) * ACCUMULATE])
    emulator.close()
    plan = ReplayPlan(work.make_replays([0]), work.rules, 0)
    expected = _train_literally(plan, weights, data)
    for stage, (layer, right, first) in enumerate(zip(layers, expected, weights)):
        moved = float((right - first).abs().max())
        share = float((layer.weight.detach().cpu() - right).abs().max()) / moved
        if not share <= MOST_SHARE:
            yield (
                f"method {name}: {UPDATES} updates of a tiny model give other weights of stage "
                f"{stage} than its rule, by {share:.2g} of how far they moved (at most "
                f"{MOST_SHARE:g} in float32): each pass must read the version that the method says"
            )


def _draw_data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the microbatches of the tiny model, on the CPU."""
    inputs = _draw(UPDATES * ACCUMULATE, (4, WIDTH), 4)
    labels = _draw(UPDATES * ACCUMULATE, (4,), 5)
    return [(x / 2, y.long() + 3) for x, y in zip(inputs, labels)]


def _train_literally(plan: ReplayPlan, weights: Weights, data: Sequence[Any]) -> Weights:
    """Return the weights after training with the versions that `plan` says, on the CPU, with new
    tensors for each version and each pass.
    """
    versions = [weights]
    momenta = [torch.zeros_like(w) for w in weights]
    sums = [torch.zeros_like(w) for w in weights]
    for number, (x, y) in enumerate(data):
        replay = plan.replay(number)
        of_forward = [versions[v][s] for s, v in enumerate(replay.forward.versions.tolist())]
        of_backward = [versions[v][s] for s, v in enumerate(replay.backward.versions.tolist())]
        gradients = _run_literally(of_forward, of_backward, x, y)
        sums = [total + g / ACCUMULATE for total, g in zip(sums, gradients)]
        if len(replay.updates):
            momenta = [MOMENTUM * m + total for m, total in zip(momenta, sums)]
            versions.append([w - RATE * m for w, m in zip(versions[-1], momenta)])
            sums = [torch.zeros_like(w) for w in weights]
    return versions[-1]


def _run_literally(
    of_forward: Weights, of_backward: Weights, x: torch.Tensor, y: torch.Tensor
) -> Weights:
    """Return the gradients of the weights, if forward and backward read these weights."""
    # the inputs of the stages
    activations = [x]
    for weight in of_forward[:-1]:
        activations.append((activations[-1] @ weight.T).tanh())
    logits = (activations[-1] @ of_forward[-1].T).requires_grad_()
    (gradient,) = torch.autograd.grad(functional.cross_entropy(logits, y), logits)
    gradients = []
    for stage in reversed(range(STAGES)):
        gradients.append(gradient.T @ activations[stage])
        of_input = gradient @ of_backward[stage]
        # of tanh, whose output is the stage's input
        gradient = of_input * (1 - activations[stage] ** 2)
    return gradients[::-1]
