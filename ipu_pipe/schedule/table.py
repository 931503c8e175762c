"""Schedules as frozen, checked data: the stage and the slot of each pass of each microbatch.

A schedule of thousands of stages and microbatches needs no memory, because the slot of microbatch m
is a formula of it. PipeDream on three stages; stage 0 fills the pipeline (F+), then alternates:

    slot     0   1   2   3   4   5   6   7   8   9   10  11
    stage 0  F0  F1  F2  .   .   B0* F3  B1* F4  B2* F5  ...      F+  m = 0, 1, 2   in slot m
    stage 1  .   F0  F1  F2  B0* .   B1* F3  B2* F4  B3* ...      F   m = 3, 4, ... in slot 2m
    stage 2  .   .   F0  B0* F1  B1* F2  B2* F3  B3* F4  ...      B   m = 0, 1, ... in slot 2m + 5

* an update follows. A *stretch* is the part of a schedule from one empty pipeline to the next.

Slots, stages, microbatches and updates count from 0. Symbols: P stages, M microbatches, N
microbatches per update.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.actions import PASSES, Action, Kind, get_pass_needs
from ipu_pipe.schedule.drawing import ReadVersions, draw_html
from ipu_pipe.schedule.stretches import (
    ALL_STAGES,
    GridArray,
    IntArray,
    LaidOut,
    Stretch,
    count_before,
    join,
)


class SlotHolds(Enum):
    """The passes that a device can do in one slot: ONE pass, or BOTH a forward and then a backward
    (whole or one half).
    """

    ONE = "one"
    BOTH = "both"


def list_stages(placement: Sequence[int], device: int) -> list[int]:
    """Return the stages of a device."""
    return [stage for stage, other in enumerate(placement) if other == device]


@dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """A schedule of P `stages` and M `microbatches` with an update every N = `accumulate`
    microbatches.

    Updates are not listed: U(k) follows the pass that completes batch k, in the same slot; an
    incomplete last batch has none. `stretches`, from an empty pipeline to an empty one, follow one
    another without a gap. `local`: no backward needs a backward of another stage. `placement`: the
    device of each stage; empty: stage s is on device s. `name`: that of its method.
    `read_versions`: of a table of this schedule's weight versions, for its drawing in a notebook.
    Raise `BadInput`, naming the action, unless rows that are laid out can run. The formulas of
    `timelines.py` are proved by the tests, against a policy that is played slot by slot.
    """

    stages: int
    microbatches: int
    accumulate: int
    slot_holds: SlotHolds
    stretches: tuple[Stretch, ...]
    local: bool = False
    placement: tuple[int, ...] = ()
    name: str = "rows"
    read_versions: ReadVersions | None = None

    def __repr__(self) -> str:
        """Return the sizes: the dataclass's own text would be the tables of all stretches."""
        sizes = (
            f"{self.stages} stages, {self.microbatches} microbatches, accumulate {self.accumulate}"
        )
        return f"Schedule({self.name}, {sizes}, {self.slot_count} slots)"

    def __post_init__(self) -> None:
        if self.placement and len(self.placement) != self.stages:
            raise BadInput(
                f"schedule: placement: {len(self.placement)} devices: must be one for each of "
                f"{self.stages} stages"
            )
        slot = 0
        microbatch = 0
        distinct: dict[int, Stretch] = {}
        for stretch in self.stretches:
            assert stretch.first_slot == slot and stretch.first_microbatch == microbatch, (
                "stretches follow without a gap"
            )
            assert stretch.repeats >= 1 and stretch.microbatches >= 1
            slot = stretch.end_slot
            microbatch = stretch.end_microbatch
            # the tests prove the formulas, unless a caller places them on fewer devices
            if isinstance(stretch.find, LaidOut) or self.placement:
                # repetitions share one table, which is proved once
                distinct[id(stretch.find)] = stretch
        assert microbatch == self.microbatches, "stretches hold all microbatches"
        assert len({stretch.passes for stretch in self.stretches}) == 1, (
            "backwards are whole, or all are split"
        )
        both = self.slot_holds is SlotHolds.BOTH
        for stretch in distinct.values():
            # in this order: each proof needs that the one before has found no fault
            fault = _find_missing(stretch, self.stages)
            tables = {} if fault else stretch.spell_out(self.stages)
            fault = fault or _find_disorder(stretch, tables, both, self.local)
            fault = fault or _find_collision(stretch, tables, both, self.device_of_stage)
            if fault:
                raise BadInput(f"schedule: {fault}")
        # in the order of microbatches no batch can end before an earlier one
        if not self.in_order:
            self._require_updates_in_time()

    def _require_updates_in_time(self) -> None:
        """Raise `BadInput` if a stage would complete a batch after the next one."""
        for stretch in self.stretches:
            # a batch may lie in several repetitions, which begin at the same place of a batch again
            # after this many
            repeats = min(stretch.repeats, self.accumulate + 1)
            first = stretch.first_microbatch // self.accumulate
            last = (stretch.first_microbatch + repeats * stretch.microbatches) // self.accumulate
            slots = self.slots(Kind.UPDATE, first, last)
            late = slots[:, 1:] <= slots[:, :-1]
            if late.any():
                stage, k = _locate_first(late)
                names = f"U{first + k} on stage {stage} would come after U{first + k + 1}"
                raise BadInput(f"schedule: {names}: batches must be completed in order")

    # ---- sizes

    @property
    def passes(self) -> tuple[Kind, ...]:
        """The passes of every microbatch on every stage: PASSES or SPLIT_PASSES."""
        return self.stretches[0].passes

    @property
    def slot_count(self) -> int:
        """The number of slots from the first pass to the last."""
        return self.stretches[-1].end_slot

    @property
    def update_count(self) -> int:
        """The updates of every stage in the whole run, for full batches only."""
        return self.microbatches // self.accumulate

    @cached_property
    def is_whole(self) -> NDArray[np.bool_]:
        """The backwards (P, M) that are one pass in a schedule of split backwards."""
        return self.find_whole(np.arange(self.microbatches))

    def find_whole(self, microbatch: IntArray, stages: slice = ALL_STAGES) -> NDArray[np.bool_]:
        """Return which backwards (P, n) of these microbatches, (n,), are one pass in a schedule of
        split backwards.
        """
        height = len(range(*stages.indices(self.stages)))
        is_whole = np.zeros((height, len(microbatch)), np.bool_)
        for stretch in self.stretches:
            inside = (stretch.first_microbatch <= microbatch) & (
                microbatch < stretch.end_microbatch
            )
            if stretch.whole is not None and inside.any():
                local = (microbatch[inside] - stretch.first_microbatch) % stretch.microbatches
                is_whole[:, inside] = stretch.whole[stages][:, local]
        return is_whole

    @property
    def device_of_stage(self) -> tuple[int, ...]:
        """The device of each stage."""
        return self.placement or tuple(range(self.stages))

    @property
    def slot_capacity(self) -> int:
        """The passes that a device can do in a slot: 1, or 2 if a slot holds both."""
        return 2 if self.slot_holds is SlotHolds.BOTH else 1

    def busy_share(self, first_slot: int = 0, last_slot: int | None = None) -> float:
        """Return the share of devices' time spent in passes within the slots [first_slot,
        last_slot), by default all.
        """
        end = self.slot_count if last_slot is None else last_slot
        edges = np.array([first_slot, end])
        done = sum(int(np.diff(self.count_before(kind, edges)).sum()) for kind in self.passes)
        return done / (len(set(self.device_of_stage)) * (end - first_slot) * self.slot_capacity)

    @cached_property
    def in_order(self) -> bool:
        """Whether every stage completes the microbatches in order; only rows of a file may not."""
        return self.keeps_order(self.passes[-1])

    def keeps_order(self, kind: Kind) -> bool:
        """Return whether every stage does a pass in the order of microbatches."""
        return all(kind in stretch.ordered for stretch in self.stretches)

    def _index(self, stages: slice) -> IntArray:
        return np.arange(self.stages)[stages, None]  # (P, 1)

    def get_drain_interval(self, k: int) -> tuple[int, int]:
        """Return the range [first, end) of updates between the drains before and after update k.

        It is only update k if the pipeline drains within its batch.
        """
        N = self.accumulate
        for stretch in self.stretches:
            if stretch.first_microbatch <= k * N < stretch.end_microbatch:
                updates = max(stretch.microbatches // N, 1)
                first = stretch.first_microbatch // N
                first += (k - first) // updates * updates
                return first, first + updates
        raise AssertionError(f"no update {k}")

    def find_drains(self, microbatch: IntArray) -> IntArray:
        """Return, for each microbatch (n,), the first one after the drain before it."""
        begin = np.zeros_like(microbatch)
        for stretch in self.stretches:
            inside = (stretch.first_microbatch <= microbatch) & (
                microbatch < stretch.end_microbatch
            )
            begin[inside] = (
                microbatch[inside]
                - (microbatch[inside] - stretch.first_microbatch) % stretch.microbatches
            )
        return begin

    # ---- microbatch -> slot and back

    def slots(self, kind: Kind, first: int, last: int, stages: slice = ALL_STAGES) -> IntArray:
        """Return the slots (P, last - first) of the `kind` of microbatches (for UPDATE: updates)
        [first, last).
        """
        if kind is not Kind.UPDATE:
            return self._find_slots(kind, np.arange(first, last), stages)
        if self.in_order:
            # an update follows the last microbatch of its batch
            return self._find_slots(
                self.passes[-1], np.arange(first + 1, last + 1) * self.accumulate - 1, stages
            )
        ends = self.slots(self.passes[-1], first * self.accumulate, last * self.accumulate, stages)
        batches = ends.reshape(ends.shape[0], last - first, self.accumulate)
        completed: IntArray = batches.max(axis=2, initial=0)
        return completed

    def _find_slots(self, kind: Kind, index: IntArray, stages: slice) -> IntArray:
        assert len(index) == 0 or (0 <= index[0] and index[-1] < self.microbatches), (
            "microbatch out of range"
        )
        return join(self.stretches, kind, index, self._index(stages))

    def count_before(self, kind: Kind, slot: IntArray, stages: slice = ALL_STAGES) -> IntArray:
        """Count the `kind` on each stage (P, n) before the slots `slot`, (n,) or a row per stage
        (P, n).
        """
        if kind is not Kind.UPDATE:
            return count_before(self.stretches, kind, slot, self._index(stages))
        # out of order this is only a bound: passes of several batches may be done in part
        ended = self.count_before(self.passes[-1], slot, stages) // self.accumulate
        if self.in_order or not ended.size or not self.update_count:
            return ended
        # of the stretch that is running at the first slot: all updates of earlier stretches are
        # made
        first = self.get_drain_interval(min(int(ended.min()), self.update_count - 1))[0]
        updates = self.slots(
            Kind.UPDATE, first, min(int(ended.max()) + 1, self.update_count), stages
        )
        slot_rows = np.broadcast_to(slot, (updates.shape[0], slot.shape[-1]))
        counts = np.stack([np.searchsorted(row, slots) for row, slots in zip(updates, slot_rows)])
        return first + counts.astype(np.int64)

    # ---- slots as grids

    def spell_out(
        self, first_slot: int, last_slot: int, stages: slice = ALL_STAGES
    ) -> dict[Kind, GridArray]:
        """Return, by kind, the microbatch of every stage in the slots [first_slot, last_slot), (P,
        slots), -1 for none.
        """
        ends = np.array([first_slot, last_slot])
        grids = {}
        for kind in self.passes:
            count = self.count_before(kind, ends, stages)
            # from the stage that is furthest behind to the one furthest ahead
            first = int(count[:, 0].min())
            last = int(count[:, 1].max())
            if not self.keeps_order(kind):
                # counts do not tell which microbatches have run
                first, last = self._find_window(ends)
            grids[kind] = self._scatter(
                self.slots(kind, first, last, stages), first, first_slot, last_slot
            )
        return grids

    def _find_window(self, ends: IntArray) -> tuple[int, int]:
        """Return the microbatches of the stretches that run between two slots."""
        inside = [s for s in self.stretches if s.end_slot > ends[0] and s.first_slot < ends[1]]
        return (inside[0].first_microbatch, inside[-1].end_microbatch) if inside else (0, 0)

    def _scatter(self, slots: IntArray, first: int, first_slot: int, last_slot: int) -> GridArray:
        """Return the numbers from `first` on at their slots, (P, last_slot - first_slot)."""
        grid = np.full((len(slots), last_slot - first_slot), -1, np.int32)
        # rows may reach beyond the window, since stages do a microbatch at different times
        row, column = np.nonzero((slots >= first_slot) & (slots < last_slot))
        grid[row, slots[row, column] - first_slot] = first + column
        return grid

    def update_grid(self, first_slot: int, last_slot: int, stages: slice = ALL_STAGES) -> GridArray:
        """Return the update that every stage makes in the slots [first_slot, last_slot), (P,
        slots), -1 for none.
        """
        counts = self.count_before(Kind.UPDATE, np.array([first_slot, last_slot]), stages)
        first = int(counts[:, 0].min())
        last = int(counts[:, 1].max())
        return self._scatter(
            self.slots(Kind.UPDATE, first, last, stages), first, first_slot, last_slot
        )

    def cells(
        self, stage: int, first_slot: int = 0, last_slot: int | None = None
    ) -> list[str | None]:
        """Return one stage's slots as text: "F0", "B3", "F5 B2" for a slot with both, None for an
        idle slot.
        """
        end = self.slot_count if last_slot is None else last_slot
        grids = self.spell_out(first_slot, end, slice(stage, stage + 1))
        if any(stretch.whole is not None for stretch in self.stretches):
            # the appended entry is for idle slots, whose microbatch is -1
            is_whole = np.append(self.is_whole[stage], False)
            first_half = grids[Kind.INPUT_GRADIENT]
            grids = {
                kind: np.where(is_whole[grid] & (kind is not Kind.FORWARD), -1, grid)
                for kind, grid in grids.items()
            }
            # a whole backward is drawn in the first of its slots
            grids[Kind.BACKWARD] = np.where(is_whole[first_half], first_half, -1)
        words = (
            [f"{kind.value}{m}" if m >= 0 else "" for m in grid[0].tolist()]
            for kind, grid in grids.items()
        )
        return [" ".join(filter(None, cell)) or None for cell in zip(*words)]

    def _repr_html_(self) -> str:
        return draw_html(self, self.read_versions)

    # ---- activations

    def peak_activations(
        self, weight_share: float = 1.0, sizes: Sequence[float] = (), placement: Sequence[int] = ()
    ) -> list[float]:
        """Return the peak activations of each device, in microbatches of all its stages.

        A forward adds its stage's share and a whole backward frees it. Of a split backward the
        input gradient frees all but `weight_share` of it, and the weight gradient the rest. In a
        slot with two passes the forward is first. `sizes`: the size of a microbatch on each stage,
        instead of equal shares; `placement`: the device of each stage, instead of the schedule's
        own.
        """
        counts = self.count_at_peak(weight_share, sizes, placement)
        device_of = tuple(placement) or self.device_of_stage
        share = list(sizes) or [1 / device_of.count(device) for device in device_of]
        return [
            sum(counts[s] * share[s] for s in list_stages(device_of, device))
            for device in sorted(set(device_of))
        ]

    def count_at_peak(
        self, weight_share: float = 1.0, sizes: Sequence[float] = (), placement: Sequence[int] = ()
    ) -> list[float]:
        """Return the microbatches of each stage at its device's peak; arguments as in
        `peak_activations`.
        """
        changes = dict.fromkeys(self.passes, -1.0)
        if len(self.passes) > len(PASSES):
            changes = {self.passes[1]: weight_share - 1, self.passes[2]: -weight_share}
        changes[Kind.FORWARD] = 1.0
        device_of = tuple(placement) or self.device_of_stage
        share = list(sizes) or [1 / device_of.count(device) for device in device_of]
        peaks = dict.fromkeys(device_of, 0.0)
        counts = [0.0] * self.stages
        # a stretch is in its steady state long before `reach`; stretches of equal length and slots
        # are equal
        reach = 2 * int(self.max_in_flight().max()) + 4 * (self.stages + self.accumulate)
        for stretch in {
            (stretch.microbatches, stretch.slots): stretch for stretch in self.stretches
        }.values():
            first = stretch.first_microbatch
            last = first + min(reach, stretch.microbatches)
            # the second moment of a slot is for the pass after the forward
            moments = [
                2 * self.slots(kind, first, last) + (kind is not Kind.FORWARD)
                for kind in self.passes
            ]
            for device in peaks:
                stages = list_stages(device_of, device)
                moment = np.concatenate([table[stages].ravel() for table in moments])
                change = np.concatenate(
                    [
                        np.repeat([changes[kind] * share[stage] for stage in stages], last - first)
                        for kind in self.passes
                    ]
                )
                order = np.argsort(moment, kind="stable")
                load = np.cumsum(change[order])
                peak = int(load.argmax())
                if load[peak] > peaks[device]:
                    # the passes up to the peak, each as kind * stages + row of its stage
                    peaks[device], before = float(load[peak]), order[: peak + 1] // (last - first)
                    for row, stage in enumerate(stages):
                        done = np.bincount(
                            before[before % len(stages) == row] // len(stages),
                            minlength=len(self.passes),
                        )
                        counts[stage] = sum(
                            changes[kind] * int(n) for kind, n in zip(self.passes, done)
                        )
        return counts

    def max_in_flight(self) -> IntArray:
        """Return the peak number of microbatches (P,) between their forward and their last pass on
        a stage.

        They are counted right after a forward; in a slot with two passes before the second one.
        """
        stages = np.arange(self.stages)[:, None]
        peaks = []
        for stretch in {(s.microbatches, s.slots): s for s in self.stretches}.values():
            index = stretch.list_ends(self.stages) + stretch.first_microbatch
            slots = stretch.find_slots(Kind.FORWARD, index, stages) + 1
            begun = stretch.count_before(Kind.FORWARD, slots, stages)
            peaks.append(
                (begun - stretch.count_before(self.passes[-1], slots - 1, stages)).max(axis=1)
            )
        return np.asarray(np.max(peaks, axis=0))


# ---- the proof that a laid-out schedule can run: pass by pass, with enough rounds of its middle


def _find_missing(stretch: Stretch, stages: int) -> str | None:
    """Return a fault unless there is a row for every stage, within the stretch's slots."""
    tables = stretch.find.tables if isinstance(stretch.find, LaidOut) else {}
    for kind, table in tables.items():
        if len(table) > stages:
            return f"{Action(kind, 0, len(table) - 1)}: there are {stages} stages, counted from 0"
        if len(table) < stages:
            return f"{Action(kind, stretch.first_microbatch, stages - 1)} is missing"
        outside = (table < 0) | (table >= stretch.slots)
        if outside.any():
            stage, m = _locate_first(outside)
            action = Action(kind, stretch.first_microbatch + m, stage)
            return f"{action} is outside its stretch of {stretch.slots} slots"
    return None


def _find_disorder(
    stretch: Stretch, tables: Mapping[Kind, IntArray], both: bool, local: bool
) -> str | None:
    """Return a fault unless every pass comes after its needs."""
    for kind, table in tables.items():
        for need, offset in get_pass_needs(kind, local):
            # only stages that have the neighbour which they need
            low = max(0, -offset)
            high = len(table) - max(0, offset)
            slot = table[low:high]
            needed = tables[need][low + offset : high + offset]
            # the two passes of a slot run one after the other
            wrong = slot < needed if both and offset == 0 else slot <= needed
            if wrong.any():
                row, m = _locate_first(wrong)
                action = Action(kind, stretch.first_microbatch + m, low + row)
                before = Action(need, stretch.first_microbatch + m, low + row + offset)
                return (
                    f"{action} is in slot {stretch.first_slot + int(slot[row, m])}, but needs "
                    f"{before}, which is in slot {stretch.first_slot + int(needed[row, m])}"
                )
    return None


def _find_collision(
    stretch: Stretch, tables: Mapping[Kind, IntArray], both: bool, placement: Sequence[int]
) -> str | None:
    """Return a fault unless a slot holds at most one action of a device, or a forward and one other
    pass.
    """
    if not tables:
        return None
    forward, *others = tables.values()
    for group in [[forward], others] if both else [[forward, *others]]:
        for device in sorted(set(placement)):
            slots = np.sort(
                np.concatenate([t[list_stages(placement, device)].ravel() for t in group])
            )
            twice = slots[1:][slots[1:] == slots[:-1]]  # sorted: equal ones are neighbours
            if len(twice):
                who = "stage" if len(set(placement)) == len(placement) else "device"
                return (
                    f"{who} {device} has two actions in slot {stretch.first_slot + int(twice[0])}"
                )
    return None


def _locate_first(mask: NDArray[np.bool_]) -> tuple[int, int]:
    """Return row and column of the first true cell."""
    row, column = np.unravel_index(int(np.argmax(mask)), mask.shape)
    return int(row), int(column)
