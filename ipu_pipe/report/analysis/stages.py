"""What stages compute: how long their passes take, how evenly, and which ones take far longer than the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, NamedTuple, Optional, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.report.analysis.device_time import group_by_device, group_places, merge_intervals
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.trace.events import COMPUTE, KINDS, UNSPECIFIED, Events

FAR = 3.0  # times the median: from here on a pass is a straggler
LONGEST = 5  # of the stragglers told one by one
_BACKWARD_KINDS = (Kind.RECOMPUTE, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)


class Straggler(NamedTuple):
    """A pass that took far longer than others of its kind on its stage; `at_ns` by the trace's clock."""

    microbatch: int
    at_ns: int
    duration_ns: int


@dataclass(frozen=True)
class StragglerGroup:
    """Of one kind on one stage: how many, and what they took beyond the median, `longest` ones first."""

    stage: int
    kind: str
    count: int
    lost_ns: int
    median_ns: float
    longest: Tuple[Straggler, ...]


class StageTimes(NamedTuple):
    """Of one stage on all its replicas: `medians` by kind, `passes_ns` summed over all but updates. `microbatches`: forwards."""

    stage: int
    devices: Tuple[int, ...]
    microbatches: int
    busy_ns: int
    passes_ns: float
    medians: Dict[str, float]
    stragglers: Tuple[StragglerGroup, ...]

    @property
    def each_ns(self) -> Optional[float]:
        """Busy for a microbatch, stragglers taken as long as others of their kind: a first update of seconds is no property of
        the stage. None where no microbatches are told."""
        lost = sum(each.lost_ns for each in self.stragglers)
        return max(0, self.busy_ns - lost) / self.microbatches if self.microbatches else None

    @property
    def forward_ns(self) -> Optional[float]:
        """The median."""
        return self.medians.get(Kind.FORWARD.word)

    @property
    def backward_ns(self) -> Optional[float]:
        """The median, recomputation and both halves of a split one together."""
        own = [self.medians[kind.word] for kind in _BACKWARD_KINDS if kind.word in self.medians]
        return sum(own) if own else None

    @property
    def update_ns(self) -> Optional[float]:
        """The median."""
        return self.medians.get(Kind.UPDATE.word)


def measure_stages(events: Events) -> List[StageTimes]:
    """Of all stages that compute, in order."""
    places = np.flatnonzero(events.is_kind(*COMPUTE) & (events.stage >= 0))
    return [_times(stage, events, places[own]) for stage, own in group_places(events.stage[places])]


def _times(stage: int, events: Events, places: NDArray[np.intp]) -> StageTimes:
    own = events.select(places)
    busy = sum(merge_intervals(own.start[on], own.end[on]).length for _, on in group_by_device(own))
    medians: Dict[str, float] = {}
    stragglers, passes, forwards = [], 0.0, 0
    for code, at in group_places(own.kind.astype(np.int32)):
        kind = KINDS[code]
        durations = (own.end - own.start)[at]
        medians[kind] = float(np.median(durations))
        passes += 0.0 if kind == Kind.UPDATE.word else float(durations.sum(dtype=np.float64))
        forwards += len(at) if kind == Kind.FORWARD.word else 0
        stragglers += _far(stage, kind, medians[kind], own.select(at), durations)
    return StageTimes(stage, tuple(np.unique(own.device).tolist()), forwards, busy, passes, medians, tuple(stragglers))


def _far(stage: int, kind: str, median: float, own: Events, durations: NDArray[np.int64]) -> List[StragglerGroup]:
    if not median or kind == UNSPECIFIED:  # of other tools: one kind of all sizes
        return []
    far = np.flatnonzero(durations > FAR * median)
    if not len(far):
        return []
    worst = far[np.argsort(-durations[far], kind="stable")[:LONGEST]]
    rows = zip(own.microbatch[worst].tolist(), own.start[worst].tolist(), durations[worst].tolist())
    lost = round(float((durations[far] - median).sum()))
    return [StragglerGroup(stage, kind, len(far), lost, median, tuple(Straggler(*row) for row in rows))]


def sum_busy_by_device(stages: List[StageTimes]) -> Dict[int, float]:
    """Nanoseconds for a microbatch that each device computes for all its stages; empty where microbatches are not told."""
    found: Dict[int, float] = {}
    for stage in stages:
        if stage.each_ns is None:
            return {}
        for device in stage.devices:
            found[device] = found.get(device, 0.0) + stage.each_ns
    return found


_FORWARD, _UPDATE = KINDS.index(Kind.FORWARD.word), KINDS.index(Kind.UPDATE.word)
_BACKWARDS = (Kind.BACKWARD.word, Kind.INPUT_GRADIENT.word)


class VersionLag(NamedTuple):
    """In updates."""

    mean: float
    greatest: int


class StageStaleness(NamedTuple):
    """Of a stage: versions that its passes read behind the newest when the update that applies their gradient is made, and the
    time from the forward's begin to that update's end, median and greatest. None where nothing of it is told."""

    stage: int
    forward: Optional[VersionLag]
    backward: Optional[VersionLag]
    time_ns: Optional[Tuple[float, int]]


def infer_accumulate(events: Events) -> Optional[int]:
    """Microbatches an update, by the counts of both, where the trace does not say; None where they do not fit."""
    made = events.select(events.kind == _UPDATE)
    updates = len(np.unique(np.stack([made.stage, made.device, made.microbatch]), axis=1).T)
    forwards = np.count_nonzero(events.kind == _FORWARD)
    return forwards // updates if updates and forwards >= updates and forwards % updates == 0 else None


def measure_staleness(events: Events, accumulate: Optional[int]) -> List[StageStaleness]:
    """Of each stage that has forwards."""
    if not accumulate:
        return []
    passes = np.flatnonzero(
        (events.stage >= 0)
        & (events.is_kind(Kind.FORWARD.word, Kind.UPDATE.word, *_BACKWARDS))
        & (events.microbatch >= 0)
    )
    found = [
        _of_stage(stage, events.select(passes[own]), accumulate) for stage, own in group_places(events.stage[passes])
    ]
    return [each for each in found if each is not None]


def _of_stage(stage: int, own: Events, accumulate: int) -> Optional[StageStaleness]:
    forward = own.select(own.kind == _FORWARD)
    if not len(forward.start):
        return None
    backward, update = own.select(own.is_kind(*_BACKWARDS)), own.select(own.kind == _UPDATE)
    return StageStaleness(
        stage, _lag(forward, accumulate), _lag(backward, accumulate), _time(forward, update, accumulate)
    )


def _lag(passes: Events, accumulate: int) -> Optional[VersionLag]:
    """Update k comes when k versions have been made since the first."""
    known = passes.version >= 0
    behind = passes.microbatch[known] // accumulate - passes.version[known]
    return VersionLag(float(behind.mean()), int(behind.max())) if len(behind) else None


def _time(forward: Events, update: Events, accumulate: int) -> Optional[Tuple[float, int]]:
    if not len(update.start):
        return None
    keys = _keys(update.device, update.microbatch)
    order = np.lexsort((update.end, keys))
    keys, ends = keys[order], update.end[order]
    asked = _keys(forward.device, forward.microbatch // accumulate)
    place = np.maximum(np.searchsorted(keys, asked, side="right") - 1, 0)  # the last part, of updates in several
    applied = keys[place] == asked  # the last ones may have none
    took = (ends[place] - forward.start)[applied]
    return (float(np.median(took)), int(took.max())) if len(took) else None


def _keys(device: NDArray[np.int32], index: NDArray[np.int32]) -> NDArray[np.int64]:
    return (device.astype(np.int64) << 32) + index
