"""Judge the claims of a paper by the final values of runs.

A claim has a *gap* for each seed: above 0 if the paper is right, or, for an equality, the
difference of two rows. Rows of one seed share data, order and initial weights, so the gap is
computed seed by seed. With mean d and standard error SE over n seeds, t says by how many standard
errors the claim holds (below 0: fails):

    a is better than b     t = d / SE
    a equals b             t = (margin - |d|) / SE

    t >= c    shown       c: the two-sided 95 % point of Student's t with n - 1 degrees of freedom, 4.30 for three seeds
    t >= 2    likely
    t <= -2   unlikely
    t <= -c   contradicted

All other cases, such as fewer than three seeds or a gap that is not finite, cannot be told. Nor can
an equality of rows below the claim's floor, which are hardly trained, or a comparison of rows that
differ in something else than it says. A claim on a row that was added after the results were seen
is not counted.

A prediction measures nothing. It is *predicted*, with how far it is off the printed number, or
*predicted otherwise*.
"""

from __future__ import annotations

import math
import statistics
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Sequence

from ipu_pipe.comparison.verdicts import compute_critical_t

SHOWN, LIKELY, UNLIKELY, CONTRADICTED = "shown", "likely", "unlikely", "contradicted"
UNDECIDED, NOT_COUNTED, NOT_RUN = "cannot be told", "not counted", "not run"
PREDICTED, OTHERWISE = "predicted", "predicted otherwise"
LEAST_SEEDS = 3
COLUMNS = ("the paper says", "verdict", "difference", "standard error", "seeds", "t")


class Claim(NamedTuple):
    """A statement on the final values of `rows`.

    `gap` returns the gap from the final values of one seed by label. With a `margin` the claim is
    an equality (the gap is smaller than the margin), without one it is that the gap is above 0.
    `floor`: both rows of an equality must be better than this, by `sign` (-1: less is better).
    `verdict`: the verdict whatever the runs say, for a claim that they cannot decide.
    """

    text: str
    rows: Sequence[str]
    gap: Callable[[Mapping[str, float]], float]
    margin: Optional[float] = None
    floor: Optional[float] = None
    sign: int = 1
    verdict: Optional[str] = None


class Verdict(NamedTuple):
    """The verdict of the runs on a claim. `seeds` is None if nothing is random; `t`: by how many
    standard errors the claim holds.
    """

    claim: str
    verdict: str
    difference: Optional[float] = None
    standard_error: Optional[float] = None
    seeds: Optional[int] = 0
    t: Optional[float] = None


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
    error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else None
    means = [statistics.mean(finals[label][seed] for seed in seeds) for label in claim.rows]
    return weigh(claim, statistics.mean(gaps), error, len(seeds), means)


def weigh(
    claim: Claim,
    difference: float,
    error: Optional[float],
    seeds: int,
    means: Sequence[Optional[float]],
) -> Verdict:
    """Return the verdict by the mean of the gaps over the seeds and its standard error; `means` of
    the claim's rows, None for one that diverged.
    """
    t = None
    if error is not None and seeds >= LEAST_SEEDS:
        ahead = difference if claim.margin is None else claim.margin - abs(difference)
        t = ahead / error if error else math.copysign(math.inf, ahead) if ahead else 0.0
    word = UNDECIDED if t is None else _find_word(t, seeds)
    is_trained = claim.floor is None or all(
        mean is not None and claim.sign * (mean - claim.floor) > 0 for mean in means
    )
    if claim.margin is not None and word in (SHOWN, LIKELY) and not is_trained:
        word = UNDECIDED
    finite = t if t is not None and math.isfinite(t) else None
    return Verdict(claim.text, claim.verdict or word, difference, error, seeds, finite)


def _find_word(t: float, seeds: int) -> str:
    critical = compute_critical_t(seeds)
    words = ((critical, SHOWN), (2.0, LIKELY)), ((critical, CONTRADICTED), (2.0, UNLIKELY))
    return next((word for least, word in words[t < 0] if abs(t) >= least), UNDECIDED)


def judge_exactly(claim: str, holds: bool, difference: float) -> Verdict:
    """Return the verdict on a claim without randomness that holds or does not."""
    return Verdict(claim, SHOWN if holds else CONTRADICTED, difference, 0.0, None)


def predict_claim(claim: str, holds: bool, difference: float) -> Verdict:
    """Return the verdict of a prediction on a claim that it agrees with or not."""
    return Verdict(claim, PREDICTED if holds else OTHERWISE, difference, 0.0, None)


def predict_number(
    claim: str, printed: str, value: float, unit: str = "%", at_most: bool = False
) -> Verdict:
    """Return the verdict of a predicted value: it rounds to the `printed` number (which may have a
    unit), or is off by a share of it in percent or, if the numbers are percentages, in `points`.
    With `at_most` any smaller value agrees.
    """
    number = float(printed.split()[0])
    half_digit = 0.5 * 10.0 ** -len(printed.split()[0].partition(".")[2])
    difference = value - number
    if abs(difference) <= half_digit * (1 + 1e-9) or (at_most and difference < 0):
        return Verdict(claim, PREDICTED, difference, 0.0, None)
    off = abs(difference) if unit == "points" else 100 * abs(difference / number)
    return Verdict(claim, f"{PREDICTED}, off by {off:.2g} {unit}", difference, 0.0, None)


def make_results(verdicts: Sequence[Verdict]) -> Dict[str, Any]:
    """Return the keys "verdicts", "agrees" and "differences" of an experiment's results."""
    counted = [verdict for verdict in verdicts if verdict.verdict != NOT_COUNTED]
    not_shown = [verdict for verdict in counted if verdict.verdict not in (SHOWN, PREDICTED)]
    return {
        "verdicts": [verdict._asdict() for verdict in verdicts],
        "agrees": bool(counted) and not not_shown,
        "differences": [describe(verdict) for verdict in not_shown],
    }


def describe(verdict: Verdict) -> str:
    """Return a verdict in words."""
    text = f"{verdict.verdict}: {verdict.claim}"
    if verdict.difference is not None:
        error = f" +- {verdict.standard_error:.3g}" if verdict.standard_error else ""
        text += f": difference {verdict.difference:.3g}{error}"
    return text + (f", {verdict.seeds} seeds" if verdict.seeds else "")
