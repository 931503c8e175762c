"""Multi-layer perceptron with one stage per linear layer."""

from __future__ import annotations

from collections import OrderedDict
from typing import List, Tuple

from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.model.stages import begin_stage


def mlp(inputs: int = 64, width: int = 128, layers: int = 4, classes: int = 10) -> nn.Sequential:
    """Build a perceptron of `layers` hidden layers of `width` with ReLU and a linear head:
    `layers + 1` stages.

    Input (B, ...) with `inputs` values per sample, output (B, classes). Raise `BadInput` if a size
    is out of range.
    """
    for name, value in (
        ("inputs", inputs),
        ("width", width),
        ("layers", layers),
        ("classes", classes),
    ):
        if isinstance(value, int) and value > 100_000:
            raise BadInput(f"mlp: {name}: {value}: must be at most 100000")
        if value < 1:
            raise BadInput(f"mlp: {name}: {value}: must be at least 1")
    children: List[Tuple[str, nn.Module]] = [("flatten", nn.Flatten())]
    for layer in range(1, layers + 1):
        linear = nn.Linear(inputs if layer == 1 else width, width)
        children.append((f"fc{layer}", begin_stage(linear) if layer > 1 else linear))
        children.append((f"relu{layer}", nn.ReLU()))
    children.append(("head", begin_stage(nn.Linear(width, classes))))
    return nn.Sequential(OrderedDict(children))
