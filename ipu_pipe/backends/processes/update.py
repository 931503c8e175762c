"""The update of a stage: gradients averaged over replicas and shared layers, clipped, stepped; and its losses sent to rank 0."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

import torch

from ipu_pipe.backends.interface import StepResult
from ipu_pipe.backends.losses import COLUMNS, average
from ipu_pipe.backends.processes.layout import RankLayout
from ipu_pipe.backends.processes.mail import NORM, RESULT, SHARED, WEIGHTS, Mail, Message, Shapes
from ipu_pipe.backends.processes.stage import StageModel
from ipu_pipe.backends.processes.trace import TraceRecorder
from ipu_pipe.backends.work import Work
from ipu_pipe.errors import RunFault
from ipu_pipe.model.cutting import Shape
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.update.clipping import GradientClipping, OtherStages

NO_GRADIENT = -1.0  # in the place of the norm of a gradient that is not there
NORM_SHAPE = (Shape((1,), torch.float64, False),)
DRAW_ALIKE = (
    "the inputs of one would be trained with the labels of the other; seed every generator that the data hold "
    "(numpy.random.default_rng(SEED)), or draw from the global ones, which are seeded alike on all ranks"
)


class StageUpdate:
    """Carries out the updates of a stage. `replicas`: the process group of its replicas, None if there is one."""

    def __init__(self, work: Work, model: StageModel, mail: Mail, recorder: TraceRecorder, replicas: Any = None) -> None:
        self._work, self._model, self._mail, self._recorder, self._replicas = work, model, mail, recorder, replicas
        stages = work.rules.stages
        self.parameters = stages[model.stage].parameters if model.stage in stages else []
        self._norms = OtherRanksNorms(work, model.layout, mail, recorder, len(self.parameters), self._interrupt)
        clipped = {s: state.parameters for s, state in stages.items()}
        self.clipping = GradientClipping(work.clip, clipped, work.schedule, self._norms)
        self._update, self._start = -1, recorder.mark()

    def needs(self, k: int) -> Iterator[Tuple[int, Message, Shapes]]:
        """Yield source rank, message and shapes of what update k needs, or sends to this stage."""
        layout = self._model.layout
        if self._model.local is not None:
            for neighbor, shapes in self._model.local.needs():
                yield layout.rank_of(neighbor), Message(SHARED, k), shapes
        for holder, shapes in self._model.ties.needs(WEIGHTS):
            yield layout.rank_of(holder), Message(WEIGHTS, k), shapes
        delayed = self.clipping.delayed
        source = delayed.source(k) if delayed is not None else None
        if source is not None:
            self._norms.expected.add(source)
            for stage in layout.other_stages:
                yield layout.rank_of(stage), Message(NORM, source), NORM_SHAPE

    def gather(self, k: int) -> None:
        """Average the gradients of update k with the other ranks that have a part in them."""
        if self._replicas is not None:
            start, size = self._recorder.mark(), sum(p.numel() * p.element_size() for p in self.parameters)
            average_over_replicas(self.parameters, self._mail, self._replicas)
            self._recorder.add(Kind.AVERAGE.word, k, start, size=size, carries="gradients")
        if self._model.local is not None:
            self._model.local.average_gradients(k, self._model.layout, self._mail)

    @contextlib.contextmanager
    def record(self, k: int) -> Iterator[None]:
        """Record what runs inside as update k, in parts where other ranks' norms are waited for in its middle."""
        self._update, self._start = k, self._recorder.mark()
        yield
        self._add_event()

    @contextlib.contextmanager
    def _interrupt(self) -> Iterator[None]:
        self._add_event()
        yield
        self._start = self._recorder.mark()

    def _add_event(self) -> None:
        self._recorder.add(Kind.UPDATE.word, self._update, self._start, version=self._update + 1)

    def step(self, k: int) -> None:
        """Clip the gradients of update k and let the optimizer and the rules step."""
        with keep_version_counters(self.parameters):
            self._work.rules.step(k, lambda: self.clipping(k))


def average_over_replicas(parameters: Sequence[torch.nn.Parameter], mail: Mail, group: Any = None) -> None:
    """Replace gradients by their mean over the ranks of a group; a gradient that a rank does not have is zero there.

    By way of the host, since replicas may share a GPU; in one message a dtype; summed in the order of the replicas, as the
    emulator does.
    """
    has_gradient = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
    somewhere = torch.stack(mail.all_gather(has_gradient, group)).amax(dim=0)
    chosen = [p for p, reached in zip(parameters, somewhere.tolist()) if reached]
    for dtype in dict.fromkeys(p.dtype for p in chosen):
        of_dtype = [p for p in chosen if p.dtype == dtype]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in of_dtype]).cpu()
        replicas = mail.all_gather(flat, group)
        mean = (functools.reduce(torch.add, replicas) / len(replicas)).to(of_dtype[0].device)
        for p, part in zip(of_dtype, mean.split([p.numel() for p in of_dtype])):
            p.grad = part.view_as(p)


class OtherRanksNorms(OtherStages):
    """The norms of the gradients of the same replica's other stages. `count`: parameters of the stage that is here; `interrupt`:
    around what belongs to messages and not to the update; `expected`: updates whose norms the mail expects."""

    def __init__(
        self, work: Work, layout: RankLayout, mail: Mail, recorder: TraceRecorder, count: int,
        interrupt: Callable[[], ContextManager[None]],
    ) -> None:  # fmt: skip
        self._layout, self._mail, self._recorder, self._interrupt = layout, mail, recorder, interrupt
        self._rules = work.rules
        self.expected: Set[int] = set()
        self._counts: List[int] = []  # of parameters on each rank
        if work.clip is not None and work.clip[1] == "global":
            self._counts = [int(n) for n in mail.all_gather(torch.tensor([count]))]

    def gather_norms(self, norms: Sequence[torch.Tensor]) -> List[torch.Tensor]:
        padded = torch.full((max(self._counts),), NO_GRADIENT, dtype=torch.float64)
        if norms:
            padded[: len(norms)] = torch.stack([norm.double().cpu() for norm in norms])
        with self._interrupt():
            start = self._recorder.mark()
            gathered = self._mail.all_gather(padded)
            self._recorder.add("wait", self._recorder.update, start, carries="norms")
        first = self._layout.rank_of(0)
        of_replica = slice(first, first + self._layout.stages)
        every = torch.cat([rank[:count] for rank, count in zip(gathered[of_replica], self._counts[of_replica])])
        parameter = self._rules.stages[self._layout.stage].parameters[0]
        return list(every[every != NO_GRADIENT].to(parameter.device, parameter.dtype))

    def receive(self, k: int) -> Dict[int, Optional[float]]:
        norms: Dict[int, Optional[float]] = {}
        with self._interrupt():
            self.expected.discard(k)
            for stage in self._layout.other_stages:
                norm = float(self._mail.receive(self._layout.rank_of(stage), Message(NORM, k))[0])
                norms[stage] = None if norm == NO_GRADIENT else norm
        return norms

    def send(self, k: int, norms: Mapping[int, Optional[float]]) -> None:
        norm = norms.get(self._layout.stage)
        with self._interrupt():
            for stage in self._layout.other_stages:
                value = torch.tensor([NO_GRADIENT if norm is None else norm], dtype=torch.float64)
                self._mail.send(self._layout.rank_of(stage), Message(NORM, k), [value])

    def discard(self, k: int) -> None:
        for stage in self._layout.other_stages:
            rank = self._layout.rank_of(stage)
            if k not in self.expected:
                self._mail.expect(rank, [(Message(NORM, k), NORM_SHAPE)])
            self._mail.receive(rank, Message(NORM, k))


@contextlib.contextmanager
def keep_version_counters(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Hide an optimizer's step from autograd's check for in-place changes: the backward of a graph in flight must see the new
    weights, or is given back the old ones by pointer."""
    if not parameters:
        yield
        return
    with torch.autograd._unsafe_preserve_version_counter(tuple(parameters)):  # type: ignore[arg-type]
        yield


class ResultCollection:
    """Gathers the results of updates on the first stage of each replica, and over the replicas.

    The stages `with_loss` send the first one their tables of microbatches (`losses.tabulate`), and the checksums of the batches
    that they read for the labels: they must be those of the batches that the first stage read for its inputs. `microbatches`: of
    an update on one replica; `samples`: of an update on all; `data`: the data's name, for a fault; `first_stages`: the group of
    the replicas' first stages, None if there is one replica.
    """

    def __init__(
        self, mail: Mail, recorder: TraceRecorder, layout: RankLayout, with_loss: List[int], microbatches: int, samples: int,
        data: str, first_stages: Any = None,
    ) -> None:  # fmt: skip
        self._mail, self._recorder, self._layout, self.with_loss = mail, recorder, layout, with_loss
        self._microbatches, self._samples, self._data = microbatches, samples, data
        self._first_stages = first_stages
        self._shapes = (Shape((microbatches, COLUMNS + 1), torch.float64, False),)
        self._on_first: Dict[int, Tuple[Optional[torch.Tensor], torch.Tensor]] = {}  # table and checksums, by update
        self._expected = 0

    def expect(self, first: int, last: int) -> None:
        """Post receives, on the first stage, for the results of the updates in [first, last) that are not expected yet."""
        first = max(first, self._expected)
        for stage in self.with_loss:
            if stage:
                messages = [(Message(RESULT, k), self._shapes) for k in range(first, last)]
                self._mail.expect(self._layout.rank_of(stage), messages)
        self._expected = max(first, last)

    def send(self, k: int, table: Optional[torch.Tensor], checksums: Dict[int, int]) -> None:
        """Send a stage's table of update k, None if it has no loss; remove the update's microbatches from `checksums`."""
        microbatches = range(k * self._microbatches, (k + 1) * self._microbatches)
        column = torch.tensor([checksums.pop(m, 0) for m in microbatches], dtype=torch.float64)
        if self._layout.stage == 0:
            self._on_first[k] = table, column
        elif table is not None:
            self._mail.send(self._layout.rank_of(0), Message(RESULT, k), [torch.cat([table, column[:, None]], dim=1)])

    def collect(self, k: int) -> StepResult:
        """Return the result of update k, which only the first stages know. Raise `RunFault` if stages read different batches."""
        if self._layout.stage:
            return StepResult(float("nan"), None, self._samples)
        on_first, checksums = self._on_first.pop(k)
        tables = []
        for stage in self.with_loss:
            if stage == 0:
                assert on_first is not None
                tables.append(on_first)
                continue
            received = self._mail.receive(self._layout.rank_of(stage), Message(RESULT, k))[0]
            if not torch.equal(checksums, received[:, -1]):
                ranks = self._layout.rank_of(0), self._layout.rank_of(stage)
                raise RunFault(
                    f"data: {self._data}: update {k}: rank {ranks[0]} and rank {ranks[1]} read different batches: {DRAW_ALIKE}"
                )
            tables.append(received[:, :-1])
        table = torch.stack(tables)  # (blocks, microbatches, 3)
        if self._first_stages is not None:
            start = self._recorder.mark()
            replicas = self._mail.all_gather(table, self._first_stages)
            self._recorder.add("wait", k, start, carries="losses")
            # microbatch 0 of each replica, microbatch 1 of each, ...: the order in which the emulator has them
            table = torch.stack(replicas, dim=2).flatten(1, 2)
        blocks = [average(rows) for rows in table]
        return StepResult(*blocks[-1], self._samples, tuple(blocks) if len(blocks) > 1 else ())
