"""Why replicas' all-reduces make a batch longer than its slowest stage: a bound, before anything is played."""

from __future__ import annotations

from typing import Dict, List

import numpy as np

from ipu_pipe.model.balance import IntArray
from ipu_pipe.schedule.clock import Costs


def bound_by_reduces(costs: Costs, count: int, flushes: bool, flying: IntArray) -> List[float]:
    """What a batch of `count` microbatches takes at least by the all-reduces that share a link, link by link. `flushes`: the
    pipeline empties before its updates; `flying` (P,): the most microbatches that each stage holds at once.

    The last backward of a batch goes from stage to stage, so that they are asked for from the last stage t on, and follow one
    another. Where the pipeline empties, stage s has then worked, and what it and those before it ask for is still to come.
    Elsewhere s updates after those behind it. When t ends its next batch, s has done all forwards of that and all backwards
    but of what may be in flight, as it may have been before its update; and the last forward has gone on to t.
    """
    stages: Dict[str, List[int]] = {}
    for s, each in enumerate(costs.reduce):
        for link in each.links:
            stages.setdefault(link, []).append(s)
    forward, backward = np.array(costs.forward), np.array(costs.backward)
    reduce = np.array([each.seconds for each in costs.reduce])
    crossing = [0.0, *(each.seconds + each.latency for each in costs.onward)]
    path = np.cumsum(forward) + np.cumsum(crossing)  # until the end of a microbatch's forward, if it waits for nothing
    if flushes:
        through = path - forward + count * (forward + backward)
        through = np.maximum.accumulate(through[::-1])[::-1]
        return [float((through[each] + np.cumsum(reduce[each])).max()) for each in stages.values()]
    kept = count - flying
    through = np.array(costs.update) + (kept + 1) * forward + kept * backward - path
    through = np.where(kept < 0, -np.inf, through)
    return [
        float((through[each] + np.cumsum(reduce[each][::-1])[::-1]).max() + path[each[-1]] + backward[each[-1]])
        for each in stages.values()
    ]
