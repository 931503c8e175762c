"""The update of one stage: its gradients averaged over replicas and with shared layers, clipped, and carried out."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Mapping, Optional, Sequence

import torch
import torch.distributed as dist

from ipu_pipe.backends.clipping import Clipping, Elsewhere
from ipu_pipe.backends.processes.layout import Layout
from ipu_pipe.backends.processes.mail import NORM, SHARED, Mail, Message
from ipu_pipe.backends.processes.place import Place
from ipu_pipe.backends.processes.row import NORM_SHAPE
from ipu_pipe.backends.work import Work
from ipu_pipe.local.blocks import average_gradients
from ipu_pipe.schedule.actions import Kind

NONE = -1.0  # in the place of the norm of a gradient that is not there


class Updating:
    """Carries out updates of this stage. `replicas`: the process group of the stage's replicas, None where there is one."""

    def __init__(self, work: Work, place: Place, mail: Mail, replicas: Any = None) -> None:
        self._work, self._place, self._mail, self._replicas = work, place, mail, replicas
        s = place.layout.stage
        self.parameters = work.rules.stages[s].parameters if s in work.rules.stages else []
        self.clipping = Clipping(work, OtherRanks(work, place.layout, mail, len(self.parameters), self._interrupted))
        self._update, self._begun = -1, mail.timeline.mark()

    def gather(self, k: int) -> None:
        """The gradients of update k from the other ranks that have a part in them."""
        if self._replicas is not None:
            start, size = self._mail.timeline.mark(), sum(p.numel() * p.element_size() for p in self.parameters)
            average_over_replicas(self.parameters, self._replicas, self._place.layout.width, self._mail)
            self._mail.timeline.add(Kind.AVERAGE.word, k, start, size=size, carries="gradients")
        average_shared(self._place, k, self._mail)

    @contextlib.contextmanager
    def timed(self, k: int) -> Iterator[None]:
        """What runs inside is the event of update k, in parts where other ranks' norms are asked for in its middle."""
        self._update, self._begun = k, self._mail.timeline.mark()
        yield
        self._add()

    @contextlib.contextmanager
    def _interrupted(self) -> Iterator[None]:
        self._add()
        yield
        self._begun = self._mail.timeline.mark()

    def _add(self) -> None:
        self._mail.timeline.add(Kind.UPDATE.word, self._update, self._begun, version=self._update + 1)

    def step(self, k: int) -> None:
        """Update k."""
        with counters_kept(self.parameters):
            self._work.rules.step(k, lambda: self.clipping(k))


def average_over_replicas(parameters: Sequence[torch.nn.Parameter], group: Any, width: int, mail: Mail) -> None:
    """Mean gradient over the `width` replicas of the pipeline; one that a replica did not reach is zero there.

    By way of the host, since replicas may share a GPU; in one message a dtype; summed in the order of the replicas, as the
    emulator does.
    """
    reached = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
    mail.wait(dist.all_reduce(reached, group=group, async_op=True))
    chosen = [p for p, somewhere in zip(parameters, reached.tolist()) if somewhere]
    for dtype in dict.fromkeys(p.dtype for p in chosen):
        alike = [p for p in chosen if p.dtype == dtype]
        own = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in alike]).cpu()
        every = [torch.empty_like(own) for _ in range(width)]
        mail.wait(dist.all_gather(every, own, group=group, async_op=True))
        mean = (functools.reduce(torch.add, every) / width).to(alike[0].device)
        for p, part in zip(alike, mean.split([p.numel() for p in alike])):
            p.grad = part.view_as(p)


def average_shared(place: Place, k: int, mail: Mail) -> None:
    """The mean gradient of the layers that this stage and a neighbour hold."""
    for neighbour, shared in place.shared:
        mail.send(neighbour, Message(SHARED, k), [torch.zeros_like(p) if p.grad is None else p.grad for p in shared])
    for neighbour, shared in place.shared:
        for p, theirs in zip(shared, mail.receive(neighbour, Message(SHARED, k))):
            if p.grad is not None or bool(theirs.any()):  # else no block reaches it
                p.grad = average_gradients([p.grad, theirs])


class OtherRanks(Elsewhere):
    """Norms of the stages of the same replica, each in a process of its own. `count`: parameters of the stage that is here;
    `apart`: around what belongs to the messages, not to the update."""

    def __init__(
        self, work: Work, layout: Layout, mail: Mail, count: int, apart: Callable[[], ContextManager[None]]
    ) -> None:
        self._layout, self._mail, self._rules, self._apart = layout, mail, work.rules, apart
        self._sizes: List[int] = []  # parameters on each rank
        if work.clip is not None and work.clip[1] == "global":
            self._sizes = [0] * dist.get_world_size()
            dist.all_gather_object(self._sizes, count)

    def all_norms(self, own: Sequence[torch.Tensor]) -> List[torch.Tensor]:
        told = torch.full((max(self._sizes),), NONE, dtype=torch.float64)
        told[: len(own)] = torch.stack([norm.double().cpu() for norm in own]) if own else told[:0]
        gathered = [torch.empty_like(told) for _ in self._sizes]
        with self._apart():
            start = self._mail.timeline.mark()
            self._mail.wait(dist.all_gather(gathered, told, async_op=True))
            self._mail.timeline.add("wait", self._mail.timeline.update, start, carries="norms")
        first, depth = self._layout.rank_of(0), self._layout.depth
        norms = torch.cat([held[:size] for held, size in zip(gathered, self._sizes)][first : first + depth])
        parameter = self._rules.stages[self._layout.stage].parameters[0]
        return list(norms[norms != NONE].to(parameter.device, parameter.dtype))

    def ask(self, k: int) -> Dict[int, Optional[float]]:
        found: Dict[int, Optional[float]] = {}
        with self._apart():
            for other in self._others:
                norm = float(self._mail.receive(other, Message(NORM, k))[0])
                found[other] = None if norm == NONE else norm
        return found

    def tell(self, k: int, norms: Mapping[int, Optional[float]]) -> None:
        own = norms.get(self._layout.stage)
        with self._apart():
            for other in self._others:
                value = torch.tensor([NONE if own is None else own], dtype=torch.float64)
                self._mail.send(other, Message(NORM, k), [value])

    def forget(self, k: int) -> None:
        for other in self._others:
            if (other, Message(NORM, k)) not in self._mail.posted:  # told in order, so that its turn had come
                self._mail.expect(other, [(Message(NORM, k), NORM_SHAPE)])
            self._mail.receive(other, Message(NORM, k))

    @property
    def _others(self) -> List[int]:
        return [stage for stage in range(self._layout.depth) if stage != self._layout.stage]


@contextlib.contextmanager
def counters_kept(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """An optimizer's step here does not count as a change for graphs in flight, whose backward must see the new weights (or
    is given back the old ones by pointer)."""
    if not parameters:
        yield
        return
    with torch.autograd._unsafe_preserve_version_counter(tuple(parameters)):  # type: ignore[arg-type]
        yield
