"""What ranks tell each other: messages over torch.distributed.

A message is what an action needs from another rank, told by kind and microbatch. Receives are posted ahead, sends are kept
until they are through; compute waits for one only when so many later ones are on their way that its action is long past.

    gloo     all messages in one group, told apart by tags; a GPU's tensors go through the host's memory
    nccl     has no tags: a group for each link, direction and kind (`channels`), in which both sides go by the order of
             microbatches
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import Any, Deque, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from ipu_pipe.backends.processes.channels import Channels, Kinds, Link, finish, touch
from ipu_pipe.backends.processes.joining import wait_limit
from ipu_pipe.backends.processes.layout import Layout
from ipu_pipe.backends.processes.timeline import Timeline
from ipu_pipe.model.cutting import Shape
from ipu_pipe.schedule.actions import Kind

ORDER = tuple(kind.value for kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.UPDATE))  # within a slot
FORWARD, RECOMPUTE, BACKWARD, UPDATE = ORDER
NORM, SHARED, RESULT, TIED, WEIGHTS = "N", "S", "L", "T", "V"
# of messages: with an update the norm, gradients of a shared layer, losses; of weights of several stages the gradients of a
# backward, and what an update makes of them
KINDS = (*ORDER, NORM, SHARED, RESULT, TIED, WEIGHTS)
ON_HOST = (NORM, RESULT)  # small tensors, on the host whatever the device
LENT = (FORWARD, RECOMPUTE)  # what the sender keeps for its backward
AHEAD = (
    3  # receives posted on each link before they are needed; of weights, which are large and come once an update, one
)

CARRIES = {
    FORWARD: "activations", RECOMPUTE: "recomputed activations", BACKWARD: "gradients",
    SHARED: "shared gradients", NORM: "norms", RESULT: "losses", TIED: "tied gradients", WEIGHTS: "weights",
}  # fmt: skip

THROUGH_CHANNELS = Kinds(FORWARD, RECOMPUTE, BACKWARD, SHARED)


class Message(NamedTuple):
    """The result of an action: `kind` and microbatch of the action that needs it."""

    kind: str
    microbatch: int

    def tag(self, index: int) -> int:
        """Of its tensor number `index`; the same for sender and receiver."""
        return (8 * (len(KINDS) * self.microbatch + KINDS.index(self.kind)) + index % 8) % (1 << 30)


class _Sent(NamedTuple):
    """A tensor on its way; `is_lent`: it is the one that the microbatch keeps."""

    work: Any
    value: torch.Tensor
    message: Message
    bytes: int
    is_lent: bool


def _sent(work: Any, value: torch.Tensor, message: Message, is_copy: bool) -> _Sent:
    """`is_copy`: the value is in memory of its own; else that of a weight is its stage's anyhow."""
    held = value.numel() * value.element_size() if is_copy or message.kind != WEIGHTS else 0
    return _Sent(work, value, message, held, message.kind in LENT and not is_copy)


class Outbox:
    """What was sent, by target, until it is known to be through; `bytes` of it."""

    def __init__(self) -> None:
        self._out: Dict[int, Deque[_Sent]] = {}
        self._lent: Dict[int, int] = {}  # bytes that microbatches keep, too
        self.bytes = 0

    def add(self, target: int, sent: _Sent) -> None:
        """One more."""
        self._out.setdefault(target, deque()).append(sent)
        self.bytes += sent.bytes
        if sent.is_lent:
            self._lent[sent.message.microbatch] = self.lent(sent.message.microbatch) + sent.bytes

    def take(self, target: int) -> _Sent:
        """The oldest."""
        sent = self._out[target].popleft()
        self.bytes -= sent.bytes
        if sent.is_lent:
            left = self._lent.pop(sent.message.microbatch) - sent.bytes
            if left:
                self._lent[sent.message.microbatch] = left
        return sent

    def count(self, target: int) -> int:
        """Of those to a target."""
        return len(self._out.get(target, ()))

    def lent(self, m: int) -> int:
        """Bytes that microbatch m keeps, as long as it is in flight."""
        return self._lent.get(m, 0)

    @property
    def targets(self) -> List[int]:
        """To which something was sent."""
        return list(self._out)


class Mail:
    """Messages with the other stages over torch.distributed.

    `group`: of all messages (all processes if None), which no one else may use meanwhile. `channels`: groups that take its place
    where messages have no tags. `deadline`: seconds after which a wait is a fault, some more (`wait_limit`) in the first step.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        timeline: Timeline,
        deadline: float,
        group: Any = None,
        channels: Optional[Channels] = None,
    ) -> None:
        self._layout, self._device, self.timeline, self._group = layout, device, timeline, group
        self._deadline, self._channels = deadline, channels
        self._through_host = device.type != "cpu" and channels is None
        self._wanted: Dict[Tuple[int, str], Deque[Tuple[Message, Tuple[Shape, ...]]]] = {}  # by source and kind
        self.posted: Dict[Tuple[int, Message], List[Tuple[Any, torch.Tensor]]] = {}
        self._in_post: Dict[Tuple[int, str], int] = {}
        self.out = Outbox()
        self._open: Dict[str, int] = {}  # by kind, the first microbatch or update whose receive may not be posted yet
        self._kept = 8 * (layout.depth + 1)  # tensors on their way to one stage
        self._posted_bytes = 0
        self.waiting_for: Optional[int] = None  # the rank, while waiting
        self.is_warm = False  # the first step is done

    @property
    def has_channels(self) -> bool:
        """Whether groups of two take the place of tags."""
        return self._channels is not None

    @property
    def limit(self) -> timedelta:
        """How long a wait may take now."""
        return wait_limit(self._deadline, self.is_warm)

    def touch(self, order: Sequence[Link]) -> None:
        """Before anything else where there are channels: use each of this rank's once, in the order that all ranks share."""
        assert self._channels is not None
        touch(self._channels, order, self._layout.stage, self._layout.rank_of, self._device, self._wait_for_channel)

    def open(self, microbatch: int, update: int) -> None:
        """From now on receives may be posted of messages before this microbatch, or update: of all, where it was never said."""
        if self._open.get(FORWARD) == microbatch:
            return
        updates = dict.fromkeys((SHARED, NORM, WEIGHTS), update)
        self._open = {**dict.fromkeys((*ORDER, TIED), microbatch), **updates}
        for source, kind in list(self._wanted):
            self._post(source, kind)

    def _may_post(self, message: Message) -> bool:
        return message.microbatch < self._open.get(message.kind, 0 if self._by_channel(message.kind) else 1 << 62)

    def _by_channel(self, kind: str) -> bool:
        return self._channels is not None and kind not in ON_HOST

    def _way(self, source: int, target: int, message: Message, index: int) -> Tuple[Any, int]:
        """Group and tag of tensor number `index` of a message."""
        if self._channels is None or not self._by_channel(message.kind):
            return self._group, message.tag(index)
        return self._channels[source, target, message.kind], 0

    def expect(self, source: int, wanted: Sequence[Tuple[Message, Tuple[Shape, ...]]]) -> None:
        """Messages that stage `source` will send, those of a kind in the order in which they are needed."""
        for message, shapes in wanted:
            self._wanted.setdefault((source, message.kind), deque()).append((message, shapes))
        for kind in dict.fromkeys(message.kind for message, _ in wanted):  # a set's order differs from rank to rank
            self._post(source, kind)

    def _post(self, source: int, kind: str) -> None:
        queue, most = self._wanted[source, kind], 1 if kind == WEIGHTS else AHEAD
        while queue and self._in_post.get((source, kind), 0) < most and self._may_post(queue[0][0]):
            message, shapes = queue.popleft()
            place = "cpu" if self._through_host or kind in ON_HOST else self._device
            received = []
            for index, shape in enumerate(shapes):
                buffer = torch.empty(shape.sent, dtype=shape.dtype, device=place)
                group, tag = self._way(source, self._layout.stage, message, index)
                received.append((dist.irecv(buffer, self._layout.rank_of(source), group, tag), buffer))
            self.posted[source, message] = received
            self._posted_bytes += _bytes(received)
            self._in_post[source, kind] = self._in_post.get((source, kind), 0) + 1

    def receive(self, source: int, message: Message) -> List[torch.Tensor]:
        """Wait for a message, and take it: an event each."""
        carries, rank, timeline = CARRIES[message.kind], self._layout.rank_of(source), self.timeline
        start = timeline.mark()
        received = self.posted.pop((source, message))
        for work, _ in received:
            self._finish(work, source, message.kind)
        came, size = timeline.add("wait", message.microbatch, start, peer=rank, carries=carries), _bytes(received)
        self._in_post[source, message.kind] -= 1
        self._posted_bytes -= size
        self._post(source, message.kind)
        taken = [buffer if message.kind in ON_HOST else buffer.to(self._device) for _, buffer in received]
        timeline.add("recv", message.microbatch, came, size=size, peer=rank, carries=carries)
        return taken

    def wait(self, work: Any, rank: Optional[int] = None) -> None:
        """Wait for what `rank` (None: any of several) takes part in, no longer than the limit."""
        self.waiting_for = rank
        work.wait(self.limit)
        self.waiting_for = None

    def _wait_for_channel(self, work: Any, rank: int) -> None:
        self.waiting_for = rank
        finish(work, self.limit.total_seconds())
        self.waiting_for = None

    def send(self, target: int, message: Message, tensors: Sequence[torch.Tensor]) -> None:
        """Send without waiting for it to be through; where too many are on their way, the oldest are waited for."""
        timeline = self.timeline
        start, size, rank = timeline.mark(), 0, self._layout.rank_of(target)
        for index, tensor in enumerate(tensors):
            value = tensor.detach().contiguous()
            value = value.cpu() if self._through_host or message.kind in ON_HOST else value
            group, tag = self._way(self._layout.stage, target, message, index)
            is_copy = value.data_ptr() != tensor.data_ptr()
            self.out.add(target, _sent(dist.isend(value, rank, group, tag), value, message, is_copy))
            size += value.numel() * value.element_size()
        if message.kind not in ON_HOST:
            timeline.count_message(target, message.kind == SHARED, size)
        begun = timeline.add("send", message.microbatch, start, size=size, peer=rank, carries=CARRIES[message.kind])
        while self.out.count(target) > self._kept:  # the oldest was for a slot long past: it is through, or soon
            oldest = self._let_go(target)
            begun = timeline.add("wait", oldest.microbatch, begun, peer=rank, carries=CARRIES[oldest.kind])

    def _let_go(self, target: int) -> Message:
        work, _, message, *_ = self.out.take(target)
        self._finish(work, target, message.kind)
        return message

    def buffer_bytes(self, in_flight: Iterable[int]) -> int:
        """Bytes of posted receives, and of what was sent and may not be through, but for what microbatches `in_flight` keep."""
        return self._posted_bytes + self.out.bytes - sum(map(self.out.lent, in_flight))

    def _finish(self, work: Any, stage: int, kind: str) -> None:
        """Wait for a message from or to a stage."""
        wait = self._wait_for_channel if self._by_channel(kind) else self.wait
        wait(work, self._layout.rank_of(stage))

    def flush(self) -> None:
        """Wait until all that was sent is through."""
        for target in self.out.targets:
            while self.out.count(target):
                self._let_go(target)


def _bytes(received: Sequence[Tuple[Any, torch.Tensor]]) -> int:
    return sum(buffer.numel() * buffer.element_size() for _, buffer in received)
