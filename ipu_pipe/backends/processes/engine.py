"""One job on several processes: each rank holds one stage and plays its row of the schedule (`player`).

rank   0    1    2    3    4    5          depth 3, width 2
stage  0    1    2    0    1    2          rank 0 prints and writes; gradients are averaged between ranks of one stage
"""

from __future__ import annotations

import contextlib
from typing import Iterator, List, Optional

import torch.distributed as dist

from ipu_pipe.backends.interface import Backend, CheckpointState, Engine, Report, StepResult, refuse_poptorch_state
from ipu_pipe.backends.processes.assembling import cut_out, forget_others, make_channels, replica_groups
from ipu_pipe.backends.processes.clocks import offset_to_first
from ipu_pipe.backends.processes.ending import Ending
from ipu_pipe.backends.processes.evaluation import Evaluation
from ipu_pipe.backends.processes.gathering import (
    gather,
    hand_round,
    stage_report,
    stage_state,
    stages_of,
    whole_report,
    whole_state,
)
from ipu_pipe.backends.processes.group import check_launch, start
from ipu_pipe.backends.processes.layout import Layout
from ipu_pipe.backends.processes.losses import Telling
from ipu_pipe.backends.processes.mail import Mail
from ipu_pipe.backends.processes.placing import place
from ipu_pipe.backends.processes.player import RowPlayer
from ipu_pipe.backends.processes.recording import finished, record
from ipu_pipe.backends.processes.streams import StreamClock
from ipu_pipe.backends.processes.timeline import Timeline
from ipu_pipe.backends.processes.told import named_faults
from ipu_pipe.backends.work import Work, list_exactness_faults
from ipu_pipe.job.position import Measured
from ipu_pipe.job.record import Job
from ipu_pipe.local.blocks import get_blocks
from ipu_pipe.model.uncompiled import import_compiler
from ipu_pipe.text import list_some
from ipu_pipe.update.rules import select_rules


class ProcessEngine(Engine):
    """This process's stage, and what all processes do together."""

    def __init__(self, job: Job, first_update: int) -> None:
        super().__init__(job)
        config, work = job.config, Work.of(job, first_update)
        self.layout = Layout(dist.get_rank(), len(job.part), config.replicas)
        self.is_main = self.layout.rank == 0
        self._first_update, self._blocks = first_update, get_blocks(job.model)
        groups = replica_groups(self.layout, config.backend.deadline)
        own, cut = cut_out(job, self.layout)
        timeline = Timeline(self.layout, job.traced, StreamClock() if job.device.type == "cuda" else None)
        channels = make_channels(job, self.layout, own.ties.links)
        mail = Mail(self.layout, job.device, timeline, config.backend.deadline, channels=channels)
        self._ending: Optional[Ending] = None
        if job.may_stop:
            self._ending = Ending(mail, self.layout.rank, job.schedule.accumulate, job.updates, first_update)
        replicas = groups[self.layout.stage] if groups else None
        self._player = RowPlayer(work, own, mail, replicas, self._ending, job.may_stop_empty)
        # of a model that the caller holds
        self._stages = stages_of(job.model, cut) if job.numbers.is_given else {}
        forgotten = forget_others(job, own, cut)
        self._telling = Telling(
            mail, self.layout, self._with_loss(), job.schedule.accumulate, job.batch, groups[0] if groups else None,
            job.data_name,
        )  # fmt: skip
        self._evaluation = Evaluation(job, self._player, self._telling.with_loss, forgotten)
        import_compiler()
        with named_faults(self._player):
            offset = offset_to_first()
            record(job, self.layout, timeline, first_update, offset)
        self._timeline, self._steps, self._aligned = timeline, 0, first_update

    def _with_loss(self) -> List[int]:
        """The stages that have a loss."""
        last = self.layout.depth - 1
        if self._blocks is None:
            return [last]
        return [s for s in range(self.layout.depth) if s == last or self._blocks.head(s) is not None]

    def step(self, k: int) -> StepResult:
        player, is_first = self._player, self.layout.stage == 0
        with named_faults(player):
            until = self.job.done_with(k) if is_first else k + 1
            self._timeline.begin_step(self._steps > 0)  # the first step of a process warms up
            self._steps += 1
            if is_first and self._ending is None:
                self._telling.expect(k, until)
            while player.update < until and (self._ending is None or self._ending.has(player.update)):
                if is_first and self._ending is not None:
                    self._telling.expect(player.update, player.update + 1)
                self._telling.tell(player.update, player.step(player.update), player.place.checksums)
            result = self._telling.result(k)
            self._timeline.end_step()
            return result

    def end(self, done: int, asked: bool) -> int:
        if self._ending is None:
            return super().end(done, asked)
        with named_faults(self._player):
            if asked and self.is_main:
                self._ending.ask()
            self._ending.has(done)
        return self._ending.end

    def evaluate(self) -> List[Measured]:
        with self._drained("evaluate", "evaluation"):
            return self._evaluation()

    def state(self) -> Optional[CheckpointState]:
        with self._drained("checkpoint", "checkpoint"):
            self._player.rest()
            gathered = gather(self._player.mail, stage_state(self.job, self._player.place, self.names))
        return None if gathered is None else whole_state(self.job, gathered[: self.layout.depth])

    @contextlib.contextmanager
    def _drained(self, kind: str, doing: str) -> Iterator[None]:
        """What is done while the pipeline is empty, an event of its own; the clocks are compared, too."""
        self._player.doing = doing
        start = self._timeline.mark()
        with named_faults(self._player):
            yield
            self._timeline.flush()  # a checkpoint is written after this: a run that is killed then has lost no event before it
            self._align()
        self._timeline.add(kind, -1, start, version=self._player.update)

    def _align(self) -> None:
        """Compare the clocks, if something was recorded since the last time."""
        traced, done = self.job.traced, self._player.update + 1
        if max(traced.start, self._aligned) < min(traced.stop, done):
            self._timeline.synchronize(offset_to_first())
        self._aligned = done

    def report(self) -> Optional[Report]:
        self._player.doing = "report"
        with named_faults(self._player):
            self._aligned = 0
            self._align()
            own = stage_report(self.job, self._player, finished(self.job, self.layout, self._timeline))
            gathered = gather(self._player.mail, own)
        done = (self._player.update - self._first_update) * self.job.schedule.accumulate
        return None if gathered is None else whole_report(gathered, self.layout.depth, done)

    def close(self) -> None:
        self._player.doing = "end"
        with named_faults(self._player):
            if self._ending is not None:
                self._ending.flush()
            self._player.close()
            if self._stages:
                with self.job.numbers.whole(loads=True):
                    hand_round(self._player.mail, self.job.model, self._stages)
        self.abort()

    def abort(self) -> None:
        self._player.release()
        self._timeline.flush()
        self.release_blocks()


def make(job: Job, first_update: int) -> ProcessEngine:
    """This process's engine, to go on with update `first_update`."""
    refuse_poptorch_state(job.optimizer)
    return ProcessEngine(job, first_update)


def faults(job: Job) -> List[str]:
    """What processes cannot train: what is no pipeline's schedule, or not exactly."""
    method = job.method
    if method.history is not None:
        why = "draws what it reads, whatever a pipeline does"
        return [f"method: {method.name}: {why}, which processes do not carry out: use backend.name: emulator"]
    return [*list_exactness_faults(job), *_corrected(job)]


def _corrected(job: Job) -> List[str]:
    """A rule corrects the weights that a forward reads by what the stage keeps that holds them."""
    if not job.part.shared:
        return []
    keys = [rule.key for rule, _ in select_rules(job.config.method_settings(), job.method) if rule.read is not None]
    return [
        f"method_args.{key}: corrects {list_some(list(job.part.shared))}, which several stages use, by what one of them keeps:"
        " use backend.name: emulator, or untie them"
        for key in keys
    ]


BACKEND = Backend(check_launch, start, place, faults, lambda job: "", make)
