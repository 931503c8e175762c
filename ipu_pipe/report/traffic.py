"""What passes between devices: as planned, and as the backend measured it."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Tuple

from ipu_pipe.job.record import Job
from ipu_pipe.local.blocks import blocks_of


def links(job: Job) -> List[Dict[str, int]]:
    """Traffic between neighbouring stages as planned, one entry a direction: activations on, gradients back where they cross.
    Where a stage holds the layer before its own too, it is given what enters that one (the second stage has the input)."""
    messages = job.schedule.microbatches
    sizes, structure = list(enumerate(job.footprint.boundary_bytes)), job.method.structure
    if structure is not None and structure.overlap:
        sizes = [(s + structure.overlap, size) for s, size in sizes if s + structure.overlap < len(job.part) - 1]
    entries = []
    for s, size in sizes:
        for src, dst in ((s, s + 1),) if structure is not None else ((s, s + 1), (s + 1, s)):
            entries.append(
                {"src": src, "dst": dst, "bytes": size * messages, "messages": messages, "bytes_per_microbatch": size}
            )
    return entries


def shared_links(job: Job) -> List[Dict[str, Any]]:
    """Gradients of shared layers that neighbours exchange in an update, as planned; none without an overlap."""
    blocks = blocks_of(job.model)
    if blocks is None or not blocks.overlap:
        return []
    entries, messages = [], job.schedule.update_count
    for s, piece in enumerate(blocks.pieces[:-1]):
        size = sum(p.numel() * p.element_size() for p in piece.parameters() if p.requires_grad)
        for src, dst in ((s, s + 1), (s + 1, s)):
            per_microbatch = size * messages // max(job.schedule.microbatches, 1)
            entry = {"src": src, "dst": dst, "bytes": size * messages, "messages": messages}
            entries.append({**entry, "bytes_per_microbatch": per_microbatch})
    return entries


def measured_links(sent: Mapping[Tuple[int, int], Tuple[int, int]], microbatches: int) -> List[Dict[str, Any]]:
    """Of `microbatches`, those since the run was last resumed."""
    return [
        {
            "src": src,
            "dst": dst,
            "bytes": size,
            "messages": messages,
            "bytes_per_microbatch": size // max(microbatches, 1),
        }
        for (src, dst), (size, messages) in sorted(sent.items())
    ]
