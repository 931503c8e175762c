"""Choose rows of a table such that every pair of values that occurs in the table still occurs.

A fault that needs three particular values at once is rarer than one that needs two, and the whole table takes an hour:
`make equality` runs it, by TESTS_FULL=1.
"""

from __future__ import annotations

import heapq
import itertools
import os
from typing import Any, FrozenSet, Iterable, List, Mapping, Sequence, Set, Tuple

IS_FULL = os.environ.get("TESTS_FULL") == "1"


def list_pairs(values: Sequence[Any]) -> FrozenSet[Tuple[int, int, str, str]]:
    """Return the pairs of a row's values, each with the numbers of its columns."""
    described = [(column, repr(value)) for column, value in enumerate(values)]
    return frozenset(
        (i, j, one, other) for (i, one), (j, other) in itertools.combinations(described, 2)
    )


def cover_pairs(table: Mapping[Any, Sequence[Any]], first: Iterable[Any] = ()) -> List[Any]:
    """Return the keys of rows that have every pair of the table's values: those of `first`, and each time the row with most
    pairs that are missing. All keys with TESTS_FULL=1.
    """
    if IS_FULL:
        return list(table)
    pairs = {key: list_pairs(values) for key, values in table.items()}
    chosen = list(first)
    covered: Set[Any] = set().union(*(pairs[key] for key in chosen))
    # a row's new pairs only become fewer, so that an old count is a bound, and most need no second look
    waiting = [(-len(of_row - covered), n, key) for n, (key, of_row) in enumerate(pairs.items())]
    heapq.heapify(waiting)
    while waiting:
        _, number, key = heapq.heappop(waiting)
        missing = -len(pairs[key] - covered)
        if missing and waiting and missing > waiting[0][0]:
            heapq.heappush(waiting, (missing, number, key))
        elif missing:
            chosen.append(key)
            covered |= pairs[key]
    order = {key: number for number, key in enumerate(table)}
    return sorted(set(chosen), key=order.__getitem__)
