"""The interpreter of a rank's row of the schedule: one loop over its actions, one function for each kind.

    F  Stage.forward     R  Stage.recompute     B, I  Stage.backward     W  Stage.add_weight_gradients     U  Interpreter._update

The row is that of the rank's stages together, slot by slot:

    slot      0   1   2   3   4   5   6   7   8            pipedream, 4 stages on 2 devices
    stage 0   F0  F1  F2  F3  .   .   .   B0  F4
    stage 1   .   F0  F1  F2  .   .   B0  F3  B1
    rank 0    F0  F1 F0' F2 F1' F3 F2'  B0'  B0 F3'  F4 B1'    (': of stage 1)

Before a chunk of a stage's row begins, the mail is told the messages that it needs. F(m) of stage s sends to s + 1 when done,
B(m) or I(m) to s - 1. Every wait is for an action of an earlier slot, which the schedule was proved to have, so ranks cannot wait
in a circle.
"""

from __future__ import annotations

import functools
import heapq
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ipu_pipe.backends.losses import average, tabulate
from ipu_pipe.backends.processes import cuda
from ipu_pipe.backends.processes.deadlines import Termination
from ipu_pipe.backends.processes.mail import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    RECOMPUTE,
    UPDATE,
    WEIGHT_GRADIENT,
    WORD,
    Link,
    Mail,
    Message,
    Shapes,
)
from ipu_pipe.backends.processes.memory import MemoryCounters
from ipu_pipe.backends.processes.stage import Stage
from ipu_pipe.backends.processes.trace import TraceRecorder
from ipu_pipe.backends.processes.update import StageUpdate
from ipu_pipe.backends.replicas import IndependentReplicas
from ipu_pipe.backends.work import Work
from ipu_pipe.model.cutting import Shape
from ipu_pipe.schedule.recompute import recompute_slots
from ipu_pipe.schedule.runs import IntArray
from ipu_pipe.schedule.table import Schedule

CHUNK = 512  # microbatches of which the row is spelled out at a time
ORDER = (FORWARD, RECOMPUTE, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, UPDATE)  # within a slot


class RowAction(NamedTuple):
    """One action of a row: its slot and its place there (`ORDER`), its stage, the number of its microbatch or update."""

    slot: int
    order: int
    stage: int
    number: int

    @property
    def kind(self) -> str:
        """The letter of its kind."""
        return ORDER[self.order]


def spell_row(work: Work, stage: int, together: Sequence[int] = ()) -> Iterator[List[RowAction]]:
    """Yield the actions of a stage from the work's first microbatch on, in order, in chunks that end with an update.

    A chunk has the updates of some batches and all passes up to the last of them. A whole backward among split ones is in the
    slot of its first half. `together`: stages that are updated in one slot, the last one's: their method flushes, and no pass
    comes before it.
    """
    schedule, method, source = work.schedule, work.method, work.source([0])
    here = slice(stage, stage + 1)
    slots_of: Dict[str, Callable[[int, int], IntArray]] = {
        kind.value: functools.partial(schedule.slots, kind, stages=here) for kind in schedule.passes
    }
    if method.segments is not None and method.reads_old(schedule.stages):
        slots_of[RECOMPUTE] = functools.partial(recompute_slots, schedule, method, stages=here)
    next_of = dict.fromkeys(slots_of, work.microbatch)
    length = max(CHUNK // work.accumulate, 1) * work.accumulate
    for begin in range(work.microbatch, schedule.microbatches, length):
        end = min(begin + length, schedule.microbatches)
        completed = _find_completed_slots(schedule, begin, end, stage)
        # the replays that update this stage
        ends = np.flatnonzero(source.window(begin, end).updates[stage])
        updates = source.count_updates(begin)[stage] + np.arange(len(ends))
        update_slots = completed[ends]
        if together:
            update_slots = np.max([_find_completed_slots(schedule, begin, end, s)[ends] for s in together], axis=0)
        rows = [(UPDATE, update_slots, updates)]
        for kind, find_slots in slots_of.items():
            first, reach, count = next_of[kind], source.reach, 0
            slots = np.zeros(0, np.int64)
            while count == len(slots) and first + len(slots) < schedule.microbatches:  # it may run further ahead
                slots = find_slots(first, min(end + reach, schedule.microbatches))[0]
                count, reach = int((slots <= completed[-1]).sum()), 2 * reach
            next_of[kind] += count
            rows.append((kind, slots[:count], np.arange(first, first + count)))
        table = np.concatenate([
            np.stack([slots, np.full_like(slots, ORDER.index(kind)), index], axis=1) for kind, slots, index in rows
        ])  # (actions, 3): slot, order within the slot, index
        if any(stretch.whole is not None for stretch in schedule.stretches):
            table = _join_halves(table, schedule.is_whole[stage])
        table = table[np.lexsort((table[:, 1], table[:, 0]))]
        yield [RowAction(slot, order, stage, index) for slot, order, index in table.tolist()]


def _join_halves(table: IntArray, is_whole: NDArray[np.bool_]) -> IntArray:
    """Put a backward in the place of the two halves of microbatches that are whole."""
    first, second = (table[:, 1] == ORDER.index(kind) for kind in (INPUT_GRADIENT, WEIGHT_GRADIENT))
    of_whole = (first | second) & is_whole[np.where(first | second, table[:, 2], 0)]
    table[of_whole & first, 1] = ORDER.index(BACKWARD)
    joined: IntArray = table[~(of_whole & second)]
    return joined


def _find_completed_slots(schedule: Schedule, begin: int, end: int, stage: int) -> IntArray:
    """Return the slots after which the microbatches from `begin` up to each one in [begin, end) are done on a stage."""
    done: IntArray = np.maximum.accumulate(schedule.slots(schedule.passes[-1], begin, end, slice(stage, stage + 1))[0])
    return done


class BatchAnnouncements:
    """Early stopping across ranks: rank 0 announces to every rank, batch by batch, whether another batch starts.

    rank 0   U2 | asked to end | F8: the first of batch 4 ...     batches 3 and what has started of it are in flight: they end
                  says "no" to all before batch 4
    rank 1   ... F7  (word on batch 4: no)  B6 U3 ...             its row without what belongs to batch 4

    Rank 0 sends the word on a batch before its first forward, and another rank waits for it before its own, which could not start
    sooner: no one waits longer for the word than for the microbatch. Every rank ends at the same update, with nothing on its way.
    `batch`: microbatches of one; `updates`: of the run as planned; `first`: the first to come; `may_post`: the mail may post
    receives.
    """

    SHAPES = (Shape((1,), torch.int64, False),)

    def __init__(self, mail: Mail, rank: int, batch: int, updates: int, first: int, may_post: bool = True) -> None:
        self._mail, self._rank, self._batch, self.end = mail, rank, batch, updates
        self.started, self._expected = first, first
        self._is_asked = False
        self.may_post = may_post
        mail.post(first * batch, first)

    def ask(self) -> None:
        """Let no more batches start, on rank 0."""
        self._is_asked = True

    def starts(self, b: int) -> bool:
        """Return whether the run has batch b; decide, or wait for the word, if it is the first that has not started."""
        if b >= self.started and b < self.end:
            if self._send_word(b) if self._rank == 0 else self._receive_word(b):
                self.started = b + 1
                if self.may_post:
                    self._mail.post(self.started * self._batch, self.started)
            else:
                self.end = b
        return b < self.started

    def filter(self, actions: Iterable[RowAction]) -> Iterator[RowAction]:
        """Yield a row's actions without those of batches that do not start."""
        for action in actions:
            if action.kind == UPDATE or self.starts(action.number // self._batch):
                yield action

    def _send_word(self, b: int) -> bool:
        word = torch.tensor([0 if self._is_asked else 1])
        for rank in range(1, dist.get_world_size()):
            self._mail.send(Message(WORD, b, 0, rank), [word])
        return not self._is_asked

    def _receive_word(self, b: int) -> bool:
        self._expect(b)
        goes = bool(self._mail.receive(Message(WORD, b, 0, self._rank))[0].item())
        if goes and b + 1 < self.end:  # after a "no" there is no word any more
            self._expect(b + 1)
        return goes

    def _expect(self, b: int) -> None:
        if self._expected <= b:
            self._mail.expect([(Message(WORD, b, 0, self._rank), self.SHAPES)])
            self._expected = b + 1


class Interpreter:
    """Carries out a rank's row: `step(k)` up to and including update k of each of its stages.

    `stages`: those that the rank holds, by number; `doing`: the current action, or what else. `replicas`: the process group of
    each stage's replicas, None if there is one. `early`: of a run that may be asked to end after any update; `ends_empty`: it may
    be where the pipeline is empty. No receive may wait then for what comes after: it would take a message of the next run away.
    `channels`: the mail's, which must be used once before anything is posted.
    """

    def __init__(
        self, work: Work, stages: Mapping[int, Stage], mail: Mail, recorder: TraceRecorder, replicas: Sequence[Any] = (),
        early: Optional[BatchAnnouncements] = None, ends_empty: bool = False, channels: Optional[Mapping[Link, Any]] = None,
    ) -> None:  # fmt: skip
        self.stages, self.mail, self.recorder, self._work, self._early = stages, mail, recorder, work, early
        models = {s: stage.model for s, stage in stages.items()}
        self.layout = next(iter(models.values())).layout
        # a norm over all stages is known when all have their gradients
        together = work.clip is not None and work.clip[1] == "global"
        groups = [list(models)] if together else [[s] for s in models]
        self.updates: Dict[int, StageUpdate] = {}
        for group in groups:
            update = StageUpdate(work, [models[s] for s in group], mail, recorder, replicas[group[0]] if replicas else None)
            self.updates.update(dict.fromkeys(group, update))
        self._parameters = {s: work.rules.stages[s].parameters for s in stages if s in work.rules.stages}
        parameters = [p for of_stage in self._parameters.values() for p in of_stage]
        tensors = list({id(t): t for model in models.values() for t in model.tensors}.values())
        filled = work.update + self.layout.stages + 2
        self.memory = MemoryCounters(tensors, work.rules, parameters, stages, mail, recorder, filled)
        self._replicas = {s: IndependentReplicas.create(work, model.piece, [s]) for s, model in models.items()}
        self._untouched, self._posts_by_stretch = channels, channels is not None or ends_empty
        self._tables: Dict[int, Dict[int, torch.Tensor]] = {}  # of the microbatches of updates, by update and stage
        self._carry_out: Dict[str, Callable[[Stage, int], None]] = {
            FORWARD: self._forward, RECOMPUTE: Stage.recompute, BACKWARD: self._backward, INPUT_GRADIENT: Stage.backward_input,
            WEIGHT_GRADIENT: Stage.add_weight_gradients, UPDATE: self._update,
        }  # fmt: skip
        rows = [self._read_row(stage, groups[0] if together else ()) for stage in stages.values()]
        row: Iterable[RowAction] = heapq.merge(*rows)
        self._row = iter(row if early is None else early.filter(row))
        self.doing = "start"
        recorder.begin_update(self.update)

    @property
    def update(self) -> int:
        """The next update: the one that not all stages have done."""
        return min(stage.update for stage in self.stages.values())

    @property
    def place(self) -> str:
        """What the rank is doing, in words for a fault."""
        kind, index = self.doing[:1], self.doing[1:]
        if not index.isdigit():
            return f"{self.doing} before update {self.update}"
        if kind == UPDATE:
            return f"update {index}"
        return f"update {int(index) // self._work.schedule.accumulate}, microbatch {index}, action {self.doing}"

    def _read_row(self, stage: Stage, together: Sequence[int]) -> Iterator[RowAction]:
        """Yield the actions of a stage, and announce the messages that they need."""
        for chunk in spell_row(self._work, stage.model.stage, together):
            self.mail.expect(need for action in chunk for need in self._list_needs(stage, action))
            yield from chunk

    def _list_needs(self, stage: Stage, action: RowAction) -> Iterator[Tuple[Message, Shapes]]:
        if action.kind == UPDATE:
            return self.updates[action.stage].list_needs(stage.model, action.number)
        return stage.list_needs(action.kind, action.number)

    def step(self, k: int) -> Dict[int, torch.Tensor]:
        """Carry out the row up to update k. Return by stage the table of its microbatches (`losses.tabulate`), where there is a
        loss."""
        assert k == self.update, f"update {self.update} is next, not {k}"
        if self._posts_by_stretch:
            self._post(k)
        for action in self._row:
            Termination.check()
            kind, index, stage = action.kind, action.number, self.stages[action.stage]
            self.doing, self.recorder.stage = f"{kind}{index}", action.stage
            self._carry_out[kind](stage, index)
            stepped = kind == UPDATE
            self.memory.sample(self.update, kind in (BACKWARD, WEIGHT_GRADIENT, UPDATE), stepped)
            if stepped and self.update > k:
                self.mail.is_warm = self.mail.is_warm or self._have_all_stages_begun(k)
                return self._tables.pop(k, {})
        raise AssertionError(f"the schedule ends before update {k}")

    def _have_all_stages_begun(self, k: int) -> bool:
        """Return whether all stages have begun when update k is done: where no gradient comes back to tell, after so many updates
        that the first stage, which runs no further ahead, shows it."""
        is_local = any(stage.model.local is not None for stage in self.stages.values())
        return k - self._work.update >= (self.layout.stages + 1 if is_local else 0)

    # ---- one function for each kind of action

    def _forward(self, stage: Stage, m: int) -> None:
        replicas = self._replicas[stage.model.stage]
        if replicas is not None:  # those of LocalSGD take turns, each with weights of its own
            replicas.enter(m % replicas.count)
        stage.forward(m)

    def _backward(self, stage: Stage, m: int) -> None:
        replicas = self._replicas[stage.model.stage]
        if replicas is None:
            stage.backward(m)
            return
        replicas.enter(m % replicas.count)
        stage.backward(m)
        self.updates[stage.model.stage].step(m // replicas.count)

    def _update(self, stage: Stage, k: int) -> None:
        if stage.update > k:  # with the other stages that are updated together
            return
        update = self.updates[stage.model.stage]
        group = [self.stages[model.stage] for model in update.models]
        for one in group:
            self._tabulate(one, k)
        replicas = self._replicas[stage.model.stage]
        if replicas is not None:
            with update.record(k):
                replicas.end_step(self._work, k)
                stage.after_update()
        else:
            update.gather(k)
            with update.record(k):
                for one in group:
                    one.before_update()
                self.memory.sample(k)
                update.step(k)
                for one in group:
                    one.after_update()
            for one in group:
                one.tied.send_weights(k)
            # no receive of a channel may wait while the pipeline is empty
            if self._work.schedule.stretch(k)[1] == self.update:
                for one in self.stages.values():
                    one.tied.load(self.update)
        self.recorder.begin_update(self.update)

    def _tabulate(self, stage: Stage, k: int) -> None:
        if stage.model.has_loss:
            count = self._work.schedule.accumulate
            results = [stage.results.pop(m) for m in range(k * count, (k + 1) * count)]
            table = self._tables.setdefault(k, {})[stage.model.stage] = tabulate(results)
            self._work.refuse_nonfinite(k, [average(table)[0]])

    # ---- where the pipeline is empty

    def _post(self, k: int) -> None:
        """Allow receives to be posted up to where the pipeline empties next; first of all use channels and kernels once."""
        if self._untouched is not None:
            first = next(iter(self.stages.values())).model
            links = cuda.list_links(self.layout.stages, self._work.method, first.ties.links)
            cuda.touch_channels(self._untouched, links, self.layout, first.device, self.mail.limit)
            for s, stage in self.stages.items():
                cuda.rehearse(self._work, stage, self._parameters.get(s, []))
            self._untouched = None
        end = self._work.schedule.stretch(k)[1]
        if self._early is not None:
            self._early.may_post, end = True, self._early.started
        self.mail.post(end * self._work.schedule.accumulate, end)

    def load_newest(self) -> None:
        """Put the newest weights into the parameters, with nothing in flight."""
        for stage in self.stages.values():
            stage.load_newest()

    def close(self) -> None:
        """Let all messages through, put the newest weights into the parameters and take the hooks off the model."""
        for update in {id(update): update for update in self.updates.values()}.values():
            update.clipping.discard_rest()
        self.load_newest()
        self.mail.flush()
        self.remove_hooks()

    def remove_hooks(self) -> None:
        """Take the hooks off the model."""
        for stage in self.stages.values():
            stage.remove_hooks()
