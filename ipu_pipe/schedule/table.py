"""Schedules: which stage runs the forward or backward of which microbatch in which slot, as frozen, checked data.

A schedule of thousands of stages and microbatches stays small because it is kept as *runs*: within a run the slot of
microbatch m is affine in m. PipeDream on three stages, the runs of stage 0 told apart by F+, F and B:

    slot     0   1   2   3   4   5   6   7   8   9   10  11
    stage 0  F0  F1  F2  .   .   B0* F3  B1* F4  B2* F5  ...      F+  m = 0, 1, 2   in slot m
    stage 1  .   F0  F1  F2  B0* .   B1* F3  B2* F4  B3* ...      F   m = 3, 4, ... in slot 2m
    stage 2  .   .   F0  B0* F1  B1* F2  B2* F3  B3* F4  ...      B   m = 0, 1, ... in slot 2m + 5

Slots, stages, microbatches and updates count from 0. Symbols: P stages, M microbatches, N microbatches an update.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Dict, List, NamedTuple, Optional, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput

IntArray = NDArray[np.int64]
GridArray = NDArray[np.int32]
ALL_STAGES = slice(None)


class Kind(Enum):
    """What a stage can do; the value is the letter that schedules print."""

    FORWARD = "F"
    BACKWARD = "B"
    UPDATE = "U"


@dataclass(frozen=True)
class Action:
    """One planned thing: the `kind` of microbatch `index` (for an update: update `index`) on `stage`."""

    kind: Kind
    index: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.index} on stage {self.stage}"


# What a pass of microbatch m on stage s needs, as (kind, stage offset). The one place that says so.
NEEDS: Dict[Kind, Tuple[Tuple[Kind, int], ...]] = {
    Kind.FORWARD: ((Kind.FORWARD, -1),),
    Kind.BACKWARD: ((Kind.FORWARD, 0), (Kind.BACKWARD, +1)),
}


def _needs(kind: Kind, local: bool) -> Tuple[Tuple[Kind, int], ...]:
    """Of a local schedule no pass needs a later stage's: each stage has a loss of its own."""
    return tuple((need, offset) for need, offset in NEEDS[kind] if offset <= 0 or not local)


def predecessors(action: Action, schedule: Schedule) -> List[Action]:
    """What must be done before `action` can be.

    Everything must be done in earlier slots, except that an update comes in the slot of its batch's last backward, and
    that a stage whose slot holds both passes does the forward before the backward.
    """
    return predecessors_of(action, schedule.stages, schedule.accumulate, schedule.local)


def predecessors_of(action: Action, stages: int, accumulate: int, local: bool = False) -> List[Action]:
    """As `predecessors`, for P `stages` and N = `accumulate` where there is no schedule yet."""
    if action.kind is Kind.UPDATE:
        batch = range(action.index * accumulate, (action.index + 1) * accumulate)
        return [Action(Kind.BACKWARD, microbatch, action.stage) for microbatch in batch]
    return [
        Action(kind, action.index, action.stage + offset)
        for kind, offset in _needs(action.kind, local)
        if 0 <= action.stage + offset < stages
    ]


# --- the compact form --------------------------------------------------------------------------------------------

PASSES = (Kind.FORWARD, Kind.BACKWARD)
CODE = {kind: code for code, kind in enumerate(PASSES)}

# A run: `count` microbatches from `first_index` on, the first of them in `first_slot` and each next one `slot_step`
# later, of a kind (0 forward, 1 backward) on a stage. Slots and microbatches count from the start of the part.
RUN = np.dtype(
    [
        ("stage", np.int64),
        ("kind", np.int8),
        ("first_index", np.int64),
        ("count", np.int64),
        ("first_slot", np.int64),
        ("slot_step", np.int64),
    ]
)
RunArray = NDArray[np.void]


def run_array(
    stage: IntArray, kind: Kind, first_index: object, count: object, first_slot: object, slot_step: int
) -> RunArray:
    """One run a stage, as a structured array of dtype RUN; runs of no microbatch are left out."""
    runs = np.empty(len(stage), RUN)
    runs["stage"], runs["kind"], runs["slot_step"] = stage, CODE[kind], slot_step
    runs["first_index"], runs["count"], runs["first_slot"] = first_index, count, first_slot
    return runs[runs["count"] > 0]


class _Pieces:
    """The runs of one kind in a part as a table, a row a stage: slot = offset + step * microbatch from `first` on.

    Arrays are (P, K), K the most runs of a stage; missing runs have count 0 and a `first` that no microbatch reaches.
    `low` and `stride` give each run's slots upwards, whatever the sign of its step.
    """

    def __init__(self, runs: RunArray, stages: int, microbatches: int) -> None:
        runs = runs[np.lexsort((runs["first_index"], runs["stage"]))]
        per_stage = np.bincount(runs["stage"], minlength=stages)
        column = np.arange(len(runs)) - np.repeat(np.cumsum(per_stage) - per_stage, per_stage)
        shape = (stages, max(int(per_stage.max()), 1))
        self.first = np.full(shape, microbatches, np.int64)
        self.count = np.zeros(shape, np.int64)
        self.step = np.ones(shape, np.int64)
        self.offset = np.zeros(shape, np.int64)
        where = (runs["stage"], column)
        self.first[where], self.count[where], self.step[where] = runs["first_index"], runs["count"], runs["slot_step"]
        self.offset[where] = runs["first_slot"] - runs["slot_step"] * runs["first_index"]
        head = self.offset + self.step * self.first
        tail = head + self.step * np.maximum(self.count - 1, 0)
        self.low, self.high, self.stride = np.minimum(head, tail), np.maximum(head, tail), np.abs(self.step)

    def at(self, index: IntArray, stages: slice = ALL_STAGES) -> IntArray:
        """Slots (P, n) of the microbatches `index`, (n,) or a row a stage (P, n)."""
        first, step, offset = self.first[stages], self.step[stages], self.offset[stages]
        lowest, highest = int(index.min()), int(index.max())
        start = max(k for k in range(first.shape[1]) if k == 0 or int(first[:, k].max()) <= lowest)
        slots = step[:, start : start + 1] * index + offset[:, start : start + 1]
        for k in range(start + 1, first.shape[1]):
            if int(first[:, k].min()) <= highest:
                later = step[:, k : k + 1] * index + offset[:, k : k + 1]
                np.copyto(slots, later, where=index >= first[:, k : k + 1])
        return slots

    def before(self, slot: IntArray, stages: slice = ALL_STAGES) -> IntArray:
        """How many of each stage's actions (P, n) lie in slots below `slot`, (n,) or (P, n)."""
        low, stride, count = self.low[stages], self.stride[stages], self.count[stages]
        total = np.zeros((low.shape[0], slot.shape[-1]), np.int64)
        lowest, highest = int(slot.min()), int(slot.max())
        for k in range(low.shape[1]):
            start, step, most = low[:, k : k + 1], stride[:, k : k + 1], count[:, k : k + 1]
            if int(start.min()) >= highest:
                continue
            if int((start + step * most).max()) <= lowest:
                total += most
                continue
            passed = slot - start + (step - 1)
            if int(step.max()) > 1:  # the division is the dear part, and most runs have step 1 or 2
                passed = passed >> 1 if int(step.min()) == int(step.max()) == 2 else passed // step
            total += np.clip(passed, 0, most)
        return total

    def ascends(self) -> bool:
        """Whether every stage takes its microbatches in order."""
        real = self.count > 0
        forwards = (self.step > 0) | (self.count <= 1) | ~real
        meets = (self.low[:, 1:] > self.high[:, :-1]) | ~real[:, 1:]
        return bool(forwards.all() and meets.all())


@dataclass(frozen=True, eq=False)
class Part:
    """A stretch of a schedule that begins and ends with an empty pipeline, `repeats` times in a row.

    Each repeat takes `slots` slots and `microbatches` microbatches; `runs` (dtype RUN) count from the repeat's start.
    """

    first_slot: int
    first_microbatch: int
    repeats: int
    slots: int
    microbatches: int
    runs: RunArray
    pieces: Dict[Kind, _Pieces] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.runs.setflags(write=False)
        stages = int(self.runs["stage"].max()) + 1 if len(self.runs) else 1
        tables = {k: _Pieces(self.runs[self.runs["kind"] == CODE[k]], stages, self.microbatches) for k in PASSES}
        object.__setattr__(self, "pieces", tables)

    @property
    def end_slot(self) -> int:
        return self.first_slot + self.repeats * self.slots

    @property
    def end_microbatch(self) -> int:
        return self.first_microbatch + self.repeats * self.microbatches


class Grids(NamedTuple):
    """Spelled-out slots: the microbatch whose forward, and whose backward, each stage does, -1 for none; (P, slots)."""

    forward: GridArray
    backward: GridArray


@dataclass(frozen=True, eq=False)
class Schedule:
    """Who does what when, for P `stages`, M `microbatches` and an update every N = `accumulate` microbatches.

    `slot_holds`: "one" action a stage and slot, or "both" a forward and, after it, a backward. Updates are not listed:
    U(k) follows the backward that completes batch k, in the same slot; a last batch that is not full has none. `local`: no
    backward needs one of another stage.
    Parts follow one another without a gap. Making one proves that it can run, on the compact form, or raises BadInput
    naming the action that cannot be where it is.
    """

    stages: int
    microbatches: int
    accumulate: int
    slot_holds: str
    parts: Tuple[Part, ...]
    local: bool = False

    def __post_init__(self) -> None:
        if self.slot_holds not in ("one", "both"):
            raise BadInput(f"schedule: slot_holds: {self.slot_holds}: must be one or both")
        _check_parts(self)
        if not self.in_order:
            _check_update_order(self)

    # --- sizes

    @property
    def slot_count(self) -> int:
        """Slots from the first forward to the last backward."""
        return self.parts[-1].end_slot

    @property
    def update_count(self) -> int:
        """Updates of every stage in the whole run: full batches only."""
        return self.microbatches // self.accumulate

    @property
    def slot_capacity(self) -> int:
        """Passes that a stage can do in a slot: 1, or 2 where a slot holds both."""
        return 2 if self.slot_holds == "both" else 1

    def busy_share(self, first_slot: int = 0, last_slot: Optional[int] = None) -> float:
        """The share of stages' time spent in passes within the slots [first_slot, last_slot), by default all."""
        end = self.slot_count if last_slot is None else last_slot
        edges = np.array([first_slot, end])
        done = sum(int(np.diff(self.count_before(kind, edges)).sum()) for kind in PASSES)
        return done / (self.stages * (end - first_slot) * self.slot_capacity)

    @cached_property
    def in_order(self) -> bool:
        """Whether every stage does its backwards in the order of the microbatches (only hand-written rows may not)."""
        return all(part.pieces[Kind.BACKWARD].ascends() for part in self.parts)

    def stretch(self, k: int) -> Tuple[int, int]:
        """First update and end of the stretch between drains that holds update k; alone where the pipeline empties within it."""
        batch = self.accumulate
        for part in self.parts:
            if part.first_microbatch <= k * batch < part.end_microbatch:
                length, begin = max(part.microbatches // batch, 1), part.first_microbatch // batch
                begin += (k - begin) // length * length
                return begin, begin + length
        raise AssertionError(f"no update {k}")

    # --- microbatch -> slot and back

    def slots(self, kind: Kind, first: int, last: int, stages: slice = ALL_STAGES) -> IntArray:
        """The slots (P, last - first) of the `kind` of microbatches (for UPDATE: updates) [first, last)."""
        if kind is not Kind.UPDATE:
            return self._slots_at(kind, np.arange(first, last), stages)
        if self.in_order:
            return self._slots_at(Kind.BACKWARD, np.arange(first + 1, last + 1) * self.accumulate - 1, stages)
        backwards = self.slots(Kind.BACKWARD, first * self.accumulate, last * self.accumulate, stages)
        batches = backwards.reshape(backwards.shape[0], last - first, self.accumulate)
        completed: IntArray = batches.max(axis=2, initial=0)
        return completed

    def _slots_at(self, kind: Kind, index: IntArray, stages: slice) -> IntArray:
        assert len(index) == 0 or (0 <= index[0] and index[-1] < self.microbatches), "microbatch out of range"
        edges = np.array([part.end_microbatch for part in self.parts])
        stops = np.searchsorted(index, edges)
        columns, start = [], 0
        for part, stop in zip(self.parts, stops):
            if stop > start:
                repeat, local = np.divmod(index[start:stop] - part.first_microbatch, part.microbatches)
                columns.append(part.pieces[kind].at(local, stages) + (part.first_slot + repeat * part.slots))
            start = max(start, stop)
        if not columns:
            return np.zeros((len(range(*stages.indices(self.stages))), 0), np.int64)
        return columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)

    def count_before(self, kind: Kind, slot: IntArray, stages: slice = ALL_STAGES) -> IntArray:
        """How many of the `kind` each stage has done (P, n) before the slots `slot`, (n,) or a row a stage (P, n)."""
        if kind is Kind.UPDATE:
            return self._updates_before(slot, stages)
        lowest, highest = int(slot.min()), int(slot.max())
        parts = [p for p in self.parts if p.end_slot > lowest and p.first_slot < highest]
        done = sum(part.repeats * part.microbatches for part in self.parts if part.end_slot <= lowest)
        total = np.full((len(range(*stages.indices(self.stages))), slot.shape[-1]), done, np.int64)
        for part in parts:
            inside = np.clip(slot - part.first_slot, 0, part.repeats * part.slots)
            if part.repeats == 1:
                total += part.pieces[kind].before(inside, stages)
            else:
                repeat, inside = np.divmod(inside, part.slots)
                total += repeat * part.microbatches + part.pieces[kind].before(inside, stages)
        return total

    def _updates_before(self, slot: IntArray, stages: slice) -> IntArray:
        if self.in_order:
            backwards = self.count_before(Kind.BACKWARD, slot, stages)
            return backwards if self.accumulate == 1 else backwards // self.accumulate
        made = self.slots(Kind.UPDATE, 0, self.update_count, stages)
        asked = np.broadcast_to(slot, (made.shape[0], slot.shape[-1]))
        return np.stack([np.searchsorted(row, ask) for row, ask in zip(made, asked)]).astype(np.int64)

    # --- spelled out

    def spell_out(self, first_slot: int, last_slot: int, stages: slice = ALL_STAGES) -> Grids:
        """What every stage does in the slots [first_slot, last_slot)."""
        height, width = len(range(*stages.indices(self.stages))), last_slot - first_slot
        grids = Grids(np.full((height, width), -1, np.int32), np.full((height, width), -1, np.int32))
        for part in self.parts:
            start, stop = max(first_slot, part.first_slot), min(last_slot, part.end_slot)
            if start < stop:
                for kind, grid in zip(PASSES, grids):
                    _fill(part, kind, start, stop, stages, grid[:, start - first_slot : stop - first_slot])
        return grids

    def update_grid(self, first_slot: int, last_slot: int, stages: slice = ALL_STAGES) -> GridArray:
        """The update that every stage makes in the slots [first_slot, last_slot), -1 for none; (P, slots)."""
        height = len(range(*stages.indices(self.stages)))
        grid = np.full((height, last_slot - first_slot), -1, np.int32)
        if self.update_count == 0 or last_slot <= first_slot:
            return grid
        made = self.count_before(Kind.UPDATE, np.array([first_slot, last_slot]), stages)
        first, last = int(made[:, 0].min()), int(made[:, 1].max())
        if last == first:
            return grid
        slots = self.slots(Kind.UPDATE, first, last, stages) - first_slot
        inside = (slots >= 0) & (slots < last_slot - first_slot)
        row, column = np.nonzero(inside)
        grid[row, slots[inside]] = first + column
        return grid

    def cells(self, stage: int, first_slot: int = 0, last_slot: Optional[int] = None) -> List[Optional[str]]:
        """One stage's slots as text: "F0", "B3", "F5 B2" where a slot holds both, None where it is idle."""
        end = self.slot_count if last_slot is None else last_slot
        forward, backward = (grid[0].tolist() for grid in self.spell_out(first_slot, end, slice(stage, stage + 1)))
        return [_cell(f, b) for f, b in zip(forward, backward)]

    # --- activations

    def max_in_flight(self) -> IntArray:
        """The most microbatches (P,) between their forward and their backward on a stage at once.

        Counted right after a forward; where a slot holds both passes, before that slot's backward.
        """
        most: IntArray = np.max([_most_in_flight(part) for part in self.parts], axis=0)
        return most


def _cell(forward: int, backward: int) -> Optional[str]:
    if forward < 0 and backward < 0:
        return None
    if backward < 0:
        return f"F{forward}"
    return f"B{backward}" if forward < 0 else f"F{forward} B{backward}"


def _fill(part: Part, kind: Kind, first_slot: int, last_slot: int, stages: slice, grid: GridArray) -> None:
    """Write the microbatches of `kind` in the slots [first_slot, last_slot), all inside `part`, into `grid`."""
    if part.repeats > 1:
        once = np.full((grid.shape[0], part.slots), -1, np.int32)
        _fill_once(part, kind, 0, part.slots, stages, once)
        repeat, column = np.divmod(np.arange(first_slot, last_slot) - part.first_slot, part.slots)
        np.take(once, column, axis=1, out=grid)
        shift = (part.first_microbatch + repeat * part.microbatches).astype(np.int32)
        np.add(grid, shift, out=grid, where=grid >= 0)
    else:
        _fill_once(part, kind, first_slot - part.first_slot, last_slot - part.first_slot, stages, grid)
        if part.first_microbatch:
            np.add(grid, np.int32(part.first_microbatch), out=grid, where=grid >= 0)


def _fill_once(part: Part, kind: Kind, first: int, last: int, stages: slice, grid: GridArray) -> None:
    pieces = part.pieces[kind]
    low, stride, count = pieces.low[stages], pieces.stride[stages], pieces.count[stages]
    begin = np.clip(-((low - first) // stride), 0, count)  # how many of a run's actions lie below the window
    end = np.clip(-((low - last) // stride), 0, count)
    head = low + begin * stride - first
    up = pieces.step[stages] > 0
    index = pieces.first[stages] + np.where(up, begin, count - 1 - begin)
    for row, k in np.argwhere(end > begin).tolist():
        length, start, step = int(end[row, k] - begin[row, k]), int(head[row, k]), int(stride[row, k])
        m, sign = int(index[row, k]), 1 if up[row, k] else -1
        values = np.arange(m, m + sign * length, sign, dtype=np.int32)
        grid[row, start : start + (length - 1) * step + 1 : step] = values


def _most_in_flight(part: Part) -> IntArray:
    """Between two ends of runs, forwards done minus backwards done only grows or only falls: look at the ends alone."""
    forward, backward = part.pieces[Kind.FORWARD], part.pieces[Kind.BACKWARD]
    if forward.ascends():
        ends = np.concatenate([backward.low, backward.high + 1, forward.low], axis=1)
        next_forward = forward.before(ends)
        around = np.concatenate([next_forward - 1, next_forward], axis=1)
        slots = forward.at(np.clip(around, 0, part.microbatches - 1)) + 1
    else:  # rows written by hand: all forwards, whatever their order
        slots = forward.at(np.arange(part.microbatches)) + 1
    in_flight = forward.before(slots) - backward.before(slots - 1)
    return np.asarray(in_flight.max(axis=1))


# --- the proof that a schedule can run ----------------------------------------------------------------------------


def _check_parts(schedule: Schedule) -> None:
    slot, microbatch, proved = 0, 0, {}
    for part in schedule.parts:
        assert part.first_slot == slot and part.first_microbatch == microbatch, "parts follow without a gap"
        assert part.repeats >= 1 and part.microbatches >= 1
        slot, microbatch = part.end_slot, part.end_microbatch
        proved[part.microbatches, part.runs.tobytes(), part.slots] = part  # the same part twice needs one proof
    assert microbatch == schedule.microbatches, "parts hold all microbatches"
    for part in proved.values():
        fault = _missing(part, schedule.stages) or _out_of_turn(part, schedule) or _collision(part, schedule)
        if fault:
            raise BadInput("schedule: " + fault)


def _missing(part: Part, stages: int) -> Optional[str]:
    """Every stage must do each microbatch's forward and backward once, within the part's slots."""
    for kind, pieces in part.pieces.items():
        if pieces.first.shape[0] > stages:
            return f"{Action(kind, 0, pieces.first.shape[0] - 1)}: there are {stages} stages, counted from 0"
        if pieces.first.shape[0] < stages:
            return f"{Action(kind, part.first_microbatch, stages - 1)} is missing"
        expected = np.cumsum(pieces.count, axis=1)
        starts = np.concatenate([np.zeros((stages, 1), np.int64), expected], axis=1)
        wrong = starts != np.concatenate([pieces.first, np.full((stages, 1), part.microbatches)], axis=1)
        if wrong.any():
            stage, k = _first(wrong)
            return f"{Action(kind, part.first_microbatch + int(starts[stage, k]), stage)} is missing or double"
        outside = (pieces.count > 0) & ((pieces.low < 0) | (pieces.high >= part.slots))
        if outside.any():
            stage, k = _first(outside)
            action = Action(kind, part.first_microbatch + int(pieces.first[stage, k]), stage)
            return f"{action} lies outside its part of {part.slots} slots"
    return None


def _out_of_turn(part: Part, schedule: Schedule) -> Optional[str]:
    """Slots of a pass and of what it needs are affine between the ends of their runs: the ends prove the rest."""
    for kind in NEEDS:
        for need, offset in _needs(kind, schedule.local):
            low, high = max(0, -offset), schedule.stages - max(0, offset)
            if low >= high:
                continue
            later, earlier = slice(low, high), slice(low + offset, high + offset)
            own, other = part.pieces[kind], part.pieces[need]
            ends = [own.first[later], (own.first + own.count - 1)[later]]
            ends += [other.first[earlier], (other.first + other.count - 1)[earlier]]
            index = np.clip(np.concatenate(ends, axis=1), 0, part.microbatches - 1)
            slot, needed = own.at(index, later), other.at(index, earlier)
            same_slot_serves = schedule.slot_holds == "both" and offset == 0
            wrong = slot < needed if same_slot_serves else slot <= needed
            if wrong.any():
                row, k = _first(wrong)
                microbatch = part.first_microbatch + int(index[row, k])
                action = Action(kind, microbatch, low + row)
                before = Action(need, microbatch, low + row + offset)
                return (
                    f"{action} is in slot {part.first_slot + int(slot[row, k])}, but needs {before},"
                    f" which is in slot {part.first_slot + int(needed[row, k])}"
                )
    return None


def _collision(part: Part, schedule: Schedule) -> Optional[str]:
    """A slot holds at most one action of a stage, or one of each kind."""
    forward, backward = (part.pieces[kind] for kind in PASSES)
    groups = [(forward, backward)] if schedule.slot_holds == "one" else [(forward,), (backward,)]
    for group in groups:
        low, stride, count = (
            np.concatenate([getattr(pieces, name) for pieces in group], axis=1) for name in ("low", "stride", "count")
        )
        stage_slot = (_shared_slot if low.shape[1] <= 16 else _shared_slot_spelled_out)(low, stride, count)
        if stage_slot is not None:
            return f"stage {stage_slot[0]} has two actions in slot {part.first_slot + stage_slot[1]}"
    return None


def _shared_slot(low: IntArray, stride: IntArray, count: IntArray) -> Optional[Tuple[int, int]]:
    """A (stage, slot) that two runs of a stage share, or None; arrays (P, runs). Runs are arithmetic progressions."""
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
                stage, other = _first(hit)
                return stage, int(candidate[stage, other])
            candidate = candidate + d
    return None


def _shared_slot_spelled_out(low: IntArray, stride: IntArray, count: IntArray) -> Optional[Tuple[int, int]]:
    """As `_shared_slot`, for rows of many short runs (hand-written ones), where sorting all slots is cheaper."""
    for stage in range(low.shape[0]):
        runs = zip(low[stage].tolist(), stride[stage].tolist(), count[stage].tolist())
        slots = np.sort(np.concatenate([start + step * np.arange(length) for start, step, length in runs]))
        twice = slots[1:][slots[1:] == slots[:-1]]
        if len(twice):
            return stage, int(twice[0])
    return None


def _check_update_order(schedule: Schedule) -> None:
    made = schedule.slots(Kind.UPDATE, 0, schedule.update_count)
    late = made[:, 1:] <= made[:, :-1]
    if late.any():
        stage, k = _first(late)
        raise BadInput(f"schedule: U{k} on stage {stage} would come after U{k + 1}: batches must be completed in order")


def _first(mask: NDArray[np.bool_]) -> Tuple[int, int]:
    row, column = np.unravel_index(int(np.argmax(mask)), mask.shape)
    return int(row), int(column)
