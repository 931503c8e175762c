"""Place the stages of a model on the ranks of a distributed run, and refuse models that cannot be
placed.

`RankLayout` says which rank holds which stages of which replica. `place` decides them: it merges
neighboring stages until there is a group for each device (or follows the placement of the method's
order), cuts the model at their boundaries, verifies the pieces, and lists every reason for which
separate processes cannot run them: weights, buffers or checkpoints that several stages share. Every
rank does this alike before any rank waits for another, so that all ranks report the same faults.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Mapping, Sequence

import torch
from torch import nn

from ipu_pipe.backends import world
from ipu_pipe.backends.ranks import run_on_main
from ipu_pipe.config.schema import PipelineConfig
from ipu_pipe.cut.cutting import Piece, cut_model
from ipu_pipe.cut.verification import TrainingEffects, verify_pieces
from ipu_pipe.errors import BadInput, raise_faults
from ipu_pipe.job.factories import Placed, place_blocks
from ipu_pipe.model.loss import Take
from ipu_pipe.model.observation import list_at_one_address
from ipu_pipe.model.stages import (
    Partition,
    group_stages,
    partition,
    require_one_stage,
    share_weights,
)
from ipu_pipe.refusals import EMULATOR, Argument
from ipu_pipe.replay.work import MAKE_ONE
from ipu_pipe.schedule.methods import Method, Order, Reads
from ipu_pipe.schedule.rows import read_csv
from ipu_pipe.schedule.table import list_stages
from ipu_pipe.text import list_some


@dataclass(frozen=True)
class RankLayout:
    """The stages and the replica of `rank` in a run with `replicas` of a pipeline.

    `placement`: the device of each stage. Each device of each replica is a rank.

    rank       0    1    2    3         placement 0 1 0 1 of 4 stages, 2 replicas
    stages    0 2  1 3  0 2  1 3
    replica    0    0    1    1

    `column`: the replica, if the others are pipelines of their own, with ranks of their own; None:
    the ranks are those of all replicas.
    """

    rank: int
    placement: tuple[int, ...]
    replicas: int = 1
    column: int | None = None

    @cached_property
    def stages(self) -> int:
        """The number of stages of the model."""
        return len(self.placement)

    @cached_property
    def devices(self) -> int:
        """The number of devices of a replica."""
        return max(self.placement) + 1

    @cached_property
    def stages_of_rank(self) -> list[int]:
        """The stages of this rank, ascending."""
        return list_stages(self.placement, self.rank % self.devices)

    @cached_property
    def replica(self) -> int:
        """The replica of this rank."""
        return self.rank // self.devices if self.column is None else self.column

    @property
    def is_leading(self) -> bool:
        """Whether this rank's replica evaluates, predicts and saves: the first one, or each column,
        whose ranks alone take part.
        """
        return self.column is not None or self.replica == 0

    def find_rank(self, stage: int) -> int:
        """Return the rank that holds `stage` in this rank's replica."""
        # a column numbers its own ranks from 0
        first = self.replica * self.devices if self.column is None else 0
        return first + self.placement[stage]

    def list_ranks(self, device: int) -> list[int]:
        """Return the ranks of a device, one in each replica; they have the same stages."""
        return [replica * self.devices + device for replica in range(self.replicas)]


def find_tied_weights(cut: Sequence[Piece]) -> dict[str, list[int]]:
    """Return the users of each tied weight: name -> the stages that use it, ascending."""
    users: dict[str, list[int]] = {}
    for stage, piece in enumerate(cut):
        for name in piece.list_weights():
            users.setdefault(name, []).append(stage)
    return {name: stages for name, stages in users.items() if len(stages) > 1}


def place(
    config: PipelineConfig, method: Method, model: nn.Module, x: torch.Tensor, take: Take | None
) -> Placed:
    """Cut the model into stages, place them on the ranks, and return all stages with this rank's
    own.

    `x`: a microbatch of input; `take`: as in `place_whole`. Raise `BadInput` if there are fewer
    stages than ranks.
    """
    ranks = world.get_world_size()
    replicas = config.replicas
    devices = world.count_devices(replicas)
    # with a data group the other replicas are columns, whose ranks do not count here
    if world.get_data_group() is None and ranks % replicas:
        raise BadInput(f"replicas: {replicas}: must divide the number of processes, {ranks}")
    device = world.get_rank() % devices
    structure = method.structure
    if structure is None:
        return _place_stages(config, method, model, x, devices, device)
    # one chunk per rank
    if structure.blocks is not None and config.method_args.blocks is None:
        method = replace(method, structure=replace(structure, blocks=devices))
    return place_blocks(config, method, model, x, take, devices, device)


def _place_stages(
    config: PipelineConfig,
    method: Method,
    model: nn.Module,
    x: torch.Tensor,
    devices: int,
    device: int,
) -> Placed:
    """Merge neighboring stages into one group per device, so that the largest group has as few
    FLOPs as possible.

    A method with an order of its own is placed by that order.
    """
    # rank 0 decides for all, because measured times differ between ranks
    requested = run_on_main(
        lambda: partition(model, x, config.stages, one_stage=method.one_stage_reason)
    )
    if method.order is not None:
        return _place_by_order(config, method, method.order, model, requested, devices, device, x)
    groups = group_stages(model, requested, devices, x)
    note = ""
    begins = requested.begin_names()
    group_begins = list(groups.values())
    # the device rises by one where a group begins
    placement = tuple(itertools.accumulate(int(stage in groups) for stage in range(len(requested))))
    # the stages divide modules: the groups, which begin at modules, become the stages
    if not can_cut(method, model, requested, x):
        begins = group_begins
        placement = tuple(range(devices))
        names = list_some(begins, 8) or "the model"
        note = (
            f"{len(requested)} stages divide modules, which processes cannot: merged to "
            f"{devices}, which begin at {names}"
        )
    elif len(requested) != devices:
        note = (
            f"{len(requested)} stages on {devices} processes, which begin at "
            f"{list_some(group_begins, 8) or 'the model'}"
        )
    return cut_at(method, model, begins, placement, device, x, note)


def _place_by_order(
    config: PipelineConfig,
    method: Method,
    order: Order,
    model: nn.Module,
    requested: Partition,
    devices: int,
    device: int,
    x: torch.Tensor,
) -> Placed:
    """Place the stages as the method's order says; if the config names no stages, merge neighbors
    among the model's own.
    """
    placement = (
        read_csv(order.file).placement
        if order.file
        else order.place(devices * order.stages_per_device)
    )
    count = len(placement)
    begins = requested.begin_names()
    # a file's rows are devices, each of which must be a process
    if max(placement) + 1 != devices:
        rows = max(placement) + 1
        raise BadInput(
            f"method_args.file: {order.file}: has rows of {rows} devices: must be {devices}, one "
            f"per process"
        )
    # of the model's own boundaries the order takes as many as it needs
    if config.stages is None and len(requested) > count:
        begins = list(group_stages(model, requested, count, x).values())
    elif len(requested) != count:
        expected = (
            order.file
            or f"{method.name} with {order.stages_per_device} on each of {devices} processes"
        )
        may_differ = len(requested) % devices == 0 and not (order.fixed or order.file)
        more = f", or stages_per_device {len(requested) // devices}" if may_differ else ""
        raise BadInput(f"stages: {len(requested)}: {expected} has {count}: must be {count}{more}")
    if not can_cut(method, model, requested, x):
        raise BadInput(
            f"stages: {len(requested)}: they divide the weights of modules, which processes "
            f"cannot: use fewer stages"
        )
    return cut_at(method, model, begins, placement, device, x)


def can_cut(method: Method, model: nn.Module, requested: Partition, x: torch.Tensor) -> bool:
    """Return whether the model can be cut into these stages; stages that divide the weights of one
    module cannot.
    """
    if not requested.spread:
        return True
    # boundaries between modules give the same weights only if no module is divided
    part = partition(model, x, requested.begin_names() or 1, one_stage=method.one_stage_reason)
    return [set(stage.parameters) for stage in part.stages] == [
        set(stage.parameters) for stage in requested.stages
    ]


def cut_at(
    method: Method,
    model: nn.Module,
    begins: Sequence[str],
    placement: tuple[int, ...],
    device: int,
    x: torch.Tensor,
    note: str = "",
) -> Placed:
    """Cut the model at the beginnings of its stages, and check that ranks can hold the pieces."""
    cut = cut_model(model, begins, x)
    # every rank finds the same faults here, before any rank waits for another
    require_separable(model, method, cut, placement, verify_pieces(model, cut, x))
    part = partition(model, x, begins if begins else 1, one_stage=method.one_stage_reason)
    part = share_weights(part, find_tied_weights(cut), model)
    if method.one_stage_reason is not None:
        require_one_stage(part, model, method.one_stage_reason)
    return Placed(model, part, RankLayout(device, placement).stages_of_rank, placement, note, cut)


USE_EMULATOR = f"use {EMULATOR}"
STASH = Argument("method_args", {"stash": True})


def require_separable(
    model: nn.Module,
    method: Method,
    cut: Sequence[Piece],
    placement: Sequence[int],
    effects: TrainingEffects,
) -> None:
    """Raise `BadInput`, with every fault, for weights and buffers that ranks cannot share, or
    cannot read as the method says.
    """
    users = find_tied_weights(cut)
    lines = []
    # without old reads every copy has the newest version
    if method.reads_old(len(cut)):
        lines += _explain_old_reads(method, cut, placement, users, effects)
    lines += _explain_written_weights(cut, users, effects)
    lines += _explain_changed_buffers(model, cut, effects)
    lines += _explain_shared_memory(cut)
    raise_faults(lines)


def _explain_old_reads(
    method: Method,
    cut: Sequence[Piece],
    placement: Sequence[int],
    users: Mapping[str, Sequence[int]],
    effects: TrainingEffects,
) -> list[str]:
    """Return why stages cannot read versions of weights that are not the newest, one line each.

    `users`: tied weight -> the stages that use it.
    """
    lines = []
    # two stages of one device share one tensor for a tied weight, which cannot have two versions
    for name, stages in users.items():
        if len({placement[stage] for stage in stages}) < len(stages):
            lines.append(
                f"model: {name}: stages {' and '.join(map(str, stages))} use this weight, several "
                f"on one process, and"
                f" {method.name} reads versions that are not the newest: use as many processes as "
                f"stages, or untie it"
            )
    held_by: dict[int, set[int]] = {}
    # the first stage that uses a weight holds it
    for holder, *others in users.values():
        for stage in others:
            held_by.setdefault(stage, set()).add(holder)
    for stage, holders in held_by.items():
        # `TiedWeights` loads all copies of a stage at one version
        if len(holders) > 1:
            names = " and ".join(map(str, sorted(holders)))
            lines.append(
                f"model: stage {stage} uses weights that stages {names} hold, and with "
                f"{method.name} their versions differ: cut elsewhere, or untie them"
            )
    # what follows is a fault only if a backward reads other weights than its forward
    if method.backward_reads is not Reads.NEWEST:
        return lines
    if effects.checkpointed:
        lines.append(
            f"model: {list_some(effects.checkpointed)}: a checkpoint (torch.utils.checkpoint) in a "
            f"module that is cut runs it"
            f" again in the backward, with {method.name} by newer weights, and a part of the "
            f"checkpoint cannot: begin stages around it, or use {STASH} or {EMULATOR}"
        )
    handed_on = [name for piece in cut for name in piece.list_passed_weights()]
    if handed_on:
        lines.append(
            f"model: {', '.join(handed_on)}: weights of a cut module, which a later stage uses: "
            f"with {method.name} its backward must read newer ones than the forward: put them "
            f"into modules of that stage, or {STASH}"
        )
    return lines


def _explain_written_weights(
    cut: Sequence[Piece], users: Mapping[str, Sequence[int]], effects: TrainingEffects
) -> list[str]:
    """Return a line for tensors that backwards change, and for each tied weight that forwards
    change: several ranks would change their own copies.
    """
    lines = []
    if effects.changed_by_backward:
        lines.append(
            f"model: {list_some(effects.changed_by_backward)}: a backward changes it (a checkpoint "
            f"runs its module again), and"
            f" other microbatches' forwards come between: keep it out of checkpoints, or "
            f"{USE_EMULATOR}"
        )
    written = {*cut[0].cut.first.written, *effects.forward.weights}
    for name in sorted(users.keys() & written):
        lines.append(
            f"model: {name}: the forward changes this weight (max_norm of an embedding?), which "
            f"several stages use: untie it, or"
            f" {USE_EMULATOR}"
        )
    return lines


def _explain_changed_buffers(
    model: nn.Module, cut: Sequence[Piece], effects: TrainingEffects
) -> list[str]:
    """Return a line for each group of stages that use buffers which training changes."""
    norms = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
    ]
    changed: dict[str, list[str]] = {}
    for name, buffer in model.named_buffers():
        # not `in`, which would compare the values of tensors
        stages = [s for s, piece in enumerate(cut) if any(buffer is b for b in piece.buffers())]
        if len(stages) > 1 and (
            # the observed effects leave out the statistics of BatchNorm
            name in effects.forward.buffers or name.rpartition(".")[0] in norms
        ):
            changed.setdefault(" and ".join(map(str, stages)), []).append(name)
    return [
        f"model: {list_some(names)}: training changes it, and stages {where} use it, each in a "
        f"process of its own: cut elsewhere,"
        f" or {USE_EMULATOR}"
        for where, names in changed.items()
    ]


def _explain_shared_memory(cut: Sequence[Piece]) -> list[str]:
    """Return a line for each parameter of a stage in the memory of another stage's parameter."""
    stage_of: dict[str, int] = {}
    for stage, piece in enumerate(cut):
        for name in piece.list_weights():
            stage_of.setdefault(name, stage)
    parameters = dict(cut[0].cut.model.named_parameters())
    return [
        f"model: {first} on stage {stage_of[first]} and {name} on stage {stage_of[name]} are two "
        f"parameters in one memory, which processes do not share: {MAKE_ONE}"
        for first, *others in list_at_one_address({name: parameters[name] for name in stage_of})
        for name in others
        if stage_of[name] != stage_of[first]
    ]
