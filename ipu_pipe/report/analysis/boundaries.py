"""What moving stage boundaries would gain: the model's units are cut anew by measured times, and both cuts are played by the
clock."""

from __future__ import annotations

from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput
from ipu_pipe.model.balance import find_best_cut
from ipu_pipe.plan.batches import compute_batch_time
from ipu_pipe.report.analysis.facts import MOST_PLANNED, RunFacts
from ipu_pipe.report.analysis.links import LinkTraffic
from ipu_pipe.report.analysis.stages import StageTimes
from ipu_pipe.schedule.clock import Costs, Transfer

MOST_STAGES = 128  # more take seconds to play
FloatArray = NDArray[np.float64]


class BoundaryMove(NamedTuple):
    """Names of the units at which stages begin now and at which they might, and each stage's time for a microbatch. `gain`: how
    much throughput that adds (0.25: a quarter), by the clock; `gain_if_balanced`: if all stages took equally long. None where it
    is not known, for the reason `why_no_gain`."""

    begins_now: Tuple[str, ...] = ()
    begins_then: Tuple[str, ...] = ()
    busy_now_ns: Tuple[float, ...] = ()
    busy_then_ns: Tuple[float, ...] = ()
    gain: Optional[float] = None
    gain_if_balanced: Optional[float] = None
    why_no_gain: Optional[str] = None

    def format_moves(self) -> str:
        """Describe the boundaries that move."""
        pairs = enumerate(zip(self.begins_now, self.begins_then))
        return " and ".join(f"stage {s} at {then} instead of {now}" for s, (now, then) in pairs if now != then)

    def to_record(self) -> Optional[Dict[str, Any]]:
        """Return the row of the analysis; None where the gain is not known."""
        keys = ("begins_now", "begins_then", "busy_now_ns", "busy_then_ns")
        return {key: list(getattr(self, key)) for key in keys} if self.gain is not None else None


def find_best_move(
    facts: RunFacts, stages: Sequence[StageTimes], links: Sequence[LinkTraffic], accumulate: Optional[int]
) -> BoundaryMove:
    """Return the cut whose slowest stage is the fastest possible, against the cut of the run.

    The time of a unit is estimated as the share of its stage's measured time that its FLOPs have in those of the stage.
    """
    missing = _find_missing(facts, stages, accumulate)
    if missing or accumulate is None:
        return BoundaryMove(why_no_gain=missing)
    forward = np.array([stage.forward_ns for stage in stages], np.float64)
    backward = np.array([stage.backward_ns for stage in stages], np.float64)
    play = _make_player(facts, stages, links, accumulate)
    try:
        now = play(forward, backward)
        even = play(np.full(len(stages), forward.mean()), np.full(len(stages), backward.mean()))
    except BadInput as error:  # the metadata do not fit together
        return BoundaryMove(why_no_gain=f"the schedule cannot be made again: {error.faults[0]}")
    units = facts.units or []
    stage_of_unit = np.array([unit.stage for unit in units], np.int64)
    in_order = sorted(stage_of_unit.tolist()) == stage_of_unit.tolist()
    if not in_order or sorted(set(stage_of_unit.tolist())) != list(range(len(stages))):
        why = (
            "the trace's units are not in the order of its stages"
            if units
            else "the trace does not hold the model's units"
        )
        return BoundaryMove(gain_if_balanced=now / even - 1, why_no_gain=why)
    forwards = _divide(forward, stage_of_unit, [unit.forward_flops for unit in units])
    backwards = _divide(backward, stage_of_unit, [unit.backward_flops for unit in units])
    starts = find_best_cut((forwards + backwards).tolist(), len(stages))
    assert starts is not None, "there are at least as many units as stages"
    then = play(np.add.reduceat(forwards, starts), np.add.reduceat(backwards, starts))
    starts_now = np.searchsorted(stage_of_unit, np.arange(len(stages))).tolist()
    if then >= now:  # where the pipeline drains, an even cut need not be the fastest
        starts, then = starts_now, now
    return BoundaryMove(
        begins_now=tuple(units[i].name for i in starts_now),
        begins_then=tuple(units[i].name for i in starts),
        busy_now_ns=tuple((forward + backward).tolist()),
        busy_then_ns=tuple(np.add.reduceat(forwards + backwards, starts).tolist()),
        gain=now / then - 1,
        gain_if_balanced=now / even - 1,
    )


def _find_missing(facts: RunFacts, stages: Sequence[StageTimes], accumulate: Optional[int]) -> Optional[str]:
    count, devices = len(stages), facts.device_of_stage or []
    if facts.known_method is None:
        return facts.why_no_method
    if not accumulate:
        return "the trace does not say how many microbatches an update has"
    if [stage.stage for stage in stages] != list(range(count)) or (facts.stages or count) != count:
        return "the trace does not hold all stages"
    if devices and len(devices) != count:
        return "the trace does not say the device of each stage"
    if len(set(devices)) < len(devices):
        return "several stages share a device, and the order of its passes is not known"
    if any(not stage.forward_ns or stage.backward_ns is None for stage in stages):
        return "the trace does not hold forwards and backwards of all stages"
    if count == 1:
        return "there is one stage"
    if count * accumulate > MOST_PLANNED:
        return f"updates of more than {MOST_PLANNED} passes are not played"
    return f"more than {MOST_STAGES} stages are not played" if count > MOST_STAGES else None


def _divide(times: FloatArray, stage_of_unit: NDArray[np.int64], flops: Sequence[float]) -> FloatArray:
    """Return the time of each unit; the units of a stage without FLOPs share its time equally."""
    work = np.array(flops, np.float64)
    sums = np.bincount(stage_of_unit, work)[stage_of_unit]
    counts = np.bincount(stage_of_unit)[stage_of_unit]
    return np.where(
        sums > 0, times[stage_of_unit] * work / np.where(sums > 0, sums, 1.0), times[stage_of_unit] / counts
    )


def _make_player(
    facts: RunFacts, stages: Sequence[StageTimes], links: Sequence[LinkTraffic], accumulate: int
) -> Callable[[FloatArray, FloatArray], float]:
    """Return a function from the times of forwards and backwards (P,) to the time of an update, by the run's schedule."""
    method = facts.known_method
    assert method is not None
    update = [stage.update_ns or 0.0 for stage in stages]
    devices = facts.device_of_stage or [stage.devices[0] for stage in stages]
    latency: Dict[Tuple[int, int], float] = {}
    for link in links:
        if link.latency_ns:
            way = link.src, link.dst
            latency[way] = max(latency.get(way, 0.0), link.latency_ns.median)
    pairs = list(zip(devices, devices[1:]))
    onward = tuple(Transfer(latency=latency.get((a, b), 0.0)) for a, b in pairs)
    back = tuple(Transfer(latency=latency.get((b, a), 0.0)) for a, b in pairs)

    def play(forward: FloatArray, backward: FloatArray) -> float:
        costs = Costs(forward.tolist(), backward.tolist(), update, onward=onward, back=back)
        return compute_batch_time(method, len(forward), accumulate, costs).seconds

    return play
