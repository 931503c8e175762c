"""What moving boundaries would gain: the units cut anew by what stages were seen to take, both cuts played by the clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput
from ipu_pipe.model.balance import find_best_cut
from ipu_pipe.plan.batches import compute_batch_time
from ipu_pipe.report.analysis.facts import MOST_PLANNED, RunFacts
from ipu_pipe.report.analysis.links import LinkTraffic
from ipu_pipe.report.analysis.stages import StageTimes
from ipu_pipe.schedule.clock import Costs, Transfer
from ipu_pipe.trace.events import UnitRow

MOST_STAGES = 128  # whose schedule is played: seconds
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class BoundaryMove:
    """Where stages begin now and where they might, what each computes for a microbatch, and how much more throughput that gives
    (0.25: a quarter more), all by the clock with measured times; `if_balanced`: the same if all took equally long. `why_not`:
    what is missing to know."""

    begins_now: Tuple[str, ...] = ()
    begins_then: Tuple[str, ...] = ()
    busy_now_ns: Tuple[float, ...] = ()
    busy_then_ns: Tuple[float, ...] = ()
    gain: Optional[float] = None
    if_balanced: Optional[float] = None
    why_not: str = ""

    @property
    def moves(self) -> List[str]:
        """In words, a stage each."""
        pairs = enumerate(zip(self.begins_now, self.begins_then))
        return [f"stage {s} at {then} instead of {now}" for s, (now, then) in pairs if now != then]


def find_best_move(
    facts: RunFacts, stages: Sequence[StageTimes], links: Sequence[LinkTraffic], accumulate: Optional[int]
) -> BoundaryMove:
    """The cut whose slowest stage is the fastest possible, against the one that was run."""
    why_not = _missing(facts, stages, accumulate)
    if why_not:
        return BoundaryMove(why_not=why_not)
    assert accumulate is not None and facts.method is not None
    forward = np.array([stage.forward_ns for stage in stages], np.float64)
    backward = np.array([stage.backward_ns for stage in stages], np.float64)
    played = _Played(facts, stages, links, accumulate)
    try:
        now = played.seconds(forward, backward)
        even = played.seconds(np.full(len(stages), forward.mean()), np.full(len(stages), backward.mean()))
    except BadInput as error:  # a method whose schedule does not fit what the trace says of it
        return BoundaryMove(why_not=f"the schedule cannot be made again: {error.faults[0]}")
    if_balanced = now / even - 1
    why_not = _units_missing(facts.units, len(stages))
    if why_not:
        return BoundaryMove(if_balanced=if_balanced, why_not=why_not)
    # the time of each unit: its share of the FLOPs of its stage
    of_stage = np.array([unit["stage"] for unit in facts.units])
    forwards = _spread(forward, of_stage, [unit["forward_flops"] for unit in facts.units])
    backwards = _spread(backward, of_stage, [unit["backward_flops"] for unit in facts.units])
    starts = find_best_cut((forwards + backwards).tolist(), len(stages))
    assert starts is not None, "as many units as stages at least"
    then = played.seconds(np.add.reduceat(forwards, starts), np.add.reduceat(backwards, starts))
    present = np.searchsorted(of_stage, np.arange(len(stages))).tolist()
    if then >= now:  # where the pipeline empties, an even cut need not be the fastest
        starts, then = present, now
    names = [unit["name"] for unit in facts.units]
    return BoundaryMove(
        tuple(names[i] for i in present),
        tuple(names[i] for i in starts),
        tuple((forward + backward).tolist()),
        tuple(np.add.reduceat(forwards + backwards, starts).tolist()),
        now / then - 1,
        if_balanced,
    )


def _missing(facts: RunFacts, stages: Sequence[StageTimes], accumulate: Optional[int]) -> str:
    count = len(stages)
    if facts.method is None:
        return facts.why_no_method
    if not accumulate:
        return "the trace does not say how many microbatches an update has"
    if [stage.stage for stage in stages] != list(range(count)) or (facts.stages or count) != count:
        return "the trace does not hold all stages"
    if facts.device_of_stage and len(facts.device_of_stage) != count:
        return "the trace does not say the device of each stage"
    if len(set(facts.device_of_stage)) < len(facts.device_of_stage):
        return "several stages share a device, and how its schedule goes is not told"
    if any(not stage.forward_ns or stage.backward_ns is None for stage in stages):
        return "the trace does not hold forwards and backwards of all stages"
    if count == 1:
        return "there is one stage"
    if count * accumulate > MOST_PLANNED:
        return f"updates of more than {MOST_PLANNED} passes are not played"
    return f"more than {MOST_STAGES} stages are not played" if count > MOST_STAGES else ""


def _units_missing(units: Sequence[UnitRow], count: int) -> str:
    if not units:
        return "the trace does not hold the units of which stages are made"
    of_stage = [unit["stage"] for unit in units]
    if sorted(of_stage) != of_stage or sorted(set(of_stage)) != list(range(count)):
        return "the trace's units are not in the order of its stages"
    return ""


def _spread(times: FloatArray, of_stage: NDArray[np.int64], flops: Sequence[float]) -> FloatArray:
    work = np.array(flops, np.float64)
    sums = np.bincount(of_stage, work)[of_stage]
    units = np.bincount(of_stage)[of_stage]
    return np.where(sums > 0, times[of_stage] * work / np.where(sums > 0, sums, 1.0), times[of_stage] / units)


class _Played:
    """The run's schedule, played with other times of its passes."""

    def __init__(
        self, facts: RunFacts, stages: Sequence[StageTimes], links: Sequence[LinkTraffic], accumulate: int
    ) -> None:
        assert facts.method is not None
        self._method, self._accumulate = facts.method, accumulate
        self._update = [stage.update_ns or 0.0 for stage in stages]
        devices = facts.device_of_stage or tuple(stage.devices[0] for stage in stages)

        took: Dict[Tuple[int, int], float] = {}
        for link in links:
            if link.latency:
                way = link.source, link.target
                took[way] = max(took.get(way, 0.0), link.latency.median_ns)

        def message(source: int, target: int) -> Transfer:
            return Transfer(latency=took.get((source, target), 0.0))

        pairs = list(zip(devices, devices[1:]))
        self._onward = tuple(message(a, b) for a, b in pairs)
        self._back = tuple(message(b, a) for a, b in pairs)

    def seconds(self, forward: FloatArray, backward: FloatArray) -> float:
        """Of an update, in whatever unit the passes are given."""
        costs = Costs(forward.tolist(), backward.tolist(), self._update, onward=self._onward, back=self._back)
        return compute_batch_time(self._method, len(forward), self._accumulate, costs).seconds
