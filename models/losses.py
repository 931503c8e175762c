"""Losses for a config's `loss`."""

from __future__ import annotations

import torch
from torch import nn


def smoothed_cross_entropy(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy with label smoothing 0.1: 0.9 on the label, 0.1 spread evenly
    over all classes.

    `outputs`: logits (B, classes), `labels`: (B,) -> scalar. Source: Szegedy et al. 2016, section
    7.
    """
    # Not torch's label_smoothing: it masks the labels in place, an operation that IPUs can do
    # without.
    log_probabilities = outputs.log_softmax(dim=1)  # (B, classes)
    return 0.9 * nn.functional.nll_loss(log_probabilities, labels) - 0.1 * log_probabilities.mean()
