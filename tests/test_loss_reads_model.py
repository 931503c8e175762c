"""Test that a loss which reads more than its own stage is refused where the model is cut.

Other losses train alike on all backends. Story: the loss added the routers' balance losses, which
modules keep as attributes. The emulator trained plain PyTorch's weights and processes trained
others, without a warning; a penalty of all parameters gave NaN and advice on learning rates.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Tuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ipu_pipe
from ipu_pipe.config.load import configure
from ipu_pipe.cut.cutting import cut_model
from ipu_pipe.cut.loss_verification import takes_output_alone
from ipu_pipe.errors import BadInput
from ipu_pipe.local.blocks import verify_losses
from ipu_pipe.model.loss import Labels, LossOfOutput, TakePart
from ipu_pipe.model.observation import observe_effects
from ipu_pipe.model.restoring import restore_function
from ipu_pipe.run.build import build
from tests.support.models import Composed
from tests.support.processes import run_in_group
from tests.support.runs import assert_same, list_faults, needs_processes

pytest_plugins = ["poptorch_double"]  # the fixture `poptorch`
Loss = Callable[..., torch.Tensor]


class Router(nn.Module):
    """Keep a balance loss, a number and a running mean of the last forward."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.expert, self.drop = nn.Linear(8, 4), nn.Linear(8, 8), nn.Dropout(0.1)
        self.aux, self.number = torch.zeros(()), 0.0
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p = self.gate(x).softmax(-1)
        self.aux = 4 * (p.mean(0) ** 2).sum()
        self.number = float(p.detach().amax())
        self.mean.mul_(0.9).add_(0.1 * p.detach().mean(0))
        return x + self.drop(self.expert(x)) * p.amax(-1, keepdim=True)


class Balance(torch.autograd.Function):
    """Pass an activation on, and add a balance loss in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(aux)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], torch.full_like(ctx.saved_tensors[0], 0.25)


class BalancedRouter(Router):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Balance.apply(super().forward(x), self.aux)  # type: ignore[no-any-return]


def make_router_model(router: Callable[[], nn.Module] = Router) -> Any:
    """Return four modules, of which stage 1 begins at the third."""
    torch.manual_seed(0)
    return nn.Sequential(router(), nn.Tanh(), router(), nn.Linear(8, 4))


def make_router_batch() -> Tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 8, generator=generator), torch.randint(0, 4, (6,), generator=generator)


def make_small_batches() -> List[Tuple[torch.Tensor, torch.Tensor]]:
    """Return four batches of two samples."""
    x, y = make_router_batch()
    return [(x[i : i + 2] * (1 + 0.1 * i), y[i : i + 2]) for i in range(4)]


def verify_loss(
    model: nn.Module, loss: Loss, example: Any = None, begins: Sequence[str] = ("2",)
) -> None:
    example = example or make_router_batch()
    pieces = cut_model(model, begins, example[0])
    verify_losses(model, pieces, loss, example, observe_effects(model, example[0]).draws)


def keep_output(model: Any, name: str, keep: Callable[[torch.Tensor], None]) -> None:
    model.get_submodule(name).register_forward_hook(lambda module, inputs, output: keep(output))


def make_reading(term: Callable[[Any], Any]) -> Callable[[Any], Loss]:
    """Return a maker of a loss that adds `term(model)`."""
    return lambda model: lambda output, y: F.cross_entropy(output, y) + 0.1 * term(model)


def make_hooked(name: str, change: Callable[[torch.Tensor], Any]) -> Callable[[Any], Loss]:
    """Return a maker of a loss that adds a value of an activation, which a hook has stored."""

    def make_loss(model: Any) -> Loss:
        activation: Dict[str, Any] = {}
        keep_output(model, name, lambda output: activation.update(value=output))
        return lambda output, y: F.cross_entropy(output, y) + 0.1 * change(activation["value"])

    return make_loss


def make_appended(name: str) -> Callable[[Any], Loss]:
    """Return a maker of a loss that adds up and clears a list, which a hook extends."""

    def make_loss(model: Any) -> Loss:
        terms: List[torch.Tensor] = []
        keep_output(model, name, lambda output: terms.append(output.pow(2).mean()))

        def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            total = F.cross_entropy(output, y) + sum(terms)
            terms.clear()
            return total

        return loss

    return make_loss


def make_late(model: Any) -> Loss:
    """Return a loss that reads a value of the previous microbatch."""
    previous: Dict[str, Any] = {}

    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        before, previous["number"] = previous.get("number", 0.0), model[0].number
        return F.cross_entropy(output, y) + before

    return loss


def make_random_loss(read: Callable[[Any], float]) -> Callable[[Any], Loss]:
    """Return a maker of a loss that draws from all global generators, and adds `read(model)`."""
    return lambda model: (
        lambda output, y: (
            F.cross_entropy(F.dropout(output, 0.5), y) * (1 + random.random()) + read(model)
        )
    )


def make_scaling(number: int) -> Callable[[Any], Loss]:
    """Return a maker of a loss of a weight that no forward uses: it belongs to a module, and so to its stage."""

    def make_loss(model: Any) -> Loss:
        model[number].temperature = nn.Parameter(torch.ones(()))
        return lambda output, y: F.cross_entropy(output / model[number].temperature, y)

    return make_loss


READS: Dict[str, Tuple[Callable[[Any], Loss], str]] = {
    "attributes": (make_reading(lambda m: m[0].aux + m[2].aux), r"0\.aux of the model"),
    "number, with draws": (make_random_loss(lambda m: m[0].number), "values of other stages"),
    "hook": (make_hooked("0", lambda t: t.pow(2).mean()), r"activations that depend on 0\.gate\.weight"),
    "hook's number": (make_hooked("1", lambda t: float(t.detach().mean())), "values of other stages"),
    "hook's list": (make_appended("0"), "values of other stages"),
    "parameters' norm": (
        make_reading(lambda m: torch.stack([p.norm() for p in m.parameters()]).norm()), r"0\.gate\.weight"),
    "a weight's number": (
        make_reading(lambda m: float(m[0].gate.weight.detach().sum())), r"0\.gate\.weight of the model"),
    "a weight without a forward": (make_scaling(0), r"0\.temperature of the model"),
    "a changing buffer": (make_reading(lambda m: m[0].mean.pow(2).sum()), r"0\.mean of the model"),
    "a constant buffer": (make_reading(lambda m: m[0].scale.sum()), r"0\.scale of the model"),
    "the microbatch before": (make_late, "values of other stages"),
}  # fmt: skip


@pytest.mark.parametrize("case", READS)
def test_a_loss_that_reads_another_stage_is_refused(case: str) -> None:
    """One line names the tensor that is read; model and random states do not change."""
    make, expected = READS[case]
    model = make_router_model()
    loss = make(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    aux, random_state = model[0].aux, torch.get_rng_state()
    with pytest.raises(
        BadInput, match=f"^loss: (reads )?{expected}.*where the model is cut"
    ) as error:
        verify_loss(model, loss)
    assert len(error.value.faults) == 1
    assert torch.equal(torch.get_rng_state(), random_state) and model[0].aux is aux
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_loss_that_reads_an_attribute_of_a_cut_module_is_refused() -> None:
    """In a module in which a stage begins, Python code runs only while the forward is recorded."""

    def run_parts(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.b(m.a(x))
        m.kept = h.detach().mean()
        return m.c(h)  # type: ignore[no-any-return]

    model = Composed(run_parts, a=nn.Linear(8, 8), b=nn.Linear(8, 8), c=nn.Linear(8, 4), kept=1)
    model._buffers.clear()
    with pytest.raises(BadInput, match="^loss: reads model.kept of the model"):
        verify_loss(model, lambda output, y: F.cross_entropy(output, y) + model.kept, begins=["b"])


class Counting(nn.Module):
    """A loss that anneals by the number of its calls, and keeps a running mean of the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, [0]
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen[0] += 1
        self.mean.mul_(0.9).add_(output.detach().mean(0))
        return F.cross_entropy(output - self.mean, y) / self.calls


def make_counting(model: Any) -> Loss:
    calls = [0]
    number = 0

    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        nonlocal number
        calls[0] += 1
        number += 1
        return F.cross_entropy(output, y) * (1 + 1 / (calls[0] + number))

    return loss


def make_own_random_loss(model: Any) -> Loss:
    generator = torch.Generator().manual_seed(1)
    return lambda output, y: F.cross_entropy(output + torch.rand(4, generator=generator), y)


ALLOWED: Dict[str, Callable[[Any], Loss]] = {
    "the last stage's attribute and buffer": make_reading(lambda m: m[2].aux + m[2].mean.sum()),
    "the last stage's weights": make_reading(lambda m: sum(p.abs().sum() for p in m[2:].parameters())),
    "the last stage's hook's list": make_appended("2"),
    "a weight without a forward": make_scaling(3),
    "other stages' shapes": make_reading(lambda m: sum(p.numel() for p in m.parameters())),
    "counts": make_counting,
    "counts, in a module": lambda model: Counting(),
    "draws": make_random_loss(lambda m: 0.0),
    "draws from a generator of its own": make_own_random_loss,
}  # fmt: skip


@pytest.mark.parametrize("case", ALLOWED)
def test_a_loss_of_its_own_stage_is_allowed(case: str) -> None:
    """The routers' function that passes an activation on, and adds a gradient, is no read either."""
    model = make_router_model(BalancedRouter)
    verify_loss(model, ALLOWED[case](model))


def test_a_loss_gets_its_own_labels_and_fields() -> None:
    """The labels and fields are the microbatch's own, as the loss may refuse others."""
    x, y = make_router_batch()

    def loss(output: Any, labels: torch.Tensor, *, weights: torch.Tensor) -> torch.Tensor:
        assert torch.equal(labels, y) and weights.eq(2).all()
        return (F.cross_entropy(output, labels, reduction="none") * weights).mean()

    model = make_router_model()
    verify_loss(
        model,
        LossOfOutput(loss, None, ("weights",)),
        (x, Labels(y, {"weights": torch.full((6,), 2.0)})),
    )


def test_known_losses_need_no_trial() -> None:
    known = [F.cross_entropy, nn.MSELoss(), LossOfOutput(F.cross_entropy, TakePart(0))]
    own = [Counting(), make_counting(None), LossOfOutput(F.cross_entropy, lambda output: output)]
    # the weights of classes may be a buffer of the model
    assert all(map(takes_output_alone, known)) and not any(
        map(takes_output_alone, [*own, nn.NLLLoss(torch.ones(4))])
    )


class CountingObject:
    def __init__(self) -> None:
        self.calls = [0]

    def call(self, output: Any, y: Any) -> None:
        self.calls[0] += 1


COUNT, COUNTS = 0, {"mean": torch.zeros(2)}


def count_globally(output: Any, y: Any) -> None:
    global COUNT
    COUNT += 1
    add_to_counts()


def add_to_counts() -> None:
    COUNTS["mean"] += 1


def test_the_state_of_a_loss_is_restored_after_a_trial() -> None:
    """Story: a trial of a loss that anneals by its calls would make it anneal earlier on processes
    than on the emulator."""
    counting_object, module, counting_loss = CountingObject(), Counting(), make_counting(None)
    x, y = torch.randn(2, 4), torch.zeros(2, dtype=torch.int64)
    first = counting_loss(x, y) / (1 + 1 / 2)
    bound = partial(counting_object.call, y=y)
    for function in (bound, lambda x: counting_object.call(x, y), partial(count_globally, y=y)):
        with restore_function(function):
            function(x)
    for loss in (counting_loss, module):
        with restore_function(loss):
            loss(x, y)
    assert counting_object.calls == module.seen == [0] and module.calls == COUNT == 0
    assert not module.mean.any() and not COUNTS["mean"].any()
    assert torch.allclose(counting_loss(x, y) / (1 + 1 / 4), first)


# ---- blocks, and copies


BLOCK_READS: Dict[str, Tuple[Callable[[Any], Loss], List[str]]] = {
    "weights": (make_reading(lambda m: m[3].weight.pow(2).sum()), [" 3.weight of the model, but block 0 "]),
    "attributes": (
        make_reading(lambda m: m[0].aux + m[2].aux), ["2.aux of the model, but block 0", "0.aux of the model, but block 1"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BLOCK_READS)
def test_the_loss_of_a_block_reads_this_block_alone(case: str) -> None:
    """On the emulator other blocks could be read too, but a block would train another's weights."""
    make, expected = BLOCK_READS[case]
    faults = list_faults(build, **make_loss_run("local_greedy", make))
    assert len(faults) == len(expected)
    assert all(part in fault for part, fault in zip(expected, faults))


@pytest.mark.parametrize("method, keys, make", [
    ("local_greedy", {}, make_counting),
    ("local_overlapping", {}, make_random_loss(lambda m: 0.0)),
    ("last_layers", {"method_args": {"layers": 1}}, lambda model: Counting()),
    ("local_greedy", {"backend": {"name": "poptorch", "ipu": {}}, "gradient_accumulation": 4}, make_counting),
])  # fmt: skip
def test_losses_of_blocks_that_read_outputs_are_allowed(
    method: str, keys: Dict[str, Any], make: Any, poptorch: Any
) -> None:
    model = make_router_model(partial(nn.Linear, 8, 8))
    assert build(**make_loss_run(method, make, model, **keys)).method.structure is not None


class LossOfModel(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, y) + self.model[3].weight.pow(2).sum()


COPIES: Dict[str, Tuple[Callable[[Any], Loss], str]] = {
    "a weight's number": (make_reading(lambda m: float(m[3].weight.detach().sum())), "3.weight of the model"),
    "loss module": (LossOfModel, "3.weight of the model"),
    "attribute": (make_reading(lambda m: m[2].aux), "2.aux of the model"),
    "hook": (make_hooked("0", lambda t: t.pow(2).mean()), ""),
    "counts": (make_counting, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", COPIES)
def test_poptorch_compiles_a_copy_which_the_loss_does_not_read(case: str, poptorch: Any) -> None:
    """Reading weights or attributes is refused; hooks belong to the copy too and are allowed.
    Story: a loss module was copied together with the model that it holds, whose weights stayed as
    they began, and a number of a weight became a constant of the graph."""
    make, expected = COPIES[case]
    backend = {"name": "poptorch", "ipu": {}}
    arguments = make_loss_run("gpipe", make, backend=backend, gradient_accumulation=4)
    if not expected:
        build(**arguments)
        return
    (fault,) = list_faults(build, **arguments)
    assert fault.startswith(f"loss: reads {expected}, but PopTorch compiles a copy")


# ---- whole runs


def make_loss_run(
    method: str, make: Callable[[Any], Loss], model: Any = None, **keys: Any
) -> Dict[str, Any]:
    """Return the arguments of a run: a model, by default of routers, and the loss that `make` returns for it."""
    model, batches = model or make_router_model(), make_small_batches()
    base: Dict[str, Any] = {
        "gradient_accumulation": 2, "micro_batch_size": 2, "steps": 4, "stages": ["2"], "evaluate": {"every": 0},
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
    }  # fmt: skip
    config = configure(method=method, **{**base, **keys})
    data = ipu_pipe.from_loader(batches, batches[:1])
    return {"config": config, "model": model, "data": data, "loss": make(model)}


def penalize_and_count(model: Any) -> Loss:
    """Return a loss that reads the last stage's weights and attribute, and counts its calls."""
    calls = [0]

    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        penalty = sum(p.abs().sum() for p in model[2:].parameters())
        return F.cross_entropy(output, y) + (0.01 * penalty + 0.1 * model[2].aux) / calls[0]

    return loss


def make_counted_run(method: str) -> Dict[str, Any]:
    return make_loss_run(method, penalize_and_count, checkpoint={"every": 2})


def refuse_on_a_rank(rank: int, folder: Path) -> None:
    backend = {"name": "distributed", "deadline": 60}
    arguments = make_loss_run("gpipe", make_reading(lambda m: m[0].aux), backend=backend)
    (fault,) = list_faults(ipu_pipe.train, out=folder / "run", quiet=True, **arguments)
    assert fault.startswith("loss: reads 0.aux of the model, but where the model is cut"), fault
    assert not (folder / "run" / "metrics.jsonl").exists()


@needs_processes
def test_every_rank_refuses_a_loss_that_reads_another_stage(tmp_path: Path) -> None:
    """All ranks report the same line before any of them waits."""
    run_in_group(2, refuse_on_a_rank, tmp_path)


def make_without_dropout() -> Dict[str, Any]:
    """Return a run whose loss reads another stage's attribute, too."""
    model = make_router_model()
    model[0].drop.p = model[2].drop.p = 0.0
    penalize = penalize_and_count(model)
    return make_loss_run("gpipe", lambda m: lambda *pair: penalize(*pair) + m[0].aux, model)


def test_the_emulator_trains_the_weights_of_a_plain_loop(tmp_path: Path) -> None:
    """Story: the check before training had counted a call of the loss."""
    ours, plain = make_without_dropout(), make_without_dropout()
    ipu_pipe.train(out=tmp_path, quiet=True, **ours)
    model, loss, batches = plain["model"], plain["loss"], make_small_batches()
    # the evaluation before training
    loss(model.eval()(batches[0][0]), batches[0][1])
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for m in range(8):
        x, y = batches[m % 4]
        (loss(model(x), y) / 2).backward()
        if m % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(*(dict(run["model"].named_parameters()) for run in (plain, ours)))
