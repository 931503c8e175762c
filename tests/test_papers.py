"""Test docs/results/papers.md: the files and experiments that it names exist, and each status
agrees with the stored verdicts."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import FrozenSet, List, Optional, Set

import yaml

from tests.support.runs import ROOT, read_json
from tools.experiments import overview
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

RESULTS = ROOT / "docs" / "results"
WORDS = (SHOWN, LIKELY, UNLIKELY, CONTRADICTED, UNDECIDED, NOT_COUNTED, NOT_RUN)
OFF = re.compile(r"predicted, off by ([\d.e+]+) (%|points)")
# of later methods, in none of the five papers
OF_NO_PAPER = {"async_frontier", "delayed_muon"}


@lru_cache(maxsize=None)
def list_experiments() -> FrozenSet[str]:
    """Return the names of all experiments."""
    return frozenset(one.name for one in find_experiments([]))


def read_paper_rows() -> List[List[str]]:
    """Return the rows of the papers' tables, cell by cell."""
    lines = (RESULTS / "papers.md").read_text(encoding="utf-8").splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| ")
    ]
    return [row for row in rows if len(row) == 5 and row[0] not in ("item", "---")]


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
    verdicts = [verdict["verdict"] for verdict in read_json(file)["verdicts"]]
    if not verdicts:  # the paper's words are of a picture
        return UNDECIDED
    chosen = list_numbers(claims) or range(1, len(verdicts) + 1)
    counts = Counter(verdicts[number - 1] for number in chosen)
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


def find_test(name: str) -> Optional[ast.FunctionDef]:
    """Return the function of a test such as tests/test_x.py::test_y, None if there is none."""
    file, _, test = name.partition("::")
    path = ROOT / file
    if not path.is_file():
        return None
    functions = {
        one.name: one for one in parse_module(path).body if isinstance(one, ast.FunctionDef)
    }
    return functions.get(test)


@lru_cache(maxsize=None)
def parse_module(path: Path) -> ast.Module:
    """Parse a file of Python."""
    return ast.parse(path.read_text(encoding="utf-8"))


def list_tables(text: str) -> Set[int]:
    """Return the numbers of the paper's tables that a text names, as in "Table 1", "Tables 2, 3"."""
    lists = re.findall(r"Tables? (\d+(?:(?:, | and | to )\d+)*)", text)
    return {number for numbers in lists for number in list_numbers(numbers)}


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


def test_each_row_says_what_came_out() -> None:
    """Story: the figures 3 and 4 of pipelined backpropagation were "shown", and no value was given."""
    assert [row[0] for row in read_paper_rows() if not row[4]] == []


def test_a_test_that_states_a_table_is_in_a_row_of_that_table() -> None:
    """Story: the row of PipeMare's Table 4, which has orders, named the test of Table 5's ratios."""
    for item, _, command, _, _ in read_paper_rows():
        for name in re.findall(r"`(tests/[^`]+)`", command):
            test = find_test(name)
            stated = list_tables((test and ast.get_docstring(test)) or "")
            assert not (stated and list_tables(item)) or stated & list_tables(item), (item, name)


def test_every_experiment_and_file_is_on_the_page_and_exists() -> None:
    rows = read_paper_rows()
    named = {name for row in rows for name in re.findall(r"`([a-z_0-9]+)`", row[2])}
    assert (list_experiments() - OF_NO_PAPER) | set(FIGURES) == named
    for row in rows:
        for file in re.findall(r"`([^`]+)`", row[1]):
            assert (ROOT / file).exists() or (ROOT / "ipu_pipe" / file).exists(), file


def test_the_core_hours_of_all_experiments_are_those_of_their_files() -> None:
    hours = sum(
        yaml.safe_load(file.read_text())["hours"]
        for file in (ROOT / "configs" / "experiments").glob("*.yaml")
    )
    stated = re.search(r"about (\d+)\s+core-hours of training", (RESULTS / "README.md").read_text())
    assert stated is not None and int(stated[1]) == round(hours)


def test_the_page_of_results_is_that_of_the_stored_results() -> None:
    """Story: the page was thirty paragraphs of figures, which nobody read or kept up to date."""
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert page == overview.format_page(), "run: python -m tools.experiments.overview"
    assert len(overview.TEXT.read_text(encoding="utf-8").split()) <= 600
