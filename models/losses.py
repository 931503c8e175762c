"""Losses for a config's `loss`."""

from __future__ import annotations

import torch
from torch import nn


def smoothed_cross_entropy(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy against 0.9 of the label and 0.1 spread over all classes (Szegedy et al. 2016, section 7).

    `outputs`: (B, classes), `labels`: (B,).
    """
    return nn.functional.cross_entropy(outputs, labels, label_smoothing=0.1)
