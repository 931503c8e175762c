"""Test models of images: the literature's sizes, the papers' stages, layers written out, refusals."""

from __future__ import annotations

from typing import Any, Callable, Dict, List

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ipu_pipe.model.observation import observe_effects
from ipu_pipe.model.stages import partition
from models import mlp as mlps
from models import resnet as resnets
from models import vgg
from models.convnet import convnet
from models.losses import smoothed_cross_entropy
from tests.support.models import build_on_meta, count_weights, find_unreached_weights
from tests.support.runs import list_faults

IMAGES = torch.empty(2, 3, 32, 32, device="meta")
# parameters of torchvision's and timm's models (those of VGG: its features, and three linear layers of 512), and the stages of
# Kosson et al. 2021, Table 1, or one for a block and one for the stem
SIZES = {
    "resnet18": (11_689_512, 9), "resnet34": (21_797_672, 17), "resnet50": (25_557_032, 17), "resnet101": (44_549_160, 34),
    "resnet152": (60_192_808, 51), "preact_resnet20": (272_282, 34), "preact_resnet32": (466_714, 52),
    "preact_resnet44": (661_146, 70), "preact_resnet56": (855_578, 88), "preact_resnet110": (1_730_522, 169),
    "preact_resnet50": (25_549_352, 78),
    "vgg11": (9_220_480 + 2 * 262_656 + 5130, 29), "vgg13": (9_404_992 + 2 * 262_656 + 5130, 33),
    "vgg16": (14_714_688 + 2 * 262_656 + 5130, 39),
}  # fmt: skip


def list_stage_owners(model: nn.Module, example: torch.Tensor) -> List[List[str]]:
    """Return for each stage the modules that own its parameters."""
    stages = partition(model, example).stages
    return [list(dict.fromkeys(n.rpartition(".")[0] for n in s.parameters)) for s in stages]


# ---- sizes and stages


@pytest.mark.parametrize("name", SIZES)
def test_models_have_the_literatures_sizes_and_stages(name: str) -> None:
    model = build_on_meta(getattr(vgg if name.startswith("vgg") else resnets, name))
    assert (count_weights(model), len(partition(model, IMAGES))) == SIZES[name]


def test_resnet50_for_cifar_has_the_size_and_the_107_weights_of_pipemare() -> None:
    model = build_on_meta(resnets.resnet50, classes=10, small_images=True)
    assert count_weights(model) == 23_520_842
    assert len(partition(model, IMAGES, "finest")) == 107
    # the last seven: four layers, pool, flatten, linear
    before_layer1 = nn.Sequential(*list(model.children())[:-7])
    assert before_layer1(IMAGES).shape == (2, 64, 32, 32) and model(IMAGES).shape == (2, 10)


def test_a_vggs_stages_begin_at_top_level_children() -> None:
    """A norm belongs to its convolution's stage, the flattening to the last pool's."""
    model = build_on_meta(vgg.vgg16, norm="group")
    children = [n for n, _ in model.named_children() if not n.startswith(("norm", "flatten"))]
    assert [stage.name for stage in partition(model, IMAGES).stages] == children


def test_stem_and_head_belong_to_the_first_and_last_blocks_stages() -> None:
    owners = list_stage_owners(build_on_meta(resnets.resnet18), IMAGES)
    block = ["conv1", "bn1", "conv2", "bn2"]
    assert owners[0] == ["conv1", "bn1"] and owners[1] == [f"layer1.0.{name}" for name in block]
    assert owners[-1] == [*(f"layer4.1.{name}" for name in block), "fc"]


def test_stages_of_a_preactivation_resnet_own_the_papers_modules() -> None:
    want = [["conv1"]]
    for layer in (1, 2, 3):
        for block in (0, 1, 2):
            at = f"layer{layer}.{block}"
            first = [[f"{at}.norm1", f"{at}.conv1"]]
            if layer > 1 and block == 0:
                first = [[f"{at}.norm1", f"{at}.shortcut"], [f"{at}.conv1"]]
            want += [*first, [f"{at}.norm2", f"{at}.conv2"], []]
    want += [["norm"], [], ["fc"], []]  # last norm, pool, linear, loss
    assert list_stage_owners(build_on_meta(resnets.preact_resnet20), IMAGES) == want


@pytest.mark.parametrize(
    "make, groups, channels, count",
    [
        (resnets.preact_resnet20, 8, 16, 19),
        (lambda: resnets.resnet50(norm="group"), 32, 64, 53),
        (lambda: vgg.vgg11(width=6, norm="group"), 3, 6, 8),
    ],
)
def test_the_number_of_groups_is_fixed_and_the_first_groups_have_two_channels(
    make: Any, groups: int, channels: int, count: int
) -> None:
    norms = [m for m in build_on_meta(make).modules() if isinstance(m, nn.GroupNorm)]
    assert {m.num_groups for m in norms} == {groups}
    assert (norms[0].num_channels, len(norms)) == (channels, count)


def test_perceptrons_are_a_stage_a_linear_layer_or_a_block() -> None:
    x = torch.randn(4, 3, 2, 2)
    model = mlps.mlp(inputs=12, width=8, layers=3, classes=5)
    assert list_stage_owners(model, x) == [["fc1"], ["fc2"], ["fc3"], ["head"]]
    assert count_weights(model) == (12 * 8 + 8) + 2 * (8 * 8 + 8) + (8 * 5 + 5)
    assert model(x).shape == (4, 5)
    assert list_stage_owners(mlps.mlp(inputs=12, layers=0, classes=5), x) == [["head"]]

    model = mlps.residual_mlp(inputs=12, width=8, blocks=2, classes=5)
    blocks = [[f"block{n}.norm", f"block{n}.linear"] for n in (1, 2)]
    assert list_stage_owners(model, x) == [["stem"], *blocks, ["head"]]
    block, h = model.block1, model.stem(x.flatten(1))
    assert torch.equal(block(h), h + block.linear(block.norm(h).clamp(min=0)))
    assert len(partition(mlps.residual_mlp(), torch.randn(1, 1, 28, 28))) == 34


# ---- outputs


def compute_resnet(state: Dict[str, torch.Tensor], depths: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute the network in evaluation mode, written out with torchvision's names; v1.5: the
    stride is in the 3x3."""

    def apply(conv: str, norm: str, x: torch.Tensor, stride: int) -> torch.Tensor:
        weight = state[f"{conv}.weight"]
        x = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
        keys = ("running_mean", "running_var", "weight", "bias")
        return F.batch_norm(x, *(state[f"{norm}.{key}"] for key in keys))

    x = F.max_pool2d(F.relu(apply("conv1", "bn1", x, 2)), 3, 2, 1)
    for layer, depth in enumerate(depths, 1):
        for index in range(depth):
            at, stride = f"layer{layer}.{index}", 2 if layer > 1 and index == 0 else 1
            last = 3 if f"{at}.conv3.weight" in state else 2
            out = x
            for n in range(1, last + 1):
                out = apply(f"{at}.conv{n}", f"{at}.bn{n}", out, stride if n == last - 1 else 1)
                out = F.relu(out) if n < last else out
            if f"{at}.downsample.0.weight" in state:
                x = apply(f"{at}.downsample.0", f"{at}.downsample.1", x, stride)
            x = F.relu(out + x)
    return F.linear(x.mean((2, 3)), state["fc.weight"], state["fc.bias"])


@pytest.mark.parametrize("name, depths", [("resnet18", (2, 2, 2, 2)), ("resnet50", (3, 4, 6, 3))])
def test_resnets_equal_torchvisions(name: str, depths: Any) -> None:
    torch.manual_seed(0)
    model = getattr(resnets, name)(classes=7).double()
    for module in model.modules():  # statistics and gains that distinguish the norms
        if isinstance(module, nn.BatchNorm2d):
            for values in (module.running_mean, module.bias.data):
                values.normal_(0, 0.1)
            for values in (module.running_var, module.weight.data):
                values.uniform_(0.5, 1.5)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), compute_resnet(model.state_dict(), depths, x))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kind", ["PreActivationBlock", "PreActivationBottleneck"])
def test_a_preactivation_block_projects_the_shared_preactivation(kind: str, stride: int) -> None:
    """An ordinary block adds its input."""
    torch.manual_seed(5)
    last = 3 if kind.endswith("Bottleneck") else 2
    make = getattr(resnets, kind)
    norm = lambda channels: nn.GroupNorm(2, channels)  # noqa: E731
    block, x = make(4, 2, stride, norm), torch.randn(2, 4, 8, 8)

    def normalize(x: torch.Tensor, n: int) -> torch.Tensor:
        module = getattr(block, f"norm{n}")
        return F.group_norm(x, 2, module.weight, module.bias).relu()

    shared = inner = normalize(x, 1)
    for n in range(1, last + 1):
        weight = getattr(block, f"conv{n}").weight
        strided = stride if n == last - 1 else 1
        inner = F.conv2d(inner, weight, stride=strided, padding=weight.shape[-1] // 2)
        inner = normalize(inner, n + 1) if n < last else inner
    torch.testing.assert_close(
        block(x), inner + F.conv2d(shared, block.shortcut.weight, stride=stride)
    )
    ordinary = make(inner.shape[1], 2, 1, norm)
    nn.init.zeros_(getattr(ordinary, f"conv{last}").weight)
    assert ordinary.shortcut is None and torch.equal(ordinary(inner), inner)


def test_vgg11_computes_convolutions_pools_and_a_classifier() -> None:
    torch.manual_seed(5)
    model = vgg.vgg11(width=2, dropout=0.4).eval()
    with torch.no_grad():
        for p in model.parameters():  # no bias is zero
            p.add_(torch.randn_like(p), alpha=0.1)
    weights, x = model.state_dict(), torch.randn(2, 3, 32, 32)
    want = x
    for block, depth in enumerate((1, 1, 2, 2, 2), 1):
        for index in range(1, depth + 1):
            at = f"conv{block}_{index}"
            want = F.conv2d(want, weights[f"{at}.weight"], weights[f"{at}.bias"], padding=1).relu()
        want = F.max_pool2d(want, 2)
    want = want.flatten(1)
    for at in ("fc6", "fc7", "fc8"):
        want = F.linear(want, weights[f"{at}.weight"], weights[f"{at}.bias"])
        want = want if at == "fc8" else want.relu()
    torch.testing.assert_close(model(x), want)
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.4, 0.4]
    assert list(observe_effects(model, x).draws) == ["dropout6", "dropout7"]


def test_a_resnet_of_bytes_has_the_same_weights_and_refuses_normalized_images() -> None:
    plain, of_bytes = (
        resnets.resnet18(classes=3, norm="group", bytes=flag) for flag in (False, True)
    )
    of_bytes.load_state_dict(plain.state_dict())
    raw = torch.arange(2 * 3 * 32 * 32).view(2, 3, 32, 32).remainder(256).to(torch.uint8)
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).view(2, 1, 3, 1, 1)
    x = (raw / 255 - mean) / std
    torch.testing.assert_close(of_bytes(raw), plain(x))
    assert resnets.FromBytes().half()(raw).dtype == torch.float16  # the precision of an IPU
    assert partition(of_bytes, raw).begin_names() == partition(plain, x).begin_names()
    with pytest.raises(ValueError, match="data.bytes: true"):
        of_bytes(raw.float())


def test_smoothed_labels_are_nine_tenths_of_the_label_and_one_spread() -> None:
    outputs = torch.tensor([[1.0, 2.0, 4.0, 0.0], [0.0, 3.0, 1.0, 1.0]])
    labels = torch.tensor([2, 0])
    expected = 0.9 * F.one_hot(labels, 4) + 0.1 / 4
    cross_entropy = smoothed_cross_entropy(outputs, labels)
    torch.testing.assert_close(cross_entropy, -(expected * outputs.log_softmax(1)).sum(1).mean())


# ---- first weights


SMALL: Dict[str, Callable[[], nn.Module]] = {
    "resnet18, batch": lambda: resnets.resnet18(10, small_images=True),
    "resnet50, group": lambda: resnets.resnet50(10, norm="group"),
    "preact_resnet20": resnets.preact_resnet20,
    "preact_resnet50": lambda: resnets.preact_resnet50(10),
    "mlp": lambda: mlps.mlp(inputs=3 * 32 * 32),
    "residual_mlp": lambda: mlps.residual_mlp(inputs=3 * 32 * 32, blocks=3),
    "convnet": convnet,
    "vgg16, group": lambda: vgg.vgg16(width=8, norm="group"),
}


@pytest.mark.parametrize("name", SMALL)
def test_gradients_reach_every_weight_and_the_seed_decides_the_weights(name: str) -> None:
    """No activation is computed in place: a stage's input is needed again."""
    x, y = torch.randn(2, 3, 32, 32), torch.tensor([1, 7])
    assert find_unreached_weights(SMALL[name], x, y) == []
    assert not any(getattr(m, "inplace", False) for m in SMALL[name]().modules())


@pytest.mark.parametrize(
    "make, name, fan_out",
    [
        (lambda: resnets.resnet18(10), "layer4.0.conv1", 512 * 9),
        (lambda: vgg.vgg11(width=32), "conv4_1", 256 * 9),
    ],
)
def test_convolutions_start_with_he_initialization_by_fan_out_and_without_bias(
    make: Any, name: str, fan_out: int
) -> None:
    """The layers have twice as many outputs as inputs."""
    torch.manual_seed(0)
    model = make()
    std = model.get_parameter(f"{name}.weight").std().item()
    assert std == pytest.approx((2 / fan_out) ** 0.5, rel=0.02)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert all(bool((m.weight == 1).all() and (m.bias == 0).all()) for m in norms)
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert not any(m.bias is not None and m.bias.any() for m in convolutions)


@pytest.mark.parametrize("make, last", [(resnets.resnet18, "bn2"), (resnets.resnet50, "bn3")])
def test_branches_may_start_at_zero(make: Any, last: str) -> None:
    model = make(classes=10, small_images=True, norm="group", zero_init=True)
    weights = {n for n, p in model.named_parameters() if n.endswith("weight") and p.eq(0).all()}
    blocks = [name for name, _ in model.named_modules() if name.count(".") == 1]
    assert weights == {f"{block}.{last}.weight" for block in blocks}


@pytest.mark.parametrize("make, args, message", [
    (resnets.resnet18, {"classes": 0}, "classes: 0: must be at least 1"),
    (resnets.resnet50, {"norm": "layer"}, "norm: layer: must be batch or group"),
    (resnets.preact_resnet50, {"norm": "none"}, "norm: none: must be batch or group"),
    (mlps.mlp, {"width": 0}, "mlp: width: 0: must be at least 1"),
    (mlps.mlp, {"layers": -1}, "mlp: layers: -1: must be at least 0"),
    (convnet, {"norm": "layer"}, "convnet: norm: layer: must be batch or group"),
    (vgg.vgg13, {"width": 0}, "width: 0: must be at least 1"),
    (vgg.vgg16, {"norm": "batch"}, "norm: batch: must be none or group"),
    (vgg.vgg16, {"norm": "group", "width": 3}, "width: 3: must be even with norm group, its first groups hold two channels"),
    (vgg.vgg11, {"dropout": 1}, "dropout: 1: must be at least 0 and below 1"),
])  # fmt: skip
def test_impossible_arguments_are_refused(make: Any, args: Dict[str, Any], message: str) -> None:
    assert list_faults(make, **args) == [message]
