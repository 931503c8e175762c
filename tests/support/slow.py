"""Mark tests as slow: `make test` leaves them out, and `make test-slow` runs them alone."""

from __future__ import annotations

from typing import Any, Callable, Iterable, List

import pytest


def mark_slow(cases: Iterable[Any], is_kept: Callable[[Any], bool]) -> List[Any]:
    """Return a test's cases, all marked slow except those for which `is_kept` is true."""
    return [case if is_kept(case) else pytest.param(case, marks=pytest.mark.slow) for case in cases]
