"""The pipeline on processes: each rank holds one stage and carries out its row of the schedule.

A rank needs no version table to find the newest weights: it reads what its memory holds, and its row says when that changes.

    row of stage s     F5   B2  U2   F6   B3  U3  ...
    in memory       w2 ->        w3 ->       w4            (pipedream: B3 reads again what F3 read, which is stashed)

Sends and receives (`mail`) follow from the schedule: F(m) of stage s is sent when done to s + 1, B(m) to s - 1. Every wait is
for an action of an earlier slot, which the schedule was proved to have (`Schedule`), so ranks cannot wait in a circle.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Callable, Deque, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ipu_pipe.backends.processes.channels import Channels, links, rehearsal
from ipu_pipe.backends.processes.mail import (
    BACKWARD,
    FORWARD,
    NORM,
    ORDER,
    RECOMPUTE,
    SHARED,
    THROUGH_CHANNELS,
    UPDATE,
    Layout,
    Mail,
    Message,
    Timeline,
)
from ipu_pipe.backends.processes.stopping import Stopping
from ipu_pipe.backends.weights import Overwriting, Read, ReadPlan, Swapping, Unversioned
from ipu_pipe.errors import RunFault
from ipu_pipe.job.evaluation import right_answers
from ipu_pipe.local.blocks import losses_of, one_activation
from ipu_pipe.local.duplicates import mean_gradient
from ipu_pipe.model.buffers import buffers_restored
from ipu_pipe.model.cutting import Crossing, Piece, Shape
from ipu_pipe.model.probe import Loss
from ipu_pipe.model.randomness import KeyedRandomness
from ipu_pipe.schedule.methods import Method
from ipu_pipe.schedule.table import Kind
from ipu_pipe.schedule.versions import VersionTable, segment_ends
from ipu_pipe.update import clipping
from ipu_pipe.update.apply import UpdateRules

CHUNK = 512  # microbatches of which the row is spelled out at a time
NORM_SHAPE = (Shape((1,), torch.float64, False),)
KINDS = {FORWARD: "forward", RECOMPUTE: "forward", BACKWARD: "backward", UPDATE: "update"}


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
    this stage's replicas. `deadline`, `group` and `channels`: those of `Mail`. Of blocks with losses of their own: `head`, the
    auxiliary head, and `behind`, the stage before, of which this one holds a duplicate.
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
        channels: Optional[Channels] = None,
        head: Optional[nn.Module] = None,
        behind: Optional[Piece] = None,
    ) -> None:
        self.layout, self.piece, self.timeline = layout, piece, Timeline(layout, trace_microbatches)
        self._crossings, self._loss, self._method, self._rules = list(crossings), loss, method, rules
        self._source, self._random, self._clip, self._allow_nonfinite = source, random, clip, allow_nonfinite
        self._schedule = table.schedule
        self._accumulate = table.schedule.accumulate
        self._replicas, self._head, self._behind = replicas, head, behind
        self._is_local = method.structure is not None
        self._has_loss = head is not None or layout.stage == layout.depth - 1
        self.update = self._first = microbatch // self._accumulate
        s = layout.stage
        self._reach = 2 * layout.depth + 2 * self._accumulate + 2
        self._plan = ReadPlan(table, rules, self._reach)
        self._parameters = rules.stages[s].parameters if s in rules.stages else []
        shares = method.structure is not None and method.structure.overlap
        # what arrives with a microbatch, and what is handed on: where layers are shared, a stage starts one layer earlier
        entries: List[Optional[Crossing]] = [None, *crossings] if not shares else [None, None, *crossings[:-1]]
        self._enter = entries[s]
        self._leave = entries[s + 1] if s + 1 < layout.depth else None
        self._shared_before = trainable(behind) if behind is not None else []
        self._shared_own = trainable(piece) if shares and s < layout.depth - 1 else []
        self._delayed: Optional[clipping.DelayedGlobalNorm] = None
        if clip is not None and clip[1] == "delayed_global":
            self._delayed = clipping.DelayedGlobalNorm(clip[0], table.schedule)
        self._sizes: List[int] = []  # parameters on each rank
        if clip is not None and clip[1] == "global":
            self._sizes = [0] * dist.get_world_size()
            dist.all_gather_object(self._sizes, len(self._parameters))
        self.weights = self._history()
        self._flights: Dict[int, _Flight] = {}
        self._norms: Dict[int, float] = {}  # of own gradients, by update
        self._forwarded = microbatch - 1
        self._results: Deque[Tuple[torch.Tensor, Optional[torch.Tensor]]] = deque()  # by microbatch, on the last stage
        self.mail = Mail(layout, device, self.timeline, deadline, group, channels)
        self._device, self._has_channels, self._is_ready = device, channels is not None, channels is None
        self._row = self._actions(microbatch)
        self.doing = "start"

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the first stage."""
        return self.layout.stage == 0

    @property
    def whereabouts(self) -> str:
        """What it is doing, in words for a fault."""
        kind, index = self.doing[:1], self.doing[1:]
        if not index.isdigit():
            return f"{self.doing} before update {self.update}"
        if kind == UPDATE:
            return f"update {index}"
        return f"update {int(index) // self._accumulate}, microbatch {index}, action {self.doing}"

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.layout.stage == self.layout.depth - 1

    def _history(self) -> Unversioned:
        if not self._method.reads_old(self.layout.depth):
            return Unversioned()
        s = self.layout.stage
        kind = Swapping if self._method.backward_reads == "stashed" else Overwriting
        return kind([self._parameters], self.update, lambda _, code, version: self._rules.corrections(s, code, version))

    # --- the row

    def _slots(self, kind: Kind, first: int, last: int) -> np.ndarray:
        s = self.layout.stage
        return self._schedule.slots(kind, first, last, slice(s, s + 1))[0]

    def _recompute_slots(self, first: int, last: int) -> np.ndarray:
        s, segments = self.layout.stage, self._method.segments
        end = int(segment_ends(self.layout.depth, segments or 0)[s])
        turn = self._method.turn if self.layout.depth > 1 else 0
        slots = self._schedule.slots(Kind.BACKWARD, first, last, slice(end, end + 1))[0]
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

    def _chunks(self, first: int) -> Iterator[List[Tuple[str, int]]]:
        """The actions from microbatch `first` on, (kind, microbatch or update) in order, some updates at a time: those after the
        last update of one chunk up to that of the next."""
        count, batch = self._schedule.microbatches, self._accumulate
        length = max(CHUNK // batch, 1) * batch
        begun = {FORWARD: first, RECOMPUTE: first}
        for begin in range(first, count, length):
            end = min(begin + length, count)
            backward = self._slots(Kind.BACKWARD, begin, end)
            updates = np.arange(begin // batch, end // batch)
            parts = [(BACKWARD, backward, np.arange(begin, end)), (UPDATE, backward[batch - 1 :: batch], updates)]
            for kind in (FORWARD, RECOMPUTE) if self._recomputes else (FORWARD,):
                most = min(end + self._reach, count)
                slots = self._recompute_slots if kind == RECOMPUTE else functools.partial(self._slots, Kind.FORWARD)
                found = slots(begun[kind], most)
                taken = int(np.searchsorted(found, backward[-1], side="right"))
                assert taken < len(found) or most == count, "the reach is too short"
                parts.append((kind, found[:taken], np.arange(begun[kind], begun[kind] + taken)))
                begun[kind] += taken
            table = np.concatenate([
                np.stack([slots, np.full_like(slots, ORDER.index(kind)), index], axis=1) for kind, slots, index in parts
            ])  # fmt: skip
            ordered = table[np.lexsort((table[:, 1], table[:, 0]))]
            yield [(ORDER[order], index) for _, order, index in ordered.tolist()]

    def _actions(self, first: int) -> Iterator[Tuple[str, int]]:
        for chunk in self._chunks(first):
            self._expect(chunk)
            yield from chunk

    def _expect(self, actions: Sequence[Tuple[str, int]]) -> None:
        """Derive what this rank receives, and when, from its row."""
        s = self.layout.stage
        wanted: Dict[int, List[Tuple[Message, Tuple[Shape, ...]]]] = {}
        for kind, index in actions:
            if kind == FORWARD and self._enter is not None:
                wanted.setdefault(s - 1, []).append((Message(kind, index), self._enter.tensors))
            elif kind == RECOMPUTE and not self._is_head(s):
                wanted.setdefault(s - 1, []).append((Message(kind, index), self._crossings[s - 1].tensors))
            elif kind == BACKWARD and not self.is_last and not self._is_local:
                back = tuple(shape for shape in self._crossings[s].tensors if shape.differentiable)
                wanted.setdefault(s + 1, []).append((Message(kind, index), back))
            elif kind == UPDATE and self._is_local:
                for neighbour, shared in ((s - 1, self._shared_before), (s + 1, self._shared_own)):
                    if shared:
                        shapes = tuple(Shape(tuple(p.shape), p.dtype, False) for p in shared)
                        wanted.setdefault(neighbour, []).append((Message(SHARED, index), shapes))
            elif kind == UPDATE and self._delayed is not None:
                norm = self._delayed.source(index)
                if norm is not None:
                    for other in self._others:
                        wanted.setdefault(other, []).append((Message(NORM, norm), NORM_SHAPE))
        for source, messages in wanted.items():
            self.mail.expect(source, messages)

    # --- carrying it out

    def step(self, k: int) -> Optional[Tuple[float, Optional[float]]]:
        """Carry out the row up to update k. Where there is a loss: (its mean, share of right answers or None) over the batch."""
        assert k == self.update, f"update {self.update} is next, not {k}"
        if self._has_channels:
            self._open_channels(k)
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
                result = self._summed() if self._has_loss else None
                self._update()
                version = self.update
            microbatch = index if kind != UPDATE else index * self._accumulate
            self.timeline.add(KINDS[kind], index, start, version, microbatch=microbatch)
            if kind == UPDATE:
                assert index == k
                # where nothing comes back, an update is done before the stages behind have begun: not so once the first one,
                # which runs no further ahead, is this far
                self.mail.is_warm = self.mail.is_warm or k - self._first >= (
                    self.layout.depth + 1 if self._is_local else 0
                )
                return result
        raise AssertionError(f"the schedule ends before update {k}")

    def _open_channels(self, k: int) -> None:
        """Receives up to where the pipeline empties may be posted; first of all, channels and kernels are used once."""
        if not self._is_ready:
            self.mail.touch(links(self.layout.depth, self._method, THROUGH_CHANNELS))
            self._rehearse()
            self._is_ready = True
        end = self._schedule.stretch(k)[1]
        self.mail.open(end * self._accumulate, end)

    def _rehearse(self) -> None:
        """Forward, backward and update of the first microbatch, or of zeros where it comes from another stage."""
        m = self._forwarded + 1
        with rehearsal([self.piece, self._head, self._behind], self._rules):
            inputs = [self._source(m)[0]] if self._enter is None else []
            for shape in self._enter.tensors if self._enter is not None else ():
                zeros = torch.zeros(shape.shape, dtype=shape.dtype, device=self._device)
                inputs.append(zeros.requires_grad_(shape.differentiable and not self._is_local))
            outputs, loss, _ = self._run(m, inputs)
            ends = [t for t in (outputs if loss is None else [loss / self._accumulate]) if t.requires_grad]
            if ends:
                torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
            bound = self._clip[0] if self._clip else float("inf")
            with _counters_kept(self._parameters):
                self._rules.step(
                    max(self.update, self._rules.switch),
                    lambda: clipping.scale_to(bound, self._parameters, clipping.gradient_norms(self._parameters)),
                )
            if self._device.type == "cuda":
                torch.cuda.synchronize()

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
        if loss is not None:
            self._results.append((loss.detach(), answers))
        if self._leave is not None:
            self.mail.send(self.layout.stage + 1, Message(FORWARD, m), outputs)
        return int(reads[0].versions[0])

    def _inputs(self, m: int) -> List[torch.Tensor]:
        if self._enter is None:
            return [self._source(m)[0]]
        received = self.mail.receive(self.layout.stage - 1, Message(FORWARD, m))
        if self._is_local:
            return received
        return [t.requires_grad_() if shape.differentiable else t for t, shape in zip(received, self._enter.tensors)]

    def _run(
        self, m: int, inputs: Sequence[torch.Tensor]
    ) -> Tuple[List[torch.Tensor], Optional[torch.Tensor], Optional[torch.Tensor]]:
        """What the next stage gets; where there is a loss, it and the right answers."""
        if self._random is not None:
            self._random.microbatch = m * self.layout.width + self.layout.replica
        value = inputs[0] if self._enter is None else self._enter.unflatten(inputs)
        if self._behind is not None:
            with buffers_restored(self._behind):  # the stage that owns the layer moves its running statistics
                value = self._behind(value)
        entered = value
        output = self.piece(value)
        outputs: List[torch.Tensor] = []
        if self._leave is not None:
            outputs = self._leave.flatten(output if not self._shared_own else entered)
        if not self._has_loss:
            return outputs, None, None
        y = self._source(m)[1]
        if self._head is not None:
            output = self._head(one_activation(output))
        return outputs, losses_of(self._loss, output, y)[0], right_answers(output, y)

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
        if not self.is_last and not self._is_local:
            gradients = self.mail.receive(s + 1, Message(BACKWARD, m))
        version = int(flight.backward.versions[0])
        if self._method.backward_reads == "newest":
            assert version == self.update, (
                f"stage {s}, B{m}: memory holds version {self.update}, the table says {version}"
            )
        self.weights.load(flight.backward)
        if flight.loss is not None:
            (flight.loss / self._accumulate).backward()  # type: ignore[no-untyped-call]
        elif not self._is_local:
            shapes = self._crossings[s].tensors
            outputs = [t for t, shape in zip(flight.outputs, shapes) if shape.differentiable]
            pairs = [(t, g) for t, g in zip(outputs, gradients) if t.requires_grad]
            if pairs:
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        if not self.is_first and not self._is_local:
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
        self._average_shared()
        self.weights.before_update([self._kept_codes()])
        with _counters_kept(self._parameters):
            self._rules.step(self.update, self._clipping)
        self.update += 1
        self._release()

    def _kept_codes(self) -> Set[int]:
        """How the newest version will be read when it is old: by backwards of microbatches in flight, by forwards to come."""
        if self._method.backward_reads != "stashed":
            return set()
        codes = {
            int(flight.backward.codes[0])
            for flight in self._flights.values()
            if flight.backward.versions[0] == self.update
        }
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
        """Mean gradient over the replicas of the pipeline; one that a replica did not reach is zero there. By way of the host,
        since replicas may share a GPU; in one message a dtype; summed in the order of the replicas, as the emulator does."""
        reached = torch.tensor([p.grad is not None for p in self._parameters], dtype=torch.int32)
        self.mail.wait(dist.all_reduce(reached, group=self._replicas, async_op=True))
        chosen = [p for p, somewhere in zip(self._parameters, reached.tolist()) if somewhere]
        for dtype in dict.fromkeys(p.dtype for p in chosen):
            alike = [p for p in chosen if p.dtype == dtype]
            own = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in alike]).cpu()
            every = [torch.empty_like(own) for _ in range(self.layout.width)]
            self.mail.wait(dist.all_gather(every, own, group=self._replicas, async_op=True))
            mean = (functools.reduce(torch.add, every) / self.layout.width).to(alike[0].device)
            for p, part in zip(alike, mean.split([p.numel() for p in alike])):
                p.grad = part.view_as(p)

    def _average_shared(self) -> None:
        """The mean gradient of the layers that this stage and a neighbour hold."""
        s, k = self.layout.stage, self.update
        pairs = [(s - 1, self._shared_before), (s + 1, self._shared_own)]
        for neighbour, shared in pairs:
            if shared:
                own = [torch.zeros_like(p) if p.grad is None else p.grad for p in shared]
                self.mail.send(neighbour, Message(SHARED, k), own)
        for neighbour, shared in pairs:
            if shared:
                for p, theirs in zip(shared, self.mail.receive(neighbour, Message(SHARED, k))):
                    if p.grad is not None or bool(theirs.any()):  # else no block reaches it
                        p.grad = mean_gradient([p.grad, theirs])

    def _clip_by_delayed_norm(self, delayed: clipping.DelayedGlobalNorm) -> None:
        own, k, s = clipping.own_norm(self._parameters), self.update, self.layout.stage
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

    def _norms_of_all_stages(self) -> List[torch.Tensor]:
        """Of every parameter's gradient in this replica, in the order of the stages."""
        own = torch.full((max(self._sizes),), -1.0, dtype=torch.float64)  # -1: no gradient
        for i, p in enumerate(self._parameters):
            if p.grad is not None:
                own[i] = torch.linalg.vector_norm(p.grad)
        gathered = [torch.empty_like(own) for _ in self._sizes]
        self.mail.wait(dist.all_gather(gathered, own, async_op=True))
        first, depth = self.layout.rank_of(0), self.layout.depth
        norms = torch.cat([held[:size] for held, size in zip(gathered, self._sizes)][first : first + depth])
        device, dtype = self._parameters[0].device, self._parameters[0].dtype
        return list(norms[norms != -1].to(device, dtype))

    def _clipping(self) -> None:
        if self._delayed is not None:
            self._clip_by_delayed_norm(self._delayed)
        if not self._clip or self._delayed is not None:
            return
        norm, scope = self._clip
        known = self._norms_of_all_stages() if scope == "global" else clipping.gradient_norms(self._parameters)
        clipping.scale_to(norm, self._parameters, known)

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


def trainable(piece: Piece) -> List[nn.Parameter]:
    """A piece's parameters that need a gradient, in its order."""
    return [p for p in piece.parameters() if p.requires_grad]


@contextlib.contextmanager
def _counters_kept(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """An optimizer's step here does not count as a change for graphs in flight, whose backward must see the new weights (or
    is given back the old ones by pointer)."""
    if not parameters:
        yield
        return
    with torch.autograd._unsafe_preserve_version_counter(tuple(parameters)):  # type: ignore[arg-type]
        yield
