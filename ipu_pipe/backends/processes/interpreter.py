"""The interpreter of a rank's row of the schedule: one loop over its actions, one function for each
kind.

    F  Stage.forward      R  Stage.recompute      B, I (input gradient)  Stage.backward
    W (weight gradient)  Stage.add_weight_gradients      U (update)  Interpreter._update

A rank's row joins the rows of its stages, slot by slot:

    slot      0   1   2   3   4   5   6   7   8            pipedream, 4 stages on 2 devices
    stage 0   F0  F1  F2  F3  .   .   .   B0  F4
    stage 1   .   F0  F1  F2  F3  .   B0  .   B1
    rank 0    F0  F1 F0' F2 F1' F3 F2'  F3'  B0'  B0  F4 B1'   (': of stage 1)

Before a batch of actions begins, the interpreter announces to the mail the messages that they need.
At its end F(m) of stage s sends to s + 1, and B(m) or I(m) to s - 1. Every wait is for an action of
an earlier slot (the schedule's check proves it), so ranks cannot wait in a circle.
"""

from __future__ import annotations

import heapq
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

import numpy as np
import torch

from ipu_pipe.backends.processes import nccl
from ipu_pipe.backends.processes.lost_ranks import Termination
from ipu_pipe.backends.processes.mail import Link, Mail
from ipu_pipe.backends.processes.memory import MemoryCounters
from ipu_pipe.backends.processes.stage import Stage
from ipu_pipe.backends.processes.trace import TraceRecorder
from ipu_pipe.backends.processes.update import ReplicaGroup, StageUpdate
from ipu_pipe.replay.replicas import IndependentReplicas
from ipu_pipe.replay.work import Work, tabulate
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.versions import recompute_slots

# the number of microbatches whose actions are listed at a time
CHUNK = 512
# the order of actions within a slot
ORDER = tuple(Kind)


class RowAction(NamedTuple):
    """One action of a row: its slot, the index of its kind in `ORDER`, its stage, the number of its
    microbatch or update.
    """

    slot: int
    order: int
    stage: int
    number: int


def list_actions(
    work: Work, kind: Kind, stage: int, together: Sequence[int]
) -> Iterator[list[RowAction]]:
    """Yield a stage's actions of one kind in the order of their slots, some batches at a time.

    Input gradients include the whole backwards of a schedule that mixes whole and split ones: they
    need and send the same messages. `together`: the stages whose gradients the update needs too, in
    the slot of the last of them. If there are several, no pass of this stage lies between these
    slots.
    """
    schedule = work.schedule
    here = slice(stage, stage + 1)
    is_half = kind in (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
    is_mixed = is_half and any(stretch.whole is not None for stretch in schedule.stretches)
    # a row is listed in parts, because an open schedule has no end
    batches = max(CHUNK // schedule.accumulate, 1)
    for batch in range(work.update, schedule.update_count, batches):
        last = min(batch + batches, schedule.update_count)
        if kind is Kind.UPDATE:
            numbers = np.arange(batch, last)
            slots_by_stage = [
                schedule.slots(Kind.UPDATE, batch, last, slice(s, s + 1))[0] for s in together
            ]
            # (updates,)
            slots = np.max(slots_by_stage, axis=0)
        else:
            ends = batch * schedule.accumulate, last * schedule.accumulate
            numbers = np.arange(*ends)
            if kind is Kind.RECOMPUTE:
                slots = recompute_slots(schedule, work.method, *ends, here)[0]
            else:
                slots = schedule.slots(kind, *ends, here)[0]
        orders = np.full(len(numbers), ORDER.index(kind))
        if is_mixed:
            is_whole = schedule.find_whole(numbers, here)[0]
            # so that it is carried out as one pass, which needs no W
            orders[is_whole] = ORDER.index(Kind.BACKWARD)
            # a whole backward includes its weight gradient
            if kind is Kind.WEIGHT_GRADIENT:
                slots = slots[~is_whole]
                orders = orders[~is_whole]
                numbers = numbers[~is_whole]
        actions = zip(slots.tolist(), orders.tolist(), numbers.tolist())
        yield sorted(RowAction(slot, order, stage, number) for slot, order, number in actions)


def list_action_kinds(work: Work) -> list[Kind]:
    """List the kinds of actions of a row."""
    kinds = {*work.schedule.passes, Kind.UPDATE}
    if work.method.segments is not None and work.method.reads_old(work.schedule.stages):
        kinds.add(Kind.RECOMPUTE)
    return [kind for kind in ORDER if kind in kinds]


class Interpreter:
    """Carry out a rank's row: `advance(cut, batches)` runs it up to a slot, with the batches that
    are at hand.

    `stages`: stage number -> stage, for the stages of the rank. `replicas`: the replica group of
    each stage, empty if there is one replica. `channels`: the mail's channels, which must be used
    once before anything is posted. No receive is posted for a batch that was not given: it would
    take a message of the next stretch. Attributes: `update` is the next update, which not all
    stages have done; `doing` is the current action or activity.
    """

    def __init__(
        self,
        work: Work,
        stages: Mapping[int, Stage],
        mail: Mail,
        recorder: TraceRecorder,
        replicas: Sequence[ReplicaGroup] = (),
        channels: Mapping[Link, Any] | None = None,
    ) -> None:
        self.stages = stages
        self.mail = mail
        self.recorder = recorder
        self._work = work
        self.layout = next(iter(stages.values())).model.layout
        created = {
            s: IndependentReplicas.create(work, stage.model.piece, [s])
            for s, stage in stages.items()
        }
        self.independent = {
            s: replicas_of_stage
            for s, replicas_of_stage in created.items()
            if replicas_of_stage is not None
        }
        # the norm over all stages is known only when all have their gradients, so they update
        # together
        is_global = work.clip is not None and work.clip[1] == "global"
        self._updates: dict[int, StageUpdate] = {}
        for group in [list(stages)] if is_global else [[s] for s in stages]:
            independent = [self.independent[s] for s in group if s in self.independent]
            members = [stages[s] for s in group]
            replica_group = replicas[group[0]] if replicas else None
            update = StageUpdate(work, members, mail, recorder, replica_group, independent)
            self._updates.update(dict.fromkeys(group, update))
        self.memory = MemoryCounters(work, stages, mail, recorder, list(self.independent.values()))
        for stage in stages.values():
            stage.sample_memory = lambda: self.memory.sample(self.update, gradients_changed=False)
        self._unused_channels = channels
        # true after the first step
        self._is_warm = False
        # the action at which an open row has stopped
        self._next_action: RowAction | None = None
        # update -> stage -> table of the microbatches' results
        self._tables: dict[int, dict[int, torch.Tensor]] = {}
        self._carry_out: dict[Kind, Callable[[Stage, int], None]] = {
            Kind.FORWARD: Stage.forward,
            Kind.RECOMPUTE: Stage.recompute,
            Kind.BACKWARD: Stage.backward,
            Kind.INPUT_GRADIENT: partial(Stage.backward, kind=Kind.INPUT_GRADIENT),
            Kind.WEIGHT_GRADIENT: Stage.add_weight_gradients,
            Kind.UPDATE: self._update,
        }
        # each replica steps after its own backward, and its weights come before its passes
        if self.independent:
            self._carry_out.update(
                {Kind.FORWARD: self._run_replica_forward, Kind.BACKWARD: self._run_replica_backward}
            )
        elif any(update.averages for update in self._updates.values()):
            # in split backwards W completes the gradients, and I leaves none
            for kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT):
                self._carry_out[kind] = partial(self._run_and_average, self._carry_out[kind])
        kinds = [
            self._read_kind(stage, kind)
            for stage in stages.values()
            for kind in list_action_kinds(work)
        ]
        # each part is in the order of its slots, so that no list of all actions is needed
        self._row = heapq.merge(*kinds)
        self.doing = "start"
        self.update = work.update
        recorder.begin_update(self.update)

    @property
    def activity(self) -> str:
        """The current activity of the rank, in words for a fault."""
        kind = self.doing[:1]
        index = self.doing[1:]
        if not index.isdigit():
            return f"{self.doing} before update {self.update}"
        if kind == Kind.UPDATE.value:
            return f"update {index}"
        return (
            f"update {int(index) // self._work.schedule.accumulate}, microbatch {index}, action "
            f"{self.doing}"
        )

    def _read_kind(self, stage: Stage, kind: Kind) -> Iterator[RowAction]:
        """Yield a stage's actions of one kind, and announce the messages that they need."""
        s = stage.model.stage
        update = self._updates[stage.model.stage]
        together = [member.model.stage for member in update.stages]
        structure = self._work.method.structure
        if structure is not None and structure.overlap and s + 1 < self.layout.stages:
            # the update needs the next stage's gradient of the shared layer, so this stage updates
            # in the later of the two stages' update slots
            together.append(s + 1)
        list_needs = (
            partial(update.list_needs, stage)
            if kind is Kind.UPDATE
            else partial(stage.list_needs, kind)
        )
        for actions in list_actions(self._work, kind, s, together):
            # announced in parts as the row is read; the mail bounds the receives that are posted
            self.mail.expect(need for action in actions for need in list_needs(action.number))
            yield from actions

    def advance(
        self,
        cut: float,
        batches: int,
    ) -> Iterator[tuple[int, dict[int, torch.Tensor]]]:
        """Carry out the actions of slots before `cut` that belong to this many batches.

        Yield each update that all stages of the rank have made now, with the table of results of
        each stage with a loss. If `cut` is beyond all of them, the pipeline is empty afterwards,
        and the interpreter cannot go on.
        """
        if self._unused_channels is not None:
            self._use_channels()
        accumulate = self._work.schedule.accumulate
        self.mail.post(batches * accumulate, batches)
        while self.update < batches:
            action = next(self._row) if self._next_action is None else self._next_action
            # kept before it is compared with the cut, because a row cannot go back
            self._next_action = action
            if action.slot >= cut:
                return
            self._next_action = None
            is_update = ORDER[action.order] is Kind.UPDATE
            batch = action.number if is_update else action.number // accumulate
            # before an infinite cut the row has actions of batches that never begin, too
            if batch < batches and self._run_action(action):
                yield self.update - 1, self._tables.pop(self.update - 1, {})

    def _run_action(self, action: RowAction) -> bool:
        """Carry out one action of the row. Return whether all stages of the rank have now made
        another update.
        """
        if Termination.signalled_at is not None:
            Termination.check()
        k = self.update
        kind = ORDER[action.order]
        stage = self.stages[action.stage]
        self.doing = f"{kind.value}{action.number}"
        # events of waits inside the action are this stage's, too
        self.recorder.stage = action.stage
        self._carry_out[kind](stage, action.number)
        is_update = kind is Kind.UPDATE
        # forwards add no gradients, so these are not counted anew after each
        self.memory.sample(
            self.update, kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT, Kind.UPDATE), is_update
        )
        if self.update == k:
            return False
        if not self._is_warm and self._has_every_stage_begun(k):
            self._is_warm = True
            self.mail.end_warm_up()
        return True

    def _has_every_stage_begun(self, k: int) -> bool:
        """Return whether all stages have begun when update k is done.

        With local losses no gradient comes back from later stages. There the count of updates
        tells, because the first stage does not run further ahead than that.
        """
        is_local = any(stage.model.local is not None for stage in self.stages.values())
        return k - self._work.update >= (self.layout.stages + 1 if is_local else 0)

    # ---- one function for each kind of action

    def _run_replica_forward(self, stage: Stage, m: int) -> None:
        """Carry out a forward with the weights of the microbatch's replica: replicas take turns
        (LocalSGD).
        """
        replicas = self.independent[stage.model.stage]
        replicas.enter(m % replicas.count)
        stage.forward(m)

    def _run_replica_backward(self, stage: Stage, m: int) -> None:
        """Carry out a backward with the weights of the microbatch's replica, and the replica's
        step.
        """
        replicas = self.independent[stage.model.stage]
        replicas.enter(m % replicas.count)
        stage.backward(m)
        # sample now, because no gradients are left after the step
        self.memory.sample(self.update)
        self._updates[stage.model.stage].step(m // replicas.count)
        replicas.end_replica_step(self._work, m // replicas.count)

    def _run_and_average(
        self, carry_out: Callable[[Stage, int], None], stage: Stage, m: int
    ) -> None:
        """Carry out a pass, and average finished gradients over the replicas meanwhile
        (`reduction: fast`).
        """
        overlapped = self._updates[stage.model.stage].averages.get(stage.model.stage)
        with nullcontext() if overlapped is None else overlapped.add_pass():
            carry_out(stage, m)

    def _update(self, stage: Stage, k: int) -> None:
        # the stage was updated together with an earlier one
        if stage.version > k:
            return
        update = self._updates[stage.model.stage]
        for member in update.stages:
            if member.model.has_loss:
                self._tabulate(member, k)
        update.carry_out(k, self.memory.sample)
        self.update = min(member.version for member in self.stages.values())
        if stage.model.kinds is not None:
            stage.model.kinds.forget(self.update * self._work.schedule.accumulate)
        # no receive of a channel may wait while the pipeline is empty
        copying = [member for member in self.stages.values() if member.model.ties.copies_of]
        if copying and self._work.schedule.get_drain_interval(k)[1] == self.update:
            for member in copying:
                member.tied.load(self.update)
        self.recorder.begin_update(self.update)

    def _tabulate(self, stage: Stage, k: int) -> None:
        count = self._work.schedule.accumulate
        results = [stage.results.pop(m) for m in range(k * count, (k + 1) * count)]
        self._tables.setdefault(k, {})[stage.model.stage] = tabulate(results)

    # ---- where the pipeline is empty

    def _use_channels(self) -> None:
        """Use all channels and kernels once, before any receive is posted (`nccl`)."""
        assert self._unused_channels is not None
        first = next(iter(self.stages.values())).model
        links = nccl.list_links(self.layout.stages, self._work.method, first.ties.links)
        nccl.use_channels_once(
            self._unused_channels, links, self.layout, first.device, self.mail.limit
        )
        for s, stage in self.stages.items():
            state = self._work.rules.stages.get(s)
            nccl.load_kernels(self._work, stage, state.parameters if state is not None else [])
        self._unused_channels = None

    @contextmanager
    def export_replicas(self) -> Iterator[None]:
        """Hold everything that a checkpoint needs in the optimizer's state inside the context."""
        with ExitStack() as stack:
            for replicas in self.independent.values():
                stack.enter_context(replicas.export_replicas())
            yield

    def load_newest(self) -> None:
        """Put the newest weights into the parameters; nothing may be in flight."""
        for stage in self.stages.values():
            stage.load_newest()

    def end_round(self, work: Work) -> None:
        """End a round of replicas with weights of their own early, if the schedule of `work` drains
        before the next update.
        """
        last = self.update - 1
        for replicas in self.independent.values():
            # a round that has just ended was averaged already
            if self._work.schedule.get_drain_interval(last)[1] != self.update:
                replicas.end_step(work, last)

    def end(self) -> None:
        """Wait for all messages, of a pipeline that is empty, and put the newest weights into the
        parameters.
        """
        # else the norms that others have sent would stay in the mail of the next stretch
        for update in dict.fromkeys(self._updates.values()):
            update.clipping.discard_rest()
        self.load_newest()
        self.mail.flush()
        self._stop_averages()

    def close(self) -> None:
        """Do `end`, and remove the hooks from the model."""
        self.end()
        self.remove_hooks()

    def remove_hooks(self) -> None:
        """Remove the hooks from the model."""
        for stage in self.stages.values():
            stage.remove_hooks()
        self._stop_averages()

    def _stop_averages(self) -> None:
        # stages that update together share one object
        for update in dict.fromkeys(self._updates.values()):
            for average_of_stage in update.averages.values():
                average_of_stage.remove_hooks()
