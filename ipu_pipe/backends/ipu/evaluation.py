"""The test set in calls of one size."""

from __future__ import annotations

from typing import Any, Iterator, List, Tuple

import torch
from torch.utils._pytree import tree_map


def in_calls(batches: Iterator[Tuple[Any, Any]], rows: int) -> Iterator[Tuple[Any, Any, int]]:
    """Batches of any size as calls of `rows` samples, the last filled up, and how many are the test set's own."""
    held: List[Tuple[Any, Any]] = []
    count = 0
    for x, y in batches:
        held.append((x, y))
        count += len(x)
        while count >= rows:
            joined = tuple(torch.cat([pair[i] for pair in held]) for i in range(2))
            yield joined[0][:rows], joined[1][:rows], rows
            held, count = [(joined[0][rows:], joined[1][rows:])], count - rows
    if count:
        x, y = (torch.cat([pair[i] for pair in held]) for i in range(2))
        yield filled(x, rows), filled(y, rows), count


def filled(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x, its last sample repeated up to so many."""
    return torch.cat([x, x[-1:].expand(rows - len(x), *x.shape[1:])]) if len(x) < rows else x[:rows]


def judged(output: Any, count: int) -> Any:
    """The first so many samples of an output, its floats as float32."""
    return tree_map(lambda t: (t.float() if t.is_floating_point() else t)[:count], output)
