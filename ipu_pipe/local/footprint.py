"""What a microbatch leaves on each stage and sends on, also of blocks that have losses of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Tuple

from torch import nn

from ipu_pipe.local.blocks import blocks_of
from ipu_pipe.model.probe import Footprint, Loss, footprint
from ipu_pipe.model.stages import Partition


def footprint_of(model: nn.Module, part: Partition, loss: Loss, example: Tuple[Any, Any]) -> Footprint:
    """As seen in one microbatch. Blocks with losses of their own take these where they are: only activations are handed on."""
    blocks = blocks_of(model)
    if blocks is None:
        return footprint(model, part, loss, *example)
    overlap, blocks.overlap = blocks.overlap, 0
    found = footprint(model, part, loss, *example)
    blocks.overlap = overlap
    saved = found.saved_bytes
    if overlap:  # the layer behind is on each block's device, too
        saved = tuple(own + (saved[s - 1] if s else 0) for s, own in enumerate(saved))
    sent = tuple(sum(t.bytes for t in crossing.tensors) for crossing in blocks.crossings)
    return replace(found, saved_bytes=saved, boundary_bytes=sent)
