"""Check that pieces that differ from the model are refused at the start, and that the model is
left unchanged."""

from __future__ import annotations

from typing import Any, Callable, Dict, List

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ipu_pipe
from ipu_pipe.cut.crossing import Crossing, TensorSpec
from ipu_pipe.cut.cutting import cut_model
from ipu_pipe.cut.verification import TrainingEffects, verify_pieces
from ipu_pipe.errors import BadInput
from ipu_pipe.model.precision import cast_forward
from ipu_pipe.run.build import build
from tests.staged_models import OddModel, SkippingModel, join_stages, make_residual_stages
from tests.support.models import Composed
from tests.test_train import make_short_config


def note_number(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.seen[0] = float(h.detach()[0].sum())
    return h


def run_without_gradient(m: Any, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return h + m.b(h)


def run_in_bfloat16(m: Any, h: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = m.b(h)
    return h.float()


def bind_a_buffer(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.count = m.count + 1
    return m.b(h)  # type: ignore[no-any-return]


def alternate(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.counts[0] += 1
    return m.b(h) if m.counts[0] % 2 else m.b(h).relu()  # type: ignore[no-any-return]


def count_forwards(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.kept += 1
    return m.b(h)  # type: ignore[no-any-return]


# forwards of the second layer of three
WAYS: Dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "no_grad": run_without_gradient, "autocast": run_in_bfloat16, "buffer": bind_a_buffer, "counted": alternate,
    "number": count_forwards,
    "random": lambda m, h: m.b(h) + torch.rand(4),
    "numpy": lambda m, h: m.b(h) if np.random.rand() < 2 else h,
    "allclose": lambda m, h: m.b(h) if torch.allclose(h, h + 1) else h,
    "vmap": lambda m, h: m.b(torch.vmap(lambda row: row * row.sum())(h)),
    "given": lambda m, h: m.b(h) / (1 + m.scale(h)),
    "aside": lambda m, h: m.b(m.probe(h)) / (1 + m.probe.seen[0]),
    "generator": lambda m, h: m.b(m.own(h)),
    "size": lambda m, h: m.b(h) if h.shape[1] == 4 else h,
    "constant": lambda m, h: m.b(h) + torch.arange(4.0),
}  # fmt: skip


def make_three_layers(way: str) -> nn.Module:
    """Return three layers of which the second one runs `WAYS[way]`.

    It may use `scale`, which returns a Python number read from a tensor, `probe`, which stores such
    a number, and `own`, which draws from a generator of its own.
    """
    return Composed(
        lambda m, x: m.c(WAYS[way](m, m.drop(m.a(x)))), kept=1, counts=[1], a=nn.Linear(4, 4), b=nn.Linear(4, 4),
        c=nn.Linear(4, 3), drop=nn.Dropout(0.5), count=torch.zeros(()),
        scale=Composed(lambda m, h: float(h.detach().abs().max())), probe=Composed(note_number, seen=[0.0]),
        own=Composed(lambda m, h: h + torch.rand(4, generator=m.generator), generator=torch.Generator().manual_seed(1)),
    )  # fmt: skip


def verify_cut(model: nn.Module, begins: Any, x: torch.Tensor) -> TrainingEffects:
    return verify_pieces(model, cut_model(model, begins, x), x)


@pytest.mark.parametrize("way, message", [
    ("buffer", r"the buffer of count is the first tensor that differs, by up to 2.0e\+00"),
    ("random", "a stage begins inside the model itself, which draws random numbers by itself"),
    ("counted", r"not the same model: the output of c \(stage 2\) is the first tensor that differs, by up to \d"),
    ("number", r"model: kept: the forward changes this number in a module that is cut"),
    ("numpy", r"draws from Python's random or numpy's, which no seed of a microbatch reaches"),
    ("allclose", r"stage 0: allclose in the model's own forward: in a module that is cut, the forward depends on a tensor's"),
    ("vmap", r"made inside torch.func"),
    ("given", r"not the same model: the output of c \(stage 2\) is the first tensor that differs, by up to \d"),
    ("aside", r"not the same model: the output of c \(stage 2\) is the first tensor that differs, by up to \d"),
    ("generator", r"the output of own \(stage 0\) differs each time: something draws random numbers from a generator"),
])  # fmt: skip
def test_pieces_that_differ_from_the_model_are_refused(way: str, message: str) -> None:
    """Each is one line, and the model is left unchanged."""
    torch.manual_seed(0)
    model, x = make_three_layers(way), torch.randn(2, 4)
    state, attributes = {k: v.clone() for k, v in model.state_dict().items()}, set(vars(model))
    random_state = torch.get_rng_state()
    with pytest.raises(BadInput, match=message) as refused:
        verify_cut(model, ["b", "c"], x)
    assert len(refused.value.faults) == 1
    assert torch.equal(torch.get_rng_state(), random_state) and set(vars(model)) == attributes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and not model.a._forward_hooks


@pytest.mark.parametrize("way", ["size", "constant", "no_grad", "autocast"])
def test_branches_on_sizes_and_blocks_of_a_mode_are_cut(way: str) -> None:
    """A branch on a size after a module once ended in a RecursionError, `_tensor_constant0`
    stayed on the model, and weights frozen by no_grad silently got gradients."""
    model, x = make_three_layers(way), torch.randn(2, 4)
    attributes = set(vars(model))
    verify_cut(model, ["b", "c"], x)
    assert set(vars(model)) == attributes


def test_hooks_of_backwards_stay_and_run() -> None:
    """The recording once lost the modules that such a hook wraps, and the model was refused."""
    model, x = make_three_layers("constant"), torch.randn(2, 4)
    model.b.register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,))
    model.c.register_full_backward_pre_hook(lambda module, out: (out[0] * 2,))
    verify_cut(model, ["b", "c"], x)
    assert len(model.b._backward_hooks) == len(model.c._backward_pre_hooks) == 1


def test_under_autocast_a_weight_that_stages_cast_is_refused() -> None:
    """The whole model sums the gradients of one cast in bfloat16. The message once blamed a
    tensor that the model keeps aside."""
    repeated = nn.Linear(4, 4)
    model, x = (
        nn.Sequential(nn.Linear(4, 4), repeated, nn.Linear(4, 4), repeated),
        torch.randn(3, 4),
    )
    verify_cut(model, ["2"], x)
    cast_forward(model, "cpu")
    with pytest.raises(
        BadInput, match="the gradient of 1.*in place of autocast where a weight is tied"
    ):
        verify_cut(model, ["2"], x)


def test_models_that_are_cut_exactly_pass() -> None:
    verify_cut(SkippingModel(), ["b", "c", "d"], torch.randn(5, 12))
    verify_cut(
        join_stages([stage.float() for stage in make_residual_stages()]),
        ["1", "2", "3"],
        torch.randn(3, 12),
    )
    verify_cut(OddModel(), ["3", "4", "5"], torch.randn(3, 1, 8, 8))
    verify_cut(nn.Sequential(nn.Linear(4, 4)), [], torch.randn(2, 4))


class InnerGradient(nn.Module):
    """A module that calls `autograd.grad` on its input; `used`: its output depends on the input, too."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.layer, self.used = nn.Linear(4, 4), used

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self.layer(h).square().sum(), h, create_graph=True)
        return self.layer(h) * slope if self.used else self.layer(slope.detach())


@pytest.mark.parametrize("used", [True, False])
def test_the_gradient_that_a_boundary_sends_is_the_backwards(used: bool) -> None:
    """Story: the gradient inside the module came first, and was taken for it. If the output does not
    depend on the input, the boundary has no gradient at all."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), InnerGradient(used))
    verify_cut(model, ["2"], torch.randn(3, 4))


def test_a_model_that_needs_gradients_in_its_forward_is_trained() -> None:
    """Evaluation fails in plain PyTorch, too, so the pieces are verified in training alone."""
    model = nn.Sequential(nn.Linear(4, 4), InnerGradient(True))
    model[1].forward = lambda h: (
        torch.autograd.grad(model[1].layer(h).sum(), h, create_graph=True)[0] * h
    )  # type: ignore[method-assign]
    verify_cut(model, ["1"], torch.randn(3, 4))


def test_buffers_that_a_backward_changes_are_reported() -> None:
    """A backward may run a batch norm again; on processes, other microbatches' forwards come
    before it."""
    repeated = Composed(
        lambda m, h: checkpoint(m.norm, h, use_reentrant=False), norm=nn.BatchNorm1d(4)
    )
    model, x = nn.Sequential(nn.Linear(4, 4), repeated, nn.Linear(4, 2)), torch.randn(6, 4)
    changed = verify_cut(model, ["2"], x).changed_by_backward
    assert changed == ["1.norm.running_mean", "1.norm.running_var", "1.norm.num_batches_tracked"]
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    assert verify_cut(plain, ["2"], x).changed_by_backward == []


class CountingLinear(nn.Linear):
    """A layer that counts its forwards, as modules with an annealed setting do."""

    def __init__(self) -> None:
        super().__init__(64, 10)
        self.count, self.seen = 0, [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.seen[0] += 1
        return super().forward(x)


@pytest.mark.parametrize("stages", [1, ["2"]])
def test_observing_a_model_before_training_leaves_its_counts_unchanged(stages: Any) -> None:
    """Processes observe a model more often than the emulator, so a module that counts its
    forwards once had another count there."""
    model = nn.Sequential(nn.Flatten(), CountingLinear(), nn.Linear(10, 10))
    job = build(
        make_short_config(
            "method=gpipe", "gradient_accumulation=4", "evaluate.subset=96", "steps=8", "stages=2"
        ),
        model=model,
    )
    x = job.example[0]
    if stages != 1:
        verify_cut(model, stages, x)
    assert model[1].count == model[1].seen[0] == 0


class MovingCenter(nn.Module):
    """A module that keeps a mean in a tensor that is no buffer, written in place or anew."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.center, self.centers = how, torch.zeros(4), {"all": [torch.zeros(4)]}
        self.view = self.center[:]
        # tensors that are only there: equal to nothing, or with one number for all
        self.unread = torch.full((1,), float("nan")).expand(6), torch.zeros(1).expand(1 << 30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.how == "attribute":
                self.center.mul_(0.9).add_(x.mean(0))
            elif self.how == "data":
                self.center.data.mul_(0.9).add_(x.mean(0))
            elif self.how == "view":
                self.view.mul_(0.9).add_(x.mean(0))
            elif self.how == "anew":
                self.center = self.center * 0.9 + x.mean(0)
            else:
                self.centers["all"][0].mul_(0.9).add_(x.mean(0))
        return x - self.center - self.centers["all"][0]


@pytest.mark.parametrize("how", ["attribute", "data", "view", "anew", "container"])
def test_trial_runs_leave_tensors_that_a_forward_writes(how: str) -> None:
    """Story: tensors that were no buffers began with the values of the trial runs, so the first
    losses were another training's."""
    inputs = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(0))
    losses: List[List[float]] = [[], []]
    for is_plain in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), MovingCenter(how), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if is_plain:
            for x in inputs:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                losses[0].append(loss.item())
            continue
        with ipu_pipe.Pipeline(
            model, lambda h, y: h.square().mean(), optimizer, "gpipe", stages=2, microbatches=1
        ) as pipe:
            for x in inputs:
                losses[1] += [update.loss for update in pipe.step(x, torch.zeros(8))]
    assert losses[0] == losses[1]


def test_crossing_tensors_have_the_recorded_shape() -> None:
    """Otherwise a process would wait for ever for other bytes, or misread them."""
    crossing = Crossing((TensorSpec((2, 3), torch.float32, True),))
    assert len(crossing.to_messages(torch.zeros(2, 3))) == 1
    for other in (torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(4, 3)):
        with pytest.raises(BadInput, match="a tensor that crosses a boundary must have one shape"):
            crossing.to_messages(other)
