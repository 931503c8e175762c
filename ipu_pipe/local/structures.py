"""The table of structures: which stages form a block with a loss of its own, by method, and what that costs.

The four of Laskin et al. 2020, Figure 2 and section 4, on a model of stages a b c d:

    local_greedy         a | b | c | d          every stage a block
    local_chunked        a b | c d              so many blocks, or blocks that begin at these names
    local_overlapping    a | a b | b c | c d    the stage before once more in each (ipu_pipe.local.duplicates)
    last_layers          (a b) | c d            the last stages the only block that trains
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.local import laws
from ipu_pipe.local.blocks import BlockedModel, Blocks
from ipu_pipe.local.heads import MakeHead
from ipu_pipe.local.laws import Law
from ipu_pipe.model.cutting import links_of, merge_stages
from ipu_pipe.model.outputs import Take
from ipu_pipe.model.stages import Partition, partition
from ipu_pipe.schedule.methods import Structure


class Staged(NamedTuple):
    """What blocks are made of: a model, an input of it, its structure, the stages as the config says them; `links`: names of the
    modules of its top-level sequence, at which blocks may begin."""

    model: nn.Module
    x: Any
    structure: Structure
    stages: Any
    links: List[str]

    def partition(self) -> Partition:
        """The stages; a count is balanced between modules of the top level."""
        return partition(self.model, self.x, self.stages, between_top=True)

    def links_at(self, begins: List[str], key: str) -> List[str]:
        """Each of `begins` as the link that it is or begins with; BadInput for what lies in a block with a skip connection."""
        partition(self.model, self.x, begins if begins else 1)  # refuses unknown names and a wrong order
        found, faults = [], []
        for begin in begins:
            link = next((name for name in self.links if f"{name}.".startswith(f"{begin}.")), None)
            if link is None:
                around = next((name for name in self.links if f"{begin}.".startswith(f"{name}.")), "a module")
                faults.append(
                    f"{key}: {begin}: lies inside {around}, whose other paths (a skip connection) cross there: must be one of"
                    f" the model's top-level sequence, such as {around}"
                )
            else:
                found.append(link)
        if faults:
            raise BadInput(faults)
        return found


@dataclass(frozen=True)
class Row:
    """One structure. `begins`: where the second and later blocks begin; raises BadInput. `asked_by`: the field of
    `schedule.methods.Structure` that asks for it; None: what is there where no field asks. `trains_last`: only the last block
    trains."""

    begins: Callable[[Staged], List[str]]
    law: Law
    asked_by: Optional[str] = None
    trains_last: bool = False


def _every_stage(staged: Staged) -> List[str]:
    return staged.links_at(staged.partition().begin_names(), "stages")


def _chunks(staged: Staged) -> List[str]:
    wanted = staged.structure.blocks
    if isinstance(wanted, tuple):
        return staged.links_at(list(wanted), "method_args.blocks")
    assert wanted is not None
    part = staged.partition()
    try:
        return merge_stages(staged.model, part, wanted, staged.x)
    except BadInput as error:
        key = f"method_args.blocks: {wanted}:"
        raise BadInput([fault.replace(f"stages: {len(part)}:", key) for fault in error.faults]) from None


def _last_stages(staged: Staged) -> List[str]:
    layers = staged.structure.layers
    assert layers is not None
    part = staged.partition()
    begins = staged.links_at(part.begin_names(), "stages")
    if layers > len(part):
        raise BadInput(f"method_args.layers: {layers}: the model has {len(part)} stages")
    return begins[-layers:][:1] if layers < len(part) else []


STRUCTURES: Dict[str, Row] = {
    "local_greedy": Row(_every_stage, laws.GREEDY),
    "local_overlapping": Row(_every_stage, laws.OVERLAPPING, "overlap"),
    "local_chunked": Row(_chunks, laws.CHUNKED, "blocks"),
    "last_layers": Row(_last_stages, laws.LAST, "layers", trains_last=True),
}


def row_of(structure: Structure) -> Row:
    """The row that a structure asks for."""
    rows = list(STRUCTURES.values())
    asked = [row for row in rows if row.asked_by is not None and getattr(structure, row.asked_by)]
    return asked[0] if asked else next(row for row in rows if row.asked_by is None)


def make_blocks(
    model: nn.Module, x: Any, structure: Structure, stages: Any, seed: int = 0, count: Optional[int] = None,
    head: Optional[MakeHead] = None, take: Optional[Take] = None,
) -> Tuple[BlockedModel, Partition]:  # fmt: skip
    """A model in blocks by a method's structure, and the partition with a block a stage. `stages`: as the config says them;
    `count`: how many blocks there must be (processes); `take`: what the loss is of in the model's output. Raises BadInput."""
    row = row_of(structure)
    begins = row.begins(Staged(model, x, structure, stages, [name for name, _ in links_of(model, x)]))
    if count is not None and len(begins) + 1 != count:
        raise BadInput(
            f"stages: {len(begins) + 1} blocks, each in a process of its own: start as many for each replica, not {count}"
        )
    blocks = Blocks(model, begins, x, seed, row.trains_last, head, take)
    made = BlockedModel(blocks)
    part = partition(made, x, begins if begins else 1)
    if structure.overlap:
        blocks.share(structure.overlap)
    return made, part
