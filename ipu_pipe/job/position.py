"""How far a run has come, and what an evaluation measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, NamedTuple, Optional, Sequence


class Measured(NamedTuple):
    """What an evaluation found: test loss and metrics by name, None where there is none."""

    loss: Optional[float] = None
    metrics: Dict[str, Optional[float]] = {}

    @property
    def accuracy(self) -> Optional[float]:
        """The metric of that name, None where it was not asked for."""
        return self.metrics.get("accuracy")

    def record(self, before: str = "test_") -> Dict[str, Optional[float]]:
        """By name, as files have it: loss and accuracy first, whatever was asked for."""
        found = {"loss": self.loss, "accuracy": self.accuracy, **self.metrics}
        return {f"{before}{name}": value for name, value in found.items()}

    @classmethod
    def read(cls, saved: Any) -> "Measured":
        """From the list in a checkpoint, whose second is a mapping or, in earlier ones, the accuracy."""
        loss, second = saved
        return cls(loss, dict(second) if isinstance(second, dict) else {"accuracy": second})


def collect_by_block(every: Sequence[Measured]) -> Dict[str, List[Optional[float]]]:
    """What was found of each block, by name."""
    records = [found.record("block_test_") for found in every]
    return {name: [record[name] for record in records] for name in records[0]}


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
    initial: Measured = Measured()

    def count(self, loss: float, begins_epoch: bool) -> None:
        """One more update's mean training loss."""
        if begins_epoch:
            self.epoch_loss, self.epoch_updates = 0.0, 0
        self.epoch_loss, self.epoch_updates = self.epoch_loss + loss, self.epoch_updates + 1

    def note(self, found: Measured) -> None:
        """What an evaluation found now; that before training is not the best one."""
        loss = found.loss
        if loss is not None and (self.best_loss is None or loss < self.best_loss) and self.update:
            self.best_loss, self.best_step = loss, self.update

    @property
    def best(self) -> Optional[Dict[str, Any]]:
        """The least test loss, for the summary."""
        return None if self.best_step is None else {"step": self.best_step, "test_loss": self.best_loss}
