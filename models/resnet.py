"""Residual networks with annotated stages: post-activation (He et al. 2015) and pre-activation (He
et al. 2016).

The post-activation networks equal torchvision's in names, parameter counts and the stride of a
bottleneck's 3x3 convolution. Each residual block is a stage.

    conv1 bn1 relu maxpool | layer1.0 | layer1.1 | ... | layer4.2 avgpool flatten fc          ResNet-50: 17 stages

The pre-activation networks are cut as in Kosson et al. 2021: each convolution is a stage, together
with the norm and the ReLU before it, and each sum is a stage.

    conv1 | norm1 relu conv1 | norm2 relu conv2 | add | ...                                    an ordinary block
          | norm1 relu shortcut | conv1 | norm2 relu conv2 | add | ...                         a strided block
          | norm relu | pool flatten | fc | loss                                               ResNet-20: 34 stages

    conv1 | maxpool | norm1 relu conv1 | norm2 relu conv2 | norm3 relu conv3 | add | ...       an ordinary bottleneck
          | norm1 relu | shortcut | conv1 | norm2 relu conv2 | norm3 relu conv3 | add | ...    the first one of a layer
          | norm relu | pool flatten | fc | loss                                               ResNet-50: 78 stages
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Callable, List, Sequence, Type, Union

import torch
from torch import nn

from ipu_pipe.data.images import MEAN, STD
from ipu_pipe.errors import BadInput
from ipu_pipe.model.stages import begin_stage

Norm = Callable[[int], nn.Module]


def _choose_norm(kind: str, groups: int) -> Norm:
    """Return a function from channels to a norm: BatchNorm2d for `batch`, GroupNorm with `groups`
    groups for `group`.
    """
    if kind == "batch":
        return nn.BatchNorm2d
    if kind == "group":
        return lambda channels: nn.GroupNorm(groups, channels)
    raise BadInput(f"norm: {kind}: must be batch or group")


def _make_conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Build a convolution without bias, (B, inputs, H, W) -> (B, outputs, H / stride, W / stride);
    `size` is odd.
    """
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


def _initialize(model: nn.Module) -> None:
    """Initialize the convolutions as He et al. 2015, by fan-out."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def _start_branches_at_zero(model: nn.Module) -> None:
    """Set the weight of the last norm before each residual addition to zero, so that every block
    begins as its shortcut (Goyal et al. 2017, section 5.1).
    """
    for module in model.modules():
        if isinstance(module, (BasicBlock, Bottleneck)):
            last: Any = module.bn2 if isinstance(module, BasicBlock) else module.bn3
            nn.init.zeros_(last.weight)


def _check_classes(classes: int) -> None:
    """Raise `BadInput` if there is no class."""
    if classes < 1:
        raise BadInput(f"classes: {classes}: must be at least 1")


class Add(nn.Module):
    """Sum at the end of a residual block. It is a module so that it can be a stage."""

    def forward(self, x: torch.Tensor, shortcut: torch.Tensor) -> torch.Tensor:
        """Return the sum. x, shortcut: any equal shapes -> the same shape."""
        return x + shortcut


class FromBytes(nn.Module):
    """Normalization of uint8 images by the mean and deviation of ImageNet's channels, in the
    precision of the model.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, fractions in (("mean", MEAN), ("std", STD)):  # of 255, by channel
            self.register_buffer(
                name, 255 * torch.tensor(fractions).view(1, 3, 1, 1), persistent=False
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalized images. x: (B, 3, H, W), uint8 -> the same shape, floating
        point.
        """
        if x.dtype.is_floating_point:
            raise ValueError("its images must be bytes (data.bytes: true)")
        return (x.to(self.mean.dtype) - self.mean) / self.std


# ---- post-activation


class BasicBlock(nn.Module):
    """Residual block of two 3x3 convolutions, the first one strided."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1, self.bn1 = _make_conv(inputs, width, 3, stride), norm(width)
        self.relu = nn.ReLU()
        self.conv2, self.bn2 = _make_conv(width, width, 3), norm(width)
        self.downsample = _make_downsample(inputs, width, stride, norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output. x: (B, inputs, H, W) -> (B, width, H / stride, W / stride)."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """Residual block of a 1x1, a strided 3x3 and a 1x1 convolution."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1, self.bn1 = _make_conv(inputs, width, 1), norm(width)
        self.conv2, self.bn2 = _make_conv(width, width, 3, stride), norm(width)
        self.conv3, self.bn3 = _make_conv(width, 4 * width, 1), norm(4 * width)
        self.relu = nn.ReLU()
        self.downsample = _make_downsample(inputs, 4 * width, stride, norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output. x: (B, inputs, H, W) -> (B, 4 width, H / stride, W /
        stride).
        """
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


def _make_downsample(inputs: int, outputs: int, stride: int, norm: Norm) -> Any:
    """Build the projection of a shortcut; None where the block keeps the shape."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(_make_conv(inputs, outputs, 1, stride), norm(outputs))


def _build_resnet(
    block: Union[Type[BasicBlock], Type[Bottleneck]],
    depths: Sequence[int],
    classes: int,
    small_images: bool,
    norm: str,
    bytes: bool,
    zero_init: bool,
) -> nn.Sequential:
    """Build a post-activation ResNet whose layer i has `depths[i]` blocks."""
    _check_classes(classes)
    make_norm = _choose_norm(norm, groups=32)
    stem = _make_conv(3, 64, 3) if small_images else _make_conv(3, 64, 7, 2)
    children: List[Any] = [("from_bytes", FromBytes())] if bytes else []
    children += [("conv1", stem), ("bn1", make_norm(64)), ("relu", nn.ReLU())]
    if not small_images:
        children.append(("maxpool", nn.MaxPool2d(3, 2, 1)))
    inputs = 64
    for number, depth in enumerate(depths):
        width, blocks = 64 * 2**number, []
        for index in range(depth):
            stride = 2 if number > 0 and index == 0 else 1
            blocks.append(begin_stage(block(inputs, width, stride, make_norm)))
            inputs = width * block.expansion
        children.append((f"layer{number + 1}", nn.Sequential(*blocks)))
    children += [
        ("avgpool", nn.AdaptiveAvgPool2d(1)),
        ("flatten", nn.Flatten()),
        ("fc", nn.Linear(inputs, classes)),
    ]
    model = nn.Sequential(OrderedDict(children))
    _initialize(model)
    if zero_init:
        _start_branches_at_zero(model)
    return model


def resnet18(
    classes: int = 1000,
    small_images: bool = False,
    norm: str = "batch",
    bytes: bool = False,
    zero_init: bool = False,
) -> nn.Sequential:
    """Build ResNet-18: 9 stages, 11,689,512 parameters with 1000 classes. Input (B, 3, H, W),
    output (B, classes).

    `small_images`: use a 3x3 stem without stride and pooling, for 32x32. `norm`: batch or group (32
    groups). `bytes`: take uint8 images (`data.bytes: true`) and normalize them on the model's
    device. `zero_init`: start the last norm before each residual addition at zero.
    """
    return _build_resnet(BasicBlock, (2, 2, 2, 2), classes, small_images, norm, bytes, zero_init)


def resnet34(
    classes: int = 1000,
    small_images: bool = False,
    norm: str = "batch",
    bytes: bool = False,
    zero_init: bool = False,
) -> nn.Sequential:
    """Build ResNet-34, with the arguments of `resnet18`. 21,797,672 parameters; 17 stages."""
    return _build_resnet(BasicBlock, (3, 4, 6, 3), classes, small_images, norm, bytes, zero_init)


def resnet50(
    classes: int = 1000,
    small_images: bool = False,
    norm: str = "batch",
    bytes: bool = False,
    zero_init: bool = False,
) -> nn.Sequential:
    """Build ResNet-50, with the arguments of `resnet18`. 25,557,032 parameters (23,520,842 for
    CIFAR-10); 17 stages, 107 with `stages: finest`."""
    return _build_resnet(Bottleneck, (3, 4, 6, 3), classes, small_images, norm, bytes, zero_init)


def resnet101(
    classes: int = 1000,
    small_images: bool = False,
    norm: str = "batch",
    bytes: bool = False,
    zero_init: bool = False,
) -> nn.Sequential:
    """Build ResNet-101, with the arguments of `resnet18`. 44,549,160 parameters; 34 stages."""
    return _build_resnet(Bottleneck, (3, 4, 23, 3), classes, small_images, norm, bytes, zero_init)


def resnet152(
    classes: int = 1000,
    small_images: bool = False,
    norm: str = "batch",
    bytes: bool = False,
    zero_init: bool = False,
) -> nn.Sequential:
    """Build ResNet-152, with the arguments of `resnet18`. 60,192,808 parameters; 51 stages."""
    return _build_resnet(Bottleneck, (3, 8, 36, 3), classes, small_images, norm, bytes, zero_init)


# ---- pre-activation


class PreActivationBlock(nn.Module):
    """Residual block of norm, ReLU and convolution, twice, and a sum; the shortcut is projected
    where the shape changes.
    """

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.norm1 = begin_stage(norm(inputs))
        self.relu1 = nn.ReLU()
        changes = stride != 1 or inputs != width
        self.shortcut = _make_conv(inputs, width, 1, stride) if changes else None
        self.conv1 = _make_conv(inputs, width, 3, stride)
        if changes:  # the shared pre-activation and the projection make up the previous stage
            begin_stage(self.conv1)
        self.norm2 = begin_stage(norm(width))
        self.relu2 = nn.ReLU()
        self.conv2 = _make_conv(width, width, 3)
        self.add = begin_stage(Add())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output. x: (B, inputs, H, W) -> (B, width, H / stride, W / stride)."""
        out = self.relu1(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(out)
        out = self.conv1(out)
        out = self.conv2(self.relu2(self.norm2(out)))
        return self.add(out, shortcut)


class PreActivationBottleneck(nn.Module):
    """Residual block of norm, ReLU and convolution, three times (1x1, strided 3x3, 1x1), and a sum.

    The shortcut is projected where the shape changes.
    """

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.norm1 = begin_stage(norm(inputs))
        self.relu1 = nn.ReLU()
        changes = stride != 1 or inputs != 4 * width
        self.shortcut = begin_stage(_make_conv(inputs, 4 * width, 1, stride)) if changes else None
        self.conv1 = _make_conv(inputs, width, 1)
        if (
            changes
        ):  # the shared pre-activation, the projection and this convolution are three stages
            begin_stage(self.conv1)
        self.norm2 = begin_stage(norm(width))
        self.relu2 = nn.ReLU()
        self.conv2 = _make_conv(width, width, 3, stride)
        self.norm3 = begin_stage(norm(width))
        self.relu3 = nn.ReLU()
        self.conv3 = _make_conv(width, 4 * width, 1)
        self.add = begin_stage(Add())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output. x: (B, inputs, H, W) -> (B, 4 width, H / stride, W /
        stride).
        """
        out = self.relu1(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(out)
        out = self.conv1(out)
        out = self.conv2(self.relu2(self.norm2(out)))
        out = self.conv3(self.relu3(self.norm3(out)))
        return self.add(out, shortcut)


def _append_head(children: List[Any], inputs: int, classes: int, make_norm: Norm) -> nn.Sequential:
    """Build the network of the stem and layers in `children` and a head: norm, pool, linear layer
    and loss, a stage each.
    """
    children = [
        *children,
        ("norm", begin_stage(make_norm(inputs))),
        ("relu", nn.ReLU()),
        ("avgpool", begin_stage(nn.AdaptiveAvgPool2d(1))),
        ("flatten", nn.Flatten()),
        ("fc", begin_stage(nn.Linear(inputs, classes))),
        (
            "loss",
            begin_stage(nn.Identity()),
        ),  # the stage of the loss, which is computed after the model
    ]
    model = nn.Sequential(OrderedDict(children))
    _initialize(model)
    return model


def _build_preact_resnet(depth: int, classes: int, norm: str) -> nn.Sequential:
    """Build a pre-activation ResNet of `depth` = 6 n + 2 layers for 32x32 images."""
    _check_classes(classes)
    make_norm = _choose_norm(
        norm, groups=8
    )  # groups of 2 channels in the first layer; every layer has as many groups
    children: List[Any] = [("conv1", _make_conv(3, 16, 3))]
    inputs = 16
    for number, width in enumerate((16, 32, 64)):
        blocks = []
        for index in range((depth - 2) // 6):
            blocks.append(
                PreActivationBlock(inputs, width, 2 if number and index == 0 else 1, make_norm)
            )
            inputs = width
        children.append((f"layer{number + 1}", nn.Sequential(*blocks)))
    return _append_head(children, inputs, classes, make_norm)


def preact_resnet20(classes: int = 10, norm: str = "group") -> nn.Sequential:
    """Build pre-activation ResNet-20 for 32x32 images, GroupNorm with 8 groups (or `norm="batch"`);
    34 stages.

    Input (B, 3, 32, 32), output (B, classes).
    """
    return _build_preact_resnet(20, classes, norm)


def preact_resnet32(classes: int = 10, norm: str = "group") -> nn.Sequential:
    """Build pre-activation ResNet-32, with the arguments of `preact_resnet20`; 52 stages."""
    return _build_preact_resnet(32, classes, norm)


def preact_resnet44(classes: int = 10, norm: str = "group") -> nn.Sequential:
    """Build pre-activation ResNet-44, with the arguments of `preact_resnet20`; 70 stages."""
    return _build_preact_resnet(44, classes, norm)


def preact_resnet56(classes: int = 10, norm: str = "group") -> nn.Sequential:
    """Build pre-activation ResNet-56, with the arguments of `preact_resnet20`; 88 stages."""
    return _build_preact_resnet(56, classes, norm)


def preact_resnet110(classes: int = 10, norm: str = "group") -> nn.Sequential:
    """Build pre-activation ResNet-110, with the arguments of `preact_resnet20`; 169 stages."""
    return _build_preact_resnet(110, classes, norm)


def preact_resnet50(classes: int = 1000, norm: str = "group") -> nn.Sequential:
    """Build pre-activation ResNet-50 for ImageNet, GroupNorm with 32 groups (or `norm="batch"`); 78
    stages.

    Input (B, 3, H, W) of 32x32 or more (224x224 in the paper), output (B, classes). 25,549,352
    parameters.
    """
    _check_classes(classes)
    make_norm = _choose_norm(
        norm, groups=32
    )  # groups of 2 channels in the first layer; every layer has as many groups
    children: List[Any] = [
        ("conv1", _make_conv(3, 64, 7, 2)),
        ("maxpool", begin_stage(nn.MaxPool2d(3, 2, 1))),
    ]
    inputs = 64
    for number, depth in enumerate((3, 4, 6, 3)):
        width, blocks = 64 * 2**number, []
        for index in range(depth):
            blocks.append(
                PreActivationBottleneck(inputs, width, 2 if number and index == 0 else 1, make_norm)
            )
            inputs = 4 * width
        children.append((f"layer{number + 1}", nn.Sequential(*blocks)))
    return _append_head(children, inputs, classes, make_norm)
