"""Let a caller shard the weights of the stages of this rank: `Pipeline(..., prepare_stage=...)`.

the model is observed, cut and verified whole
prepare_stage(stage, index)       fully_shard, parallelize_module: weights become DTensors, in place
the optimizer's groups get the DTensors, and what steps gets their shards
"""

from __future__ import annotations

import copy
from typing import Any, Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ipu_pipe.backends import world
from ipu_pipe.backends.processes.agreement import compare_over, describe_values
from ipu_pipe.backends.processes.launch import make_request
from ipu_pipe.backends.ranks import gather_objects, read_torch_version
from ipu_pipe.cut.cutting import Piece
from ipu_pipe.errors import BadInput, raise_faults
from ipu_pipe.job.factories import Placed
from ipu_pipe.job.record import Setup
from ipu_pipe.model.batch import count_bytes
from ipu_pipe.model.shards import Shards, list_sharded
from ipu_pipe.pipeline.optimizer import OptimizerHandle
from ipu_pipe.schedule.methods import Method
from ipu_pipe.text import describe_kind, list_some
from ipu_pipe.update.optimizer import keeps_elementwise

PrepareStage = Callable[[nn.Module, int], Any]


def prepare_stages(
    prepare: PrepareStage,
    setup: Setup,
    method: Method,
    placed: Placed,
    x: Any,
    handle: OptimizerHandle,
    draws: Collection[str],
) -> None:
    """Call `prepare` for the stages of this rank, and let the optimizer step the shards. Raise
    `BadInput` where the method or the result does not fit. `x`: inputs of a microbatch; `draws`:
    the modules that draw random numbers.
    """
    # first: without processes there are no pieces to look at
    _require_support(setup, method, placed, handle)
    pieces: Sequence[Piece] = placed.pieces
    cut = pieces[0].cut
    # an evaluation of this size is the first that a loop makes
    cut.prepare(x, training=False)
    # copied while the weights are whole: a forward of DTensors would wait for the other ranks
    cut.record_elsewhere(_copy_to_meta(setup.model))
    before = dict(setup.model.named_parameters())
    # taken before `prepare`: afterwards each rank has another part of the values
    description = {**make_request(setup.config, {}), **describe_values(setup.model, x)}
    if not callable(prepare):
        raise BadInput(
            f"prepare_stage: {describe_kind(prepare)}: must be a function (stage, index)"
        )
    whole_bytes = [count_bytes(list(piece.parameters())) for piece in pieces]
    for stage in _list_stages_here(placed):
        returned = prepare(pieces[stage], stage)
        # fully_shard and parallelize_module return the module that they have changed
        if returned is not None and returned is not pieces[stage]:
            raise BadInput(
                f"prepare_stage: returned {describe_kind(returned)}: must change the stage in "
                f"place, and return None"
            )
        # torch.compile fails on the recorded calls of a stage
        if getattr(pieces[stage], "_compiled_call_impl", None) is not None:
            raise BadInput(
                "prepare_stage: stage.compile(): a stage runs as recorded calls of its modules: "
                "compile these instead"
            )
    after = dict(setup.model.named_parameters())
    # states and the optimizer's groups are by name
    if list(before) != list(after):
        renamed = [name for name in after if name not in before]
        raise BadInput(
            f"prepare_stage: {list_some(renamed) or 'a parameter'}: the names of the model's "
            f"parameters must stay"
        )
    # in the place of master copies, which `_require_support` has refused
    shards = setup.precision.masters = Shards(list_sharded(setup.model))
    setup.precision.shares = _gather_shares(placed, pieces, whole_bytes)
    _require_groups(shards, {p: name for name, p in after.items()}, description, draws)
    handle.replace_parameters({before[name]: after[name] for name in before}, shards)


def _list_stages_here(placed: Placed) -> Sequence[int]:
    here = placed.local_stages
    return range(len(placed.pieces)) if here is None else here


def _gather_shares(
    placed: Placed, pieces: Sequence[Piece], whole_bytes: Sequence[int]
) -> dict[int, float]:
    """Return the share of each stage's weights that its rank holds, of stages on other ranks."""
    here = {
        stage: count_bytes(list(pieces[stage].parameters())) / whole_bytes[stage]
        for stage in _list_stages_here(placed)
        # a stage may have no weights
        if whole_bytes[stage]
    }
    shares = {stage: share for one in gather_objects(here) for stage, share in one.items()}
    return {stage: share for stage, share in shares.items() if stage not in here}


def _require_groups(
    shards: Shards, names: Mapping[Any, str], description: dict[str, str], draws: Collection[str]
) -> None:
    """Raise `BadInput` for weights that are sharded over ranks of other stages or over a part of
    the replicas, and for ranks that differ. `names`: of the weights.
    """
    # the other ranks of this pipeline, which hold other stages
    stages = {*world.list_names()} - {dist.get_rank()}
    data_group = world.get_data_group()
    replicas = {dist.get_rank()} if data_group is None else {*world.list_global_ranks(data_group)}
    for weight, name in names.items():
        ranks = shards.list_ranks(weight)
        place = f"prepare_stage: {name}: is sharded over ranks {list_some(sorted(ranks), 8)}"
        if stages & ranks:
            raise BadInput(
                f"{place}, and rank {min(stages & ranks)} holds another stage: give it the mesh of "
                f"this stage's ranks, such as fully_shard(stage, mesh=mesh['dp'])"
            )
        # FSDP2 would average over these ranks, and nobody over the others
        if len(ranks & replicas) > 1 and not shards.is_averaged(shards.get(weight), replicas):
            raise BadInput(
                f"{place}, a part of data_group: shard over all of it (hybrid sharding: a mesh of two dimensions)"
            )
    groups = [
        group for group in shards.list_groups() if not {*world.list_global_ranks(group)} <= replicas
    ]
    if groups and draws:
        raise BadInput(
            f"model: {list_some(sorted(draws))}: draws random numbers, which tensor parallelism "
            f"would draw alike for each part: not beside tensor parallelism: leave dropout out"
        )
    # ranks of the data group were compared, and have batches of their own
    for group in groups:
        compare_over(group, description)


def _require_support(setup: Setup, method: Method, placed: Placed, handle: OptimizerHandle) -> None:
    """Raise `BadInput` for what cannot be beside sharded weights."""
    config = setup.config
    tied = placed.partition.list_tied(setup.model)
    args = config.method_settings()
    where = "beside prepare_stage"
    raise_faults(
        {
            f"prepare_stage: backend {config.backend.name}: only processes have stages of their "
            f"own: leave it out, or use backend='distributed'": not config.backend.facts.uses_processes,
            f"prepare_stage: needs torch 2.6 or later, this is {torch.__version__}": read_torch_version()
            < (2, 6),
            f"method: {method.name}: not {where}: its heads and replicas write whole "
            f"weights": method.structure is not None or method.rounds is not None,
            f"model: {list_some(list(tied))}: used by several stages, which is not supported {where}: "
            f"untie them": tied,
            f"precision: {config.precision}: has master copies, which are not supported {where}: use "
            f"FSDP2's MixedPrecisionPolicy": setup.precision.masters is not None,
            f"ema: not {where}: average the state_dict()'s weights": config.ema is not None,
            f"method_args.delay_compensation: not {where}: it is not linear in a microbatch's "
            f"gradient, which FSDP2 averages first": "delay_compensation" in args,
            f"method_args.gap_aware: not {where}: the gap of a shard was not compared with that of "
            f"a whole weight": "gap_aware" in args,
            f"optimizer: {type(handle.optimizer).__name__}: not {where}: it does not step each "
            f"element by itself, so that a part of a weight would be stepped otherwise: use SGD or "
            f"Adam, or one of torch's like them": not keeps_elementwise(handle.optimizer),
        }
    )


def _copy_to_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model without values, on which forwards of other shapes are recorded."""
    tensors = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {}
    for tensor in tensors:
        value = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        # deepcopy takes these in place of the values, and tied weights stay tied
        memo[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
    return copy.deepcopy(model, memo)
