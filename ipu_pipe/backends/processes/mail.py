"""Messages between ranks: post receives ahead, send, and hand tensors over between two stages of
one rank.

A message carries the tensors that an action needs from another stage. Its kind, its number (of a
microbatch or update) and its two stages identify it on both sides. Receives are posted ahead of
their need. A send is kept until it is complete; compute waits for the oldest send only if many
later ones are in flight, when its receiver must be done with it anyway.

    gloo     all messages use one group and have tags; tensors of a GPU go through the host's memory
    nccl     has no tags: each link has a group (`nccl.make_channels`), in which both sides follow the order of microbatches
"""

from __future__ import annotations

import contextlib
from collections import deque
from datetime import timedelta
from typing import Any, Iterable, Mapping, NamedTuple, Sequence, Tuple

import torch

from ipu_pipe.backends import world
from ipu_pipe.backends.processes.input_kinds import InputKinds
from ipu_pipe.backends.processes.layout import RankLayout
from ipu_pipe.backends.processes.lost_ranks import (
    LostRank,
    detect_lost_rank,
    wait_for_channel,
    wait_limit,
)
from ipu_pipe.backends.processes.trace import TraceRecorder
from ipu_pipe.cut.crossing import TensorSpec
from ipu_pipe.schedule.actions import Kind

# Kinds of messages. Those that passes send have the letter of the pass:
FORWARD = Kind.FORWARD.value
RECOMPUTE = Kind.RECOMPUTE.value
BACKWARD = Kind.BACKWARD.value
# the norm of a stage's gradients of an update, for clipping
NORM = "N"
# the gradients of a layer that two neighboring blocks with local losses share
SHARED = "S"
# losses and right answers of an update's microbatches, for rank 0
RESULT = "L"
# the gradient of a weight that several stages use, from one backward
TIED = "T"
# the value of such a weight after an update
WEIGHTS = "V"
# the activations of an evaluation
TEST = "E"
# a checksum of what an evaluation was asked for, before its activations
ASKED = "A"
# the gradients of an update, for rank 0's callbacks
OBSERVED = "O"
KINDS = (FORWARD, RECOMPUTE, BACKWARD, NORM, SHARED, RESULT, TIED, WEIGHTS, TEST, ASKED, OBSERVED)
CARRIES = {
    FORWARD: "activations",
    RECOMPUTE: "recomputed activations",
    BACKWARD: "gradients",
    SHARED: "shared gradients",
    NORM: "norms",
    RESULT: "losses",
    TIED: "tied gradients",
    WEIGHTS: "weights",
}
# sent from the host's memory on every device
ON_HOST = (NORM, RESULT, TEST, ASKED, OBSERVED)
# the sender stores these tensors anyway, for its own backward
KEPT_BY_SENDER = (FORWARD, RECOMPUTE)
# messages whose shapes depend on the microbatch's inputs
BY_INPUTS = (FORWARD, RECOMPUTE, BACKWARD)
# kinds of messages whose number is an update's, and those whose number is a microbatch's
BY_UPDATE = (SHARED, NORM, WEIGHTS)
BY_MICROBATCH = (FORWARD, RECOMPUTE, BACKWARD, TIED)
# the most sends in flight on a link of the other kinds, which are small or come once an update
MAX_SMALL_SENDS = 24
# receives posted ahead on a link; only one for weights, which are large and come once an update
MAX_POSTED = 3
UNLIMITED = 1 << 62
# above the tags of all messages
LEAVING_TAG = 1 << 30

# (source stage, target stage, kind of message)
Link = Tuple[int, int, str]
# stands for a link in `channels`: the group of all replicas of a rank's stages
REPLICAS: Link = (-1, -1, Kind.AVERAGE.value)
Shapes = Tuple[TensorSpec, ...]


class Message(NamedTuple):
    """The identity of a message: its `kind`, the number of the microbatch or update that needs it,
    its source and target stage.

    Both stages belong to one replica.
    """

    kind: str
    number: int
    source: int = 0
    target: int = 0

    @property
    def link(self) -> Link:
        """The link of the message; messages of one link are ordered."""
        return self.source, self.target, self.kind


class _Sent(NamedTuple):
    """A message in flight. `bytes`: memory that only this send keeps; `lent_bytes`: memory that its
    microbatch keeps too.
    """

    message: Message
    works: list[Any]
    values: list[torch.Tensor]
    bytes: int
    lent_bytes: int


class Mail:
    """The messages of a rank over torch.distributed, including messages between its own stages.

    `group`: the process group of all messages and collectives (all ranks if None); nothing else may use it
    meanwhile. `channels`: nccl groups that replace it. `deadline`: the seconds after which a wait
    fails; longer until `end_warm_up` (`wait_limit`). `in_flight`: the most microbatches that a
    stage has in flight, which bounds the sends in flight on a link. `kinds`: of inputs; None: one.
    """

    def __init__(
        self,
        layout: RankLayout,
        device: torch.device,
        recorder: TraceRecorder,
        deadline: float,
        group: Any = None,
        channels: Mapping[Link, Any] | None = None,
        in_flight: int = 24,
        kinds: InputKinds | None = None,
    ) -> None:
        self._rank = layout.rank
        self._device = device
        self._recorder = recorder
        # the rank of each stage
        self._ranks = [layout.find_rank(stage) for stage in range(layout.stages)]
        self._by_channel = (
            frozenset(KINDS).difference(ON_HOST) if channels is not None else frozenset()
        )
        self._deadline = deadline
        self.group = group
        self._channels = channels
        self._in_flight = in_flight
        self._kinds = None if kinds is None or kinds.is_fixed else kinds
        self._through_host = device.type != "cpu" and channels is None
        self._expected: dict[Link, deque[tuple[Message, Shapes]]] = {}
        # message -> (work, buffer) of each tensor, and their bytes
        self._posted: dict[Message, tuple[list[tuple[Any, torch.Tensor]], int]] = {}
        self._posted_count: dict[Link, int] = {}
        # messages from one stage of this rank to another
        self._local_messages: dict[Message, list[torch.Tensor]] = {}
        self._posted_bytes = 0
        # receives may be posted for lower numbers only: (microbatch, update)
        self._post_before = UNLIMITED, UNLIMITED
        self._sent: dict[Link, deque[_Sent]] = {}
        self._sent_bytes = 0
        # (stage, microbatch) -> bytes of pending sends that the microbatch keeps too
        self._lent: dict[tuple[int, int], int] = {}
        # the limits that the groups of the caller's collectives came with
        self._callers_limits: dict[Any, timedelta] = {}
        # the longest time that a wait may take now
        self.limit = wait_limit(deadline)
        # nothing may be posted before each channel was used once
        if channels is not None:
            self._post_before = 0, 0

    def limit_groups(self, groups: Iterable[Any]) -> None:
        """Give groups of the caller's collectives the limit of each wait, until `release`."""
        self._callers_limits = {group: world.get_timeout(group) for group in groups}
        world.set_timeouts(dict.fromkeys(self._callers_limits, self.limit))

    def end_warm_up(self) -> None:
        """Limit waits to the deadline from now on, after the first step."""
        self.limit = wait_limit(self._deadline, is_warm=True)
        world.set_timeouts(dict.fromkeys(self._callers_limits, self.limit))

    def release(self) -> None:
        """Give the caller's groups their own limits again."""
        world.set_timeouts(self._callers_limits)

    # ---- receiving

    def post(self, microbatch: int, update: int) -> None:
        """Allow receives to be posted for numbers below this microbatch and this update."""
        if self._post_before != (microbatch, update):
            self._post_before = microbatch, update
            for link in list(self._expected):
                self._post(link)

    def expect(self, messages: Iterable[tuple[Message, Shapes]]) -> None:
        """Announce messages that will arrive, so that their receives are posted ahead."""
        # a dictionary, because a set's order would differ from rank to rank
        links: dict[Link, None] = {}
        for message, shapes in messages:
            # a message between stages of this rank is handed over, and has no receive
            if self._ranks[message.source] != self._rank:
                links[message.link] = None
                self._expected.setdefault(message.link, deque()).append((message, shapes))
        for link in links:
            self._post(link)

    def forget_expected(self) -> None:
        """Forget the messages that were announced and not posted: they belong to batches that never
        begin.
        """
        # gradients for callbacks are received later, when their update is reported
        lost = [message for message in self._posted if message.kind != OBSERVED]
        assert not lost, f"{len(lost)} messages were not received"
        observed = {link: queue for link, queue in self._expected.items() if link[2] == OBSERVED}
        self._expected = observed

    def _post(self, link: Link) -> None:
        queue = self._expected[link]
        kind = link[2]
        max_posted = 1 if kind == WEIGHTS else MAX_POSTED
        # announced only when they will come: of given updates, and of evaluations
        post_before = (
            UNLIMITED
            if kind in (RESULT, TEST, ASKED, OBSERVED)
            else self._post_before[kind in BY_UPDATE]
        )
        while (
            queue
            and self._posted_count.get(link, 0) < max_posted
            and queue[0][0].number < post_before
        ):
            message, shapes = queue.popleft()
            received = self._begin_receive(message, shapes)
            size = sum(buffer.numel() * buffer.element_size() for _, buffer in received)
            self._posted[message] = received, size
            # the buffers of training alone: not those of evaluations and callbacks
            self._posted_bytes += size if kind in CARRIES else 0
            self._posted_count[link] = self._posted_count.get(link, 0) + 1

    def receive(self, message: Message) -> list[torch.Tensor]:
        """Wait for an expected message and return its tensors."""
        kind = message.kind
        recorder = self._recorder
        source = self._ranks[message.source]
        if source == self._rank:
            return self._local_messages.pop(message)
        carries = CARRIES.get(kind)
        start = recorder.mark()
        received, size = self._posted.pop(message)
        for work, _ in received:
            self._wait_for_message(work, message, is_send=False)
        if carries is not None:
            # the wait ends before the tensors are copied, which is the event recv
            start = recorder.add("wait", message.number, start, peer=source, carries=carries)
        self._posted_count[message.link] -= 1
        self._posted_bytes -= size if carries is not None else 0
        # before this message is copied, so that the next one comes in meanwhile
        self._post(message.link)
        buffers = [buffer for _, buffer in received]
        if self._kinds is not None and kind in BY_INPUTS:
            buffers = self._receive_by_kind(self._kinds, message, buffers)
        tensors = [buffer if kind in ON_HOST else buffer.to(self._device) for buffer in buffers]
        if carries is not None:
            recorder.add("recv", message.number, start, size=size, peer=source, carries=carries)
        return tensors

    def _receive_by_kind(
        self, kinds: InputKinds, message: Message, usual: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the tensors of a message whose usual tensors have arrived, or what is sent in
        their place if the inputs are of another kind.
        """
        m = message.number
        first = len(usual)
        # a cut that nothing crosses has no forward message
        notice = kinds.read_notice(m, usual) if usual and message.kind == FORWARD else None
        if notice is not None and notice.size:
            spec = TensorSpec((notice.size,), torch.uint8, False)
            (inputs,) = self._receive_now(message, [spec], first)
            kinds.learn(notice.number, inputs, self._device)
            first += 1
        # of a forward by its notice, of a later pass by this stage's own forward
        number = kinds.of_microbatch.get(m, 0)
        if not number:
            return usual
        return self._receive_now(
            message, kinds.find_shapes(message.kind, message.target, number), first
        )

    def _receive_now(
        self, message: Message, shapes: Sequence[TensorSpec], first: int
    ) -> list[torch.Tensor]:
        """Wait for tensors of a message, from number `first` on, that no receive was posted for."""
        # only now are the shapes known, so this receive costs a wait
        received = self._begin_receive(message, shapes, first)
        for work, _ in received:
            self._wait_for_message(work, message, is_send=False)
        return [buffer for _, buffer in received]

    def _begin_receive(
        self, message: Message, shapes: Sequence[TensorSpec], first: int = 0
    ) -> list[tuple[Any, torch.Tensor]]:
        """Post receives of a message's tensors, from number `first` on; return works and buffers."""
        source = self._ranks[message.source]
        on_host = self._through_host or message.kind in ON_HOST
        received: list[tuple[Any, torch.Tensor]] = []
        for number, shape in enumerate(shapes, first):
            buffer = torch.empty(
                shape.message_shape, dtype=shape.dtype, device="cpu" if on_host else self._device
            )
            group, tag = self._route(message, number)
            with detect_lost_rank([world.name_rank(source)], self.limit):
                received.append((world.irecv(buffer, source, group, tag), buffer))
        return received

    # ---- sending

    def send(self, message: Message, tensors: Sequence[torch.Tensor]) -> None:
        """Send tensors; if too many sends are in flight on the link, wait for the oldest."""
        kind = message.kind
        m = message.number
        target = self._ranks[message.target]
        if target == self._rank:
            # detached, as if it had been sent: each stage has a graph of its own
            self._local_messages[message] = [tensor.detach().contiguous() for tensor in tensors]
            return
        carries = CARRIES.get(kind)
        recorder = self._recorder
        start = recorder.mark()
        size = 0
        sent = self._sent.setdefault(message.link, deque())
        if self._kinds is not None and self._kinds.of_microbatch and kind in BY_INPUTS:
            # the receiver has posted receives for the usual shapes, which must be filled first
            tensors = [*self._kinds.list_placeholders(kind, m, message.target), *tensors]
        works = []
        values = []
        own_bytes = lent_bytes = 0
        for number, tensor in enumerate(tensors):
            # gloo takes dense memory alone
            value = tensor.detach().contiguous()
            value = value.cpu() if self._through_host or kind in ON_HOST else value
            group, tag = self._route(message, number)
            with detect_lost_rank([world.name_rank(target)], self.limit):
                works.append(world.isend(value, target, group, tag))
            # kept until the send is complete, because gloo reads the memory later
            values.append(value)
            bytes_ = value.numel() * value.element_size()
            is_copy = value.data_ptr() != tensor.data_ptr()
            lent_bytes += bytes_ if kind in KEPT_BY_SENDER and not is_copy else 0
            # a weight that was not copied belongs to the stage anyway
            own_bytes += bytes_ if carries is not None and (is_copy or kind != WEIGHTS) else 0
            size += bytes_
        sent.append(_Sent(message, works, values, own_bytes, lent_bytes))
        self._sent_bytes += own_bytes
        if lent_bytes:
            self._lent[message.source, m] = self._lent.get((message.source, m), 0) + lent_bytes
        if carries is not None:
            if kind not in ON_HOST:
                recorder.count_message(message.source, message.target, kind == SHARED, size)
            start = recorder.add("send", m, start, size=size, peer=target, carries=carries)
        # the oldest send was for an action that later actions of this stage have waited for, so it
        # is complete, or soon will be
        max_in_flight = self._in_flight if kind in BY_MICROBATCH else MAX_SMALL_SENDS
        while len(sent) > max_in_flight:
            oldest = self._finish_oldest(message.link)
            if oldest.kind in CARRIES:
                start = recorder.add(
                    "wait", oldest.number, start, peer=target, carries=CARRIES[oldest.kind]
                )

    def _finish_oldest(self, link: Link) -> Message:
        message, works, _, size, lent = self._sent[link].popleft()
        self._sent_bytes -= size
        if lent:
            key = message.source, message.number
            left = self._lent.pop(key) - lent
            if left:
                self._lent[key] = left
        for work in works:
            self._wait_for_message(work, message, is_send=True)
        return message

    def flush(self) -> None:
        """Wait until all sends are complete."""
        for link, sent in self._sent.items():
            while sent:
                self._finish_oldest(link)

    def count_buffer_bytes(self, in_flight: Iterable[tuple[int, int]]) -> int:
        """Return the bytes of posted receives and pending sends, without the bytes that the
        microbatches `in_flight`, pairs (stage, microbatch), keep anyway."""
        return (
            self._posted_bytes + self._sent_bytes - sum(self._lent.get(key, 0) for key in in_flight)
        )

    def leave(self) -> None:
        """Close the connections to all other ranks, whose waits for this one then fail at once."""
        for rank in range(world.get_world_size()):
            # gloo closes a connection whose wait has timed out, and has no other call for it
            with contextlib.suppress(RuntimeError):
                if rank != self._rank:
                    work: Any = world.irecv(torch.empty(1), rank, self.group, LEAVING_TAG)
                    work.wait(timedelta(milliseconds=1))

    # ---- waiting

    def all_gather(self, tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        """Return the tensors of all ranks of a group, by default the mail's own, in the order of
        the ranks.
        """
        group = self.group if group is None else group
        tensors = [torch.empty_like(tensor) for _ in range(world.get_world_size(group))]
        with detect_lost_rank(_list_ranks(group), self.limit):
            work = world.all_gather(tensors, tensor, group)
        self.wait_for_all(work, group)
        return tensors

    def meet(self) -> None:
        """Wait for all ranks within the deadline, which a collective of objects does not have."""
        self.all_gather(torch.zeros(1))

    def begin_sum(self, tensor: torch.Tensor, group: Any) -> Any:
        """Begin to add up the tensors of all ranks of a group, in place. Return the work that
        `wait_for_all` waits for.
        """
        with detect_lost_rank(_list_ranks(group), self.limit):
            return world.begin_sum(tensor, group)

    def wait_for_all(self, work: Any, group: Any) -> None:
        """Wait for a collective of a group."""
        is_channel = (
            self._channels is not None and group is not None and group in self._channels.values()
        )
        self._wait(work, _list_ranks(group), is_channel)

    def _route(self, message: Message, number: int) -> tuple[Any, int]:
        """Return the group and the tag of a message's tensor `number`, the same on both sides."""
        if message.kind not in self._by_channel:
            # gloo tells the messages between two ranks apart by their tags alone
            tag = message.number * len(KINDS) + KINDS.index(message.kind)
            tag = (tag * len(self._ranks) + message.source) * len(self._ranks) + message.target
            # tags repeat, but of numbers that are too far apart to be in flight together
            return self.group, (8 * tag + number % 8) % LEAVING_TAG
        assert self._channels is not None
        return self._channels[message.link], 0

    def _wait_for_message(self, work: Any, message: Message, is_send: bool) -> None:
        """Wait for a message of this rank. Raise `LostRank`, which says which one."""
        kind, number, source, target = message
        peer = world.name_rank(self._ranks[target if is_send else source])
        try:
            self._wait(work, [peer], kind in self._by_channel)
        except LostRank as error:
            counted = "microbatch" if kind in (*BY_MICROBATCH, TEST, ASKED) else "update"
            what = f"{CARRIES.get(kind, 'values')} of {counted} {number}"
            error.wait = (
                f"stage {source} sends {what} to stage {target}"
                if is_send
                else f"stage {target} waits for {what} from stage {source}"
            )
            raise

    def _wait(self, work: Any, ranks: Sequence[int] | None, is_channel: bool) -> None:
        with detect_lost_rank(ranks, self.limit):
            if is_channel:
                wait_for_channel(work, self.limit)
            else:
                work.wait(self.limit)


def _list_ranks(group: Any) -> list[int] | None:
    """List the global ranks of a group; return None for the group of all ranks."""
    return None if group is None else world.list_global_ranks(group)
