"""The figures of stages in a trace: the times of their passes, stragglers, and the staleness of
their weights.
"""

from __future__ import annotations

from typing import Any, Dict, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.report.analysis.devices import measure_union
from ipu_pipe.schedule.actions import SPLIT_PASSES, Kind
from ipu_pipe.trace.events import (
    COMPUTE,
    KIND_CODE,
    KINDS,
    OUTSIDE,
    UNSPECIFIED,
    Events,
    find_updates,
    group_indices,
)

# a pass that takes longer than this multiple of the median is a straggler
FAR = 3.0
# the most stragglers that are listed one by one
LONGEST = 5
_FORWARD = Kind.FORWARD.word
_UPDATE = Kind.UPDATE.word
# the backward passes that read weights
_RETURNING = (Kind.BACKWARD.word, Kind.INPUT_GRADIENT.word)
_HALVES = tuple(kind.word for kind in SPLIT_PASSES[1:])
Row = Dict[str, Any]


def measure_stages(
    events: Events, begin_ns: int, flops: Mapping[int, float]
) -> tuple[list[Row], list[Row]]:
    """Return the analysis's rows of all stages that compute, replicas together, and of their
    stragglers.

    `begin_ns`: of the span, from which stragglers' times count; `flops`: of a microbatch, by stage.
    """
    passes = events.select(events.is_kind(*COMPUTE) & (events.stage >= 0))
    rows: list[Row] = []
    stragglers: list[Row] = []
    for stage, places in group_indices(passes.stage):
        row, of_stage = _measure_stage(stage, passes.select(places), begin_ns, flops.get(stage))
        rows.append(row)
        stragglers += of_stage
    times = [row["busy_ns_per_microbatch"] for row in rows]
    # one that is not known may be the longest
    longest = None if None in times else max(times, default=None)
    for row, time in zip(rows, times):
        row["of_greatest"] = time / longest if time is not None and longest else None
    return rows, stragglers


def _measure_stage(
    stage: int, events: Events, begin_ns: int, flops: float | None
) -> tuple[Row, list[Row]]:
    # by device, since replicas of a stage compute at the same time
    busy_ns = sum(
        measure_union(events.start[at], events.end[at]) for _, at in group_indices(events.device)
    )
    medians: dict[str, float] = {}
    counts: dict[str, int] = {}
    stragglers: list[Row] = []
    # the time of passes without updates
    passes_ns = 0.0
    passes, times = join_pieces(events)
    for code, places in group_indices(passes.kind):
        kind = KINDS[code]
        of_kind = passes.select(places)
        durations = times[places]
        medians[kind], counts[kind] = float(np.median(durations)), len(durations)
        # the FLOPs are those of passes alone
        passes_ns += 0.0 if kind == _UPDATE else float(durations.sum(dtype=np.float64))
        # in other tools' traces one kind contains events of all sizes
        if medians[kind] and kind != UNSPECIFIED:
            stragglers += _find_stragglers(stage, kind, medians[kind], of_kind, durations, begin_ns)
    forwards = int(np.count_nonzero(passes.kind == KIND_CODE[_FORWARD]))
    # stragglers count as long as others of their kind: a first update of seconds is not a property
    # of the stage
    usual_ns = max(0, busy_ns - sum(group["lost_ns"] for group in stragglers))
    row = {
        "index": stage,
        "devices": np.unique(events.device).tolist(),
        "microbatches": forwards or None,
        "forward_ns": medians.get(_FORWARD),
        "backward_ns": _sum_backward(medians, counts),
        "input_gradient_ns": medians.get(_HALVES[0]),
        "weight_gradient_ns": medians.get(_HALVES[1]),
        "update_ns": medians.get(_UPDATE),
        "busy_ns": busy_ns,
        "busy_ns_per_microbatch": usual_ns / forwards if forwards else None,
        "noise": measure_noise(_sum_by_microbatch(passes, times)),
        "spread": None,
        "of_greatest": None,
        "flops_per_microbatch": flops,
        "flops_per_second": flops * forwards / passes_ns * 1e9
        if flops is not None and passes_ns and forwards
        else None,
    }
    return row, stragglers


def join_pieces(events: Events) -> tuple[Events, NDArray[np.int64]]:
    """Return each pass as one event, and the time of its compute (ns): other tools record the
    operations of a pass, which follow one another on its device. Updates stay as they are.
    """
    is_pass = (events.microbatch >= 0) & (events.kind != KIND_CODE[_UPDATE])
    order = np.lexsort((events.start, events.device))
    ordered = events.select(order)
    goes_on = is_pass[order]
    for column in (ordered.device, ordered.stage, ordered.kind, ordered.microbatch):
        goes_on[1:] &= column[1:] == column[:-1]
    # a slice, because there may be no event at all
    goes_on[:1] = False
    first = np.flatnonzero(~goes_on)
    # our own traces have whole passes
    if len(first) == len(order):
        return events, events.end - events.start
    # without the time between the pieces
    times = np.add.reduceat(ordered.end - ordered.start, first)
    passes = ordered.select(first)
    return passes._replace(end=np.maximum.reduceat(ordered.end, first)), times


def _sum_by_microbatch(passes: Events, times: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the time of each microbatch's passes."""
    is_pass = (passes.microbatch >= 0) & (passes.kind != KIND_CODE[_UPDATE])
    # numbered anew: a damaged number would ask for as many sums
    _, number = np.unique(passes.microbatch[is_pass], return_inverse=True)
    return np.bincount(number, times[is_pass]).astype(np.float64)


def measure_noise(samples: NDArray[np.float64]) -> float | None:
    """Return how far the mean of repeated times may be off by chance: two standard errors, as a
    share of the mean. None for fewer than three samples.
    """
    mean = float(samples.mean()) if len(samples) > 2 else 0.0
    if not mean:
        return None
    return 2 * float(samples.std(ddof=1)) / len(samples) ** 0.5 / mean


def measure_update_noise(events: Events, accumulate: int | None) -> float | None:
    """Return the noise of the time from one update to the next; None if updates are not known."""
    known = events.select((events.microbatch >= 0) & ~events.is_kind(*OUTSIDE))
    if not accumulate or not len(known.start):
        return None
    update = find_updates(known, accumulate)
    is_known = update >= 0
    # a damaged trace may name any number: what is made here grows with the events alone
    _, place = np.unique(update[is_known], return_inverse=True)
    ends = np.full(int(place.max(initial=-1)) + 1, np.iinfo(np.int64).min)
    # an update ends where its last device does
    np.maximum.at(ends, place, known.end[is_known])
    return measure_noise(np.diff(ends).astype(np.float64))


def _sum_backward(medians: Mapping[str, float], counts: Mapping[str, int]) -> float | None:
    """Return the time of a microbatch's backward with recomputation: whole, both halves, or the
    mean on stages with both.
    """
    whole = counts.get(_RETURNING[0], 0)
    split = counts.get(_HALVES[0], 0)
    if not whole + split:
        return None
    halves = sum(medians.get(half, 0.0) for half in _HALVES)
    backward = (whole * medians.get(_RETURNING[0], 0.0) + split * halves) / (whole + split)
    return backward + medians.get(Kind.RECOMPUTE.word, 0.0)


def _find_stragglers(
    stage: int,
    kind: str,
    median: float,
    events: Events,
    durations: NDArray[np.int64],
    begin_ns: int,
) -> list[Row]:
    """Return at most one row: the number of passes that take far longer than the median, their
    extra time, and the longest.
    """
    far = np.flatnonzero(durations > FAR * median)
    if not len(far):
        return []
    worst = far[np.argsort(-durations[far], kind="stable")[:LONGEST]]
    columns = zip(
        events.microbatch[worst].tolist(),
        events.start[worst].tolist(),
        durations[worst].tolist(),
    )
    longest = [
        {"microbatch": m if m >= 0 else None, "at_ns": at - begin_ns, "duration_ns": ns}
        for m, at, ns in columns
    ]
    lost_ns = round(float((durations[far] - median).sum()))
    return [
        {
            "stage": stage,
            "kind": kind,
            "count": len(far),
            "lost_ns": lost_ns,
            "median_ns": median,
            "longest": longest,
        }
    ]


def sum_busy_by_device(stages: Sequence[Row]) -> dict[int, float]:
    """Return the nanoseconds of compute of each device for a microbatch on all its stages; empty if
    not known.
    """
    busy_by_device: dict[int, float] = {}
    for stage in stages:
        # sums without an unknown stage could not be compared
        if stage["busy_ns_per_microbatch"] is None:
            return {}
        for device in stage["devices"]:
            busy_by_device[device] = (
                busy_by_device.get(device, 0.0) + stage["busy_ns_per_microbatch"]
            )
    return busy_by_device


# ---- the spread of modelled times


def measure_device_spreads(stages: Sequence[Row]) -> dict[int, float]:
    """Return how far the compute time of each device may be off by chance, as a share of it; empty
    if it is not known.
    """
    if any(stage["spread"] is None for stage in stages):
        return {}
    loads = sum_busy_by_device(stages)
    excess = dict.fromkeys(loads, 0.0)
    for stage in stages if loads else ():
        for device in stage["devices"]:
            excess[device] += stage["spread"] * stage["busy_ns_per_microbatch"]
    return {device: excess[device] / load if load else 0.0 for device, load in loads.items()}


def find_longest(times: Mapping[int, float], spreads: Mapping[int, float]) -> list[int]:
    """Return the key of the longest time, and of every other time that is as long within the spread
    of either; `spreads` is empty where times have none.
    """
    longest = max(times, key=lambda key: times[key])
    if not spreads:
        return [longest]
    spread = {key: max(spreads[key], spreads[longest]) for key in times}
    return [key for key, time in times.items() if time * (1 + spread[key]) >= times[longest]]


# ---- staleness


def measure_staleness(events: Events, accumulate: int | None) -> list[Row]:
    """Return a row for each stage that has forwards: how many updates older than the newest the
    weights are that its passes read, when the update that applies their gradient is made; and the
    time from a forward's begin to that update's end.
    """
    if not accumulate:
        return []
    chosen = (
        (events.stage >= 0)
        & (events.microbatch >= 0)
        & events.is_kind(_FORWARD, _UPDATE, *_RETURNING)
    )
    passes = events.select(chosen)
    rows = []
    for stage, places in group_indices(passes.stage):
        of_stage = passes.select(places)
        forward = of_stage.select(of_stage.is_kind(_FORWARD))
        update = of_stage.select(of_stage.is_kind(_UPDATE))
        if len(forward.start):
            rows.append(
                {
                    "stage": stage,
                    "forward_versions": _measure_lag(forward, accumulate),
                    "backward_versions": _measure_lag(
                        of_stage.select(of_stage.is_kind(*_RETURNING)), accumulate
                    ),
                    "time_ns": _measure_time_until_applied(forward, update, accumulate),
                }
            )
    return rows


def _measure_lag(passes: Events, accumulate: int) -> dict[str, float] | None:
    known = passes.version >= 0
    # update k is made when k versions have been made since the first
    lag = passes.microbatch[known] // accumulate - passes.version[known]
    if not len(lag):
        return None
    return {"mean": float(lag.mean()), "greatest": int(lag.max())}


def _measure_time_until_applied(
    forward: Events, update: Events, accumulate: int
) -> dict[str, float] | None:
    if not len(update.start):
        return None
    # of each replica its own update, which is made on its own device
    keys = _make_keys(update.device, update.microbatch)
    order = np.lexsort((update.end, keys))
    keys = keys[order]
    ends = update.end[order]
    wanted = _make_keys(forward.device, forward.microbatch // accumulate)
    # the last event of an update that has several
    place = np.maximum(np.searchsorted(keys, wanted, side="right") - 1, 0)
    # the last forwards may not have an update
    is_applied = keys[place] == wanted
    took = (ends[place] - forward.start)[is_applied]
    if not len(took):
        return None
    return {"median": float(np.median(took)), "greatest": int(took.max())}


def _make_keys(device: NDArray[np.int32], index: NDArray[np.int32]) -> NDArray[np.int64]:
    return (device.astype(np.int64) << 32) + index
