"""How far a run has come, and what an evaluation measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Tuple

Measured = Tuple[Optional[float], Optional[float]]  # test loss and accuracy


@dataclass
class Position:
    """How far a run has come: what a checkpoint must carry besides tensors. Times are in seconds of training alone."""

    update: int = 0
    epoch_loss: float = 0.0  # sum over the epoch's updates so far, for the mean
    epoch_updates: int = 0
    seconds: float = 0.0
    timed_updates: int = 0
    best_loss: Optional[float] = None
    best_step: Optional[int] = None
    initial: Measured = (None, None)
