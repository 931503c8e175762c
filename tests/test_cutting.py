"""Models are cut wherever a named module begins: the pieces equal the whole model, bit for bit; other models are refused, and
left unchanged. Runs of models that are cut are the emulator's."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Tuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ipu_pipe
from ipu_pipe.config.load import configure
from ipu_pipe.cut.crossing import Crossing, TensorSpec
from ipu_pipe.cut.cutting import cut_model, list_crossings
from ipu_pipe.cut.verification import TrainingEffects, verify_pieces
from ipu_pipe.errors import BadInput
from ipu_pipe.model.batch import check_same_shapes, flatten_tensors
from ipu_pipe.model.observation import observe_effects
from ipu_pipe.model.precision import cast_forward
from ipu_pipe.model.randomness import KeyedRandomness
from ipu_pipe.model.restoring import restore_buffers, restore_modes
from ipu_pipe.model.stages import begin_stage
from ipu_pipe.run.build import build
from ipu_pipe.run.train import train
from tests import forked
from tests.staged_models import (
    OddModel,
    ShrinkingModel,
    SkippingModel,
    join_stages,
    make_residual_stages,
)
from tests.support.models import Composed
from tests.support.runs import assert_states_close, read_weights

IMAGES, WORDS, ROWS = torch.randn(3, 3, 16, 16), torch.randint(1, 50, (3, 7)), torch.randn(2, 4)
LARGE = torch.randn(3, 3, 32, 32)


def make_u_net() -> nn.Module:
    """Make a model with one shared ReLU, which overwrites tensors that are needed again."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        first = m.relu(m.norm(m.first(x)))
        deep = m.relu(m.deep(m.relu(m.down(first))))
        return m.last(torch.cat([m.up(deep), first], 1))

    conv = functools.partial(nn.Conv2d, kernel_size=3, padding=1)
    parts = {
        "first": conv(3, 4),
        "down": conv(4, 4, stride=2),
        "deep": conv(4, 4),
        "last": conv(8, 3),
    }
    up, norm, relu = nn.ConvTranspose2d(4, 4, 2, 2), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
    return Composed(forward, **parts, up=up, norm=norm, relu=relu)


def make_translator() -> nn.Module:
    """Make a translator whose forward computes a causal mask from sizes."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        h = m.embed(x)
        return m.head(m.transformer(h, h, tgt_mask=mask))

    parts = {"embed": nn.Embedding(50, 16), "head": nn.Linear(16, 50)}
    return Composed(forward, **parts, transformer=nn.Transformer(16, 2, 2, 2, 32, batch_first=True))


def run_block(m: Any, x: torch.Tensor) -> Any:
    h = m.drop(m.a(x))
    m.count += 1
    with torch.no_grad():
        h = h + m.frozen(h)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = m.low(h) * m.scale
        low[:, 0] = 0
    return m.b(low.float() * m.scale + x + torch.arange(x.shape[1]))


def make_cut_blocks() -> nn.Module:
    """Make blocks that are cut inside no_grad and autocast, with a weight, a counter and a later write in place."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.stem(x)
        h = h + m.stem.bias
        for row in m.rows:
            h = row(h) + h.mean()
        return h  # type: ignore[no-any-return]

    rows = nn.ModuleList()
    for _ in range(2):
        linears = {name: nn.Linear(6, 6) for name in ("a", "frozen", "low", "b")}
        scale = nn.Parameter(torch.full((6,), 1.5))
        rows.append(
            Composed(run_block, **linears, scale=scale, drop=nn.Dropout(0.5), count=torch.zeros(()))
        )
    return Composed(forward, stem=nn.Linear(6, 6), rows=rows)


def make_inner_gradient(used: bool) -> nn.Module:
    """Make a module that calls `autograd.grad` on its input; `used`: its output depends on the input, too."""

    def forward(m: Any, h: torch.Tensor) -> Any:
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(m.layer(h).square().sum(), h, create_graph=True)
        return m.layer(h) * slope if used else m.layer(slope.detach())

    return Composed(forward, layer=nn.Linear(4, 4))


def build_third_party(name: str, **settings: Any) -> nn.Module:
    """Build a model of another library."""
    from tests import third_party_models

    model: nn.Module = getattr(third_party_models, f"make_{name}")(**settings)
    return model


# ---- layers a, b and c, with a forward of their own between a and c


class DoublingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


@dataclass
class Activations:
    data: torch.Tensor


class StoreCache:
    """A cache that a module stores tensors in."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data


def rebind_buffer(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.count = m.count + 1
    return m.b(h)  # type: ignore[no-any-return]


def alternate(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.counts[0] += 1
    return m.b(h) if m.counts[0] % 2 else m.b(h).relu()  # type: ignore[no-any-return]


def count_forwards(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.kept += 1
    return m.b(h)  # type: ignore[no-any-return]


def keep_number(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.seen[0] = float(h.detach()[0].sum())
    return h


def keep_tensor(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.a.stored = h
    return m.reader(m.b(h * 1))  # type: ignore[no-any-return]


def overwrite_view(m: Any, h: torch.Tensor) -> torch.Tensor:
    h = h * 1
    rows = h[:, :2]
    b = m.b(h * 2)
    h += 1
    return b + rows.sum() + h  # type: ignore[no-any-return]


def penalize_gradient(m: Any, h: torch.Tensor) -> Any:
    return torch.autograd.grad(m.b(h).sum(), h, create_graph=True)[0]


def pack_rows(h: torch.Tensor) -> Any:
    return nn.utils.rnn.pack_padded_sequence(h[..., None], torch.tensor([4, 3]), True)


Way = Callable[[Any, torch.Tensor], Any]
DIFFERS = (
    r"not the same model: the output of c \(stage 2\) is the first tensor that differs, by up to \d"
)
REFUSED: Dict[str, Tuple[Way, str]] = {
    "own gradient": (penalize_gradient, r"stage 1: torch.autograd.grad in the model's own forward: .*earlier stage.*emulator"),
    "layer drop": (lambda m, h: m.b(h) if torch.rand([]) < 2 else h, r"stage 0: a random number read from a tensor"),
    "dataclass": (lambda m, h: m.take(Activations(m.b(h))), "take in the model's own forward: it gets tensors in a"),
    "packed": (lambda m, h: m.b(h) + m.take(pack_rows(h)).sum(), "it gets tensors in a PackedSequence, .*: pass the padded"),
    "item": (lambda m, h: m.b(h if h.sum() > 0 else -h), r"stage 0: a number read from a tensor \(if, item, int\)"),
    "list": (lambda m, h: m.b(h * max(h.tolist()[0])), "stage 0: tolist in the model's own forward: "),
    "allclose": (lambda m, h: m.b(h) if torch.allclose(h, h + 1) else h, "stage 0: allclose in the model's own forward"),
    "dropout": (lambda m, h: m.b(F.dropout(h, training=m.training)), "not the same model: the output of b"),
    "kept aside": (keep_tensor, "reader in the model's own forward: its add reads a tensor that .* aside"),
    "cache": (lambda m, h: m.b(m.take(StoreCache(h))), "take in the model's own forward: it takes a StoreCache, "),
    "own backward": (lambda m, h: m.b(DoublingFunction.apply(h)), "not the same model"),  # type: ignore[no-untyped-call]
    "view": (overwrite_view, "not the same model"),
    "buffer": (rebind_buffer, r"the buffer of count is the first tensor that differs, by up to 2.0e\+00"),
    "random": (lambda m, h: m.b(h) + torch.rand(4), "a stage begins inside the model itself, which draws random numbers"),
    "counted": (alternate, DIFFERS),
    "number": (count_forwards, "model: kept: the forward changes this number in a module that is cut"),
    "numpy": (lambda m, h: m.b(h) if np.random.rand() < 2 else h, "draws from Python's random or numpy's, which no seed of a"),
    "vmap": (lambda m, h: m.b(torch.vmap(lambda row: row * row.sum())(h)), "made inside torch.func"),
    "given": (lambda m, h: m.b(h) / (1 + m.scale(h)), DIFFERS),
    "number aside": (lambda m, h: m.b(m.probe(h)) / (1 + m.probe.seen[0]), DIFFERS),
    "generator": (lambda m, h: m.b(m.own(h)), r"the output of own \(stage 0\) differs each time: something draws"),
}  # fmt: skip


def make_three_layers(way: Way) -> nn.Module:
    """Return three layers; `way` runs the second one.

    It may use `scale`, which returns a Python number read from a tensor, `probe`, which stores such
    a number, `own`, which draws from a generator of its own, `reader`, which adds what it was
    given, and `take`, which takes a tensor out of an object.
    """
    generator, first = torch.Generator().manual_seed(1), nn.Linear(4, 4)
    first.stored = None  # type: ignore[assignment]
    return Composed(
        lambda m, x: m.c(way(m, m.drop(m.a(x)))), kept=1, counts=[1], a=first, b=nn.Linear(4, 4),
        c=nn.Linear(4, 4), drop=nn.Dropout(0.5), count=torch.zeros(()),
        scale=Composed(lambda m, h: float(h.detach().abs().max())), probe=Composed(keep_number, seen=[0.0]),
        own=Composed(lambda m, h: h + torch.rand(4, generator=generator)),
        reader=Composed(lambda m, h: h + m.others[0].stored, others=[first]),
        take=Composed(lambda m, h: h.data),
    )  # fmt: skip


def verify_cut(model: nn.Module, begins: Any, x: torch.Tensor) -> TrainingEffects:
    """Cut a model and verify its pieces."""
    return verify_pieces(model, cut_model(model, begins, x), x)


# ---- pieces that equal the model


def run_chain(pieces: Sequence[nn.Module], value: Any) -> Any:
    """Return the output of the last piece, each of which gets the previous one's."""
    return functools.reduce(lambda crossing, piece: piece(crossing), pieces, value)


def assert_pieces_equal_model(model: nn.Module, begins: List[str], x: torch.Tensor) -> None:
    """Check that chained pieces have the outputs, gradients and buffers of the whole model, in evaluation also for another batch
    size."""
    attributes = [set(vars(module)) for module in model.modules()]
    cut = cut_model(model, begins, x)
    verify_pieces(model, cut, x)
    assert [set(vars(module)) for module in model.modules()] == attributes
    keyed = KeyedRandomness(model, observe_effects(model, x).draws, 0, x.device)
    results = []
    for chained in (False, True):
        model.zero_grad()
        with restore_buffers(model):
            value = x.clone()
            with keyed.forward(0):
                value = run_chain(cut if chained else [model.train()], value)
            outputs = flatten_tensors(value)
            sum(t.square().mean() for t in outputs).backward()
            gradients = [p.grad for p in model.parameters()]
            results.append([*outputs, *gradients, *(b.clone() for b in model.buffers())])
    keyed.remove()
    assert len(results[0]) == len(results[1])
    assert all(a is b or torch.equal(a, b) for a, b in zip(*results))
    with restore_modes(*cut), torch.no_grad():
        model.eval()
        for piece in cut:
            piece.eval()
        for rows in (len(x), 2, len(x)):
            assert torch.equal(run_chain(cut, x[:rows]), model(x[:rows]))


@pytest.mark.parametrize("make, begins, x", [
    (make_u_net, ["relu", "deep", "up"], IMAGES),
    (make_u_net, ["down", "last"], IMAGES),
    (make_translator, ["transformer.encoder.layers.1.linear1", "transformer.decoder.layers.1"], WORDS),
    (make_cut_blocks, ["rows.0.frozen", "rows.0.low", "rows.0.b", "rows.1.b"], torch.randn(3, 6)),
    (SkippingModel, ["b", "c", "d"], torch.randn(5, 12)),
    (lambda: join_stages([stage.float() for stage in make_residual_stages()]), ["1", "2", "3"], torch.randn(3, 12)),
    (lambda: nn.Sequential(nn.Linear(4, 4)), [], ROWS),
    (lambda: make_three_layers(lambda m, h: m.b(h) if h.shape[1] == 4 else h), ["b", "c"], ROWS),
])  # fmt: skip
def test_pieces_compute_the_same_as_the_model(make: Any, begins: List[str], x: Any) -> None:
    torch.manual_seed(0)
    assert_pieces_equal_model(make(), begins, x)


@pytest.mark.slow
@pytest.mark.parametrize("name, begins, x", [
    ("bert", ["model.bert.encoder.layer.2.attention.output"], WORDS),
    ("timm_swin", ["layers.0.blocks.1.mlp", "layers.1.blocks.1"], IMAGES),
    ("googlenet", ["inception3b.branch2", "inception4d.branch3"], LARGE),
    ("densenet", ["features.denseblock1.denselayer2", "features.denseblock2.denselayer2"], LARGE),
])  # fmt: skip
def test_pieces_of_other_libraries_models_do_so(name: str, begins: List[str], x: Any) -> None:
    torch.manual_seed(0)
    assert_pieces_equal_model(build_third_party(name), begins, x)


@pytest.mark.parametrize("used", [True, False])
def test_the_gradient_that_a_boundary_sends_is_the_backwards(used: bool) -> None:
    """Story: the gradient inside the module came first, and was taken for it. If the output does not
    depend on the input, the boundary has no gradient at all."""
    verify_cut(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), make_inner_gradient(used)), ["2"], ROWS)


def test_a_model_that_needs_gradients_in_its_forward_is_trained() -> None:
    """Evaluation fails in plain PyTorch, too, so the pieces are verified in training alone."""
    slope = Composed(
        lambda m, h: torch.autograd.grad(m.b(h).sum(), h, create_graph=True)[0] * h,
        b=nn.Linear(4, 4),
    )
    verify_cut(nn.Sequential(nn.Linear(4, 4), slope), ["1"], ROWS)
    verify_cut(OddModel(), ["3", "4", "5"], torch.randn(3, 1, 8, 8))


def test_hooks_of_backwards_stay_and_run() -> None:
    """The recording once lost the modules that such a hook wraps, and the model was refused."""
    model = make_three_layers(lambda m, h: m.b(h))
    model.b.register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,))
    model.c.register_full_backward_pre_hook(lambda module, out: (out[0] * 2,))
    verify_cut(model, ["b", "c"], ROWS)
    assert len(model.b._backward_hooks) == len(model.c._backward_pre_hooks) == 1


def test_buffers_that_a_backward_changes_are_reported() -> None:
    """A backward may run a batch norm again; on processes, other microbatches' forwards come
    before it."""
    norm = nn.BatchNorm1d(4)
    repeated = Composed(lambda m, h: checkpoint(m.norm, h, use_reentrant=False), norm=norm)
    model, x = nn.Sequential(nn.Linear(4, 4), repeated, nn.Linear(4, 2)), torch.randn(6, 4)
    changed = verify_cut(model, ["2"], x).changed_by_backward
    assert changed == [f"1.norm.{name}" for name, _ in norm.named_buffers()]
    model[1] = norm
    assert verify_cut(model, ["2"], x).changed_by_backward == []


# ---- what crosses a boundary


def test_tensors_that_depend_on_sizes_alone_do_not_cross() -> None:
    cut = cut_model(make_translator(), ["transformer.decoder.layers.1"], WORDS)
    shapes = [[t.shape for t in crossing.tensors] for crossing in list_crossings(cut)]
    assert shapes == [[(3, 7, 16)] * 2]


def test_messages_preserve_memory_layouts() -> None:
    """Kernels depend on the memory layout of a tensor, so that a message must restore it."""
    layout = torch.channels_last
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3)).to(memory_format=layout)
    x = IMAGES.contiguous(memory_format=layout)
    cut = cut_model(model, ["1"], x)
    (crossing,), value = list_crossings(cut), cut[0](x)
    (message,) = crossing.to_messages(value)
    assert message.is_contiguous()
    assert message.shape == crossing.tensors[0].message_shape == (3, 16, 16, 4)
    again = crossing.from_messages([message.clone()])
    assert again.stride() == value.stride() != message.stride() and torch.equal(again, value)


def test_a_tensor_without_a_gradient_is_not_differentiable() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    model[1].requires_grad_(True)
    (crossing,) = list_crossings(cut_model(model, ["1"], ROWS))
    assert not crossing.tensors[0].differentiable


def test_crossing_tensors_have_the_recorded_shape() -> None:
    """Otherwise a process would wait for ever for other bytes, or misread them."""
    crossing = Crossing((TensorSpec((2, 3), torch.float32, True),))
    assert len(crossing.to_messages(torch.zeros(2, 3))) == 1
    for other in (torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64)):
        with pytest.raises(BadInput, match="a tensor that crosses a boundary must have one shape"):
            crossing.to_messages(other)


class MaskedModel(nn.Module):
    """A model that branches on the presence of inputs, and on dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, z: Any = None, mask: Any = None) -> torch.Tensor:
        h = self.a(x)
        if mask is not None:
            h = h.masked_fill(~mask, 0) if mask.dtype is torch.bool else h * mask
        return self.b(h if z is None else h - z)  # type: ignore[no-any-return]


def test_inputs_of_another_kind_are_recorded_separately() -> None:
    """Story: for keys of a batch in another order, tensors of one shape came to the model exchanged."""
    model, (x, z), mask = MaskedModel(), torch.randn(2, 3, 4), torch.rand(3, 4) > 0.5
    cut = cut_model(model, ["b"], {"x": x, "z": z})
    for inputs in (
        {"z": z, "x": x}, {"z": None, "x": x}, {"x": x, "z": z, "mask": mask}, {"mask": mask.long(), "x": x}
    ):  # fmt: skip
        assert torch.equal(run_chain(cut, inputs), model(**inputs)), list(inputs)


def test_microbatches_of_another_shape_or_dtype_are_refused() -> None:
    x, z = torch.randn(2, 3, 4)
    mask = x > 0
    check_same_shapes({"z": z, "x": x}, {"x": x, "z": z}, 3, "inputs")
    with pytest.raises(BadInput, match=r"microbatch 3: inputs: mask: \(3, 4\), torch.int64, of"):
        check_same_shapes({"x": x, "mask": mask.long()}, {"x": x, "mask": mask}, 3, "inputs")
    with pytest.raises(BadInput, match=r"inputs: \(2, 4\), .*of the first microbatch \(3, 4\)"):
        check_same_shapes(x[:2], x, 3, "inputs")


# ---- refusals


@pytest.mark.parametrize("name", REFUSED)
def test_a_forward_that_cannot_be_cut_is_refused_with_place_and_remedy(name: str) -> None:
    """Each is one line, and the model is left unchanged."""
    torch.manual_seed(0)
    way, message = REFUSED[name]
    model = make_three_layers(way)
    state, attributes = {k: v.clone() for k, v in model.state_dict().items()}, set(vars(model))
    random_state = torch.get_rng_state()
    with pytest.raises(BadInput, match=message) as refused:
        verify_cut(model, ["b", "c"], ROWS)
    assert len(refused.value.faults) == 1 and not torch.jit.is_tracing()
    assert torch.equal(torch.get_rng_state(), random_state) and set(vars(model)) == attributes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_under_autocast_a_weight_that_stages_cast_is_refused() -> None:
    """The whole model sums the gradients of one cast in bfloat16. The message once blamed a
    tensor that the model keeps aside."""
    repeated = nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), repeated, nn.Linear(4, 4), repeated)
    verify_cut(model, ["2"], ROWS)
    cast_forward(model, "cpu")
    with pytest.raises(BadInput, match="the gradient of 1.*in place of autocast where a weight"):
        verify_cut(model, ["2"], ROWS)


def test_hooks_on_modules_that_are_not_cut_run() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    calls: List[int] = []
    model[1][1].register_forward_hook(lambda *_: calls.append(1))
    cut = cut_model(model, ["1.1"], ROWS)
    before = len(calls)
    cut[1](cut[0](ROWS))
    assert len(calls) == before + 1


def test_orders_and_sizes_that_were_not_recorded_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(BadInput, match="stages: 1: begins stage 2, but runs during stage 0"):
        cut_model(model, ["2", "1"], ROWS)
    message = "stages: b: does not run in this forward after the stages before"
    with pytest.raises(BadInput, match=message):
        cut_model(make_three_layers(lambda m, h: h), ["b"], ROWS)
    with pytest.raises(BadInput, match=r"stage 1 gets tensors of shapes \[\(3, 4\)\]"):
        cut_model(model, ["1"], ROWS)[1](torch.randn(3, 4))


def test_a_cache_of_keys_is_refused_with_the_setting_that_turns_it_off() -> None:
    message = r"stage 0: model.transformer.h.0.*DynamicCache.*config.use_cache = False"
    with pytest.raises(BadInput, match=message):
        cut_model(build_third_party("gpt2", use_cache=True), ["model.transformer.h.1"], WORDS)


# ---- trial runs leave no trace


DIGITS = {"name": "digits", "subset": 64, "test_subset": 32}
SHORT: Dict[str, Any] = {
    "steps": 3, "micro_batch_size": 4, "gradient_accumulation": 2, "evaluate": {"subset": 6}, "log": {"tensorboard": False},
    "checkpoint": {"every": 3, "keep": 1}, "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9}, "loss": "cross_entropy",
    "data": DIGITS,
}  # fmt: skip


WRITES: Dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "attribute": lambda m, mean: m.center.mul_(0.9).add_(mean),
    "data": lambda m, mean: m.center.data.mul_(0.9).add_(mean),
    "view": lambda m, mean: m.view.mul_(0.9).add_(mean),
    "anew": lambda m, mean: setattr(m, "center", m.center * 0.9 + mean),
    "container": lambda m, mean: m.centers["all"][0].mul_(0.9).add_(mean),
    # Story: processes observe a model more often than the emulator, so a counter began higher there
    "number": lambda m, mean: setattr(m, "count", m.count + 1),
    "listed number": lambda m, mean: m.counts.append(m.counts.pop() + 1),
}


class MovingCenter(nn.Module):
    """A module that keeps a mean in a tensor that is no buffer, written in place or anew, or a count."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.center, self.centers = how, torch.zeros(4), {"all": [torch.zeros(4)]}
        self.count, self.counts = 0, [0]
        self.view = self.center[:]
        # tensors that are only there: equal to nothing, or with one number for all
        self.unread = torch.full((1,), float("nan")).expand(6), torch.zeros(1).expand(1 << 30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            WRITES[self.how](self, x.mean(0))
        return x - self.center - self.centers["all"][0] + self.count + self.counts[0]


@pytest.mark.parametrize("how", WRITES)
def test_trial_runs_leave_tensors_that_a_forward_writes(how: str) -> None:
    """Story: tensors that were no buffers began with the values of the trial runs, so the first
    losses were another training's."""
    inputs = torch.randn(3, 8, 4)

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), MovingCenter(how), nn.Linear(4, 4))

    plain = make_model()
    losses = [plain(x).square().mean().item() for x in inputs]
    model = make_model()
    verify_cut(model, ["2"], inputs[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    keys: Any = {"method": "gpipe", "stages": 2, "microbatches": 1}
    with ipu_pipe.Pipeline(model, lambda h, y: h.square().mean(), optimizer, **keys) as pipe:
        updates = [update for x in inputs for update in pipe.step(x, torch.zeros(8))]
    assert [update.loss for update in updates] == losses


def test_a_forward_that_writes_a_weight_writes_it_as_often_as_it_runs() -> None:
    """Story: it was written two more times, by observations of the model in its two modes. Such a weight has no versions."""
    keys = {"micro_batch_size": 4, "steps": 1, "data": DIGITS, "backend": {"threads": 1}}
    model = ShrinkingModel()
    weight = model[1].weight.detach().clone()
    build(configure(method="gpipe", **keys), model)
    assert torch.equal(model[1].weight, weight)
    with pytest.raises(BadInput, match="model: 1.weight"):
        build(configure(method="pipedream", **keys), ShrinkingModel())


# ---- runs on two processes


def train_on_two_processes(tmp_path: Path, keys: Dict[str, Any], **variables: str) -> Any:
    """Train by the command; return its output."""
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps({**keys, "backend": {"name": "distributed", "threads": 1}}))
    out = [str(file), "--out", str(tmp_path / "processes")]
    return forked.run_ranks(2, "train", out, **variables)


def test_a_checkpoint_that_is_cut_is_refused_where_its_backward_reads_newer_weights(
    tmp_path: Path,
) -> None:
    model = {"entry": "tests.staged_models:make_cut_checkpoint"}
    output = train_on_two_processes(tmp_path, {**SHORT, "model": model, "method": "pipemare"})
    assert output.code == 2 and "model: a, b:" in output.error


def test_a_model_from_python_keeps_the_compiling_of_the_config(tmp_path: Path) -> None:
    """Story: `model.compile` was left out without a word, also where a backend refuses it."""
    model = {"entry": "tests.test_cutting:make_dropout_classifier", "compile": True}
    config = configure(**{**SHORT, "method": "gpipe", "model": model})
    with pytest.raises(BadInput, match="model.compile: processes alone"):
        train(config, tmp_path / "run", model=make_dropout_classifier())


def make_dropout_classifier() -> nn.Module:
    """Make a model with dropout, which must draw the same in compiled modules."""
    block = nn.Sequential(nn.Linear(64, 32), nn.Dropout(0.2), nn.Tanh())
    return nn.Sequential(nn.Flatten(), block, begin_stage(nn.Linear(32, 10)))


@pytest.mark.slow
def test_modules_of_stages_are_compiled_and_agree_within_rounding(tmp_path: Path) -> None:
    """Compiled kernels round differently: by at most 1e-5 for weights of size 1 after three updates."""
    model = {"entry": "tests.test_cutting:make_dropout_classifier"}
    keys = {**SHORT, "method": "gpipe", "model": model}
    train(configure(**keys, backend={"threads": 1}), tmp_path / "emulator")
    keys["model"] = {**model, "compile": True}
    # a shared cache may contain kernels for another machine's instructions
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    output = train_on_two_processes(tmp_path, keys, **cache)
    assert output.code == 0, output.error
    ours, theirs = (read_weights(tmp_path / name, 3) for name in ("emulator", "processes"))
    assert_states_close(ours, theirs, atol=1e-5)
    with pytest.raises(BadInput, match="model.compile: processes alone"):
        build(configure(**keys, backend={"name": "emulator"}))
