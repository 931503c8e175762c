"""What all ranks hold or measure, put together: checkpoints, the test set, reports, and the weights of the user's own model."""

from __future__ import annotations

import contextlib
import operator
import time
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ipu_pipe.backends.interface import CheckpointState, DeviceTimes, Report
from ipu_pipe.backends.processes.deadlines import LostRank, Termination, answer_within, detect_lost_rank
from ipu_pipe.backends.processes.interpreter import Interpreter
from ipu_pipe.backends.processes.layout import RankLayout
from ipu_pipe.backends.processes.mail import SHAPE, TEST, Mail, Message
from ipu_pipe.backends.processes.stage import StageModel
from ipu_pipe.backends.processes.update import DRAW_ALIKE
from ipu_pipe.data.batches import compute_checksum
from ipu_pipe.errors import RunFault
from ipu_pipe.job.evaluation import EvaluationResult, Tally, load_test_batches
from ipu_pipe.job.record import Job
from ipu_pipe.local.blocks import HEADS, get_activation, get_blocks
from ipu_pipe.model.batch import count_samples
from ipu_pipe.model.cutting import Piece, Shape
from ipu_pipe.model.loss import get_labels
from ipu_pipe.model.restoring import modes_restored
from ipu_pipe.trace.events import Trace, concatenate_counters, concatenate_events
from ipu_pipe.update import optimizer

DIMENSIONS = 8  # of an activation in an evaluation, at most
EVALUATED = "ipu_pipe/evaluated"  # key of the store: batches that any stage has evaluated

Value = TypeVar("Value")


def gather(mail: Mail, value: Value) -> Optional[List[Value]]:
    """Return every rank's value on rank 0, else None."""
    mail.all_gather(torch.zeros(1))  # all are waited for first, within the deadline
    values: Any = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    with detect_lost_rank(None, mail.limit):
        dist.gather_object(value, values, dst=0)
    return values  # type: ignore[no-any-return]


# ---- weights and optimizer state


def export_stage(job: Job, model: StageModel, names: Dict[nn.Parameter, str]) -> CheckpointState:
    """Return a stage's part of a checkpoint, on the host. `names`: of all parameters that the optimizer trains."""
    parameters = [*model.piece.tensors(), *(model.head.parameters() if model.head is not None else ())]
    trained = {id(job.numbers.trained(p)) for p in parameters if isinstance(p, nn.Parameter)}
    names = {p: name for p, name in names.items() if id(p) in trained}
    tensors, plain = optimizer.export_state(job.optimizer, names)
    with job.numbers.whole():
        weights = {key: value.detach().cpu() for key, value in model.piece.state().items()}
    if model.head is not None:
        head = f"{HEADS}.{model.stage}"
        weights.update({f"{head}.{key}": value.detach().cpu() for key, value in model.head.state_dict().items()})
    return CheckpointState(weights, {key: value.cpu() for key, value in tensors.items()}, plain)


def merge_stages(job: Job, stages: Sequence[CheckpointState]) -> CheckpointState:
    """Return the state of the unsplit model from those of one replica's stages."""
    merged = CheckpointState({}, {}, {})
    for stage in stages:
        for into, part in zip(merged, stage):
            into.update(part)
    with job.numbers.whole():
        whole = job.model.state_dict()  # what no piece uses is here as it was
    return merged._replace(model={name: merged.model.get(name, value) for name, value in whole.items()})


def find_holders(model: nn.Module, cut: Sequence[Piece]) -> Dict[str, int]:
    """Return the stage that holds each parameter and buffer of a model, by its name."""
    stage_of = {id(tensor): stage for stage, piece in enumerate(cut) for tensor in piece.tensors()}
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: stage_of[id(tensor)] for name, tensor in named if id(tensor) in stage_of}


def broadcast_weights(mail: Mail, model: nn.Module, holders: Dict[str, int]) -> None:
    """Copy what the stages of the first replica hold into every rank's model; `holders`: from `find_holders`."""
    mail.all_gather(torch.zeros(1))
    for stage in sorted({*holders.values()}):
        tensors = {name: operator.attrgetter(name)(model) for name, s in holders.items() if s == stage}
        sent: Any = [None]
        if dist.get_rank() == stage:
            sent = [{name: t.detach().cpu() for name, t in tensors.items()}]
        with detect_lost_rank(stage, mail.limit):
            dist.broadcast_object_list(sent, src=stage)
        for name, tensor in tensors.items():
            tensor.data = sent[0][name].to(tensor.device)


# ---- memory of the other ranks' stages


def free_other_stages(job: Job, model: StageModel, cut: Sequence[Piece]) -> List[torch.Tensor]:
    """Free the tensors of the model that other ranks hold, and return them."""
    here = {id(t) for piece in (model.piece, model.previous) if piece is not None for t in piece.tensors()}
    others = [t for piece in cut for t in piece.tensors()]
    blocks = get_blocks(job.model)
    if blocks is not None:
        blocks.forget_duplicates()
        for index, head in blocks.heads.items():
            others += [*head.parameters(), *head.buffers()] if index != str(model.stage) else []
    others = [t for t in others if id(t) not in here]
    return free([*others, *(job.numbers.trained(t) for t in others if isinstance(t, nn.Parameter))])


def free(tensors: Iterable[torch.Tensor]) -> List[torch.Tensor]:
    """Free the memory of tensors and return them: their shapes stay, their values are not a number."""
    freed = list(tensors)
    for tensor in freed:
        nothing = float("nan") if tensor.is_floating_point() else 0
        tensor.data = torch.full((), nothing, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    return freed


@contextlib.contextmanager
def zero_freed(freed: Sequence[torch.Tensor]) -> Iterator[None]:
    """Make freed tensors zero for a forward of the whole model: it may refuse what is not a number, and what is not dense."""
    data = [tensor.data for tensor in freed]
    try:
        for tensor in freed:
            tensor.data = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        yield
    finally:
        for tensor, value in zip(freed, data):
            tensor.data = value


# ---- the test set


class Evaluation:
    """Evaluates the test set through the first replica's stages, forwards only; other replicas wait. The stages `with_loss` have
    a tally each. `freed`: tensors of the other stages."""

    def __init__(self, job: Job, interpreter: Interpreter, with_loss: List[int], freed: List[torch.Tensor]) -> None:
        self._job, self._interpreter, self._with_loss, self._freed = job, interpreter, with_loss, freed
        self._model, self._mail = interpreter.stage.model, interpreter.mail
        self._count = 0

    def __call__(self) -> List[EvaluationResult]:
        """Return loss and metrics of each stage with a loss, the same on every rank."""
        model, layout = self._model, self._model.layout
        self._interpreter.load_newest()
        self._mail.flush()  # what the training sent is through: no wait for it is an event inside the evaluation's
        # sums of a tally, and last the checksum of the test set that the rank has read
        sums = torch.zeros(len(Tally.of(self._job).sums) + 1, dtype=torch.float64)
        modules = [module for module in (model.piece, model.head) if module is not None]
        with torch.no_grad(), modes_restored(*modules):
            for module in modules:
                module.eval()
            if layout.replica == 0:
                sums = self._tally()
        if layout.replicas > 1:
            self._count += 1
            wait_for_first_replica(layout, self._mail, self._count)
        self._mail.flush()  # of activations of the test set nothing stays in memory
        by_stage = self._mail.all_gather(sums)
        # stages between them use shapes alone
        if len({float(by_stage[stage][-1]) for stage in (0, *self._with_loss)}) > 1:
            raise RunFault(f"data: {self._job.data_name}: evaluation: the ranks read different test sets: {DRAW_ALIKE}")
        return [Tally.of(self._job, by_stage[stage][:-1]).evaluation for stage in self._with_loss]

    def _tally(self) -> torch.Tensor:
        tally, model, s = Tally.of(self._job), self._model, self._model.stage
        read = 0
        for batch, (x, y) in enumerate(load_test_batches(self._job)):
            value: Any = x
            read = compute_checksum((x, get_labels(y)), read)
            cut = model.piece.cut
            with contextlib.nullcontext() if cut.is_prepared(x, training=False) else zero_freed(self._freed):
                crossings = cut.prepare(x, training=False)
            if not model.is_first:
                enters = crossings[s - 1]
                number = DIMENSIONS * batch
                value = enters.unflatten(
                    [self._receive(number + i, shape.dtype) for i, shape in enumerate(enters.tensors)]
                )
            output = model.piece(value)
            if not model.is_last:
                for i, tensor in enumerate(crossings[s].flatten(output)):
                    self._send(DIMENSIONS * batch + i, tensor)
            if model.head is not None:
                output = model.head(get_activation(output))
            if s in self._with_loss:
                tally.add(output, y, count_samples(x))
            if model.layout.replicas > 1:
                store, limit = dist.distributed_c10d._get_default_store(), self._mail.limit.total_seconds()
                answer_within(limit, lambda: store.add(EVALUATED, 1))
        return torch.cat([tally.sums, torch.tensor([read], dtype=torch.float64)])

    def _send(self, number: int, tensor: torch.Tensor) -> None:
        """Send a tensor whose shape the receiver does not know."""
        shape = torch.tensor([tensor.dim(), *tensor.shape, *[0] * (DIMENSIONS - tensor.dim())])
        target = self._model.layout.rank_of(self._model.stage + 1)
        self._mail.send(target, Message(SHAPE, number), [shape])
        self._mail.send(target, Message(TEST, number), [tensor])

    def _receive(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        source = self._model.layout.rank_of(self._model.stage - 1)
        self._mail.expect(source, [(Message(SHAPE, number), (Shape((1 + DIMENSIONS,), torch.int64, False),))])
        dimensions, *sizes = self._mail.receive(source, Message(SHAPE, number))[0].tolist()
        self._mail.expect(source, [(Message(TEST, number), (Shape(tuple(sizes[:dimensions]), dtype, False),))])
        return self._mail.receive(source, Message(TEST, number))[0].to(self._model.device)


def wait_for_first_replica(layout: RankLayout, mail: Mail, number: int) -> None:
    """Wait until the first replica is done with evaluation `number`: as long as it makes progress. Raise `LostRank`."""
    store, done = dist.distributed_c10d._get_default_store(), f"ipu_pipe/evaluation-{number}/done"
    if layout.replica == 0:
        store.add(done, 1)
        return
    progress, since, limit = -1, time.monotonic(), mail.limit.total_seconds()
    try:
        while answer_within(limit, lambda: store.add(done, 0)) < layout.stages:
            batches = answer_within(limit, lambda: store.add(EVALUATED, 0))
            if batches != progress:
                progress, since = batches, time.monotonic()
            elif time.monotonic() - since > limit:
                raise TimeoutError
            Termination.check()
            time.sleep(0.01)
    except TimeoutError as error:
        raise LostRank("the first replica", limit) from error


# ---- reports


class StageReport(NamedTuple):
    """What one rank measured: bytes of optimizer state, greatest bytes of weight versions besides the newest, bytes and messages
    sent to each stage, the same of shared layers' gradients, how it spent its time, the greatest bytes held, what it recorded."""

    optimizer_bytes: int
    version_bytes: int
    sent: Dict[int, Tuple[int, int]]
    sent_shared: Dict[int, Tuple[int, int]]
    times: DeviceTimes
    peaks: Dict[str, int]
    trace: Optional[Trace]


def report_stage(job: Job, interpreter: Interpreter, trace: Optional[Trace]) -> StageReport:
    """Return this rank's report; `trace`: what it recorded, by rank 0's clock."""
    recorder, stages = interpreter.recorder, interpreter.layout.stages
    # all stages of the optimizer: a shared layer of the stage before is here, too
    optimizer_bytes = sum(optimizer.count_state_bytes(job.optimizer, stages)) + interpreter.memory.master_bytes
    return StageReport(
        optimizer_bytes,
        sum(stage.peak_version_bytes for stage in interpreter.stages.values()),
        {rank % stages: traffic for rank, traffic in recorder.sent.items()},
        {rank % stages: traffic for rank, traffic in recorder.sent_shared.items()},
        recorder.times,
        interpreter.memory.peaks,
        trace,
    )


def merge_reports(ranks: Sequence[StageReport], stages: int, microbatches: int) -> Report:
    """Return the report of a run: by stage that of the first replica; events, times and memory of all ranks."""
    first = ranks[:stages]
    traces = [rank.trace for rank in ranks if rank.trace is not None]
    return Report(
        [stage.optimizer_bytes for stage in first],
        [stage.version_bytes for stage in first],
        {(source, target): traffic for source, stage in enumerate(first) for target, traffic in stage.sent.items()},
        concatenate_events([trace.events for trace in traces]),
        microbatches,
        {
            (source, target): traffic
            for source, stage in enumerate(first)
            for target, traffic in stage.sent_shared.items()
        },
        concatenate_counters([trace.counters for trace in traces]),
        times=[rank.times for rank in ranks],
        peak_memory=[rank.peaks for rank in ranks],
    )
