"""What a microbatch leaves on each stage and sends on, also of blocks that have losses of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Tuple

import torch
from torch import nn

from ipu_pipe.local.blocks import blocks_of
from ipu_pipe.model.probe import Footprint, Loss, footprint
from ipu_pipe.model.stages import Partition


def footprint_of(model: nn.Module, part: Partition, loss: Loss, example: Tuple[torch.Tensor, torch.Tensor]) -> Footprint:
    """As seen in one microbatch. Blocks with losses of their own take these where they are: only activations are handed on."""
    blocks = blocks_of(model)
    overlap, alone = (blocks.overlap, blocks) if blocks is not None else (0, None)
    if alone is not None:
        alone.overlap = 0
    found = footprint(model, part, loss, *example)
    if alone is not None:
        alone.overlap = overlap
    if blocks is None:
        return found
    if blocks.overlap:  # the layer behind is on each block's device, too
        saved = found.saved_bytes
        found = replace(found, saved_bytes=tuple(own + (saved[s - 1] if s else 0) for s, own in enumerate(saved)))
    return replace(found, boundary_bytes=tuple(sum(t.bytes for t in crossing.tensors) for crossing in blocks.crossings))
