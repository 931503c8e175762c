"""One job on several processes: each rank holds stages and interprets its row of the schedule (`interpreter`).

Rank 0 prints and writes. Gradients are averaged between the ranks of one stage in all replicas (`layout.RankLayout`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
import torch.distributed as dist

from ipu_pipe.backends.interface import Backend, CheckpointState, Engine, Report, StepResult
from ipu_pipe.backends.processes import collect, trace
from ipu_pipe.backends.processes.interpreter import BatchAnnouncements, Interpreter
from ipu_pipe.backends.processes.launch import join, make_group
from ipu_pipe.backends.processes.layout import RankLayout, place
from ipu_pipe.backends.processes.local import LocalBlock
from ipu_pipe.backends.processes.lost_ranks import LostRank, detect_lost_rank
from ipu_pipe.backends.processes.mail import REPLICAS, Mail
from ipu_pipe.backends.processes.nccl import make_channels
from ipu_pipe.backends.processes.stage import Stage, StageModel
from ipu_pipe.backends.processes.ties import Ties, find_ties
from ipu_pipe.backends.processes.update import ReplicaGroup, ResultCollection
from ipu_pipe.backends.work import Work, list_exactness_faults
from ipu_pipe.data.batches import compute_checksum
from ipu_pipe.errors import RunFault
from ipu_pipe.job.evaluation import EvaluationResult
from ipu_pipe.job.record import Job
from ipu_pipe.job.user_code import raise_attributed
from ipu_pipe.local.blocks import get_blocks
from ipu_pipe.model.batch import check_same_shapes
from ipu_pipe.model.cutting import Piece, list_crossings
from ipu_pipe.model.randomness import KeyedRandomness
from ipu_pipe.schedule.actions import SPLIT_PASSES
from ipu_pipe.schedule.methods import Pipeline
from ipu_pipe.text import list_some
from ipu_pipe.update.rules import select_rules


class ProcessEngine(Engine):
    """The engine of a rank: it runs the rank's stages and joins the other ranks for results, evaluations and checkpoints."""

    def __init__(self, job: Job, first_update: int) -> None:
        super().__init__(job)
        config, work = job.config, Work.of(job, first_update)
        self._layout = layout = RankLayout(dist.get_rank(), job.placement, config.replicas)
        self.is_main = layout.rank == 0
        self._first_update, self._aligned, self._steps = first_update, first_update, 0
        # the update before which the pipeline is empty next, and the updates that the first stage may be ahead of the last
        self._drained_at, self._ahead = 0, job.count_updates_ahead()
        # device -> the group of its ranks in all replicas
        groups: List[Any] = []
        if layout.replicas > 1:
            ranks = [range(d, dist.get_world_size(), layout.devices) for d in range(layout.devices)]
            groups = [make_group(ranks_of, config.backend.deadline) for ranks_of in ranks]
        if config.checkpoint is not None and config.checkpoint.format == "sharded":
            self.checkpoint_group = make_group(range(dist.get_world_size()), config.backend.deadline)
        models, cut = cut_stages(job, layout, work.microbatch)
        self._cut = cut
        first = models[0]
        stream = trace.StreamClock() if job.device.type == "cuda" else None
        self._recorder = trace.TraceRecorder(layout.rank, first.stage, job.traced_updates, stream)
        channels = make_channels(job, layout, first.ties.links)
        replicas: List[ReplicaGroup] = []
        if groups:
            on_device, is_fast = (channels or {}).get(REPLICAS), config.reduction == "fast"
            replicas = [ReplicaGroup(groups[device], on_device, is_fast) for device in layout.placement]
        # a file of rows may receive a message after any number of later ones
        in_flight = job.schedule.microbatches
        if job.method.pipeline is not Pipeline.ROWS:
            # with local losses no gradient comes back, so only the limit on sends tells that a message has arrived
            is_local = job.method.structure is not None
            in_flight = 8 * (layout.stages + 1) if is_local else int(job.schedule.max_in_flight().max())
        self._mail = Mail(layout, job.device, self._recorder, config.backend.deadline, None, channels, in_flight)
        self._early: Optional[BatchAnnouncements] = None
        if job.may_stop:
            batch, updates = job.schedule.accumulate, job.updates
            self._early = BatchAnnouncements(self._mail, layout.rank, batch, updates, first_update, channels is None)
        stages = {model.stage: Stage(work, model, self._mail, self._recorder) for model in models}
        if job.schedule.passes == SPLIT_PASSES:
            self._split_backwards(stages)
        self._interpreter = Interpreter(
            work, stages, self._mail, self._recorder, replicas, self._early, job.may_stop_drained, channels
        )
        interpreter, recorder = self._interpreter, self._recorder
        self._doing = layout.rank, lambda: recorder.stage, lambda: interpreter.doing, lambda: interpreter.place
        self.newest_model = None
        # for a model that the caller uses after training
        self._holders = collect.find_holders(job.model, cut) if job.precision.is_given or job.wants_model else {}
        self._observed: Optional[collect.GradientCollection] = None
        if job.watches_gradients:
            self._observed = collect.GradientCollection(job, self._mail, layout)
            job.rules.observe = self._observed.note
        self._freed = freed = collect.free_other_stages(job, models, cut)
        self._results = ResultCollection(
            self._mail, self._recorder, layout, _list_stages_with_loss(job), job.schedule.accumulate, job.global_batch_size,
            job.data_name, groups[layout.placement[0]] if groups else None,
        )  # fmt: skip
        self._evaluation = collect.Evaluation(job, self._interpreter, self._results.with_loss, freed)
        # import now: an optimizer's first step would import it within the measured time
        importlib.import_module("torch._dynamo")
        with detect_lost_rank(limit=self._mail.limit):
            trace.open_file(job, layout.rank, self._recorder, first_update, trace.compare_clocks())

    def _split_backwards(self, stages: Dict[int, Stage]) -> None:
        """Find the stages whose backward can be split and warn of the others. All ranks must call this at once."""
        is_whole = torch.zeros(self._layout.stages, dtype=torch.int64)
        for s, stage in stages.items():
            is_whole[s] = not stage.verify_split(self.job.example)
        whole = torch.stack(self._mail.all_gather(is_whole)).amax(dim=0).nonzero().flatten().tolist()
        if whole:
            warnings.warn(
                f"stages {', '.join(map(str, whole))}: W is computed with I: their backward does not come out the same, bit for"
                " bit, when its weight gradients are computed later",
                stacklevel=2,
            )

    def step(self, k: int, read: bool = True) -> List[StepResult]:
        interpreter, early, is_first = self._interpreter, self._early, 0 in self._layout.held
        with name_faults(*self._doing):
            # the first stage runs ahead until it has sent everything that update k of the last stage needs
            last = k + 1
            if is_first:
                if k >= self._drained_at:
                    self._drained_at = self.job.schedule.get_drain_interval(k)[1]
                last = min(k + self._ahead + 1, self._drained_at)
            # the first step of a process warms up
            self._recorder.begin_step(self._steps > 0)
            self._steps += 1
            if is_first and early is None:
                self._results.expect(k, last)
            if self._observed is not None:
                self._observed.expect(k)
            while interpreter.update < last and (early is None or early.starts(interpreter.update)):
                update = interpreter.update
                if is_first and early is not None:
                    self._results.expect(update, update + 1)
                tables = interpreter.step(update)
                for s, stage in interpreter.stages.items():
                    self._results.send(update, s, tables.get(s), stage.model.checksums)
                if self._observed is not None:
                    self._observed.send(update)
            result = self._results.collect(k)
            self._recorder.end_step()
            return [result]

    def collect_gradients(self, k: int) -> Dict[str, torch.Tensor]:
        assert self._observed is not None
        with name_faults(*self._doing):
            return self._observed.collect(k)

    def end(self, done: int, stop_requested: bool) -> int:
        if self._early is None:
            return super().end(done, stop_requested)
        with name_faults(*self._doing):
            if stop_requested and self.is_main:
                self._early.ask()
            self._early.starts(done)
        return self._early.end

    def evaluate(self, split: str = "test") -> List[EvaluationResult]:
        with self._drained("evaluate", "evaluation"):
            self._interpreter.load_newest()
            with self.job.rules.hold_averages():
                return self._evaluation(split)

    @contextlib.contextmanager
    def hold_whole_model(self) -> Iterator[None]:
        with self._drained("gather", "whole model"):
            self._interpreter.load_newest()
            collect.broadcast_weights(self._mail, self.job.model, self._holders, self._layout.placement, self._freed)
        self.newest_model = self.job.model
        try:
            yield
        finally:
            self.newest_model = None
            collect.free(self._freed)

    def state(self) -> Optional[CheckpointState]:
        with self._drained("checkpoint", "checkpoint"):
            ranks = collect.gather(self._mail, self._export())
        return None if ranks is None else collect.merge_ranks(self.job, ranks[: self._layout.devices])

    def part(self) -> CheckpointState:
        with self._drained("checkpoint", "checkpoint"):
            part = self._export()
        # only the first replica writes
        if self._layout.replica:
            return CheckpointState({}, {}, {})
        rest = collect.export_rest(self.job, self._cut) if self.is_main else {}
        return part._replace(model={**part.model, **rest})

    def _export(self) -> CheckpointState:
        self._interpreter.load_newest()
        models = [stage.model for stage in self._interpreter.stages.values()]
        with self._interpreter.exported():
            return collect.export_stages(self.job, models, self.names)

    @contextlib.contextmanager
    def _drained(self, kind: str, doing: str) -> Iterator[None]:
        """Record the context, in which the pipeline is empty, as one event `kind`, and compare the clocks after it."""
        self._interpreter.doing = doing
        start = self._recorder.mark()
        with name_faults(*self._doing):
            yield
            # flush before the checkpoint is written: a run that is killed later has all events before the checkpoint
            self._recorder.flush()
            self._align_clocks()
        self._recorder.add(kind, -1, start, version=self._interpreter.update)

    def _align_clocks(self) -> None:
        """Compare the clocks if events were recorded since the last comparison."""
        traced, done = self.job.traced_updates, self._interpreter.update + 1
        if max(traced.start, self._aligned) < min(traced.stop, done):
            with detect_lost_rank(limit=self._mail.limit):
                self._recorder.synchronize(trace.compare_clocks())
        self._aligned = done

    def report(self) -> Optional[Report]:
        self._interpreter.doing = "report"
        with name_faults(*self._doing):
            self._aligned = 0
            self._align_clocks()
            recorded = trace.read_back(self.job, self._layout.rank, self._recorder)
            ranks = collect.gather(self._mail, collect.report_rank(self.job, self._interpreter, recorded))
        microbatches = (self._interpreter.update - self._first_update) * self.job.schedule.accumulate
        return None if ranks is None else collect.merge_reports(ranks, self._layout, microbatches)

    def close(self) -> None:
        self._interpreter.doing = "end"
        with name_faults(*self._doing):
            self._interpreter.close()
            if self._holders:
                with self.job.precision.put_masters_in_place(loads=True):
                    collect.broadcast_weights(self._mail, self.job.model, self._holders, self._layout.placement)
                self.newest_model = self.job.model
        self.abort()

    def abort(self) -> None:
        self._interpreter.remove_hooks()
        self._recorder.flush()
        self.release_blocks()


def cut_stages(job: Job, layout: RankLayout, first: int) -> Tuple[List[StageModel], List[Piece]]:
    """Return this rank's stages of a job's model, whose first microbatch is `first`, and the pieces of all stages."""
    blocks = get_blocks(job.model)
    cut = list(job.pieces) if blocks is None else blocks.pieces
    across = list_crossings(cut) if blocks is None else blocks.crossings
    if job.config.model.compile:
        cut[0].cut.compile()
    draws = job.effects.draws
    keyed = KeyedRandomness(job.model, draws, job.config.seed, job.device) if draws else None
    source = Microbatches(job, layout, first)
    models = []
    for s in layout.held:
        ties, local = Ties(), None
        if blocks is None:
            ties = find_ties(job.model, cut, s, layout.placement)
        else:
            local = LocalBlock.of(cut, s, blocks.overlap > 0, blocks.head(s))
        checksums: Dict[int, int] = {}
        read = functools.partial(source.read, checksums)
        models.append(StageModel(layout, s, cut[s], across, read, job.device, keyed, local, ties, checksums))
    return models, cut


class Microbatches:
    """The microbatches of a rank from `first` on, each read from the data once and in order.

    Several stages of the rank may take a microbatch: the first stage takes its inputs, stages with a loss take its labels.
    """

    def __init__(self, job: Job, layout: RankLayout, first: int) -> None:
        self._job, self._replica, self._next = job, layout.replica, first
        # replicas with weights of their own take turns in one row
        self._turns = job.replica_count if job.method.rounds is not None else None
        self._readers = len({0, *_list_stages_with_loss(job)} & {*layout.held})
        # microbatch -> (number of stages that will still take it, batch, checksum)
        self._kept: Dict[int, Tuple[int, Any, int]] = {}

    def read(self, checksums: Dict[int, int], m: int) -> Tuple[Any, Any]:
        """Return inputs and labels of microbatch m, and add its checksum to `checksums`."""
        job = self._job
        # a file of rows may ask for a later microbatch first
        while self._next <= m:
            self._kept[self._next] = self._read(self._next)
            self._next += 1
        left, batch, checksum = self._kept.pop(m) if m in self._kept else self._read(m)
        if left > 1:
            self._kept[m] = left - 1, batch, checksum
        checksums[m] = checksum
        x, y = job.prepare_batch(batch)
        check_same_shapes(x, job.example[0], m)
        return x, y

    def _read(self, m: int) -> Tuple[int, Any, int]:
        job, turns = self._job, self._turns
        batch = job.read_microbatch(m, self._replica) if turns is None else job.read_microbatch(m // turns, m % turns)
        return self._readers, batch, compute_checksum(batch)


def _list_stages_with_loss(job: Job) -> List[int]:
    blocks, last = get_blocks(job.model), len(job.partition) - 1
    if blocks is None:
        return [last]
    return [s for s in range(last + 1) if s == last or blocks.head(s) is not None]


@contextlib.contextmanager
def name_faults(
    rank: int, stage: Callable[[], int], action: Callable[[], str], doing: Callable[[], str]
) -> Iterator[None]:
    """Add rank, stage and action to faults: raise `RunFault` for a lost rank, and annotate the user's own exceptions.

    `stage`: returns the current stage; `action`: the letter and number of the current action; `doing`: the action in words,
    with the update.
    """
    try:
        yield
    except LostRank as error:
        raise RunFault(f"rank {rank}, stage {stage()}, action {action()}: {error}") from error
    except Exception as error:
        raise_attributed(error, f"rank {rank}, stage {stage()}, {doing()}")


def make(job: Job, first_update: int) -> ProcessEngine:
    """Return this rank's engine, which continues with update `first_update`."""
    layout = RankLayout(dist.get_rank(), job.placement, job.config.replicas)
    with name_faults(layout.rank, lambda: layout.held[0], lambda: "start", lambda: f"start before update {first_update}"):
        return ProcessEngine(job, first_update)


def list_faults(job: Job) -> List[str]:
    """Return the reasons why processes cannot train a job: the method has no pipeline, or the result would not be exact."""
    method = job.method
    if method.history is not None:
        why = "draws the weight versions at random, which no pipeline of processes does"
        return [f"method: {method.name}: {why}: use backend.name: emulator"]
    faults = list_exactness_faults(job)
    tied = list(job.partition.list_tied(job.model))
    # a rule corrects weights by state that only the owning stage has
    if tied:
        rules = [rule.key for rule, _ in select_rules(job.config.method_settings(), method) if rule.read is not None]
        faults += [
            f"method_args.{key}: corrects {list_some(tied)}, which several stages use, with state that only one of them"
            " has: use backend.name: emulator, or untie them"
            for key in rules
        ]
    return faults


BACKEND = Backend(launch=join, place=place, faults=list_faults, engine=make)
