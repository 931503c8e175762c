"""Stages taken together, where there are more of them than devices."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.model.balance import balance
from ipu_pipe.model.counts import between_top
from ipu_pipe.model.stages import Partition, stage_flops


def merge_stages(
    model: nn.Module, part: Partition, count: int, x: Any, where: Optional[Sequence[str]] = None
) -> List[str]:
    """Names of the modules at which `count` stages begin that are consecutive stages of `part` taken together, the greatest
    sum of FLOPs being least. Empty for one. Where stages enough begin between modules of the model's top-level sequence, only
    those are kept. `where`: names at which they may begin; None: anywhere. Raises BadInput where there are not so many."""
    names = part.begin_names()
    if count == len(names) + 1 and where is None:
        return names
    tops = between_top(model, x, names)
    starts = [s for s, name in enumerate(names, 1) if name in tops and (where is None or name in where)]
    if count > len(starts) + 1:
        starts = [s for s, name in enumerate(names, 1) if where is None or name in where]
    if count > len(starts) + 1:
        inside = len(names) - len(starts)
        raise BadInput(
            f"stages: {len(part)}: the model can be cut into at most {len(starts) + 1} devices' parts, {count} are asked for"
            + (f": {inside} of its stages begin where several activations cross" if inside else "")
        )
    edges = [0, *starts, len(part)]  # names are of stages 1 and on
    flops = [own.forward for own in stage_flops(model, part, x)]
    costs = [sum(flops[a:b]) for a, b in zip(edges, edges[1:])]
    return [tops.get(names[edges[k] - 1], names[edges[k] - 1]) for k in balance(costs, count)[1:]]
