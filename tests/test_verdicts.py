"""Check verdicts on a paper's claims: an order, an equality with a margin, rows that diverged
and rows that were not run."""

from __future__ import annotations

import math
from typing import Any, List, Optional

import pytest

from tools.experiments.verdicts import (
    Claim,
    judge,
    judge_exactly,
    make_results,
    predict_claim,
    predict_number,
)

INF = math.inf


def judge_gaps(gaps: List[float], margin: Optional[float] = None) -> str:
    """Return the verdict on a claim whose gap is a - b, where row b is all zeros."""
    claim = Claim("a is above b", ("a", "b"), lambda finals: finals["a"] - finals["b"], margin)
    rows = {"a": dict(enumerate(gaps)), "b": dict.fromkeys(range(len(gaps)), 0.0)}
    return judge(claim, rows).verdict


@pytest.mark.parametrize("gaps, order, equality", [
    ([3.0, 4.0, 5.0], "shown", "contradicted"),
    ([-3.0, -4.0, -5.0], "contradicted", "contradicted"),
    ([0.1, -0.1, 0.0], "cannot be told", "shown"),
    ([0.0, 0.0, 0.0], "cannot be told", "shown"),
    ([5.0, -5.0, 0.0], "cannot be told", "cannot be told"),
    ([1.2, 0.8, 1.0], "shown", "cannot be told"),  # 1 +- 0.115: above 0, but too close to the margin
    ([0.5, 0.1, 0.3], "likely", "shown"),  # t is 2.6, below 4.30
    ([-0.5, -0.1, -0.3], "unlikely", "shown"),
    ([0.5, 0.1, 0.3, 0.3, 0.3], "shown", "shown"),  # t is 4.7, with five seeds above 2.78
    ([9.0, 9.1], "cannot be told", "cannot be told"),  # two seeds
    ([INF, INF, 2.0], "cannot be told", "cannot be told"),
    ([], "not run", "not run"),
])  # fmt: skip
def test_verdicts_by_the_gaps_of_the_seeds(gaps: List[float], order: str, equality: str) -> None:
    assert (judge_gaps(gaps), judge_gaps(gaps, margin=1.0)) == (order, equality)


def test_the_gap_is_taken_seed_by_seed() -> None:
    """Rows of one seed share data and first weights: variation with the seed alone does not hide
    a difference."""
    finals = {"a": {0: 1.0, 1: 5.0, 2: 9.0, 7: 0.0}, "b": {0: 0.9, 1: 4.8, 2: 8.9}}
    verdict = judge(Claim("a", ("a", "b"), lambda row: row["a"] - row["b"]), finals)
    numbers = (pytest.approx(0.4 / 3), pytest.approx(1 / 30), 3, pytest.approx(4.0))
    assert verdict[1:] == ("likely", *numbers)
    assert judge(Claim("c", ("a", "c"), lambda row: row["c"]), finals).verdict == "not run"


def test_an_experiment_agrees_only_if_all_is_shown() -> None:
    shown, wrong = judge_exactly("x", True, 0.0), judge_exactly("y", False, 2.0)
    added = wrong._replace(verdict="not counted")
    for claims in ([shown], [shown, added]):
        assert make_results(claims)["agrees"] is True
    # of none, nothing was claimed
    assert make_results([])["agrees"] is False
    results = make_results([shown, wrong])
    assert results["agrees"] is False and len(results["differences"]) == 1
    assert results["verdicts"][1]["verdict"] == "contradicted"


def test_rows_that_are_hardly_trained_are_not_equal() -> None:
    """The floor is that of accuracies, sign 1, or of losses, sign -1. Rows that differ are told apart
    below it too."""
    finals = {"a": dict.fromkeys(range(3), 0.2), "b": dict.fromkeys(range(3), 0.2)}

    def judge_equality(sign: int, floor: float, margin: float = 0.1) -> str:
        claim = Claim("a", ("a", "b"), lambda row: row["a"] - row["b"], margin, floor, sign)
        return judge(claim, finals).verdict

    assert [judge_equality(1, 0.1), judge_equality(1, 0.25)] == ["shown", "cannot be told"]
    assert [judge_equality(-1, 0.1), judge_equality(-1, 0.25)] == ["cannot be told", "shown"]
    finals["b"] = dict.fromkeys(range(3), 0.9)
    assert judge_equality(1, 0.25) == "contradicted"


def test_a_claim_that_the_runs_cannot_decide_keeps_its_verdict() -> None:
    claim = Claim("a", ("a",), lambda row: row["a"], verdict="not counted")
    verdict = judge(claim, {"a": {0: 1.0, 1: 1.1, 2: 0.9}})
    assert (verdict.verdict, verdict.difference) == ("not counted", pytest.approx(1.0))


@pytest.mark.parametrize("printed, value, keys, verdict", [
    ("14.3", 14.25, {}, "predicted"),
    ("2.70", 2.69, {}, "predicted, off by 0.37 %"),
    ("270 MB", 269.4, {}, "predicted, off by 0.22 %"),
    ("7", 7.49, {}, "predicted"),
    ("8", 17.1, {"unit": "points"}, "predicted, off by 9.1 points"),
    ("3.0", 1.0, {"at_most": True}, "predicted"),
    ("3.0", 3.3, {"at_most": True}, "predicted, off by 10 %"),
])  # fmt: skip
def test_a_prediction_is_off_unless_it_rounds_to_the_printed_number(
    printed: str, value: float, keys: Any, verdict: str
) -> None:
    assert predict_number("x", printed, value, **keys).verdict == verdict


def test_a_prediction_contradicts_nothing() -> None:
    verdicts = [predict_claim("x", holds, 0.0).verdict for holds in (True, False)]
    assert verdicts == ["predicted", "predicted otherwise"]
