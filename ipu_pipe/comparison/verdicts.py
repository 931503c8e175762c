"""Judge by Student's t, over seeds, how much sooner a method reaches the baseline's final loss.

Both methods are asked when their smoothed loss first reaches that value, seed by seed. So a method
that equals the baseline reaches it in 1.00 of its time, however early the loss settles. With mean r
over n seeds and standard error SE, the time is r ± c SE, c the 95 % point for n - 1 degrees of
freedom; an interval that holds 1, widened by the spread of the stage times, tells nothing.
"""

from __future__ import annotations

import functools
import math
import statistics
from typing import NamedTuple, Sequence

import numpy as np

from ipu_pipe.comparison.trainings import MethodRow, Training

CANNOT = "cannot be told"


@functools.lru_cache(maxsize=None)
def compute_critical_t(seeds: int) -> float:
    """Return the two-sided 95 % point of Student's t for a mean over `seeds`."""
    # this import takes a second
    from scipy.stats import t

    return float(t.ppf(0.975, seeds - 1))


class Estimate(NamedTuple):
    """A mean over seeds and half of its 95 % interval; None for one seed."""

    mean: float
    half: float | None

    def __str__(self) -> str:
        # three digits of the mean, and as many decimals of the interval; 0 has no logarithm
        size = abs(self.mean) or 1.0
        decimals = max(0, 2 - math.floor(math.log10(size))) if math.isfinite(size) else 0
        # fixed decimals would be as many zeros
        if 0 < size < 1e-4:
            half = "" if self.half is None else f" ± {self.half:.2g}"
            return f"{self.mean:.3g}{half}"
        half = "" if self.half is None else f" ± {self.half:.{decimals}f}"
        return f"{self.mean:.{decimals}f}{half}"


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of values, one a seed, with its interval."""
    mean = statistics.fmean(values)
    # a deviation needs two values, and infinite ones have none
    if len(values) < 2 or not math.isfinite(mean):
        return Estimate(mean, None)
    error = statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, compute_critical_t(len(values)) * error)


class Verdict(NamedTuple):
    """The verdict on a method: a sentence; its share of the baseline's time, None if it does not
    always reach the loss; and whether that is sooner, None if it cannot be told.
    """

    sentence: str
    share: Estimate | None = None
    is_sooner: bool | None = None


def find_time(training: Training, loss: float) -> float:
    """Return the predicted second at which the smoothed loss first reaches `loss`, infinite if it
    does not.
    """
    pairs = zip(training.seconds_at, training.smooth())
    return next((second for second, smoothed in pairs if smoothed <= loss), math.inf)


def judge(row: MethodRow, baseline: MethodRow, spread: float) -> Verdict:
    """Judge a method against the baseline. `spread`: of the stage times, as a share."""
    goal = f"{baseline.label}'s final loss"
    # a loss that needs no learning is reached by anything at once
    if not all(training.has_learned for training in baseline.chosen):
        return Verdict(f"{row.label}: {CANNOT}, since {baseline.label} does not learn.")
    failed = [training for training in row.chosen if not training.has_learned]
    count = len(row.chosen)
    if failed:
        reason = next((training.diverged for training in failed if training.diverged), "")
        word = f"diverges ({reason})" if reason else "does not learn"
        return Verdict(f"{row.label} {word} with {len(failed)} of {count} seeds.")
    shares = [
        # quotients within a seed, in which the chance that both methods share cancels
        find_time(training, reference.final) / find_time(reference, reference.final)
        for training, reference in zip(row.chosen, baseline.chosen)
    ]
    reached = int(np.isfinite(shares).sum())
    if not reached:
        ends = [str(estimate([t.final for t in one.chosen])) for one in (row, baseline)]
        # "it ends at 0.123, the baseline at 0.123" would contradict the verdict
        if ends[0] == ends[1]:
            ends = [f"{np.mean([t.final for t in one.chosen]):.6g}" for one in (row, baseline)]
        samples = [one.chosen[0].count_samples() for one in (row, baseline)]
        limit = "in as many samples" if samples[0] == samples[1] else f"in {samples[0]:,} samples"
        rest = "" if samples[0] == samples[1] else f" after {samples[1]:,}"
        return Verdict(
            f"{row.label} does not reach {goal} {limit}: it ends at {ends[0]}, "
            f"{baseline.label} at {ends[1]}{rest}.{_compare_at_its_end(row, baseline)}"
        )
    if reached < count:
        how_soon = f"with {reached} of {count} seeds: how soon {CANNOT}"
        return Verdict(f"{row.label} reaches {goal} {how_soon}.")
    return _judge_share(f"{row.label} reaches {goal}", estimate(shares), spread)


def _compare_at_its_end(row: MethodRow, baseline: MethodRow) -> str:
    """Return where the baseline is at the predicted time at which a method ends; "" if it has
    ended, too.
    """
    seconds = np.mean([training.seconds_at[-1] for training in row.chosen])
    if any(reference.seconds_at[-1] <= seconds for reference in baseline.chosen):
        return ""
    losses = [
        # the last update that has ended by then, if one has
        float(
            [math.inf, *reference.smooth()][np.searchsorted(reference.seconds_at, seconds, "right")]
        )
        for reference in baseline.chosen
    ]
    if not np.isfinite(losses).all():
        return ""
    return f" After as much predicted time, {seconds:.3g} s, {baseline.label} is at {estimate(losses)}."


def _judge_share(sentence: str, share: Estimate, spread: float) -> Verdict:
    sentence = f"{sentence} in {share} of its predicted time"
    if share.half is None:
        return Verdict(f"{sentence} with one seed: whether it is sooner {CANNOT}.", share)
    # the spread is one of the times, and so of their quotient in proportion
    if abs(share.mean - 1) <= share.half + spread * share.mean:
        return Verdict(f"{sentence}: whether it is sooner {CANNOT}.", share)
    return Verdict(f"{sentence}.", share, share.mean < 1)
