"""Lower bounds of the time of a batch, before anything is played: what the search goes by."""

from __future__ import annotations

from typing import Dict, List

import numpy as np

from ipu_pipe.model.balance import FloatArray, IntArray
from ipu_pipe.plan.candidates import Candidate
from ipu_pipe.schedule.clock import Costs, Transfer, sum_link_times
from ipu_pipe.schedule.methods import METHODS


def bound_seconds(asked: Candidate, work: float) -> float:
    """Return the least seconds of a batch, however the stages are cut, if a microbatch takes `work` on all of them together.

    Stages can at best be busy all the time. Where the pipeline drains, stage s begins when the previous ones have done a forward,
    and they end a backward after it: T >= w_0 + ... + w_(s-1) + N w_s for every s, which is least where all are equal, with
    w_s = w_0 (1 - 1/N)^s.
    """
    depth, count = asked.depth, asked.gradient_accumulation
    if METHODS[asked.method].flushes:
        return work / (1 - (1 - 1 / count) ** depth)
    return work * count / depth


def bound_by_costs(asked: Candidate, costs: Costs, in_flight: IntArray, local: bool, whole_work: float) -> float:
    """Return the least seconds of a batch with stages of these `costs`.

    Neither a stage nor a link is busy for longer than there is time, and no stage holds more than `in_flight` (P,) microbatches
    at once, each of which is away for the passes of all later stages (Little's law). `local`: blocks wait for no later stage.
    `whole_work`: seconds of a microbatch on all stages together, however they are cut.
    """
    count, flushes = asked.gradient_accumulation, METHODS[asked.method].flushes
    work: FloatArray = np.add(costs.forward, costs.backward)
    reduce = costs.reduce or (Transfer(),) * len(work)
    back = () if local else costs.back
    flows = [(count, transfer) for transfer in (*costs.onward, *back)] + [(1, transfer) for transfer in reduce]
    updates = [update + transfer.seconds + transfer.latency for update, transfer in zip(costs.update, reduce)]
    bounds = [float((count * work + updates).max()) + count * costs.enter, *sum_link_times(flows).values()]
    if local:
        return max(bound_seconds(asked, whole_work), *bounds)
    crossing = [
        one.seconds + one.latency + other.seconds + other.latency for one, other in zip(costs.onward, costs.back)
    ]
    away = np.cumsum((work + np.array([*crossing, 0.0]))[::-1])[::-1]
    bounds.append(count * float((away / in_flight).max()))
    if flushes:  # what previous stages do happens before a stage begins and after it ends
        before = np.cumsum([0.0, *(work[:-1] + crossing)])
        bounds.append(float((before + count * work).max()) + updates[0])
    if not costs.lockstep:
        bounds += [bound * (1 - 1e-9) for bound in bound_by_reduces(costs, count, flushes, in_flight)]
    return max(bound_seconds(asked, float(work.sum())), *bounds)


def bound_by_reduces(costs: Costs, count: int, flushes: bool, in_flight: IntArray) -> List[float]:
    """Return the least seconds of a batch of `count` microbatches by the all-reduces that share a link, link by link.

    `flushes`: the pipeline drains before its updates; `in_flight` (P,): the most microbatches that each stage holds at once.

    The last backward of a batch goes from stage to stage, so that all-reduces are asked for from the last stage t on, and follow
    one another. Where the pipeline drains, stage s has then worked, and what it and the previous stages ask for is still to come.
    Elsewhere s updates after the later stages. When t ends its next batch, s has done all forwards of that and all backwards but
    of what may be in flight, as it may have been before its update; and the last forward has gone on to t.
    """
    stages: Dict[str, List[int]] = {}
    for s, transfer in enumerate(costs.reduce):
        for link in transfer.links:
            stages.setdefault(link, []).append(s)
    forward, backward = np.array(costs.forward), np.array(costs.backward)
    reduce = np.array([transfer.seconds for transfer in costs.reduce])
    crossing = [0.0, *(transfer.seconds + transfer.latency for transfer in costs.onward)]
    path = np.cumsum(forward) + np.cumsum(crossing)  # until the end of a microbatch's forward, if it waits for nothing
    if flushes:
        through = path - forward + count * (forward + backward)
        through = np.maximum.accumulate(through[::-1])[::-1]
        return [float((through[sharing] + np.cumsum(reduce[sharing])).max()) for sharing in stages.values()]
    done = count - in_flight
    through = np.array(costs.update) + (done + 1) * forward + done * backward - path
    through = np.where(done < 0, -np.inf, through)
    return [
        float(
            (through[sharing] + np.cumsum(reduce[sharing][::-1])[::-1]).max()
            + path[sharing[-1]]
            + backward[sharing[-1]]
        )
        for sharing in stages.values()
    ]
