"""Test models: the literature's sizes and names, the papers' stages, refusals."""

from __future__ import annotations

from typing import Any, Callable, Dict, List

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ipu_pipe.model.stages import partition
from models import mlp as mlps
from models import resnet as resnets
from models.convnet import convnet
from models.losses import smoothed_cross_entropy
from tests.support.models import build_on_meta, count_weights, find_unreached_weights
from tests.support.runs import list_faults
from tests.support.slow import mark_slow

PREACT = {20: 34, 32: 52, 44: 70, 56: 88, 110: 169}  # depth: stages, Kosson et al. 2021, Table 1
# torchvision's parameters with 1000 classes, residual blocks, convolutions (projections included)
RESNETS = {
    "resnet18": (11_689_512, 8, 20),
    "resnet34": (21_797_672, 16, 36),
    "resnet50": (25_557_032, 16, 53),
    "resnet101": (44_549_160, 33, 104),
    "resnet152": (60_192_808, 50, 155),
}


def get_preact_resnet(depth: int) -> Callable[..., Any]:
    make: Callable[..., Any] = getattr(resnets, f"preact_resnet{depth}")
    return make


def list_stage_owners(model: nn.Module, example: torch.Tensor) -> List[List[str]]:
    """Return for each stage the modules that own its parameters."""
    stages = partition(model, example).stages
    return [list(dict.fromkeys(n.rpartition(".")[0] for n in s.parameters)) for s in stages]


# ---- post-activation


@pytest.mark.parametrize("name", RESNETS)
def test_resnets_have_torchvisions_sizes_and_a_stage_a_block(name: str) -> None:
    parameters, blocks, convolutions = RESNETS[name]
    model = build_on_meta(getattr(resnets, name))
    assert count_weights(model) == parameters
    assert len(partition(model, torch.empty(2, 3, 64, 64, device="meta"))) == blocks + 1
    assert sum(isinstance(m, nn.Conv2d) for m in model.modules()) == convolutions
    assert (
        len(model.state_dict()) == 6 * convolutions + 2
    )  # a norm has 5 entries, the linear layer 2
    assert not any(m.inplace for m in model.modules() if isinstance(m, nn.ReLU))
    assert not any(
        "bias" in n for n, _ in model.named_parameters() if "conv" in n or "downsample.0" in n
    )


def test_resnet50_for_cifar_has_the_size_and_the_107_weights_of_pipemare() -> None:
    model = build_on_meta(resnets.resnet50, classes=10, small_images=True)
    assert count_weights(model) == 23_520_842
    kinds = [type(m) for m in model.modules()]
    assert [kinds.count(k) for k in (nn.Conv2d, nn.BatchNorm2d, nn.Linear)] == [53, 53, 1]
    images = torch.empty(2, 3, 32, 32, device="meta")
    assert len(partition(model, images, "finest")) == 107
    before_layer1 = nn.Sequential(
        *list(model.children())[:-7]
    )  # the last seven: four layers, pool, flatten, linear
    assert before_layer1(images).shape == (2, 64, 32, 32)
    assert model(images).shape == (2, 10)


def compute_resnet(
    state: Dict[str, torch.Tensor], depths: List[int], x: torch.Tensor
) -> torch.Tensor:
    """Compute the network in evaluation mode, written out with torchvision's names; v1.5: the
    stride is in the 3x3."""

    def apply_norm(name: str, x: torch.Tensor) -> torch.Tensor:
        mean, variance = state[f"{name}.running_mean"], state[f"{name}.running_var"]
        return F.batch_norm(x, mean, variance, state[f"{name}.weight"], state[f"{name}.bias"])

    def apply_conv(name: str, x: torch.Tensor, stride: int) -> torch.Tensor:
        weight = state[f"{name}.weight"]
        return F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)

    x = F.max_pool2d(F.relu(apply_norm("bn1", apply_conv("conv1", x, 2))), 3, 2, 1)
    for layer, depth in enumerate(depths, 1):
        for index in range(depth):
            at, stride = f"layer{layer}.{index}", 2 if layer > 1 and index == 0 else 1
            convolutions = [n for n in (1, 2, 3) if f"{at}.conv{n}.weight" in state]
            strided = 2 if len(convolutions) == 3 else 1
            out = x
            for n in convolutions:
                out = apply_norm(
                    f"{at}.bn{n}", apply_conv(f"{at}.conv{n}", out, stride if n == strided else 1)
                )
                out = F.relu(out) if n < len(convolutions) else out
            if f"{at}.downsample.0.weight" in state:
                x = apply_norm(f"{at}.downsample.1", apply_conv(f"{at}.downsample.0", x, stride))
            x = F.relu(out + x)
    return F.linear(x.mean((2, 3)), state["fc.weight"], state["fc.bias"])


@pytest.mark.parametrize("name, depths", [("resnet18", [2, 2, 2, 2]), ("resnet50", [3, 4, 6, 3])])
def test_resnets_equal_torchvisions(name: str, depths: List[int]) -> None:
    torch.manual_seed(0)
    model = getattr(resnets, name)(classes=7).double()
    for module in model.modules():  # statistics and gains that distinguish the norms
        if isinstance(module, nn.BatchNorm2d):
            for name in ("running_mean", "bias"):
                getattr(module, name).data.normal_(0, 0.1)
            for name in ("running_var", "weight"):
                getattr(module, name).data.uniform_(0.5, 1.5)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), compute_resnet(model.state_dict(), depths, x))


def test_stem_and_head_belong_to_the_first_and_last_blocks_stages() -> None:
    layers = list_stage_owners(
        build_on_meta(resnets.resnet18), torch.empty(1, 3, 64, 64, device="meta")
    )
    assert layers[0] == ["conv1", "bn1"]
    assert layers[1] == [f"layer1.0.{name}" for name in ("conv1", "bn1", "conv2", "bn2")]
    assert layers[-1] == [*(f"layer4.1.{name}" for name in ("conv1", "bn1", "conv2", "bn2")), "fc"]


def test_a_resnet_of_bytes_has_the_same_weights_and_refuses_normalized_images() -> None:
    result = {flag: resnets.resnet18(classes=3, norm="group", bytes=flag) for flag in (False, True)}
    result[True].load_state_dict(result[False].state_dict())
    raw = torch.arange(2 * 3 * 32 * 32).view(2, 3, 32, 32).remainder(256).to(torch.uint8)
    mean, std = (
        torch.tensor(v).view(1, 3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    x = (raw / 255 - mean) / std
    torch.testing.assert_close(result[True](raw), result[False](x))
    assert resnets.FromBytes().half()(raw).dtype == torch.float16  # the precision of an IPU
    assert partition(result[True], raw).begin_names() == partition(result[False], x).begin_names()
    with pytest.raises(ValueError, match="data.bytes: true"):
        result[True](raw.float())


def test_smoothed_labels_are_nine_tenths_of_the_label_and_one_spread() -> None:
    outputs = torch.tensor([[1.0, 2.0, 4.0, 0.0], [0.0, 3.0, 1.0, 1.0]])
    expected = torch.full((2, 4), 0.1 / 4)
    expected[0, 2] += 0.9
    expected[1, 0] += 0.9
    cross_entropy = smoothed_cross_entropy(outputs, torch.tensor([2, 0]))
    torch.testing.assert_close(cross_entropy, -(expected * outputs.log_softmax(1)).sum(1).mean())


# ---- pre-activation


@pytest.mark.parametrize("norm", mark_slow(["batch", "group"], lambda norm: norm == "group"))
@pytest.mark.parametrize("depth", PREACT)
def test_preactivation_resnets_have_the_papers_stages(depth: int, norm: str) -> None:
    model = build_on_meta(get_preact_resnet(depth), norm=norm)
    images = torch.empty(2, 3, 32, 32, device="meta")
    blocks = (depth - 2) // 2
    assert len(partition(model, images)) == PREACT[depth] == 1 + 3 * blocks + 2 + 4
    weights = sum(isinstance(m, (nn.Conv2d, nn.Linear)) for m in model.modules())
    assert weights == depth + 2  # the depth counts neither of the two projections
    assert model(images).shape == (2, 10)
    assert not any(m.inplace for m in model.modules() if isinstance(m, nn.ReLU))


def test_stages_of_a_preactivation_resnet_own_the_papers_modules() -> None:
    modules = list_stage_owners(
        build_on_meta(get_preact_resnet(20)), torch.empty(1, 3, 32, 32, device="meta")
    )
    ordinary = lambda at: [[f"{at}.norm1", f"{at}.conv1"], [f"{at}.norm2", f"{at}.conv2"], []]  # noqa: E731
    strided = lambda at: [[f"{at}.norm1", f"{at}.shortcut"], [f"{at}.conv1"], *ordinary(at)[1:]]  # noqa: E731
    want = [["conv1"]]
    for layer in (1, 2, 3):
        want += ordinary("layer1.0") if layer == 1 else strided(f"layer{layer}.0")
        want += ordinary(f"layer{layer}.1") + ordinary(f"layer{layer}.2")
    assert modules == [*want, ["norm"], [], ["fc"], []]  # last norm, pool, linear, loss


def test_a_strided_block_projects_the_shared_preactivation_and_an_ordinary_one_adds_its_input() -> (
    None
):
    model = get_preact_resnet(20)()
    block, x = model.layer2[0], torch.randn(2, 16, 8, 8)
    shared = F.relu(F.group_norm(x, 8, block.norm1.weight, block.norm1.bias))
    inner = F.relu(block.norm2(F.conv2d(shared, block.conv1.weight, stride=2, padding=1)))
    want = F.conv2d(inner, block.conv2.weight, padding=1) + F.conv2d(
        shared, block.shortcut.weight, stride=2
    )
    torch.testing.assert_close(block(x), want)
    block = model.layer1[1]
    nn.init.zeros_(block.conv2.weight)
    assert torch.equal(block(x), x)


def test_the_number_of_groups_is_fixed_and_the_first_groups_have_two_channels() -> None:
    norms = [m for m in get_preact_resnet(20)().modules() if isinstance(m, nn.GroupNorm)]
    assert {m.num_groups for m in norms} == {8} and norms[0].num_channels == 16
    assert (
        sum(isinstance(m, nn.BatchNorm2d) for m in get_preact_resnet(20)(norm="batch").modules())
        == len(norms)
        == 19
    )
    norms = [
        m
        for m in build_on_meta(resnets.resnet50, norm="group").modules()
        if isinstance(m, nn.GroupNorm)
    ]
    assert (
        {m.num_groups for m in norms} == {32} and norms[0].num_channels == 64 and len(norms) == 53
    )


# ---- both, and the perceptron


def test_mlp_is_a_stage_a_linear_layer() -> None:
    model = mlps.mlp(inputs=12, width=8, layers=3, classes=5)
    x = torch.randn(4, 3, 2, 2)
    assert [name for name, _ in model.named_children()] == [
        "flatten", "fc1", "relu1", "fc2", "relu2", "fc3", "relu3", "head",
    ]  # fmt: skip
    assert list_stage_owners(model, x) == [["fc1"], ["fc2"], ["fc3"], ["head"]]
    assert model(x).shape == (4, 5)
    assert count_weights(model) == (12 * 8 + 8) + 2 * (8 * 8 + 8) + (8 * 5 + 5)
    assert len(partition(mlps.mlp(), torch.randn(2, 64))) == 5
    linear = mlps.mlp(inputs=12, layers=0, classes=5)
    assert list_stage_owners(linear, x) == [["head"]] and count_weights(linear) == 12 * 5 + 5


def test_residual_mlp_is_a_stage_a_block() -> None:
    model = mlps.residual_mlp(inputs=12, width=8, blocks=2, classes=5)
    x = torch.randn(4, 3, 2, 2)
    assert list_stage_owners(model, x) == [
        ["stem"], ["block1.norm", "block1.linear"], ["block2.norm", "block2.linear"], ["head"],
    ]  # fmt: skip
    block = model.block1
    h = model.stem(x.flatten(1))
    assert torch.equal(block(h), h + block.linear(block.norm(h).clamp(min=0)))
    assert count_weights(model) == (12 * 8 + 8) + 2 * (8 * 8 + 8 + 2 * 8) + (8 * 5 + 5)
    assert len(partition(mlps.residual_mlp(), torch.randn(1, 1, 28, 28))) == 34


SMALL: Dict[str, Callable[[], nn.Module]] = {
    "resnet18, batch": lambda: resnets.resnet18(10, small_images=True),
    "resnet50, group": lambda: resnets.resnet50(10, norm="group"),
    "preact_resnet20, group": lambda: resnets.preact_resnet20(),
    "preact_resnet20, batch": lambda: resnets.preact_resnet20(norm="batch"),
    "mlp": lambda: mlps.mlp(inputs=3 * 32 * 32),
    "residual_mlp": lambda: mlps.residual_mlp(inputs=3 * 32 * 32, blocks=3),
    "convnet, batch": lambda: convnet(),
    "convnet, group": lambda: convnet(norm="group"),
}


@pytest.mark.parametrize("name", SMALL)
def test_gradients_reach_every_weight_and_the_seed_decides_the_weights(name: str) -> None:
    assert (
        find_unreached_weights(SMALL[name], torch.randn(2, 3, 32, 32), torch.tensor([1, 7])) == []
    )


def test_convolutions_start_with_he_initialization_by_fan_out_and_norms_as_the_identity() -> None:
    torch.manual_seed(0)
    model = resnets.resnet18(10)
    weight = model.get_parameter(
        "layer4.0.conv1.weight"
    )  # (512, 256, 3, 3): fan-out 512 * 9, fan-in 256 * 9
    assert weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert all(bool((m.weight == 1).all()) and bool((m.bias == 0).all()) for m in norms)


@pytest.mark.parametrize("make, args, message", [
    (resnets.resnet18, {"classes": 0}, "classes: 0: must be at least 1"),
    (resnets.resnet50, {"norm": "layer"}, "norm: layer: must be batch or group"),
    (resnets.preact_resnet20, {"classes": -1}, "classes: -1: must be at least 1"),
    (resnets.preact_resnet110, {"norm": "None"}, "norm: None: must be batch or group"),
    (mlps.mlp, {"width": 0}, "mlp: width: 0: must be at least 1"),
    (mlps.mlp, {"classes": 0}, "mlp: classes: 0: must be at least 1"),
    (mlps.mlp, {"layers": -1}, "mlp: layers: -1: must be at least 0"),
    (convnet, {"classes": 0}, "convnet: classes: 0: must be at least 1"),
    (convnet, {"norm": "layer"}, "convnet: norm: layer: must be batch or group"),
])  # fmt: skip
def test_impossible_arguments_are_refused(
    make: Callable[..., nn.Module], args: Dict[str, Any], message: str
) -> None:
    assert list_faults(make, **args) == [message]


@pytest.mark.parametrize("make, last", [(resnets.resnet18, "bn2"), (resnets.resnet50, "bn3")])
def test_branches_may_start_at_zero(make: Any, last: str) -> None:
    model = make(classes=10, small_images=True, norm="group", zero_init=True)
    zero = {name for name, p in model.named_parameters() if p.dim() == 1 and p.eq(0).all()}
    weights = {name for name in zero if name.endswith("weight")}
    blocks = [name for name, _ in model.named_modules() if name.count(".") == 1]
    assert weights == {f"{block}.{last}.weight" for block in blocks}
    plain = make(classes=10, small_images=True, norm="group")
    assert not any(p.eq(0).all() for n, p in plain.named_parameters() if n.endswith("weight"))
