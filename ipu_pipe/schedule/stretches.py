"""The compact form of a schedule: stretches, each from an empty pipeline to an empty one, that
consist of runs.

A run is consecutive microbatches' passes of one kind on one stage, in slots of one distance. 1F1B
on two stages:

    slot     0   1   2   3   4   5   6            runs of stage 0 (first_index, first_slot, slot_step)
    stage 0  F0  F1  .   B0  F2  B1  F3  ...      F (0, 0, 1), F (2, 4, 2), B (0, 3, 2)
    stage 1  .   F0  B0  F1  B1  F2  B2  ...

    RunTable       the runs of one kind in a stretch, as arrays of a row per stage
    LongRunTable   the same with a steady middle that is repeated, for schedules laid out pass by pass
    Stretch        the tables of all kinds; a schedule is a tuple of stretches
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Iterator, Mapping, NamedTuple, Sequence

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.schedule.actions import PASSES, SPLIT_PASSES, Kind

IntArray = NDArray[np.int64]
GridArray = NDArray[np.int32]
ALL_STAGES = slice(None)

CODE = {
    kind: code
    for code, kind in enumerate(
        (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
    )
}

# A run: actions of one kind (by its CODE) on one stage for `count` microbatches from `first_index`
# on. The first is in `first_slot`, and each next one `slot_step` later. Slots and microbatches
# count from the start of the stretch.
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


def make_runs(
    stage: IntArray,
    kind: Kind,
    first_index: object,
    count: object,
    first_slot: object,
    slot_step: int,
) -> RunArray:
    """Return one run per stage as a structured array of dtype RUN, without empty runs."""
    runs = np.empty(len(stage), RUN)
    runs["stage"], runs["kind"], runs["slot_step"] = stage, CODE[kind], slot_step
    runs["first_index"], runs["count"], runs["first_slot"] = first_index, count, first_slot
    return runs[runs["count"] > 0]


class RunTable:
    """The runs of one kind in a stretch as a table, a row per stage: slot = offset + step *
    microbatch from `first` on.

    Arrays are (P, K), K the most runs of a stage; missing runs have count 0 and a `first` that no
    microbatch reaches. `low`, `high` and `stride` describe each run's slots in ascending order,
    whatever the sign of its step.
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
        self.first[where], self.count[where], self.step[where] = (
            runs["first_index"],
            runs["count"],
            runs["slot_step"],
        )
        self.offset[where] = runs["first_slot"] - runs["slot_step"] * runs["first_index"]
        first_slot = self.offset + self.step * self.first
        last_slot = first_slot + self.step * np.maximum(self.count - 1, 0)
        self.low = np.minimum(first_slot, last_slot)
        self.high = np.maximum(first_slot, last_slot)
        self.stride = np.abs(self.step)

    def find_slots(self, index: IntArray, stages: slice = ALL_STAGES) -> IntArray:
        """Return the slots (P, n) of the microbatches `index`, (n,) or a row per stage (P, n)."""
        first = self.first[stages]
        step = self.step[stages]
        offset = self.offset[stages]
        lowest = int(index.min())
        highest = int(index.max())
        start = max(k for k in range(first.shape[1]) if k == 0 or int(first[:, k].max()) <= lowest)
        slots = step[:, start : start + 1] * index + offset[:, start : start + 1]
        for k in range(start + 1, first.shape[1]):
            if int(first[:, k].min()) <= highest:
                later = step[:, k : k + 1] * index + offset[:, k : k + 1]
                np.copyto(slots, later, where=index >= first[:, k : k + 1])
        return slots

    def count_before(self, slot: IntArray, stages: slice = ALL_STAGES) -> IntArray:
        """Count each stage's actions (P, n) in slots below `slot`, (n,) or (P, n)."""
        low = self.low[stages]
        stride = self.stride[stages]
        count = self.count[stages]
        total = np.zeros((low.shape[0], slot.shape[-1]), np.int64)
        lowest = int(slot.min())
        highest = int(slot.max())
        for k in range(low.shape[1]):
            start = low[:, k : k + 1]
            step = stride[:, k : k + 1]
            length = count[:, k : k + 1]
            if int(start.min()) >= highest:
                continue
            if int((start + step * length).max()) <= lowest:
                total += length
                continue
            passed = slot - start + (step - 1)
            # division is expensive, and most runs have step 1 or 2
            if int(step.max()) > 1:
                passed = passed >> 1 if int(step.min()) == int(step.max()) == 2 else passed // step
            total += np.clip(passed, 0, length)
        return total

    def fill_grid(self, first: int, last: int, stages: slice, grid: GridArray) -> None:
        """Write the microbatches in the slots [first, last) into `grid`."""
        low = self.low[stages]
        stride = self.stride[stages]
        count = self.count[stages]
        # the number of each run's passes before the slots `first` and `last`
        begin = np.clip(-((low - first) // stride), 0, count)
        end = np.clip(-((low - last) // stride), 0, count)
        first_column = low + begin * stride - first
        is_ascending = self.step[stages] > 0
        index = self.first[stages] + np.where(is_ascending, begin, count - 1 - begin)
        for row, k in np.argwhere(end > begin).tolist():
            length = int(end[row, k] - begin[row, k])
            start = int(first_column[row, k])
            step = int(stride[row, k])
            m = int(index[row, k])
            sign = 1 if is_ascending[row, k] else -1
            values = np.arange(m, m + sign * length, sign, dtype=np.int32)
            grid[row, start : start + (length - 1) * step + 1 : step] = values

    def is_in_order(self) -> bool:
        """Return whether every stage takes its microbatches in order."""
        is_run_ascending = (self.step > 0) | (self.count <= 1)
        is_empty = self.count[:, 1:] == 0
        follows_previous_run = (self.low[:, 1:] > self.high[:, :-1]) | is_empty
        return bool(is_run_ascending.all() and follows_previous_run.all())


class Middle(NamedTuple):
    """The steady part of a stretch, repeated `rounds` more times: `span` slots from slot `cut` on,
    in which every stage does each pass `period` times in the order of microbatches."""

    cut: int
    span: int
    period: int
    rounds: int


class LongRunTable:
    """A `RunTable` with a repeated `Middle`."""

    def __init__(self, short: RunTable, middle: Middle) -> None:
        self.short = short
        self.middle = middle
        # the first microbatch of the middle, (P, 1)
        self.begin = short.count_before(np.array([middle.cut]))
        after = short.count_before(np.array([middle.cut + middle.span]))
        assert short.is_in_order() and (after - self.begin == middle.period).all(), (
            "every stage is in its steady state"
        )

    def find_slots(self, index: IntArray, stages: slice = ALL_STAGES) -> IntArray:
        """Return the slots (P, n) of the microbatches `index`, as `RunTable.find_slots`."""
        rounds = np.clip((index - self.begin[stages]) // self.middle.period, 0, self.middle.rounds)
        return (
            self.short.find_slots(index - rounds * self.middle.period, stages)
            + rounds * self.middle.span
        )

    def count_before(self, slot: IntArray, stages: slice = ALL_STAGES) -> IntArray:
        """Count each stage's actions (P, n) in slots below `slot`, as `RunTable.count_before`."""
        rounds = np.clip((slot - self.middle.cut) // self.middle.span, 0, self.middle.rounds)
        return (
            self.short.count_before(slot - rounds * self.middle.span, stages)
            + rounds * self.middle.period
        )

    def fill_grid(self, first: int, last: int, stages: slice, grid: GridArray) -> None:
        """Write the microbatches in the slots [first, last) into `grid`."""
        ends = self.count_before(np.array([first, last]), stages)
        for row, stage in enumerate(range(*stages.indices(len(self.begin)))):
            index = np.arange(*ends[row])
            if len(index):
                grid[row, self.find_slots(index, slice(stage, stage + 1))[0] - first] = index

    def is_in_order(self) -> bool:
        """Return True, because the middle is in order."""
        return True


@dataclass(frozen=True, eq=False)
class Stretch:
    """The passes of a pipeline from empty to empty, `repeats` times in a row.

    Each repeat takes `slots` slots and `microbatches` microbatches; `runs` (dtype RUN) count from
    its start. `whole`: marks, among split backwards, the ones (P, microbatches) that are one pass
    of two slots; None: there are none. `middle`: the part of the runs that is repeated within the
    stretch; `microbatches` and `slots` include it. `tables`: the runs of each kind; `short_tables`:
    without the repeats of the middle.
    """

    first_slot: int
    first_microbatch: int
    repeats: int
    slots: int
    microbatches: int
    runs: RunArray
    whole: NDArray[np.bool_] | None = None
    middle: Middle | None = None
    short_tables: dict[Kind, RunTable] = field(init=False, repr=False)
    tables: Mapping[Kind, RunTable | LongRunTable] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.runs.setflags(write=False)
        stages = int(self.runs["stage"].max()) + 1 if len(self.runs) else 1
        passes = SPLIT_PASSES if (self.runs["kind"] > CODE[Kind.BACKWARD]).any() else PASSES
        assert np.isin(self.runs["kind"], [CODE[kind] for kind in passes]).all(), (
            "backwards are whole, or all are split"
        )
        count = self.microbatches - (self.middle.period * self.middle.rounds if self.middle else 0)
        short = {
            k: RunTable(self.runs[self.runs["kind"] == CODE[k]], stages, count) for k in passes
        }
        object.__setattr__(self, "short_tables", short)
        middle = self.middle
        object.__setattr__(
            self,
            "tables",
            {k: LongRunTable(t, middle) for k, t in short.items()} if middle else short,
        )

    @property
    def passes(self) -> tuple[Kind, ...]:
        """The passes of every microbatch on every stage."""
        return tuple(self.tables)

    @property
    def end_slot(self) -> int:
        return self.first_slot + self.repeats * self.slots

    @property
    def end_microbatch(self) -> int:
        return self.first_microbatch + self.repeats * self.microbatches

    def lengthen(self, more: int, period: int) -> Stretch:
        """Return the stretch with `more` microbatches, by repeating its steady middle of `period`
        microbatches.
        """
        first = self.microbatches // 2
        cut, end = (
            self.tables[Kind.FORWARD]
            .find_slots(np.array([first, first + period]), slice(0, 1))[0]
            .tolist()
        )
        middle = Middle(cut, end - cut, period, more // period)
        longer = self.slots + middle.span * middle.rounds
        return replace(self, microbatches=self.microbatches + more, slots=longer, middle=middle)

    def spell_out_middle(self) -> Stretch:
        """Return an equivalent shorter stretch without a middle, for a proof.

        The rounds in which a microbatch passes the middles of two stages differ at most as much as
        the beginnings of these middles. A property that holds for enough rounds to cover all such
        differences holds for any number of rounds.
        """
        if self.middle is None:
            return self
        begins = np.concatenate(
            [table.begin for table in self.tables.values() if isinstance(table, LongRunTable)]
        )
        rounds = min(
            self.middle.rounds,
            2 + -(-int(begins.max() - begins.min()) // self.middle.period),
        )
        dropped = self.middle.rounds - rounds
        short = replace(
            self,
            middle=self.middle._replace(rounds=rounds),
            slots=self.slots - dropped * self.middle.span,
            microbatches=self.microbatches - dropped * self.middle.period,
        )
        index = np.arange(short.microbatches)
        slots = {kind: table.find_slots(index) for kind, table in short.tables.items()}
        return replace(short, middle=None, runs=np.array(list(compress_slots(slots)), RUN))

    def find_slots(self, kind: Kind, index: IntArray, stages: slice = ALL_STAGES) -> IntArray:
        """Return the schedule's slots (P, n) of the microbatches `index`, (n,), which are all in
        this stretch.
        """
        repeat, local = np.divmod(index - self.first_microbatch, self.microbatches)
        return self.tables[kind].find_slots(local, stages) + (self.first_slot + repeat * self.slots)

    def count_before(self, kind: Kind, slot: IntArray, stages: slice = ALL_STAGES) -> IntArray:
        """Count the `kind` on each stage (P, n) in this stretch before the schedule's slots
        `slot`.
        """
        inside = np.clip(slot - self.first_slot, 0, self.repeats * self.slots)
        if self.repeats == 1:
            return self.tables[kind].count_before(inside, stages)
        repeat, inside = np.divmod(inside, self.slots)
        return repeat * self.microbatches + self.tables[kind].count_before(inside, stages)


def find_slots(
    stretches: Sequence[Stretch], kind: Kind, index: IntArray, stages: slice
) -> IntArray | None:
    """Return the slots (P, n) of the microbatches `index`, (n,) and ascending, over all stretches;
    None if n is 0.
    """
    stops = np.searchsorted(index, np.array([stretch.end_microbatch for stretch in stretches]))
    columns = []
    start = 0
    for stretch, stop in zip(stretches, stops):
        if stop > start:
            columns.append(stretch.find_slots(kind, index[start:stop], stages))
        start = max(start, stop)
    if not columns:
        return None
    return columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)


def count_before(
    stretches: Sequence[Stretch], kind: Kind, slot: IntArray, stages: slice, height: int
) -> IntArray:
    """Count the `kind` on each of the `height` stages (P, n) before the slots `slot`, (n,) or (P,
    n).
    """
    lowest = int(slot.min())
    highest = int(slot.max())
    done = sum(
        stretch.repeats * stretch.microbatches
        for stretch in stretches
        if stretch.end_slot <= lowest
    )
    total = np.full((height, slot.shape[-1]), done, np.int64)
    for stretch in stretches:
        if stretch.end_slot > lowest and stretch.first_slot < highest:
            total += stretch.count_before(kind, slot, stages)
    return total


def fill_grid(
    stretch: Stretch, kind: Kind, first_slot: int, last_slot: int, stages: slice, grid: GridArray
) -> None:
    """Write the microbatches of `kind` in the slots [first_slot, last_slot), all inside `stretch`,
    into `grid`.
    """
    if stretch.repeats > 1:
        one_repeat = np.full((grid.shape[0], stretch.slots), -1, np.int32)
        stretch.tables[kind].fill_grid(0, stretch.slots, stages, one_repeat)
        repeat, column = np.divmod(
            np.arange(first_slot, last_slot) - stretch.first_slot, stretch.slots
        )
        np.take(one_repeat, column, axis=1, out=grid)
        shift = (stretch.first_microbatch + repeat * stretch.microbatches).astype(np.int32)
        np.add(grid, shift, out=grid, where=grid >= 0)
    else:
        stretch.tables[kind].fill_grid(
            first_slot - stretch.first_slot, last_slot - stretch.first_slot, stages, grid
        )
        if stretch.first_microbatch:
            np.add(grid, np.int32(stretch.first_microbatch), out=grid, where=grid >= 0)


def count_most_in_flight(stretch: Stretch) -> IntArray:
    """Return the most microbatches (P,) between their forward and their last pass on each stage.

    Between two ends of runs the number only grows or only falls, so the ends are enough.
    """
    # the middle does not need to be counted: no round holds more
    forward = stretch.short_tables[Kind.FORWARD]
    backward = stretch.short_tables[stretch.passes[-1]]
    last = int(forward.count[0].sum()) - 1
    if forward.is_in_order():
        ends = np.concatenate([backward.low, backward.high + 1, forward.low], axis=1)
        next_forward = forward.count_before(ends)
        around = np.concatenate([next_forward - 1, next_forward], axis=1)
        slots = forward.find_slots(np.clip(around, 0, last)) + 1
    # rows written by hand may have forwards in any order
    else:
        slots = forward.find_slots(np.arange(last + 1)) + 1
    in_flight = forward.count_before(slots) - backward.count_before(slots - 1)
    return np.asarray(in_flight.max(axis=1))


def compress_slots(slots: dict[Kind, IntArray]) -> Iterator[tuple[int, ...]]:
    """Yield the slots (P, M) of each kind as runs (dtype RUN), each as long as its slots stay
    affine.
    """
    for kind, table in slots.items():
        for stage, row in enumerate(table):
            steps = np.diff(row)
            # a run ends before the first step that differs
            changes = np.flatnonzero(np.diff(steps)) + 1
            first = 0
            while first < len(row):
                later = changes[np.searchsorted(changes, first, side="right") :]
                last = int(later[0]) + 1 if len(later) else len(row)
                step = int(steps[first]) if first + 1 < len(row) else 1
                yield stage, CODE[kind], first, last - first, int(row[first]), step
                first = last
