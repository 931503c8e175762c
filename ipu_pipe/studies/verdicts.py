"""Whether runs show what a paper says of them.

A claim is a number for each seed, its *gap*: above 0 where the paper is right; of an equality how far apart two rows are. Rows of
one seed share data, order and first weights, so the gap is taken seed by seed. With mean d and standard error SE over the seeds

    a is better than b     shown: d - 2 SE > 0         contradicted: d + 2 SE < 0
    a equals b             shown: |d| + 2 SE < margin  contradicted: |d| - 2 SE > margin

and anything else, such as fewer than three seeds, cannot be told. The margin of an equality is stated with the claim.
"""

from __future__ import annotations

import math
import statistics
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Sequence

SHOWN, CONTRADICTED, UNDECIDED, NOT_RUN = "shown", "contradicted", "cannot be told", "not run"
LEAST_SEEDS = 3
COLUMNS = ("the paper says", "verdict", "difference", "standard error", "seeds")


class Claim(NamedTuple):
    """A statement on the final values of `rows`; `gap` takes those of one seed by label. `margin` makes it an equality."""

    text: str
    rows: Sequence[str]
    gap: Callable[[Mapping[str, float]], float]
    margin: Optional[float] = None


class Verdict(NamedTuple):
    """What the runs say of a claim; `seeds` is None where nothing is drawn."""

    claim: str
    verdict: str
    difference: Optional[float] = None
    standard_error: Optional[float] = None
    seeds: Optional[int] = 0


def judge(claim: Claim, finals: Mapping[str, Mapping[int, float]]) -> Verdict:
    """Judge a claim by final values by row label, then seed; those of diverged runs are infinite."""
    seeds = set.intersection(*(set(finals.get(label, ())) for label in claim.rows))
    if not seeds:
        return Verdict(claim.text, NOT_RUN)
    gaps = [claim.gap({label: finals[label][seed] for label in claim.rows}) for seed in sorted(seeds)]
    difference = error = None
    low, high = min(gaps), max(gaps)  # where a run diverged, all seeds must agree
    if any(math.isnan(gap) for gap in gaps):  # both rows diverged
        low, high = -math.inf, math.inf
    elif all(map(math.isfinite, gaps)):
        difference = statistics.mean(gaps)
        if len(gaps) > 1:
            error = statistics.stdev(gaps) / math.sqrt(len(gaps))
            low, high = difference - 2 * error, difference + 2 * error
    margin = claim.margin
    shown = low > 0 if margin is None else max(abs(low), abs(high)) < margin
    contradicted = high < 0 if margin is None else low > margin or high < -margin
    word = UNDECIDED if len(seeds) < LEAST_SEEDS else SHOWN if shown else CONTRADICTED if contradicted else UNDECIDED
    return Verdict(claim.text, word, difference, error, len(seeds))


def judge_exactly(claim: str, holds: bool, difference: float) -> Verdict:
    """Judge a claim in which nothing is drawn."""
    return Verdict(claim, SHOWN if holds else CONTRADICTED, difference, 0.0, None)


def judge_gap(claim: str, gap: float) -> Verdict:
    """Judge a claim in which nothing is drawn by its gap: above 0 where the paper is right."""
    return judge_exactly(claim, gap > 0, gap)


def judge_printed(claim: str, printed: str, value: float) -> Verdict:
    """Judge a value in which nothing is drawn by a printed number, with or without a unit: it must round to its digits."""
    number = printed.split()[0]
    half = 0.5 * 10.0 ** -len(number.partition(".")[2])
    apart = value - float(number)
    return judge_exactly(claim, abs(apart) <= half * (1 + 1e-9), apart)


def make_results(verdicts: Sequence[Verdict]) -> Dict[str, Any]:
    """Return the keys "verdicts", "agrees" and "differences" of an experiment's results."""
    left = [verdict for verdict in verdicts if verdict.verdict != SHOWN]
    return {
        "verdicts": [verdict._asdict() for verdict in verdicts],
        "agrees": not left,
        "differences": [describe(verdict) for verdict in left],
    }


def describe(verdict: Verdict) -> str:
    """Return a verdict in words."""
    text = f"{verdict.verdict}: {verdict.claim}"
    if verdict.difference is not None:
        error = f" +- {verdict.standard_error:.3g}" if verdict.standard_error else ""
        text += f": difference {verdict.difference:.3g}{error}"
    return text + (f", {verdict.seeds} seeds" if verdict.seeds else "")
