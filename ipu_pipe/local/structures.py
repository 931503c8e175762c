"""The table of structures: which stages form a block with a loss of its own, by method, and what that costs.

The four of Laskin et al. 2020, Figure 2 and section 4, on a model of stages a b c d:

    local_greedy         a | b | c | d          every stage a block
    local_chunked        a b | c d              so many blocks, or blocks that begin at these names
    local_overlapping    a | a b | b c | c d    the stage before once more in each (ipu_pipe.local.duplicates)
    last_layers          (a b) | c d            the last stages the only block that trains

The laws of what local-parallel training costs: total and sequential FLOPs (Laskin et al. 2020, appendix A).

All laws go by four numbers of a model: f, forward FLOPs of a layer (the mean); x, of an auxiliary head with its loss; r, how many
times its forward a backward costs; L, layers. K: blocks. A step costs its examples and 10 FLOPs a parameter for the optimizer.
*Total* is all work; *sequential* the work that must follow one another when each example, and each block where blocks do not wait
for one another, has a processor of its own.

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
from ipu_pipe.local.heads import MakeHead
from ipu_pipe.model.balancing import merge_stages
from ipu_pipe.model.cutting import cut_model
from ipu_pipe.model.loss import Take
from ipu_pipe.model.partition import Partition
from ipu_pipe.model.stages import partition
from ipu_pipe.schedule.methods import Structure

OPTIMIZER_FLOPS = 10  # a parameter and step
AVERAGING_FLOPS = 2  # a parameter and step, of duplicated layers


@dataclass(frozen=True)
class Flops:
    """FLOPs of a model for one example: `forward` of a layer (mean), `auxiliary` of a head with its loss, `backward` as a
    multiple of the forward; `layers`, `parameters` without auxiliary heads."""

    forward: float
    auxiliary: float
    backward: float
    layers: int
    parameters: int


@dataclass(frozen=True)
class Law:
    """`example(costs, k)`: FLOPs of one example in one step; `parallel(costs, k)`: what the total is divided by beside the
    batch; `update`: FLOPs a parameter and step. `k`: blocks of local_chunked, layers of last_layers."""

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
    """What blocks are made of: a model, an input of it, its structure, the stages as the config says them; `one_stage`: why a
    weight lies in one of them."""

    model: nn.Module
    x: Any
    structure: Structure
    stages: Any
    one_stage: str

    def partition(self) -> Partition:
        """The stages. A count is balanced between any modules, if only one activation crosses there; else between those of the
        top level."""
        part = partition(self.model, self.x, self.stages, one_stage=self.one_stage)
        names = part.begin_names()
        named = self.stages is None or isinstance(self.stages, (list, tuple))
        if named or len(self.alone(names)) == len(names):
            return part
        return partition(self.model, self.x, self.stages, between_top=True, one_stage=self.one_stage)

    def alone(self, names: List[str]) -> List[str]:
        """Those of `names` at which one activation crosses."""
        crossed = cut_model(self.model, names, self.x)[0].cut.crossings
        return [
            name
            for name, crossing in zip(names, crossed)
            if sum(t.dtype.is_floating_point for t in crossing.tensors) == 1
        ]


@dataclass(frozen=True)
class BlockStructure:
    """One structure. `begins`: where the second and later blocks begin; raises BadInput. `asked_by`: the field of
    `schedule.methods.Structure` that asks for it; None: what is there where no field asks. `trains_last`: only the last block
    trains."""

    begins: Callable[[StagedModel], List[str]]
    law: Law
    asked_by: Optional[str] = None
    trains_last: bool = False


def _every_stage(staged: StagedModel) -> List[str]:
    return staged.partition().begin_names()


def _chunks(staged: StagedModel) -> List[str]:
    wanted = staged.structure.blocks
    if isinstance(wanted, tuple):
        # refuses unknown names and a wrong order
        partition(staged.model, staged.x, list(wanted) or 1, one_stage=staged.one_stage)
        return list(wanted)
    assert wanted is not None
    part = staged.partition()
    try:
        return merge_stages(staged.model, part, wanted, staged.x, staged.alone(part.begin_names()))
    except BadInput as error:
        key = f"method_args.blocks: {wanted}:"
        raise BadInput([fault.replace(f"stages: {len(part)}:", key) for fault in error.faults]) from None


def _last_stages(staged: StagedModel) -> List[str]:
    layers = staged.structure.layers
    assert layers is not None
    part = staged.partition()
    begins = part.begin_names()
    if layers > len(part):
        raise BadInput(f"method_args.layers: {layers}: the model has {len(part)} stages")
    return begins[-layers:][:1] if layers < len(part) else []


STRUCTURES: Dict[str, BlockStructure] = {
    "local_greedy": BlockStructure(_every_stage, GREEDY),
    "local_overlapping": BlockStructure(_every_stage, OVERLAPPING, "overlap"),
    "local_chunked": BlockStructure(_chunks, CHUNKED, "blocks"),
    "last_layers": BlockStructure(_last_stages, LAST, "layers", trains_last=True),
}


def find_structure(structure: Structure) -> BlockStructure:
    """The row that a structure asks for."""
    rows = list(STRUCTURES.values())
    asked = [row for row in rows if row.asked_by is not None and getattr(structure, row.asked_by)]
    return asked[0] if asked else next(row for row in rows if row.asked_by is None)


def make_blocks(
    model: nn.Module, x: Any, structure: Structure, stages: Any, seed: int = 0, count: Optional[int] = None,
    head: Optional[MakeHead] = None, one_stage: str = "", take: Optional[Take] = None,
) -> Tuple[BlockedModel, Partition]:  # fmt: skip
    """A model in blocks by a method's structure, and the partition with a block a stage. `stages`: as the config says them;
    `count`: how many blocks there must be (processes); `one_stage`: as `model.stages.partition`; `take`: what the loss is of in
    the model's output. Raises BadInput."""
    row = find_structure(structure)
    begins = row.begins(StagedModel(model, x, structure, stages, one_stage))
    if count is not None and len(begins) + 1 != count:
        raise BadInput(
            f"stages: {len(begins) + 1} blocks, each in a process of its own: start as many for each replica, not {count}"
        )
    blocks = Blocks(model, begins, x, seed, row.trains_last, head, take)
    made = BlockedModel(blocks)
    part = partition(made, x, begins if begins else 1, one_stage=one_stage)
    if structure.overlap:
        blocks.share(structure.overlap)
    return made, part
