"""The training and the inference model of PopTorch that hang on one set of IPUs, with their optimizer; and what PopTorch raises,
told in a line."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence

import torch

from ipu_pipe.backends.ipu.config import IpuConfig
from ipu_pipe.backends.ipu.feed import convert_input, fill_up
from ipu_pipe.backends.ipu.optimizer import IpuState, read_state, set_rates, translate_optimizer, write_state
from ipu_pipe.backends.ipu.profile import CallTimes
from ipu_pipe.backends.ipu.wrapping import Wrapped, get_unsplit_name
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.job.record import Job
from ipu_pipe.model.restoring import modes_restored

Run = Callable[[torch.Tensor], List[Any]]  # the inference model: inputs of a call -> outputs


# words of a message -> what helps
HINTS = {
    ("Out of memory", "Memory allocation error"): (
        "take more stages or a smaller micro_batch_size, or recomputation, tensor_locations.optimizer.on_chip=false, "
        "partials=half, another available_memory_proportion"
    ),
    ("Failed to acquire", "No IPU detected", "No device found"): (
        "see gc-info -l; backend.ipu.wait_for_ipu=true waits for others to end"
    ),
    ('Parameter "weight" is unsupported',): (
        "no class weights in PopTorch's losses: multiply what reduction='none' gives by the labels' weights"
    ),
}


def forget_frames(error: Optional[BaseException]) -> None:
    """Clear the local variables of the calls that an exception, and what it came from, has passed: one of them is what holds the
    IPUs. Where it was raised stays known."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


@contextlib.contextmanager
def describe_errors(doing: str) -> Iterator[None]:
    """Turn what PopTorch raises, its own errors or those of its Python front end, into a RunFault of one line; let recoverable
    errors pass."""
    import poptorch

    try:
        yield
    except (BadInput, RunFault, poptorch.RecoverableError):
        raise
    except Exception as error:
        forget_frames(error)
        raise RunFault(f"poptorch: {doing}: {describe_error(error)}") from error


def describe_error(error: Any) -> str:
    """Return an error's kind and message, and what helps where that is known."""
    text = " ".join(str(getattr(error, "message", error)).split())
    hints = [f": {hint}" for words, hint in HINTS.items() if any(word in text for word in words)]
    return f"{getattr(error, 'type', type(error).__name__)}: {text[:400]}" + "".join(hints)


def check_hardware(ipu: IpuConfig, count: int) -> None:
    """Refuse (BadInput) where so many IPUs are not there, before a compilation that may take an hour."""
    import poptorch

    simulated = ipu.use_ipu_model or ipu.offline_target is not None
    if simulated or ipu.wait_for_ipu or os.environ.get("POPTORCH_IPU_MODEL", "0") not in ("", "0"):
        return
    if not poptorch.ipuHardwareIsAvailable(count):
        raise BadInput(
            f"backend.name: poptorch: this machine has no device of {count} IPUs: take fewer stages or replicas, or compile "
            "without one: backend.ipu.compile_only=true backend.ipu.offline_target=2"
        )


class Snapshot(NamedTuple):
    """Weights and optimizer state when `update` updates are done, by get_unsplit_name names and by PopTorch's."""

    update: int
    model: Dict[str, torch.Tensor]
    optimizer: Optional[IpuState]


class Executors:
    """Training and inference model of a wrapped copy, and their optimizer. One of the two is attached at a time, unless there is
    room for both. `rows`: samples of an evaluation's call, once the inference model is made."""

    def __init__(
        self, job: Job, wrapped: Wrapped, options: Callable[[bool], Any], example: torch.Tensor,
        optimizer: Optional[IpuState], first_update: int, timeline: CallTimes,
    ) -> None:  # fmt: skip
        """Make the training model. `options`: of the training (True) or inference model. `example`: a microbatch's input.
        `optimizer`: PopTorch's state to start from."""
        import poptorch

        self.job, self.wrapped, self.options, self.timeline = job, wrapped, options, timeline
        self._example, self._saved, self._starts_anew = example, optimizer, first_update == 0
        parameters = {get_unsplit_name(name): p for name, p in wrapped.named_parameters()}
        of_model = {name: p for name, p in parameters.items() if name is not None}
        names = {p: name for name, p in job.model.named_parameters()}
        clip = job.config.clip.norm if job.config.clip else None
        with describe_errors("making the optimizer"):
            self.optimizer: Any = translate_optimizer(job.optimizer, names, of_model, job.config.ipu, clip)
        set_rates(self.optimizer, job.rules.rates(first_update))
        with describe_errors("making the training model"):
            self.training_options = options(True)
            self.training: Any = poptorch.trainingModel(wrapped, self.training_options, self.optimizer)
        self.inference: Any = None
        self.rows = 0

    @property
    def _is_training_attached(self) -> bool:
        return bool(self.training.isCompiled() and self.training.isAttachedToDevice())

    # --- training

    def _compile(self, x: torch.Tensor, y: torch.Tensor) -> None:
        with describe_errors("compiling the training model"):
            self.training.compile(x, y)

    def compile_both(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Compile both models for the input of a call, run none. Compiling attaches, and the second model needs the first one's
        IPUs."""
        self._compile(x, y)
        with describe_errors("leaving the IPUs"):
            if self.training.isAttachedToDevice():
                self.training.detachFromDevice()
        self._make_inference()

    def call(self, updates: range, rates_of: int, x: torch.Tensor, y: torch.Tensor) -> Sequence[torch.Tensor]:
        """Make these updates in one call at the rates of update `rates_of`, and return what the model gives."""
        if not self.training.isCompiled():
            self._compile(x, y)
            if not self._starts_anew:  # only the compiled model says which names it keeps
                with describe_errors("restoring the optimizer's state"):
                    write_state(self.training, self.optimizer, self._saved)
            self._saved = None
        with describe_errors("attaching to the IPUs"):
            if not self.training.isAttachedToDevice():
                self.training.attachToDevice()
        # when attached: PopTorch asserts that detached states are not changed on both sides
        if set_rates(self.optimizer, self.job.rules.rates(rates_of)):
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

    def _make_inference(self) -> Any:
        """Return the inference model, made after the training model and compiled in evaluation mode."""
        import poptorch

        if self.inference is None:
            config = self.job.config
            with modes_restored(self.wrapped), describe_errors("compiling the inference model"):
                options = self.options(False)
                self.rows = config.micro_batch_size * options.device_iterations * options.replication_factor
                inference = poptorch.inferenceModel(self.wrapped.eval(), options)
                inference.compile(convert_input(fill_up(self._example, self.rows), config.precision))
            self.inference = inference
        return self.inference

    @contextlib.contextmanager
    def evaluating(self, detach: bool) -> Iterator[Run]:
        """Yield the inference model, attached, with the training model's weights. `detach`: there is no room for both models."""
        with describe_errors("making room for the evaluation"):
            if self._is_training_attached:
                if detach:
                    self.training.detachFromDevice()  # weights and optimizer state come to the host
                else:
                    self.training.copyWeightsToHostIfNeeded()
        inference = self._make_inference()
        with describe_errors("attaching to the IPUs"):
            if inference.isAttachedToDevice():
                inference.copyWeightsToDevice()
            else:
                inference.attachToDevice()

        def run(x: torch.Tensor) -> List[Any]:
            with describe_errors("evaluation"):
                return list(inference(convert_input(x, self.job.config.precision)))

        yield run
        if detach:
            with describe_errors("leaving the evaluation's IPUs"):
                inference.detachFromDevice()

    # --- state

    def snapshot(self, update: int, with_optimizer: bool = True) -> Snapshot:
        """Return copies of weights and optimizer state as they are."""
        like = self.job.model.state_dict()
        with describe_errors("reading the weights"):
            if self._is_training_attached:
                self.training.copyWeightsToHostIfNeeded()
            state = {get_unsplit_name(name): value for name, value in self.wrapped.state_dict().items()}
            model = {
                name: value.detach().clone().to(like[name].dtype) for name, value in state.items() if name is not None
            }
            return Snapshot(update, model, read_state(self.optimizer) if with_optimizer else None)

    def drop(self) -> None:
        """Give the IPUs back, without a word where they are lost already. `destroy` first reads what a lost device no longer
        tells and so frees nothing: then what holds the IPUs goes with the last reference to it."""
        for executor in (self.inference, self.training):
            if executor is not None:
                with contextlib.suppress(Exception):
                    executor.destroy()
        self.training = self.inference = self.optimizer = None
