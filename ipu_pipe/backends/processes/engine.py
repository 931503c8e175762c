"""One job on several processes: each rank holds stages and interprets its row of the schedule
(`interpreter`).

Rank 0 prints and writes. Gradients are averaged between the ranks of one stage in all replicas
(`layout.RankLayout`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import torch
from torch import nn

from ipu_pipe.backends import world
from ipu_pipe.backends.interface import Backend, CheckpointState, Engine, Report, StepResult
from ipu_pipe.backends.processes import collect, trace
from ipu_pipe.backends.processes.input_kinds import InputKinds
from ipu_pipe.backends.processes.interpreter import Interpreter
from ipu_pipe.backends.processes.launch import join, make_group
from ipu_pipe.backends.processes.layout import RankLayout, place, require_separable
from ipu_pipe.backends.processes.local import LocalBlock
from ipu_pipe.backends.processes.lost_ranks import LostRank, detect_lost_rank
from ipu_pipe.backends.processes.mail import REPLICAS, Mail
from ipu_pipe.backends.processes.nccl import make_channels
from ipu_pipe.backends.processes.stage import Stage, StageModel
from ipu_pipe.backends.processes.ties import Ties, find_ties
from ipu_pipe.backends.processes.update import ReplicaGroup, ResultCollection
from ipu_pipe.cut.cutting import Piece, list_crossings
from ipu_pipe.cut.verification import TrainingEffects
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.job.evaluation import BatchReader, EvaluationResult, Metrics
from ipu_pipe.job.record import ComparedSettings, Job, make_trace_metadata
from ipu_pipe.job.user_code import raise_attributed
from ipu_pipe.local.blocks import get_blocks
from ipu_pipe.model.batch import count_samples
from ipu_pipe.model.randomness import KeyedRandomness
from ipu_pipe.refusals import BATCH, EMULATOR
from ipu_pipe.replay.run import Run
from ipu_pipe.replay.work import LossShare, Work, list_exactness_faults
from ipu_pipe.schedule.actions import SPLIT_PASSES
from ipu_pipe.schedule.methods import Timeline
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.text import list_some
from ipu_pipe.update.rules import select_rules


@dataclass(frozen=True)
class ProcessOptions:
    """The options of the backend.

    `deadline`: seconds. `is_fast`: replicas average in any order. `is_sharded`: each rank writes
    its part of a checkpoint. `compiles`: the stages are compiled. `pieces`: the model cut into its
    stages. `keeps_model`: the whole model is used at the end. `compared`: what ranks compare with
    each result. `folder`: of the trace files with this `metadata`; None: none are written.
    `recomputes`: backwards run their forwards again.
    """

    deadline: float
    is_fast: bool
    is_sharded: bool
    compiles: bool
    pieces: Sequence[Piece]
    keeps_model: bool
    compared: ComparedSettings
    folder: Path | None
    metadata: dict[str, Any]
    recomputes: bool


class ProcessEngine(Engine):
    """The engine of a rank: it runs the rank's stages and joins the other ranks for results,
    evaluations and checkpoints.
    """

    def __init__(
        self,
        run: Run,
        layout: RankLayout,
        first_update: int,
        table: VersionTable,
    ) -> None:
        super().__init__(run)
        options: ProcessOptions = run.options
        work = Work.of(run, first_update, table)
        self._layout = layout
        self.is_main = layout.rank == 0
        self._first_update = first_update
        self._clocks_compared_at = first_update
        self._steps = 0
        # device -> the group of its ranks in all replicas
        groups: list[Any] = []
        # making a group is collective, so all ranks make the following ones in this order
        if layout.column is not None:
            groups = [world.get_data_group()] * layout.devices
        elif layout.replicas > 1:
            groups = [
                make_group(layout.list_ranks(device), options.deadline)
                for device in range(layout.devices)
            ]
        every_rank = range(world.get_world_size())
        if options.is_sharded:
            self.checkpoint_group = make_group(every_rank, options.deadline)
        self._microbatches = Microbatches(run, layout, work.microbatch)
        models, self._cut = cut_stages(run, layout, self._microbatches)
        stream = trace.make_stream_clock(run.device)
        self._recorder = trace.TraceRecorder(layout.rank, models[0].stage, run.trace, stream)
        channels = make_channels(run, layout, models[0].ties.links)
        self._replicas = self._make_replica_groups(groups, channels)
        self._kinds = make_input_kinds(run, layout, self._cut, models[0], channels)
        for model in models:
            model.kinds = self._kinds
            model.recomputes = options.recomputes
        # a group of its own, so that no message that a broken pipeline has left reaches the next
        # one, nor one of the caller's own
        self._group = make_group(every_rank, options.deadline)
        self._mail = Mail(
            layout,
            run.device,
            self._recorder,
            options.deadline,
            self._group,
            channels,
            _bound_sends(run),
            self._kinds,
        )
        # after the mail, which knows the limit of a wait
        self._ranks_of_shards = self._limit_groups_of_shards()
        group = groups[layout.rank % layout.devices] if groups else None
        # one for all stages of the rank, so that the labels of an update are read once
        if run.loss_weight is not None:
            self._weights = UpdateWeights(work, self._microbatches, self._mail, group)
            for model in models:
                model.weigh_update = self._weights.read
        self._models = models
        stages = self._make_stages(work)
        if work.schedule.passes == SPLIT_PASSES:
            self._split_backwards(stages)
        self._interpreter = Interpreter(
            work, stages, self._mail, self._recorder, self._replicas, channels
        )
        self._name_place = functools.partial(
            name_faults,
            world.name_rank(layout.rank),
            lambda: self._recorder.stage,
            lambda: self._interpreter.doing,
            lambda: self._interpreter.activity,
        )
        self._prepare_collection(group)
        # import now: an optimizer's first step would import it within the measured time
        importlib.import_module("torch._dynamo")
        with detect_lost_rank(limit=self._mail.limit):
            offset_ns = trace.compare_clocks()
            if options.folder is not None:
                trace.open_file(
                    options.folder, options.metadata, self._recorder, first_update, offset_ns
                )

    def _limit_groups_of_shards(self) -> list[int]:
        """Give the collectives of FSDP2 and tensor parallelism the deadline. Return the global ranks
        that they may wait for within a pass.
        """
        precision = self.run.precision
        groups = precision.masters.list_groups() if precision.is_sharded else []
        self._mail.limit_groups(groups)
        ranks = {rank for group in groups for rank in world.list_global_ranks(group)}
        # without this rank, which cannot be the one that it waits for
        return sorted(ranks - {world.name_rank(self._layout.rank)})

    @contextlib.contextmanager
    def _attribute_errors(self) -> Iterator[None]:
        """Add the place to faults, and name the rank that a caller's collective has waited for."""
        with self._name_place():
            if not self._ranks_of_shards:
                yield
                return
            with detect_lost_rank(self._ranks_of_shards, self._mail.limit, runs_other_code=True):
                yield

    def _make_replica_groups(self, groups: list[Any], channels: Any) -> list[ReplicaGroup]:
        """Return the group of each stage's replicas; `groups`: of each device's ranks, none without
        replicas.
        """
        if not groups:
            return []
        # None where gradients go through the host's memory
        nccl_group = (channels or {}).get(REPLICAS)
        return [
            ReplicaGroup(groups[device], nccl_group, self.run.options.is_fast)
            for device in self._layout.placement
        ]

    def _prepare_collection(self, group_of_replicas: Any) -> None:
        """Prepare what rank 0 or the caller gets from the ranks: losses, gradients, evaluations and
        the whole model.
        """
        run = self.run
        self.newest_model = None
        # for a model that the caller uses after training
        self._holders = (
            collect.find_holders(run.model, self._cut) if run.options.keeps_model else {}
        )
        self._gradient_collection: collect.GradientCollection | None = None
        self._freed = collect.free_other_stages(run, self._models, self._cut)
        self._kinds.fill = functools.partial(collect.zero_freed, self._freed)
        self._with_loss = _list_stages_with_loss(run)
        self._results = ResultCollection(
            run, self._mail, self._recorder, self._layout, self._with_loss, group_of_replicas
        )
        self._evaluation = collect.Evaluation(run, self._interpreter, self._with_loss, self._freed)

    def _make_stages(self, work: Work) -> dict[int, Stage]:
        """Return the rank's stages by number, for the work from an empty pipeline on."""
        return {
            model.stage: Stage(work, model, self._mail, self._recorder) for model in self._models
        }

    # ---- updates

    def give(self, k: int, cut: float) -> None:
        with self._attribute_errors():
            self._results.expect(k)
            if self._gradient_collection is not None:
                self._gradient_collection.expect(k)
            self._advance(cut, k + 1)
            self._steps += 1

    def _advance(self, cut: float, batches: int) -> None:
        # the first step of a process warms up
        self._recorder.begin_step(self._steps > 0)
        for k, tables in self._interpreter.advance(cut, batches):
            for s, stage in self._interpreter.stages.items():
                self._results.send(k, s, tables.get(s), stage.model.checksums)
            if self._gradient_collection is not None:
                self._gradient_collection.send(k)
        self._drop_gathered()
        self._recorder.end_step()

    def _drop_gathered(self) -> None:
        """Drop the weights that FSDP2 has gathered: between two calls the caller sees shards."""
        for stage in self._interpreter.stages.values():
            stage.gathering.drop()

    def take(self, k: int) -> StepResult:
        with self._attribute_errors():
            return self._results.collect(k)

    def finish(self, batches: int, table: VersionTable) -> None:
        with self._attribute_errors():
            self._advance(float("inf"), batches)
            self._interpreter.end_round(Work.of(self.run, batches, table))

    def reopen(self, update: int, table: VersionTable, is_loaded: bool = False) -> None:
        with self._attribute_errors():
            old = self._interpreter
            # the mail goes on, and the next stretch's messages may have the same numbers
            old.end()
            self._mail.forget_expected()
            self._kinds.forget()
            work = Work.of(self.run, update, table)
            stages = self._make_stages(work)
            for s, stage in stages.items():
                stage.continue_from(old.stages[s])
            # replicas with weights of their own go on through the optimizer's state; the mail has
            # used its channels
            with contextlib.nullcontext() if is_loaded else old.export_replicas():
                self._interpreter = Interpreter(
                    work, stages, self._mail, self._recorder, self._replicas
                )
            self._interpreter.memory.continue_from(old.memory)
            self._microbatches.restart(work.microbatch)
            if self.run.loss_weight is not None:
                self._weights.restart()

    def predict(self, x: Any) -> Any:
        with self._attribute_errors():
            self._interpreter.load_newest()
            output = self._evaluation.predict(x)
            self._drop_gathered()
            return output

    def load_weights(self, load: Callable[[], None]) -> None:
        for tensor in self._freed:
            # a freed tensor has one number for all its elements, and cannot be written
            tensor.data = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        load()
        collect.free(self._freed)

    def _split_backwards(self, stages: dict[int, Stage]) -> None:
        """Find the stages whose backward can be split and warn of the others. All ranks must call
        this at once.
        """
        # (P,); a rank knows its own stages alone
        is_whole = torch.zeros(self._layout.stages, dtype=torch.int64)
        for s, stage in stages.items():
            # a trial would write whole weights
            is_whole[s] = not (
                self.run.precision.is_sharded or stage.verify_split(self.run.example)
            )
        whole = (
            torch.stack(self._mail.all_gather(is_whole)).amax(dim=0).nonzero().flatten().tolist()
        )
        if whole:
            warnings.warn(
                f"stages {', '.join(map(str, whole))}: weight gradients are computed together with "
                f"input gradients:"
                " their backward does not come out the same, bit for bit, when its weight "
                "gradients are computed later",
                stacklevel=2,
            )

    def watch_gradients(self) -> None:
        collection = collect.GradientCollection(self.run, self._mail, self._layout)
        self._gradient_collection = collection
        self.run.rules.observe = collection.note

    def collect_gradients(self, k: int) -> dict[str, torch.Tensor]:
        assert self._gradient_collection is not None
        with self._attribute_errors():
            return self._gradient_collection.collect(k)

    def evaluate(self, batches: BatchReader, metrics: Metrics) -> list[EvaluationResult]:
        with self._record_pause("evaluate", "evaluation"):
            self._interpreter.load_newest()
            results = self._evaluation.evaluate(batches, metrics)
            self._drop_gathered()
            return results

    @contextlib.contextmanager
    def hold_whole_model(
        self, everywhere: bool = True, masters: bool = False
    ) -> Iterator[nn.Module | None]:
        if self.run.precision.is_sharded:
            yield self._copy_whole_model(everywhere)
            return
        self._interpreter.load_newest()
        try:
            # before the weights are gathered: the masters of other ranks are theirs
            with self.hold_masters() if masters else contextlib.nullcontext():
                self._gather_weights(everywhere)
                self.newest_model = self.run.model if everywhere or self.is_main else None
                try:
                    yield None
                finally:
                    self.newest_model = None
                    collect.free(self._freed)
        finally:
            # rounding the masters has made memory again
            collect.free(self._freed)

    def _gather_weights(self, everywhere: bool) -> None:
        """Copy the weights of other ranks into the model, on the main rank or on every one."""
        with self._record_pause("checkpoint", "whole model"):
            if everywhere:
                collect.broadcast_weights(
                    self._mail, self.run.model, self._holders, self._layout.placement, self._freed
                )
            else:
                collect.gather_weights(
                    self._mail, self.run.model, self._holders, self._layout, self._freed
                )

    def _copy_whole_model(self, everywhere: bool) -> nn.Module | None:
        """Return a copy of the model with whole weights, of those that the caller has sharded; None
        on other ranks than the first, unless `everywhere`.
        """
        state = self.collect_state()
        with self._attribute_errors():
            buffers = collect.gather_unsaved_buffers(self._mail, self.run.model, self._freed)
        if everywhere:
            values: list[Any] = [state, buffers]
            with self._attribute_errors(), detect_lost_rank(limit=self._mail.limit):
                world.broadcast_object_list(values, 0, self._mail.group)
            state, buffers = values
        if state is None:
            return None
        # the recorded model is on the meta device, without values
        model = copy.deepcopy(self._cut[0].cut.recorded_model).to_empty(device=self.run.device)
        model.load_state_dict(state.model)
        for name, buffer in model.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])
        for copied, module in zip(model.modules(), self.run.model.modules()):
            copied.training = module.training
        return model

    def collect_state(self) -> CheckpointState | None:
        with self._record_pause("checkpoint", "checkpoint"):
            ranks = collect.gather(self._mail, self._export(is_whole=True))
        return (
            # the ranks of the first replica, whose buffers are the model's
            None if ranks is None else collect.merge_ranks(self.run, ranks[: self._layout.devices])
        )

    def collect_part(self, every_replica: bool = False) -> CheckpointState:
        with self._record_pause("checkpoint", "checkpoint"):
            part = self._export(is_whole=False)
        # only the first replica writes
        if not self._layout.is_leading and not every_replica:
            return CheckpointState({}, {}, {})
        # all ranks have the tensors that no stage uses, so one writes them
        rest = collect.export_rest(self.run, self._cut) if self.is_main or every_replica else {}
        return part._replace(model={**part.model, **rest})

    def _export(self, is_whole: bool) -> CheckpointState:
        self._interpreter.load_newest()
        models = [stage.model for stage in self._interpreter.stages.values()]
        with self._interpreter.export_replicas():
            return collect.export_stages(self.run, models, self.names, is_whole)

    @contextlib.contextmanager
    def _record_pause(self, kind: str, doing: str) -> Iterator[None]:
        """Record the work in the context, between two updates, as one event `kind`; then flush and
        compare the clocks.
        """
        self._interpreter.doing = doing
        start = self._recorder.mark()
        with self._attribute_errors():
            yield
            # flush before the checkpoint is written: a run that is killed later has all events
            # before the checkpoint
            self._recorder.flush()
            self._compare_clocks()
        self._recorder.add(kind, -1, start, version=self._interpreter.update)

    def _compare_clocks(self) -> None:
        """Compare the clocks if events were recorded since the last comparison."""
        traced = self.run.trace
        done = self._interpreter.update + 1
        if max(traced.start, self._clocks_compared_at) < min(traced.stop, done):
            self._synchronize_clocks()
        self._clocks_compared_at = done

    def _synchronize_clocks(self) -> None:
        with detect_lost_rank(limit=self._mail.limit):
            self._recorder.synchronize(trace.compare_clocks())

    def report(self) -> Report | None:
        self._interpreter.doing = "report"
        with self._attribute_errors():
            if self.run.trace:
                # ranks may be at different updates, and all must compare
                self._synchronize_clocks()
            recorded = trace.read_back(self.run.options.folder, self._recorder)
            ranks = collect.gather(
                self._mail, collect.report_rank(self.run, self._interpreter, recorded)
            )
        # of this start alone, as the traffic that was counted
        microbatches = (
            self._interpreter.update - self._first_update
        ) * self.run.table.schedule.accumulate
        return None if ranks is None else collect.merge_reports(ranks, self._layout, microbatches)

    def close(self) -> None:
        self._interpreter.doing = "end"
        with self._attribute_errors():
            self._interpreter.close()
            if self._holders:
                with self.hold_masters():
                    collect.broadcast_weights(
                        self._mail, self.run.model, self._holders, self._layout.placement
                    )
                # with the weights whole, which a loss may use, too
                collect.broadcast_loss(self._mail, self.run.loss, self._layout.placement[-1])
                self.newest_model = self.run.model
        self.abort()

    def disconnect(self) -> None:
        world.end_group(self._group)

    def keep_newest(self) -> None:
        self._interpreter.load_newest()

    def leave(self) -> None:
        self._mail.leave()

    def abort(self) -> None:
        self._mail.release()
        self._interpreter.remove_hooks()
        self._recorder.flush(wait=True)
        self.release_blocks()


def _bound_sends(run: Run) -> int:
    """Return the most microbatches whose messages may be on their way on a link."""
    schedule = run.table.schedule
    # a file of rows may receive a message after any number of later ones
    if run.method.pipeline is Timeline.ROWS:
        return schedule.microbatches
    # with local losses no gradient comes back, so only the limit on sends tells that a message has
    # arrived
    if run.method.structure is not None:
        return 8 * (len(run.partition) + 1)
    return int(schedule.max_in_flight().max())


def cut_stages(
    run: Run, layout: RankLayout, microbatches: Microbatches
) -> tuple[list[StageModel], list[Piece]]:
    """Return this rank's stages of a run's model, which read `microbatches`, and the pieces of all
    stages.
    """
    blocks = get_blocks(run.model)
    cut = list(run.options.pieces) if blocks is None else blocks.pieces
    across = list_crossings(cut) if blocks is None else blocks.crossings
    if run.options.compiles:
        cut[0].cut.compile()
    draws = run.observation.effects.draws
    keyed = KeyedRandomness(run.model, draws, run.seed, run.device) if draws else None
    models = []
    for s in layout.stages_of_rank:
        ties = Ties()
        local = None
        if blocks is None:
            ties = find_ties(run.model, cut, s, layout.placement)
        else:
            local = LocalBlock.create(cut, s, blocks.overlap > 0, blocks.get_head(s))
        # each stage has its own, because it sends them with its own results
        checksums: dict[int, int] = {}
        read = functools.partial(microbatches.read, checksums)
        model = StageModel(
            layout, s, cut[s], across, read, run.device, keyed, local, ties, checksums
        )
        model.example = run.example
        models.append(model)
    return models, cut


def make_input_kinds(
    run: Run, layout: RankLayout, cut: Sequence[Piece], model: StageModel, channels: Any
) -> InputKinds:
    """Return the kinds of inputs of a rank, one of whose stages is `model`."""

    def require_sharing(effects: TrainingEffects) -> None:
        # blocks share nothing
        if model.local is None:
            require_separable(run.model, run.method, cut, layout.placement, effects)

    draws = run.observation.effects.draws
    # a forward of sharded weights cannot be verified
    is_fixed = channels is not None or cut[0].cut.is_recorded_elsewhere
    return InputKinds(
        cut, run.example[0], model.crossings, draws, model.list_entries, require_sharing, is_fixed
    )


class Microbatches:
    """The microbatches of a rank from `first` on, each read from the data once and in order.

    Several stages of the rank may take a microbatch: the first stage takes its inputs, stages with
    a loss take its labels.
    """

    def __init__(self, run: Run, layout: RankLayout, first: int) -> None:
        self._run = run
        self._source = run.batches
        self._samples = count_samples(run.example[0])
        self._replica = layout.replica
        self._next = first
        # replicas with weights of their own take turns in one row
        self._turns = run.replicas if run.method.rounds is not None else None
        # stages in between take neither inputs nor labels
        self._user_count = len({0, *_list_stages_with_loss(run)} & {*layout.stages_of_rank})
        # microbatch -> (number of stages that will still take it, batch, checksum)
        self._batches: dict[int, tuple[int, Any, int]] = {}

    def read(self, checksums: dict[int, int], m: int) -> tuple[Any, Any]:
        """Return inputs and labels of microbatch m, and add its checksum to `checksums`."""
        self._read_up_to(m)
        left, batch, checksum = self._batches.pop(m)
        if left > 1:
            self._batches[m] = left - 1, batch, checksum
        checksums[m] = checksum
        x, y = self._source.prepare(batch)
        if count_samples(x) != self._samples:
            raise BadInput(
                f"{BATCH}: microbatch {m}: {count_samples(x)} samples, the first had {self._samples}: "
                f"processes take one number: leave out a smaller last batch, or use {EMULATOR}"
            )
        return x, y

    def weigh(self, m: int) -> float:
        """Return the weight of microbatch m, which no stage has taken."""
        self._read_up_to(m)
        k = m // self._run.table.schedule.accumulate
        return self._source.weigh(self._batches[m][1], k, *self._locate(m))

    def _read_up_to(self, m: int) -> None:
        """Read the microbatches from the next one to m, and m again if all stages have taken it."""
        # a file of rows may ask for a later microbatch first
        for number in dict.fromkeys([*range(self._next, m + 1), m]):
            if number not in self._batches:
                batch = self._source.read(*self._locate(number))
                checksum = self._source.compute_checksum(batch)
                self._batches[number] = self._user_count, batch, checksum
        self._next = max(self._next, m + 1)

    def restart(self, first: int) -> None:
        """Go on with the microbatch `first`."""
        self._next = first
        self._batches.clear()

    def _locate(self, m: int) -> tuple[int, int]:
        """Return the number of microbatch m in its replica's data, and the replica."""
        return (m, self._replica) if self._turns is None else divmod(m, self._turns)


class UpdateWeights:
    """The weights of each update's microbatches in its mean loss, for the stages of a rank that
    have a loss.

    The labels of the whole update are read before the first of its backwards. `group`: the ranks of
    these stages in all replicas, whose sum counts; None if there is one replica. They all call
    `read` at the same place in their rows.
    """

    def __init__(self, work: Work, microbatches: Microbatches, mail: Mail, group: Any) -> None:
        self._work = work
        self._microbatches = microbatches
        self._mail = mail
        self._group = group
        # the newest update that was read, and its weights by microbatch
        self._newest: tuple[int, dict[int, LossShare]] = (-1, {})

    def restart(self) -> None:
        """Forget the newest update, whose number may come again."""
        self._newest = -1, {}

    def read(self, k: int) -> dict[int, LossShare]:
        """Return the weights of update k's microbatches, by microbatch."""
        if k == self._newest[0]:
            return self._newest[1]
        count = self._work.schedule.accumulate
        rank = 0
        numbers = range(k * count, (k + 1) * count)
        weights_here = torch.tensor(
            [self._microbatches.weigh(m) for m in numbers], dtype=torch.float64
        )
        by_replica = [weights_here]
        if self._group is not None:
            by_replica = self._mail.all_gather(weights_here, self._group)
            rank = torch.distributed.get_rank(self._group)
        # the emulator's order: microbatch 0 of each replica, microbatch 1 of each replica, ...
        in_order = torch.stack(by_replica, dim=1).flatten().tolist()
        # this replica's part of the order above
        weights = self._work.compute_weights(in_order, len(by_replica))[rank :: len(by_replica)]
        self._newest = k, dict(zip(numbers, weights))
        return self._newest[1]


def _list_stages_with_loss(run: Run) -> list[int]:
    blocks = get_blocks(run.model)
    last = len(run.partition) - 1
    if blocks is None:
        return [last]
    return [s for s in range(last + 1) if s == last or blocks.get_head(s) is not None]


@contextlib.contextmanager
def name_faults(
    rank: int,
    stage: Callable[[], int],
    action: Callable[[], str],
    doing: Callable[[], str],
) -> Iterator[None]:
    """Add rank, stage and action to faults: raise `RunFault` for a lost rank, and annotate the
    user's own exceptions.

    `stage`: returns the current stage; `action`: the letter and number of the current action;
    `doing`: the action in words, with the update.
    """
    try:
        yield
    except LostRank as error:
        raise RunFault(f"rank {rank}, stage {stage()}, action {action()}: {error}") from error
    # the user has stopped the run, which is no fault of a stage
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise_attributed(error, f"rank {rank}, stage {stage()}, {doing()}")


def make_options(job: Job) -> ProcessOptions:
    """Return the options of a job."""
    config = job.config
    folder = job.folder if job.traced_updates else None
    return ProcessOptions(
        config.backend.deadline,
        config.reduction == "fast",
        job.saves_shards,
        job.compiles_modules,
        job.pieces,
        (job.precision.is_given or job.keeps_whole) and not job.precision.is_sharded,
        job.compared,
        folder,
        {} if folder is None else make_trace_metadata(job),
        config.recompute,
    )


def make(run: Run, first_update: int, table: VersionTable) -> ProcessEngine:
    """Return this rank's engine, which continues with update `first_update`."""
    # replicas with weights of their own take turns in one pipeline
    copies = run.replicas if run.method.rounds is None else 1
    column = None if world.get_data_group() is None else world.get_replica()
    layout = RankLayout(world.get_rank(), run.placement, copies, column)
    doing = f"start before update {first_update}"
    rank = world.name_rank(layout.rank)
    with name_faults(rank, lambda: layout.stages_of_rank[0], lambda: "start", lambda: doing):
        return ProcessEngine(run, layout, first_update, table)


def list_faults(job: Job) -> list[str]:
    """Return the reasons why the result of processes would not be exact."""
    method = job.method
    # it is lacking, and has no pipeline whose result could be exact
    if method.history is not None:
        return []
    faults = list_exactness_faults(job)
    tied = list(job.partition.list_tied(job.model))
    # a rule corrects weights by state that only the owning stage has
    if tied:
        rules = [
            rule.key
            for rule, _ in select_rules(job.config.method_settings(), method)
            if rule.read is not None
        ]
        faults += [
            f"method_args.{key}: corrects {list_some(tied)}, which several stages use, with state "
            f"that only one of them has: use {EMULATOR}, or untie them"
            for key in rules
        ]
    return faults


BACKEND = Backend(
    launch=join,
    place=place,
    list_faults=list_faults,
    make_engine=make,
    make_options=make_options,
)
