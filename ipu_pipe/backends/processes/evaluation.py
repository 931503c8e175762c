"""The test set through the pipeline of the first replica, forwards only; the other replicas wait."""

from __future__ import annotations

import contextlib
import time
from typing import Any, List

import torch
import torch.distributed as dist

from ipu_pipe.backends.processes.assembling import zeros_instead
from ipu_pipe.backends.processes.joining import answer_within
from ipu_pipe.backends.processes.layout import Layout
from ipu_pipe.backends.processes.losses import DRAW_ALIKE
from ipu_pipe.backends.processes.player import RowPlayer
from ipu_pipe.backends.processes.stopping import Stopping
from ipu_pipe.data.batches import compute_checksum
from ipu_pipe.errors import RunFault
from ipu_pipe.job.evaluation import Tally, test_batches
from ipu_pipe.job.position import Measured
from ipu_pipe.job.record import Job
from ipu_pipe.local.blocks import get_activation
from ipu_pipe.model.asking import labels_of
from ipu_pipe.model.nests import sample_count
from ipu_pipe.model.restoring import modes_restored

EVALUATION_TAG = (1 << 30) + 2  # beyond all messages of the schedule
COUNTED = "ipu_pipe/evaluated"  # batches that any stage has done, in the store


class Evaluation:
    """Evaluates a job's stages, of which one is `player`'s; those `with_loss` tell theirs. `forgotten`: what stands here for the
    weights of the others."""

    def __init__(self, job: Job, player: RowPlayer, with_loss: List[int], forgotten: List[torch.Tensor]) -> None:
        self._job, self._player, self._place, self._with_loss = job, player, player.place, with_loss
        self._forgotten = forgotten
        self._count = 0

    def __call__(self) -> List[Measured]:
        """By stage with a loss, the same on every rank."""
        layout = self._place.layout
        self._player.rest()
        # of each stage, last the checksum of the test set that it has read
        sums = torch.zeros(layout.depth, len(Tally.of(self._job).sums) + 1, dtype=torch.float64)
        modules = [module for module in (self._place.piece, self._place.head) if module is not None]
        with torch.no_grad(), modes_restored(*modules):
            for module in modules:
                module.eval()
            if layout.replica == 0:
                sums[layout.stage] = self._tallied()
        if layout.width > 1:
            self._count += 1
            wait_for_first_replica(layout, self._player, self._count)
        self._player.mail.wait(dist.all_reduce(sums, async_op=True))
        reading = [0, *self._with_loss]  # stages between them use shapes alone
        if len(set(sums[reading, -1].tolist())) > 1:
            raise RunFault(f"data: {self._job.data_name}: evaluation: the ranks read different test sets: {DRAW_ALIKE}")
        return [Tally.of(self._job, row[:-1]).measured for row in sums[self._with_loss]]

    def _tallied(self) -> torch.Tensor:
        tally, place, s, read = Tally.of(self._job), self._place, self._place.layout.stage, 0
        for x, y in test_batches(self._job):
            value: Any = x
            read = compute_checksum((x, labels_of(y)), read)
            cut = place.piece.cut
            with contextlib.nullcontext() if cut.is_prepared(x, training=False) else zeros_instead(self._forgotten):
                crossings = cut.prepare(x, training=False)
            if not place.is_first:
                enter = crossings[s - 1]
                value = enter.unflatten([self._take(shape.dtype) for shape in enter.tensors])
            output = place.piece(value)
            if not place.is_last:
                for tensor in crossings[s].flatten(output):
                    self._give(tensor)
            if place.head is not None:
                output = place.head(get_activation(output))
            if s in self._with_loss:
                tally.add(output, y, sample_count(x))
            if place.layout.width > 1:
                store, limit = dist.distributed_c10d._get_default_store(), self._player.mail.limit.total_seconds()
                answer_within(limit, lambda: store.add(COUNTED, 1))
        return torch.cat([tally.sums, torch.tensor([read], dtype=torch.float64)])

    def _give(self, tensor: torch.Tensor) -> None:
        """Send a tensor whose shape the receiver does not know."""
        header = torch.tensor([tensor.dim(), *tensor.shape, *[0] * (8 - tensor.dim())])
        target = self._place.layout.rank_of(self._place.layout.stage + 1)
        for value in (header, tensor.contiguous().cpu()):
            self._player.mail.wait(dist.isend(value, target, tag=EVALUATION_TAG), target)

    def _take(self, dtype: torch.dtype) -> torch.Tensor:
        header = torch.zeros(9, dtype=torch.int64)
        source = self._place.layout.rank_of(self._place.layout.stage - 1)
        self._player.mail.wait(dist.irecv(header, source, tag=EVALUATION_TAG), source)
        shape = header[1 : 1 + int(header[0])].tolist()
        tensor = torch.empty(shape, dtype=dtype)
        self._player.mail.wait(dist.irecv(tensor, source, tag=EVALUATION_TAG), source)
        return tensor.to(self._place.device)


def wait_for_first_replica(layout: Layout, player: RowPlayer, number: int) -> None:
    """Until the first replica is done with evaluation `number`. Others have nothing to do meanwhile: they wait as long as it gets
    on."""
    store, done = dist.distributed_c10d._get_default_store(), f"ipu_pipe/evaluation-{number}/done"
    if layout.replica == 0:
        store.add(done, 1)
        return
    seen, since, limit = -1, time.monotonic(), player.mail.limit.total_seconds()
    where = f"rank {layout.rank}, stage {layout.stage}, action {player.doing}"
    try:
        while answer_within(limit, lambda: store.add(done, 0)) < layout.depth:
            batches = answer_within(limit, lambda: store.add(COUNTED, 0))
            if batches != seen:
                seen, since = batches, time.monotonic()
            elif time.monotonic() - since > limit:
                raise TimeoutError
            Stopping.check()
            time.sleep(0.01)
    except TimeoutError as error:
        raise RunFault(f"{where}: the first replica is lost, or made no progress within {limit:g} s") from error
