"""Test docs/results/papers.md: the files and experiments that it names exist, and each status
agrees with the stored verdicts."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import FrozenSet, List, Tuple

import pytest
import yaml

from tools.experiments.catalogue import find_experiments
from tools.experiments.theory_figures import FIGURES
from tools.experiments.verdicts import (
    CONTRADICTED,
    LIKELY,
    NOT_COUNTED,
    NOT_RUN,
    OTHERWISE,
    PREDICTED,
    SHOWN,
    UNDECIDED,
    UNLIKELY,
)

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
WORDS = (SHOWN, LIKELY, UNLIKELY, CONTRADICTED, UNDECIDED, NOT_COUNTED, NOT_RUN)
OFF = re.compile(r"predicted, off by ([\d.e+]+) (%|points)")
Row = Tuple[str, str, str, str, str]
# of later methods, in none of the five papers
OF_NO_PAPER = {"async_frontier"}


@lru_cache(maxsize=None)
def list_experiments() -> FrozenSet[str]:
    """Return the names of all experiments."""
    return frozenset(one.name for one in find_experiments([]))


def read_paper_rows() -> List[Row]:
    """Return the rows of the papers' tables, cell by cell."""
    lines = (RESULTS / "papers.md").read_text(encoding="utf-8").splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| ")
    ]
    return [
        (a, b, c, d, e)
        for a, b, c, d, e in (row for row in cells if len(row) == 5)
        if a not in ("item", "---")
    ]


def list_numbers(text: str) -> List[int]:
    """Return the numbers of a list such as "1, 3 to 5"."""
    return [
        number
        for low, high in re.findall(r"(\d+)(?: to (\d+))?", text)
        for number in range(int(low), int(high or low) + 1)
    ]


def compute_status(name: str, claims: str) -> str:
    """Return the status of the numbered claims of an experiment (of all if `claims` is empty),
    as counts where they differ."""
    file = RESULTS / name / "results.json"
    if not file.is_file():
        return NOT_RUN
    verdicts = [
        verdict["verdict"] for verdict in json.loads(file.read_text(encoding="utf-8"))["verdicts"]
    ]
    if not verdicts:  # the paper's words are of a picture
        return UNDECIDED
    counts = (
        Counter(verdicts[number - 1] for number in list_numbers(claims))
        if claims
        else Counter(verdicts)
    )
    if set(counts) - set(WORDS):
        return describe_predictions(counts)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{word} {counts[word]}" for word in WORDS if counts[word])


def describe_predictions(counts: "Counter[str]") -> str:
    """Return the status of predictions: how many are as printed, how many are off and by how
    much, and how many are in another order."""
    matches = [OFF.fullmatch(word) for word in counts.elements()]
    offs = sorted(float(match[1]) for match in matches if match)
    span = ""
    if offs:
        unit = next(match[2] for match in matches if match)
        low, high = f"{offs[0]:g}", f"{offs[-1]:g}"
        span = f"{low} {unit}" if low == high else f"{low} to {high} {unit}"
    if len(offs) == len(matches):
        return f"{PREDICTED}, off by {span}"
    if counts[PREDICTED] == len(matches):
        return PREDICTED
    parts = [f"{PREDICTED} {counts[PREDICTED]}"] if counts[PREDICTED] else []
    parts += [f"off {len(offs)} (by {span})"] if offs else []
    parts += [f"{OTHERWISE} {counts[OTHERWISE]}"] if counts[OTHERWISE] else []
    return OTHERWISE if counts[OTHERWISE] == len(matches) else ", ".join(parts)


def find_test(name: str) -> bool:
    """Return whether a test such as tests/test_x.py::test_y exists."""
    file, _, test = name.partition("::")
    path = ROOT / file
    if not test or not path.is_file():
        return False
    return re.search(rf"^def {test}\(", path.read_text(encoding="utf-8"), re.M) is not None


def assert_row_is_right(command: str, status: str) -> None:
    """Assert that every name in a row exists and that the status equals the one computed from
    the stored verdicts."""
    names = re.findall(r"`([^`]+)`((?: \d+(?: to \d+)?,?)*)", command)
    if not names:
        assert status in (NOT_RUN, UNDECIDED)
    for name, claims in names:
        if name.startswith("tests/"):
            assert find_test(name) and status == SHOWN, name
        elif name in FIGURES:
            assert (RESULTS / "stability" / f"{name}.json").is_file() and status == SHOWN, name
        else:
            assert name in list_experiments(), name
            assert status == compute_status(name, claims), (name, compute_status(name, claims))


def test_each_status_is_that_of_the_stored_verdicts() -> None:
    rows = read_paper_rows()
    assert len(rows) > 80
    for row in rows:
        assert_row_is_right(row[2], row[3])


def test_every_experiment_and_file_is_on_the_page_and_exists() -> None:
    rows = read_paper_rows()
    named = {name for row in rows for name in re.findall(r"`([a-z_0-9]+)`", row[2])}
    assert (list_experiments() - OF_NO_PAPER) | set(FIGURES) == named
    for row in rows:
        for file in re.findall(r"`([^`]+)`", row[1]):
            assert (ROOT / file).exists() or (ROOT / "ipu_pipe" / file).exists(), file


@pytest.mark.parametrize(
    ("command", "status"),
    [("`rpd_quadratic` 2", CONTRADICTED), ("`no_such`", SHOWN), ("`pb_one_sample`", SHOWN),
     ("`tests/test_no.py::test_no`", SHOWN), ("`tests/test_versions.py`", SHOWN), ("`tests/test_versions.py::test_no`", SHOWN),
     ("`pb_3`", NOT_RUN), ("", SHOWN)],
)  # fmt: skip
def test_a_wrong_row_fails(command: str, status: str) -> None:
    with pytest.raises(AssertionError):
        assert_row_is_right(command, status)


def test_the_core_hours_of_all_experiments_are_those_of_their_files() -> None:
    hours = sum(
        yaml.safe_load(file.read_text())["hours"]
        for file in (ROOT / "configs" / "experiments").glob("*.yaml")
    )
    stated = re.search(r"about (\d+)\s+core-hours of training", (RESULTS / "README.md").read_text())
    assert stated is not None and int(stated[1]) == round(hours)
