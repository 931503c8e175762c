"""Check the costs of a model's passes: FLOPs against formulas and a real backward, bytes against real tensors, and shapes
against numbers."""

from __future__ import annotations

import copy
import itertools
import resource
from typing import Any, Dict, List, Tuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ipu_pipe.cut.cutting import cut_model, list_crossings
from ipu_pipe.hardware.description import read_hardware
from ipu_pipe.hardware.model_units import CountedUnits, count_units, measure_units
from ipu_pipe.model import flops
from ipu_pipe.model.meta import can_run_on_meta, move_to_meta, to_meta
from ipu_pipe.model.observation import Observation, count_saved_bytes, observe_costs
from ipu_pipe.model.restoring import restore_all
from ipu_pipe.model.stages import begin_stage, make_footprint, partition
from ipu_pipe.plan.prediction import Problem, UnitSums
from models.resnet import resnet18
from models.transformer import transformer_lm, transformer_translation
from tests.support.models import Composed, take_output
from tests.support.runs import assert_same
from tests.support.units import join_units

needs_flop_counter = pytest.mark.skipif(
    flops.FlopCounterMode is None, reason="torch 2.0 has no counter"
)


def make_attention_layer(width: int, causal: bool = False) -> nn.Module:
    """Make a layer of attention, by a function, with a residual connection."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in m.heads(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return x + m.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    return Composed(forward, heads=nn.Linear(width, 3 * width), out=nn.Linear(width, width))


def make_skip_model() -> nn.Module:
    """Make a model with skips over one and over two modules, which reads its input again at the end."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        a = m.a(x).relu()
        return m.d(torch.cat((a, m.c(m.b(a)), x), 1)).mean((2, 3))

    return Composed(
        forward, a=nn.Conv2d(3, 4, 3, padding=1), b=begin_stage(nn.Conv2d(4, 5, 3, stride=2, padding=1)),
        c=begin_stage(nn.ConvTranspose2d(5, 4, 2, stride=2)), d=begin_stage(nn.Conv2d(11, 2, 1)),
    )  # fmt: skip


def make_convolution_layers() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1, groups=3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
        nn.ConvTranspose2d(6, 4, 3, stride=2, output_padding=1, dilation=2), nn.GroupNorm(2, 4), nn.GELU(), nn.Dropout(0.1),
        nn.MaxPool2d(2, ceil_mode=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


IMAGES, TOKENS = torch.randn(4, 3, 17, 15), torch.randint(0, 32, (3, 12))
MODELS: Dict[str, Tuple[Any, torch.Tensor]] = {
    "convolutions": (make_convolution_layers, IMAGES),
    "resnet": (lambda: resnet18(classes=10, small_images=True), torch.randn(2, 3, 32, 32)),
    "unet": (make_skip_model, torch.randn(2, 3, 8, 8)),
    "attention": (lambda: nn.Sequential(make_attention_layer(8), make_attention_layer(8, True)), torch.randn(2, 5, 8)),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), torch.randn(2, 5, 8)),
    "gpt": (lambda: transformer_lm(32, 16, 2, 3, 16, dropout=0.1), TOKENS),
    "translation": (lambda: transformer_translation(20, 20, 8, 2, 2, 16), torch.randint(1, 20, (2, 2, 7))),
    "recurrent": (lambda: nn.Sequential(take_output(nn.LSTM(8, 4, batch_first=True)), nn.Linear(4, 2)), torch.randn(2, 5, 8)),
}  # fmt: skip
each_model = pytest.mark.parametrize("make, x", MODELS.values(), ids=MODELS)


def observe_numbers(model: nn.Module, x: torch.Tensor) -> Observation:
    """Observe the costs of a forward with real numbers."""
    with restore_all(model):
        return observe_costs(model, x, lambda: model(x))


def observe_shapes(model: nn.Module, x: torch.Tensor) -> Observation:
    """Observe the costs of a forward on the meta device, which has shapes alone."""
    with move_to_meta(model):
        shapes = to_meta(x)
        return observe_costs(model, shapes, lambda: model(shapes))


def list_costs(observation: Observation) -> List[Any]:
    return [
        observation.runs, observation.live, count_saved_bytes(observation.calls),
        [(c.name, c.flops, c.backward_flops, count_saved_bytes([c])) for c in observation.calls],
    ]  # fmt: skip


@each_model
def test_shapes_give_the_same_costs_as_numbers(make: Any, x: torch.Tensor) -> None:
    model = make()
    if not can_run_on_meta(model, x):
        return
    assert list_costs(observe_numbers(model, x)) == list_costs(observe_shapes(model, x))
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])


@needs_flop_counter
@each_model
def test_forward_and_backward_add_up_to_the_counts_of_pytorch(make: Any, x: torch.Tensor) -> None:
    model = make()
    observation = observe_numbers(model, x)
    missing = flops._list_missing_formulas()
    with flops.separate_attention(), flops.FlopCounterMode(
        display=False, custom_mapping=missing
    ) as counter:
        value = model(x)
    with flops.FlopCounterMode(display=False, custom_mapping=missing) as back:
        value.sum().backward()
    assert sum(c.flops for c in observation.calls) == counter.get_total_flops() > 0
    assert sum(c.backward_flops for c in observation.calls) == back.get_total_flops() > 0


def count_stage_flops(model: nn.Module, x: torch.Tensor, begin: str) -> List[Tuple[float, float]]:
    footprint = make_footprint(model, partition(model, x, [begin]), observe_numbers(model, x))
    assert footprint.backward_flops is not None
    return list(zip(footprint.forward_flops, footprint.backward_flops))


@needs_flop_counter
def test_flops_of_passes_by_hand() -> None:
    b, n, w = 2, 5, 8
    model, x = nn.Sequential(nn.Linear(w, w), make_attention_layer(w)), torch.randn(b, n, w)
    linear, projection, attention = 2 * b * n * w * w, 2 * b * n * w * 3 * w, 4 * b * n * n * w
    first, second = count_stage_flops(model, x, "1")
    assert first == (linear, linear)  # the inputs need no gradient
    assert second[0] == projection + attention + linear
    # the fused backward computes the scores again
    fused = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    assert second[1] == 2 * (projection + linear) + (2.5 if fused else 2) * attention
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 6, 3, groups=2))
    a, c = 2 * 2 * 4 * 36 * 27, 2 * 2 * 6 * 16 * 18
    assert count_stage_flops(net, torch.randn(2, 3, 8, 8), "1") == [(a, a), (c, 2 * c)]


@each_model
def test_counted_activations_are_those_that_autograd_saves(make: Any, x: torch.Tensor) -> None:
    model = make()
    weights = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    saved = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage()
        if place.data_ptr() not in weights:
            saved[place.data_ptr()] = (place.nbytes(), tensor)
        return tensor

    with restore_all(model), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(x)
    expected = sum(size for size, _ in saved.values())
    assert count_saved_bytes(observe_numbers(model, x).calls) == expected > 0
    del output


@pytest.mark.parametrize("name", ["convolutions", "resnet", "unet", "gpt", "translation"])
def test_counted_outputs_are_the_tensors_between_pieces(name: str) -> None:
    """With skips and the input that a later piece reads; a footprint has them at its boundaries."""
    make, x = MODELS[name]
    model = make()
    units = count_units(model, x).units
    names = [unit.name for unit in units[1:]]
    crossings = list_crossings(cut_model(model, names, x))
    sizes = [sum(shape.bytes for shape in crossing.tensors) for crossing in crossings]
    assert [unit.output_bytes * len(x) for unit in units[:-1]] == sizes
    footprint = make_footprint(model, partition(model, x, names), observe_numbers(model, x))
    assert footprint.boundary_bytes == tuple(sizes)


def test_units_have_every_weight_once_and_add_up() -> None:
    for tied, names in ((False, "embedding block1 block2 block3 norm head"), (True, "embedding")):
        model = transformer_lm(32, 16, 2, 3, 16, tied=tied)
        costed = count_units(model, TOKENS)
        whole = join_units(costed.units)
        assert whole.parameters == sum(p.numel() for p in model.parameters())
        calls = observe_numbers(model, TOKENS).calls
        assert whole.activation_bytes * len(TOKENS) == count_saved_bytes(calls)
        assert [u.name for u in costed.units] == names.split() and "by shape" in costed.how


def test_a_forward_that_reads_values_is_run_and_reported() -> None:
    look = lambda m, x: m.b(x) if float(x.sum()) > 1e9 else m.b(m.a(x))  # noqa: E731
    model, x = Composed(look, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), torch.randn(6, 4)
    costed = count_units(model, x)
    assert "of 2 samples" in costed.how
    assert [(u.name, u.forward_flops) for u in costed.units] == [("a", 32), ("b", 32)]
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
@needs_flop_counter
def test_billions_of_parameters_are_counted_without_memory() -> None:
    """A transformer of 48 blocks of width 1920 has 2.2 billion (Narayanan et al. 2021)."""
    with torch.device("meta"):
        model = transformer_lm(vocabulary=51200, width=1920, heads=20, blocks=48, context=512)
        x = torch.zeros(1, 512, dtype=torch.long)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    units = count_units(model, x).units
    growth_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert len(units) == 51 and 2.2e9 < sum(u.parameters for u in units) < 2.5e9
    assert units[1].forward_flops == 2 * 512 * 12 * 1920**2 + 4 * 512**2 * 1920
    assert growth_kib < 300e3  # the weights alone would be 9 GB


def test_measured_units_have_seconds_of_each_pass() -> None:
    layers = nn.Linear(192, 300), nn.ReLU(), nn.Linear(300, 300), nn.Linear(300, 4)
    model = nn.Sequential(nn.Flatten(), *layers).eval()
    x, y = torch.randn(8, 3, 8, 8), torch.randint(0, 4, (8,))
    before = copy.deepcopy(model.state_dict())
    costed: CountedUnits = measure_units(count_units(model, x), model, F.cross_entropy, x, y)
    assert all(u.measured[0].samples == 8 and u.measured[0].forward > 0 for u in costed.units)
    assert sum(u.measured[0].backward > 0 for u in costed.units) >= 3  # a flattening has none
    assert "measured with 8 samples on cpu, which repeat within " in costed.how
    assert_same(before, model.state_dict())
    assert all(p.grad is None for p in model.parameters())


def test_an_observation_by_shape_leaves_no_meta_tensor_behind() -> None:
    """Check with a model that stores masks during its forwards."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        m.last = m.inner(x)
        return m.last * m.masks.setdefault(x.shape[0], torch.ones_like(x)) + torch.ones(4)

    model, x = Composed(forward, inner=nn.Linear(4, 4), masks={}), torch.randn(2, 4)
    weight = model.inner.weight
    observe_shapes(model, x)
    assert model.masks == {} and not hasattr(model, "last") and model.inner.weight is weight
    assert model(x).device.type == "cpu"


def test_a_stage_counts_tensors_that_several_units_save_once() -> None:
    """Check every range of units against a pass of them. The last unit saves a tensor that the second saves too."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        h = m.a(x)
        return m.d(m.c(m.b(h))) * h

    layers = {name: nn.Linear(4, 4, bias=False) for name in "abcd"}
    model, x = Composed(forward, **layers), torch.zeros(2, 4)
    units, calls = count_units(model, x, ["b", "c", "d"]).units, observe_numbers(model, x).calls[1:]
    assert [unit.also_kept for unit in units] == [(), (), (), ((2, 16.0),)]
    sums = UnitSums(Problem(units, 16.0, read_hardware("v100x8"), 1e9, "float32", 0), 2)
    for first, end in itertools.combinations(range(5), 2):
        joined = join_units(units[first:end]).activation_bytes
        assert joined * 2 == count_saved_bytes(calls[first:end]), (first, end)
        assert sums.make_stage(np.array(first), np.array(end)).activation_bytes == joined
