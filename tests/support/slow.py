"""The marker `slow`: `make test` leaves such tests out, and `make test-slow` runs them alone."""

from __future__ import annotations

from typing import Any, Callable, Iterable, List

import pytest


def mark_slow(cases: Iterable[Any], is_kept: Callable[[Any], bool]) -> List[Any]:
    """Return a test's cases, marked slow but for those that `make test` is to run."""
    return [case if is_kept(case) else pytest.param(case, marks=pytest.mark.slow) for case in cases]
