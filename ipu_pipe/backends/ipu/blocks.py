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
import time
from collections import deque
from dataclasses import replace
from typing import Any, Iterator

import numpy as np
import torch
import torch.distributed as dist

from ipu_pipe.backends.interface import CheckpointState, Engine, Report, StepResult
from ipu_pipe.backends.ipu.executors import Executors
from ipu_pipe.backends.ipu.feed import convert_input, convert_label, split_into_calls, trim_output
from ipu_pipe.backends.ipu.optimizer import count_state_bytes, export_state, import_state
from ipu_pipe.backends.ipu.options import IpuOptions, make_options
from ipu_pipe.backends.ipu.placement import Placement
from ipu_pipe.backends.ipu.profile import CallTimes
from ipu_pipe.backends.ipu.wrapping import wrap
from ipu_pipe.errors import BadInput, Divergence, RunFault, summarize
from ipu_pipe.job.evaluation import BatchReader, EvaluationResult, Metrics, Tally, evaluate_sums
from ipu_pipe.launcher import read_launch
from ipu_pipe.local.blocks import get_blocks
from ipu_pipe.model.randomness import derive_seed
from ipu_pipe.model.restoring import load_state
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
        self._sending.append((dist.isend(tensor, target, tag=tag), tensor))
        self.flush(self._max_in_flight)

    def flush(self, allowed: int = 0) -> None:
        """Wait until at most `allowed` sends are in flight."""
        while len(self._sending) > allowed:
            self._sending.popleft()[0].wait()


class BlockEngine(Engine):
    """Train this process's block, which is updated once per several updates (`block_accumulation`)
    of the run.

    A call of `give` has as many updates as all blocks make whole steps of.
    """

    def __init__(self, run: Run, first_update: int, table: VersionTable) -> None:
        super().__init__(run)
        self.options: IpuOptions = run.options
        self.rank = dist.get_rank()
        self.depth = len(run.partition)
        self.is_main = self.has_results = self.rank == 0
        self._is_last = self.rank == self.depth - 1
        blocks = get_blocks(run.model)
        assert blocks is not None
        world = dist.get_world_size()
        if world != self.depth:
            raise BadInput(
                f"stages: {self.depth} blocks, each in a process of its own: start as many, not "
                f"{world}"
            )
        several = [i for i, crossing in enumerate(blocks.crossings) if len(crossing.tensors) != 1]
        if several:
            raise BadInput(
                f"stages: several tensors cross to block {several[0] + 1}: must be one, or "
                f"{name_key('backend.ipu.local')} fused"
            )
        block_accumulation = run.rules.batches_per_step
        self._block_updates = block_accumulation[self.rank]
        # evaluations, checkpoints and the end come after multiples of it
        self.updates_per_call = int(np.lcm.reduce(block_accumulation))
        self._first = self._done = first_update
        # update -> (loss, right labels, counted labels) of this block
        self._results: dict[int, torch.Tensor] = {}
        self._timeline = CallTimes(run.trace, self.rank, self.rank)
        # type of the activations
        self._type = torch.float16 if self.options.precision.startswith("16") else torch.float32
        self.messages = Messages(SENDS_IN_FLIGHT * (1 + self._block_updates))
        # rank 0 is at most so many results late, so that no block ever waits until it receives one
        self._late_results = self.depth + self.updates_per_call
        self._result_messages = Messages(self._late_results + self.updates_per_call)
        # on rank 0, the results that were received and not taken
        self._received_before = first_update
        self._received: dict[int, StepResult] = {}
        # an input microbatch of this block
        self.example = run.example[0]
        if self.rank:
            self.example = torch.zeros(blocks.crossings[self.rank - 1].tensors[0].shape)
        wrapped = wrap(
            run.model, run.loss, run.partition, self.options.precision, self.options.ipu, self.rank
        )
        saved = import_state(run.optimizer, self.options.ipu)
        self.executors = Executors(
            run, wrapped, self._make_options, self.example, saved, first_update, self._timeline
        )

    def _make_options(self, training: bool) -> Any:
        options = self.options
        ids = options.ipu.ipu_ids
        local = read_launch().local_rank
        shares = options.ipu.available_memory_proportion
        # shares has one entry per block
        if isinstance(shares, list):
            ipu = options.ipu.model_copy(update={"available_memory_proportion": shares[self.rank]})
            options = replace(options, ipu=ipu)
        accumulation = options.gradient_accumulation * self._block_updates
        options = replace(options, gradient_accumulation=accumulation)
        ipu_id = ids[self.rank] if ids else self.rank if local is None else local
        seed = derive_seed(self.run.seed, "ipu", self._first, self.rank) % 2**32
        with torch.random.fork_rng(devices=[]):
            return make_options(
                options,
                self.run.method,
                Placement((0,)),
                training,
                seed,
                None,
                ipu_id,
            )

    def _receive(self, microbatches: int, tag: int) -> torch.Tensor:
        """Receive the previous block's activations of that many microbatches."""
        activations = torch.empty(
            (microbatches * self.example.shape[0], *self.example.shape[1:]), dtype=self._type
        )
        dist.recv(activations, self.rank - 1, tag=tag)
        return activations

    def _send(self, activations: torch.Tensor, tag: int) -> None:
        self.messages.post(activations.to(self._type).contiguous(), self.rank + 1, tag)

    # ---- training

    def give(self, k: int, cut: float) -> None:
        """Train this block for the updates of the call that begins with update k; do nothing at the
        call's other updates.
        """
        if k % self.updates_per_call:
            return
        with describe_block_errors(self.rank, f"update {k}"):
            for first in range(k, k + self.updates_per_call, self._block_updates):
                self._train(range(first, first + self._block_updates))
            self._done = k + self.updates_per_call
            self._receive_results(self._done - self._late_results)

    def take(self, k: int) -> StepResult:
        if not self.is_main:
            return StepResult(float("nan"), None, self.run.samples)
        with describe_block_errors(self.rank, f"update {k}"):
            self._receive_results(k + 1)
        return self._received.pop(k)

    def _receive_results(self, end: int) -> None:
        """Receive on rank 0 the results of the updates before `end` from all blocks."""
        while self.is_main and self._received_before < end:
            k = self._received_before
            self._received[k] = self._collect_result(k)
            self._received_before = k + 1

    def _train(self, updates: range) -> None:
        """Update this block once for `updates` in one call; send its activations to the next block,
        and its results to rank 0.
        """
        accumulate = self.options.gradient_accumulation
        pairs = [
            self.run.batches.load(m)
            for m in range(updates.start * accumulate, updates.stop * accumulate)
        ]
        y = convert_label(torch.cat([pair[1] for pair in pairs]))
        x = torch.cat(
            [self._receive(accumulate, k + 1) for k in updates]
            if self.rank
            else [pair[0] for pair in pairs]
        )
        _, losses, *more_outputs = self.executors.call(
            updates, updates[-1], convert_input(x, self.options.precision), y
        )
        if not self._is_last:
            sent = self.messages.sent
            for k, part in zip(updates, more_outputs.pop().chunk(self._block_updates)):
                sent[0], sent[1] = sent[0] + part.numel() * part.element_size(), sent[1] + 1
                self._send(part, k + 1)
        means = losses.double().reshape(len(updates), -1).mean(dim=1)
        right = torch.full((len(updates), 2), float("nan"), dtype=torch.float64)
        if more_outputs:
            right = more_outputs[0].double().reshape(len(updates), -1, 2).sum(dim=1)
        for i, k in enumerate(updates):
            row = torch.cat([means[i : i + 1], right[i]])
            # the loop sees the results of rank 0 alone
            self.options.require_finite(k, row[:1].tolist())
            if self.is_main:
                self._results[k] = row
            else:
                self._result_messages.post(row, 0, RESULT_TAG + k)

    def _collect_result(self, k: int) -> StepResult:
        """Return the result of update k from those of all blocks, which rank 0 receives."""
        rows = [self._results.pop(k)]
        for source in range(1, self.depth):
            rows.append(torch.empty(3, dtype=torch.float64))
            dist.recv(rows[-1], source, tag=RESULT_TAG + k)
        blocks = tuple(
            (loss, None if counted != counted else right / max(counted, 1))
            for loss, right, counted in (row.tolist() for row in rows)
        )
        return StepResult(*blocks[-1], self.run.samples, blocks if len(blocks) > 1 else ())

    def _finish_sends(self) -> None:
        """Wait until all messages are sent; rank 0 has taken all results."""
        self.messages.flush()
        self._result_messages.flush()

    # ---- evaluation

    def evaluate(self, batches: BatchReader, metrics: Metrics) -> list[EvaluationResult]:
        """Evaluate the batches through all blocks, on the same IPUs."""
        start = time.perf_counter_ns()
        with describe_block_errors(self.rank, "evaluation"):
            tally = Tally(self.run.loss, metrics)
            self._tally_batches(batches(), tally)
            sums_here = tally.sums
            sums = torch.zeros(self.depth, len(sums_here), dtype=torch.float64)
            sums[self.rank] = sums_here
            self._finish_sends()
            dist.all_reduce(sums)
            self._timeline.add("evaluate", self._done, start)
            return [evaluate_sums(metrics, row) for row in sums]

    def _tally_batches(self, batches: Iterator[Any], tally: Tally) -> None:
        """Add the outputs of this block for the batches to a tally."""
        self.executors.begin_evaluation()
        rows = self.executors.rows
        for number, (x, y, count) in enumerate(split_into_calls(batches, rows)):
            tag = EVALUATION_TAG + number
            outputs = self.executors.infer(
                self._receive(rows // self.options.micro_batch_size, tag) if self.rank else x
            )
            if not self._is_last:
                self._send(outputs.pop(), tag)
            tally.add(trim_output(outputs[0], count), y[:count], count)
        self.executors.end_evaluation()

    # ---- checkpoints, report, end

    def _read_state(
        self,
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
        """Return this block's weights, and the tensors and the plain values of its optimizer
        state.
        """
        self._finish_sends()
        snapshot = self.executors.snapshot(0)
        names = [name for name in self.executors.wrapped.list_names() if name is not None]
        return (snapshot.model, *export_state(snapshot.optimizer, names))

    def collect_state(self) -> CheckpointState | None:
        start = time.perf_counter_ns()
        with describe_block_errors(self.rank, "checkpoint"):
            gathered = self._gather(self._read_state())
        self._timeline.add("checkpoint", self._done, start)
        if gathered is None:
            return None
        model, tensors, plain = (
            {key: v for part in parts for key, v in part.items()} for parts in zip(*gathered)
        )
        return CheckpointState({**self.run.model.state_dict(), **model}, tensors, plain)

    def _gather(self, value: Any) -> list[Any] | None:
        gathered: list[Any] | None = [None] * self.depth if self.is_main else None
        dist.gather_object(value, gathered, dst=0)
        return gathered

    def report(self) -> Report | None:
        timeline = self._timeline
        traced = Events.from_rows(timeline.events), Counters.from_rows(timeline.counters)
        with describe_block_errors(self.rank, "report"):
            gathered = self._gather(
                (self._optimizer_bytes, self.messages.sent, timeline.describe(), *traced)
            )
        if gathered is None:
            return None
        optimizer_bytes, sent, measured, events, counters = zip(*gathered)
        figures = [{"block": s, **of_block} for s, of_block in enumerate(measured)]
        return Report(
            list(optimizer_bytes),
            [0] * self.depth,
            {
                (s, s + 1): (int(size), int(messages))
                for s, (size, messages) in enumerate(sent[:-1])
            },
            concatenate_events(events),
            microbatches=(self._done - self._first) * self.options.gradient_accumulation,
            counters=concatenate_counters(counters),
            files={"ipu.json": {"execution": "decoupled", "blocks": figures}},
        )

    def close(self) -> None:
        """Copy the newest weights of this block into the user's model and release the IPU."""
        with describe_block_errors(self.rank, "end"):
            model, tensors, _ = self._read_state()
            self._optimizer_bytes = count_state_bytes(tensors, self.run.partition)[self.rank]
            load_state(self.run.model, {**self.run.model.state_dict(), **model})
        self.abort()

    def abort(self) -> None:
        self.executors.drop()
        self.release_blocks()
