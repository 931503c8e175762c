"""How old weights are when the gradient that they gave is applied."""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.report.analysis.parts import grouped
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.trace.events import KINDS, Events

_FORWARD, _UPDATE = KINDS.index(Kind.FORWARD.word), KINDS.index(Kind.UPDATE.word)
_BACKWARDS = (Kind.BACKWARD.word, Kind.INPUT_GRADIENT.word)


class Lag(NamedTuple):
    """In updates."""

    mean: float
    greatest: int


class Staleness(NamedTuple):
    """Of a stage: versions that its passes read behind the newest when the update that applies their gradient is made, and the
    time from the forward's begin to that update's end, median and greatest. None where nothing of it is told."""

    stage: int
    forward: Optional[Lag]
    backward: Optional[Lag]
    time_ns: Optional[Tuple[float, int]]


def accumulate_of(events: Events) -> Optional[int]:
    """Microbatches an update, by the counts of both, where the trace does not say; None where they do not fit."""
    made = events.where(events.kind == _UPDATE)
    updates = len(np.unique(np.stack([made.stage, made.device, made.microbatch]), axis=1).T)
    forwards = np.count_nonzero(events.kind == _FORWARD)
    return forwards // updates if updates and forwards >= updates and forwards % updates == 0 else None


def staleness_of(events: Events, accumulate: Optional[int]) -> List[Staleness]:
    """Of each stage that has forwards."""
    if not accumulate:
        return []
    passes = np.flatnonzero(
        (events.stage >= 0)
        & (events.of_kind(Kind.FORWARD.word, Kind.UPDATE.word, *_BACKWARDS))
        & (events.microbatch >= 0)
    )
    found = [_of_stage(stage, events.where(passes[own]), accumulate) for stage, own in grouped(events.stage[passes])]
    return [each for each in found if each is not None]


def _of_stage(stage: int, own: Events, accumulate: int) -> Optional[Staleness]:
    forward = own.where(own.kind == _FORWARD)
    if not len(forward.start):
        return None
    backward, update = own.where(own.of_kind(*_BACKWARDS)), own.where(own.kind == _UPDATE)
    return Staleness(stage, _lag(forward, accumulate), _lag(backward, accumulate), _time(forward, update, accumulate))


def _lag(passes: Events, accumulate: int) -> Optional[Lag]:
    """Update k comes when k versions have been made since the first."""
    known = passes.version >= 0
    behind = passes.microbatch[known] // accumulate - passes.version[known]
    return Lag(float(behind.mean()), int(behind.max())) if len(behind) else None


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
