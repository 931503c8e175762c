"""Residual networks, annotated: post-activation ones of He et al. 2015 and pre-activation ones of He et al. 2016.

Post-activation, as torchvision has them (names, counts, the stride in a bottleneck's 3x3): a stage a residual block.

    conv1 bn1 relu maxpool | layer1.0 | layer1.1 | ... | layer4.2 avgpool flatten fc          ResNet-50: 17 stages

Pre-activation, as in Kosson et al. 2021: a stage a convolution with the norm and ReLU before it, a stage a sum.

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


def _norm(kind: str, groups: int) -> Norm:
    """`batch`: BatchNorm2d; `group`: GroupNorm with a fixed number of groups."""
    if kind == "batch":
        return nn.BatchNorm2d
    if kind == "group":
        return lambda channels: nn.GroupNorm(groups, channels)
    raise BadInput(f"norm: {kind}: must be batch or group")


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


def _initialize(model: nn.Module) -> None:
    """He initialization of the convolutions, by fan-out."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def _check_classes(classes: int) -> None:
    if classes < 1:
        raise BadInput(f"classes: {classes}: must be at least 1")


class Add(nn.Module):
    """The sum at the end of a residual block, a module so that it can be a stage."""

    def forward(self, x: torch.Tensor, shortcut: torch.Tensor) -> torch.Tensor:
        """x, shortcut: the same shape."""
        return x + shortcut


class FromBytes(nn.Module):
    """Images of bytes normalized by the mean and deviation of ImageNet's channels, in the precision that the model has."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, shares in (("mean", MEAN), ("std", STD)):
            self.register_buffer(name, 255 * torch.tensor(shares).view(1, 3, 1, 1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, 3, H, W), uint8 -> the same shape."""
        if x.dtype.is_floating_point:
            raise ValueError("its images must be bytes (data.bytes: true)")
        return (x.to(self.mean.dtype) - self.mean) / self.std


# ---- post-activation


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(inputs, width, 3, stride), norm(width)
        self.relu = nn.ReLU()
        self.conv2, self.bn2 = _conv(width, width, 3), norm(width)
        self.downsample = _downsample(inputs, width, stride, norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, inputs, H, W) -> (B, width, H / stride, W / stride)."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride) and 1x1 convolutions and a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(inputs, width, 1), norm(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride), norm(width)
        self.conv3, self.bn3 = _conv(width, 4 * width, 1), norm(4 * width)
        self.relu = nn.ReLU()
        self.downsample = _downsample(inputs, 4 * width, stride, norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, inputs, H, W) -> (B, 4 width, H / stride, W / stride)."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


def _downsample(inputs: int, outputs: int, stride: int, norm: Norm) -> Any:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(_conv(inputs, outputs, 1, stride), norm(outputs))


def _resnet(
    block: Union[Type[BasicBlock], Type[Bottleneck]], depths: Sequence[int], classes: int, small_images: bool, norm: str,
    bytes: bool,
) -> nn.Sequential:  # fmt: skip
    _check_classes(classes)
    make_norm = _norm(norm, groups=32)
    stem = _conv(3, 64, 3) if small_images else _conv(3, 64, 7, 2)
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
    children += [("avgpool", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten()), ("fc", nn.Linear(inputs, classes))]
    model = nn.Sequential(OrderedDict(children))
    _initialize(model)
    return model


def resnet18(
    classes: int = 1000, small_images: bool = False, norm: str = "batch", bytes: bool = False
) -> nn.Sequential:
    """ResNet-18. `small_images`: a 3x3 stem without stride and pooling, for 32x32; `norm`: batch or group (32 groups);
    `bytes`: images come as 8-bit numbers (`data.bytes: true`) and are normalized where the model is.

    Input (B, 3, H, W), output (B, classes). 11,689,512 parameters with 1000 classes; 9 stages.
    """
    return _resnet(BasicBlock, (2, 2, 2, 2), classes, small_images, norm, bytes)


def resnet34(
    classes: int = 1000, small_images: bool = False, norm: str = "batch", bytes: bool = False
) -> nn.Sequential:
    """ResNet-34, arguments as of `resnet18`. 21,797,672 parameters; 17 stages."""
    return _resnet(BasicBlock, (3, 4, 6, 3), classes, small_images, norm, bytes)


def resnet50(
    classes: int = 1000, small_images: bool = False, norm: str = "batch", bytes: bool = False
) -> nn.Sequential:
    """ResNet-50, arguments as of `resnet18`. 25,557,032 parameters (23,520,842 for CIFAR-10); 17 stages, finest 107."""
    return _resnet(Bottleneck, (3, 4, 6, 3), classes, small_images, norm, bytes)


def resnet101(
    classes: int = 1000, small_images: bool = False, norm: str = "batch", bytes: bool = False
) -> nn.Sequential:
    """ResNet-101, arguments as of `resnet18`. 44,549,160 parameters; 34 stages."""
    return _resnet(Bottleneck, (3, 4, 23, 3), classes, small_images, norm, bytes)


def resnet152(
    classes: int = 1000, small_images: bool = False, norm: str = "batch", bytes: bool = False
) -> nn.Sequential:
    """ResNet-152, arguments as of `resnet18`. 60,192,808 parameters; 51 stages."""
    return _resnet(Bottleneck, (3, 8, 36, 3), classes, small_images, norm, bytes)


# ---- pre-activation


class PreActivationBlock(nn.Module):
    """norm, ReLU and convolution, twice, and a sum; a projection on the shortcut where the shape changes."""

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.norm1 = begin_stage(norm(inputs))
        self.relu1 = nn.ReLU()
        changes = stride != 1 or inputs != width
        self.shortcut = _conv(inputs, width, 1, stride) if changes else None
        self.conv1 = _conv(inputs, width, 3, stride)
        if changes:  # the shared pre-activation and the projection are a stage before it
            begin_stage(self.conv1)
        self.norm2 = begin_stage(norm(width))
        self.relu2 = nn.ReLU()
        self.conv2 = _conv(width, width, 3)
        self.add = begin_stage(Add())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, inputs, H, W) -> (B, width, H / stride, W / stride)."""
        out = self.relu1(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(out)
        out = self.conv1(out)
        out = self.conv2(self.relu2(self.norm2(out)))
        return self.add(out, shortcut)


class PreActivationBottleneck(nn.Module):
    """norm, ReLU and convolution, thrice (1x1, 3x3 with the stride, 1x1), and a sum; a projection as above."""

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.norm1 = begin_stage(norm(inputs))
        self.relu1 = nn.ReLU()
        changes = stride != 1 or inputs != 4 * width
        self.shortcut = begin_stage(_conv(inputs, 4 * width, 1, stride)) if changes else None
        self.conv1 = _conv(inputs, width, 1)
        if changes:  # the shared pre-activation is a stage before the projection, and that one before it
            begin_stage(self.conv1)
        self.norm2 = begin_stage(norm(width))
        self.relu2 = nn.ReLU()
        self.conv2 = _conv(width, width, 3, stride)
        self.norm3 = begin_stage(norm(width))
        self.relu3 = nn.ReLU()
        self.conv3 = _conv(width, 4 * width, 1)
        self.add = begin_stage(Add())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, inputs, H, W) -> (B, 4 width, H / stride, W / stride)."""
        out = self.relu1(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(out)
        out = self.conv1(out)
        out = self.conv2(self.relu2(self.norm2(out)))
        out = self.conv3(self.relu3(self.norm3(out)))
        return self.add(out, shortcut)


def _preact(children: List[Any], inputs: int, classes: int, make_norm: Norm) -> nn.Sequential:
    """The stem and layers in `children`, then what follows them: last norm, pool, linear and loss, a stage each."""
    children = [
        *children,
        ("norm", begin_stage(make_norm(inputs))),
        ("relu", nn.ReLU()),
        ("avgpool", begin_stage(nn.AdaptiveAvgPool2d(1))),
        ("flatten", nn.Flatten()),
        ("fc", begin_stage(nn.Linear(inputs, classes))),
        ("loss", begin_stage(nn.Identity())),  # the loss, computed after the model, is a stage of its own
    ]
    model = nn.Sequential(OrderedDict(children))
    _initialize(model)
    return model


def _preact_resnet(depth: int, classes: int, norm: str) -> nn.Sequential:
    _check_classes(classes)
    make_norm = _norm(norm, groups=8)  # groups of 2 channels in the first layer, the number of groups kept
    children: List[Any] = [("conv1", _conv(3, 16, 3))]
    inputs = 16
    for number, width in enumerate((16, 32, 64)):
        blocks = []
        for index in range((depth - 2) // 6):
            blocks.append(PreActivationBlock(inputs, width, 2 if number and index == 0 else 1, make_norm))
            inputs = width
        children.append((f"layer{number + 1}", nn.Sequential(*blocks)))
    return _preact(children, inputs, classes, make_norm)


def preact_resnet20(classes: int = 10, norm: str = "group") -> nn.Sequential:
    """Pre-activation ResNet-20 for 32x32 images, GroupNorm with 8 groups (or `norm="batch"`); 34 stages.

    Input (B, 3, 32, 32), output (B, classes).
    """
    return _preact_resnet(20, classes, norm)


def preact_resnet32(classes: int = 10, norm: str = "group") -> nn.Sequential:
    """Pre-activation ResNet-32, as `preact_resnet20`; 52 stages."""
    return _preact_resnet(32, classes, norm)


def preact_resnet44(classes: int = 10, norm: str = "group") -> nn.Sequential:
    """Pre-activation ResNet-44, as `preact_resnet20`; 70 stages."""
    return _preact_resnet(44, classes, norm)


def preact_resnet56(classes: int = 10, norm: str = "group") -> nn.Sequential:
    """Pre-activation ResNet-56, as `preact_resnet20`; 88 stages."""
    return _preact_resnet(56, classes, norm)


def preact_resnet110(classes: int = 10, norm: str = "group") -> nn.Sequential:
    """Pre-activation ResNet-110, as `preact_resnet20`; 169 stages."""
    return _preact_resnet(110, classes, norm)


def preact_resnet50(classes: int = 1000, norm: str = "group") -> nn.Sequential:
    """Pre-activation ResNet-50 for ImageNet, GroupNorm with 32 groups (or `norm="batch"`); 78 stages.

    Input (B, 3, H, W) of 32x32 or more (224x224 in the paper), output (B, classes). 25,549,352 parameters.
    """
    _check_classes(classes)
    make_norm = _norm(norm, groups=32)  # groups of 2 channels in the first layer, the number of groups kept
    children: List[Any] = [("conv1", _conv(3, 64, 7, 2)), ("maxpool", begin_stage(nn.MaxPool2d(3, 2, 1)))]
    inputs = 64
    for number, depth in enumerate((3, 4, 6, 3)):
        width, blocks = 64 * 2**number, []
        for index in range(depth):
            blocks.append(PreActivationBottleneck(inputs, width, 2 if number and index == 0 else 1, make_norm))
            inputs = 4 * width
        children.append((f"layer{number + 1}", nn.Sequential(*blocks)))
    return _preact(children, inputs, classes, make_norm)
