"""What PopTorch makes of a wrapped model: all that is lost with a device, of the whole model or of one block."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence

import torch

from ipu_pipe.backends.ipu.faults import told
from ipu_pipe.backends.ipu.feed import as_input
from ipu_pipe.backends.ipu.optimizer import IpuState, read_state, set_rates, translate, write_state
from ipu_pipe.backends.ipu.profile import Timeline
from ipu_pipe.backends.ipu.wrapping import Wrapped, unsplit
from ipu_pipe.job.record import Job
from ipu_pipe.model.restoring import modes_restored


class Snapshot(NamedTuple):
    """Weights and optimizer state when `update` updates are done, by unsplit names and by PopTorch's."""

    update: int
    model: Dict[str, torch.Tensor]
    optimizer: Optional[IpuState]


class Executors:
    """Training and inference model of a wrapped copy, and their optimizer. One of the two is attached at a time, unless there is
    room for both. `where`: "IPU" or "IPUs", for what is told of them."""

    def __init__(
        self, job: Job, wrapped: Wrapped, options: Callable[[bool], Any], optimizer: Optional[IpuState],
        first_update: int, timeline: Timeline, where: str,
    ) -> None:  # fmt: skip
        """`options`: of the training (True) or inference model. `optimizer`: PopTorch's state to start from."""
        import poptorch

        self.job, self.wrapped, self.options, self.timeline, self._where = job, wrapped, options, timeline, where
        own = {name: p for name, p in ((unsplit(n), p) for n, p in wrapped.named_parameters()) if name is not None}
        names = {p: name for name, p in job.model.named_parameters()}
        clip = job.config.clip.norm if job.config.clip else None
        with told("making the optimizer"):
            self.optimizer: Any = translate(job.optimizer, names, own, job.config.ipu, clip)
        self._saved, self._starts_anew = optimizer, first_update == 0
        self._set_rates(first_update)
        with told("making the training model"):
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
        with told("compiling the training model"):
            self.training.compile(x, y)
        if not self._starts_anew:
            with told("restoring the optimizer's state"):
                write_state(self.training, self.optimizer, self._saved)
        self._saved = None

    def call(self, updates: range, rates_of: int, x: torch.Tensor, y: torch.Tensor) -> Sequence[torch.Tensor]:
        """What the model gives for these updates, made in one call at the rates of one update."""
        self.compile(x, y)
        if not self.training.isAttachedToDevice():
            with told(f"attaching to the {self._where}"):
                self.training.attachToDevice()
        if self._set_rates(
            rates_of
        ):  # when attached: PopTorch asserts that detached states are not changed on both sides
            with told("setting the learning rate"):
                self.training.setOptimizer(self.optimizer)
        start_ns = time.perf_counter_ns()
        with told(f"update {updates[0]}"):
            found: Sequence[torch.Tensor] = self.training(x, y)
        end_ns = time.perf_counter_ns()
        sent, received = (sum(t.numel() * t.element_size() for t in tensors) for tensors in ((x, y), found))
        self.timeline.add_call(self.training, updates[0], len(updates), start_ns, end_ns, len(x), sent, received)
        return found

    # --- evaluation

    def make_inference(self, example: Callable[[Any], torch.Tensor]) -> Any:
        """The inference model, made after the training model and compiled in evaluation mode. `example`: what its input is like,
        of the model."""
        import poptorch

        if self.inference is None:
            with modes_restored(self.wrapped), told("compiling the inference model"):
                made = poptorch.inferenceModel(self.wrapped.eval(), self.options(False))
                made.compile(as_input(example(made), self.job.config.precision))
            self.inference = made
        return self.inference

    def enter_evaluation(self, example: Callable[[Any], torch.Tensor], detach: bool) -> Any:
        """The inference model, attached, with the training model's weights. `detach`: there is no room for both."""
        with told("making room for the evaluation"):
            if self._is_training_attached:
                if detach:
                    self.training.detachFromDevice()  # weights and optimizer state come to the host
                else:
                    self.training.copyWeightsToHostIfNeeded()
        inference = self.make_inference(example)
        with told(f"attaching to the {self._where}"):
            if inference.isAttachedToDevice():
                inference.copyWeightsToDevice()
            else:
                inference.attachToDevice()
        return inference

    def leave_evaluation(self, detach: bool) -> None:
        """Give the inference model's IPUs back."""
        if detach:
            assert self.inference is not None
            with told(f"leaving the evaluation's {self._where}"):
                self.inference.detachFromDevice()

    # --- state

    def snapshot(self, update: int, with_optimizer: bool = True) -> Snapshot:
        """Weights and optimizer state as they are, copies."""
        with told("reading the weights"):
            if self._is_training_attached:
                self.training.copyWeightsToHostIfNeeded()
            model = {}
            for name, value in self.wrapped.state_dict().items():
                own = unsplit(name)
                if own is not None:
                    model[own] = value.detach().clone()
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
