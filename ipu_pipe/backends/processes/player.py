"""One stage of one replica plays its row of the schedule: the kind of an action says which function carries it out.

F  Passes.forward     R  Passes.recompute     B  Passes.backward     U  the batch's loss, Updating, the next version
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, Iterator, Optional, Sequence

import torch

from ipu_pipe.backends.losses import average
from ipu_pipe.backends.processes.channels import links, rehearsal
from ipu_pipe.backends.processes.ending import Ending
from ipu_pipe.backends.processes.mail import BACKWARD, FORWARD, RECOMPUTE, THROUGH_CHANNELS, UPDATE, Mail
from ipu_pipe.backends.processes.memory import Memory
from ipu_pipe.backends.processes.passes import Passes
from ipu_pipe.backends.processes.place import Place
from ipu_pipe.backends.processes.row import Action, Needs, Row
from ipu_pipe.backends.processes.stopping import Stopping
from ipu_pipe.backends.processes.updating import Updating, counters_kept
from ipu_pipe.backends.replicas import IndependentReplicas
from ipu_pipe.backends.weights import WeightStore
from ipu_pipe.backends.work import Work
from ipu_pipe.update import clipping


class RowPlayer:
    """Plays the row of the stage at `place`: `step(k)` up to and including update k.

    `doing`: the action, or what else. `replicas`: the process group of the stage's replicas, None where there is one. `ending`:
    of a run that may be asked to end after any update; `ends_empty`: it may be where the pipeline is empty. No receive must wait
    then for what comes after: it would take a message of these processes' next run away.
    """

    def __init__(
        self,
        work: Work,
        place: Place,
        mail: Mail,
        replicas: Any = None,
        ending: Optional[Ending] = None,
        ends_empty: bool = False,
    ) -> None:
        self._work, self.place, self.mail, self._ending = work, place, mail, ending
        self._updating = Updating(work, place, mail, replicas)
        self._passes = Passes(work, place, mail)
        tied, stash = self._passes.tied, self._passes.stash
        self.memory = Memory(place, work.rules, self._updating.parameters, self.weights, tied, stash, mail, work.update)
        self._needs = Needs(work, place, self._updating.clipping.delayed)
        self._own = IndependentReplicas.of(work, place.piece)
        self._is_ready, self._posts_by_stretch = not mail.has_channels, mail.has_channels or ends_empty
        self._measured: Optional[torch.Tensor] = None  # by the newest update
        self._carry_out: Dict[str, Callable[[int], None]] = {
            FORWARD: self._passes.forward if self._own is None else functools.partial(self._own_pass, FORWARD),
            RECOMPUTE: self._passes.recompute,
            BACKWARD: self._passes.backward if self._own is None else functools.partial(self._own_pass, BACKWARD),
            UPDATE: self._update,
        }
        self._row = self._actions(work.microbatch)
        self.doing = "start"
        mail.timeline.at(self.update)

    @property
    def update(self) -> int:
        """The next one."""
        return self._passes.update

    @property
    def weights(self) -> WeightStore:
        """The versions that are kept."""
        return self._passes.weights

    @property
    def version_bytes(self) -> int:
        """The most that were held of them besides the newest."""
        return self.weights.peak_bytes + self._passes.tied.peak_bytes

    @property
    def whereabouts(self) -> str:
        """What it is doing, in words for a fault."""
        kind, index = self.doing[:1], self.doing[1:]
        if not index.isdigit():
            return f"{self.doing} before update {self.update}"
        if kind == UPDATE:
            return f"update {index}"
        return f"update {int(index) // self._work.schedule.accumulate}, microbatch {index}, action {self.doing}"

    def _actions(self, first: int) -> Iterator[Action]:
        """The row from microbatch `first` on; what a chunk of it needs is expected before it begins."""
        for chunk in Row(self._work, self.place.layout.stage).chunks(first):
            for source, messages in self._needs.messages(chunk).items():
                self.mail.expect(source, messages)
            yield from chunk if self._ending is None else self._ending.begun(chunk)

    def step(self, k: int) -> Optional[torch.Tensor]:
        """Carry out the row up to update k. Where there is a loss: the table of the batch (`losses.tabulate`)."""
        assert k == self.update, f"update {self.update} is next, not {k}"
        if self._posts_by_stretch:
            self._open(k)
        for kind, index in self._row:
            Stopping.check()
            self.doing = f"{kind}{index}"
            self._carry_out[kind](index)
            self.memory.sample(self.update, kind in (BACKWARD, UPDATE), kind == UPDATE)
            if kind == UPDATE:
                assert index == k
                self.mail.is_warm = self.mail.is_warm or self._is_full(k)
                return self._measured
        raise AssertionError(f"the schedule ends before update {k}")

    def _is_full(self, k: int) -> bool:
        """Whether all stages have begun when update k is done: where nothing comes back, not before the first one, which runs no
        further ahead, is that far."""
        return k - self._work.update >= (self.place.layout.depth + 1 if self.place.is_local else 0)

    def _own_pass(self, kind: str, m: int) -> None:
        """F(m) or B(m) of the replica whose turn it is, with its own weights; after B(m) it steps at once."""
        assert self._own is not None
        self._own.enter(m % self._own.count)
        if kind == FORWARD:
            self._passes.forward(m)
        else:
            self._passes.backward(m)
            self._updating.step(m // self._own.count)

    def _update(self, k: int) -> None:
        """U(k)."""
        if self.place.has_loss:
            self._measured = self._passes.losses.take(self._work.schedule.accumulate)
            self._work.refuse_nonfinite(k, [average(self._measured)[0]])
        if self._own is not None:
            with self._updating.timed(k):
                self._own.end_step(self._work, k)
                self._passes.after_update()
            self.mail.timeline.at(self.update)
            return
        self._updating.gather(k)
        with self._updating.timed(k):
            self._passes.before_update()
            self.memory.sample(k)
            self._updating.step(k)
            self._passes.after_update()
        self._passes.tied.copy(k)
        if (
            self._work.schedule.stretch(k)[1] == self.update
        ):  # no receive of a channel waits while the pipeline is empty
            self._passes.tied.load(self.update)
        self.mail.timeline.at(self.update)

    def _open(self, k: int) -> None:
        """Receives up to where the pipeline empties may be posted; first of all, channels, if there are any, and kernels are
        used once."""
        if not self._is_ready:
            depth, tied = self.place.layout.depth, self.place.ties.links
            self.mail.touch(links(depth, self._work.method, THROUGH_CHANNELS, tied))
            _rehearse(self._work, self.place, self._passes, self._updating.parameters)
            self._is_ready = True
        end = self._work.schedule.stretch(k)[1] if self._ending is None else self._ending.open()
        self.mail.open(end * self._work.schedule.accumulate, end)

    def rest(self) -> None:
        """With nothing in flight: the newest weights in the parameters."""
        self.weights.rest()
        self._passes.tied.load(self.update)

    def close(self) -> None:
        """All messages through, the newest weights in the parameters, no hooks left."""
        self._updating.clipping.forget_rest()
        self.rest()
        self.mail.flush()
        self.release()

    def release(self) -> None:
        """Take the hooks off."""
        if self.place.random is not None:
            self.place.random.remove()


def _rehearse(work: Work, place: Place, passes: Passes, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Forward, backward and update of the first microbatch, or of zeros where it comes from another stage."""
    m, rules = passes.forwarded + 1, work.rules
    with rehearsal([place.piece, place.head, place.behind], rules):
        x, labels = place.data(m)
        inputs = [x] if x is not None else []
        for shape in place.enter.tensors if place.enter is not None else ():
            zeros = torch.zeros(shape.sent, dtype=shape.dtype, device=place.device)
            inputs.append(zeros.requires_grad_(shape.differentiable and not place.is_local))
        outputs, loss, _ = passes.run(m, inputs, labels)
        ends = [t for t in (outputs if loss is None else [loss / work.accumulate]) if t.requires_grad]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
        rules.collect()
        bound = work.clip[0] if work.clip else float("inf")
        with counters_kept(parameters):
            rules.step(
                max(passes.update, rules.switch),
                lambda: clipping.clip_to_norm(bound, parameters, clipping.compute_gradient_norms(parameters)),
            )
        if place.device.type == "cuda":
            torch.cuda.synchronize()
