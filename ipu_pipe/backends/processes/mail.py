"""What ranks tell each other and their clock: layout, messages over torch.distributed, the record of what was done.

A message is what an action needs from another rank, told by kind and microbatch. Receives are posted ahead, sends are kept
until they are through; compute waits for one only when so many later ones are on their way that its action is long past.

    gloo     all messages in one group, told apart by tags; a GPU's tensors go through the host's memory
    nccl     has no tags: a group for each link, direction and kind (`channels`), in which both sides go by the order of
             microbatches
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Deque, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from ipu_pipe.backends.processes.channels import Channels, Kinds, Link, finish, touch
from ipu_pipe.backends.processes.joining import wait_limit
from ipu_pipe.model.cutting import Shape
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.trace.events import Event

ORDER = tuple(kind.value for kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.UPDATE))  # within a slot
FORWARD, RECOMPUTE, BACKWARD, UPDATE = ORDER
NORM, SHARED, RESULT = "N", "S", "L"
KINDS = (*ORDER, NORM, SHARED, RESULT)  # of messages: with an update the norm, gradients of a shared layer, losses
ON_HOST = (NORM, RESULT)  # small tensors, on the host whatever the device
AHEAD = 3  # receives posted on each link before they are needed

THROUGH_CHANNELS = Kinds(FORWARD, RECOMPUTE, BACKWARD, SHARED)


class Message(NamedTuple):
    """The result of an action: `kind` and microbatch of the action that needs it."""

    kind: str
    microbatch: int

    def tag(self, index: int) -> int:
        """Of its tensor number `index`; the same for sender and receiver."""
        return (8 * (len(KINDS) * self.microbatch + KINDS.index(self.kind)) + index % 8) % (1 << 30)


@dataclass(frozen=True)
class Layout:
    """Where this process stands: `depth` stages, of which it holds `stage`, in each of `width` replicas of the pipeline."""

    rank: int
    depth: int
    width: int = 1

    @property
    def stage(self) -> int:
        """Stage of this rank."""
        return self.rank % self.depth

    @property
    def replica(self) -> int:
        """Replica of this rank."""
        return self.rank // self.depth

    def rank_of(self, stage: int) -> int:
        """The rank that holds `stage` in the same replica."""
        return self.replica * self.depth + stage


class Timeline:
    """What this rank did, by the clock. Events of microbatches from `limit` on are not kept."""

    def __init__(self, layout: Layout, limit: int) -> None:
        self.events: List[Event] = []
        self._layout, self._limit = layout, limit
        self.sent: Dict[int, Tuple[int, int]] = {}  # stage -> bytes, messages of activations and their gradients
        self.shared: Dict[int, Tuple[int, int]] = {}  # and of the gradients of shared layers

    def add(
        self, kind: str, index: int, start: int, version: int = -1, size: Optional[int] = None, microbatch: int = -1
    ) -> None:
        """Something that began at `start` and ends now, of microbatch (or update) `index`. `microbatch`: the one that says
        whether it is kept, where it is not the index."""
        end = time.perf_counter_ns()
        if (index if microbatch < 0 else microbatch) < self._limit:
            stage = self._layout.stage
            self.events.append(Event(stage, self._layout.rank, kind, index, start, end, version, size))

    def count(self, stage: int, kind: str, size: int) -> None:
        """A message sent to `stage`."""
        if kind not in ON_HOST:
            counted = self.shared if kind == SHARED else self.sent
            total, messages = counted.get(stage, (0, 0))
            counted[stage] = (total + size, messages + 1)


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
        self._posted: Dict[Tuple[int, Message], List[Tuple[Any, torch.Tensor]]] = {}
        self._in_post: Dict[Tuple[int, str], int] = {}
        self._out: Dict[int, Deque[Tuple[Any, torch.Tensor, str]]] = {}  # with the kind of message
        self._open: Dict[str, int] = {}  # by kind, the first microbatch or update whose receive may not be posted yet
        self._kept = 8 * (layout.depth + 1)  # tensors on their way to one stage
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
        """From now on receives may be posted of messages before this microbatch, or update, where they go through channels."""
        if self._open.get(FORWARD) == microbatch:
            return
        self._open = {**dict.fromkeys(ORDER, microbatch), SHARED: update}
        for source, kind in list(self._wanted):
            self._post(source, kind)

    def _may_post(self, message: Message) -> bool:
        return not self._by_channel(message.kind) or message.microbatch < self._open.get(message.kind, 0)

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
        queue = self._wanted[source, kind]
        while queue and self._in_post.get((source, kind), 0) < AHEAD and self._may_post(queue[0][0]):
            message, shapes = queue.popleft()
            place = "cpu" if self._through_host or kind in ON_HOST else self._device
            received = []
            for index, shape in enumerate(shapes):
                buffer = torch.empty(shape.shape, dtype=shape.dtype, device=place)
                group, tag = self._way(source, self._layout.stage, message, index)
                received.append((dist.irecv(buffer, self._layout.rank_of(source), group, tag), buffer))
            self._posted[source, message] = received
            self._in_post[source, kind] = self._in_post.get((source, kind), 0) + 1

    def receive(self, source: int, message: Message) -> List[torch.Tensor]:
        """Wait for a message."""
        start = time.perf_counter_ns()
        received = self._posted.pop((source, message))
        for work, _ in received:
            self._finish(work, source, message.kind)
        self._in_post[source, message.kind] -= 1
        self._post(source, message.kind)
        size = sum(buffer.numel() * buffer.element_size() for _, buffer in received)
        if message.kind not in ON_HOST:
            self.timeline.add("wait", message.microbatch, start, size=size)
        return [buffer if message.kind in ON_HOST else buffer.to(self._device) for _, buffer in received]

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
        """Send without waiting."""
        start = time.perf_counter_ns()
        size = 0
        for index, tensor in enumerate(tensors):
            value = tensor.detach().contiguous()
            value = value.cpu() if self._through_host or message.kind in ON_HOST else value
            group, tag = self._way(self._layout.stage, target, message, index)
            out = self._out.setdefault(target, deque())
            out.append((dist.isend(value, self._layout.rank_of(target), group, tag), value, message.kind))
            if len(out) > self._kept:  # the oldest was for an action of a slot long past: it is through, or soon
                self._let_go(target)
            size += value.numel() * value.element_size()
        self.timeline.count(target, message.kind, size)
        if message.kind not in ON_HOST:
            self.timeline.add("send", message.microbatch, start, size=size)

    def _let_go(self, target: int) -> None:
        work, _, kind = self._out[target].popleft()
        self._finish(work, target, kind)

    def _finish(self, work: Any, stage: int, kind: str) -> None:
        """Wait for a message from or to a stage."""
        wait = self._wait_for_channel if self._by_channel(kind) else self.wait
        wait(work, self._layout.rank_of(stage))

    def flush(self) -> None:
        """Wait until all that was sent is through."""
        for target, out in self._out.items():
            while out:
                self._let_go(target)
