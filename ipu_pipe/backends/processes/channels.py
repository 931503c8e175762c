"""Groups of two in the place of tags, which nccl lacks: one for each link, direction and kind of message.

A group's first message holds both its ranks up until the other one is there too. Ranks whose first messages are on different
groups would wait for each other without end, so all groups are used once, in the same order everywhere, before anything else.

A receive of nccl occupies the GPU until its message comes, and what waits for an idle GPU waits as long: loading a kernel that
was not used before, above all. So a rank runs everything once before it posts its first receive (`rehearse`), and posts none
that only comes after the pipeline has been empty: an evaluation lies between.

(Shown over gloo, by a double whose groups do the same. No machine with two GPUs has run it.)
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Callable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import nn

from ipu_pipe.model.restoring import undisturbed
from ipu_pipe.schedule.methods import Method
from ipu_pipe.update.apply import UpdateRules

Link = Tuple[int, int, str]  # source stage, target stage, kind of message
Channels = Mapping[Link, Any]  # -> process group

POLL = 20e-6  # seconds between two looks at a message


class Kinds(NamedTuple):
    """The words for messages that may go through channels."""

    forward: str
    recompute: str
    backward: str
    shared: str


def links(depth: int, method: Method, kinds: Kinds, tied: Sequence[Link] = ()) -> List[Link]:
    """Who sends what to whom, from stage 0 on: the order in which every rank uses its channels first. `tied`: those between
    stages that use one weight, which come last."""
    found: List[Link] = []
    for s in range(depth - 1):
        found.append((s, s + 1, kinds.forward))
        if method.structure is not None:
            if method.structure.overlap:
                found += [(s, s + 1, kinds.shared), (s + 1, s, kinds.shared)]
            continue
        if method.segments is not None:
            found.append((s, s + 1, kinds.recompute))
        found.append((s + 1, s, kinds.backward))
    return [*found, *tied]


def touch(
    channels: Channels,
    order: Sequence[Link],
    stage: int,
    rank_of: Callable[[int], int],
    device: torch.device,
    wait: Callable[[Any, int], None],
) -> None:
    """Use each of a stage's channels once, in `order`; `wait(work, rank)` for what goes to or comes from another rank."""
    for link in order:
        source, target, _ = link
        if stage in (source, target):
            note, other = torch.zeros(1, device=device), rank_of(target if stage == source else source)
            send = dist.isend if stage == source else dist.irecv
            wait(send(note, other, channels[link]), other)


def finish(work: Any, seconds: float) -> None:
    """Wait for a message of a channel. nccl's own wait takes no limit: with one it ends the group, without one it tells the GPU
    alone to wait, so the host looks from time to time. Raises RuntimeError after so many `seconds`."""
    end = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > end:
            raise RuntimeError(f"timed out after {seconds:g} s")
        time.sleep(POLL)
    work.wait()


@contextlib.contextmanager
def rehearsal(modules: Sequence[Optional[nn.Module]], rules: UpdateRules) -> Iterator[None]:
    """A step that leaves nothing behind: weights, gradients, buffers, modes, random states and the optimizer's are put back."""
    parameters = [p for stage in rules.stages.values() for p in stage.parameters]
    state: Any = next(iter(rules.stages.values())).state
    held = {p: {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in own.items()} for p, own in state.items()}
    weights = [(p, p.detach().clone(), p.grad) for p in parameters]
    with contextlib.ExitStack() as stack:
        for module in modules:
            if module is not None:
                stack.enter_context(undisturbed(module))
        try:
            yield
        finally:
            for p, value, gradient in weights:
                p.data.copy_(value)
                p.grad = gradient
            state.clear()
            state.update(held)
