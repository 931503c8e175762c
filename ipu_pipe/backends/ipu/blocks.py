"""Local-parallel training decoupled: each block a PopTorch training model in a process of its own on an IPU of its own.

    rank 0   block 0 of update 0 | update 1 | update 2 | ...      every call: a whole update's microbatches
                 \\ activations through the hosts' memory (gloo)
    rank 1        block 1 of update 0 | update 1 | ...

No block waits for a later one, none accumulates more microbatches than it is told to, and nothing is flushed: what PopTorch's
own pipeline cannot do. The price is that activations leave the IPU-Links. Not run on hardware.
"""

from __future__ import annotations

import datetime
from typing import Any, Dict, List, Optional

import torch
import torch.distributed as dist

from ipu_pipe.backends.interface import CheckpointState, Engine, Report, StepResult
from ipu_pipe.backends.ipu import profile as ipu_profile
from ipu_pipe.backends.ipu.block import Block
from ipu_pipe.backends.ipu.faults import check_finite, check_hardware, told_of_block
from ipu_pipe.backends.ipu.optimizer import state_bytes
from ipu_pipe.config.schema import BackendConfig
from ipu_pipe.errors import BadInput
from ipu_pipe.job.evaluation import EvaluationResult, Tally
from ipu_pipe.job.record import Job
from ipu_pipe.local.blocks import get_blocks
from ipu_pipe.trace.events import Counters, Events, concatenate_counters, concatenate_events

COMPILATION = 3600.0  # seconds that a process may have to wait for another's compiler
RESULT_TAG = 1 << 28


def start(backend: BackendConfig) -> None:
    """Join the processes that torchrun started."""
    if not dist.is_initialized():
        patience = datetime.timedelta(seconds=max(backend.deadline, COMPILATION))
        dist.init_process_group("gloo", timeout=patience)


class BlockEngine(Engine):
    """This process's block. Rank 0 runs ahead as far as the next evaluation or checkpoint, so that no block stands still."""

    def __init__(self, job: Job, first_update: int) -> None:
        super().__init__(job)
        self.rank, self.depth = dist.get_rank(), len(job.part)
        self.is_main = self.rank == 0
        self._check()
        every = job.config.method_settings().get("block_accumulation") or [1] * self.depth
        self._ahead = self.depth + max(every)
        self._first = self._done = first_update
        self._results: Dict[int, torch.Tensor] = {}  # of updates that this block has done: loss, right, counted
        self._timeline = ipu_profile.Timeline(job.traced, self.rank, self.rank)
        self.block = Block(job, self.rank, first_update, every[self.rank], self._timeline)

    def _check(self) -> None:
        """Refuse (BadInput) where processes, crossings or IPUs do not fit."""
        if dist.get_world_size() != self.depth:
            raise BadInput(
                f"stages: {self.depth} blocks, each in a process of its own: start as many, not {dist.get_world_size()}"
            )
        blocks = get_blocks(self.job.model)
        assert blocks is not None
        wide = [i for i, crossing in enumerate(blocks.crossings) if len(crossing.tensors) != 1]
        if wide:
            raise BadInput(
                f"stages: more than one tensor crosses to block {wide[0] + 1}: with backend.ipu.local decoupled it "
                "must be one, or set fused"
            )
        check_hardware(self.job.config.ipu, 1)

    # --- training

    def step(self, k: int) -> StepResult:
        with told_of_block(self.rank, f"update {k}"):
            until = k + 1
            if self.is_main:
                until = min(k + 1 + self._ahead, self.job.schedule.stretch(k)[1])
            while self._done < until:
                updates = range(self._done, self._done + self.block.every)
                self._note(updates, self.block.train(updates))
                self._done = updates.stop
            return self._result(k)

    def _note(self, updates: range, found: List[torch.Tensor]) -> None:
        """Keep, or send to rank 0, loss and right answers of each update."""
        losses = found[1].double().reshape(len(updates), -1).mean(dim=1)
        right = torch.full((len(updates), 2), float("nan"), dtype=torch.float64)
        if len(found) > 2:
            right = found[2].double().reshape(len(updates), -1, 2).sum(dim=1)
        for i, k in enumerate(updates):
            row = torch.cat([losses[i : i + 1], right[i]])
            check_finite(self.job.config, k, row[:1].tolist())
            if self.is_main:
                self._results[k] = row
            else:
                self.block.messages.post(row, 0, RESULT_TAG + k)

    def _result(self, k: int) -> StepResult:
        samples = self.job.batch
        if not self.is_main:
            return StepResult(float("nan"), None, samples)
        rows = [self._results.pop(k)]
        for source in range(1, self.depth):
            rows.append(torch.empty(3, dtype=torch.float64))
            dist.recv(rows[-1], source, tag=RESULT_TAG + k)
        blocks = tuple(
            (loss, None if counted != counted else right / max(counted, 1))
            for loss, right, counted in (row.tolist() for row in rows)
        )
        return StepResult(*blocks[-1], samples, blocks if len(blocks) > 1 else ())

    # --- evaluation

    def evaluate(self) -> List[EvaluationResult]:
        """The test set through all blocks, on the same IPUs."""
        with told_of_block(self.rank, "evaluation"):
            own = self.block.evaluate()
            sums = torch.zeros(self.depth, len(own), dtype=torch.float64)
            sums[self.rank] = own
            self.block.messages.flush()
            dist.all_reduce(sums)
            return [Tally.of(self.job, row).evaluation for row in sums]

    # --- state

    def state(self) -> Optional[CheckpointState]:
        with told_of_block(self.rank, "checkpoint"):
            self.block.messages.flush()
            gathered = self._gather(self.block.state())
        if gathered is None:
            return None
        model, tensors, plain = dict(self.job.model.state_dict()), {}, {}
        for part in gathered:
            model.update(part[0])
            tensors.update(part[1])
            plain.update(part[2])
        return CheckpointState(model, tensors, plain)

    def _gather(self, value: Any) -> Optional[List[Any]]:
        gathered: Optional[List[Any]] = [None] * self.depth if self.is_main else None
        dist.gather_object(value, gathered, dst=0)
        return gathered

    def report(self) -> Optional[Report]:
        with told_of_block(self.rank, "report"):
            own = (self._optimizer_bytes, self.block.messages.sent, Events.from_rows(self._timeline.events))
            gathered = self._gather(
                (*own, Counters.from_rows(self._timeline.counters), self._timeline.latency, self._timeline.cycles)
            )
        if gathered is None:
            return None
        links = {(s, s + 1): (int(part[1][0]), int(part[1][1])) for s, part in enumerate(gathered[:-1])}
        blocks = [
            {"block": s, "latency_seconds": p[4] or None, "cycles_of_the_last_call": p[5]}
            for s, p in enumerate(gathered)
        ]
        return Report(
            [part[0] for part in gathered], [0] * self.depth, links, concatenate_events([part[2] for part in gathered]),
            microbatches=(self._done - self._first) * self.job.config.gradient_accumulation,
            counters=concatenate_counters([part[3] for part in gathered]),
            files={"ipu.json": {"execution": "decoupled", "blocks": blocks}},
        )  # fmt: skip

    def close(self) -> None:
        """The newest weights of this block in the user's model."""
        with told_of_block(self.rank, "end"):
            self.block.messages.flush()
            model, tensors, _ = self.block.state()
            self._optimizer_bytes = state_bytes(tensors, self.job.part)[self.rank]
            mine = self.job.model.state_dict()
            with torch.no_grad():
                for name, value in model.items():
                    mine[name].copy_(value)
        self.abort()

    def abort(self) -> None:
        self.block.executors.drop()
        self.release_blocks()
