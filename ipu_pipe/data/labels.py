"""Which labels a loss allows. A GPU's kernel that meets another one aborts, far from where it came from: the host looks first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import nn

from ipu_pipe.errors import BadInput

IGNORED = -100  # of torch's cross-entropy, unless it is told another one


@dataclass(frozen=True)
class LabelRange:
    """Labels from 0 to `classes` - 1, and `ignored`."""

    classes: int
    ignored: int = IGNORED

    def check(self, y: Any) -> None:
        """Raise BadInput where a label is none of them."""
        if not isinstance(y, torch.Tensor) or y.is_floating_point() or not y.numel():
            return
        counted = y[y != self.ignored]
        wrong = counted[(counted < 0) | (counted >= self.classes)]
        if wrong.numel():
            raise BadInput(
                f"data: label {int(wrong[0])}: the model gives {self.classes} classes: must be from 0 to {self.classes - 1}"
            )

    def check_on_host(self, y: Any) -> None:
        """`check` where it waits for no GPU."""
        if isinstance(y, torch.Tensor) and y.device.type == "cpu":
            self.check(y)


def label_range(loss: Any, output: Any, y: Any) -> Optional[LabelRange]:
    """What a mean cross-entropy of `output` (b, classes, ...) with whole numbers `y` (b, ...) allows; None for other losses."""
    is_module = isinstance(loss, nn.CrossEntropyLoss)
    if not is_module and loss is not nn.functional.cross_entropy:
        return None
    if not isinstance(output, torch.Tensor) or not isinstance(y, torch.Tensor) or y.is_floating_point():
        return None
    if output.dim() < 2 or output.dim() != y.dim() + 1:
        return None
    return LabelRange(output.shape[1], loss.ignore_index if is_module else IGNORED)
