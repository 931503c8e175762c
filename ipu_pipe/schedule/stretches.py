"""The compact form of a schedule: stretches, each from an empty pipeline to an empty one, whose
slots are functions of stage and microbatch.

A pipeline that follows a rule has a formula (`Slots`); one that is laid out pass by pass has a
table, whose steady middle is repeated (`LaidOut`). Both answer the same question. Counts, grids and
peaks follow from it by bisection, so that a schedule of any length needs no memory.

    1F1B on P stages    F(s, m)  s + m     while m < P - s
                                 s + 2 m   then
                        B(s, m)  2 P - 1 - s + 2 m
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Callable, Mapping, NamedTuple, Sequence

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.schedule.actions import PASSES, Kind

IntArray = NDArray[np.int64]
GridArray = NDArray[np.int32]
ALL_STAGES = slice(None)

# (kind, stages (P, 1), microbatches (n,) or (P, n)) -> slots (P, n), from the stretch's start on
Slots = Callable[[Kind, IntArray, IntArray], IntArray]


class Middle(NamedTuple):
    """The steady part of a table, repeated `rounds` more times: `span` slots and `period`
    microbatches; stage s enters it with microbatch `begin[kind][s]`, (P, 1).
    """

    begin: Mapping[Kind, IntArray]
    span: int
    period: int
    rounds: int


@dataclass(frozen=True, eq=False)
class LaidOut:
    """The slots of passes that are laid out one by one: by kind a table (P, microbatches)."""

    tables: Mapping[Kind, IntArray]
    middle: Middle | None = None

    def __call__(self, kind: Kind, stages: IntArray, m: IntArray) -> IntArray:
        """Return slots, as a `Slots`."""
        if self.middle is None:
            return self.tables[kind][stages, m]
        begin, span, period, most = self.middle
        # before the middle there is no round, and after it all of them
        rounds = np.clip((m - begin[kind][stages[:, 0]]) // period, 0, most)
        return self.tables[kind][stages, m - rounds * period] + rounds * span


@dataclass(frozen=True, eq=False)
class Stretch:
    """The passes of a pipeline from empty to empty, `repeats` times in a row, each of `slots` slots
    and `microbatches` microbatches.

    `whole`: marks, among split backwards, those (P, microbatches) that are one pass of two slots;
    None: there are none.
    """

    first_slot: int
    first_microbatch: int
    repeats: int
    slots: int
    microbatches: int
    find: Slots
    passes: tuple[Kind, ...] = PASSES
    whole: NDArray[np.bool_] | None = None

    @property
    def end_slot(self) -> int:
        return self.first_slot + self.repeats * self.slots

    @property
    def end_microbatch(self) -> int:
        return self.first_microbatch + self.repeats * self.microbatches

    @cached_property
    def ordered(self) -> frozenset[Kind]:
        """The passes that every stage does in the order of microbatches: all of a formula."""
        if not isinstance(self.find, LaidOut):
            return frozenset(self.passes)
        return frozenset(k for k, t in self.find.tables.items() if (np.diff(t) > 0).all())

    def lengthen(self, more: int, period: int) -> Stretch:
        """Return a laid-out stretch with `more` microbatches, by repeating `period` microbatches of
        its middle.
        """
        assert isinstance(self.find, LaidOut) and len(self.ordered) == len(self.passes)
        tables = self.find.tables
        # half-way the pipeline has filled and has not begun to drain
        first = self.microbatches // 2
        cut, end = tables[Kind.FORWARD][0, [first, first + period]].tolist()
        begin = {k: (t < cut).sum(axis=1, keepdims=True) for k, t in tables.items()}
        after = {k: (t < end).sum(axis=1, keepdims=True) for k, t in tables.items()}
        assert all((after[k] - begin[k] == period).all() for k in tables), "in its steady state"
        middle = Middle(begin, end - cut, period, more // period)
        return replace(
            self,
            microbatches=self.microbatches + more,
            slots=self.slots + middle.span * middle.rounds,
            find=LaidOut(tables, middle),
        )

    def spell_out(self, stages: int) -> Mapping[Kind, IntArray]:
        """Return the slots, by kind (P, n), that prove what holds for all microbatches.

        Of a table these are all passes that are laid out, with as many rounds of a middle as the
        beginnings of two stages' middles may differ; of a formula the first and the last ones,
        where it has its pieces.
        """
        find = self.find
        index = self.list_ends(stages)
        if isinstance(find, LaidOut) and find.middle is None:
            return find.tables
        if isinstance(find, LaidOut) and find.middle is not None:
            middle = find.middle
            spread = int(np.ptp(np.concatenate(list(middle.begin.values()))))
            rounds = min(middle.rounds, 2 + -(-spread // middle.period))
            index = np.arange(self.microbatches - (middle.rounds - rounds) * middle.period)
            find = LaidOut(find.tables, middle._replace(rounds=rounds))
        return {kind: find(kind, np.arange(stages)[:, None], index) for kind in self.passes}

    def list_ends(self, stages: int) -> IntArray:
        """List the first and the last microbatches; between them nothing new happens."""
        size = self.microbatches
        # a table may have anything anywhere, a formula has its pieces near the ends
        is_table = isinstance(self.find, LaidOut) and self.find.middle is None
        reach = size if is_table else 4 * stages + 8
        return np.unique(np.clip([*range(reach), *range(size - reach, size)], 0, size - 1))

    def find_slots(self, kind: Kind, index: IntArray, stages: IntArray) -> IntArray:
        """Return the schedule's slots (P, n) of microbatches of this stretch, (n,) or (P, n)."""
        repeat, local = np.divmod(index - self.first_microbatch, self.microbatches)
        return self.find(kind, stages, local) + (self.first_slot + repeat * self.slots)

    def count_before(self, kind: Kind, slot: IntArray, stages: IntArray) -> IntArray:
        """Count the `kind` on each stage (P, n) in this stretch before the schedule's slots
        `slot`, (n,) or (P, n).
        """
        inside = np.clip(slot - self.first_slot, 0, self.repeats * self.slots)
        repeat, inside = np.divmod(inside, self.slots)
        inside = np.broadcast_to(inside, (len(stages), inside.shape[-1]))
        if kind not in self.ordered:
            # only rows of a file are out of order, and their tables have no repeated middle
            assert isinstance(self.find, LaidOut)
            rows = np.sort(self.find.tables[kind][stages[:, 0]], axis=1)
            done = np.stack([np.searchsorted(row, slots) for row, slots in zip(rows, inside)])
            return repeat * self.microbatches + done
        low = np.zeros(inside.shape, np.int64)
        # a pass takes a slot, so there are never more of them than slots
        high = np.minimum(inside, self.microbatches)
        while (low < high).any():
            half = (low + high) >> 1
            # a search that has ended may ask for one microbatch too many
            slots = self.find(kind, stages, np.minimum(half, self.microbatches - 1))
            is_before = (slots < inside) & (low < high)
            low = np.where(is_before, half + 1, low)
            high = np.where(is_before, high, half)
        return repeat * self.microbatches + low


def join(stretches: Sequence[Stretch], kind: Kind, index: IntArray, stages: IntArray) -> IntArray:
    """Return the slots (P, n) of the microbatches `index`, (n,) ascending, over all stretches."""
    stops = np.searchsorted(index, [stretch.end_microbatch for stretch in stretches])
    # ascending: each stretch has a run of them
    parts = np.split(index, stops[:-1])
    slots = [s.find_slots(kind, part, stages) for s, part in zip(stretches, parts) if len(part)]
    # a window may have no microbatches
    return np.concatenate([np.zeros((len(stages), 0), np.int64), *slots], axis=1)


def count_before(
    stretches: Sequence[Stretch], kind: Kind, slot: IntArray, stages: IntArray
) -> IntArray:
    """Count the `kind` on each stage (P, n) before the slots `slot`, (n,) or (P, n)."""
    lowest = int(slot.min())
    # most windows lie in one stretch of thousands
    past = [stretch for stretch in stretches if stretch.end_slot <= lowest]
    running = [s for s in stretches if s.end_slot > lowest and s.first_slot < slot.max()]
    done = sum(stretch.repeats * stretch.microbatches for stretch in past)
    total = np.full((len(stages), slot.shape[-1]), done, np.int64)
    for stretch in running:
        total += stretch.count_before(kind, slot, stages)
    return total
