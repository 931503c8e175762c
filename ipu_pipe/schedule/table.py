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

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Dict, List, Optional, Tuple

import numpy as np

from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.proof import check_parts, check_update_order
from ipu_pipe.schedule.runs import (
    ALL_STAGES,
    GridArray,
    IntArray,
    Stretch,
    done_before,
    fill,
    most_in_flight,
    slots_at,
)


class SlotHolds(Enum):
    """What a device can do in one slot."""

    ONE = "one"  # one pass
    BOTH = "both"  # a forward and, after it, a backward, whole or one half of it


@dataclass(frozen=True, eq=False)
class Schedule:
    """Who does what when, for P `stages`, M `microbatches` and an update every N = `accumulate` microbatches.

    Updates are not listed: U(k) follows the pass that completes batch k, in the same slot; a last batch that is not full has
    none. `local`: no backward needs one of another stage. `placement`: the device of each stage; empty: each stage has the
    device of its number. Parts follow one another without a gap. Making one proves that it can run, on the compact form, or
    raises BadInput naming the action that cannot be where it is.
    """

    stages: int
    microbatches: int
    accumulate: int
    slot_holds: SlotHolds
    parts: Tuple[Stretch, ...]
    local: bool = False
    placement: Tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.placement and len(self.placement) != self.stages:
            raise BadInput(
                f"schedule: placement: {len(self.placement)} devices: must be one for each of {self.stages} stages"
            )
        both = self.slot_holds is SlotHolds.BOTH
        check_parts(self.parts, self.stages, self.microbatches, both, self.local, self.placement)
        if not self.in_order:
            check_update_order(self.slots(Kind.UPDATE, 0, self.update_count))

    # --- sizes

    @property
    def passes(self) -> Tuple[Kind, ...]:
        """Of every microbatch on every stage: its forward and backward, or the forward and the two halves of the backward."""
        return self.parts[0].passes

    @property
    def slot_count(self) -> int:
        """Slots from the first pass to the last."""
        return self.parts[-1].end_slot

    @property
    def update_count(self) -> int:
        """Updates of every stage in the whole run: full batches only."""
        return self.microbatches // self.accumulate

    @property
    def device_of_stage(self) -> Tuple[int, ...]:
        """The device on which each stage is."""
        return self.placement or tuple(range(self.stages))

    @property
    def slot_capacity(self) -> int:
        """Passes that a device can do in a slot: 1, or 2 where a slot holds both."""
        return 2 if self.slot_holds is SlotHolds.BOTH else 1

    def busy_share(self, first_slot: int = 0, last_slot: Optional[int] = None) -> float:
        """The share of devices' time spent in passes within the slots [first_slot, last_slot), by default all."""
        end = self.slot_count if last_slot is None else last_slot
        edges = np.array([first_slot, end])
        done = sum(int(np.diff(self.count_before(kind, edges)).sum()) for kind in self.passes)
        return done / (len(set(self.device_of_stage)) * (end - first_slot) * self.slot_capacity)

    @cached_property
    def in_order(self) -> bool:
        """Whether every stage completes the microbatches in their order (only hand-written rows may not)."""
        return all(part.pieces[self.passes[-1]].ascends() for part in self.parts)

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
            return self._at(kind, np.arange(first, last), stages)
        if self.in_order:
            return self._at(self.passes[-1], np.arange(first + 1, last + 1) * self.accumulate - 1, stages)
        ends = self.slots(self.passes[-1], first * self.accumulate, last * self.accumulate, stages)
        batches = ends.reshape(ends.shape[0], last - first, self.accumulate)
        completed: IntArray = batches.max(axis=2, initial=0)
        return completed

    def _at(self, kind: Kind, index: IntArray, stages: slice) -> IntArray:
        assert len(index) == 0 or (0 <= index[0] and index[-1] < self.microbatches), "microbatch out of range"
        found = slots_at(self.parts, kind, index, stages)
        return np.zeros((len(range(*stages.indices(self.stages))), 0), np.int64) if found is None else found

    def count_before(self, kind: Kind, slot: IntArray, stages: slice = ALL_STAGES) -> IntArray:
        """How many of the `kind` each stage has done (P, n) before the slots `slot`, (n,) or a row a stage (P, n)."""
        if kind is Kind.UPDATE:
            return self._updates_before(slot, stages)
        return done_before(self.parts, kind, slot, stages, len(range(*stages.indices(self.stages))))

    def _updates_before(self, slot: IntArray, stages: slice) -> IntArray:
        if self.in_order:
            ended = self.count_before(self.passes[-1], slot, stages)
            return ended if self.accumulate == 1 else ended // self.accumulate
        made = self.slots(Kind.UPDATE, 0, self.update_count, stages)
        asked = np.broadcast_to(slot, (made.shape[0], slot.shape[-1]))
        return np.stack([np.searchsorted(row, ask) for row, ask in zip(made, asked)]).astype(np.int64)

    # --- spelled out

    def spell_out(self, first_slot: int, last_slot: int, stages: slice = ALL_STAGES) -> Dict[Kind, GridArray]:
        """By kind, the microbatch whose pass every stage does in the slots [first_slot, last_slot), -1 for none; (P, slots)."""
        height, width = len(range(*stages.indices(self.stages))), last_slot - first_slot
        grids = {kind: np.full((height, width), -1, np.int32) for kind in self.passes}
        for part in self.parts:
            start, stop = max(first_slot, part.first_slot), min(last_slot, part.end_slot)
            if start < stop:
                for kind, grid in grids.items():
                    fill(part, kind, start, stop, stages, grid[:, start - first_slot : stop - first_slot])
        return grids

    def update_grid(self, first_slot: int, last_slot: int, stages: slice = ALL_STAGES) -> GridArray:
        """The update that every stage makes in the slots [first_slot, last_slot), -1 for none; (P, slots)."""
        height = len(range(*stages.indices(self.stages)))
        grid = np.full((height, last_slot - first_slot), -1, np.int32)
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
        grids = self.spell_out(first_slot, end, slice(stage, stage + 1))
        words = ([f"{kind.value}{m}" if m >= 0 else "" for m in grid[0].tolist()] for kind, grid in grids.items())
        return [" ".join(filter(None, cell)) or None for cell in zip(*words)]

    # --- activations

    def max_in_flight(self) -> IntArray:
        """The most microbatches (P,) between their forward and their last pass on a stage at once.

        Counted right after a forward; where a slot holds two passes, before that slot's other one.
        """
        return np.asarray(np.max([most_in_flight(part) for part in self.parts], axis=0))
