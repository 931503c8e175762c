"""A stage's row of the schedule: its actions in order, some updates at a time, and the messages that they need.

Receives follow from what passes need (`pass_needs`); F(m) of stage s is sent when done to s + 1, B(m) to s - 1. Every wait is for
an action of an earlier slot, which the schedule was proved to have (`Schedule`), so ranks cannot wait in a circle.
"""

from __future__ import annotations

import functools
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import torch

from ipu_pipe.backends.processes.mail import (
    BACKWARD,
    FORWARD,
    NORM,
    ORDER,
    RECOMPUTE,
    SHARED,
    TIED,
    UPDATE,
    WEIGHTS,
    Message,
)
from ipu_pipe.backends.processes.place import Place
from ipu_pipe.backends.work import Work
from ipu_pipe.model.cutting import Shape
from ipu_pipe.schedule.actions import Kind, pass_needs
from ipu_pipe.schedule.recompute import find_segment_ends, find_segment_heads, recompute_slots
from ipu_pipe.schedule.runs import IntArray
from ipu_pipe.update.clipping import DelayedGlobalNorm

CHUNK = 512  # microbatches of which the row is spelled out at a time
NORM_SHAPE = (Shape((1,), torch.float64, False),)

Action = Tuple[str, int]  # kind, microbatch or update
Wanted = Tuple[Message, Tuple[Shape, ...]]


class Segments:
    """The segments of stages of which activations are recomputed."""

    def __init__(self, work: Work) -> None:
        depth, count = work.schedule.stages, work.method.segments
        self.recomputes = count is not None and work.method.reads_old(depth)
        self._heads = find_segment_heads(find_segment_ends(depth, count or 0))

    def is_head(self, stage: int) -> bool:
        """Whether a segment begins there."""
        return bool(self._heads[stage])


class Row:
    """The actions of one stage."""

    def __init__(self, work: Work, stage: int) -> None:
        self._work, self._stage, self._schedule = work, stage, work.schedule
        self._segments = Segments(work)
        self._source = work.source([0])

    def _slots(self, kind: Kind, first: int, last: int) -> IntArray:
        s = self._stage
        return self._schedule.slots(kind, first, last, slice(s, s + 1))[0]

    def _recompute_slots(self, first: int, last: int) -> IntArray:
        s = self._stage
        return recompute_slots(self._schedule, self._work.method, first, last, slice(s, s + 1))[0]

    def chunks(self, first: int) -> Iterator[List[Action]]:
        """The actions from microbatch `first` on, in order, some updates at a time: those after the last update of one chunk up
        to that of the next."""
        count, batch = self._schedule.microbatches, self._work.accumulate
        length = max(CHUNK // batch, 1) * batch
        ahead: Dict[str, Callable[[int, int], IntArray]] = {FORWARD: functools.partial(self._slots, Kind.FORWARD)}
        if self._segments.recomputes:
            ahead[RECOMPUTE] = self._recompute_slots
        begun = dict.fromkeys(ahead, first)
        for begin in range(first, count, length):
            end = min(begin + length, count)
            backward = self._slots(Kind.BACKWARD, begin, end)
            ends = np.flatnonzero(
                self._source.window(begin, end).updates[self._stage]
            )  # the replays that update this stage
            updates = self._source.made(begin)[self._stage] + np.arange(len(ends))
            parts = [(BACKWARD, backward, np.arange(begin, end)), (UPDATE, backward[ends], updates)]
            for kind, slots_of in ahead.items():
                most = min(end + self._source.reach, count)
                found = slots_of(begun[kind], most)
                taken = int(np.searchsorted(found, backward[-1], side="right"))
                assert taken < len(found) or most == count, "the reach is too short"
                parts.append((kind, found[:taken], np.arange(begun[kind], begun[kind] + taken)))
                begun[kind] += taken
            yield _in_order(parts)


def _in_order(parts: Sequence[Tuple[str, IntArray, IntArray]]) -> List[Action]:
    """Actions of several kinds, each (kind, slots, microbatches or updates), by slot and, within one, by kind."""
    table = np.concatenate([
        np.stack([slots, np.full_like(slots, ORDER.index(kind)), index], axis=1) for kind, slots, index in parts
    ])  # fmt: skip
    ordered = table[np.lexsort((table[:, 1], table[:, 0]))]
    return [(ORDER[order], index) for _, order, index in ordered.tolist()]


class Needs:
    """The messages that a stage's actions need."""

    def __init__(self, work: Work, place: Place, delayed: Optional[DelayedGlobalNorm]) -> None:
        self._place, self._stage, self._delayed = place, place.layout.stage, delayed
        self._is_head = Segments(work).is_head(self._stage)
        self._of_passes = {kind: self._of_pass(Kind(kind)) for kind in (FORWARD, RECOMPUTE, BACKWARD)}

    def messages(self, actions: Sequence[Action]) -> Dict[int, List[Wanted]]:
        """By the stage that sends them, in the order in which they are needed."""
        wanted: Dict[int, List[Wanted]] = {}
        for kind, index in actions:
            found = self._update(index) if kind == UPDATE else self._pass(kind, index)
            for source, message, shapes in found:
                wanted.setdefault(source, []).append((message, shapes))
        return wanted

    def _pass(self, kind: str, m: int) -> Iterator[Tuple[int, Message, Tuple[Shape, ...]]]:
        for source, shapes in self._of_passes[kind]:
            yield source, Message(kind, m), shapes
        if kind == BACKWARD:
            yield from self._place.ties.wanted(TIED, m)

    def _of_pass(self, kind: Kind) -> List[Tuple[int, Tuple[Shape, ...]]]:
        """The other stages whose pass of this kind comes before this stage's, and what each sends."""
        place, s = self._place, self._stage
        if kind is Kind.FORWARD and place.enter is None:
            return []  # the data: of the first stage, and of the second where they share a layer
        sources = [s + need.offset for need in pass_needs(kind, place.is_local, self._is_head) if need.offset]
        return [(source, self._crossing(kind, source)) for source in sources if 0 <= source < place.layout.depth]

    def _crossing(self, kind: Kind, source: int) -> Tuple[Shape, ...]:
        if kind is Kind.FORWARD and self._place.enter is not None:
            return self._place.enter.tensors
        tensors = self._place.crossings[min(source, self._stage)].tensors
        return tuple(t.gradient for t in tensors if t.differentiable) if kind is Kind.BACKWARD else tensors

    def _update(self, k: int) -> Iterator[Tuple[int, Message, Tuple[Shape, ...]]]:
        for neighbour, weights in self._place.shared:
            yield neighbour, Message(SHARED, k), tuple(Shape(tuple(p.shape), p.dtype, False) for p in weights)
        yield from self._place.ties.wanted(WEIGHTS, k)
        source = self._delayed.source(k) if self._delayed is not None else None
        if source is not None:
            for other in self._place.others:
                yield other, Message(NORM, source), NORM_SHAPE
