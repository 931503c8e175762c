"""Everything that hangs on one set of IPUs: a copy of the model, its executors, its input and its results."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from ipu_pipe.backends.interface import StepResult
from ipu_pipe.backends.ipu.config import DataLoading
from ipu_pipe.backends.ipu.faults import check_finite, describe_errors
from ipu_pipe.backends.ipu.feed import Calls, Feed, convert_input, fill_up, split_into_calls, trim_output
from ipu_pipe.backends.ipu.optimizer import IpuState, read_state, set_rates, translate_optimizer, write_state
from ipu_pipe.backends.ipu.options import make_options
from ipu_pipe.backends.ipu.placement import Placement, round_up_ipus
from ipu_pipe.backends.ipu.poprun import Instance
from ipu_pipe.backends.ipu.profile import CallTimes
from ipu_pipe.backends.ipu.wrapping import Wrapped, get_unsplit_name, wrap
from ipu_pipe.backends.ranks import are_joined
from ipu_pipe.job.evaluation import EvaluationResult, Tally, load_test_batches
from ipu_pipe.job.record import Job
from ipu_pipe.local.blocks import get_blocks
from ipu_pipe.model.randomness import derive_seed
from ipu_pipe.model.restoring import modes_restored


def count_losses(job: Job) -> int:
    """Count the model's losses: one, or one for each block that trains."""
    blocks = get_blocks(job.model)
    return 1 if blocks is None else len(blocks.heads) + 1


def make_results(job: Job, k: int, found: Sequence[torch.Tensor]) -> List[StepResult]:
    """Return the results of update k and the others of its call: mean losses and shares of right answers over what the output
    mode gives."""
    config, ipu, blocks = job.config, job.config.ipu, count_losses(job)
    iterations = ipu.device_iterations
    losses = found[1].double().reshape(-1, blocks)
    answers = found[2].double().reshape(-1, blocks, 2) if len(found) > 2 else None
    parts = iterations if ipu.output_mode in ("all", "every_n") else 1
    means = losses.reshape(parts, -1, blocks).mean(dim=1)
    if ipu.output_mode == "sum":
        means /= iterations * config.gradient_accumulation
    right = None if answers is None else answers.reshape(parts, -1, blocks, 2).sum(dim=1)
    means, right = _average_instances(means, right)
    samples = config.micro_batch_size * config.gradient_accumulation * config.replicas
    results = []
    for i in range(iterations):
        row = means[min(i, parts - 1)].tolist()
        shares: List[Optional[float]] = [None] * blocks
        if right is not None:
            counted = right[min(i, parts - 1)]
            shares = (counted[:, 0] / counted[:, 1].clamp(min=1)).tolist()
        check_finite(config, k + i, row)
        by_block = tuple(zip(row, shares)) if blocks > 1 else ()
        results.append(StepResult(row[-1], shares[-1], samples, by_block))
    return results


def _average_instances(
    means: torch.Tensor, right: Optional[torch.Tensor]
) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Average means and sum right answers over poprun's instances, where there are several."""
    if not are_joined():
        return means, right
    dist.all_reduce(means)
    if right is not None:
        dist.all_reduce(right)
    return means / dist.get_world_size(), right


class Snapshot(NamedTuple):
    """Weights and optimizer state when `update` updates are done, by get_unsplit_name names and by PopTorch's."""

    update: int
    model: Dict[str, torch.Tensor]
    optimizer: Optional[IpuState]


class Executors:
    """Training and inference model of a wrapped copy, and their optimizer. One of the two is attached at a time, unless there is
    room for both. `where`: "IPU" or "IPUs", for what is told of them."""

    def __init__(
        self, job: Job, wrapped: Wrapped, options: Callable[[bool], Any], optimizer: Optional[IpuState],
        first_update: int, timeline: CallTimes, where: str,
    ) -> None:  # fmt: skip
        """Make the training model. `options`: of the training (True) or inference model. `optimizer`: PopTorch's state to start
        from."""
        import poptorch

        self.job, self.wrapped, self.options, self.timeline, self._where = job, wrapped, options, timeline, where
        parameters = {
            name: p for name, p in ((get_unsplit_name(n), p) for n, p in wrapped.named_parameters()) if name is not None
        }
        names = {p: name for name, p in job.model.named_parameters()}
        clip = job.config.clip.norm if job.config.clip else None
        with describe_errors("making the optimizer"):
            self.optimizer: Any = translate_optimizer(job.optimizer, names, parameters, job.config.ipu, clip)
        self._saved, self._starts_anew = optimizer, first_update == 0
        self._set_rates(first_update)
        with describe_errors("making the training model"):
            self.training_options = options(True)
            self.training: Any = poptorch.trainingModel(wrapped, self.training_options, self.optimizer)
        self.inference: Optional[Any] = None

    def _set_rates(self, k: int) -> bool:
        """Set the optimizer's rates to those of update k; whether any changed."""
        return set_rates(self.optimizer, self.job.rules.rates(k))

    @property
    def _is_training_attached(self) -> bool:
        return bool(self.training.isCompiled() and self.training.isAttachedToDevice())

    # --- training

    def compile(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Compile the training model for the input of a call, where that is not done, and put the saved optimizer state into it:
        only the compiled model says which names it keeps."""
        if self.training.isCompiled():
            return
        with describe_errors("compiling the training model"):
            self.training.compile(x, y)
        if not self._starts_anew:
            with describe_errors("restoring the optimizer's state"):
                write_state(self.training, self.optimizer, self._saved)
        self._saved = None

    def call(self, updates: range, rates_of: int, x: torch.Tensor, y: torch.Tensor) -> Sequence[torch.Tensor]:
        """Make these updates in one call at the rates of update `rates_of`, and return what the model gives."""
        self.compile(x, y)
        if not self.training.isAttachedToDevice():
            with describe_errors(f"attaching to the {self._where}"):
                self.training.attachToDevice()
        if self._set_rates(
            rates_of
        ):  # when attached: PopTorch asserts that detached states are not changed on both sides
            with describe_errors("setting the learning rate"):
                self.training.setOptimizer(self.optimizer)
        start_ns = time.perf_counter_ns()
        with describe_errors(f"update {updates[0]}"):
            outputs: Sequence[torch.Tensor] = self.training(x, y)
        end_ns = time.perf_counter_ns()
        sent, received = (sum(t.numel() * t.element_size() for t in tensors) for tensors in ((x, y), outputs))
        self.timeline.add_call(self.training, updates[0], len(updates), start_ns, end_ns, len(x), sent, received)
        return outputs

    # --- evaluation

    def make_inference(self, example: Callable[[Any], torch.Tensor]) -> Any:
        """Return the inference model, made after the training model and compiled in evaluation mode. `example`: makes an input
        like its own."""
        import poptorch

        if self.inference is None:
            with modes_restored(self.wrapped), describe_errors("compiling the inference model"):
                inference = poptorch.inferenceModel(self.wrapped.eval(), self.options(False))
                inference.compile(convert_input(example(inference), self.job.config.precision))
            self.inference = inference
        return self.inference

    def enter_evaluation(self, example: Callable[[Any], torch.Tensor], detach: bool) -> Any:
        """Return the inference model, attached, with the training model's weights. `detach`: there is no room for both models."""
        with describe_errors("making room for the evaluation"):
            if self._is_training_attached:
                if detach:
                    self.training.detachFromDevice()  # weights and optimizer state come to the host
                else:
                    self.training.copyWeightsToHostIfNeeded()
        inference = self.make_inference(example)
        with describe_errors(f"attaching to the {self._where}"):
            if inference.isAttachedToDevice():
                inference.copyWeightsToDevice()
            else:
                inference.attachToDevice()
        return inference

    def leave_evaluation(self, detach: bool) -> None:
        """Give the inference model's IPUs back."""
        if detach:
            assert self.inference is not None
            with describe_errors(f"leaving the evaluation's {self._where}"):
                self.inference.detachFromDevice()

    # --- state

    def snapshot(self, update: int, with_optimizer: bool = True) -> Snapshot:
        """Return copies of weights and optimizer state as they are."""
        with describe_errors("reading the weights"):
            if self._is_training_attached:
                self.training.copyWeightsToHostIfNeeded()
            model = {}
            for name, value in self.wrapped.state_dict().items():
                unsplit = get_unsplit_name(name)
                if unsplit is not None:
                    model[unsplit] = value.detach().clone()
            optimizer = read_state(self.optimizer) if with_optimizer else None
        like = self.job.model.state_dict()
        return Snapshot(update, {name: value.to(like[name].dtype) for name, value in model.items()}, optimizer)

    def drop(self) -> None:
        """Give the IPUs back, without a word where they are lost already. `destroy` first reads what a lost device no longer
        tells and so frees nothing: then what holds the IPUs goes with the last reference to it."""
        for executor in (self.inference, self.training):
            if executor is not None:
                with contextlib.suppress(Exception):
                    executor.destroy()
        self.training = self.inference = self.optimizer = None


class Session:
    """The whole model on its IPUs, and the input of its calls from update `held.update` on."""

    def __init__(self, job: Job, held: Snapshot, share: Instance, place: Placement, timeline: CallTimes) -> None:
        config = job.config
        self.job, self.ipu, self.share, self.place = job, config.ipu, share, place
        self._first = held.update
        wrapped = wrap(job.model, job.loss, job.part, config.precision, self.ipu)
        _load(wrapped, held.model)
        self.executors = Executors(job, wrapped, self._options, held.optimizer, held.update, timeline, "IPUs")
        self.calls = Calls(
            job.data, config, job.updates_per_epoch, held.update, job.updates, share.first, share.replicas
        )
        with describe_errors("starting the data loader"):
            loading = DataLoading() if self.ipu.compile_only else self.ipu.data_loading
            self._feed = Feed(self.calls, job.data, loading, self.executors.training_options)

    def _options(self, training: bool) -> Any:
        base = None
        if self.share.base is not None:
            asked = round_up_ipus(self.place.ipus) if self.ipu.auto_round_num_ipus else self.place.ipus
            base = self.share.base(asked)
        seed = derive_seed(self.job.config.seed, "ipu", self._first) % 2**32
        with torch.random.fork_rng(devices=[]):  # randomSeed seeds the host's generator, too
            ipu_id = self.ipu.ipu_ids[0] if self.ipu.ipu_ids else None
            return make_options(self.job.config, self.job.method, self.place, training, seed, base, ipu_id)

    def compile(self) -> None:
        """Compile both models, run none. Compiling attaches, and the second model needs the first one's IPUs."""
        training = self.executors.training
        with describe_errors("compiling the training model"):
            training.compile(*self.calls[0])
            if training.isAttachedToDevice():
                training.detachFromDevice()
        self.make_inference()

    def call(self, k: int) -> List[StepResult]:
        """Make the updates k to k + D of one call."""
        x, y = self._feed.take()
        outputs = self.executors.call(range(k, k + self.ipu.device_iterations), k, x, y)
        return make_results(self.job, k, outputs)

    def make_inference(self) -> Any:
        """Return the inference model, compiled."""
        return self.executors.make_inference(self._example)

    def _example(self, inference: Any) -> torch.Tensor:
        return fill_up(self.job.example[0], self._rows(inference))

    def _rows(self, inference: Any) -> int:
        """Count the samples of an evaluation's call."""
        options = inference.options
        return int(self.job.config.micro_batch_size * options.device_iterations * options.replication_factor)

    def evaluate(self) -> List[EvaluationResult]:
        """Evaluate the test set on the inference model, with the training model's weights."""
        detach = self.ipu.detach_for_evaluation
        inference = self.executors.enter_evaluation(self._example, detach)
        results = self._tally(inference)
        self.executors.leave_evaluation(detach)
        return results

    def _tally(self, inference: Any) -> List[EvaluationResult]:
        tallies = [Tally.of(self.job) for _ in range(count_losses(self.job))]
        for x, y, count in split_into_calls(load_test_batches(self.job), self._rows(inference)):
            with describe_errors("evaluation"):
                outputs = inference(convert_input(x, self.job.config.precision))
            for tally, output in zip(tallies, outputs):
                tally.add(trim_output(output, count), y[:count], count)
        return [tally.evaluation for tally in tallies]

    def snapshot(self, update: int, with_optimizer: bool = True) -> Snapshot:
        """Return copies of weights and optimizer state as they are."""
        return self.executors.snapshot(update, with_optimizer)

    def drop(self) -> None:
        """Give the IPUs back and end the input."""
        self.executors.drop()
        self._feed.close()


def _load(wrapped: Wrapped, tensors: Dict[str, torch.Tensor]) -> None:
    tensors_by_name = {get_unsplit_name(name): t for name, t in wrapped.state_dict(keep_vars=True).items()}
    with torch.no_grad():
        for name, value in tensors.items():
            tensors_by_name[name].copy_(value)
