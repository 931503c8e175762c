"""The update of a stage: average its gradients over replicas and shared layers, clip them, and
step.
"""

from __future__ import annotations

import contextlib
import functools
from typing import (
    Any,
    Callable,
    ContextManager,
    Iterator,
    Mapping,
    NamedTuple,
    Sequence,
)

import torch

from ipu_pipe.backends import world
from ipu_pipe.backends.interface import StepResult
from ipu_pipe.backends.processes.agreement import READ_ALIKE, SET_ALIKE
from ipu_pipe.backends.processes.layout import RankLayout
from ipu_pipe.backends.processes.mail import NORM, RESULT, SHARED, WEIGHTS, Mail, Message, Shapes
from ipu_pipe.backends.processes.stage import Stage
from ipu_pipe.backends.processes.trace import TraceRecorder
from ipu_pipe.cut.crossing import TensorSpec
from ipu_pipe.errors import RunFault
from ipu_pipe.job.record import ComparedSettings
from ipu_pipe.model.batch import count_bytes
from ipu_pipe.replay.replicas import IndependentReplicas
from ipu_pipe.replay.run import Run
from ipu_pipe.replay.work import COLUMNS, Work, average
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.update.clipping import GradientClipping, OtherStages, compute_plain_norm

# ---- the average of gradients over the replicas of a stage (config key `reduction`)
#
#     exact   all-gather, then add in the order of the replicas: equal to the emulator bit for bit
#     fast    all-reduce in buckets, each begun as soon as its gradients are complete
#
#     the last backward of an update      layer 4 | layer 3 | layer 2 | layer 1 | U
#     fast                                         [ bucket of 4, 3 ]  [ of 2, 1 ]
#
# With nccl (`nccl.make_channels`) gradients stay on the GPU, otherwise they go through the host's
# memory.

BUCKET_BYTES = 4 << 20
DRAW_ALIKE = (
    "the inputs of one would be trained with the labels of the other; seed every generator that "
    "the data hold "
    "(numpy.random.default_rng(SEED)), or draw from the global ones, which are seeded alike on all "
    "ranks"
)


class ReplicaGroup(NamedTuple):
    """The ranks of a stage in all replicas: a gloo group, an nccl group (None if gradients go
    through the host), and whether `reduction` is fast."""

    host: Any
    device: Any = None
    is_fast: bool = False

    @property
    def of_gradients(self) -> Any:
        """The process group that the gradients go through."""
        return self.host if self.device is None else self.device


def average_over_replicas(
    parameters: Sequence[torch.nn.Parameter], mail: Mail, group: ReplicaGroup
) -> None:
    """Replace gradients by their mean over the ranks of a group, added up in the order of the
    replicas, one message per dtype.

    A gradient that is None on some ranks counts as zero there; one that is None on all ranks stays
    None.
    """
    # replicas may have run other layers, and all must gather tensors of one size
    has_gradient = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
    on_any_rank = torch.stack(mail.all_gather(has_gradient, group.host)).amax(dim=0)
    averaged = [p for p, has_any in zip(parameters, on_any_rank.tolist()) if has_any]
    # in the order of the parameters, which all ranks share; that of a set is each rank's own
    for dtype in dict.fromkeys(p.dtype for p in averaged):
        same_dtype = [p for p in averaged if p.dtype == dtype]
        replicas = mail.all_gather(_flatten(same_dtype, group), group.of_gradients)
        # one after another, as the emulator adds: a sum over a stacked dimension may round
        # otherwise
        mean = (functools.reduce(torch.add, replicas) / len(replicas)).to(same_dtype[0].device)
        for p, part in zip(same_dtype, mean.split([p.numel() for p in same_dtype])):
            p.grad = part.view_as(p)


def _flatten(parameters: Sequence[torch.nn.Parameter], group: ReplicaGroup) -> torch.Tensor:
    """Return all gradients in one tensor, on the device if there is an nccl group, else on the
    host.
    """
    flat = torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters]
    )
    return flat if group.device is not None else flat.cpu()


class OverlappedAverage:
    """Average a stage's gradients over its replicas by all-reduces that overlap with the last
    backward of an update.

    Every rank begins the buckets in the same order, whatever the order of its gradients, as
    PyTorch's DistributedDataParallel does (Li et al. 2020, section 3.2.3). `microbatches`: the
    microbatches of an update. `begins_early`: False if a rule corrects the gradients of a whole
    pass, which are final only at its end.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        mail: Mail,
        group: ReplicaGroup,
        microbatches: int,
        bucket_bytes: int = BUCKET_BYTES,
        begins_early: bool = True,
    ) -> None:
        self._mail = mail
        self._group = group
        self._microbatches = microbatches
        self._buckets = divide_into_buckets(parameters, bucket_bytes)
        self._bucket_of = {p: number for number, bucket in enumerate(self._buckets) for p in bucket}
        # the number of passes of the next update so far
        self._passes = 0
        # during the last pass: the parameters of each bucket whose gradients are not complete
        self._awaited: list[set[torch.nn.Parameter]] = []
        # the sum of each bucket that has begun, and its work
        self._begun: list[tuple[torch.Tensor, Any]] = []
        trained = [p for p in self._bucket_of if begins_early and p.requires_grad]
        self._hooks = [p.register_post_accumulate_grad_hook(self._note) for p in trained]

    @contextlib.contextmanager
    def add_pass(self) -> Iterator[None]:
        """Count the pass inside the context, which adds a microbatch's gradients; begin the sums in
        an update's last pass.
        """
        self._passes += 1
        is_last = self._passes == self._microbatches
        if is_last:
            self._awaited = [set(bucket) for bucket in self._buckets]
        yield
        # gradients that autograd has not reported by now are unused, or come without autograd
        if is_last:
            self._awaited = [set() for _ in self._buckets]
            self._begin_sums()
            self._awaited = []

    def _note(self, p: torch.nn.Parameter) -> None:
        """Note that autograd has added to a gradient."""
        if not self._awaited:
            return
        number = self._bucket_of[p]
        # a sum that has begun has a copy of the gradient, which would miss this part
        if number < len(self._begun):
            raise RunFault(
                f"reduction: fast: a gradient of shape {tuple(p.shape)} comes in several parts in "
                f"one backward (as of a reentrant"
                " checkpoint), the later after its sum over the replicas had begun: use reduction: "
                "exact"
            )
        self._awaited[number].discard(p)
        self._begin_sums()

    def _begin_sums(self) -> None:
        """Begin the sums of the next buckets whose gradients are complete."""
        while len(self._begun) < len(self._buckets) and not self._awaited[len(self._begun)]:
            bucket = self._buckets[len(self._begun)]
            # flags after the gradients tell the other ranks which of them exist
            has_gradient = torch.tensor(
                [float(p.grad is not None) for p in bucket], dtype=bucket[0].dtype
            )
            gradients = _flatten(bucket, self._group)
            total = torch.cat([gradients, has_gradient.to(gradients.device)])
            self._begun.append((total, self._mail.begin_sum(total, self._group.of_gradients)))
            for p in bucket:
                # the sum has a copy, and `finish` puts the mean back
                p.grad = None

    def finish(self) -> None:
        """Wait for the sums and put the means into the gradients."""
        group = self._group.of_gradients
        # gloo has no mean, so the sums are divided here
        count = torch.distributed.get_world_size(group)
        for bucket, (total, work) in zip(self._buckets, self._begun):
            self._mail.wait_for_all(work, group)
            *sums, replicas_with = (
                (total / count)
                .to(bucket[0].device)
                .split([*(p.numel() for p in bucket), len(bucket)])
            )
            # the share of the replicas that have the gradient, 0 if none has
            for p, mean, share in zip(bucket, sums, replicas_with.tolist()):
                p.grad = mean.view_as(p) if share else None
        self._passes = 0
        self._begun = []

    def remove_hooks(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()


def divide_into_buckets(
    parameters: Sequence[torch.nn.Parameter], most_bytes: int
) -> list[list[torch.nn.Parameter]]:
    """Divide parameters into buckets of one dtype and at most `most_bytes`, the last parameter
    first, as backwards reach them.

    A larger parameter gets a bucket of its own.
    """
    buckets: list[list[torch.nn.Parameter]] = []
    open_buckets: dict[torch.dtype, tuple[list[torch.nn.Parameter], int]] = {}
    for p in reversed(parameters):
        # without an open bucket the first parameter finds a full one, and so opens one
        bucket, size = open_buckets.get(p.dtype, ([], most_bytes))
        bytes_ = p.numel() * p.element_size()
        if size + bytes_ > most_bytes:
            bucket = []
            size = 0
            buckets.append(bucket)
        bucket.append(p)
        open_buckets[p.dtype] = bucket, size + bytes_
    return buckets


# ---- the update of a stage

# the norm that is sent for a missing gradient
NO_GRADIENT = -1.0
NORM_SHAPE = (TensorSpec((1,), torch.float64, False),)


class StageUpdate:
    """Carry out the updates of a stage of this rank, or of several stages that are updated
    together.

    `replicas`: the stages' replica group, None if there is one replica; `independent`: the replicas
    that have their own weights and take turns.
    """

    def __init__(
        self,
        work: Work,
        stages: Sequence[Stage],
        mail: Mail,
        recorder: TraceRecorder,
        replicas: ReplicaGroup | None = None,
        independent: Sequence[IndependentReplicas] = (),
    ) -> None:
        self.stages = stages
        self._work = work
        self._mail = mail
        self._recorder = recorder
        self._replicas = replicas
        self._independent = independent
        layout = stages[0].model.layout
        numbers = [stage.model.stage for stage in stages]
        # an overlapping layer belongs to another rank's stage, and is updated here too
        self._updated = [
            s for s in work.rules.stages if s in numbers or s not in layout.stages_of_rank
        ]
        parameters = {s: work.rules.stages[s].parameters for s in self._updated}
        self._norms = OtherRanksNorms(work, layout, numbers, mail, recorder, self._pause_event)
        self._parameters = [p for stage_parameters in parameters.values() for p in stage_parameters]
        masters = work.rules.masters
        is_sharded = masters is not None and masters.are_in_weights
        compute = self._compute_norm_of_shards if is_sharded else compute_plain_norm
        self.clipping = GradientClipping(work.clip, parameters, work.schedule, self._norms, compute)
        # FSDP2 has averaged the others
        self._unaveraged = [p for p in self._parameters if not self._is_averaged(p)]
        # stage -> average, if `reduction` is fast
        self.averages: dict[int, OverlappedAverage] = {}
        if replicas is not None and replicas.is_fast:
            # each microbatch of an update is one pass
            count = work.schedule.accumulate
            early = not work.rules.compensates
            self.averages = {
                s: OverlappedAverage(
                    [p for p in parameters[s] if not self._is_averaged(p)],
                    mail,
                    replicas,
                    count,
                    begins_early=early,
                )
                for s in numbers
                if s in parameters
            }
        self._update = -1
        self._start = recorder.mark()

    def _is_averaged(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether the caller's sharding averages a gradient over the replicas."""
        masters = self._work.rules.masters
        if self._replicas is None or masters is None or not masters.are_in_weights:
            return False
        return bool(masters.is_averaged(parameter, world.list_global_ranks(self._replicas.host)))

    def _compute_norm_of_shards(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the norm of a gradient over all shards of its weight."""
        # squares add up over shards, norms do not
        total = compute_plain_norm(parameter) ** 2
        # one after another, over each dimension in which the weight is sharded
        for group in self._work.rules.masters.list_groups_of(parameter):
            self._mail.wait_for_all(self._mail.begin_sum(total, group), group)
        return total.sqrt()

    def list_needs(self, stage: Stage, k: int) -> Iterator[tuple[Message, Shapes]]:
        """Yield the messages that update k of a stage needs, or that arrive after it, with their
        shapes.
        """
        model = stage.model
        if model.local is not None:
            for neighbor, shapes in model.local.list_needs():
                yield Message(SHARED, k, neighbor, model.stage), shapes
        for holder, shapes in model.ties.list_needs(WEIGHTS):
            yield Message(WEIGHTS, k, holder, model.stage), shapes
        source = self.clipping.delayed.get_source(k) if self.clipping.delayed is not None else None
        if source is not None:
            yield from self._norms.list_needs(source)

    def carry_out(self, k: int, sample: Callable[[int], None]) -> None:
        """Carry out update k; `sample` measures the memory just before the optimizer steps."""
        # independent replicas have stepped after their own backwards
        if self._independent:
            with self._record(k):
                for replicas in self._independent:
                    replicas.end_step(self._work, k)
        else:
            # the norm that clips is that of the mean, so the replicas come first
            if self._replicas is not None:
                start = self._recorder.mark()
                size = count_bytes(self._parameters)
                if self._replicas.is_fast:
                    for average_of_stage in self.averages.values():
                        average_of_stage.finish()
                else:
                    average_over_replicas(self._unaveraged, self._mail, self._replicas)
                self._recorder.add(Kind.AVERAGE.word, k, start, size=size, carries="gradients")
            # before the step: neighbors must step a shared layer by the same gradient
            for stage in self.stages:
                if stage.model.local is not None:
                    stage.model.local.average_gradients(k, stage.model.stage, self._mail)
            # the waits for other ranks are events of their own, before this one
            with self._record(k):
                for stage in self.stages:
                    stage.stash_weights()
                sample(k)
                self.step(k)
            self._work.rules.after_update(k, [stage.model.stage for stage in self.stages], False)
        # after the step, whose result tied weights are
        for stage in self.stages:
            stage.advance_version()
            if stage.model.ties.copied_to:
                stage.tied.send_weights(k)

    def step(self, k: int) -> None:
        """Clip the gradients of update k and let the optimizer and the rules step."""
        # weights that FSDP2 has gathered would not follow the step of their shards
        for stage in self.stages:
            stage.gathering.drop()
        with keep_version_counters(self._parameters):
            self._work.rules.step(k, self.clipping.clip, self._updated)

    # ---- the event of an update, in two parts if it waits for other ranks' norms in between

    @contextlib.contextmanager
    def _record(self, k: int) -> Iterator[None]:
        self._update, self._start = k, self._recorder.mark()
        yield
        self._recorder.add(Kind.UPDATE.word, k, self._start, version=k + 1)

    @contextlib.contextmanager
    def _pause_event(self) -> Iterator[None]:
        self._recorder.add(Kind.UPDATE.word, self._update, self._start, version=self._update + 1)
        yield
        self._start = self._recorder.mark()


class OtherRanksNorms(OtherStages):
    """The gradient norms of the replica's stages besides `here`. `pause_event`: a context for
    messages, which the update's event does not include."""

    def __init__(
        self,
        work: Work,
        layout: RankLayout,
        here: Sequence[int],
        mail: Mail,
        recorder: TraceRecorder,
        pause_event: Callable[[], ContextManager[None]],
    ) -> None:
        self._layout = layout
        self._mail = mail
        self._recorder = recorder
        self._pause_event = pause_event
        self._parameters = {
            s: work.rules.stages[s].parameters for s in here if s in work.rules.stages
        }
        self._here = here
        self._others = [stage for stage in range(layout.stages) if stage not in here]
        # the updates whose norms are announced to the mail
        self._expected: set[int] = set()
        # the parameters of the stage that has most
        self._max_parameters = 0
        if work.clip is not None and work.clip[1] == "global":
            count = max(map(len, self._parameters.values()), default=0)
            # an all-gather needs tensors of one shape on all ranks
            self._max_parameters = max(int(n) for n in mail.all_gather(torch.tensor([count])))

    def list_needs(self, k: int) -> Iterator[tuple[Message, Shapes]]:
        """Yield the messages with the norms of update k."""
        self._expected.add(k)
        for message in self._list_messages(k):
            yield message, NORM_SHAPE

    def _list_messages(self, k: int) -> list[Message]:
        return [Message(NORM, k, other, stage) for stage in self._here for other in self._others]

    def gather_norms(self, norms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        by_stage = torch.full(
            (self._layout.stages, self._max_parameters), NO_GRADIENT, dtype=torch.float64
        )
        rest = iter(norms)
        for stage, parameters in self._parameters.items():
            for i, p in enumerate(parameters):
                # float64 holds the norms of every dtype, which then go in one tensor
                by_stage[stage, i] = NO_GRADIENT if p.grad is None else next(rest).double().cpu()
        with self._pause_event():
            start = self._recorder.mark()
            by_rank = self._mail.all_gather(by_stage)
            self._recorder.add("wait", self._recorder.update, start, carries="norms")
        # each rank knows the rows of its own stages alone; here of all, (P * most,)
        all_norms = torch.cat(
            [by_rank[self._layout.find_rank(stage)][stage] for stage in range(self._layout.stages)]
        )
        all_norms = all_norms[all_norms != NO_GRADIENT]
        return list(all_norms.to(norms[0].device, norms[0].dtype) if norms else all_norms)

    def receive(self, k: int) -> dict[int, float | None]:
        norms: dict[int, float | None] = {}
        with self._pause_event():
            self._expected.discard(k)
            for message in self._list_messages(k):
                norm = float(self._mail.receive(message)[0])
                norms[message.source] = None if norm == NO_GRADIENT else norm
        return norms

    def send(self, k: int, norms: Mapping[int, float | None]) -> None:
        with self._pause_event():
            for stage in self._here:
                norm = norms.get(stage)
                # the receivers wait in any case: a stage without gradients sends a number that says
                # so
                value = torch.tensor([NO_GRADIENT if norm is None else norm], dtype=torch.float64)
                for other in self._others:
                    self._mail.send(Message(NORM, k, stage, other), [value])

    def discard(self, k: int) -> None:
        # of the last updates the norms were sent, and no later update has asked for them
        if k not in self._expected:
            self._mail.expect(list(self.list_needs(k)))
        for message in self._list_messages(k):
            self._mail.receive(message)


@contextlib.contextmanager
def keep_version_counters(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Hide an optimizer's step from autograd's check for in-place changes.

    The backward of a microbatch in flight reads the new weights on purpose, or gets the old weights
    back by pointer.
    """
    if not parameters:
        yield
        return
    with torch.autograd._unsafe_preserve_version_counter(tuple(parameters)):  # type: ignore[arg-type]
        yield


# ---- results of updates


class ResultCollection:
    """Collect the results of updates on the first stage of each replica (in an open run on every
    rank), and over the replicas.

    The stages `with_loss` send their tables of results (`work.tabulate`) to these ranks, with the
    checksums of the batches that they read for the labels. They must equal the checksums of the
    batches that the first stage read for its inputs. `group`: the group of the collecting ranks of
    all replicas, None if there is one replica.
    """

    def __init__(
        self,
        run: Run,
        mail: Mail,
        recorder: TraceRecorder,
        layout: RankLayout,
        with_loss: list[int],
        group: Any,
    ) -> None:
        self._batches = run.batches
        self._compared: ComparedSettings = run.options.compared
        self._mail = mail
        self._recorder = recorder
        self._layout = layout
        self._with_loss = with_loss
        self._group = group
        # each rank that collects is named by the lowest of its stages
        self._collectors = [layout.placement.index(device) for device in range(layout.devices)]
        self._here = (
            layout.stages_of_rank[0] if layout.stages_of_rank[0] in self._collectors else None
        )
        # the microbatches of an update on one replica, and its samples on all replicas
        self._microbatches = run.table.schedule.accumulate
        self._samples = run.samples
        self._columns = COLUMNS + (run.loss_weight is not None)
        # then the checksum of a microbatch's batch, and those of the update's settings
        columns = self._columns + 1 + len(self._compared.names)
        self._shapes = (TensorSpec((self._microbatches, columns), torch.float64, False),)
        # update -> checksums of the first stage; (update, stage) -> table of a stage of this rank
        self._checksums: dict[int, torch.Tensor] = {}
        self._own_tables: dict[tuple[int, int], torch.Tensor] = {}

    def expect(self, k: int) -> None:
        """Announce the results of update k on a rank that collects."""
        if self._here is not None:
            self._mail.expect(
                (Message(RESULT, k, stage, self._here), self._shapes)
                for stage in self._with_loss
                if stage not in self._layout.stages_of_rank
            )

    def send(
        self, k: int, stage: int, table: torch.Tensor | None, checksums: dict[int, int]
    ) -> None:
        """Send a stage's table of update k, None if it has no loss; remove the update's
        microbatches from `checksums`.
        """
        microbatches = range(k * self._microbatches, (k + 1) * self._microbatches)
        # float64 holds a checksum of 32 bits exactly; 0 stands for a microbatch not read here
        column = torch.tensor([checksums.pop(m, 0) for m in microbatches], dtype=torch.float64)
        if stage == 0:
            self._checksums[k] = column
        if table is None:
            return
        # repeated in each row, so that one tensor carries all
        settings = torch.tensor(self._compared.digest(k), dtype=torch.float64)
        settings = settings.expand(len(table), len(settings))
        results = torch.cat([table, column[:, None], settings], dim=1)
        for collector in self._collectors:
            if collector != self._here:
                self._mail.send(Message(RESULT, k, stage, collector), [results])
            else:
                self._own_tables[k, stage] = results

    def collect(self, k: int) -> StepResult:
        """Return the result of update k, which only ranks that collect know.

        Raise `RunFault` if stages read different batches.
        """
        if self._here is None:
            return StepResult(float("nan"), None, self._samples)
        checksums = self._checksums.pop(k, None)
        tables = []
        for stage in self._with_loss:
            results = self._own_tables.pop((k, stage), None)
            if results is None:
                results = self._mail.receive(Message(RESULT, k, stage, self._here))[0]
            column = results[:, self._columns]
            # None on a rank that collects and has not the first stage
            if checksums is not None and not torch.equal(checksums, column):
                self._require_same_batches(k, stage, checksums * column)
            rank = world.name_rank(self._layout.find_rank(stage))
            self._require_same_settings(k, rank, results[0, self._columns + 1 :])
            tables.append(results[:, : self._columns])
        table = torch.stack(tables)  # (blocks, microbatches, columns)
        if self._group is not None:
            start = self._recorder.mark()
            settings = torch.tensor(self._compared.digest(k), dtype=torch.float64)
            sent = torch.cat([table.flatten(), settings])
            gathered = self._mail.all_gather(sent, self._group)
            self._recorder.add("wait", k, start, carries="losses")
            replicas = []
            for rank, one in zip(world.list_global_ranks(self._group), gathered):
                self._require_same_settings(k, rank, one[table.numel() :])
                replicas.append(one[: table.numel()].view_as(table))
            # the emulator's order: microbatch 0 of each replica, microbatch 1 of each replica, ...
            table = torch.stack(replicas, dim=2).flatten(1, 2)
        # the whole model's loss is the last one
        blocks = [average(rows) for rows in table]
        return StepResult(*blocks[-1], self._samples, tuple(blocks) if len(blocks) > 1 else ())

    def _require_same_settings(self, k: int, rank: int, digests: torch.Tensor) -> None:
        """Raise `RunFault` if another rank, by its global number, has given the optimizer other
        settings for update k than this rank.
        """
        compared = self._compared
        other = digests.tolist()
        here = compared.digest(k)
        if here == other:
            return
        names = [name for name, a, b in zip(compared.names, here, other) if a != b]
        ranks = sorted((world.name_rank(self._layout.rank), rank))
        raise RunFault(
            f"step: optimizer: {', '.join(names)}: rank {ranks[0]} and rank {ranks[1]} have "
            f"different settings for step {k}: {SET_ALIKE}"
        )

    def _require_same_batches(self, k: int, stage: int, products: torch.Tensor) -> None:
        """Raise `RunFault` for the first stage and another one, which have different checksums of
        the batches of update k, unless one of them has none to compare, so that their `products`
        are 0.
        """
        if not products.any():
            return
        ranks = [world.name_rank(self._layout.find_rank(s)) for s in (0, stage)]
        # a loop's loader is the caller's own, so the remedy is another than for a config's data
        if not self._batches.reads_again:
            who = f"rank {ranks[0]} and rank {ranks[1]} have different labels for step {k}"
            raise RunFault(f"step: {who}: {READ_ALIKE}")
        who = f"rank {ranks[0]} and rank {ranks[1]} read different batches"
        raise RunFault(f"data: {self._batches.name}: update {k}: {who}: {DRAW_ALIKE}")
