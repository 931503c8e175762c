"""What stages compute: how long their passes take, how evenly, and which ones take far longer than the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, NamedTuple, Optional, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.report.analysis.intervals import merged
from ipu_pipe.report.analysis.parts import by_device, grouped
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.trace.events import COMPUTE, KINDS, UNTOLD, Events

FAR = 3.0  # times the median: from here on a pass is a straggler
LONGEST = 5  # of the stragglers told one by one
_BACKWARDS = (Kind.RECOMPUTE, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)


class Straggler(NamedTuple):
    """A pass that took far longer than others of its kind on its stage; `at_ns` by the trace's clock."""

    microbatch: int
    at_ns: int
    duration_ns: int


@dataclass(frozen=True)
class Stragglers:
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
    stragglers: Tuple[Stragglers, ...]

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
        own = [self.medians[kind.word] for kind in _BACKWARDS if kind.word in self.medians]
        return sum(own) if own else None

    @property
    def update_ns(self) -> Optional[float]:
        """The median."""
        return self.medians.get(Kind.UPDATE.word)


def stage_times(events: Events) -> List[StageTimes]:
    """Of all stages that compute, in order."""
    places = np.flatnonzero(events.of_kind(*COMPUTE) & (events.stage >= 0))
    return [_times(stage, events, places[own]) for stage, own in grouped(events.stage[places])]


def _times(stage: int, events: Events, places: NDArray[np.intp]) -> StageTimes:
    own = events.where(places)
    busy = sum(merged(own.start[on], own.end[on]).length for _, on in by_device(own))
    medians: Dict[str, float] = {}
    stragglers, passes, forwards = [], 0.0, 0
    for code, at in grouped(own.kind.astype(np.int32)):
        kind = KINDS[code]
        durations = (own.end - own.start)[at]
        medians[kind] = float(np.median(durations))
        passes += 0.0 if kind == Kind.UPDATE.word else float(durations.sum(dtype=np.float64))
        forwards += len(at) if kind == Kind.FORWARD.word else 0
        stragglers += _far(stage, kind, medians[kind], own.where(at), durations)
    return StageTimes(stage, tuple(np.unique(own.device).tolist()), forwards, busy, passes, medians, tuple(stragglers))


def _far(stage: int, kind: str, median: float, own: Events, durations: NDArray[np.int64]) -> List[Stragglers]:
    if not median or kind == UNTOLD:  # of other tools: one kind of all sizes
        return []
    far = np.flatnonzero(durations > FAR * median)
    if not len(far):
        return []
    worst = far[np.argsort(-durations[far], kind="stable")[:LONGEST]]
    rows = zip(own.microbatch[worst].tolist(), own.start[worst].tolist(), durations[worst].tolist())
    lost = round(float((durations[far] - median).sum()))
    return [Stragglers(stage, kind, len(far), lost, median, tuple(Straggler(*row) for row in rows))]


def busy_by_device(stages: List[StageTimes]) -> Dict[int, float]:
    """Nanoseconds for a microbatch that each device computes for all its stages; empty where microbatches are not told."""
    found: Dict[int, float] = {}
    for stage in stages:
        if stage.each_ns is None:
            return {}
        for device in stage.devices:
            found[device] = found.get(device, 0.0) + stage.each_ns
    return found
