"""What stages compute: how long their passes take, which take far longer than others, and how stale their weights are."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.report.analysis.device_time import merge_intervals
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.trace.events import COMPUTE, KIND_CODE, KINDS, UNSPECIFIED, Events, group_places

FAR = 3.0  # a pass that takes more times the median is a straggler
LONGEST = 5  # stragglers that are listed one by one
_FORWARD, _UPDATE = Kind.FORWARD.word, Kind.UPDATE.word
_RETURNING = (Kind.BACKWARD.word, Kind.INPUT_GRADIENT.word)  # they read weights
_BACKWARDS = (Kind.RECOMPUTE.word, *_RETURNING, Kind.WEIGHT_GRADIENT.word)


class StageTimes(NamedTuple):
    """Times of one stage on all its replicas: `medians` (ns) by kind; `passes_ns`: summed over all but updates; `microbatches`:
    the number of forwards; `stragglers`: rows of the analysis."""

    stage: int
    devices: Tuple[int, ...]
    microbatches: int
    busy_ns: int
    passes_ns: float
    medians: Dict[str, float]
    stragglers: List[Dict[str, Any]]

    @property
    def busy_ns_per_microbatch(self) -> Optional[float]:
        """Return the time for a microbatch, stragglers taken as long as others of their kind, because a first update of seconds
        is not a property of the stage. None where microbatches are not known."""
        lost = sum(group["lost_ns"] for group in self.stragglers)
        return max(0, self.busy_ns - lost) / self.microbatches if self.microbatches else None

    @property
    def forward_ns(self) -> Optional[float]:
        """Return the median of a forward."""
        return self.medians.get(_FORWARD)

    @property
    def backward_ns(self) -> Optional[float]:
        """Return the median of a backward, with its recomputation, or with both halves of a split one."""
        medians = [self.medians[kind] for kind in _BACKWARDS if kind in self.medians]
        return sum(medians) if medians else None

    @property
    def update_ns(self) -> Optional[float]:
        """Return the median of an update."""
        return self.medians.get(_UPDATE)


def measure_stages(events: Events, begin_ns: int) -> List[StageTimes]:
    """Measure all stages that compute, in order; `begin_ns`: of the span, from which stragglers' times count."""
    passes = events.select(events.is_kind(*COMPUTE) & (events.stage >= 0))
    return [_measure_stage(s, passes.select(places), begin_ns) for s, places in group_places(passes.stage)]


def _measure_stage(stage: int, events: Events, begin_ns: int) -> StageTimes:
    busy_ns = sum(
        merge_intervals(events.start[places], events.end[places]).length for _, places in group_places(events.device)
    )
    medians: Dict[str, float] = {}
    stragglers: List[Dict[str, Any]] = []
    passes_ns = 0.0
    for code, places in group_places(events.kind):
        kind, of_kind = KINDS[code], events.select(places)
        durations = of_kind.end - of_kind.start
        medians[kind] = float(np.median(durations))
        passes_ns += 0.0 if kind == _UPDATE else float(durations.sum(dtype=np.float64))
        if medians[kind] and kind != UNSPECIFIED:  # of other tools' traces one kind has all sizes
            stragglers += _find_stragglers(stage, kind, medians[kind], of_kind, durations, begin_ns)
    forwards = int(np.count_nonzero(events.kind == KIND_CODE[_FORWARD]))
    devices = tuple(np.unique(events.device).tolist())
    return StageTimes(stage, devices, forwards, busy_ns, passes_ns, medians, stragglers)


def _find_stragglers(
    stage: int, kind: str, median: float, events: Events, durations: NDArray[np.int64], begin_ns: int
) -> List[Dict[str, Any]]:
    """Return no or one row: how many passes take far longer than the median, what they take beyond it, and the longest ones."""
    far = np.flatnonzero(durations > FAR * median)
    if not len(far):
        return []
    worst = far[np.argsort(-durations[far], kind="stable")[:LONGEST]]
    rows = zip(events.microbatch[worst].tolist(), events.start[worst].tolist(), durations[worst].tolist())
    longest = [
        {"microbatch": m if m >= 0 else None, "at_ns": at - begin_ns, "duration_ns": took} for m, at, took in rows
    ]
    lost_ns = round(float((durations[far] - median).sum()))
    return [
        {"stage": stage, "kind": kind, "count": len(far), "lost_ns": lost_ns, "median_ns": median, "longest": longest}
    ]


def sum_busy_by_device(stages: List[StageTimes]) -> Dict[int, float]:
    """Return the nanoseconds that each device computes for a microbatch of all its stages; empty where they are not known."""
    busy_by_device: Dict[int, float] = {}
    for stage in stages:
        if stage.busy_ns_per_microbatch is None:
            return {}
        for device in stage.devices:
            busy_by_device[device] = busy_by_device.get(device, 0.0) + stage.busy_ns_per_microbatch
    return busy_by_device


# ---- staleness


def infer_accumulate(events: Events) -> Optional[int]:
    """Return the microbatches of an update, from the numbers of forwards and updates; None where these do not fit."""
    updates_made = events.select(events.is_kind(_UPDATE))
    places = np.stack([updates_made.stage, updates_made.device, updates_made.microbatch])
    updates, forwards = np.unique(places, axis=1).shape[1], int(np.count_nonzero(events.is_kind(_FORWARD)))
    return forwards // updates if updates and forwards >= updates and forwards % updates == 0 else None


def measure_staleness(events: Events, accumulate: Optional[int]) -> List[Dict[str, Any]]:
    """Return a row for each stage that has forwards: how many updates older than the newest the weights are that its passes read,
    when the update that applies their gradient is made; and the time from a forward's begin to that update's end."""
    if not accumulate:
        return []
    chosen = (events.stage >= 0) & (events.microbatch >= 0) & events.is_kind(_FORWARD, _UPDATE, *_RETURNING)
    passes, rows = events.select(chosen), []
    for stage, places in group_places(passes.stage):
        of_stage = passes.select(places)
        forward, update = of_stage.select(of_stage.is_kind(_FORWARD)), of_stage.select(of_stage.is_kind(_UPDATE))
        if len(forward.start):
            rows.append({
                "stage": stage,
                "forward_versions": _measure_lag(forward, accumulate),
                "backward_versions": _measure_lag(of_stage.select(of_stage.is_kind(*_RETURNING)), accumulate),
                "time_ns": _measure_time_until_applied(forward, update, accumulate),
            })  # fmt: skip
    return rows


def _measure_lag(passes: Events, accumulate: int) -> Optional[Dict[str, float]]:
    known = passes.version >= 0
    # update k is made when k versions have been made since the first
    lag = passes.microbatch[known] // accumulate - passes.version[known]
    return {"mean": float(lag.mean()), "greatest": int(lag.max())} if len(lag) else None


def _measure_time_until_applied(forward: Events, update: Events, accumulate: int) -> Optional[Dict[str, float]]:
    if not len(update.start):
        return None
    keys = _make_keys(update.device, update.microbatch)
    order = np.lexsort((update.end, keys))
    keys, ends = keys[order], update.end[order]
    wanted = _make_keys(forward.device, forward.microbatch // accumulate)
    # the last event of an update that has several
    place = np.maximum(np.searchsorted(keys, wanted, side="right") - 1, 0)
    is_applied = keys[place] == wanted  # the last forwards may have no update
    took = (ends[place] - forward.start)[is_applied]
    return {"median": float(np.median(took)), "greatest": int(took.max())} if len(took) else None


def _make_keys(device: NDArray[np.int32], index: NDArray[np.int32]) -> NDArray[np.int64]:
    return (device.astype(np.int64) << 32) + index


def infer_placement(stages: Sequence[StageTimes]) -> Tuple[int, ...]:
    """Return the device of each stage, where every stage was seen, each on one device; else nothing."""
    complete = [stage.stage for stage in stages] == list(range(len(stages)))
    if not complete or any(len(stage.devices) != 1 for stage in stages):
        return ()
    return tuple(stage.devices[0] for stage in stages)
