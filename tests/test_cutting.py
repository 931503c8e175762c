"""Models are cut wherever a named module begins: the pieces equal the whole model, bit for bit; other models are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Tuple

import pytest
import torch
from torch import nn

from ipu_pipe.cut.cutting import cut_model, list_crossings
from ipu_pipe.cut.verification import verify_pieces
from ipu_pipe.errors import BadInput
from ipu_pipe.model.batch import check_same_shapes
from ipu_pipe.model.observation import observe_effects
from ipu_pipe.model.randomness import KeyedRandomness
from ipu_pipe.model.restoring import restore_buffers, restore_modes
from ipu_pipe.model.stages import partition
from tests.support.models import Composed


class UNet(nn.Module):
    """A model with one shared ReLU, which overwrites tensors that are needed again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.down, self.deep = (
            nn.Conv2d(4, 4, 3, padding=1, stride=2),
            nn.Conv2d(4, 4, 3, padding=1),
        )
        self.up, self.last = nn.ConvTranspose2d(4, 4, 2, stride=2), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.relu(self.norm(self.first(x)))
        deep = self.relu(self.deep(self.relu(self.down(first))))
        return self.last(torch.cat([self.up(deep), first], 1))  # type: ignore[no-any-return]


def make_translator() -> nn.Module:
    """Make a translator whose forward computes a causal mask from sizes."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        h = m.embed(x)
        return m.head(m.transformer(h, h, tgt_mask=mask))

    parts = {"embed": nn.Embedding(50, 16), "head": nn.Linear(16, 50)}
    return Composed(forward, **parts, transformer=nn.Transformer(16, 2, 2, 2, 32, batch_first=True))


class CutBlocks(nn.Module):
    """Blocks that are cut inside no_grad and autocast, with a weight, a counter and a later write in place."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.frozen, self.low, self.b = (nn.Linear(6, 6) for _ in range(4))
            self.scale, self.drop = nn.Parameter(torch.full((6,), 1.5)), nn.Dropout(0.5)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
            h = self.drop(self.a(x))
            self.count += 1
            with torch.no_grad():
                h = h + self.frozen(h)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                low = self.low(h) * self.scale
            low[:, 0] = 0
            return self.b(low.float() * self.scale + x + shift + torch.arange(x.shape[1]))  # type: ignore[no-any-return]

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.rows = nn.Linear(6, 6), nn.ModuleList([self.Block(), self.Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        h = h + self.stem.bias
        for row in self.rows:
            h = row(h, shift=1.0) + h.mean()
        return h


IMAGES, WORDS = torch.randn(3, 3, 16, 16), torch.randint(1, 50, (3, 7))
OWN: List[Tuple[Callable[[], nn.Module], List[str], torch.Tensor]] = [
    (UNet, ["relu", "deep", "up"], IMAGES),
    (UNet, ["down", "last"], IMAGES),
    (
        make_translator,
        ["transformer.encoder.layers.1.linear1", "transformer.decoder.layers.1"],
        WORDS,
    ),
    (CutBlocks, ["rows.0.frozen", "rows.0.low", "rows.0.b", "rows.1.b"], torch.randn(3, 6)),
]


def list_other_models() -> Dict[str, Tuple[str, List[str], torch.Tensor]]:
    """Return name -> (entry, begins, input) of models of other libraries: those of the equality tool, and more."""
    large = torch.randn(3, 3, 32, 32)
    return {
        "torchvision-vit": ("make_vision_transformer", [], IMAGES), "timm-vit": ("make_timm_vit", [], IMAGES),
        "timm-convnext": ("make_timm_convnext", [], large), "hf-bert": ("make_bert", [], WORDS),
        "hf-gpt2": ("make_gpt2", [], WORDS),
        "swin": ("make_timm_swin", ["layers.0.blocks.1.mlp", "layers.1.blocks.1"], IMAGES),
        "googlenet": ("make_googlenet", ["inception3b.branch2", "inception4d.branch3"], large),
        "densenet": ("make_densenet", ["features.denseblock1.denselayer2", "features.denseblock2.denselayer2"], large),
    }  # fmt: skip


def assert_pieces_equal_model(model: nn.Module, begins: List[str], x: torch.Tensor) -> None:
    """Check that chained pieces have the outputs, gradients and buffers of the whole model, in evaluation also for another batch
    size."""
    attributes = [set(vars(module)) for module in model.modules()]
    cut = cut_model(model, begins, x)
    verify_pieces(model, cut, x)
    assert [set(vars(module)) for module in model.modules()] == attributes
    stages = partition(model, x, begins).stages
    assert [sorted(piece.list_weights()) for piece in cut] == [
        sorted(stage.parameters) for stage in stages
    ]
    assert sorted(name for piece in cut for name in piece.select_state()) == sorted(
        model.state_dict()
    )
    keyed = KeyedRandomness(model, observe_effects(model, x).draws, 0, x.device)
    results = []
    for chained in (False, True):
        model.zero_grad()
        with restore_buffers(model):
            value: Any = x.clone()
            with keyed.forward(0):
                for piece in cut if chained else [model.train()]:
                    value = piece(value)
            outputs = [
                t
                for t in (value if isinstance(value, tuple) else (value,))
                if isinstance(t, torch.Tensor)
            ]
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
            value = x[:rows]
            for piece in cut:
                value = piece(value)
            assert torch.equal(value, model(x[:rows]))


@pytest.mark.parametrize(
    "make, begins, x", OWN, ids=["unet", "unet-again", "transformer", "blocks"]
)
def test_pieces_compute_the_same_as_the_model(
    make: Any, begins: List[str], x: torch.Tensor
) -> None:
    torch.manual_seed(0)
    assert_pieces_equal_model(make(), begins, x)


@pytest.mark.parametrize("name", list(list_other_models()))
def test_models_of_other_libraries_are_cut_inside_their_modules(name: str) -> None:
    from tests import third_party_models

    entry, begins, x = list_other_models()[name]
    torch.manual_seed(0)
    assert_pieces_equal_model(
        getattr(third_party_models, entry)(), begins or third_party_models.CASES[name].begins, x
    )


def test_tensors_that_depend_on_sizes_alone_do_not_cross() -> None:
    cut = cut_model(make_translator(), ["transformer.decoder.layers.1"], WORDS)
    assert [[t.shape for t in crossing.tensors] for crossing in list_crossings(cut)] == [
        [(3, 7, 16)] * 2
    ]


def test_messages_preserve_memory_layouts() -> None:
    """Kernels depend on the memory layout of a tensor, so that a message must restore it."""
    model, x = (
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3)).to(memory_format=torch.channels_last),
        IMAGES,
    )
    cut = cut_model(model, ["1"], x.contiguous(memory_format=torch.channels_last))
    (crossing,) = list_crossings(cut)
    value = cut[0](x.contiguous(memory_format=torch.channels_last))
    (message,) = crossing.to_messages(value)
    assert message.is_contiguous() and message.shape == crossing.tensors[0].message_shape == (
        3,
        16,
        16,
        4,
    )
    again = crossing.from_messages([message.clone()])
    assert again.stride() == value.stride() != message.stride() and torch.equal(again, value)


def test_a_tensor_without_a_gradient_is_not_differentiable() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    model[1].requires_grad_(True)
    assert (
        not list_crossings(cut_model(model, ["1"], torch.randn(2, 4)))[0].tensors[0].differentiable
    )


# ---- refusals


class ActingModel(nn.Module):
    """Two layers, and a forward `act` that uses them."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.stored = nn.Linear(4, 4), nn.Linear(4, 4), None

    class Reader(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._inner = [inner]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self._inner[0].stored  # type: ignore[no-any-return,operator]

    def __init__(self, act: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.act = self.Inner(), act
        self.reader = self.Reader(self.inner)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self, x)


class DoublingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class StoreCache:
    """A cache that a module stores tensors in."""

    def __init__(self) -> None:
        self.tensors: List[torch.Tensor] = []


def branch_on_value(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = self.inner.a(x)
    return self.inner.b(h if h.sum() > 0 else -h)  # type: ignore[no-any-return]


def scale_by_list(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = self.inner.a(x)
    return self.inner.b(h * max(h.tolist()[0]))  # type: ignore[no-any-return]


def draw_dropout(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.inner.b(nn.functional.dropout(self.inner.a(x), training=self.training))  # type: ignore[no-any-return]


def store_output(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.inner.stored = self.inner.a(x)
    return self.reader(self.inner.b(x))  # type: ignore[no-any-return]


def collect_in_cache(self: Any, x: torch.Tensor) -> torch.Tensor:
    cache = StoreCache()
    cache.tensors.append(self.inner.a(x))
    self.inner.a.forward = lambda x, cache: nn.functional.linear(x, self.inner.a.weight)
    try:
        return self.inner.b(self.inner.a(x, cache=cache))  # type: ignore[no-any-return]
    finally:
        del self.inner.a.forward


def use_own_backward(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.inner.b(DoublingFunction.apply(self.inner.a(x)))  # type: ignore[no-any-return]


def rebind_buffer(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.count = self.count + 1
    return self.inner.b(self.inner.a(x))  # type: ignore[no-any-return]


def overwrite_view(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = self.inner.a(x) * 1
    rows = h[:, :2]
    b = self.inner.b(h * 2)
    h += 1
    return b + rows.sum() + h  # type: ignore[no-any-return]


def penalize_gradient(self: Any, x: torch.Tensor) -> Any:
    x = x.detach().requires_grad_()
    y = self.inner.b(self.inner.a(x))
    return y, torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def drop_layer(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = self.inner.a(x)
    return self.inner.b(h) if torch.rand([]) < 2 else h  # type: ignore[no-any-return]


@dataclass
class Activations:
    hidden: torch.Tensor


def wrap_in_dataclass(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.inner.b.forward = lambda wrapped: wrapped.hidden + 1
    try:
        return self.inner.b(Activations(self.inner.a(x)))  # type: ignore[no-any-return]
    finally:
        del self.inner.b.forward


def pack_sequence(self: Any, x: torch.Tensor) -> torch.Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(
        self.inner.a(x)[..., None], torch.tensor([4, 3]), True
    )
    self.inner.b.forward = lambda packed: packed.data + 1
    try:
        return self.inner.b(packed)  # type: ignore[no-any-return]
    finally:
        del self.inner.b.forward


@pytest.mark.parametrize(
    "act, message",
    [
        (
            penalize_gradient,
            r"stage 1: torch.autograd.grad in the model's own forward: it differentiates with "
            r"respect to a tensor of an earlier stage.*emulator",
        ),
        (
            drop_layer,
            r"stage 0: a random number read from a tensor \(LayerDrop\?\) in the model's own "
            r"forward: .*draw in a module that no stage begins inside",
        ),
        (
            wrap_in_dataclass,
            r"stage 1: inner.b in the model's own forward: it gets tensors in a Activations, .*: "
            r"return the tensors in a tuple",
        ),
        (
            pack_sequence,
            r"stage 1: inner.b in the model's own forward: it gets tensors in a PackedSequence, .*: "
            r"pass the padded tensor and the lengths",
        ),
        (
            branch_on_value,
            r"stage 0: a number read from a tensor \(if, item, int\) in the model's own forward: "
            r".*emulator",
        ),
        (
            scale_by_list,
            r"stage 0: tolist in the model's own forward: "
            r"in a module that is cut, the forward depends on a tensor's values",
        ),
        (
            draw_dropout,
            r"model: ActingModel: cut into pieces it is not the same model: "
            r"the output of inner.b",
        ),
        (
            store_output,
            r"stage 1: reader in the model's own forward: "
            r"its add reads a tensor that an earlier stage made and kept aside",
        ),
        (
            collect_in_cache,
            r"stage 0: inner.a in the model's own forward: "
            r"it takes a StoreCache, .*config.use_cache = False",
        ),
        (use_own_backward, r"model: ActingModel: cut into pieces it is not the same model"),
        (
            rebind_buffer,
            r"model: ActingModel: cut into pieces it is not the same model: "
            r"the buffer of count",
        ),
        (overwrite_view, r"model: ActingModel: cut into pieces it is not the same model"),
        (
            lambda self, x: self.inner.a(x),
            r"stages: inner.b: does not run in this forward after the stages before",
        ),
    ],
)
def test_a_forward_that_cannot_be_cut_is_refused_with_place_and_remedy(
    act: Any, message: str
) -> None:
    model, x = ActingModel(act), torch.randn(2, 4)
    with pytest.raises(BadInput, match=message) as refused:
        verify_pieces(model, cut_model(model, ["inner.b"], x), x)
    assert len(refused.value.faults) == 1
    assert (
        not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        and not torch.jit.is_tracing()
    )
    assert model.inner.stored is None


def test_hooks_on_modules_that_are_cut_are_refused_and_others_run() -> None:
    model, x, calls = (
        nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())),
        torch.randn(2, 4),
        [],
    )
    model[1][1].register_forward_hook(lambda *_: calls.append(1))
    cut = cut_model(model, ["1.1"], x)
    before = len(calls)
    cut[1](cut[0](x))
    assert len(calls) == before + 1
    model[1].register_forward_hook(lambda *_: None)
    with pytest.raises(BadInput, match="stages: 1: has hooks, but stages begin inside it"):
        cut_model(model, ["1.1"], x)
    cut_model(model, ["1"], x)


def test_orders_and_sizes_that_were_not_recorded_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(BadInput, match="stages: 1: begins stage 2, but runs during stage 0"):
        cut_model(model, ["2", "1"], torch.randn(2, 4))
    cut = cut_model(model, ["1"], torch.randn(2, 4))
    with pytest.raises(BadInput, match=r"stage 1 gets tensors of shapes \[\(3, 4\)\]"):
        cut[1](torch.randn(3, 4))


def test_a_cache_of_keys_is_refused_with_the_setting_that_turns_it_off() -> None:
    from tests import third_party_models

    with pytest.raises(
        BadInput, match=r"stage 0: model.transformer.h.0.*DynamicCache.*config.use_cache = False"
    ):
        cut_model(third_party_models.make_gpt2(use_cache=True), ["model.transformer.h.1"], WORDS)


class MaskedModel(nn.Module):
    """A model that branches on the presence of inputs, and on dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, z: Any = None, mask: Any = None) -> torch.Tensor:
        h = self.a(x)
        if mask is not None:
            h = h.masked_fill(~mask, 0) if mask.dtype is torch.bool else h * mask
        h = self.b(h)
        return self.c(h if z is None else h + z)  # type: ignore[no-any-return]


def test_inputs_of_another_kind_are_recorded_separately() -> None:
    """Story: for keys of a batch in another order, tensors of one shape came to the model exchanged."""
    model, (x, z), mask = MaskedModel(), torch.randn(2, 3, 4), torch.rand(3, 4) > 0.5
    cut = cut_model(model, ["b", "c"], {"x": x, "z": z})
    for inputs in (
        {"z": z, "x": x}, {"x": z, "z": x}, {"z": None, "x": x}, {"x": x, "z": z, "mask": mask},
        {"x": x, "z": z, "mask": mask.float()}, {"mask": mask.long(), "z": z, "x": x}, {"x": x, "mask": mask},
    ):  # fmt: skip
        value: Any = inputs
        for piece in cut:
            value = piece(value)
        assert torch.equal(value, model(**inputs)), list(inputs)
    check_same_shapes({"z": z, "x": x}, {"x": x, "z": z}, 3)
    with pytest.raises(
        BadInput,
        match=r"microbatch 3: inputs: mask: \(3, 4\), torch.int64, of the first microbatch",
    ):
        check_same_shapes({"x": x, "mask": mask.long()}, {"x": x, "mask": mask}, 3)
    with pytest.raises(BadInput, match=r"inputs: \(2, 4\), .*of the first microbatch \(3, 4\)"):
        check_same_shapes(x[:2], x, 3)
