"""Which rank holds which stage of which replica, and the stages of a model cut to fit the ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Dict, List, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import nn

from ipu_pipe.backends.ranks import run_on_main
from ipu_pipe.config.schema import Config
from ipu_pipe.errors import BadInput
from ipu_pipe.job.placing import Placed, place_blocks
from ipu_pipe.model.cutting import Piece, cut_model
from ipu_pipe.model.rehearsal import Rehearsed, rehearse
from ipu_pipe.model.stages import merge_stages, partition, refuse_shared, share_weights
from ipu_pipe.schedule.methods import Method, Reads
from ipu_pipe.text import list_some


@dataclass(frozen=True)
class RankLayout:
    """The place of `rank` among the ranks of a run, which has `replicas` of a pipeline of `stages`, one stage a rank.

    rank       0    1    2    3    4    5        3 stages, 2 replicas
    stage      0    1    2    0    1    2
    replica    0    0    0    1    1    1
    """

    rank: int
    stages: int
    replicas: int = 1

    @property
    def stage(self) -> int:
        """The stage of this rank."""
        return self.rank % self.stages

    @property
    def replica(self) -> int:
        """The replica of this rank."""
        return self.rank // self.stages

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds `stage` in this rank's replica."""
        return self.replica * self.stages + stage

    @property
    def other_stages(self) -> List[int]:
        """All stages but this rank's."""
        return [stage for stage in range(self.stages) if stage != self.stage]

    def ranks_with(self, stage: int) -> List[int]:
        """Return the ranks of a stage, one in each replica."""
        return [replica * self.stages + stage for replica in range(self.replicas)]


def find_users(cut: Sequence[Piece]) -> Dict[str, List[int]]:
    """Return the stages that use each weight that several use, ascending."""
    users: Dict[str, List[int]] = {}
    for stage, piece in enumerate(cut):
        for name in piece.weights():
            users.setdefault(name, []).append(stage)
    return {name: stages for name, stages in users.items() if len(stages) > 1}


def place(config: Config, method: Method, model: nn.Module, x: torch.Tensor) -> Placed:
    """Return the stages of a run, and this rank's. `x`: a microbatch of input. Raise `BadInput` if they cannot be one a rank."""
    if method.order is not None:
        raise BadInput(
            f"method: {method.name}: processes run one stage each, whose backwards are whole: use gpipe, pipedream_flush, or"
            " backend: {name: emulator}"
        )
    world, replicas = dist.get_world_size(), config.replicas
    if world % replicas:
        raise BadInput(f"replicas: {replicas}: {world} processes cannot be so many replicas of a pipeline")
    count = world // replicas
    stage = RankLayout(dist.get_rank(), count, replicas).stage
    structure = method.structure
    if structure is None:
        return _place_stages(config, method, model, x, count, stage)
    if structure.blocks is not None and config.method_args.blocks is None:  # as many chunks as ranks
        method = replace(method, structure=replace(structure, blocks=count))
    return place_blocks(config, method, model, x, count, stage)


def _place_stages(config: Config, method: Method, model: nn.Module, x: torch.Tensor, count: int, stage: int) -> Placed:
    """Merge neighboring stages until there are `count`."""
    # on one rank, since measured times differ from rank to rank
    wished = run_on_main(lambda: partition(model, x, config.stages, one_stage=method.one_stage))
    begins = merge_stages(model, wished, count, x)
    note = ""
    if len(wished) != count:
        names = list_some(begins, 8) or "the model"
        note = f"{len(wished)} stages on {count} processes: taken together, stages begin at {names}"
    cut = cut_model(model, begins, x)
    # on every rank alike, before any waits for another
    rehearsed = rehearse(model, cut, x)
    _refuse_reads(method, cut, rehearsed.again)
    _refuse_shared_changes(model, cut, rehearsed)
    _refuse_shared_memory(cut)
    part = partition(model, x, begins if begins else 1, one_stage=method.one_stage)
    part = share_weights(part, find_users(cut), model)
    if method.one_stage is not None:
        refuse_shared(part, method.one_stage)
    return Placed(model, part, stage, note, cut)


def _refuse_reads(method: Method, cut: Sequence[Piece], again: Sequence[str]) -> None:
    """Raise `BadInput` for weights that ranks cannot read as the method says: with delays that are not the pipeline's own; and
    where a backward must read newer weights than the forward, weights that cross to another stage with the activations, and those
    of modules that a checkpoint runs `again` in part."""
    if method.delay is not None:
        key = "hogwild" if method.delay.drawn else "constant_delay"
        raise BadInput(f"method_args.{key}: delays that are not the pipeline's own: use backend: {{name: emulator}}")
    reads_anew = method.reads_old(len(cut)) and method.backward_reads is Reads.NEWEST
    if again and reads_anew:
        raise BadInput(
            f"model: {list_some(again)}: a checkpoint (torch.utils.checkpoint) in a module that is cut runs it again in the"
            f" backward, with {method.name} by newer weights, and a part of the checkpoint cannot: begin stages around it, or"
            " use method_args: {stash: true} or backend: {name: emulator}"
        )
    names = [name for piece in cut for name in piece.weights_handed_on()]
    if names and reads_anew:
        raise BadInput(
            f"model: {', '.join(names)}: weights of a cut module, which a later stage uses: with {method.name} its backward"
            " must read newer ones than the forward: put them into modules of that stage, or method_args: {stash: true}"
        )


def _refuse_shared_changes(model: nn.Module, cut: Sequence[Piece], rehearsed: Rehearsed) -> None:
    """Raise `BadInput` for tensors that several ranks would change, each its own copy, other than by updates."""
    if rehearsed.moved:
        raise BadInput(
            f"model: {list_some(rehearsed.moved)}: a backward changes it (a checkpoint runs its module again), and"
            " other microbatches' forwards come between: keep it out of checkpoints, or use backend: {name: emulator}"
        )
    for name in sorted(find_users(cut).keys() & {*cut[0].cut.first.written, *rehearsed.effects.weights}):
        raise BadInput(
            f"model: {name}: the forward changes this weight (max_norm of an embedding?), which several stages use: untie it, or"
            " use backend: {name: emulator}"
        )
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    for name, buffer in model.named_buffers():
        stages = [s for s, piece in enumerate(cut) if any(buffer is b for b in piece.buffers())]
        if len(stages) > 1 and (name in rehearsed.effects.buffers or name.rpartition(".")[0] in norms):
            raise BadInput(
                f"model: {name}: training changes it, and stages {' and '.join(map(str, stages))} use it, each in a process of"
                " its own: cut elsewhere, or use backend: {name: emulator}"
            )


def _refuse_shared_memory(cut: Sequence[Piece]) -> None:
    """Raise `BadInput` for two parameters in one memory on two stages: each rank would have its own."""
    first_at: Dict[int, Tuple[int, str, nn.Parameter]] = {}
    for stage, piece in enumerate(cut):
        parameters = dict(piece.cut.model.named_parameters())
        for name in piece.weights():
            p = parameters[name]
            first, other, holder = first_at.setdefault(p.data_ptr(), (stage, name, p))
            if holder is not p and first != stage and not p.is_meta:
                raise BadInput(
                    f"model: {other} on stage {first} and {name} on stage {stage} are two parameters in one memory, which"
                    " processes do not share: make them one parameter (b.weight = a.weight), or clone one"
                )
