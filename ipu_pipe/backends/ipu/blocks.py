"""Local-parallel training decoupled: each block a PopTorch training model in a process of its own on an IPU of its own.

    rank 0   block 0 of update 0 | update 1 | update 2 | ...      every call: a whole update's microbatches
                 \\ activations through the hosts' memory (gloo)
    rank 1        block 1 of update 0 | update 1 | ...

No block waits for a later one, none accumulates more microbatches than it is told to, and nothing is flushed: what PopTorch's
own pipeline cannot do. The price is that activations leave the IPU-Links. Not run on hardware.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections import deque
from typing import Any, Deque, Dict, Iterator, List, Optional, Tuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from ipu_pipe.backends.interface import Engine, Report, State, StepResult
from ipu_pipe.backends.ipu import profile as ipu_profile
from ipu_pipe.backends.ipu.faults import check_finite, check_hardware, told
from ipu_pipe.backends.ipu.feed import as_input, as_label
from ipu_pipe.backends.ipu.optimizer import export_state, import_state, read_state, set_rates, state_bytes, translate
from ipu_pipe.backends.ipu.options import make_options
from ipu_pipe.backends.ipu.session import in_calls
from ipu_pipe.backends.ipu.wrapping import unsplit, wrap_block
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.job.config import BackendConfig, Config
from ipu_pipe.job.evaluation import Tally, test_batches
from ipu_pipe.job.ipu.config import section_of
from ipu_pipe.job.ipu.placement import Placement
from ipu_pipe.job.position import Measured
from ipu_pipe.job.record import Job
from ipu_pipe.local.blocks import HEADS, blocks_of
from ipu_pipe.model.randomness import derived_seed

COMPILATION = 3600.0  # seconds that a process may have to wait for another's compiler
OUTSTANDING = 4  # messages on their way to the next block
RESULT_TAG, EVALUATION_TAG = 1 << 28, 1 << 29


def start(backend: BackendConfig) -> None:
    """Join the processes that torchrun started."""
    if not dist.is_initialized():
        patience = datetime.timedelta(seconds=max(backend.deadline, COMPILATION))
        dist.init_process_group("gloo", timeout=patience)


class BlockEngine(Engine):
    """This process's block. Rank 0 runs ahead as far as the next evaluation or checkpoint, so that no block stands "
    "still."""

    def __init__(self, job: Job, first_update: int) -> None:
        super().__init__(job)
        import poptorch

        self.rank, self.depth = dist.get_rank(), len(job.part)
        self.is_main = self.rank == 0
        if dist.get_world_size() != self.depth:
            raise BadInput(
                f"stages: {self.depth} blocks, each in a process of its own: start as many, not {dist.get_world_size()}"
            )
        blocks = blocks_of(job.model)
        assert blocks is not None
        self._crossings = blocks.crossings
        wide = [i for i, crossing in enumerate(self._crossings) if len(crossing.tensors) != 1]
        if wide:
            raise BadInput(
                f"stages: more than one tensor crosses to block {wide[0] + 1}: with backend.ipu.local decoupled it "
                "must be one, or"
                " set fused"
            )
        check_hardware(section_of(job.config), 1)
        self._config = self._own_config()
        self._ipu = section_of(self._config)
        every = job.config.method_settings().get("block_accumulation") or [1] * self.depth
        self._every, self._ahead = every[self.rank], self.depth + max(every)
        self._first = self._done = first_update
        self._half = job.config.precision.startswith("16")
        self._results: Dict[int, torch.Tensor] = {}  # of updates that this block has done: loss, right, counted
        self._sending: Deque[Tuple[Any, torch.Tensor]] = deque()
        self._sent = [0, 0]  # bytes, messages
        traced = max(job.config.log.trace_microbatches // job.config.gradient_accumulation, 1)
        self._timeline = ipu_profile.Timeline(first_update, first_update + traced, self.rank, self.rank)
        self.wrapped = wrap_block(job.model, job.loss, self.rank, job.config.precision, self._ipu)
        own = {unsplit(name): p for name, p in self.wrapped.named_parameters()}
        held = import_state(job.optimizer)
        job.optimizer.state.clear()
        names = {p: name for name, p in job.model.named_parameters()}
        with told("making the training model"):
            self.optimizer = translate(job.optimizer, names, own, self._ipu)  # type: ignore[arg-type]
            if held is not None:
                mine = {section: _of(own, values) for section, values in held.items()}
                self.optimizer.load_state_dict({**self.optimizer.get_state_dict(), **mine, "ipu_param": {}})
            self._set_rates(first_update)
            self.training = poptorch.trainingModel(self.wrapped, self._options(True), self.optimizer)
        self.inference: Optional[Any] = None

    def _own_config(self) -> Config:
        """The config with this block's share of what is told by IPU."""
        config, backend, ipu = self.job.config, self.job.config.backend, section_of(self.job.config)
        shares = ipu.available_memory_proportion
        if not isinstance(shares, list):
            return config
        ipu = ipu.model_copy(update={"available_memory_proportion": shares[self.rank]})
        return config.model_copy(update={"backend": backend.model_copy(update={"ipu": ipu})})

    def _options(self, training: bool) -> Any:
        ids = self._ipu.ipu_ids
        ipu_id = ids[self.rank] if ids else int(os.environ.get("LOCAL_RANK", self.rank))
        seed = derived_seed(self._config.seed, "ipu", self._first, self.rank) % 2**32
        accumulation = self._config.gradient_accumulation * self._every
        with torch.random.fork_rng(devices=[]):
            return make_options(
                self._config, Placement((0,)), training, seed, None, ipu_id, accumulation
            )

    def _set_rates(self, k: int) -> bool:
        return set_rates(self.optimizer, self.job.rules.rates(k))

    # --- faults

    @contextlib.contextmanager
    def _named_faults(self, doing: str) -> Iterator[None]:
        """What goes wrong here, told with rank and block. A device error ends the run: the other blocks cannot go back."""
        import poptorch

        try:
            yield
        except BadInput:
            raise
        except poptorch.RecoverableError as error:
            raise RunFault(
                f"rank {self.rank}, block {self.rank}: device error ({error.recovery_action}): {error.message}: do "
                "what it asks for, then"
                " go on with --resume"
            ) from error
        except RunFault as error:
            raise RunFault(f"rank {self.rank}, block {self.rank}: {error}") from error
        except RuntimeError as error:  # of torch.distributed
            said = " ".join(str(error).split())[:200]
            raise RunFault(f"rank {self.rank}, block {self.rank}: {doing}: another rank is lost: {said}") from error

    # --- training

    def step(self, k: int) -> StepResult:
        with self._named_faults(f"update {k}"):
            until = k + 1
            if self.is_main:
                until = min(k + 1 + self._ahead, self.job.schedule.stretch(k)[1])
            while self._done < until:
                self._group(self._done)
            return self._result(k)

    def _group(self, first: int) -> None:
        """The updates of which this block makes one, in one call."""
        job, accumulate = self.job, self.job.config.gradient_accumulation
        updates = range(first, first + self._every)
        pairs = [job.microbatch(m) for m in range(first * accumulate, updates.stop * accumulate)]
        y = torch.cat([pair[1] for pair in pairs])
        if self.rank:
            x = torch.cat([self._receive(self._shape(accumulate), k + 1) for k in updates])
        else:
            x = torch.cat([pair[0] for pair in pairs])
        x, y = as_input(x, job.config.precision), as_label(y)
        if not self.training.isCompiled():
            with told("compiling the training model"):
                self.training.compile(x, y)
        if not self.training.isAttachedToDevice():
            with told("attaching to the IPU"):
                self.training.attachToDevice()
        if self._set_rates(updates[-1]):  # when attached, as in poptorch.Session
            with told("setting the learning rate"):
                self.training.setOptimizer(self.optimizer)
        begun = time.perf_counter_ns()
        with told(f"update {first}"):
            found = list(self.training(x, y))
        ended = time.perf_counter_ns()
        sent = sum(t.numel() * t.element_size() for t in (x, y))
        received = sum(t.numel() * t.element_size() for t in found)
        self._timeline.add_call(self.training, first, self._every, begun, ended, len(x), sent, received)
        if self.rank < self.depth - 1:
            for k, part in zip(updates, found.pop().chunk(self._every)):
                self._sent = [self._sent[0] + part.numel() * part.element_size(), self._sent[1] + 1]
                self._send(part, k + 1)
        self._note(updates, found)
        self._done = updates.stop

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
                self._post(row, 0, RESULT_TAG + k)

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

    # --- messages

    def _shape(self, microbatches: int) -> Tuple[int, ...]:
        """Of the activations of so many microbatches that come to this block."""
        one = self._crossings[self.rank - 1].tensors[0].shape
        return (microbatches * one[0], *one[1:])

    def _receive(self, shape: Tuple[int, ...], tag: int) -> torch.Tensor:
        held = torch.empty(shape, dtype=torch.float16 if self._half else torch.float32)
        dist.recv(held, self.rank - 1, tag=tag)
        return held

    def _send(self, tensor: torch.Tensor, tag: int) -> None:
        tensor = tensor.to(torch.float16 if self._half else torch.float32).contiguous()
        self._post(tensor, self.rank + 1, tag)

    def _post(self, tensor: torch.Tensor, target: int, tag: int) -> None:
        self._sending.append((dist.isend(tensor, target, tag=tag), tensor))
        while len(self._sending) > OUTSTANDING * (1 + self._every):
            self._sending.popleft()[0].wait()

    def _flush(self) -> None:
        while self._sending:
            self._sending.popleft()[0].wait()

    # --- evaluation

    def evaluate(self) -> List[Measured]:
        """The test set through all blocks, on the same IPUs."""
        with self._named_faults("evaluation"):
            with told("making room for the evaluation"):
                if self.training.isCompiled() and self.training.isAttachedToDevice():
                    self.training.detachFromDevice()
            inference = self._make_inference()
            with told("attaching to the IPU"):
                if not inference.isAttachedToDevice():
                    inference.attachToDevice()
            sums = torch.zeros(self.depth, 5, dtype=torch.float64)
            sums[self.rank] = self._tally(inference)
            with told("leaving the evaluation's IPU"):
                inference.detachFromDevice()
            self._flush()
            dist.all_reduce(sums)
            return [Tally(self.job.loss, row).measured for row in sums]

    def _rows(self) -> int:
        iterations = self._ipu.inference_device_iterations or 1
        return int(self._config.micro_batch_size * iterations)

    def _make_inference(self) -> Any:
        import poptorch

        if self.inference is None:
            modes = [(module, module.training) for module in self.wrapped.modules()]
            self.wrapped.eval()
            try:
                with told("compiling the inference model"):
                    made = poptorch.inferenceModel(self.wrapped, self._options_of_inference())
                    shape = (
                        self.job.example[0].shape if not self.rank else self._crossings[self.rank - 1].tensors[0].shape
                    )
                    like = self.job.example[0] if not self.rank else torch.zeros(shape)
                    x = torch.cat([like] * (self._rows() // self._config.micro_batch_size))
                    made.compile(as_input(x, self._config.precision))
            finally:
                for module, mode in modes:
                    module.training = mode
            self.inference = made
        return self.inference

    def _options_of_inference(self) -> Any:
        return self._options(False)

    def _tally(self, inference: Any) -> torch.Tensor:
        tally, rows = Tally(self.job.loss), self._rows()
        for number, (x, y, count) in enumerate(in_calls(test_batches(self.job), rows)):
            tag = EVALUATION_TAG + number
            value = x
            if self.rank:
                value = self._receive(self._shape(rows // self._config.micro_batch_size), tag)
            with told("evaluation"):
                found = list(inference(as_input(value, self._config.precision)))
            if self.rank < self.depth - 1:
                self._send(found.pop(), tag)
            output = tree_map(lambda t: (t.float() if t.is_floating_point() else t)[:count], found[0])
            tally.add(output, y[:count], count)
        return tally.sums

    # --- state

    def _own_state(self) -> Tuple[Dict[str, torch.Tensor], Dict[str, torch.Tensor], Dict[str, Any]]:
        with told("reading the weights"):
            if self.training.isCompiled() and self.training.isAttachedToDevice():
                self.training.copyWeightsToHostIfNeeded()
            held = {unsplit(name): t.detach().clone() for name, t in self.wrapped.state_dict().items()}
            optimizer = read_state(self.optimizer) or {}
        like = self.job.model.state_dict()
        model = {name: t.to(like[name].dtype) for name, t in held.items() if name is not None}
        names = [n for n in (unsplit(n) for n, _ in self.wrapped.named_parameters()) if n is not None]
        return (model, *export_state(optimizer, names))

    def state(self) -> Optional[State]:
        with self._named_faults("checkpoint"):
            self._flush()
            gathered = self._gather(self._own_state())
        if gathered is None:
            return None
        model, tensors, plain = dict(self.job.model.state_dict()), {}, {}
        for part in gathered:
            model.update(part[0])
            tensors.update(part[1])
            plain.update(part[2])
        return State(model, tensors, plain)

    def _gather(self, value: Any) -> Optional[List[Any]]:
        gathered: Optional[List[Any]] = [None] * self.depth if self.is_main else None
        dist.gather_object(value, gathered, dst=0)
        return gathered

    def report(self) -> Optional[Report]:
        with self._named_faults("report"):
            own = (self._optimizer_bytes, self._sent, self._timeline.events, self._timeline.counters)
            gathered = self._gather((*own, self._timeline.latency, self._timeline.cycles))
        if gathered is None:
            return None
        links = {(s, s + 1): (int(part[1][0]), int(part[1][1])) for s, part in enumerate(gathered[:-1])}
        blocks = [
            {"block": s, "latency_seconds": p[4] or None, "cycles_of_the_last_call": p[5]}
            for s, p in enumerate(gathered)
        ]
        return Report(
            [part[0] for part in gathered], [0] * self.depth, links, [event for part in gathered for event in part[2]],
            microbatches=(self._done - self._first) * self.job.config.gradient_accumulation,
            counters=[counter for part in gathered for counter in part[3]],
            files={"ipu.json": {"execution": "decoupled", "blocks": blocks}},
        )  # fmt: skip

    def close(self) -> None:
        """The newest weights of this block in the user's model."""
        with self._named_faults("end"):
            self._flush()
            model, tensors, _ = self._own_state()
            self._optimizer_bytes = state_bytes(tensors, self.job.part)[self.rank]
            mine = self.job.model.state_dict()
            with torch.no_grad():
                for name, value in model.items():
                    mine[name].copy_(value)
        self.abort()

    def abort(self) -> None:
        for executor in (self.inference, self.training):
            if executor is not None:
                with contextlib.suppress(Exception):
                    executor.destroy()
        self.inference = None
        blocks = blocks_of(self.job.model)
        if blocks is not None:
            blocks.release()


def _of(own: Dict[Optional[str], Any], values: Dict[str, Any]) -> Dict[str, Any]:
    """The entries of this block's parameters, which end in their names here."""
    ends = tuple(
        f"{prefix}{name[len(cut) :]}"
        for name in own
        if name is not None
        for cut, prefix in ((f"{HEADS}.", "body.heads."), ("", "body.model."))
        if name.startswith(cut)
    )
    return {key: value for key, value in values.items() if key.endswith(ends)}
