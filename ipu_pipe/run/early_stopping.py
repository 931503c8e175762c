"""Ending a run that has stopped to become better, by what its evaluations find."""

from __future__ import annotations

import math
from typing import Any, Dict, Optional

from ipu_pipe.errors import BadInput
from ipu_pipe.job.sections import EarlyStoppingConfig
from ipu_pipe.run.callbacks import Callback, Moment, Stop

GREATER = ("accuracy", "top", "r2")  # beginnings of metrics of which more is better


class EarlyStopping(Callback):
    """Stops after `patience` evaluations in a row whose `metric` (loss, accuracy, ... as in `metrics.jsonl`, without test_) is
    not better than the best by more than `min_delta`. `mode`: min, max, or by the metric's name where None. The checkpoint of the
    best is kept; `restore_best`: its weights are put into the model when the run ends."""

    def __init__(
        self,
        metric: str = "loss",
        mode: Optional[str] = None,
        patience: int = 3,
        min_delta: float = 0.0,
        restore_best: bool = False,
    ) -> None:
        if mode not in (None, "min", "max"):
            raise BadInput(f"early_stopping.mode: {mode}: must be min or max")
        if patience < 1 or not (math.isfinite(min_delta) and min_delta >= 0):
            raise BadInput(f"early_stopping: patience {patience}, min_delta {min_delta}: must be >= 1 and >= 0")
        self.metric, self.patience, self.min_delta, self.restore_best = metric, patience, min_delta, restore_best
        self.mode = mode or ("max" if metric.startswith(GREATER) else "min")
        self.best: Optional[float] = None
        self.best_step: Optional[int] = None
        self.waited = 0

    @classmethod
    def of(cls, config: EarlyStoppingConfig) -> "EarlyStopping":
        """By the config's section."""
        return cls(config.metric, config.mode, config.patience, config.min_delta, config.restore_best)

    def on_evaluation(self, now: Moment) -> Optional[Stop]:
        """Compare with the best so far."""
        value = now.metrics.get(f"test_{self.metric}")
        if value is None:
            raise BadInput(
                f"early_stopping.metric: {self.metric}: no evaluation gives one: must be loss, or one of metrics that is known"
            )
        sign = 1 if self.mode == "max" else -1
        if self.best is None or sign * (value - self.best) > self.min_delta:
            self.best, self.best_step, self.waited = value, now.step, 0
            return None
        self.waited += 1
        if self.waited < self.patience:
            return None
        return Stop(
            f"test_{self.metric} is no better than {self.best:.6g} at step {self.best_step} for {self.waited} evaluations"
        )

    def state(self) -> Dict[str, Any]:
        """What is known of the best."""
        return {"metric": self.metric, "best": self.best, "best_step": self.best_step, "waited": self.waited}

    def load(self, state: Dict[str, Any]) -> None:
        """Go on, if it is the same metric."""
        if state.get("metric") == self.metric:
            self.best, self.best_step, self.waited = state["best"], state["best_step"], int(state["waited"])
