"""The faults that `tests/mutants` puts into the library have their places."""

from __future__ import annotations

import pytest

from tests.mutants.run import ROOT, Mutant, read_mutants


@pytest.mark.parametrize("mutant", read_mutants(), ids=lambda mutant: mutant.idea)
def test_a_fault_has_one_place(mutant: Mutant) -> None:
    """Story: an edit of the library left a fault without its line, which ended the tool hours later."""
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.before) == 1 and mutant.before != mutant.after
