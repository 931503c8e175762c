"""What a piece of a model costs, whatever it runs on: the record from which times, memory and plans are made.

A model is a row of units, which run one after another; stages are consecutive units, and a stage of them is a unit again
(`joined`). Whoever counts (on meta tensors) or measures a model fills the records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Sequence, Tuple


class Measured(NamedTuple):
    """Seconds that the passes of a unit took for a microbatch of so many `samples`."""

    samples: int
    forward: float
    backward: float  # without a recomputation


@dataclass(frozen=True)
class Unit:
    """A module, or a few, before which a stage may begin; `name` is that at which it would.

    FLOPs (a multiplication and an addition are two) and bytes are for one sample. `output_bytes`: what crosses to the next
    device if a stage ends with this unit, whatever else passes by included. `activation_bytes`: what is kept from the forward
    for the backward, weights and `also_kept` apart: that are pairs (k, bytes) of what it keeps and units before it keep too, the
    last of them k before, so that a stage which begins behind that one keeps it as well (most often its input).
    `forward_moved`, `backward_moved`: what operations without FLOPs (norms, activation functions, sums) read and write; both
    0: not counted. All these are sizes of numbers of `number_bytes`, and scale with the precision. `parameters`: how many
    trained numbers it owns (a weight used twice is the first unit's). `measured`: what its passes took, for one or more sizes
    of microbatch; empty: not measured, and times come from FLOPs and bytes. `update_seconds`: of its weights' update, where
    measured.
    """

    name: str
    forward_flops: float
    backward_flops: float
    parameters: int
    output_bytes: float
    activation_bytes: float
    number_bytes: int = 4
    measured: Tuple[Measured, ...] = ()
    update_seconds: float = 0.0
    forward_moved: float = 0.0
    backward_moved: float = 0.0
    also_kept: Tuple[Tuple[int, float], ...] = ()


def joined(units: Sequence[Unit]) -> Unit:
    """Consecutive units as one, such as a stage: sums, the name of the first, the output of the last. It is measured for the
    sizes of microbatch for which all are."""
    assert units and len({unit.number_bytes for unit in units}) == 1
    by_size = [{each.samples: each for each in unit.measured} for unit in units]
    sizes = sorted(set.intersection(*(set(own) for own in by_size)))
    return Unit(
        units[0].name,
        sum(unit.forward_flops for unit in units),
        sum(unit.backward_flops for unit in units),
        sum(unit.parameters for unit in units),
        units[-1].output_bytes,
        sum(unit.activation_bytes for unit in units)
        + sum(size for i, unit in enumerate(units) for back, size in unit.also_kept if back > i),
        units[0].number_bytes,
        tuple(
            Measured(size, sum(own[size].forward for own in by_size), sum(own[size].backward for own in by_size))
            for size in sizes
        ),
        sum(unit.update_seconds for unit in units),
        sum(unit.forward_moved for unit in units),
        sum(unit.backward_moved for unit in units),
    )
