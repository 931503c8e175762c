"""Which event lets which other one run: from a send to the pass that it is for; where none are recorded, from pass to pass."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Sequence

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.schedule.actions import Kind, pass_needs
from ipu_pipe.trace.events import CARRIED, KINDS, WAIT, Events

# What a pass hands on to the pass of its kind on another stage, and how many stages on that is.
HANDS_ON = {
    kind: (what, -need.offset)
    for kind, what in (
        (Kind.FORWARD, "activations"),
        (Kind.RECOMPUTE, "recomputed activations"),
        (Kind.BACKWARD, "gradients"),
        (Kind.INPUT_GRADIENT, "gradients"),
    )
    for need in pass_needs(kind)
    if need.offset
}


class Arrows(NamedTuple):
    """Columns of one length: places among the events, and what goes from one to the other, as a place in CARRIED."""

    source: NDArray[np.int64]
    target: NDArray[np.int64]
    carries: NDArray[np.int64]


def arrows(events: Events, metadata: Dict[str, Any]) -> Arrows:
    """Of all events. `metadata`: "device_of_stage" tells replicas apart; where "gradients_cross" is false, no gradients go."""
    sends = np.flatnonzero(events.of_kind("send") & (events.peer >= 0))
    found = _of_sends(events, sends) if len(sends) else []
    devices = max(metadata.get("device_of_stage") or [-1]) + 1
    for kind, (what, towards) in HANDS_ON.items():
        if what != "gradients" or metadata.get("gradients_cross", True):
            found.append(_of_passes(events, kind, CARRIED.index(what), towards, devices, bool(len(sends))))
    return Arrows(*(np.concatenate(columns) for columns in zip(*found)))


def _of_sends(events: Events, sends: NDArray[np.int64]) -> List[Arrows]:
    """To the pass that could run then; where it was for none, to the receive or to the wait."""
    carries = events.carries[sends].astype(np.int64)
    towards = np.zeros(len(CARRIED), int)
    for what, offset in HANDS_ON.values():
        towards[CARRIED.index(what)] = offset
    # a message between stages is known by the stage that it is for, any other one by the device that sent it
    for_stage = np.where(towards[carries] != 0, events.stage[sends] + towards[carries], -2 - events.device[sends])
    wanted = [events.peer[sends], for_stage, events.microbatch[sends], carries]
    target = np.full(len(sends), -1)
    for kinds in (tuple(kind.word for kind in HANDS_ON), ("recv",), (WAIT,)):
        there = np.flatnonzero(events.of_kind(*kinds))
        if kinds[0] == Kind.FORWARD.word:
            of_kind = np.zeros(len(KINDS), int)
            for kind, (what, _) in HANDS_ON.items():
                of_kind[KINDS.index(kind.word)] = CARRIED.index(what)
            what_came, where = of_kind[events.kind[there]], events.stage[there]
        else:
            what_came = events.carries[there].astype(np.int64)
            where = np.where(towards[what_came] != 0, events.stage[there], -2 - events.peer[there])
        some = _first(wanted, [events.device[there], where, events.microbatch[there], what_came], events.start[there])
        target = np.where((target < 0) & (some >= 0), there[some], target) if len(there) else target
    known = target >= 0
    return [Arrows(sends[known], target[known], carries[known])]


def _of_passes(events: Events, kind: Kind, what: int, towards: int, devices: int, sent: bool) -> Arrows:
    """From each pass of `kind` to the one that its result lets run; `sent`: only where that is on the same device."""
    of_kind = np.flatnonzero(events.of_kind(kind.word))
    device, stage, microbatch = events.device[of_kind], events.stage[of_kind], events.microbatch[of_kind]
    replica = device // devices if devices else np.zeros_like(device)
    found = _first([replica, stage + towards, microbatch], [replica, stage, microbatch], events.start[of_kind])
    known = np.flatnonzero(found >= 0)
    known = known[device[known] == device[found[known]]] if sent else known
    return Arrows(of_kind[known], of_kind[found[known]], np.full(len(known), what))


def _first(
    wanted: Sequence[NDArray[Any]], there: Sequence[NDArray[Any]], start: NDArray[np.int64]
) -> NDArray[np.int64]:
    """For each row of the columns `wanted` its place in `there`, of several the one that began first; -1: none."""
    if not len(there[0]):
        return np.full(len(wanted[0]), -1)
    one, other = np.zeros(len(wanted[0]), np.int64), np.zeros(len(there[0]), np.int64)
    for left, right in zip(wanted, there):  # of a row one number, by the columns' ranges
        least = min(int(left.min()) if len(left) else 0, int(right.min()))
        most = max(int(left.max()) if len(left) else 0, int(right.max()))
        one, other = (rows * (most - least + 1) + column - least for rows, column in ((one, left), (other, right)))
    order = np.lexsort((start, other))
    place = np.minimum(np.searchsorted(other[order], one), len(order) - 1)
    return np.where(other[order][place] == one, order[place], -1)
