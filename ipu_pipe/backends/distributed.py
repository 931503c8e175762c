"""The pipeline on processes: each rank holds one stage and carries out its row of the schedule.

A rank needs no version table to find the newest weights: it reads what its memory holds, and its row says when that changes.

    row of stage s     F5   B2  U2   F6   B3  U3  ...
    in memory       w2 ->        w3 ->       w4            (pipedream: B3 reads again what F3 read, which is stashed)

Sends and receives follow from the schedule: F(m) of stage s is sent when done to s + 1, B(m) to s - 1, both by a tag of kind
and microbatch; receives are posted ahead, sends are kept until they are through and never waited for by compute. Every wait
is for an action of an earlier slot, which the schedule was proved to have (`Schedule`), so ranks cannot wait in a circle.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Callable, Deque, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np
import torch
import torch.distributed as dist

from ipu_pipe import update
from ipu_pipe.backends.emulator import right_answers
from ipu_pipe.backends.history import Overwriting, Read, ReadPlan, Swapping, Unversioned
from ipu_pipe.buffers import buffers_restored
from ipu_pipe.errors import RunFault
from ipu_pipe.methods import Method
from ipu_pipe.probe import Loss
from ipu_pipe.randomness import KeyedRandomness
from ipu_pipe.rules import UpdateRules
from ipu_pipe.schedule import Kind
from ipu_pipe.slices import Crossing, Piece, Shape
from ipu_pipe.trace import Event
from ipu_pipe.versions import VersionTable, segment_ends

FORWARD, RECOMPUTE, BACKWARD, UPDATE, NORM = "F", "R", "B", "U", "N"
ORDER = (FORWARD, RECOMPUTE, BACKWARD, UPDATE, NORM)  # within a slot; a norm is sent with its update
NORM_SHAPE = (Shape((1,), torch.float64, False),)
KINDS = {FORWARD: "forward", RECOMPUTE: "forward", BACKWARD: "backward", UPDATE: "update"}
TERMINATED = 143  # exit code of a process that was asked to end
AHEAD = 3  # receives posted on each link before they are needed


class Stopping:
    """The launcher asks this process to end, because another one has failed. A neighbour of that one notices it at its next
    wait and can say for whom it waited: so a process goes on for a moment before it ends."""

    GRACE = 3.0  # seconds
    asked: Optional[float] = None

    @classmethod
    def ask(cls, *_: Any) -> None:
        """For signal.signal."""
        cls.asked = cls.asked or time.monotonic()

    @classmethod
    def check(cls) -> None:
        """End the process if it was asked to a while ago."""
        if cls.asked is not None and time.monotonic() - cls.asked > cls.GRACE:
            sys.exit(TERMINATED)


class Message(NamedTuple):
    """The result of an action: `kind` and microbatch of the action that needs it."""

    kind: str
    microbatch: int

    def tag(self, index: int) -> int:
        """Of its tensor number `index`; the same for sender and receiver."""
        return (8 * (len(ORDER) * self.microbatch + ORDER.index(self.kind)) + index % 8) % (1 << 30)


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
    """What this rank did, by the clock. Events beyond `limit` microbatches are not kept."""

    def __init__(self, layout: Layout, limit: int) -> None:
        self.events: List[Event] = []
        self._layout, self._limit = layout, limit
        self.sent: Dict[int, Tuple[int, int]] = {}  # stage -> bytes, messages
        self.waited_ns = 0

    def add(self, kind: str, microbatch: int, start: int, version: int = -1, size: Optional[int] = None) -> None:
        """Something that began at `start` and ends now."""
        end = time.perf_counter_ns()
        if kind == "wait":
            self.waited_ns += end - start
        if microbatch < self._limit:
            stage = self._layout.stage
            self.events.append(Event(stage, self._layout.rank, kind, microbatch, start, end, version, size))

    def count(self, stage: int, size: int) -> None:
        """A message sent to `stage`."""
        total, messages = self.sent.get(stage, (0, 0))
        self.sent[stage] = (total + size, messages + 1)


class Mail:
    """Messages with the neighbouring stages over torch.distributed."""

    def __init__(
        self, layout: Layout, device: torch.device, timeline: Timeline, deadline: float, group: Any = None
    ) -> None:
        self._layout, self._device, self._timeline, self._group = layout, device, timeline, group
        self._deadline = timedelta(seconds=deadline)
        self._stages_through_host = device.type == "cuda" and dist.get_backend() == "gloo"
        self._wanted: Dict[int, Deque[Tuple[Message, Tuple[Shape, ...]]]] = {}
        self._posted: Dict[Tuple[int, Message], List[Tuple[Any, torch.Tensor]]] = {}
        self._in_post: Dict[int, int] = {}
        self._out: Deque[Tuple[Any, torch.Tensor]] = deque()
        self.waiting_for: Optional[int] = None  # the rank, while waiting

    def expect(self, source: int, wanted: Sequence[Tuple[Message, Tuple[Shape, ...]]]) -> None:
        """Messages that stage `source` will send, in the order in which they are needed."""
        self._wanted.setdefault(source, deque()).extend(wanted)
        self._post(source)

    def _post(self, source: int) -> None:
        queue = self._wanted[source]
        while queue and self._in_post.get(source, 0) < AHEAD:
            message, shapes = queue.popleft()
            place = "cpu" if self._stages_through_host else self._device
            received = []
            for index, shape in enumerate(shapes):
                buffer = torch.empty(shape.shape, dtype=shape.dtype, device=place)
                work = dist.irecv(buffer, self._layout.rank_of(source), self._group, message.tag(index))
                received.append((work, buffer))
            self._posted[source, message] = received
            self._in_post[source] = self._in_post.get(source, 0) + 1

    def receive(self, source: int, message: Message) -> List[torch.Tensor]:
        """Wait for a message."""
        start = time.perf_counter_ns()
        received = self._posted.pop((source, message))
        self.waiting_for = self._layout.rank_of(source)
        for work, _ in received:
            work.wait(self._deadline)
        self.waiting_for = None
        self._in_post[source] -= 1
        self._post(source)
        size = sum(buffer.numel() * buffer.element_size() for _, buffer in received)
        self._timeline.add("wait", message.microbatch, start, size=size)
        return [buffer.to(self._device) for _, buffer in received]

    def send(self, target: int, message: Message, tensors: Sequence[torch.Tensor]) -> None:
        """Send without waiting."""
        start = time.perf_counter_ns()
        size = 0
        for index, tensor in enumerate(tensors):
            value = tensor.detach().contiguous()
            value = value.cpu() if self._stages_through_host else value
            self._out.append((dist.isend(value, self._layout.rank_of(target), self._group, message.tag(index)), value))
            size += value.numel() * value.element_size()
        self._timeline.count(target, size)
        self._timeline.add("send", message.microbatch, start, size=size)
        while self._out and self._out[0][0].is_completed():
            self._out.popleft()

    def flush(self) -> None:
        """Wait until all that was sent is through."""
        while self._out:
            self._out.popleft()[0].wait(self._deadline)


@dataclass
class _Flight:
    """A microbatch between its forward and its backward on this stage."""

    inputs: List[torch.Tensor]
    outputs: List[torch.Tensor]
    forward: Read
    backward: Read
    recompute: Optional[Read] = None
    loss: Optional[torch.Tensor] = None


class StageEngine:
    """One stage of one replica: `step(k)` carries out its row up to and including update k.

    `source(m)`: microbatch m as (x, y); asked for on the first and the last stage only. `rules`: over an optimizer that holds
    this stage's parameters. `crossings`: what crosses each cut. `clip`: (norm, scope) or None. `replicas`: the process group of
    this stage's replicas, `group`: that of the messages (all processes if None), which no one else may use meanwhile.
    `deadline`: seconds after which a wait is a fault.
    """

    def __init__(
        self,
        layout: Layout,
        piece: Piece,
        crossings: Sequence[Crossing],
        loss: Loss,
        method: Method,
        table: VersionTable,
        rules: UpdateRules,
        source: Callable[[int], Tuple[torch.Tensor, torch.Tensor]],
        device: torch.device,
        random: Optional[KeyedRandomness] = None,
        clip: Optional[Tuple[float, str]] = None,
        allow_nonfinite: bool = False,
        microbatch: int = 0,
        deadline: float = 300.0,
        trace_microbatches: int = 512,
        replicas: Any = None,
        group: Any = None,
    ) -> None:
        self.layout, self.piece, self.timeline = layout, piece, Timeline(layout, trace_microbatches)
        self._crossings, self._loss, self._method, self._rules = list(crossings), loss, method, rules
        self._source, self._random, self._clip, self._allow_nonfinite = source, random, clip, allow_nonfinite
        self._schedule = table.schedule
        self._accumulate = table.schedule.accumulate
        self._replicas = replicas
        self.update = microbatch // self._accumulate
        s = layout.stage
        self._plan = ReadPlan(table, rules, 2 * layout.depth + 2 * self._accumulate + 2)
        self._parameters = rules.stages[s].parameters if s in rules.stages else []
        self._delayed: Optional[update.DelayedGlobalNorm] = None
        if clip is not None and clip[1] == "delayed_global":
            self._delayed = update.DelayedGlobalNorm(clip[0], table.schedule)
        self.weights = self._history()
        self._flights: Dict[int, _Flight] = {}
        self._norms: Dict[int, float] = {}  # of own gradients, by update
        self._forwarded = microbatch - 1
        self._results: Deque[Tuple[torch.Tensor, Optional[torch.Tensor]]] = deque()  # by microbatch, on the last stage
        self.mail = Mail(layout, device, self.timeline, deadline, group)
        self._row = self._actions(microbatch)
        self._expect(microbatch)
        self.doing = "start"

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the first stage."""
        return self.layout.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.layout.stage == self.layout.depth - 1

    def _history(self) -> Unversioned:
        if not self._method.reads_old(self.layout.depth):
            return Unversioned()
        s = self.layout.stage
        kind = Swapping if self._method.backward_reads == "stashed" else Overwriting
        return kind([self._parameters], self.update, lambda _, code, version: self._rules.offset(s, code, version))

    # --- the row

    def _slots(self, kind: Kind, first: int) -> np.ndarray:
        s, count = self.layout.stage, self._schedule.microbatches
        return self._schedule.slots(kind, first, count, slice(s, s + 1))[0]

    def _recompute_slots(self, first: int) -> np.ndarray:
        s, segments = self.layout.stage, self._method.segments
        end = int(segment_ends(self.layout.depth, segments or 0)[s])
        turn = self._method.turn if self.layout.depth > 1 else 0
        slots = self._schedule.slots(Kind.BACKWARD, first, self._schedule.microbatches, slice(end, end + 1))[0]
        return np.asarray(slots - turn - (end - s))

    @property
    def _others(self) -> List[int]:
        return [stage for stage in range(self.layout.depth) if stage != self.layout.stage]

    @property
    def _recomputes(self) -> bool:
        return self._method.segments is not None and self._method.reads_old(self.layout.depth)

    def _is_head(self, stage: int) -> bool:
        ends = segment_ends(self.layout.depth, self._method.segments or 0)
        return stage == 0 or ends[stage] != ends[stage - 1]

    def _row_array(self, first: int) -> np.ndarray:
        """(slot, order within the slot, microbatch or update) of each action from microbatch `first` on, in order."""
        count, batch = self._schedule.microbatches, self._accumulate
        parts = [(0, self._slots(Kind.FORWARD, first), np.arange(first, count))]
        if self._recomputes:
            parts.append((1, self._recompute_slots(first), np.arange(first, count)))
        backward = self._slots(Kind.BACKWARD, first)
        parts.append((2, backward, np.arange(first, count)))
        parts.append((3, backward[batch - 1 :: batch], np.arange(first // batch, count // batch)))
        table = np.concatenate([np.stack([slots, np.full_like(slots, order), m], axis=1) for order, slots, m in parts])
        return table[np.lexsort((table[:, 1], table[:, 0]))]

    def _actions(self, first: int) -> Iterator[Tuple[str, int]]:
        for _, order, index in self._row_array(first).tolist():
            yield ORDER[order], index

    def _expect(self, first: int) -> None:
        """Derive what this rank receives, and when, from its row."""
        s = self.layout.stage
        wanted: Dict[int, List[Tuple[Message, Tuple[Shape, ...]]]] = {}
        for _, order, index in self._row_array(first).tolist():
            kind = ORDER[order]
            if kind == FORWARD and not self.is_first:
                wanted.setdefault(s - 1, []).append((Message(kind, index), self._crossings[s - 1].tensors))
            elif kind == RECOMPUTE and not self._is_head(s):
                wanted.setdefault(s - 1, []).append((Message(kind, index), self._crossings[s - 1].tensors))
            elif kind == BACKWARD and not self.is_last:
                back = tuple(shape for shape in self._crossings[s].tensors if shape.differentiable)
                wanted.setdefault(s + 1, []).append((Message(kind, index), back))
            elif kind == UPDATE and self._delayed is not None:
                norm = self._delayed.source(index)
                if norm is not None:
                    for other in self._others:
                        wanted.setdefault(other, []).append((Message(NORM, norm), NORM_SHAPE))
        for source, messages in wanted.items():
            self.mail.expect(source, messages)

    # --- carrying it out

    def step(self, k: int) -> Optional[Tuple[float, Optional[float]]]:
        """Carry out the row up to update k. On the last stage: (mean loss, share of right answers or None) of its batch."""
        assert k == self.update, f"update {self.update} is next, not {k}"
        result = None
        for kind, index in self._row:
            Stopping.check()
            self.doing = f"{kind}{index}"
            start = time.perf_counter_ns()
            version = self.update
            if kind == FORWARD:
                version = self._forward(index)
            elif kind == RECOMPUTE:
                self._recompute(index)
            elif kind == BACKWARD:
                version = self._backward(index)
            else:
                result = self._summed() if self.is_last else None
                self._update()
                version = self.update
            self.timeline.add(KINDS[kind], index, start, version)
            if kind == UPDATE:
                assert index == k
                return result
        raise AssertionError(f"the schedule ends before update {k}")

    def _own(self, read: Read) -> Read:
        s = self.layout.stage
        return Read(read.versions[s : s + 1], read.codes[s : s + 1])

    def _forward(self, m: int) -> int:
        received = self._inputs(m)
        reads = [self._own(self._plan.read(what, m)) for what in ("forward", "backward")]
        again = self._own(self._plan.read("recompute", m)) if self._recomputes else None
        self.weights.load(reads[0])
        with torch.set_grad_enabled(not self._recomputes):
            outputs, loss, answers = self._run(m, received)
        self._flights[m] = _Flight(received, outputs, reads[0], reads[1], again, loss)
        self._forwarded = m
        if self.is_last:
            assert loss is not None
            self._results.append((loss.detach(), answers))
        else:
            self.mail.send(self.layout.stage + 1, Message(FORWARD, m), outputs)
        return int(reads[0].versions[0])

    def _inputs(self, m: int) -> List[torch.Tensor]:
        if self.is_first:
            return [self._source(m)[0]]
        s = self.layout.stage
        received = self.mail.receive(s - 1, Message(FORWARD, m))
        return [
            t.requires_grad_() if shape.differentiable else t
            for t, shape in zip(received, self._crossings[s - 1].tensors)
        ]

    def _run(
        self, m: int, inputs: Sequence[torch.Tensor]
    ) -> Tuple[List[torch.Tensor], Optional[torch.Tensor], Optional[torch.Tensor]]:
        """Outputs for the next stage or, on the last one, loss and right answers."""
        if self._random is not None:
            self._random.microbatch = m * self.layout.width + self.layout.replica
        value = inputs[0] if self.is_first else self._crossings[self.layout.stage - 1].unflatten(inputs)
        output = self.piece(value)
        if not self.is_last:
            return self._crossings[self.layout.stage].flatten(output), None, None
        y = self._source(m)[1]
        return [], self._loss(output, y), right_answers(output, y)

    def _recompute(self, m: int) -> None:
        flight, s = self._flights[m], self.layout.stage
        inputs = flight.inputs
        if not self._is_head(s):
            received = self.mail.receive(s - 1, Message(RECOMPUTE, m))
            inputs = [t.requires_grad_() if x.requires_grad else t for t, x in zip(received, flight.inputs)]
        assert flight.recompute is not None
        self.weights.load(flight.recompute)
        flight.inputs = inputs
        with buffers_restored(self.piece):
            flight.outputs, flight.loss, _ = self._run(m, inputs)
        if not self.is_last and not self._is_head(s + 1):
            self.mail.send(s + 1, Message(RECOMPUTE, m), flight.outputs)

    def _backward(self, m: int) -> int:
        flight, s = self._flights[m], self.layout.stage
        gradients: List[torch.Tensor] = []
        if not self.is_last:
            gradients = self.mail.receive(s + 1, Message(BACKWARD, m))
        version = int(flight.backward.versions[0])
        if self._method.backward_reads == "newest":
            assert version == self.update, (
                f"stage {s}, B{m}: memory holds version {self.update}, the table says {version}"
            )
        self.weights.load(flight.backward)
        if self.is_last:
            assert flight.loss is not None
            (flight.loss / self._accumulate).backward()  # type: ignore[no-untyped-call]
        else:
            shapes = self._crossings[s].tensors
            outputs = [t for t, shape in zip(flight.outputs, shapes) if shape.differentiable]
            pairs = [(t, g) for t, g in zip(outputs, gradients) if t.requires_grad]
            if pairs:
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        if not self.is_first:
            back = [t for t, shape in zip(flight.inputs, self._crossings[s - 1].tensors) if shape.differentiable]
            self.mail.send(
                s - 1, Message(BACKWARD, m), [torch.zeros_like(t) if t.grad is None else t.grad for t in back]
            )
        del self._flights[m]
        self._release()
        return version

    def _update(self) -> None:
        if self._replicas is not None:
            self._average()
        self.weights.before_update([self._kept_codes()])
        with _counters_kept(self._parameters):
            self._rules.step(self.update, self._clipping)
        self.update += 1
        self._release()

    def _kept_codes(self) -> Set[int]:
        """How the newest version will be read when it is old: by backwards of microbatches in flight, by forwards to come."""
        codes = {
            int(flight.backward.codes[0])
            for flight in self._flights.values()
            if flight.backward.versions[0] == self.update
        }
        if self._method.backward_reads != "stashed":
            return set()
        later: Set[int] = set()
        if self._method.forward_reads == "double_buffered":
            later = self._plan.read_later(self.update, self._forwarded)[self.layout.stage]
        return codes | later

    def _release(self) -> None:
        oldest = [int(flight.backward.versions[0]) for flight in self._flights.values()]
        if self._forwarded + 1 < self._schedule.microbatches:
            oldest.append(int(self._own(self._plan.read("forward", self._forwarded + 1)).versions[0]))
        self.weights.release(np.array([min(oldest, default=np.iinfo(np.int64).max)]))

    def _average(self) -> None:
        """Mean gradient over the replicas of the pipeline."""
        for p in self._parameters:
            if p.grad is not None:
                dist.all_reduce(p.grad, group=self._replicas)
                p.grad /= self.layout.width

    def _clip_by_delayed_norm(self, delayed: update.DelayedGlobalNorm) -> None:
        own, k, s = update.own_norm(self._parameters), self.update, self.layout.stage
        self._norms[k] = float("nan") if own is None else own
        source = delayed.source(k)
        if source is not None:
            norms = {s: self._norms.pop(source)}
            for other in self._others:
                norms[other] = float(self.mail.receive(other, Message(NORM, source))[0])
            delayed.remember(source, [None if norms[i] != norms[i] else norms[i] for i in range(self.layout.depth)])
        delayed.clip(k, self._parameters, own)
        if delayed.is_needed(k):
            for other in self._others:
                self.mail.send(other, Message(NORM, k), [torch.tensor([self._norms[k]], dtype=torch.float64)])

    def _clipping(self) -> None:
        if self._delayed is not None:
            self._clip_by_delayed_norm(self._delayed)
        if not self._clip or self._delayed is not None:
            return
        norm, scope = self._clip
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norms = [torch.linalg.vector_norm(g) for g in gradients]
        if scope == "global":
            gathered: List[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, (self.layout.replica, [n.cpu() for n in norms]))
            norms = [
                n.to(self._parameters[0].device)
                for replica, ns in gathered
                if replica == self.layout.replica
                for n in ns
            ]
        if not gradients:
            return
        total = torch.linalg.vector_norm(torch.stack(norms))
        scale = torch.clamp(norm / (total + 1e-6), max=1.0)
        for g in gradients:
            g.mul_(scale)

    def _summed(self) -> Tuple[float, Optional[float]]:
        batch = [self._results.popleft() for _ in range(self._accumulate)]
        mean = float(sum(loss for loss, _ in batch)) / len(batch)
        if not self._allow_nonfinite and not np.isfinite(mean):
            raise RunFault(
                f"update {self.update} of method {self._method.name}: the training loss is {mean}; a smaller optimizer.lr or "
                "lr_schedule.warmup_steps may help (allow_nonfinite: true goes on regardless)"
            )
        answers = [counts for _, counts in batch if counts is not None]
        right = torch.stack(answers).sum(dim=0) if answers else None
        return mean, None if right is None else float(right[0] / right[1].clamp(min=1))

    def close(self) -> None:
        """All messages through, the newest weights in the parameters, no hooks left."""
        self.mail.flush()
        self.weights.rest()
        self.release()

    def release(self) -> None:
        """Take the hooks off."""
        if self._random is not None:
            self._random.remove()


@contextlib.contextmanager
def _counters_kept(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """An optimizer's step here does not count as a change for graphs in flight, whose backward must see the new weights (or
    is given back the old ones by pointer)."""
    if not parameters:
        yield
        return
    with torch.autograd._unsafe_preserve_version_counter(tuple(parameters)):  # type: ignore[arg-type]
        yield
