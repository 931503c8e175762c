"""The training loss and the accuracy of an update, summed in one order and type on every backend.

    loss        (l_0 + l_1 + ... + l_n-1) / n    in float64, from left to right, of the n losses as the microbatches gave them
    accuracy    right labels / counted labels    whole numbers until the one division

Microbatches are in the order of the schedule: number 0 of each replica, number 1 of each replica, and so on. Partial sums in
another type or order would differ in the last digits between backends, and with the machine's vector kernels.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence, Tuple

import torch

COLUMNS = 3  # of a table of microbatches: loss, right labels, counted labels


class MicrobatchResult(NamedTuple):
    """Loss of a microbatch, and (right, counted) labels; None if accuracy has no meaning. Both may be on a GPU."""

    loss: torch.Tensor  # ()
    answers: Optional[torch.Tensor]  # (2,)


def tabulate(results: Sequence[MicrobatchResult]) -> torch.Tensor:
    """Return one row (loss, right labels, counted labels) for each of n microbatches, (n, 3) in float64 on the host.

    Labels are not a number where accuracy has no meaning. This waits for a GPU that has not computed the results yet.
    """
    table = torch.full((len(results), COLUMNS), float("nan"), dtype=torch.float64)
    table[:, 0] = torch.stack([result.loss.detach().reshape(()) for result in results])
    with_answers = [i for i, result in enumerate(results) if result.answers is not None]
    if with_answers:
        answers = [result.answers for result in results if result.answers is not None]
        table[with_answers, 1:] = torch.stack(answers).to(table)
    return table


def average(table: torch.Tensor) -> Tuple[float, Optional[float]]:
    """Return mean loss and share of right labels of the microbatches in a table of `tabulate`."""
    rows: List[Tuple[float, float, float]] = table.tolist()
    total = right = counted = 0.0
    # not sum(): from Python 3.12 on it compensates for rounding
    for loss, _, _ in rows:
        total += loss
    with_answers = [row for row in rows if row[2] == row[2]]
    for _, of_row, all_of_row in with_answers:
        right, counted = right + of_row, counted + all_of_row
    return total / len(rows), right / max(counted, 1.0) if with_answers else None
