"""Losses for a config's `loss`."""

from __future__ import annotations

import torch
from torch import nn


def smoothed_cross_entropy(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy against 0.9 of the label and 0.1 spread over all classes (Szegedy et al. 2016, section 7).

    `outputs`: (B, classes), `labels`: (B,). Written out, since torch's own masks labels in place, which IPUs need not do.
    """
    shares = outputs.log_softmax(dim=1)  # (B, classes), logarithms
    return 0.9 * nn.functional.nll_loss(shares, labels) - 0.1 * shares.mean()
