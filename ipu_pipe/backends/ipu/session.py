"""All that hangs on one set of IPUs: a copy of the model, its executors and its input."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from ipu_pipe.backends.interface import StepResult
from ipu_pipe.backends.ipu import profile as ipu_profile
from ipu_pipe.backends.ipu.faults import check_finite, told
from ipu_pipe.backends.ipu.feed import Calls, Feed, as_input
from ipu_pipe.backends.ipu.optimizer import read_state, set_rates, translate
from ipu_pipe.backends.ipu.options import make_options
from ipu_pipe.backends.ipu.poprun import Instance
from ipu_pipe.backends.ipu.wrapping import unsplit, wrap
from ipu_pipe.job.evaluation import Tally, test_batches
from ipu_pipe.job.ipu.config import DataLoading, section_of
from ipu_pipe.job.ipu.placement import Placement, reserved
from ipu_pipe.job.position import Measured
from ipu_pipe.job.record import Job
from ipu_pipe.local.blocks import blocks_of
from ipu_pipe.model.randomness import derived_seed


class Held(NamedTuple):
    """Weights and optimizer state when `update` updates are done, by unsplit names and by PopTorch's."""

    update: int
    model: Dict[str, torch.Tensor]
    optimizer: Optional[Dict[str, Any]]


class Session:
    """A copy of the model, its executors and its input: all that is lost with a device."""

    def __init__(self, job: Job, held: Held, share: Instance, place: Placement) -> None:
        import poptorch

        config = job.config
        self.job, self.ipu, self.share, self.place = job, section_of(config), share, place
        self.timeline = ipu_profile.Timeline(0, 0)
        self.wrapped = wrap(job.model, job.loss, job.part, config.precision, self.ipu)
        self._load(held.model)
        own = {unsplit(name): p for name, p in self.wrapped.named_parameters()}
        names = {p: name for name, p in job.model.named_parameters()}
        clip = config.clip.norm if config.clip else None
        with told("making the optimizer"):
            self.optimizer = translate(job.optimizer, names, own, self.ipu, clip)  # type: ignore[arg-type]
            if held.optimizer is not None:
                self.optimizer.load_state_dict({**self.optimizer.get_state_dict(), **held.optimizer, "ipu_param": {}})
        self._set_rates(held.update)
        with told("making the training model"):
            options = self._options(True, held.update)
            self.training = poptorch.trainingModel(self.wrapped, options, self.optimizer)
        self.inference: Optional[Any] = None
        self.calls = Calls(
            job.data, config, job.updates_per_epoch, held.update, job.updates, share.first, share.replicas
        )
        self._first = held.update
        with told("starting the data loader"):
            loading = DataLoading() if self.ipu.compile_only else self.ipu.data_loading
            self._feed = Feed(self.calls, job.data, loading, options)

    def _load(self, tensors: Dict[str, torch.Tensor]) -> None:
        own = {unsplit(name): t for name, t in self.wrapped.state_dict(keep_vars=True).items()}
        with torch.no_grad():
            for name, value in tensors.items():
                own[name].copy_(value)

    def _options(self, training: bool, update: int) -> Any:
        base = None
        if self.share.base is not None:
            asked = reserved(self.place.ipus) if self.ipu.auto_round_num_ipus else self.place.ipus
            base = self.share.base(asked)
        seed = derived_seed(self.job.config.seed, "ipu", update) % 2**32
        with torch.random.fork_rng(devices=[]):  # randomSeed seeds the host's generator, too
            ipu_id = self.ipu.ipu_ids[0] if self.ipu.ipu_ids else None
            return make_options(self.job.config, self.place, training, seed, base, ipu_id)

    # --- training

    def compile(self) -> None:
        """Compile both models, run none. Compiling attaches, and the second model needs the first one's IPUs."""
        with told("compiling the training model"):
            self.training.compile(*self.calls[0])
            if self.training.isAttachedToDevice():
                self.training.detachFromDevice()
        self._make_inference()

    def call(self, k: int) -> List[StepResult]:
        """Updates k to k + D of one call."""
        iterations = self.ipu.device_iterations
        x, y = self._feed.take()
        if not self.training.isCompiled():
            with told("compiling the training model"):
                self.training.compile(x, y)
        if not self.training.isAttachedToDevice():
            with told("attaching to the IPUs"):
                self.training.attachToDevice()
        if self._set_rates(k):  # when attached: attaching writes back the rate that was read at the last detachment
            with told("setting the learning rate"):
                self.training.setOptimizer(self.optimizer)
        start_ns = time.perf_counter_ns()
        with told(f"update {k}"):
            found = self.training(x, y)
        end_ns = time.perf_counter_ns()
        sent, received = (sum(t.numel() * t.element_size() for t in tensors) for tensors in ((x, y), found))
        self.timeline.add_call(self.training, k, iterations, start_ns, end_ns, len(x), sent, received)
        return self._results(k, found)

    def _set_rates(self, k: int) -> bool:
        """Set the optimizer's rates to those of update k; whether any changed."""
        return set_rates(self.optimizer, self.job.rules.rates(k))

    def _results(self, k: int, found: Sequence[torch.Tensor]) -> List[StepResult]:
        """Of each update: mean losses and shares of right answers over what the output mode gives."""
        config, iterations, blocks = self.job.config, self.ipu.device_iterations, self._blocks
        losses = found[1].double().reshape(-1, blocks)
        answers = found[2].double().reshape(-1, blocks, 2) if len(found) > 2 else None
        parts = iterations if self.ipu.output_mode in ("all", "every_n") else 1
        means = losses.reshape(parts, -1, blocks).mean(dim=1)
        if self.ipu.output_mode == "sum":
            means /= iterations * config.gradient_accumulation
        right = None if answers is None else answers.reshape(parts, -1, blocks, 2).sum(dim=1)
        means, right = _over_instances(means, right)
        samples = config.micro_batch_size * config.gradient_accumulation * config.replicas
        results = []
        for i in range(iterations):
            row = means[min(i, parts - 1)].tolist()
            shares: List[Optional[float]] = [None] * blocks
            if right is not None:
                counted = right[min(i, parts - 1)]
                shares = (counted[:, 0] / counted[:, 1].clamp(min=1)).tolist()
            check_finite(config, k + i, row)
            each = tuple(zip(row, shares)) if blocks > 1 else ()
            results.append(StepResult(row[-1], shares[-1], samples, each))
        return results

    @property
    def _blocks(self) -> int:
        blocks = blocks_of(self.job.model)
        return 1 if blocks is None else len(blocks.heads) + 1

    # --- evaluation

    def _make_inference(self) -> Any:
        """The inference model, made after the training model and compiled in evaluation mode."""
        import poptorch

        if self.inference is None:
            modes = [(module, module.training) for module in self.wrapped.modules()]
            self.wrapped.eval()
            try:
                with told("compiling the inference model"):
                    made = poptorch.inferenceModel(self.wrapped, self._options(False, self._first))
                    x = as_input(self.job.example[0], self.job.config.precision)
                    rows = self._rows(made)
                    made.compile(filled(x, rows))
            finally:
                for module, mode in modes:
                    module.training = mode
            self.inference = made
        return self.inference

    def _rows(self, inference: Any) -> int:
        """Samples of an evaluation's call."""
        options = inference.options
        return int(self.job.config.micro_batch_size * options.device_iterations * options.replication_factor)

    def evaluate(self) -> List[Measured]:
        """The test set on the inference model, with the training model's weights."""
        with told("making room for the evaluation"):
            if self.training.isCompiled() and self.training.isAttachedToDevice():
                if self.ipu.detach_for_evaluation:
                    self.training.detachFromDevice()  # weights and optimizer state come to the host
                else:
                    self.training.copyWeightsToHostIfNeeded()
        inference = self._make_inference()
        with told("attaching to the IPUs"):
            if inference.isAttachedToDevice():
                inference.copyWeightsToDevice()
            else:
                inference.attachToDevice()
        found = self._tally(inference)
        if self.ipu.detach_for_evaluation:
            with told("leaving the evaluation's IPUs"):
                inference.detachFromDevice()
        return found

    def _tally(self, inference: Any) -> List[Measured]:
        tallies = [Tally(self.job.loss) for _ in range(self._blocks)]
        for x, y, count in in_calls(test_batches(self.job), self._rows(inference)):
            with told("evaluation"):
                outputs = inference(as_input(x, self.job.config.precision))
            for tally, output in zip(tallies, outputs):
                own = tree_map(lambda t: (t.float() if t.is_floating_point() else t)[:count], output)
                tally.add(own, y[:count], count)
        return [tally.measured for tally in tallies]

    # --- state

    def held(self, update: int) -> Held:
        """Weights and optimizer state as they are, copies."""
        with told("reading the weights"):
            if self.training.isCompiled() and self.training.isAttachedToDevice():
                self.training.copyWeightsToHostIfNeeded()
            model = {}
            for name, value in self.wrapped.state_dict().items():
                own = unsplit(name)
                if own is not None:
                    model[own] = value.detach().clone()
            optimizer = read_state(self.optimizer)
        like = self.job.model.state_dict()
        return Held(update, {name: value.to(like[name].dtype) for name, value in model.items()}, optimizer)

    def drop(self) -> None:
        """Give the IPUs back, without a word where they are lost already. `destroy` first reads what a lost device no longer
        tells and so frees nothing: then what holds the IPUs goes with the last reference to it."""
        for executor in (self.inference, self.training):
            if executor is not None:
                with contextlib.suppress(Exception):
                    executor.destroy()
        self._feed.close()
        self.training = self.inference = self.optimizer = None


def _over_instances(means: torch.Tensor, right: Optional[torch.Tensor]) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Over poprun's instances, where there are several."""
    if not (dist.is_available() and dist.is_initialized()):
        return means, right
    dist.all_reduce(means)
    if right is not None:
        dist.all_reduce(right)
    return means / dist.get_world_size(), right


def in_calls(batches: Iterator[Tuple[Any, Any]], rows: int) -> Iterator[Tuple[Any, Any, int]]:
    """Batches of any size as calls of `rows` samples, the last filled up, and how many are the test set's own."""
    held: List[Tuple[Any, Any]] = []
    count = 0
    for x, y in batches:
        held.append((x, y))
        count += len(x)
        while count >= rows:
            joined = tuple(torch.cat([pair[i] for pair in held]) for i in range(2))
            yield joined[0][:rows], joined[1][:rows], rows
            held, count = [(joined[0][rows:], joined[1][rows:])], count - rows
    if count:
        x, y = (torch.cat([pair[i] for pair in held]) for i in range(2))
        yield filled(x, rows), filled(y, rows), count


def filled(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x, its last sample repeated up to so many."""
    return torch.cat([x, x[-1:].expand(rows - len(x), *x.shape[1:])]) if len(x) < rows else x[:rows]
