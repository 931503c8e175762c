"""What passes between devices: as planned, and as the backend measured it."""

from __future__ import annotations

from typing import Dict, List, Mapping, Tuple

from ipu_pipe.job.record import Job
from ipu_pipe.local.blocks import get_blocks


def links(job: Job) -> List[Dict[str, int]]:
    """Traffic between stages as planned, one entry a direction: activations on, gradients back where they cross; of weights that
    several stages use each microbatch's gradient and what each update makes of them. Where a stage holds the layer before its own
    too, it is given what enters that one (the second stage has the input)."""
    messages = job.schedule.microbatches
    sizes, structure = list(enumerate(job.footprint.boundary_bytes)), job.method.structure
    if structure is not None and structure.overlap:
        sizes = [(s + structure.overlap, size) for s, size in sizes if s + structure.overlap < len(job.part) - 1]
    sent = {
        way: (size * messages, messages)
        for s, size in sizes
        for way in (((s, s + 1),) if structure is not None else ((s, s + 1), (s + 1, s)))
    }
    for way, (size, count) in _tied(job).items():
        already = sent.get(way, (0, 0))
        sent[way] = (already[0] + size, already[1] + count)
    return [_link(*way, size, count, size // max(messages, 1)) for way, (size, count) in sent.items()]


def _tied(job: Job) -> Dict[Tuple[int, int], Tuple[int, int]]:
    """(source, target) -> (bytes, messages) for weights that several stages use: the gradient of each backward goes to the stage
    that used the weight before, each update's weights from the first to the others; those between two stages as one message."""
    back: Dict[Tuple[int, int], int] = {}
    out: Dict[Tuple[int, int], int] = {}
    for name, uses in job.part.shared.items():
        weight = job.model.get_parameter(name)
        size = weight.numel() * weight.element_size() if weight.requires_grad else 0
        for before, user in zip(uses, uses[1:]) if size else ():
            back[user.stage, before.stage] = back.get((user.stage, before.stage), 0) + size
            out[uses[0].stage, user.stage] = out.get((uses[0].stage, user.stage), 0) + size
    microbatches, updates = job.schedule.microbatches, job.schedule.update_count
    return {
        **{way: (size * microbatches, microbatches) for way, size in back.items()},
        **{way: (size * updates, updates) for way, size in out.items()},
    }


def shared_links(job: Job) -> List[Dict[str, int]]:
    """Gradients of shared layers that neighbours exchange in an update, as planned; none without an overlap."""
    blocks = get_blocks(job.model)
    if blocks is None or not blocks.overlap:
        return []
    entries, messages = [], job.schedule.update_count
    for s, piece in enumerate(blocks.pieces[:-1]):
        size = messages * sum(p.numel() * p.element_size() for p in piece.parameters() if p.requires_grad)
        share = size // max(job.schedule.microbatches, 1)
        entries += [_link(src, dst, size, messages, share) for src, dst in ((s, s + 1), (s + 1, s))]
    return entries


def measured_links(sent: Mapping[Tuple[int, int], Tuple[int, int]], microbatches: int) -> List[Dict[str, int]]:
    """Of `microbatches`, those since the run was last resumed."""
    return [
        _link(src, dst, size, messages, size // max(microbatches, 1))
        for (src, dst), (size, messages) in sorted(sent.items())
    ]


def _link(src: int, dst: int, size: int, messages: int, bytes_per_microbatch: int) -> Dict[str, int]:
    return {"src": src, "dst": dst, "bytes": size, "messages": messages, "bytes_per_microbatch": bytes_per_microbatch}
