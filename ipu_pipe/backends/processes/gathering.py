"""What all ranks hold or have measured, put together: on the first a checkpoint's state and the report, on all the weights."""

from __future__ import annotations

import operator
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ipu_pipe.backends.interface import CheckpointState, DeviceTimes, Report
from ipu_pipe.backends.processes.mail import Mail
from ipu_pipe.backends.processes.place import Place
from ipu_pipe.backends.processes.player import RowPlayer
from ipu_pipe.job.record import Job
from ipu_pipe.local.blocks import HEADS
from ipu_pipe.model.cutting import Piece
from ipu_pipe.trace.events import Trace, concatenate_counters, concatenate_events
from ipu_pipe.update import optimizer

Value = TypeVar("Value")
Traffic = Dict[int, Tuple[int, int]]  # target stage -> bytes, messages


def gather(mail: Mail, value: Value) -> Optional[List[Value]]:
    """Every rank's on rank 0, else None. All are waited for first: the gathering has no deadline of its own."""
    mail.wait(dist.all_reduce(torch.zeros(1), async_op=True))
    gathered: Any = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, gathered, dst=0)
    return gathered  # type: ignore[no-any-return]


def stage_state(job: Job, place: Place, names: Dict[nn.Parameter, str]) -> CheckpointState:
    """A stage's own, on the host. `names`: of all that an optimizer of the model trains."""
    here = [*place.piece.tensors(), *(place.head.parameters() if place.head is not None else ())]
    own = {id(job.numbers.trained(p)) for p in here if isinstance(p, nn.Parameter)}
    tensors, plain = optimizer.export_state(job.optimizer, {p: name for p, name in names.items() if id(p) in own})
    with job.numbers.whole():
        model = {key: value.detach().cpu() for key, value in place.piece.state().items()}
    if place.head is not None:
        head = f"{HEADS}.{place.layout.stage}"
        model.update({f"{head}.{key}": value.detach().cpu() for key, value in place.head.state_dict().items()})
    return CheckpointState(model, {key: value.cpu() for key, value in tensors.items()}, plain)


def whole_state(job: Job, stages: List[CheckpointState]) -> CheckpointState:
    """That of the unsplit model, from those of one replica's stages."""
    found = CheckpointState({}, {}, {})
    for stage in stages:
        for into, part in zip(found, stage):
            into.update(part)
    with job.numbers.whole():
        whole = job.model.state_dict()  # what no piece uses is here as it was
    return found._replace(model={name: found.model.get(name, value) for name, value in whole.items()})


def stages_of(model: nn.Module, cut: Sequence[Piece]) -> Dict[str, int]:
    """The stage that holds each parameter and buffer of the model, by its name."""
    held = {id(tensor): stage for stage, piece in enumerate(cut) for tensor in piece.tensors()}
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: held[id(tensor)] for name, tensor in named if id(tensor) in held}


def hand_round(mail: Mail, model: nn.Module, stages: Dict[str, int]) -> None:
    """Into every rank's model what the others' stages hold, the first replica's; `stages`: of `stages_of`."""
    mail.wait(dist.all_reduce(torch.zeros(1), async_op=True))
    for stage in sorted({*stages.values()}):
        own = {name: operator.attrgetter(name)(model) for name, s in stages.items() if s == stage}
        sent: Any = [{name: t.detach().cpu() for name, t in own.items()} if dist.get_rank() == stage else None]
        dist.broadcast_object_list(sent, src=stage)
        for name, tensor in own.items():
            tensor.data = sent[0][name].to(tensor.device)


class StageReport(NamedTuple):
    """What one rank measured: bytes of optimizer state, greatest bytes of weight versions besides the newest, what it sent,
    what it sent of the gradients of shared layers, how it spent its time, the greatest bytes that it held, what it recorded."""

    optimizer_bytes: int
    version_bytes: int
    sent: Traffic
    shared: Traffic
    times: DeviceTimes
    peaks: Dict[str, int]
    trace: Optional[Trace]


def stage_report(job: Job, player: RowPlayer, trace: Optional[Trace]) -> StageReport:
    """This rank's; `trace`: what it recorded, by rank 0's clock."""
    # of the layer behind, too, where it is shared
    held = sum(optimizer.count_state_bytes(job.optimizer, player.place.layout.depth)) + player.memory.masters
    timeline = player.mail.timeline
    return StageReport(
        held, player.version_bytes, timeline.sent, timeline.shared, timeline.times, player.memory.peaks, trace
    )


def whole_report(ranks: List[StageReport], depth: int, microbatches: int) -> Report:
    """That of all ranks: of `depth` stages the first replica's, of events, times and memory all."""
    own = ranks[:depth]
    traces = [rank.trace for rank in ranks if rank.trace is not None]
    return Report(
        [stage.optimizer_bytes for stage in own],
        [stage.version_bytes for stage in own],
        {(src, dst): count for src, stage in enumerate(own) for dst, count in stage.sent.items()},
        concatenate_events([trace.events for trace in traces]),
        microbatches,
        {(src, dst): count for src, stage in enumerate(own) for dst, count in stage.shared.items()},
        concatenate_counters([trace.counters for trace in traces]),
        times=[rank.times for rank in ranks],
        peak_memory=[rank.peaks for rank in ranks],
    )
