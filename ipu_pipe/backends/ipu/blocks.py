"""Local-parallel training decoupled: each block a PopTorch training model in a process of its own on an IPU of its own.

    rank 0   block 0 of update 0 | update 1 | update 2 | ...      every call: a whole update's microbatches
                 \\ activations through the hosts' memory (gloo)
    rank 1        block 1 of update 0 | update 1 | ...

No block waits for a later one, none accumulates more microbatches than it is told to, and nothing is flushed: what PopTorch's
own pipeline cannot do. The price is that activations leave the IPU-Links. Not run on hardware.
"""

from __future__ import annotations

import datetime
from collections import deque
from typing import Any, Deque, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist

from ipu_pipe.backends.interface import CheckpointState, Engine, Report, StepResult
from ipu_pipe.backends.ipu import profile as ipu_profile
from ipu_pipe.backends.ipu.faults import check_finite, check_hardware, describe_block_errors, describe_errors
from ipu_pipe.backends.ipu.feed import convert_input, convert_label, split_into_calls, trim_output
from ipu_pipe.backends.ipu.optimizer import check_state, count_state_bytes, export_state, import_state
from ipu_pipe.backends.ipu.options import make_options
from ipu_pipe.backends.ipu.placement import Placement
from ipu_pipe.backends.ipu.profile import CallTimes
from ipu_pipe.backends.ipu.session import Executors
from ipu_pipe.backends.ipu.wrapping import get_unsplit_name, wrap_block
from ipu_pipe.config.schema import BackendConfig, Config
from ipu_pipe.errors import BadInput
from ipu_pipe.job.evaluation import EvaluationResult, Tally, load_test_batches
from ipu_pipe.job.record import Job
from ipu_pipe.launcher import read_launch
from ipu_pipe.local.blocks import get_blocks
from ipu_pipe.model.randomness import derive_seed
from ipu_pipe.trace.events import Counters, Events, concatenate_counters, concatenate_events


class Messages:
    """What rank `rank` receives from the one before and sends on; at most `outstanding` on their way, so that memory is bounded.
    `sent`: bytes and messages of activations in training. `half`: they are half precision."""

    def __init__(self, rank: int, outstanding: int, half: bool) -> None:
        self._rank, self._outstanding = rank, outstanding
        self._dtype = torch.float16 if half else torch.float32
        self._sending: Deque[Tuple[Any, torch.Tensor]] = deque()
        self.sent = [0, 0]

    def receive(self, shape: Tuple[int, ...], tag: int) -> torch.Tensor:
        """Receive the activations of the previous block."""
        activations = torch.empty(shape, dtype=self._dtype)
        dist.recv(activations, self._rank - 1, tag=tag)
        return activations

    def send(self, tensor: torch.Tensor, tag: int) -> None:
        """Send activations to the next block."""
        self.post(tensor.to(self._dtype).contiguous(), self._rank + 1, tag)

    def post(self, tensor: torch.Tensor, target: int, tag: int) -> None:
        """Send without waiting, unless too many are on their way."""
        self._sending.append((dist.isend(tensor, target, tag=tag), tensor))
        while len(self._sending) > self._outstanding:
            self._sending.popleft()[0].wait()

    def flush(self) -> None:
        """Wait until all is received."""
        while self._sending:
            self._sending.popleft()[0].wait()


OUTSTANDING = 4  # messages on their way to the next block
EVALUATION_TAG = 1 << 29


class BlockTrainer:
    """Block `rank` of a job. It makes one update of the gradients of `every`."""

    def __init__(self, job: Job, rank: int, first_update: int, every: int, timeline: CallTimes) -> None:
        blocks = get_blocks(job.model)
        assert blocks is not None
        self.job, self.rank, self.every = job, rank, every
        self.is_last = rank == len(job.part) - 1
        self._crossings, self._first = blocks.crossings, first_update
        self._config = split_config(job.config, rank)
        self._ipu = self._config.ipu
        self.messages = Messages(rank, OUTSTANDING * (1 + every), job.config.precision.startswith("16"))
        wrapped = wrap_block(job.model, job.loss, rank, job.config.precision, self._ipu)
        saved = import_state(job.optimizer)
        check_state(saved, job.optimizer, self._ipu)
        job.optimizer.state.clear()  # PopTorch's entries mean nothing to it
        self.executors = Executors(job, wrapped, self._options, saved, first_update, timeline, "IPU")

    def _options(self, training: bool) -> Any:
        ids = self._ipu.ipu_ids
        local = read_launch().local_rank
        ipu_id = ids[self.rank] if ids else self.rank if local is None else local
        seed = derive_seed(self._config.seed, "ipu", self._first, self.rank) % 2**32
        accumulation = self._config.gradient_accumulation * self.every
        with torch.random.fork_rng(devices=[]):
            return make_options(
                self._config, self.job.method, Placement((0,)), training, seed, None, ipu_id, accumulation
            )

    def train(self, updates: range) -> List[torch.Tensor]:
        """Make this block's one update of `updates` in one call, hand its activations on, and return what the model gives."""
        job, accumulate = self.job, self.job.config.gradient_accumulation
        pairs = [job.microbatch(m) for m in range(updates.start * accumulate, updates.stop * accumulate)]
        y = torch.cat([pair[1] for pair in pairs])
        if self.rank:
            x = torch.cat([self.messages.receive(self._shape(accumulate), k + 1) for k in updates])
        else:
            x = torch.cat([pair[0] for pair in pairs])
        x, y = convert_input(x, job.config.precision), convert_label(y)
        outputs = list(self.executors.call(updates, updates[-1], x, y))
        if not self.is_last:
            sent = self.messages.sent
            for k, part in zip(updates, outputs.pop().chunk(self.every)):
                sent[0], sent[1] = sent[0] + part.numel() * part.element_size(), sent[1] + 1
                self.messages.send(part, k + 1)
        return outputs

    def _shape(self, microbatches: int) -> Tuple[int, ...]:
        """Return the shape of the activations of that many microbatches that come to this block."""
        one = self._crossings[self.rank - 1].tensors[0].shape
        return (microbatches * one[0], *one[1:])

    # --- evaluation

    def evaluate(self) -> torch.Tensor:
        """Return the sums of the test set through this block, on the same IPU. See Tally."""
        inference = self.executors.enter_evaluation(self._example, detach=True)
        sums = self._tally(inference)
        self.executors.leave_evaluation(detach=True)
        return sums

    def _rows(self) -> int:
        iterations = self._ipu.inference_device_iterations or 1
        return int(self._config.micro_batch_size * iterations)

    def _example(self, inference: Any) -> torch.Tensor:
        """Return an example of what comes to this block in an evaluation's call."""
        like = self.job.example[0]
        if self.rank:
            like = torch.zeros(self._crossings[self.rank - 1].tensors[0].shape)
        return torch.cat([like] * (self._rows() // self._config.micro_batch_size))

    def _tally(self, inference: Any) -> torch.Tensor:
        tally, rows = Tally.of(self.job), self._rows()
        for number, (x, y, count) in enumerate(split_into_calls(load_test_batches(self.job), rows)):
            tag = EVALUATION_TAG + number
            value = x
            if self.rank:
                value = self.messages.receive(self._shape(rows // self._config.micro_batch_size), tag)
            with describe_errors("evaluation"):
                outputs = list(inference(convert_input(value, self._config.precision)))
            if not self.is_last:
                self.messages.send(outputs.pop(), tag)
            tally.add(trim_output(outputs[0], count), y[:count], count)
        return tally.sums

    # --- state

    def state(self) -> Tuple[Dict[str, torch.Tensor], Dict[str, torch.Tensor], Dict[str, Any]]:
        """Return the weights, and the tensors and plain values of the optimizer's state, of this block alone."""
        snapshot = self.executors.snapshot(0)
        names = [get_unsplit_name(name) for name, _ in self.executors.wrapped.named_parameters()]
        parameters = [name for name in names if name is not None]
        return (snapshot.model, *export_state(snapshot.optimizer, parameters))


def split_config(config: Config, rank: int) -> Config:
    """Return the config with the share of one block in what is said per IPU."""
    backend, ipu = config.backend, config.ipu
    shares = ipu.available_memory_proportion
    if not isinstance(shares, list):
        return config
    ipu = ipu.model_copy(update={"available_memory_proportion": shares[rank]})
    return config.model_copy(update={"backend": backend.model_copy(update={"ipu": ipu})})


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
        self._timeline = ipu_profile.CallTimes(job.traced, self.rank, self.rank)
        self.block = BlockTrainer(job, self.rank, first_update, every[self.rank], self._timeline)

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
        with describe_block_errors(self.rank, f"update {k}"):
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
        """Evaluate the test set through all blocks, on the same IPUs."""
        with describe_block_errors(self.rank, "evaluation"):
            sums_here = self.block.evaluate()
            sums = torch.zeros(self.depth, len(sums_here), dtype=torch.float64)
            sums[self.rank] = sums_here
            self.block.messages.flush()
            dist.all_reduce(sums)
            return [Tally.of(self.job, row).evaluation for row in sums]

    # --- state

    def state(self) -> Optional[CheckpointState]:
        with describe_block_errors(self.rank, "checkpoint"):
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
        with describe_block_errors(self.rank, "report"):
            figures = (self._optimizer_bytes, self.block.messages.sent, Events.from_rows(self._timeline.events))
            gathered = self._gather(
                (*figures, Counters.from_rows(self._timeline.counters), self._timeline.latency, self._timeline.cycles)
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
        """Copy the newest weights of this block into the user's model and give the IPU back."""
        with describe_block_errors(self.rank, "end"):
            self.block.messages.flush()
            model, tensors, _ = self.block.state()
            self._optimizer_bytes = count_state_bytes(tensors, self.job.part)[self.rank]
            mine = self.job.model.state_dict()
            with torch.no_grad():
                for name, value in model.items():
                    mine[name].copy_(value)
        self.abort()

    def abort(self) -> None:
        self.block.executors.drop()
        self.release_blocks()
