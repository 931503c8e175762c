"""The structures of local-parallel training, one for each method: the stages of a model that form
each block.

Laskin et al. 2020, Figure 2 and section 4, on a model of stages a b c d:

    local_greedy         a | b | c | d          every stage is a block
    local_chunked        a b | c d              a number of blocks, or the names at which blocks begin
    local_overlapping    a | a b | b c | c d    each block trains the previous stage as well
    last_layers          (a b) | c d            the last stages are the only block that trains
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from ipu_pipe.cut.cutting import cut_model
from ipu_pipe.errors import BadInput
from ipu_pipe.local.blocks import BlockedModel, Blocks
from ipu_pipe.local.heads import Heads
from ipu_pipe.model.loss import Take
from ipu_pipe.model.stages import Partition, group_stages, partition
from ipu_pipe.schedule.methods import Structure


class StagedModel(NamedTuple):
    """A model to be cut into blocks: an input of it, its structure, and the stages that the config
    names.

    `one_stage` is the reason why a weight must be in a single stage.
    """

    model: nn.Module
    x: Any
    structure: Structure
    stages: Any
    one_stage: str

    def make_partition(self) -> Partition:
        """Return the stages.

        A count is balanced between any modules if one activation crosses at each boundary, else
        between top-level modules.
        """
        part = partition(self.model, self.x, self.stages, one_stage=self.one_stage)
        names = part.begin_names()
        is_a_count = self.stages is not None and not isinstance(self.stages, (list, tuple))
        if not is_a_count or len(self.select_single_crossings(names)) == len(names):
            return part
        return partition(
            self.model, self.x, self.stages, between_top=True, one_stage=self.one_stage
        )

    def select_single_crossings(self, names: list[str]) -> list[str]:
        """Return the names at which exactly one activation crosses."""
        # only a recorded forward tells what crosses
        crossings = cut_model(self.model, names, self.x)[0].cut.crossings
        return [
            name
            for name, crossing in zip(names, crossings)
            # masks and positions may come along: only activations have gradients
            if sum(t.dtype.is_floating_point for t in crossing.tensors) == 1
        ]


def _list_boundaries(staged: StagedModel) -> list[str]:
    """Return the names at which the second and later blocks begin. Raise `BadInput` if the
    structure does not fit the model.
    """
    if staged.structure.blocks:
        return _list_chunk_boundaries(staged, staged.structure.blocks)
    if staged.structure.layers:
        return _find_last_boundary(staged, staged.structure.layers)
    return staged.make_partition().begin_names()


def _list_chunk_boundaries(staged: StagedModel, chunks: int | tuple[str, ...]) -> list[str]:
    if isinstance(chunks, tuple):
        # raises BadInput for unknown names and a wrong order
        partition(staged.model, staged.x, list(chunks), one_stage=staged.one_stage)
        return list(chunks)
    part = staged.make_partition()
    try:
        groups = group_stages(
            staged.model, part, chunks, staged.x, staged.select_single_crossings(part.begin_names())
        )
        return list(groups.values())
    except BadInput as error:
        # the user gave a number of blocks: a fault about stages would name a key that is not in the
        # config
        key = f"method_args.blocks: {chunks}:"
        raise BadInput(
            [fault.replace(f"stages: {len(part)}:", key) for fault in error.lines]
        ) from None


def _find_last_boundary(staged: StagedModel, layers: int) -> list[str]:
    part = staged.make_partition()
    begins = part.begin_names()
    if layers > len(part):
        raise BadInput(f"method_args.layers: {layers}: the model has {len(part)} stages")
    # the first of the last stages; none if all of them train
    return begins[-layers:][:1] if layers < len(part) else []


def make_blocks(
    model: nn.Module,
    x: Any,
    structure: Structure,
    stages: Any,
    seed: int = 0,
    head: Heads | None = None,
    one_stage: str = "",
    take: Take | None = None,
) -> tuple[BlockedModel, Partition]:
    """Return a model in blocks by a method's structure, and the partition in which each block is a
    stage.

    `stages` are those of the config, `one_stage` as for `model.stages.partition`; `take` extracts
    from the model's output what its loss needs. Raise `BadInput`.
    """
    begins = _list_boundaries(StagedModel(model, x, structure, stages, one_stage))
    blocks = Blocks(model, begins, x, seed, structure.layers is not None, head, take)
    blocked = BlockedModel(blocks)
    part = partition(blocked, x, begins if begins else 1, one_stage=one_stage)
    if structure.overlap:
        blocks.add_duplicates()
    return blocked, part
