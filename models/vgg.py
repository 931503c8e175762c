"""VGG networks (Simonyan and Zisserman 2014) for 32x32 images, with stages as in Kosson et al.
2021.

The networks follow Fu 2019 (pytorch-vgg-cifar10): 3x3 convolutions with bias, no norm, a classifier
of two hidden layers with dropout. Each convolution, ReLU, max pool and layer of the classifier is a
stage, and so is the loss.

    conv1_1 | relu1_1 | ... | pool1 | conv2_1 | ... | pool5 flatten                              VGG11: 29 stages
            | dropout6 | fc6 | relu6 | dropout7 | fc7 | relu7 | fc8 | loss                       VGG13: 33, VGG16: 39
"""

from __future__ import annotations

from collections import OrderedDict
from typing import List, Sequence, Tuple

from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.model.stages import begin_stage


def _initialize(model: nn.Module) -> None:
    """Initialize the convolutions as He et al. 2015, by fan-out, with zero biases; linear layers
    keep torch's initial values.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def _check(classes: int, norm: str, dropout: float, width: int) -> None:
    """Raise `BadInput` if an argument is out of range."""
    for name, value in (("classes", classes), ("width", width)):
        if value < 1:
            raise BadInput(f"{name}: {value}: must be at least 1")
    if norm not in ("none", "group"):
        raise BadInput(f"norm: {norm}: must be none or group")
    if norm == "group" and width % 2:
        raise BadInput(
            f"width: {width}: must be even with norm group, its first groups hold two channels"
        )
    if not 0 <= dropout < 1:
        raise BadInput(f"dropout: {dropout}: must be at least 0 and below 1")


def _build_vgg(
    depths: Sequence[int], classes: int, norm: str, dropout: float, width: int
) -> nn.Sequential:
    """Build a VGG network with `depths[i]` convolutions before pool i, of five pools."""
    _check(classes, norm, dropout, width)
    children: List[Tuple[str, nn.Module]] = []
    inputs = 3
    for block, depth in enumerate(depths, 1):
        outputs = width * min(2 ** (block - 1), 8)
        for index in range(1, depth + 1):
            children.append(
                (f"conv{block}_{index}", begin_stage(nn.Conv2d(inputs, outputs, 3, padding=1)))
            )
            if norm == "group":  # in the convolution's stage; every layer has as many groups
                children.append((f"norm{block}_{index}", nn.GroupNorm(width // 2, outputs)))
            children.append((f"relu{block}_{index}", begin_stage(nn.ReLU())))
            inputs = outputs
        children.append((f"pool{block}", begin_stage(nn.MaxPool2d(2))))
    children.append(("flatten", nn.Flatten()))
    for layer in (6, 7):
        children.append((f"dropout{layer}", begin_stage(nn.Dropout(dropout))))
        children.append((f"fc{layer}", begin_stage(nn.Linear(inputs, inputs))))
        children.append((f"relu{layer}", begin_stage(nn.ReLU())))
    children.append(("fc8", begin_stage(nn.Linear(inputs, classes))))
    children.append(
        ("loss", begin_stage(nn.Identity()))
    )  # the stage of the loss, which is computed after the model
    model = nn.Sequential(OrderedDict(children))
    _initialize(model)
    return model


def vgg11(
    classes: int = 10, norm: str = "none", dropout: float = 0.5, width: int = 64
) -> nn.Sequential:
    """Build VGG11: 29 stages, 9,750,922 parameters with 10 classes. Input (B, 3, 32, 32), output
    (B, classes).

    `norm`: none (as in the paper) or group (`width / 2` groups). `width`: channels of the first
    convolution.
    """
    return _build_vgg((1, 1, 2, 2, 2), classes, norm, dropout, width)


def vgg13(
    classes: int = 10, norm: str = "none", dropout: float = 0.5, width: int = 64
) -> nn.Sequential:
    """Build VGG13, with the arguments of `vgg11`. 9,935,434 parameters; 33 stages."""
    return _build_vgg((2, 2, 2, 2, 2), classes, norm, dropout, width)


def vgg16(
    classes: int = 10, norm: str = "none", dropout: float = 0.5, width: int = 64
) -> nn.Sequential:
    """Build VGG16, with the arguments of `vgg11`. 15,245,130 parameters; 39 stages."""
    return _build_vgg((2, 2, 3, 3, 3), classes, norm, dropout, width)
