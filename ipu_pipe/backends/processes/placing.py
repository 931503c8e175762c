"""Which stage of a model is this process's: one a process of a replica."""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import nn

from ipu_pipe.backends.processes.layout import Layout
from ipu_pipe.backends.processes.ties import users
from ipu_pipe.backends.ranks import run_on_main
from ipu_pipe.config.schema import Config
from ipu_pipe.errors import BadInput
from ipu_pipe.job.placing import Placed, place_blocks
from ipu_pipe.model.boundaries import refuse_shared, used_on
from ipu_pipe.model.cutting import Piece, pieces
from ipu_pipe.model.merging import merge_stages
from ipu_pipe.model.rehearsal import Rehearsed, rehearse
from ipu_pipe.model.stages import partition
from ipu_pipe.schedule.methods import Method, Reads
from ipu_pipe.text import list_some


def place(config: Config, method: Method, model: nn.Module, x: torch.Tensor) -> Placed:
    """The stages, and this process's. Raises BadInput where there cannot be one a process of a replica."""
    world, width = dist.get_world_size(), config.replicas
    if world % width:
        raise BadInput(f"replicas: {width}: {world} processes cannot be so many replicas of a pipeline")
    depth = world // width
    own = Layout(dist.get_rank(), depth, width).stage
    structure = method.structure
    if structure is None:
        return _place_stages(config, method, model, x, depth, own)
    if structure.blocks is not None and config.method_args.blocks is None:  # as many chunks as processes
        method = replace(method, structure=replace(structure, blocks=depth))
    return place_blocks(config, method, model, x, depth, own)


def _place_stages(config: Config, method: Method, model: nn.Module, x: torch.Tensor, depth: int, own: int) -> Placed:
    """One stage a process of a replica, neighbours taken together where there are fewer processes than stages."""
    stages = config.stages
    # measured times differ from process to process
    wished = run_on_main(lambda: partition(model, x, stages, one_stage=method.one_stage))
    begins = merge_stages(model, wished, depth, x)
    note = ""
    if len(wished) != depth:
        shown = list_some(begins, 8) or "the model"
        note = f"{len(wished)} stages on {depth} processes: taken together, stages begin at {shown}"
    cut = pieces(model, begins, x)
    seen = rehearse(model, cut, x)  # on every rank alike, before any waits for another
    _refuse_model(method, cut, seen.again)
    _refuse_moving(model, cut, seen)
    _refuse_shared_memory(cut)
    part = partition(model, x, begins if begins else 1, one_stage=method.one_stage)
    part = used_on(part, users(cut), model)
    if method.one_stage is not None:
        refuse_shared(part, method.one_stage)
    return Placed(model, part, own, note, cut)


def _refuse_moving(model: nn.Module, cut: Sequence[Piece], seen: Rehearsed) -> None:
    """Refuse what moves in each process alone: buffers that training changes move with every forward there, weights of several
    stages change by updates alone."""
    if seen.moved:
        raise BadInput(
            f"model: {list_some(seen.moved)}: a backward changes it (a checkpoint runs its module again), and other microbatches'"
            " forwards come between: keep it out of checkpoints, or use backend: {name: emulator}"
        )
    for name in sorted(users(cut).keys() & {*cut[0].cut.first.written, *seen.effects.weights}):
        raise BadInput(
            f"model: {name}: the forward changes this weight (max_norm of an embedding?), which several stages use: untie it, or"
            " use backend: {name: emulator}"
        )
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    for name, buffer in model.named_buffers():
        stages = [s for s, piece in enumerate(cut) if any(buffer is own for own in piece.buffers())]
        if len(stages) > 1 and (name in seen.effects.buffers or name.rpartition(".")[0] in norms):
            raise BadInput(
                f"model: {name}: training changes it, and stages {' and '.join(map(str, stages))} use it, each in a process of"
                " its own: cut elsewhere, or use backend: {name: emulator}"
            )


def _refuse_shared_memory(cut: Sequence[Piece]) -> None:
    """Of parameters that lie in one memory: each process would have its own."""
    held: Dict[int, Tuple[int, str, nn.Parameter]] = {}
    for stage, piece in enumerate(cut):
        named = dict(piece.cut.model.named_parameters())
        for name in piece.weights():
            p = named[name]
            first, other, own = held.setdefault(p.data_ptr(), (stage, name, p))
            if own is not p and first != stage and not p.is_meta:
                raise BadInput(
                    f"model: {other} on stage {first} and {name} on stage {stage} are two parameters in one memory, which"
                    " processes do not share: make them one parameter (b.weight = a.weight), or clone one"
                )


def _refuse_model(method: Method, cut: Sequence[Piece], again: Sequence[str]) -> None:
    """Delays come from the pipeline itself. A weight that is handed on with the activations is what the forward read; its
    backward cannot read it anew."""
    if method.delay is not None:
        key = "hogwild" if method.delay.drawn else "constant_delay"
        raise BadInput(f"method_args.{key}: delays that are not the pipeline's own: use backend: {{name: emulator}}")
    names = [name for piece in cut for name in piece.weights_handed_on()]
    if names and method.reads_old(len(cut)) and method.backward_reads is Reads.NEWEST:
        raise BadInput(
            f"model: {', '.join(names)}: weights of a cut module, which a later stage uses: with {method.name} its backward"
            " must read newer ones than the forward: put them into modules of that stage, or method_args: {stash: true}"
        )
    if again and method.reads_old(len(cut)) and method.backward_reads is Reads.NEWEST:
        raise BadInput(
            f"model: {list_some(again)}: a checkpoint (torch.utils.checkpoint) in a module that is cut runs it again in the"
            f" backward, with {method.name} by newer weights, and a part of the checkpoint cannot: begin stages around it, or"
            " use method_args: {stash: true} or backend: {name: emulator}"
        )
