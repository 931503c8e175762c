"""Collect from all ranks: checkpoints, evaluations, reports, and gradients for callbacks."""

from __future__ import annotations

import contextlib
import operator
import time
import zlib
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Sequence, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ipu_pipe.backends import world
from ipu_pipe.backends.interface import CheckpointState, DeviceTimes, Report
from ipu_pipe.backends.processes.interpreter import Interpreter
from ipu_pipe.backends.processes.layout import RankLayout
from ipu_pipe.backends.processes.lost_ranks import (
    KEEPER,
    Termination,
    answer_within,
    detect_lost_rank,
)
from ipu_pipe.backends.processes.mail import ASKED, OBSERVED, TEST, Mail, Message
from ipu_pipe.backends.processes.stage import StageModel
from ipu_pipe.backends.processes.update import DRAW_ALIKE
from ipu_pipe.cut.crossing import Crossing, TensorSpec
from ipu_pipe.cut.cutting import Piece
from ipu_pipe.data.sources import compute_checksum
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.job.evaluation import BatchReader, EvaluationResult, Metrics, Tally, evaluate_sums
from ipu_pipe.local.blocks import HEADS, get_activation, get_blocks
from ipu_pipe.model.batch import count_samples, describe_tensors
from ipu_pipe.model.loss import get_labels
from ipu_pipe.model.precision import export_loss, get_user_loss
from ipu_pipe.model.restoring import restore_modes
from ipu_pipe.replay.run import Run
from ipu_pipe.trace.events import Trace, concatenate_counters, concatenate_events
from ipu_pipe.update import optimizer

# key of the store: the number of batches that all stages together have evaluated
EVALUATED = "ipu_pipe/evaluated"
PASS_ALIKE = (
    "the ranks have different batches or metrics: pass the same ones on all ranks: do not shard a "
    "loader by rank, and seed its shuffle alike"
)

Value = TypeVar("Value")


def gather(mail: Mail, value: Value) -> list[Value] | None:
    """Return every rank's value on rank 0, else None."""
    mail.meet()
    values: Any = [None] * world.get_world_size() if world.get_rank() == 0 else None
    with detect_lost_rank(limit=mail.limit):
        world.gather_object(value, values, mail.group)
    return values  # type: ignore[no-any-return]


# ---- weights and optimizer state


def export_stages(
    run: Run, models: Sequence[StageModel], names: dict[nn.Parameter, str], is_whole: bool
) -> CheckpointState:
    """Return a rank's part of a checkpoint, on the host. `names`: parameter -> name, for all
    parameters of the optimizer. `is_whole`: with whole tensors of weights that the caller has
    sharded.
    """
    parameters: list[torch.Tensor] = []
    for model in models:
        parameters += [
            *model.piece.list_tensors(),
            *(model.head.parameters() if model.head is not None else ()),
        ]
    trained = {id(run.precision.get_trained(p)) for p in parameters if isinstance(p, nn.Parameter)}
    names = {p: name for p, name in names.items() if id(p) in trained}
    tensors, plain = optimizer.export_state(run.optimizer, names)
    export = make_export(run, is_whole)
    # a key is the weight's name, a slash and the entry
    tensors = {key: export(key.rpartition("/")[0], value) for key, value in tensors.items()}
    weights: dict[str, torch.Tensor] = {}
    for model in models:
        # a checkpoint has the exact weights, not the rounded ones
        with run.precision.put_masters_in_place():
            state = model.piece.select_state()
            weights.update({key: export(key, t).detach().cpu() for key, t in state.items()})
        if model.head is not None:
            head = f"{HEADS}.{model.stage}"
            weights.update(
                {
                    f"{head}.{key}": value.detach().cpu()
                    for key, value in model.head.state_dict().items()
                }
            )
    # the loss runs on the last stage, and moves what it keeps there
    has_loss = any(model.stage == len(run.partition) - 1 for model in models)
    loss = export_loss(run.loss) if has_loss else {}
    on_host = {key: value.cpu() for key, value in tensors.items()}
    return CheckpointState(weights, on_host, plain, loss)


def make_export(run: Run, is_whole: bool) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Return a function of the name of a weight and one of its tensors, which returns the whole
    tensor of a shard, or unless `is_whole` its DTensor.
    """
    masters = run.precision.masters
    if masters is None or not masters.are_in_weights:
        return lambda name, value: value
    weights = dict(run.model.named_parameters(remove_duplicate=False))
    return lambda name, value: masters.export(name, value, weights, is_whole)


def merge_ranks(run: Run, ranks: Sequence[CheckpointState]) -> CheckpointState:
    """Merge the states of one replica's ranks into the state of the unsplit model."""
    model, tensors, plain, loss = (
        {key: value for part in parts for key, value in part.items()} for parts in zip(*ranks)
    )
    with run.precision.put_masters_in_place():
        # tensors that no piece uses are unchanged here
        state = run.model.state_dict()
    whole = {name: model.get(name, value) for name, value in state.items()}
    return CheckpointState(whole, tensors, plain, loss)


def export_rest(run: Run, cut: Sequence[Piece]) -> dict[str, torch.Tensor]:
    """Return the part of the model's state that no stage uses; `cut`: the pieces of all stages."""
    in_pieces = {name for piece in cut for name in piece.select_state()}
    with run.precision.put_masters_in_place():
        state = run.model.state_dict()
    return {
        name: value
        for name, value in state.items()
        if name not in in_pieces and not name.startswith(HEADS)
    }


def find_holders(model: nn.Module, cut: Sequence[Piece]) -> dict[str, int]:
    """Return the stage that holds each parameter and buffer of a model, by its name."""
    stage_of = {
        id(tensor): stage for stage, piece in enumerate(cut) for tensor in piece.list_tensors()
    }
    # tensors that no stage holds are left out: they stay as they are
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: stage_of[id(tensor)] for name, tensor in named if id(tensor) in stage_of}


def broadcast_weights(
    mail: Mail,
    model: nn.Module,
    holders: dict[str, int],
    placement: Sequence[int],
    freed: Sequence[torch.Tensor] | None = None,
) -> None:
    """Copy the tensors of the first replica's stages into every rank's model.

    `holders`: the result of `find_holders`; `placement`: the device, which is the rank, of each
    stage; `freed`: the tensors to copy into, all if None.
    """
    mail.meet()
    freed_ids = None if freed is None else {id(tensor) for tensor in freed}
    # in the same order on all ranks, because a broadcast is collective
    for stage in sorted({*holders.values()}):
        tensors = {
            name: operator.attrgetter(name)(model) for name, s in holders.items() if s == stage
        }
        values: Any = [None]
        source = placement[stage]
        if world.get_rank() == source:
            values = [{name: t.detach().cpu() for name, t in tensors.items()}]
        with detect_lost_rank(limit=mail.limit):
            world.broadcast_object_list(values, source, mail.group)
        for name, tensor in tensors.items():
            if freed_ids is None or id(tensor) in freed_ids:
                # not copied into: a freed tensor has one number for all its elements
                tensor.data = values[0][name].to(tensor.device)


def broadcast_loss(mail: Mail, loss: Any, source: int) -> None:
    """Give every rank the state of a loss that is a module, which the rank `source` has moved."""
    values = [export_loss(loss)]
    # a module has the same names on all ranks
    if not values[0]:
        return
    with detect_lost_rank(limit=mail.limit):
        world.broadcast_object_list(values, source, mail.group)
    get_user_loss(loss).load_state_dict(values[0])


def gather_weights(
    mail: Mail,
    model: nn.Module,
    holders: dict[str, int],
    layout: RankLayout,
    freed: Sequence[torch.Tensor],
) -> None:
    """Copy the tensors of the first replica's stages into rank 0's model; arguments as of
    `broadcast_weights`.
    """
    stages_here = layout.stages_of_rank if layout.is_leading else []
    names_here = [name for name, stage in holders.items() if stage in stages_here]
    # rank 0's own are in the model already
    tensors = {
        name: operator.attrgetter(name)(model).detach().cpu() for name in names_here if layout.rank
    }
    freed_ids = {id(tensor) for tensor in freed}
    for part in gather(mail, tensors) or []:
        for name, value in part.items():
            tensor = operator.attrgetter(name)(model)
            if id(tensor) in freed_ids:
                tensor.data = value.to(tensor.device)


def gather_unsaved_buffers(
    mail: Mail, model: nn.Module, freed: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the buffers that the model's state dict lacks, whole, each from a rank that has it, on
    rank 0; none on other ranks.
    """
    saved = model.state_dict()
    freed_ids = {id(tensor) for tensor in freed}
    here = {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).cpu()
        for name, t in model.named_buffers()
        if name not in saved and id(t) not in freed_ids
    }
    return {name: t for part in gather(mail, here) or [] for name, t in part.items()}


# ---- memory of the other ranks' stages


def free_other_stages(
    run: Run, models: Sequence[StageModel], cut: Sequence[Piece]
) -> list[torch.Tensor]:
    """Free the tensors of the model that other ranks hold, and return them."""
    pieces = [
        piece for model in models for piece in (model.piece, model.previous) if piece is not None
    ]
    # by identity, because a weight of another stage may be tied to one here
    here = {id(t) for piece in pieces for t in piece.list_tensors()}
    others = [t for piece in cut for t in piece.list_tensors()]
    blocks = get_blocks(run.model)
    if blocks is not None:
        blocks.forget_duplicates()
        for index, head in blocks.heads.items():
            if index not in [str(model.stage) for model in models]:
                others += [*head.parameters(), *head.buffers()]
    others = [t for t in others if id(t) not in here]
    return free(
        # the exact copies of freed weights are freed with them
        [*others, *(run.precision.get_trained(t) for t in others if isinstance(t, nn.Parameter))]
    )


def free(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Free the memory of tensors and return them: they keep their shapes, their values become
    NaN.
    """
    freed = list(tensors)
    for tensor in freed:
        # NaN shows in any result that reads a freed weight by mistake
        value = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
        # one number that is expanded: the shape stays, the memory goes
        tensor.data = torch.full((), value, dtype=tensor.dtype, device=tensor.device).expand(
            tensor.shape
        )
    return freed


@contextlib.contextmanager
def zero_freed(freed: Sequence[torch.Tensor]) -> Iterator[None]:
    """Make freed tensors dense zeros inside the context, for a forward of the whole model, which
    may refuse NaN.
    """
    data = [tensor.data for tensor in freed]
    try:
        for tensor in freed:
            tensor.data = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        yield
    finally:
        for tensor, value in zip(freed, data):
            tensor.data = value


# ---- the gradients of updates


class GradientCollection:
    """Send the gradients of updates from the first replica's stages to rank 0, for callbacks; other
    replicas have equal ones.
    """

    def __init__(self, run: Run, mail: Mail, layout: RankLayout) -> None:
        self._mail = mail
        self._layout = layout
        named = {s: run.list_trained(s) for s in range(layout.stages)}
        self._names = {s: list(parameters) for s, parameters in named.items() if parameters}
        self._parameters = {
            s: list(parameters.values()) for s, parameters in named.items() if parameters
        }
        # (update, stage) -> which parameters have a gradient, and the bytes of all gradients
        self._noted: dict[tuple[int, int], list[torch.Tensor]] = {}

    def note(self, k: int, stages: Sequence[int]) -> None:
        """Copy the gradients of update k of these stages."""
        for s in stages:
            if (
                s in self._parameters
                and s in self._layout.stages_of_rank
                and self._layout.replica == 0
            ):
                gradients = [
                    torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters[s]
                ]
                # one message of bytes, whatever the dtypes of the gradients are
                all_bytes = torch.cat(
                    [g.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for g in gradients]
                )
                has_gradient = torch.tensor(
                    [p.grad is not None for p in self._parameters[s]], dtype=torch.uint8
                )
                self._noted[k, s] = [has_gradient, all_bytes]

    def expect(self, k: int) -> None:
        """Announce the messages of update k on rank 0."""
        if self._layout.rank == 0:
            for s, parameters in self._parameters.items():
                sizes = len(parameters), sum(p.numel() * p.element_size() for p in parameters)
                self._mail.expect(
                    [
                        (
                            Message(OBSERVED, k, s, 0),
                            tuple(TensorSpec((n,), torch.uint8, False) for n in sizes),
                        )
                    ]
                )

    def send(self, k: int) -> None:
        """Send the copied gradients of update k to rank 0."""
        # rank 0 keeps its own in `_noted`
        for s in self._parameters if self._layout.rank else ():
            if (k, s) in self._noted:
                self._mail.send(Message(OBSERVED, k, s, 0), self._noted.pop((k, s)))

    def collect(self, k: int) -> dict[str, torch.Tensor]:
        """Return the gradients of update k by parameter name on rank 0, an empty dict on other
        ranks.
        """
        gradients: dict[str, torch.Tensor] = {}
        for s, parameters in self._parameters.items() if self._layout.rank == 0 else ():
            noted = self._noted.pop((k, s), None)
            has_gradient, all_bytes = (
                self._mail.receive(Message(OBSERVED, k, s, 0)) if noted is None else noted
            )
            parts = all_bytes.split([p.numel() * p.element_size() for p in parameters])
            for name, p, gradient_bytes, is_there in zip(
                self._names[s], parameters, parts, has_gradient.tolist()
            ):
                if is_there:
                    # cloned, because a part may begin at a byte at which no number of this dtype
                    # can
                    gradients[name] = gradient_bytes.clone().view(p.dtype).view(p.shape)
        return gradients


# ---- the test set


class Evaluation:
    """Evaluate the test set with forwards of the first replica's stages; other replicas wait.

    `with_loss`: the stages that sum up losses and metrics; `freed`: the freed tensors of the other
    ranks' stages.
    """

    def __init__(
        self,
        run: Run,
        interpreter: Interpreter,
        with_loss: list[int],
        freed: list[torch.Tensor],
    ) -> None:
        self._run = run
        self._with_loss = with_loss
        self._freed = freed
        self._models = [stage.model for stage in interpreter.stages.values()]
        self._mail = interpreter.mail
        self._layout = interpreter.layout
        self._count = 0
        self._predicted = 0

    def evaluate(self, batches: BatchReader, metrics: Metrics) -> list[EvaluationResult]:
        """Return loss and metrics of each stage with a loss for the loaded weights, the same on
        every rank.
        """
        layout = self._layout
        # finish the messages of training: waiting for them must not count as evaluation
        self._mail.flush()
        empty = Tally(self._run.loss, metrics).sums
        # a float64 also holds a checksum of 32 bits exactly
        sums = torch.zeros(layout.stages, len(empty) + 1, dtype=torch.float64)
        with self._enter_evaluation():
            if layout.is_leading:
                self._sum_by_stage(batches(), metrics, sums)
        # other columns evaluate for themselves
        others_wait = layout.replicas > 1 and layout.column is None
        self._count += others_wait
        done = f"ipu_pipe/evaluation-{self._count}/done"
        if others_wait:
            wait_for_first_replica(layout, self._mail, done)
        # complete the sends, which frees the activations of the test set
        self._mail.flush()
        by_rank = self._mail.all_gather(sums)
        if others_wait and layout.replica == 0:
            # nobody waits any more, and the next engine of these processes counts from 1 again
            with detect_lost_rank(limit=self._mail.limit):
                limit = self._mail.limit.total_seconds()
                answer_within(limit, lambda: world.get_own_store().delete_key(done))
        if others_wait:
            # another pipeline of these processes has the same key for its own evaluation
            self._mail.meet()
        by_stage = [by_rank[device][stage] for stage, device in enumerate(layout.placement)]
        # stages without data and labels read the test set for shapes alone
        if len({float(by_stage[stage][-1]) for stage in (0, *self._with_loss)}) > 1:
            if not self._run.batches.reads_again:
                raise RunFault(PASS_ALIKE)
            raise RunFault(
                f"data: {self._run.batches.name}: evaluation: the ranks read different test sets: "
                f"{DRAW_ALIKE}"
            )
        by_stage = self._share_over_columns(by_stage)
        return [evaluate_sums(metrics, by_stage[stage][:-1]) for stage in self._with_loss]

    def _share_over_columns(self, by_stage: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the sums of the first column, whose running statistics (BatchNorm) differ from
        those of the others; a column's own if they have evaluated other sets.
        """
        group = world.get_data_group()
        if group is None:
            return by_stage
        columns = self._mail.all_gather(torch.stack(by_stage), group)
        # the last one of each row is the checksum of the set
        is_one_set = all(torch.equal(sums[:, -1], columns[0][:, -1]) for sums in columns)
        return list(columns[0]) if is_one_set else by_stage

    def predict(self, x: Any) -> Any:
        """Return the output of the last stage for inputs `x`, on every rank."""
        layout = self._layout
        last = self._layout.stages - 1
        outputs: list[Any] = [None]
        asked = _compute_digest("predict", describe_tensors(x), compute_checksum(x))
        with self._enter_evaluation():
            if layout.is_leading:
                crossings = self._prepare(x)
                for model in self._models:
                    output = self._run_stage(model, self._predicted, x, crossings, asked)
                    if model.stage == last:
                        outputs = [
                            tree_map(
                                lambda t: t.cpu() if isinstance(t, torch.Tensor) else t, output
                            )
                        ]
                self._predicted += 1
        self._mail.flush()
        # with those of replicas, which have run nothing
        for other in self._mail.all_gather(asked):
            _require_alike(asked, other)
        with detect_lost_rank(limit=self._mail.limit):
            world.broadcast_object_list(outputs, layout.placement[last], self._mail.group)
        device = self._run.device
        return tree_map(lambda t: t.to(device) if isinstance(t, torch.Tensor) else t, outputs[0])

    @contextlib.contextmanager
    def _enter_evaluation(self) -> Iterator[None]:
        """Turn gradients off, put all modules into evaluation mode and the averages of the weights
        into the model inside the context.
        """
        # the loss may call modules of the model that no piece calls
        modules = [self._run.model]
        modules += [m for model in self._models for m in (model.piece, model.head) if m is not None]
        with torch.no_grad(), restore_modes(*modules), self._run.rules.hold_averages():
            for module in modules:
                module.eval()
            yield

    def _prepare(self, x: Any) -> Sequence[Crossing]:
        """Return the tensors that cross each cut in the evaluation of inputs `x`."""
        cut = self._models[0].piece.cut
        with (
            contextlib.nullcontext()
            if cut.is_prepared(x, training=False)
            else zero_freed(self._freed)
        ):
            return cut.prepare(x, training=False)

    def _sum_by_stage(self, batches: Iterator[Any], metrics: Metrics, sums: torch.Tensor) -> None:
        """Run this rank's stages on a set, and set the row of each in `sums`: the sums of its
        tally, and the checksum of the set.
        """
        tallies = {model.stage: Tally(self._run.loss, metrics) for model in self._models}
        checksum = 0
        batch = -1
        # without their functions, whose addresses differ between processes
        counts = [(metric.name, metric.sum_count) for metric in metrics]
        for batch, (x, y) in enumerate(batches):
            # inputs, which the first stage uses, and labels, which stages with a loss use
            checksum = compute_checksum((x, get_labels(y)), checksum)
            crossings = self._prepare(x)
            asked = _compute_digest("evaluate", describe_tensors(x), counts)
            for model in self._models:
                output = self._run_stage(model, batch, x, crossings, asked)
                if model.stage in self._with_loss:
                    try:
                        tallies[model.stage].add(output, y, count_samples(x))
                    except BadInput:
                        # a metric's fault, which ranks without a loss do not find
                        self._mail.leave()
                        raise
            if self._layout.replicas > 1 and self._layout.column is None:
                store = world.get_own_store()
                limit = self._mail.limit
                # the other replicas wait on as long as this number rises
                with detect_lost_rank([KEEPER], limit):
                    answer_within(limit.total_seconds(), lambda: store.add(EVALUATED, 1))
        for model in self._models:
            self._compare(model, batch + 1, _compute_digest("evaluated"))
        for stage, tally in tallies.items():
            sums[stage] = torch.cat([tally.sums, torch.tensor([checksum], dtype=torch.float64)])

    def _run_stage(
        self,
        model: StageModel,
        batch: int,
        x: Any,
        crossings: Sequence[Crossing],
        asked: torch.Tensor,
    ) -> Any:
        """Send the output of a stage on a batch of the test set to the next stage, and return
        it. Raise `RunFault` if the previous stage's rank was `asked` for something else.
        """
        value = x
        s = model.stage
        self._compare(model, batch, asked)
        if not model.is_first:
            message = Message(TEST, batch, s - 1, s)
            crossing = crossings[s - 1]
            # its shape is known only with this batch
            self._mail.expect([(message, crossing.tensors)])
            value = crossing.from_messages(
                [tensor.to(model.device) for tensor in self._mail.receive(message)]
            )
        output = model.piece(value)
        # the next stage takes the output without the auxiliary head
        if not model.is_last:
            self._mail.send(Message(TEST, batch, s, s + 1), crossings[s].to_messages(output))
        return output if model.head is None else model.head(get_activation(output))

    def _compare(self, model: StageModel, batch: int, asked: torch.Tensor) -> None:
        """Tell the next stage what this one was asked for. Raise `RunFault` if the previous one was
        asked for something else.

        It comes before a batch, because gloo ends a process that gets more than it expects, and
        says nothing of less; and after the last one.
        """
        s = model.stage
        if not model.is_last:
            self._mail.send(Message(ASKED, batch, s, s + 1), [asked])
        if not model.is_first:
            message = Message(ASKED, batch, s - 1, s)
            self._mail.expect([(message, (TensorSpec((1,), asked.dtype, False),))])
            _require_alike(asked, *self._mail.receive(message))


def _compute_digest(*asked: Any) -> torch.Tensor:
    """Return a checksum of what an evaluation was asked for  # (1,)"""
    # of as many bytes as `Mail.meet` sends, which a rank in another call may have begun
    return torch.tensor([zlib.crc32(repr(asked).encode()) >> 1], dtype=torch.int32)


def _require_alike(asked: torch.Tensor, other: torch.Tensor) -> None:
    if not torch.equal(asked, other):
        raise RunFault(PASS_ALIKE)


def wait_for_first_replica(layout: RankLayout, mail: Mail, done: str) -> None:
    """Wait until the first replica has evaluated, whose ranks count themselves in the store's key
    `done`. Raise `LostRank` if it makes no progress within the deadline.
    """
    store = world.get_own_store()
    progress = -1
    since = time.monotonic()
    limit = mail.limit.total_seconds()
    with detect_lost_rank([world.name_rank(r) for r in range(layout.devices)], mail.limit):
        if layout.replica == 0:
            answer_within(limit, lambda: store.add(done, 1))
            return
        # adding 0 reads a counter that may not exist yet; `get` would wait for it
        while answer_within(limit, lambda: store.add(done, 0)) < layout.devices:
            batches = answer_within(limit, lambda: store.add(EVALUATED, 0))
            if batches != progress:
                progress = batches
                since = time.monotonic()
            elif time.monotonic() - since > limit:
                raise TimeoutError
            Termination.check()
            time.sleep(0.01)


# ---- reports


class RankReport(NamedTuple):
    """The measurements of one rank.

    `optimizer_bytes`: stage -> bytes of optimizer state. `version_bytes`: stage -> peak bytes of
    weight versions besides the newest. `sent`: (source stage, target stage) -> (bytes, messages);
    `sent_shared`: the same for gradients of shared layers. `peaks`: category -> peak bytes.
    `trace`: the recorded events, None without a file.
    """

    optimizer_bytes: dict[int, int]
    version_bytes: dict[int, int]
    sent: dict[tuple[int, int], tuple[int, int]]
    sent_shared: dict[tuple[int, int], tuple[int, int]]
    times: DeviceTimes
    peaks: dict[str, int]
    trace: Trace | None


def report_rank(run: Run, interpreter: Interpreter, trace: Trace | None) -> RankReport:
    """Return this rank's report; `trace`: its recorded events, by rank 0's clock."""
    recorder = interpreter.recorder
    stages = interpreter.stages
    replicas = interpreter.independent
    count = interpreter.layout.stages
    # replicas with weights of their own keep their optimizer states besides the optimizer's
    others = [
        state
        for stage_replicas in replicas.values()
        for state in stage_replicas.list_other_states()
    ]
    by_stage = optimizer.count_state_bytes(run.optimizer, count, others)
    masters = run.count_master_bytes()
    optimizer_bytes = {s: by_stage[s] + masters[s] for s in stages}
    # overlapping local blocks have a layer of the previous stage here too
    total = sum(by_stage) + interpreter.memory.master_bytes
    optimizer_bytes[min(stages)] += total - sum(optimizer_bytes.values())
    return RankReport(
        optimizer_bytes,
        {
            s: stage.peak_version_bytes + (replicas[s].held_bytes if s in replicas else 0)
            for s, stage in stages.items()
        },
        recorder.sent,
        recorder.sent_shared,
        recorder.times,
        interpreter.memory.peaks,
        trace,
    )


def merge_reports(ranks: Sequence[RankReport], layout: RankLayout, microbatches: int) -> Report:
    """Merge the ranks' reports: values by stage come from the first replica; events, times and
    memory from all ranks.
    """
    first = ranks[: layout.devices]
    traces = [rank.trace for rank in ranks if rank.trace is not None]
    return Report(
        [first[device].optimizer_bytes[stage] for stage, device in enumerate(layout.placement)],
        [first[device].version_bytes[stage] for stage, device in enumerate(layout.placement)],
        {link: traffic for rank in first for link, traffic in rank.sent.items()},
        concatenate_events([trace.events for trace in traces]),
        microbatches,
        {link: traffic for rank in first for link, traffic in rank.sent_shared.items()},
        concatenate_counters([trace.counters for trace in traces]),
        times=[rank.times for rank in ranks],
        peak_memory=[rank.peaks for rank in ranks],
    )
