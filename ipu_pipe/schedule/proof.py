"""The proof that a schedule can run, on the compact form.

A run is an arithmetic progression: where the slots of a pass and of what it needs are both affine in the microbatch, their order
at the ends of the runs proves all between; two runs of a device share a slot only where their progressions meet.
"""

from __future__ import annotations

from typing import Optional, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.actions import Action, get_pass_needs
from ipu_pipe.schedule.runs import IntArray, Stretch


def check_stretches(
    stretches: Sequence[Stretch], stages: int, microbatches: int, both: bool, local: bool, placement: Sequence[int] = ()
) -> None:
    """Raise BadInput, naming the action, unless `stretches` are a schedule of P `stages` and M `microbatches` that can run.

    `both`: a slot holds a forward and, after it, one other pass. `local`: no pass needs a later stage's.
    `placement`: the device of each stage, empty where each stage has its own.
    """
    slot, microbatch, proved = 0, 0, {}
    for part in stretches:
        assert part.first_slot == slot and part.first_microbatch == microbatch, "stretches follow without a gap"
        assert part.repeats >= 1 and part.microbatches >= 1
        slot, microbatch = part.end_slot, part.end_microbatch
        proved[part.microbatches, part.runs.tobytes(), part.slots] = part  # equal stretches need one proof
    assert microbatch == microbatches, "stretches hold all microbatches"
    assert len({part.passes for part in stretches}) == 1, "backwards are whole, or all are split"
    for part in map(Stretch.spell_out_middle, proved.values()):
        fault = _find_missing(part, stages) or _find_disorder(part, stages, both, local)
        fault = fault or _find_collision(part, both, placement)
        if fault:
            raise BadInput("schedule: " + fault)


def _find_missing(part: Stretch, stages: int) -> Optional[str]:
    """Return a fault unless every stage does each pass of each microbatch once, within the stretch's slots."""
    for kind, pieces in part.base.items():
        if pieces.first.shape[0] > stages:
            return f"{Action(kind, 0, pieces.first.shape[0] - 1)}: there are {stages} stages, counted from 0"
        if pieces.first.shape[0] < stages:
            return f"{Action(kind, part.first_microbatch, stages - 1)} is missing"
        expected = np.cumsum(pieces.count, axis=1)
        starts = np.concatenate([np.zeros((stages, 1), np.int64), expected], axis=1)
        wrong = starts != np.concatenate([pieces.first, np.full((stages, 1), part.microbatches)], axis=1)
        if wrong.any():
            stage, k = _locate_first(wrong)
            return f"{Action(kind, part.first_microbatch + int(starts[stage, k]), stage)} is missing or double"
        outside = (pieces.count > 0) & ((pieces.low < 0) | (pieces.high >= part.slots))
        if outside.any():
            stage, k = _locate_first(outside)
            action = Action(kind, part.first_microbatch + int(pieces.first[stage, k]), stage)
            return f"{action} is outside its stretch of {part.slots} slots"
    return None


def _find_disorder(part: Stretch, stages: int, both: bool, local: bool) -> Optional[str]:
    """Return a fault unless every pass comes after what it needs, checked at the ends of the runs of both."""
    for kind in part.passes:
        for need, offset in get_pass_needs(kind, local):
            low, high = max(0, -offset), stages - max(0, offset)
            if low >= high:
                continue
            later, earlier = slice(low, high), slice(low + offset, high + offset)
            this, other = part.base[kind], part.base[need]
            ends = [this.first[later], (this.first + this.count - 1)[later]]
            ends += [other.first[earlier], (other.first + other.count - 1)[earlier]]
            index = np.clip(np.concatenate(ends, axis=1), 0, part.microbatches - 1)
            slot, needed = this.find_slots(index, later), other.find_slots(index, earlier)
            wrong = slot < needed if both and offset == 0 else slot <= needed
            if wrong.any():
                row, k = _locate_first(wrong)
                microbatch = part.first_microbatch + int(index[row, k])
                action = Action(kind, microbatch, low + row)
                before = Action(need, microbatch, low + row + offset)
                return (
                    f"{action} is in slot {part.first_slot + int(slot[row, k])}, but needs {before},"
                    f" which is in slot {part.first_slot + int(needed[row, k])}"
                )
    return None


def _find_collision(part: Stretch, both: bool, placement: Sequence[int]) -> Optional[str]:
    """Return a fault unless a slot holds at most one action of a device, or a forward and one other pass."""
    devices = sorted(set(placement))
    forward, *others = part.base.values()
    groups = [[forward], others] if both else [[forward, *others]]
    for group in groups:
        low, stride, count = (
            np.concatenate([getattr(pieces, name) for pieces in group], axis=1) for name in ("low", "stride", "count")
        )
        if devices:
            rows = [[s for s, device in enumerate(placement) if device == row] for row in devices]
            low, stride, count = (
                _join_rows(table, rows, empty) for table, empty in ((low, 0), (stride, 1), (count, 0))
            )
        # rows of many short runs are written by hand; sorting all their slots is cheaper than comparing all pairs
        shared = (_find_shared_slot if low.shape[1] <= 16 else _find_shared_slot_by_sorting)(low, stride, count)
        if shared is not None:
            row, slot = shared
            who = f"device {devices[row]}" if devices else f"stage {row}"
            return f"{who} has two actions in slot {part.first_slot + slot}"
    return None


def _join_rows(table: IntArray, rows: Sequence[Sequence[int]], empty: int) -> IntArray:
    """Return the runs (P, K) of all stages of a device in one row per device, filled up with `empty`."""
    joined = np.full((len(rows), max(map(len, rows)) * table.shape[1]), empty, np.int64)
    for row, stages in enumerate(rows):
        joined[row, : len(stages) * table.shape[1]] = table[stages].ravel()
    return joined


def _find_shared_slot(low: IntArray, stride: IntArray, count: IntArray) -> Optional[Tuple[int, int]]:
    """Return a (stage, slot) that two runs of a stage share, or None; arrays (P, runs)."""
    for k in range(1, low.shape[1]):
        a, d = low[:, k : k + 1], stride[:, k : k + 1]
        b, e = low[:, :k], stride[:, :k]
        last = np.minimum(a + d * (count[:, k : k + 1] - 1), b + e * (count[:, :k] - 1))
        start = np.maximum(a, b)
        candidate = start + (a - start) % d  # the first slot of run k from `start` on
        may_meet = (candidate <= last) & ((a - b) % np.gcd(d, e) == 0)
        if not may_meet.any():
            continue
        for _ in range(int(e.max())):  # after e slots of run k the remainders modulo e repeat
            hit = may_meet & (candidate <= last) & ((candidate - b) % e == 0)
            if hit.any():
                stage, other = _locate_first(hit)
                return stage, int(candidate[stage, other])
            candidate = candidate + d
    return None


def _find_shared_slot_by_sorting(low: IntArray, stride: IntArray, count: IntArray) -> Optional[Tuple[int, int]]:
    """Return what `_find_shared_slot` does."""
    for stage in range(low.shape[0]):
        runs = zip(low[stage].tolist(), stride[stage].tolist(), count[stage].tolist())
        slots = np.sort(np.concatenate([start + step * np.arange(length) for start, step, length in runs]))
        twice = slots[1:][slots[1:] == slots[:-1]]
        if len(twice):
            return stage, int(twice[0])
    return None


def check_update_order(slots: IntArray) -> None:
    """Raise BadInput unless every stage makes its updates in order; `slots` of the updates (P, updates)."""
    late = slots[:, 1:] <= slots[:, :-1]
    if late.any():
        stage, k = _locate_first(late)
        raise BadInput(f"schedule: U{k} on stage {stage} would come after U{k + 1}: batches must be completed in order")


def _locate_first(mask: NDArray[np.bool_]) -> Tuple[int, int]:
    """Return row and column of the first true cell."""
    row, column = np.unravel_index(int(np.argmax(mask)), mask.shape)
    return int(row), int(column)
