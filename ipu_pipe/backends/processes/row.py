"""A stage's row of the schedule: its actions in order, some updates at a time, and the messages that they need.

Sends and receives follow from the schedule: F(m) of stage s is sent when done to s + 1, B(m) to s - 1. Every wait is for an
action of an earlier slot, which the schedule was proved to have (`Schedule`), so ranks cannot wait in a circle.
"""

from __future__ import annotations

import functools
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import torch

from ipu_pipe.backends.processes.mail import BACKWARD, FORWARD, NORM, ORDER, RECOMPUTE, SHARED, UPDATE, Message
from ipu_pipe.backends.processes.place import Place
from ipu_pipe.backends.work import Work
from ipu_pipe.model.cutting import Shape
from ipu_pipe.schedule.table import IntArray, Kind
from ipu_pipe.schedule.versions import segment_ends
from ipu_pipe.update.clipping import DelayedGlobalNorm

CHUNK = 512  # microbatches of which the row is spelled out at a time
NORM_SHAPE = (Shape((1,), torch.float64, False),)

Action = Tuple[str, int]  # kind, microbatch or update
Wanted = Tuple[Message, Tuple[Shape, ...]]


class Segments:
    """The segments of stages of which activations are recomputed, seen from one stage."""

    def __init__(self, work: Work, stage: int) -> None:
        depth, count = work.schedule.stages, work.method.segments
        self.recomputes = count is not None and work.method.reads_old(depth)
        self._ends, self._stage = segment_ends(depth, count or 0), stage

    @property
    def end(self) -> int:
        """The last stage of this one's."""
        return int(self._ends[self._stage])

    def is_head(self, stage: int) -> bool:
        """Whether a segment begins there."""
        return stage == 0 or bool(self._ends[stage] != self._ends[stage - 1])


class Row:
    """The actions of one stage."""

    def __init__(self, work: Work, stage: int) -> None:
        self._work, self._stage, self._schedule = work, stage, work.schedule
        self._segments = Segments(work, stage)
        self._source = work.source([0])

    def _slots(self, kind: Kind, first: int, last: int) -> IntArray:
        s = self._stage
        return self._schedule.slots(kind, first, last, slice(s, s + 1))[0]

    def _recompute_slots(self, first: int, last: int) -> IntArray:
        end = self._segments.end
        turn = self._work.method.turn if self._schedule.stages > 1 else 0
        slots = self._schedule.slots(Kind.BACKWARD, first, last, slice(end, end + 1))[0]
        return np.asarray(slots - turn - (end - self._stage))

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
            ends = np.flatnonzero(self._source.window(begin, end).updates[self._stage])  # the replays that update this stage
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
        self._segments = Segments(work, self._stage)
        self._of = {FORWARD: self._forward, RECOMPUTE: self._recompute, BACKWARD: self._backward, UPDATE: self._update}

    def messages(self, actions: Sequence[Action]) -> Dict[int, List[Wanted]]:
        """By the stage that sends them, in the order in which they are needed."""
        wanted: Dict[int, List[Wanted]] = {}
        for kind, index in actions:
            for source, message, shapes in self._of[kind](index):
                wanted.setdefault(source, []).append((message, shapes))
        return wanted

    def _forward(self, m: int) -> Iterator[Tuple[int, Message, Tuple[Shape, ...]]]:
        if self._place.enter is not None:
            yield self._stage - 1, Message(FORWARD, m), self._place.enter.tensors

    def _recompute(self, m: int) -> Iterator[Tuple[int, Message, Tuple[Shape, ...]]]:
        if not self._segments.is_head(self._stage):
            yield self._stage - 1, Message(RECOMPUTE, m), self._place.crossings[self._stage - 1].tensors

    def _backward(self, m: int) -> Iterator[Tuple[int, Message, Tuple[Shape, ...]]]:
        if not self._place.is_last and not self._place.is_local:
            back = tuple(shape for shape in self._place.crossings[self._stage].tensors if shape.differentiable)
            yield self._stage + 1, Message(BACKWARD, m), back

    def _update(self, k: int) -> Iterator[Tuple[int, Message, Tuple[Shape, ...]]]:
        for neighbour, weights in self._place.shared:
            yield neighbour, Message(SHARED, k), tuple(Shape(tuple(p.shape), p.dtype, False) for p in weights)
        source = self._delayed.source(k) if self._delayed is not None else None
        if source is not None:
            for other in self._place.others:
                yield other, Message(NORM, source), NORM_SHAPE
