"""Ending a run that has stopped to become better, by what its evaluations find."""

from __future__ import annotations

from typing import Any, Dict, Optional, Sequence

from ipu_pipe.config.sections import EarlyStoppingConfig
from ipu_pipe.config.values import to_number
from ipu_pipe.errors import BadInput
from ipu_pipe.job.metrics import Metric
from ipu_pipe.run.callbacks import Callback, Moment, Stop
from ipu_pipe.text import describe_kind, show

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
        is_whole = isinstance(patience, int) and not isinstance(patience, bool)
        delta = to_number(min_delta)
        wrong = {
            f"metric: {describe_kind(metric)}: must be text": not isinstance(metric, str),
            f"mode: {show(mode)}: must be min or max": mode not in (None, "min", "max"),
            f"patience: {show(patience)}: must be a whole number >= 1": not is_whole or patience < 1,
            f"min_delta: {show(min_delta)}: must be a number >= 0": delta is None or delta < 0,
            f"restore_best: {show(restore_best)}: must be true or false": not isinstance(restore_best, bool),
        }
        if any(wrong.values()):
            raise BadInput([f"early_stopping.{fault}" for fault, is_so in wrong.items() if is_so])
        self.metric, self.patience, self.min_delta, self.restore_best = metric, patience, min_delta, restore_best
        self.mode = mode or ("max" if metric.startswith(GREATER) else "min")
        self.best: Optional[float] = None
        self.best_step: Optional[int] = None
        self.waited = 0

    @classmethod
    def of(cls, config: EarlyStoppingConfig) -> "EarlyStopping":
        """By the config's section."""
        return cls(config.metric, config.mode, config.patience, config.min_delta, config.restore_best)

    def refuse_unmeasured(self, metrics: Sequence[Metric]) -> None:
        """Refuse (BadInput) a metric that no evaluation of `metrics` gives."""
        known = ["loss", *(metric.name for metric in metrics)]
        if self.metric not in known:
            raise BadInput(
                f"early_stopping.metric: {self.metric}: no evaluation gives it: must be one of {', '.join(known)}"
            )

    def on_evaluation(self, now: Moment) -> Optional[Stop]:
        """Compare with the best so far."""
        value = now.metrics.get(f"test_{self.metric}")
        if value is None:
            raise BadInput(
                f"early_stopping.metric: {self.metric}: no evaluation gives one: it has no meaning for these outputs and labels"
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
