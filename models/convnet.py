"""Small convolutional network with two annotated stages, in which rounding stays rounding.

    from_bytes conv1 norm1 tanh | conv2 norm2 tanh avgpool flatten fc

A ReLU or a maximum near a tie decides by the last bit, and two machines that round differently then
train two networks. This one has neither, so its weights on two machines can be compared.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import List, Tuple

from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.model.stages import begin_stage

# relative: after an installation this package is ipu_pipe.models
from .resnet import FromBytes

WIDTH = 8


def convnet(classes: int = 10, norm: str = "batch", bytes: bool = False) -> nn.Sequential:
    """Build the network: two 3x3 convolutions of 8 channels, the second one strided, each with a
    norm and tanh, and a linear head.

    Input (B, 3, H, W), output (B, classes). `norm`: batch or group (2 groups). `bytes`: take uint8
    images (`data.bytes: true`) and normalize them on the model's device.
    """
    if norm not in ("batch", "group"):
        raise BadInput(f"convnet: norm: {norm}: must be batch or group")
    if classes < 1:
        raise BadInput(f"convnet: classes: {classes}: must be at least 1")

    def make_norm() -> nn.Module:
        return nn.BatchNorm2d(WIDTH) if norm == "batch" else nn.GroupNorm(2, WIDTH)

    children: List[Tuple[str, nn.Module]] = [("from_bytes", FromBytes())] if bytes else []
    children += [
        ("conv1", nn.Conv2d(3, WIDTH, 3, padding=1, bias=False)),
        ("norm1", make_norm()),
        ("tanh1", nn.Tanh()),
        ("conv2", begin_stage(nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1, bias=False))),
        ("norm2", make_norm()),
        ("tanh2", nn.Tanh()),
        ("avgpool", nn.AdaptiveAvgPool2d(1)),
        ("flatten", nn.Flatten()),
        ("fc", nn.Linear(WIDTH, classes)),
    ]
    return nn.Sequential(OrderedDict(children))
