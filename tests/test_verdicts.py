"""Check verdicts on a paper's claims: an order, an equality with a margin, rows that diverged
and rows that were not run."""

from __future__ import annotations

import math
from typing import Dict, List, Optional

import pytest

from tools.experiments.verdicts import (
    CONTRADICTED,
    NOT_RUN,
    SHOWN,
    UNDECIDED,
    Claim,
    judge,
    judge_exactly,
    judge_gap,
    judge_printed,
    make_results,
)

INF = math.inf


def judge_gaps(gaps: List[float], margin: Optional[float] = None) -> str:
    """Return the verdict on a claim whose gap is a - b, where row b is all zeros."""
    claim = Claim("a is above b", ("a", "b"), lambda finals: finals["a"] - finals["b"], margin)
    return judge(
        claim, {"a": dict(enumerate(gaps)), "b": dict.fromkeys(range(len(gaps)), 0.0)}
    ).verdict


@pytest.mark.parametrize("gaps, order, equality", [
    ([3.0, 4.0, 5.0], SHOWN, CONTRADICTED),
    ([-3.0, -4.0, -5.0], CONTRADICTED, CONTRADICTED),
    ([0.1, -0.1, 0.0], UNDECIDED, SHOWN),
    ([0.0, 0.0, 0.0], UNDECIDED, SHOWN),
    ([5.0, -5.0, 0.0], UNDECIDED, UNDECIDED),
    ([1.2, 0.8, 1.0], SHOWN, UNDECIDED),  # 1 +- 0.115: above 0, but too close to the margin
    ([9.0, 9.1], UNDECIDED, UNDECIDED),  # two seeds
    ([INF, INF, 2.0], UNDECIDED, UNDECIDED),
    ([], NOT_RUN, NOT_RUN),
])  # fmt: skip
def test_verdicts_by_the_gaps_of_the_seeds(gaps: List[float], order: str, equality: str) -> None:
    assert (judge_gaps(gaps), judge_gaps(gaps, margin=1.0)) == (order, equality)


def test_the_gap_is_taken_seed_by_seed() -> None:
    """Rows of one seed share data and first weights: variation with the seed alone does not hide
    a difference."""
    finals: Dict[str, Dict[int, float]] = {
        "a": {0: 1.0, 1: 5.0, 2: 9.0, 7: 0.0},
        "b": {0: 0.9, 1: 4.8, 2: 8.9},
    }
    verdict = judge(Claim("a", ("a", "b"), lambda row: row["a"] - row["b"]), finals)
    assert verdict[1:] == (SHOWN, pytest.approx(0.4 / 3), pytest.approx(1 / 30), 3)
    assert judge(Claim("c", ("a", "c"), lambda row: row["c"]), finals).verdict == NOT_RUN


def test_an_experiment_agrees_only_if_all_is_shown() -> None:
    shown_claim, wrong_claim = judge_exactly("x", True, 0.0), judge_exactly("y", False, 2.0)
    assert [judge_gap("x", gap).verdict for gap in (0.1, 0.0, -0.1)] == [
        SHOWN,
        CONTRADICTED,
        CONTRADICTED,
    ]
    assert make_results([shown_claim])["agrees"] and not make_results([shown_claim])["differences"]
    assert not make_results([])["agrees"]  # nothing was claimed
    results = make_results([shown_claim, wrong_claim])
    assert not results["agrees"] and len(results["differences"]) == 1
    numbers = {"difference": 2.0, "standard_error": 0.0, "seeds": None}
    assert results["verdicts"][1] == {"claim": "y", "verdict": CONTRADICTED, **numbers}


@pytest.mark.parametrize(
    ("printed", "value", "verdict"),
    [("14.3", 14.25, SHOWN), ("2.70", 2.69, CONTRADICTED), ("2.70", 2.7049, SHOWN), ("270 MB", 269.4, CONTRADICTED),
     ("7", 7.49, SHOWN)],
)  # fmt: skip
def test_a_printed_number_is_shown_by_values_that_round_to_it(
    printed: str, value: float, verdict: str
) -> None:
    assert judge_printed("x", printed, value).verdict == verdict
