"""The structures of local-parallel training, a row for each method: the stages of each block, and the cost of training.

Laskin et al. 2020, Figure 2 and section 4, on a model of stages a b c d:

    local_greedy         a | b | c | d          every stage is a block
    local_chunked        a b | c d              a number of blocks, or the names at which blocks begin
    local_overlapping    a | a b | b c | c d    each block trains the previous stage as well
    last_layers          (a b) | c d            the last stages are the only block that trains

The cost laws give total and sequential FLOPs (appendix A) from four numbers of a model: f, forward FLOPs of a layer (the mean);
x, those of an auxiliary head with its loss; r, the cost of a backward as a multiple of its forward; L, the number of layers. K
is the number of blocks. An update costs its examples and 10 FLOPs per parameter for the optimizer. *Total* is all work.
*Sequential* is the work that must be done one after another if each example has its own processor, and each block too if blocks
do not wait for one another.

    method              an example                                     divided by
    backpropagation     (1+r) (f L + x)                                batch
    local_greedy        (1+r) (f + x) L                                batch L
    local_overlapping   (f+x) L + (L-1) r (2 f + x) + r (f + x)        batch L
    local_chunked       (1+r) (f L + K x)                              batch K
    last_layers (k)     (f L + x) + r (k f + x)                        batch (L + k r) / (k (1 + r))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.local.blocks import BlockedModel, Blocks
from ipu_pipe.local.heads import Heads
from ipu_pipe.model.cutting import cut_model
from ipu_pipe.model.loss import Take
from ipu_pipe.model.stages import Partition, group_stages, partition
from ipu_pipe.schedule.methods import Structure

# per parameter and update: the optimizer, and the averaging of duplicated layers
OPTIMIZER_FLOPS = 10
AVERAGING_FLOPS = 2


@dataclass(frozen=True)
class Flops:
    """The numbers f, x, r and L of a model for one example, and its parameters without auxiliary heads."""

    forward: float
    auxiliary: float
    backward: float
    layers: int
    parameters: int


@dataclass(frozen=True)
class Law:
    """The cost of a structure; k is the number of blocks of local_chunked, of layers of last_layers.

    `example(flops, k)` are the FLOPs of one example, `parallel(flops, k)` the divisor of the sequential cost beside the
    batch size, `update` the FLOPs per parameter and update.
    """

    example: Callable[[Flops, int], float]
    parallel: Callable[[Flops, int], float]
    update: int = OPTIMIZER_FLOPS


def _overlapping(c: Flops, k: int) -> float:
    f, x, r, L = c.forward, c.auxiliary, c.backward, c.layers
    return (f + x) * L + (L - 1) * r * (2 * f + x) + r * (f + x)


BACKPROPAGATION = Law(lambda c, k: (1 + c.backward) * (c.forward * c.layers + c.auxiliary), lambda c, k: 1.0)
GREEDY = Law(lambda c, k: (1 + c.backward) * (c.forward + c.auxiliary) * c.layers, lambda c, k: c.layers)
OVERLAPPING = Law(_overlapping, lambda c, k: c.layers, OPTIMIZER_FLOPS + AVERAGING_FLOPS)
CHUNKED = Law(lambda c, k: (1 + c.backward) * (c.forward * c.layers + k * c.auxiliary), lambda c, k: k)
LAST = Law(
    lambda c, k: (c.forward * c.layers + c.auxiliary) + c.backward * (k * c.forward + c.auxiliary),
    lambda c, k: (c.layers + k * c.backward) / (k * (1 + c.backward)),
)


class StagedModel(NamedTuple):
    """A model to be cut into blocks: an input of it, its structure, and the stages that the config names.

    `one_stage` is the reason why a weight must be in a single stage.
    """

    model: nn.Module
    x: Any
    structure: Structure
    stages: Any
    one_stage: str

    def make_partition(self) -> Partition:
        """Return the stages.

        A count is balanced between any modules if one activation crosses at each boundary, else between top-level modules.
        """
        part = partition(self.model, self.x, self.stages, one_stage=self.one_stage)
        names = part.begin_names()
        named = self.stages is None or isinstance(self.stages, (list, tuple))
        if named or len(self.select_single(names)) == len(names):
            return part
        return partition(self.model, self.x, self.stages, between_top=True, one_stage=self.one_stage)

    def select_single(self, names: List[str]) -> List[str]:
        """Return the names at which exactly one activation crosses."""
        crossings = cut_model(self.model, names, self.x)[0].cut.crossings
        return [
            name
            for name, crossing in zip(names, crossings)
            if sum(t.dtype.is_floating_point for t in crossing.tensors) == 1
        ]


@dataclass(frozen=True)
class BlockStructure:
    """A row of the table.

    `begins` returns the names at which the second and later blocks begin, or raises `BadInput`. `field` is the field of
    `schedule.methods.Structure` that selects the row; None is the row without such a field. With `trains_last` only the last
    block trains.
    """

    begins: Callable[[StagedModel], List[str]]
    law: Law
    field: Optional[str] = None
    trains_last: bool = False


def _begin_every_stage(staged: StagedModel) -> List[str]:
    return staged.make_partition().begin_names()


def _begin_chunks(staged: StagedModel) -> List[str]:
    wanted = staged.structure.blocks
    if isinstance(wanted, tuple):
        # raises BadInput for unknown names and a wrong order
        partition(staged.model, staged.x, list(wanted) or 1, one_stage=staged.one_stage)
        return list(wanted)
    assert wanted is not None
    part = staged.make_partition()
    try:
        groups = group_stages(staged.model, part, wanted, staged.x, staged.select_single(part.begin_names()))
        return list(groups.values())
    except BadInput as error:
        key = f"method_args.blocks: {wanted}:"
        raise BadInput([fault.replace(f"stages: {len(part)}:", key) for fault in error.faults]) from None


def _begin_last_stages(staged: StagedModel) -> List[str]:
    layers = staged.structure.layers
    assert layers is not None
    part = staged.make_partition()
    begins = part.begin_names()
    if layers > len(part):
        raise BadInput(f"method_args.layers: {layers}: the model has {len(part)} stages")
    return begins[-layers:][:1] if layers < len(part) else []


STRUCTURES: Dict[str, BlockStructure] = {
    "local_greedy": BlockStructure(_begin_every_stage, GREEDY),
    "local_overlapping": BlockStructure(_begin_every_stage, OVERLAPPING, "overlap"),
    "local_chunked": BlockStructure(_begin_chunks, CHUNKED, "blocks"),
    "last_layers": BlockStructure(_begin_last_stages, LAST, "layers", trains_last=True),
}


def find_structure(structure: Structure) -> BlockStructure:
    """Return the row of a method's structure."""
    rows = list(STRUCTURES.values())
    selected = [row for row in rows if row.field is not None and getattr(structure, row.field)]
    return selected[0] if selected else next(row for row in rows if row.field is None)


def make_blocks(
    model: nn.Module, x: Any, structure: Structure, stages: Any, seed: int = 0, count: Optional[int] = None,
    head: Optional[Heads] = None, one_stage: str = "", take: Optional[Take] = None,
) -> Tuple[BlockedModel, Partition]:  # fmt: skip
    """Return a model in blocks by a method's structure, and the partition in which each block is a stage.

    `stages` are those of the config, `count` is the required number of blocks (processes), `one_stage` as for
    `model.stages.partition`; `take` extracts from the model's output what its loss needs. Raise `BadInput`.
    """
    row = find_structure(structure)
    begins = row.begins(StagedModel(model, x, structure, stages, one_stage))
    if count is not None and len(begins) + 1 != count:
        raise BadInput(f"stages: {len(begins) + 1} blocks, which need as many processes per replica, got {count}")
    blocks = Blocks(model, begins, x, seed, row.trains_last, head, take)
    blocked = BlockedModel(blocks)
    part = partition(blocked, x, begins if begins else 1, one_stage=one_stage)
    if structure.overlap:
        blocks.share(structure.overlap)
    return blocked, part
