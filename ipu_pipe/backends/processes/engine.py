"""One job on several processes: layout, pieces of the model, evaluation, checkpoints, faults. The row itself is in `distributed`.

rank   0    1    2    3    4    5          depth 3, width 2
stage  0    1    2    0    1    2          rank 0 prints and writes; gradients are averaged between ranks of one stage
"""

from __future__ import annotations

import contextlib
import datetime
import time
from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple, TypeVar

import torch
import torch.distributed as dist

from ipu_pipe.backends.interface import Engine, Report, State, StepResult
from ipu_pipe.backends.processes.channels import Channels, Link, links
from ipu_pipe.backends.processes.group import gpus_talk
from ipu_pipe.backends.processes.joining import (
    answer_within,
)
from ipu_pipe.backends.processes.mail import (
    RESULT,
    THROUGH_CHANNELS,
    Layout,
    Message,
)
from ipu_pipe.backends.processes.stage import StageEngine
from ipu_pipe.backends.processes.stopping import Stopping
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.job.blame import attribute, users_frame
from ipu_pipe.job.evaluation import Tally, test_batches
from ipu_pipe.job.position import Measured
from ipu_pipe.job.record import Job
from ipu_pipe.local.blocks import HEADS, blocks_of, one_activation
from ipu_pipe.model.cutting import Shape, crossings, pieces
from ipu_pipe.model.probe import random_modules
from ipu_pipe.model.randomness import KeyedRandomness
from ipu_pipe.update.state import export_state, optimizer_bytes

Result = TypeVar("Result")
CLOCK_TAG, EVALUATION_TAG = (1 << 30) + 1, (1 << 30) + 2  # beyond all messages of the schedule
CLOCK_ROUNDS = 8


class ProcessEngine(Engine):
    """This process's stage, and what all processes do together."""

    def __init__(self, job: Job, first_update: int) -> None:
        super().__init__(job)
        config, depth = job.config, len(job.part)
        self.layout = Layout(dist.get_rank(), depth, config.replicas)
        self.is_main = self.layout.rank == 0
        self._first_update = first_update
        self._groups = self._replica_groups()
        s, blocks = self.layout.stage, blocks_of(job.model)
        if blocks is not None:
            cut, across = blocks.pieces, blocks.crossings
        else:
            cut = pieces(job.model, job.part.begin_names(), job.example[0])
            across = crossings(cut, job.model, job.example[0])
        self._blocks, self._head = blocks, blocks.head(s) if blocks is not None else None
        behind = cut[s - 1] if blocks is not None and blocks.overlap and s else None
        keyed = KeyedRandomness(job.model, random_modules(job.model, job.example[0]), config.seed, job.device)
        self.piece = cut[s]
        self._across = across
        self.optimizer = job.optimizer
        self._engine = StageEngine(
            self.layout, self.piece, across, job.loss, job.method, job.table, job.rules, self._microbatch, job.device, keyed,
            clip=(config.clip.norm, config.clip.scope) if config.clip else None, allow_nonfinite=config.allow_nonfinite,
            microbatch=first_update * config.gradient_accumulation, deadline=config.backend.deadline,
            trace_microbatches=first_update * config.gradient_accumulation + config.log.trace_microbatches,
            replicas=self._groups[s] if config.replicas > 1 else None, channels=self._channels(),
            head=self._head, behind=behind,
        )  # fmt: skip
        own = {id(t) for piece in (self.piece, behind) if piece is not None for t in piece.tensors()}
        others = [t for piece in cut for t in piece.tensors()]
        if blocks is not None:
            blocks.forget_duplicates()
            for index, head in blocks.heads.items():
                others += [*head.parameters(), *head.buffers()] if index != str(s) else []
        _forget([t for t in others if id(t) not in own])
        self._own_losses: Dict[int, torch.Tensor] = {}  # of the first stage, by update
        self._expected = first_update
        self._evaluations = 0
        with self._named_faults():
            self._clock_offset = self._align_clocks()

    def _replica_groups(self) -> List[Any]:
        """A group for each stage: its ranks in all replicas."""
        depth, width = self.layout.depth, self.layout.width
        if width == 1:
            return []
        return [dist.new_group([replica * depth + s for replica in range(width)]) for s in range(depth)]

    def _channels(self) -> Optional[Channels]:
        """A group for each neighbour, direction and kind where GPUs talk to each other (not run: no machine had two). Not their
        timeout but the mail's deadline ends a wait: a receive may be posted long before its message."""
        if self.job.device.type != "cuda" or not gpus_talk():
            return None
        made: Dict[Link, Any] = {}
        for replica in range(self.layout.width):
            for link in links(self.layout.depth, self.job.method, THROUGH_CHANNELS):
                pair = sorted(replica * self.layout.depth + stage for stage in link[:2])
                group = dist.new_group(pair, timeout=datetime.timedelta(days=1), backend="nccl")
                if replica == self.layout.replica:
                    made[link] = group
        return made

    def _microbatch(self, m: int) -> Tuple[torch.Tensor, torch.Tensor]:
        return self.job.microbatch(m, self.layout.replica)

    @contextlib.contextmanager
    def _named_faults(self) -> Iterator[None]:
        """What goes wrong here is told with rank, stage and action, once for all processes: another rank's end as a RunFault,
        what code of the user's own raises as itself."""
        try:
            yield
        except (BadInput, RunFault):
            raise
        except Exception as error:
            text = " ".join(str(error).split())
            engine, where = self._engine, f"rank {self.layout.rank}, stage {self.layout.stage}"
            waited = engine.mail.waiting_for
            is_lost = any(word in text for word in ("onnection", "imed out", "imeout"))
            if is_lost and (waited is not None or users_frame(error) is None):
                who = "another rank" if waited is None else f"rank {waited}"
                text = f"{who} is lost, or made no progress within {engine.mail.limit.total_seconds():g} s"
                raise RunFault(f"{where}, action {engine.doing}: {text}") from error
            attribute(error, f"{where}, {engine.whereabouts}")
            raise

    def step(self, k: int) -> StepResult:
        with self._named_faults():
            # where nothing comes back to the first stage, it must not stand still for the last one's loss
            ahead = self.layout.depth if self._blocks is not None and self._engine.is_first else 0
            until = min(k + ahead + 1, self.job.schedule.stretch(k)[1])
            if self._engine.is_first:
                self._expect_losses(until)
            while self._engine.update < until:
                self._report_losses(self._engine.update, self._engine.step(self._engine.update))
            return self._result(k)

    @property
    def _reporting(self) -> List[int]:
        """The stages that have a loss."""
        if self._blocks is None:
            return [self.layout.depth - 1]
        return [s for s in range(self.layout.depth) if s == self.layout.depth - 1 or self._blocks.head(s) is not None]

    def _expect_losses(self, until: int) -> None:
        shape = (Shape((2,), torch.float64, False),)
        for source in self._reporting:
            if source:
                self._engine.mail.expect(source, [(Message(RESULT, k), shape) for k in range(self._expected, until)])
        self._expected = max(self._expected, until)

    def _report_losses(self, k: int, found: Optional[Tuple[float, Optional[float]]]) -> None:
        """Send a stage's loss of update k to the first one; it keeps its own."""
        if found is None:
            return
        value = torch.tensor([found[0], float("nan") if found[1] is None else found[1]], dtype=torch.float64)
        if self._engine.is_first:
            self._own_losses[k] = value
        else:
            self._engine.mail.send(0, Message(RESULT, k), [value])

    def _result(self, k: int) -> StepResult:
        if not self._engine.is_first:
            return StepResult(float("nan"), None, self.job.batch)
        rows = [
            self._own_losses.pop(k) if s == 0 else self._engine.mail.receive(s, Message(RESULT, k))[0]
            for s in self._reporting
        ]
        found = torch.stack(rows)
        if self.layout.width > 1:
            self._wait(dist.all_reduce(found, group=self._groups[0], async_op=True))
            found /= self.layout.width
        blocks = tuple((loss, None if share != share else share) for loss, share in found.tolist())
        return StepResult(*blocks[-1], self.job.batch, blocks if len(blocks) > 1 else ())

    def _wait(self, work: Any, rank: Optional[int] = None) -> None:
        self._engine.mail.wait(work, rank)

    def _meet(self) -> None:
        """Wait until all processes are here; what follows has no deadline of its own."""
        self._wait(dist.all_reduce(torch.zeros(1), async_op=True))

    # --- evaluation

    def evaluate(self) -> List[Measured]:
        """The test set through the pipeline of the first replica, forwards only."""
        self._engine.doing = "evaluation"
        with self._named_faults():
            self._engine.weights.rest()
            modules = [*self.piece.modules(), *(self._head.modules() if self._head is not None else ())]
            modes = [(module, module.training) for module in modules]
            for module in modules:
                module.training = False
            sums = torch.zeros(self.layout.depth, 5, dtype=torch.float64)
            try:
                with torch.no_grad():
                    if self.layout.replica == 0:
                        sums[self.layout.stage] = self._evaluate()
            finally:
                for module, mode in modes:
                    module.training = mode
            if self.layout.width > 1:
                self._wait_for_evaluation()
            self._wait(dist.all_reduce(sums, async_op=True))
            return [Tally(self.job.loss, row).measured for row in sums[self._reporting]]

    def _wait_for_evaluation(self) -> None:
        """Of other replicas, which have nothing to do meanwhile: as long as the first one gets on."""
        self._evaluations += 1
        store, key = dist.distributed_c10d._get_default_store(), f"ipu_pipe/evaluation-{self._evaluations}"
        if self.layout.replica == 0:
            store.add(f"{key}/done", 1)
            return
        seen, since, limit = -1, time.monotonic(), self._engine.mail.limit.total_seconds()
        where = f"rank {self.layout.rank}, stage {self.layout.stage}, action {self._engine.doing}"
        try:
            while answer_within(limit, lambda: store.add(f"{key}/done", 0)) < self.layout.depth:
                batches = answer_within(limit, lambda: store.add("ipu_pipe/evaluated", 0))
                if batches != seen:
                    seen, since = batches, time.monotonic()
                elif time.monotonic() - since > limit:
                    raise TimeoutError
                Stopping.check()
                time.sleep(0.01)
        except TimeoutError as error:
            raise RunFault(f"{where}: the first replica is lost, or made no progress within {limit:g} s") from error

    def _evaluate(self) -> torch.Tensor:
        tally = Tally(self.job.loss)
        s = self.layout.stage
        for x, y in test_batches(self.job):
            value: Any = x
            if not self._engine.is_first:
                value = self._across[s - 1].unflatten(
                    [self._take(shape.dtype) for shape in self._across[s - 1].tensors]
                )
            output = self.piece(value)
            if not self._engine.is_last:
                for tensor in self._across[s].flatten(output):
                    self._give(tensor)
            if self._head is not None:
                output = self._head(one_activation(output))
            if s in self._reporting:
                tally.add(output, y, len(x))
            if self.layout.width > 1:
                dist.distributed_c10d._get_default_store().add("ipu_pipe/evaluated", 1)
        return tally.sums

    def _give(self, tensor: torch.Tensor) -> None:
        """Send a tensor whose shape the receiver does not know."""
        header = torch.tensor([tensor.dim(), *tensor.shape, *[0] * (8 - tensor.dim())])
        target = self.layout.rank_of(self.layout.stage + 1)
        for value in (header, tensor.contiguous().cpu()):
            self._wait(dist.isend(value, target, tag=EVALUATION_TAG), target)

    def _take(self, dtype: torch.dtype) -> torch.Tensor:
        header = torch.zeros(9, dtype=torch.int64)
        source = self.layout.rank_of(self.layout.stage - 1)
        self._wait(dist.irecv(header, source, tag=EVALUATION_TAG), source)
        shape = header[1 : 1 + int(header[0])].tolist()
        tensor = torch.empty(shape, dtype=dtype)
        self._wait(dist.irecv(tensor, source, tag=EVALUATION_TAG), source)
        return tensor.to(self.job.device)

    # --- state

    def _own_names(self) -> Dict[Any, str]:
        own = {id(p) for p in [*self.piece.tensors(), *(self._head.parameters() if self._head is not None else ())]}
        return {p: name for p, name in self.names.items() if id(p) in own}

    def state(self) -> Optional[State]:
        self._engine.doing = "checkpoint"
        with self._named_faults():
            self._engine.weights.rest()
            tensors, plain = export_state(self.optimizer, self._own_names())
            model = {key: value.detach().cpu() for key, value in self.piece.state().items()}
            if self._head is not None:
                head = f"{HEADS}.{self.layout.stage}"
                model.update({f"{head}.{key}": value.detach().cpu() for key, value in self._head.state_dict().items()})
            gathered = self._gather((model, {k: v.cpu() for k, v in tensors.items()}, plain))
        if gathered is None:
            return None
        model, tensors, plain = {}, {}, {}
        for stage in gathered[: self.layout.depth]:
            model.update(stage[0])
            tensors.update(stage[1])
            plain.update(stage[2])
        whole = self.job.model.state_dict()  # what no piece uses is here as it was
        return State({name: model.get(name, value) for name, value in whole.items()}, tensors, plain)

    def _gather(self, value: Any) -> Optional[List[Any]]:
        self._meet()
        gathered: Optional[List[Any]] = [None] * dist.get_world_size() if self.is_main else None
        dist.gather_object(value, gathered, dst=0)
        return gathered

    def report(self) -> Optional[Report]:
        self._engine.doing = "report"
        with self._named_faults():
            return self._report()

    def _report(self) -> Optional[Report]:
        held = sum(
            optimizer_bytes(self.optimizer, self.layout.depth)
        )  # of the layer behind, too, where it is shared
        timeline = self._engine.timeline
        events = [
            event._replace(start_ns=event.start_ns + self._clock_offset, end_ns=event.end_ns + self._clock_offset)
            for event in timeline.events
        ]
        gathered = self._gather((held, self._engine.weights.peak_bytes, timeline.sent, events, timeline.shared))
        if gathered is None:
            return None
        own = gathered[: self.layout.depth]
        links = {(src, dst): count for src, (_, _, sent, *_) in enumerate(own) for dst, count in sent.items()}
        shared = {(src, dst): count for src, (*_, sent) in enumerate(own) for dst, count in sent.items()}
        everything = [event for _, _, _, events, _ in gathered for event in events]
        done = (self._engine.update - self._first_update) * self.job.config.gradient_accumulation
        return Report([held for held, *_ in own], [peak for _, peak, *_ in own], links, everything, done, shared)

    def _align_clocks(self) -> int:
        """What to add to this rank's clock to get rank 0's: from the round trip that took least (Cristian's algorithm)."""
        mine = torch.zeros(1, dtype=torch.int64)
        offset = 0
        for rank in range(1, dist.get_world_size()):
            best: Optional[int] = None
            for _ in range(CLOCK_ROUNDS):
                if self.is_main:
                    dist.recv(mine, src=rank, tag=CLOCK_TAG)
                    dist.send(torch.tensor([time.perf_counter_ns()]), dst=rank, tag=CLOCK_TAG)
                elif self.layout.rank == rank:
                    begun = time.perf_counter_ns()
                    dist.send(mine, dst=0, tag=CLOCK_TAG)
                    theirs = torch.zeros(1, dtype=torch.int64)
                    dist.recv(theirs, src=0, tag=CLOCK_TAG)
                    ended = time.perf_counter_ns()
                    if best is None or ended - begun < best:
                        best, offset = ended - begun, int(theirs) - (begun + ended) // 2
        return offset

    def close(self) -> None:
        self._engine.doing = "end"
        with self._named_faults():
            self._engine.close()
        self.abort()

    def abort(self) -> None:
        self._engine.release()
        if self._blocks is not None:
            self._blocks.release()


def _forget(tensors: Iterable[torch.Tensor]) -> None:
    """Free what other processes hold; shapes and sizes stay to be read, of the values nothing (not a number)."""
    for tensor in tensors:
        nothing = float("nan") if tensor.is_floating_point() else 0
        tensor.data = torch.full((), nothing, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


