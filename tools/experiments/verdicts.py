"""Judge the claims of a paper by the final values of runs.

A claim has a *gap* for each seed: above 0 if the paper is right, or, for an equality, the
difference of two rows. Rows of one seed share data, order and initial weights, so the gap is
computed seed by seed. With mean d and standard error SE over the seeds

    a is better than b     shown: d - 2 SE > 0         contradicted: d + 2 SE < 0
    a equals b             shown: |d| + 2 SE < margin  contradicted: |d| - 2 SE > margin

and all other cases, such as fewer than three seeds or a gap that is not finite, cannot be told. The
claim states the margin of an equality.
"""

from __future__ import annotations

import math
import statistics
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Sequence

SHOWN, CONTRADICTED, UNDECIDED, NOT_RUN = "shown", "contradicted", "cannot be told", "not run"
LEAST_SEEDS = 3
COLUMNS = ("the paper says", "verdict", "difference", "standard error", "seeds")


class Claim(NamedTuple):
    """A statement on the final values of `rows`.

    `gap` returns the gap from the final values of one seed by label. With a `margin` the claim is
    an equality (the gap is smaller than the margin), without one it is that the gap is above 0.
    """

    text: str
    rows: Sequence[str]
    gap: Callable[[Mapping[str, float]], float]
    margin: Optional[float] = None


class Verdict(NamedTuple):
    """The verdict of the runs on a claim. `seeds` is None if nothing is random."""

    claim: str
    verdict: str
    difference: Optional[float] = None
    standard_error: Optional[float] = None
    seeds: Optional[int] = 0


def judge(claim: Claim, finals: Mapping[str, Mapping[int, float]]) -> Verdict:
    """Judge a claim by final values by row label, then seed."""
    seeds = set.intersection(*(set(finals.get(label, ())) for label in claim.rows))
    if not seeds:
        return Verdict(claim.text, NOT_RUN)
    gaps = [
        claim.gap({label: finals[label][seed] for label in claim.rows}) for seed in sorted(seeds)
    ]
    if not all(map(math.isfinite, gaps)):
        return Verdict(claim.text, UNDECIDED, seeds=len(seeds))
    difference = statistics.mean(gaps)
    error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else None
    low, high = difference - 2 * (error or 0.0), difference + 2 * (error or 0.0)
    margin = claim.margin
    shown = low > 0 if margin is None else max(abs(low), abs(high)) < margin
    contradicted = high < 0 if margin is None else low > margin or high < -margin
    if len(seeds) < LEAST_SEEDS or not (shown or contradicted):
        return Verdict(claim.text, UNDECIDED, difference, error, len(seeds))
    return Verdict(claim.text, SHOWN if shown else CONTRADICTED, difference, error, len(seeds))


def judge_exactly(claim: str, holds: bool, difference: float) -> Verdict:
    """Return the verdict on a claim without randomness that holds or does not."""
    return Verdict(claim, SHOWN if holds else CONTRADICTED, difference, 0.0, None)


def judge_gap(claim: str, gap: float) -> Verdict:
    """Return the verdict on a claim without randomness by its gap, which is above 0 if the paper is
    right.
    """
    return judge_exactly(claim, gap > 0, gap)


def judge_printed(claim: str, printed: str, value: float) -> Verdict:
    """Return the verdict on a value without randomness: it must round to the `printed` number
    (which may have a unit).
    """
    number = printed.split()[0]
    half_digit = 0.5 * 10.0 ** -len(number.partition(".")[2])
    difference = value - float(number)
    return judge_exactly(claim, abs(difference) <= half_digit * (1 + 1e-9), difference)


def make_results(verdicts: Sequence[Verdict]) -> Dict[str, Any]:
    """Return the keys "verdicts", "agrees" and "differences" of an experiment's results."""
    not_shown = [verdict for verdict in verdicts if verdict.verdict != SHOWN]
    return {
        "verdicts": [verdict._asdict() for verdict in verdicts],
        "agrees": bool(verdicts) and not not_shown,
        "differences": [describe(verdict) for verdict in not_shown],
    }


def describe(verdict: Verdict) -> str:
    """Return a verdict in words."""
    text = f"{verdict.verdict}: {verdict.claim}"
    if verdict.difference is not None:
        error = f" +- {verdict.standard_error:.3g}" if verdict.standard_error else ""
        text += f": difference {verdict.difference:.3g}{error}"
    return text + (f", {verdict.seeds} seeds" if verdict.seeds else "")
