"""What a job's process needs before it begins: its stage cut out of the model, groups of ranks, the others' memory given back."""

from __future__ import annotations

import contextlib
import datetime
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import torch

from ipu_pipe.backends.processes.channels import Channels, Link, links
from ipu_pipe.backends.processes.group import gpus_talk, make_group
from ipu_pipe.backends.processes.layout import Layout
from ipu_pipe.backends.processes.mail import THROUGH_CHANNELS
from ipu_pipe.backends.processes.place import Place
from ipu_pipe.backends.processes.ties import Ties, ties_of
from ipu_pipe.data.batches import compute_checksum
from ipu_pipe.job.record import Job
from ipu_pipe.local.blocks import get_blocks
from ipu_pipe.model.cutting import Piece, crossings
from ipu_pipe.model.nests import refuse_other_shapes
from ipu_pipe.model.randomness import KeyedRandomness


def replica_groups(layout: Layout, deadline: float) -> List[Any]:
    """Return a group for each stage, of its ranks in all replicas; none if there is one replica."""
    depth, width = layout.depth, layout.width
    if width == 1:
        return []
    return [make_group([replica * depth + s for replica in range(width)], deadline) for s in range(depth)]


def make_channels(job: Job, layout: Layout, tied: Sequence[Link]) -> Optional[Channels]:
    """A group for each neighbour, direction and kind where GPUs talk to each other (not run: no machine had two). Not their
    timeout but the mail's deadline ends a wait: a receive may be posted long before its message."""
    if job.device.type != "cuda" or not gpus_talk():
        return None
    made: Dict[Link, Any] = {}
    for replica in range(layout.width):
        for link in links(layout.depth, job.method, THROUGH_CHANNELS, tied):
            pair = sorted(replica * layout.depth + stage for stage in link[:2])
            group = make_group(pair, job.config.backend.deadline, timeout=datetime.timedelta(days=1), backend="nccl")
            if replica == layout.replica:
                made[link] = group
    return made


def cut_out(job: Job, layout: Layout) -> Tuple[Place, List[Piece]]:
    """This process's stage of a job's model, and the pieces of all stages."""
    s, blocks = layout.stage, get_blocks(job.model)
    if blocks is not None:
        cut, across = blocks.pieces, blocks.crossings
    else:
        cut = list(job.pieces)
        across = crossings(cut)
    if job.config.model.compile:
        cut[0].cut.compile()
    keyed = KeyedRandomness(job.model, job.effects.draws, job.config.seed, job.device)
    head = blocks.head(s) if blocks is not None else None
    behind = cut[s - 1] if blocks is not None and blocks.overlap and s else None
    own = job.width if job.method.rounds is not None else None  # replicas that take turns in one row

    checksums: Dict[int, int] = {}

    def source(m: int) -> Tuple[Any, Any]:
        batch = job.read_microbatch(m, layout.replica) if own is None else job.read_microbatch(m // own, m % own)
        checksums[m] = compute_checksum(batch)
        x, y = job.ready(batch)
        refuse_other_shapes(x, job.example[0], m)
        return x, y

    place = Place(
        layout, cut[s], across, source, job.device, keyed, job.method.structure, head, behind,
        ties_of(job.model, cut, s) if blocks is None else Ties(), checksums,
    )  # fmt: skip
    return place, cut


def forget_others(job: Job, place: Place, cut: List[Piece]) -> List[torch.Tensor]:
    """Free the tensors of the model that other processes hold, and return them."""
    own = {id(t) for piece in (place.piece, place.behind) if piece is not None for t in piece.tensors()}
    others = [t for piece in cut for t in piece.tensors()]
    blocks = get_blocks(job.model)
    if blocks is not None:
        blocks.forget_duplicates()
        for index, head in blocks.heads.items():
            others += [*head.parameters(), *head.buffers()] if index != str(place.layout.stage) else []
    gone = [t for t in others if id(t) not in own]
    return forget([*gone, *(job.numbers.trained(t) for t in gone if isinstance(t, torch.nn.Parameter))])


def forget(tensors: Iterable[torch.Tensor]) -> List[torch.Tensor]:
    """Free the memory of tensors and return them: shapes and sizes stay to be read, the values are not a number."""
    forgotten = list(tensors)
    for tensor in forgotten:
        nothing = float("nan") if tensor.is_floating_point() else 0
        tensor.data = torch.full((), nothing, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    return forgotten


@contextlib.contextmanager
def zeros_instead(forgotten: Sequence[torch.Tensor]) -> Iterator[None]:
    """Make forgotten tensors zero for a forward of the whole model: it may refuse what is not a number, and what is not dense."""
    data = [tensor.data for tensor in forgotten]
    try:
        for tensor in forgotten:
            tensor.data = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        yield
    finally:
        for tensor, own in zip(forgotten, data):
            tensor.data = own
