"""The progress of a run, which checkpoints store besides tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Optional

from ipu_pipe.job.evaluation import EvaluationResult
from ipu_pipe.job.metrics import prefers_greater


@dataclass
class Position:
    """The progress of a run. `seconds`: the training time of the `timed_updates`.

    `epoch_loss`: the sum over the epoch's `epoch_updates` so far. `best_name`: the figure that decides the best evaluation,
    such as test_loss. `plateau`: the state of a learning rate that follows evaluations.
    """

    update: int = 0
    epoch_loss: float = 0.0
    epoch_updates: int = 0
    seconds: float = 0.0
    timed_updates: int = 0
    best_name: str = "test_loss"
    best_value: Optional[float] = None
    best_step: Optional[int] = None
    initial: EvaluationResult = EvaluationResult()
    plateau: Optional[Dict[str, Any]] = None

    def add_update(self, loss: Optional[float], begins_epoch: bool) -> None:
        """Count one more update with its mean training loss, if it has one."""
        if begins_epoch:
            self.epoch_loss, self.epoch_updates = 0.0, 0
        if loss is None:
            return
        self.epoch_loss += loss
        self.epoch_updates += 1

    def add_evaluation(self, name: str, value: Optional[float]) -> None:
        """Record the current evaluation as the best one if its figure `name` is; the one before training is never the best."""
        # a resumed run may choose by another figure
        if name != self.best_name:
            self.best_name, self.best_value, self.best_step = name, None, None
        if value is None or not self.update:
            return
        sign = 1 if prefers_greater(name.partition("_")[2]) else -1
        if self.best_value is None or sign * value > sign * self.best_value:
            self.best_value, self.best_step = value, self.update

    @property
    def best(self) -> Optional[Dict[str, Any]]:
        """The step with the best figure, for the summary."""
        return None if self.best_step is None else {"step": self.best_step, self.best_name: self.best_value}
