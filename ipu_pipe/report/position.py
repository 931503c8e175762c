"""The progress of a run, which checkpoints store besides tensors; and whether its training loss
fell.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ipu_pipe.job.evaluation import EvaluationResult
from ipu_pipe.job.metrics import prefers_greater


@dataclass
class Position:
    """The progress of a run. `seconds`: the training time of the `timed_updates`.

    `epoch_loss`: the sum over the epoch's `epoch_updates` so far. `best_name`: the figure that
    decides the best evaluation, such as test_loss. `plateau`: the state of a learning rate that
    follows evaluations. `stopped`: why the run ended early here.
    """

    update: int = 0
    epoch_loss: float = 0.0
    epoch_updates: int = 0
    seconds: float = 0.0
    timed_updates: int = 0
    best_name: str = "test_loss"
    best_value: float | None = None
    best_step: int | None = None
    initial: EvaluationResult = EvaluationResult()
    plateau: dict[str, Any] | None = None
    stopped: str | None = None

    def add_update(self, loss: float | None, begins_epoch: bool) -> None:
        """Count one more update with its mean training loss, if it has one."""
        if begins_epoch:
            self.epoch_loss = 0.0
            self.epoch_updates = 0
        if loss is None:
            return
        self.epoch_loss += loss
        self.epoch_updates += 1

    def add_evaluation(self, name: str, value: float | None) -> None:
        """Record the current evaluation as the best one if its figure `name` is; the one before
        training is never the best.
        """
        # a resumed run may choose by another figure
        if name != self.best_name:
            self.best_name = name
            self.best_value = None
            self.best_step = None
        # no later value is better than a NaN, so it would stay the best
        if value is None or not math.isfinite(value) or not self.update:
            return
        sign = 1 if prefers_greater(name.partition("_")[2]) else -1
        # of equal evaluations the first one stays the best
        if self.best_value is None or sign * value > sign * self.best_value:
            self.best_value = value
            self.best_step = self.update

    @property
    def best(self) -> dict[str, Any] | None:
        """The step with the best figure, for the summary."""
        return (
            None
            if self.best_step is None
            else {"step": self.best_step, self.best_name: self.best_value}
        )


# ---- the training loss over a run


def describe_divergence(update: int) -> str:
    """Return the words on a run that diverged after this many updates."""
    return f"diverged after update {update}: the training loss rose and stayed far above its start"


TENTHS = 10
# fewer updates tell nothing
LEAST_UPDATES = 20
STANDARD_ERRORS = 3.0
# a run whose last tenth has only losses that exceed the first one by more than twice its magnitude
# has diverged: a classifier that guesses at first is then far worse than guessing
DIVERGED = 2.0


class LossTrend:
    """The losses of a run of `updates` planned updates from its beginning, summed up by tenths.

        tenths of the run   | 0 | 1 | 2 | ... | 9 |     w updates each
        means               m_0 m_1 m_2       m_9       s: the deviation of losses within a tenth

    The run diverged if all losses of its last tenth are far above the first one, see `DIVERGED`. The
    loss fell if the least of the later means is below m_0 by more than 3 s sqrt(2 / w), three
    standard errors of their difference, or below the first update's loss by more than
    3 s sqrt(1 + 1 / w): a run may learn within its first tenth.
    """

    def __init__(self, updates: int) -> None:
        self._size = max(1, updates // TENTHS)
        self._first: float | None = None
        self._update_count = 0
        # the number of updates up to the last whose loss did not exceed the limit of `DIVERGED`
        self._bounded = 0
        # by tenth: the number of finite losses, and the sums of their distances from the first loss
        # and of the squares of these
        self._counts: list[int] = []
        self._sums: list[float] = []
        self._squares: list[float] = []

    def add(self, loss: float | None) -> None:
        """Add the loss of the next update. Losses that are missing or not finite are not part of a
        mean.
        """
        if self._update_count % self._size == 0:
            self._counts.append(0)
            self._sums.append(0.0)
            self._squares.append(0.0)
        self._update_count += 1
        # an update without weight exceeds no limit
        if loss is None:
            self._bounded = self._update_count
        if loss is None or not math.isfinite(loss):
            return
        if self._first is None:
            self._first = loss
        distance = loss - self._first
        if distance <= DIVERGED * abs(self._first):
            self._bounded = self._update_count
        self._counts[-1] += 1
        self._sums[-1] += distance
        self._squares[-1] += distance * distance

    def find_divergence(self) -> int | None:
        """Return the number of updates after which the run diverged, None if it did not, or if the
        updates are too few.
        """
        is_long = self._update_count >= LEAST_UPDATES and self._first is not None
        stayed_above = self._update_count - self._bounded >= self._size
        return self._bounded if is_long and stayed_above else None

    def describe(self) -> str | None:
        """Return a sentence if the run diverged or its loss did not fall, None if it fell or the
        updates are too few.
        """
        diverged_after = self.find_divergence()
        if diverged_after is not None:
            return f"the run {describe_divergence(diverged_after)}"
        # only whole ones, of finite losses alone
        tenths = [i for i, count in enumerate(self._counts) if count == self._size]
        knows_start = self._first is not None and tenths[:1] == [0]
        if not knows_start or self._update_count < LEAST_UPDATES or len(tenths) < 3:
            return None
        assert self._first is not None
        means = [self._sums[i] / self._size for i in tenths]
        spread = sum(self._squares[i] - self._size * mean * mean for i, mean in zip(tenths, means))
        # rounding may leave a spread of equal losses below 0
        deviation = math.sqrt(max(spread, 0.0) / (len(tenths) * max(self._size - 1, 1)))
        least = min(means[1:])
        fell_by_tenth = means[0] - least > STANDARD_ERRORS * deviation * math.sqrt(2 / self._size)
        # distances count from the first loss
        fell_from_first = -least > STANDARD_ERRORS * deviation * math.sqrt(1 + 1 / self._size)
        if fell_by_tenth or fell_from_first:
            return None
        start = self._first + means[0]
        lowest = self._first + least
        return (
            f"the training loss did not fall below its start: {start:.4f} in the first tenth of "
            f"the "
            f"updates, at best {lowest:.4f} in a later one, within {STANDARD_ERRORS:g} standard "
            f"errors"
        )
