"""The passes of one stage: forward, recomputation and backward of a microbatch, with the versions that each reads.

A rank needs no version table to find the newest weights: it reads what its memory holds, and its row says when that changes.

    row of stage s     F5   B2  U2   F6   B3  U3  ...
    in memory       w2 ->        w3 ->       w4            (pipedream: B3 reads again what F3 read, which is stashed)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

import numpy as np
import torch

from ipu_pipe.backends.processes.losses import Losses
from ipu_pipe.backends.processes.mail import BACKWARD, FORWARD, RECOMPUTE, Mail, Message
from ipu_pipe.backends.processes.memory import Stash
from ipu_pipe.backends.processes.place import Place
from ipu_pipe.backends.processes.row import Segments
from ipu_pipe.backends.processes.ties import Tied
from ipu_pipe.backends.replays import Replay, ReplayPlan
from ipu_pipe.backends.weights import make_weight_store
from ipu_pipe.backends.work import Work
from ipu_pipe.job.metrics import count_right
from ipu_pipe.local.blocks import compute_losses, extract_scores, get_activation
from ipu_pipe.model.cutting import Crossing
from ipu_pipe.model.nests import tensors
from ipu_pipe.model.restoring import buffers_restored
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.methods import Reads

Results = Tuple[List[torch.Tensor], Optional[torch.Tensor], Optional[torch.Tensor]]  # outputs, loss, right answers


@dataclass
class _Flight:
    """A microbatch between its forward and its backward on this stage."""

    replay: Replay
    inputs: List[Any]  # the batch's, or the tensors that were received
    outputs: List[torch.Tensor]
    loss: Optional[torch.Tensor]
    labels: Any


class Passes:
    """Carries out passes. `update`: how many updates the weights in memory have had; `forwarded`: the newest microbatch whose
    forward is done."""

    def __init__(self, work: Work, place: Place, mail: Mail) -> None:
        self._work, self._place, self._mail, self._timeline = work, place, mail, mail.timeline
        self._stage = place.layout.stage
        self._segments = Segments(work)
        self._plan = ReplayPlan(work.source([place.layout.replica]), work.rules, work.microbatch)
        self._flights: Dict[int, _Flight] = {}
        self.weights = make_weight_store(work, [self._stage])
        self.tied = Tied(place.ties, mail, work.update)
        self.losses = Losses()
        self.stash = Stash(place.held)
        self.update, self.forwarded = work.update, work.microbatch - 1

    def forward(self, m: int) -> None:
        """F(m), whose time begins when its inputs are there."""
        begun = self._timeline.mark()
        x, labels = self._place.data(m)
        if x is not None or labels is not None:
            self._timeline.add("wait", m, begun, carries="data")
        received = [] if self._place.enter is None else self._mail.receive(self._stage - 1, Message(FORWARD, m))
        replay = self._plan.replay(m).on(self._stage)
        version = int(replay.forward.versions[0])
        self.tied.load(version)
        begun = self._timeline.mark()
        inputs = self._inputs(received) if x is None else [x]
        self.weights.load(replay.forward)
        with torch.set_grad_enabled(replay.recompute is None):
            outputs, loss, answers = self._run(m, inputs, labels)
        self._flights[m] = _Flight(replay, inputs, outputs, loss, labels)
        self.forwarded = m
        if loss is not None:
            self.losses.add(loss.detach(), answers)
        self._timeline.add(Kind.FORWARD.word, m, begun, version=version)
        if self._place.leave is not None:
            self._mail.send(self._stage + 1, Message(FORWARD, m), outputs)

    def _inputs(self, received: List[torch.Tensor]) -> List[torch.Tensor]:
        if self._place.is_local or self._place.enter is None:
            return received
        return self._place.enter.enter(received)

    def _run(self, m: int, inputs: List[Any], labels: Any) -> Results:
        """`run`, of which is known what it leaves."""
        with self.stash.watched(m, tensors([*inputs, labels])) as kept:
            outputs, loss, answers = self.run(m, inputs, labels)
            kept += [*outputs, loss]
        return outputs, loss, answers

    def run(self, m: int, inputs: Sequence[Any], labels: Any) -> Results:
        """What the next stage gets; where there is a loss of its `labels`, it and the right answers."""
        place = self._place
        value = inputs[0] if place.enter is None else place.enter.unflatten(inputs)
        if place.behind is not None:
            # the stage that owns the layer moves its running statistics
            with buffers_restored(place.behind), place.draw_forward(m, place.behind):
                value = place.behind(value)
        entered = value
        with place.draw_forward(m, place.piece):
            output = place.piece(value)
            scored_output = output if place.head is None else place.head(get_activation(output))
        outputs: List[torch.Tensor] = []
        if place.leave is not None:
            outputs = place.leave.flatten(output if not place.shared_own else entered)
        if not place.has_loss:
            return outputs, None, None
        loss = compute_losses(self._work.loss, scored_output, labels)[0]
        return outputs, loss, count_right(extract_scores(self._work.loss, scored_output), labels)

    def recompute(self, m: int) -> None:
        """R(m)."""
        flight, s, received = self._flights[m], self._stage, None
        if not self._segments.is_head(s):
            received = self._mail.receive(s - 1, Message(RECOMPUTE, m))
        begun = self._timeline.mark()
        if received is not None:
            flight.inputs = self._inputs(received)
        assert flight.replay.recompute is not None
        self.weights.load(flight.replay.recompute)
        with buffers_restored(self._place.piece):
            flight.outputs, flight.loss, _ = self._run(m, flight.inputs, flight.labels)
        self._timeline.add(Kind.RECOMPUTE.word, m, begun, version=self.update)
        if not self._place.is_last and not self._segments.is_head(s + 1):
            self._mail.send(s + 1, Message(RECOMPUTE, m), flight.outputs)

    def backward(self, m: int) -> None:
        """B(m)."""
        flight, place, s = self._flights[m], self._place, self._stage
        gradients: List[torch.Tensor] = []
        if not place.is_last and not place.is_local:
            gradients = self._mail.receive(s + 1, Message(BACKWARD, m))
        came = self.tied.came(m)
        begun = self._timeline.mark()
        version = int(flight.replay.backward.versions[0])
        if self._work.method.backward_reads is Reads.NEWEST:
            assert version == self.update, f"stage {s}, B{m}: not of version {self.update} in memory but {version}"
        self.weights.load(flight.replay.backward)
        self.tied.load(version)
        with place.draw_backward(m):
            if flight.loss is not None:
                (flight.loss / self._work.accumulate).backward()  # type: ignore[no-untyped-call]
            elif not place.is_local:
                outputs = _differentiable(flight.outputs, place.crossings[s])
                gradients = place.crossings[s].gradients(gradients)
                pairs = [(t, g) for t, g in zip(outputs, gradients) if t.requires_grad] + came
                if pairs:
                    torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        self._work.rules.collect()
        hands_on = not place.is_first and not place.is_local
        if hands_on:
            found = place.crossings[s - 1].leave(flight.inputs)
        del self._flights[m]
        self.stash.drop(m)
        self._release()
        self._timeline.add(Kind.BACKWARD.word, m, begun, version=version)
        if hands_on:
            self._mail.send(s - 1, Message(BACKWARD, m), found)
        self.tied.give(m)

    def before_update(self) -> None:
        """Keep what passes to come will read of the weights in memory."""
        self.weights.before_update([self._kept_codes()])

    def after_update(self) -> None:
        """The weights in memory are the next version."""
        self.update += 1
        self._release()

    def _kept_codes(self) -> Set[int]:
        """How the newest version will be read when it is old: by backwards of microbatches in flight, by forwards to come."""
        method = self._work.method
        if method.backward_reads is not Reads.STASHED:
            return set()
        reads = [flight.replay.backward for flight in self._flights.values()]
        codes = {int(read.codes[0]) for read in reads if read.versions[0] == self.update}
        if method.forward_reads is Reads.DOUBLE_BUFFERED:
            versions = np.full(self._work.schedule.stages, self.update)
            codes |= self._plan.read_later(versions, self.forwarded)[self._stage]
        return codes

    def _release(self) -> None:
        oldest = [int(flight.replay.backward.versions[0]) for flight in self._flights.values()]
        if self.forwarded + 1 < self._work.schedule.microbatches:
            oldest.append(int(self._plan.replay(self.forwarded + 1).forward.versions[self._stage]))
        self.weights.release(np.array([min(oldest, default=np.iinfo(np.int64).max)]))
        self.tied.release(min(oldest, default=self.update))


def _differentiable(tensors: Sequence[torch.Tensor], crossing: Crossing) -> List[torch.Tensor]:
    """Those of the tensors that cross for which a gradient comes back."""
    return [t for t, shape in zip(tensors, crossing.tensors) if shape.differentiable]
