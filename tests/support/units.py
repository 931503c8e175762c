"""Join the units of a model into one, for tests of costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Sequence

from ipu_pipe.hardware.unit_costs import MeasuredPasses, Unit


def join_units(units: Sequence[Unit]) -> Unit:
    """Return consecutive units as one: their sums, the name of the first, the output of the last.

    Measured passes are kept for the sizes of microbatch that all units have.
    """
    by_size = [{passes.samples: passes for passes in unit.measured} for unit in units]
    sizes = sorted(set.intersection(*(set(passes) for passes in by_size)))
    summed = (
        "forward_flops",
        "backward_flops",
        "parameters",
        "update_seconds",
        "forward_moved",
        "backward_moved",
    )
    return replace(
        units[0],
        output_bytes=units[-1].output_bytes,
        activation_bytes=sum(unit.activation_bytes for unit in units)
        + sum(size for i, unit in enumerate(units) for back, size in unit.also_kept if back > i),
        measured=tuple(
            MeasuredPasses(
                size, sum(p[size].forward for p in by_size), sum(p[size].backward for p in by_size)
            )
            for size in sizes
        ),
        also_kept=(),
        **{name: sum(getattr(unit, name) for unit in units) for name in summed},
    )
