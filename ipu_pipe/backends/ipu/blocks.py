"""Decoupled local-parallel training: each block is a PopTorch training model with its own process
and its own IPU.

    rank 0   block 0 of update 0 | update 1 | update 2 | ...      each call takes the microbatches of a whole update
                 \\ activations through the hosts' memory (gloo)
    rank 1        block 1 of update 0 | update 1 | ...

No block waits for a later one, each block accumulates as many microbatches as its config says, and
nothing is flushed. PopTorch's own pipeline cannot do this. The price is that activations leave the
IPU-Links. Not run on hardware.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import replace
from typing import Any, Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist

from ipu_pipe.backends.interface import CheckpointState, Report, StepResult
from ipu_pipe.backends.ipu.engine import IpuEngine, Result, average_outputs, make_result
from ipu_pipe.backends.ipu.executors import Executors
from ipu_pipe.backends.ipu.feed import convert_input, convert_label
from ipu_pipe.backends.ipu.optimizer import count_state_bytes
from ipu_pipe.backends.ipu.placement import Placement
from ipu_pipe.backends.ipu.profile import CallTimes
from ipu_pipe.errors import BadInput, Divergence, RunFault, summarize
from ipu_pipe.launcher import read_launch
from ipu_pipe.local.blocks import get_blocks
from ipu_pipe.refusals import name_key
from ipu_pipe.replay.run import Run
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.trace.events import Counters, Events, concatenate_counters, concatenate_events

# sends in flight to the next block
SENDS_IN_FLIGHT = 4
RESULT_TAG = 1 << 28
EVALUATION_TAG = 1 << 29


@contextlib.contextmanager
def describe_block_errors(rank: int, doing: str) -> Iterator[None]:
    """Add rank and block to a fault. A device error ends the run, because the other blocks cannot
    go back.
    """
    import poptorch

    subject = f"rank {rank}, block {rank}"
    try:
        yield
    except BadInput:
        raise
    except poptorch.RecoverableError as error:
        description = f"device error ({error.recovery_action}): {error.message}"
        raise RunFault(
            f"{subject}: {description}: do what it asks for, then go on with --resume"
        ) from error
    except Divergence as error:
        raise Divergence(f"{subject}: {error.args[0]}", error.args[1]) from error
    except RunFault as error:
        raise RunFault(f"{subject}: {error}") from error
    # torch.distributed raises this error
    except RuntimeError as error:
        raise RunFault(
            f"{subject}: {doing}: another rank is lost: {summarize(error)[:200]}"
        ) from error


class Messages:
    """The asynchronous sends of this rank, at most `max_in_flight` at once to bound their memory.

    `sent`: bytes and number of messages with activations in training.
    """

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()
        self.sent = [0, 0]

    def post(self, tensor: torch.Tensor, target: int, tag: int) -> None:
        """Send without waiting, unless too many sends are in flight."""
        # the tensor is kept with its request, because gloo reads its memory until it is sent
        self._sending.append((dist.isend(tensor, target, tag=tag), tensor))
        self.flush(self._max_in_flight)

    def flush(self, allowed: int = 0) -> None:
        """Wait until at most `allowed` sends are in flight."""
        while len(self._sending) > allowed:
            self._sending.popleft()[0].wait()


class BlockEngine(IpuEngine):
    """Train this process's block, which is updated once per several updates (`block_accumulation`)
    of the run.

    A call of `give` has as many updates as all blocks make whole steps of.
    """

    def __init__(self, run: Run, first_update: int, table: VersionTable) -> None:
        rank = dist.get_rank()
        # this process has one IPU, its number 0
        super().__init__(run, Placement((0,)), CallTimes(run.trace, rank, rank))
        self.depth = len(run.partition)
        self.has_results = self.is_main
        self._is_last = rank == self.depth - 1
        blocks = get_blocks(run.model)
        assert blocks is not None
        if self._world != self.depth:
            raise BadInput(
                f"stages: {self.depth} blocks, each in a process of its own: start as many, not "
                f"{self._world}"
            )
        several = [i for i, crossing in enumerate(blocks.crossings) if len(crossing.tensors) != 1]
        if several:
            raise BadInput(
                f"stages: several tensors cross to block {several[0] + 1}: must be one, or "
                f"{name_key('backend.ipu.local')} fused"
            )
        self._loss_count = self.depth
        self._losses_here = slice(rank, rank + 1)
        block_accumulation = run.rules.batches_per_step
        self._block_updates = block_accumulation[rank]
        # evaluations, checkpoints and the end come after multiples of it
        self.updates_per_call = int(np.lcm.reduce(block_accumulation))
        self._first = first_update
        self._accumulate = self.options.gradient_accumulation
        self._choose_options(rank)
        # update -> (loss, right labels, counted labels) of this block
        self._results: dict[int, torch.Tensor] = {}
        # type of the activations
        self._type = torch.float16 if self.options.precision.startswith("16") else torch.float32
        # a call sends a message for each of its updates
        self.messages = Messages(SENDS_IN_FLIGHT * (1 + self._block_updates))
        # rank 0 is at most so many results late, so that no block ever waits until it receives one
        self._late_results = self.depth + self.updates_per_call
        self._result_messages = Messages(self._late_results + self.updates_per_call)
        # on rank 0, the results that were received and not taken
        self._received_before = first_update
        self._received: dict[int, StepResult] = {}
        # an input microbatch of this block
        self.example = run.example[0]
        # only the first block sees the data's inputs
        if rank:
            self.example = torch.zeros(blocks.crossings[rank - 1].tensors[0].shape)
        self._read_host(first_update)
        self._make_executors(self.example, rank)

    def _choose_options(self, rank: int) -> None:
        """Take this block's share of the options: its IPU and memory, and the microbatches of its
        updates.
        """
        ipu = self.ipu
        local = read_launch().local_rank
        # without ids each process of a machine takes the IPU of its local rank
        self._ipu_id = ipu.ipu_ids[rank] if ipu.ipu_ids else rank if local is None else local
        shares = ipu.available_memory_proportion
        if isinstance(shares, list):
            ipu = ipu.model_copy(update={"available_memory_proportion": shares[rank]})
        microbatches = self._accumulate * self._block_updates
        self.options = replace(self.options, ipu=ipu, gradient_accumulation=microbatches)

    def _run(self, doing: str, work: Callable[[Executors], Result]) -> Result:
        assert self.executors is not None, "the engine is closed"
        with describe_block_errors(self._rank, doing):
            return work(self.executors)

    def _receive(self, microbatches: int, tag: int) -> torch.Tensor:
        """Receive the previous block's activations of that many microbatches."""
        activations = torch.empty(
            (microbatches * self.example.shape[0], *self.example.shape[1:]), dtype=self._type
        )
        dist.recv(activations, self._rank - 1, tag=tag)
        return activations

    def _send(self, activations: torch.Tensor, tag: int) -> None:
        self.messages.post(activations.to(self._type).contiguous(), self._rank + 1, tag)

    # ---- training

    def give(self, k: int, cut: float) -> None:
        """Train this block for the updates of the call that begins with update k; do nothing at the
        call's other updates.
        """
        if k % self.updates_per_call:
            return
        self.newest_model = None
        for first in range(k, k + self.updates_per_call, self._block_updates):
            updates = range(first, first + self._block_updates)
            self._run(f"update {k}", lambda executors: self._train(executors, updates))
        self._done = k + self.updates_per_call
        self._receive_results(self._done - self._late_results)

    def take(self, k: int) -> StepResult:
        if not self.is_main:
            return StepResult(float("nan"), None, self.run.samples)
        self._receive_results(k + 1)
        return self._received.pop(k)

    def _receive_results(self, end: int) -> None:
        """Receive on rank 0 the results of the updates before `end` from all blocks."""
        for k in range(self._received_before, end) if self.is_main else ():
            rows = [self._results.pop(k)]
            with describe_block_errors(self._rank, f"update {k}"):
                for source in range(1, self.depth):
                    rows.append(torch.empty(3, dtype=torch.float64))
                    dist.recv(rows[-1], source, tag=RESULT_TAG + k)
            self._received[k] = make_result(torch.stack(rows), self.run.samples)
            self._received_before = k + 1

    def _train(self, executors: Executors, updates: range) -> None:
        """Update this block once for `updates` in one call; send its activations to the next block,
        and its results to rank 0.
        """
        microbatches = range(updates.start * self._accumulate, updates.stop * self._accumulate)
        inputs, labels = zip(*map(self.run.batches.load, microbatches))
        if self._rank:
            inputs = tuple(self._receive(self._accumulate, k + 1) for k in updates)
        x = convert_input(torch.cat(inputs), self.options.precision)
        y = convert_label(torch.cat(labels))
        _, *outputs = executors.call(updates, updates[-1], x, y)
        if not self._is_last:
            sent = self.messages.sent
            # the next block may be updated more often, so it gets the activations of each update by
            # themselves
            for k, part in zip(updates, outputs.pop().chunk(self._block_updates)):
                sent[0], sent[1] = sent[0] + part.numel() * part.element_size(), sent[1] + 1
                self._send(part, k + 1)
        for k, (row,) in zip(updates, average_outputs(len(updates), 1, *outputs)):
            # the loop sees the results of rank 0 alone
            self.options.require_finite(k, row[:1].tolist())
            if self.is_main:
                self._results[k] = row
            else:
                self._result_messages.post(row.contiguous(), 0, RESULT_TAG + k)

    # ---- evaluation, state, report

    def _infer(self, executors: Executors, x: torch.Tensor, number: int) -> list[Any]:
        tag = EVALUATION_TAG + number
        if self._rank:
            x = self._receive(executors.rows // self.options.micro_batch_size, tag)
        outputs = executors.infer(x)
        if not self._is_last:
            # activations are the last output
            self._send(outputs.pop(), tag)
        return outputs

    def _sum_outputs(self, *arguments: Any) -> torch.Tensor:
        sums = super()._sum_outputs(*arguments)
        self._finish_sends()
        return sums

    def _finish_sends(self) -> None:
        """Wait until all messages are sent; rank 0 has taken all results."""
        self.messages.flush()
        self._result_messages.flush()

    def copy_to_host(self) -> None:
        with describe_block_errors(self._rank, "state"):
            self._finish_sends()
        super().copy_to_host()

    def collect_state(self) -> CheckpointState | None:
        state = super().collect_state()
        assert state is not None
        gathered = self._gather("checkpoint", tuple(state[:3]))
        if gathered is None:
            return None
        parts = [{k: v for part in parts for k, v in part.items()} for parts in zip(*gathered)]
        model, tensors, plain = parts
        return CheckpointState({**self.run.model.state_dict(), **model}, tensors, plain)

    def _gather(self, doing: str, value: Any) -> list[Any] | None:
        """Return the values of all blocks on rank 0, None on others."""
        gathered: list[Any] | None = [None] * self.depth if self.is_main else None
        with describe_block_errors(self._rank, doing):
            dist.gather_object(value, gathered, dst=0)
        return gathered

    def report(self) -> Report | None:
        timeline = self._timeline
        traced = Events.from_rows(timeline.events), Counters.from_rows(timeline.counters)
        size = count_state_bytes(self._export_state()[0], self.run.partition)[self._rank]
        gathered = self._gather("report", (size, self.messages.sent, timeline.describe(), *traced))
        if gathered is None:
            return None
        optimizer_bytes, sent, measured, events, counters = zip(*gathered)
        figures = [{"block": s, **of_block} for s, of_block in enumerate(measured)]
        return Report(
            list(optimizer_bytes),
            [0] * self.depth,
            {(s, s + 1): (int(size), int(count)) for s, (size, count) in enumerate(sent[:-1])},
            concatenate_events(events),
            microbatches=(self._done - self._first) * self._accumulate,
            counters=concatenate_counters(counters),
            files={"ipu.json": {"execution": "decoupled", "blocks": figures}},
        )
