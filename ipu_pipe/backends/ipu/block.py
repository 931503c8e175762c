"""One block with a loss of its own, on the IPU of this process: a call a group of updates, activations in and out."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import torch

from ipu_pipe.backends.ipu.evaluation import in_calls, judged
from ipu_pipe.backends.ipu.executors import Executors
from ipu_pipe.backends.ipu.faults import told
from ipu_pipe.backends.ipu.feed import as_input, as_label
from ipu_pipe.backends.ipu.messages import Messages
from ipu_pipe.backends.ipu.optimizer import check_state, export_state, import_state
from ipu_pipe.backends.ipu.options import make_options
from ipu_pipe.backends.ipu.profile import Timeline
from ipu_pipe.backends.ipu.wrapping import unsplit, wrap_block
from ipu_pipe.config.schema import Config
from ipu_pipe.job.evaluation import Tally, load_test_batches
from ipu_pipe.job.ipu.placement import Placement
from ipu_pipe.job.record import Job
from ipu_pipe.launcher import read_launch
from ipu_pipe.local.blocks import get_blocks
from ipu_pipe.model.randomness import derive_seed

OUTSTANDING = 4  # messages on their way to the next block
EVALUATION_TAG = 1 << 29


class Block:
    """Block `rank` of a job. It makes one update of the gradients of `every`."""

    def __init__(self, job: Job, rank: int, first_update: int, every: int, timeline: Timeline) -> None:
        blocks = get_blocks(job.model)
        assert blocks is not None
        self.job, self.rank, self.every = job, rank, every
        self.is_last = rank == len(job.part) - 1
        self._crossings, self._first = blocks.crossings, first_update
        self._config = own_config(job.config, rank)
        self._ipu = self._config.ipu
        self.messages = Messages(rank, OUTSTANDING * (1 + every), job.config.precision.startswith("16"))
        wrapped = wrap_block(job.model, job.loss, rank, job.config.precision, self._ipu)
        held = import_state(job.optimizer)
        check_state(held, job.optimizer, self._ipu)
        job.optimizer.state.clear()  # PopTorch's entries mean nothing to it
        self.executors = Executors(job, wrapped, self._options, held, first_update, timeline, "IPU")

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
        """What the model gives for the updates of which this block makes one, in one call; the activations go on."""
        job, accumulate = self.job, self.job.config.gradient_accumulation
        pairs = [job.microbatch(m) for m in range(updates.start * accumulate, updates.stop * accumulate)]
        y = torch.cat([pair[1] for pair in pairs])
        if self.rank:
            x = torch.cat([self.messages.receive(self._shape(accumulate), k + 1) for k in updates])
        else:
            x = torch.cat([pair[0] for pair in pairs])
        x, y = as_input(x, job.config.precision), as_label(y)
        found = list(self.executors.call(updates, updates[-1], x, y))
        if not self.is_last:
            sent = self.messages.sent
            for k, part in zip(updates, found.pop().chunk(self.every)):
                sent[0], sent[1] = sent[0] + part.numel() * part.element_size(), sent[1] + 1
                self.messages.send(part, k + 1)
        return found

    def _shape(self, microbatches: int) -> Tuple[int, ...]:
        """Of the activations of so many microbatches that come to this block."""
        one = self._crossings[self.rank - 1].tensors[0].shape
        return (microbatches * one[0], *one[1:])

    # --- evaluation

    def evaluate(self) -> torch.Tensor:
        """Sums of the test set through this block, on the same IPU. See Tally."""
        inference = self.executors.enter_evaluation(self._example, detach=True)
        sums = self._tally(inference)
        self.executors.leave_evaluation(detach=True)
        return sums

    def _rows(self) -> int:
        iterations = self._ipu.inference_device_iterations or 1
        return int(self._config.micro_batch_size * iterations)

    def _example(self, inference: Any) -> torch.Tensor:
        """Of what comes to this block in an evaluation's call."""
        like = self.job.example[0]
        if self.rank:
            like = torch.zeros(self._crossings[self.rank - 1].tensors[0].shape)
        return torch.cat([like] * (self._rows() // self._config.micro_batch_size))

    def _tally(self, inference: Any) -> torch.Tensor:
        tally, rows = Tally.of(self.job), self._rows()
        for number, (x, y, count) in enumerate(in_calls(load_test_batches(self.job), rows)):
            tag = EVALUATION_TAG + number
            value = x
            if self.rank:
                value = self.messages.receive(self._shape(rows // self._config.micro_batch_size), tag)
            with told("evaluation"):
                found = list(inference(as_input(value, self._config.precision)))
            if not self.is_last:
                self.messages.send(found.pop(), tag)
            tally.add(judged(found[0], count), y[:count], count)
        return tally.sums

    # --- state

    def state(self) -> Tuple[Dict[str, torch.Tensor], Dict[str, torch.Tensor], Dict[str, Any]]:
        """Weights, and tensors and plain values of the optimizer's state, of this block alone."""
        held = self.executors.snapshot(0)
        names = [unsplit(name) for name, _ in self.executors.wrapped.named_parameters()]
        own = [name for name in names if name is not None]
        return (held.model, *export_state(held.optimizer, own))


def own_config(config: Config, rank: int) -> Config:
    """The config with a block's share of what is told by IPU."""
    backend, ipu = config.backend, config.ipu
    shares = ipu.available_memory_proportion
    if not isinstance(shares, list):
        return config
    ipu = ipu.model_copy(update={"available_memory_proportion": shares[rank]})
    return config.model_copy(update={"backend": backend.model_copy(update={"ipu": ipu})})
