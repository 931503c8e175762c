"""The faults that `tests/mutants` puts into the library have their places."""

from __future__ import annotations

import json

import pytest

from tests.mutants.run import RESULTS, ROOT, Mutant, read_mutants
from tests.seconds import read_dear_cases


@pytest.mark.parametrize("mutant", read_mutants(), ids=lambda mutant: mutant.idea)
def test_a_fault_has_one_place(mutant: Mutant) -> None:
    """Story: an edit of the library left a fault without its line, which ended the tool hours later."""
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.before) == 1 and mutant.before != mutant.after


def test_every_fault_was_found_by_a_case_that_is_not_dear() -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert results.keys() == {mutant.idea for mutant in read_mutants()}
    found_by = {result["killed_by"] for result in results.values()}
    assert all(found_by) and not found_by & read_dear_cases()
