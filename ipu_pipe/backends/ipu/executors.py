"""PopTorch's training and inference model on one set of IPUs with their optimizer, and PopTorch's
errors as one line.
"""

from __future__ import annotations

import contextlib
import copy
import time
import traceback
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import torch

from ipu_pipe.backends.ipu.feed import convert_input, fill_up
from ipu_pipe.backends.ipu.optimizer import (
    IpuState,
    read_state,
    translate_optimizer,
    update_optimizer,
    write_state,
)
from ipu_pipe.backends.ipu.options import IpuOptions
from ipu_pipe.backends.ipu.profile import CallTimes
from ipu_pipe.backends.ipu.wrapping import Wrapped, get_unsplit_name
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.model.batch import count_bytes
from ipu_pipe.model.restoring import restore_modes
from ipu_pipe.replay.run import Run

# words of an error message -> remedy
HINTS = {
    ("Out of memory", "Memory allocation error"): (
        "take more stages or smaller microbatches, or recomputation, "
        "options.TensorLocations.setOptimizerLocation.useOnChipStorage=false, "
        "partials=half, another available_memory_proportion"
    ),
    ("Failed to acquire", "No IPU detected", "No device found"): (
        "see gc-info -l; POPTORCH_WAIT_FOR_IPU=1 waits until other programs end"
    ),
    ('Parameter "weight" is unsupported',): (
        "PopTorch's losses have no class weights: multiply the loss of reduction='none' by the "
        "labels' weights"
    ),
}


def forget_frames(error: BaseException | None) -> None:
    """Clear the local variables in the tracebacks of an exception and its causes, because one of
    them holds the IPUs.

    The lines of the tracebacks stay.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


@contextlib.contextmanager
def describe_errors(doing: str) -> Iterator[None]:
    """Turn PopTorch's errors, except recoverable device errors, into a `RunFault` of one line."""
    import poptorch

    try:
        yield
    except (BadInput, RunFault, poptorch.RecoverableError):
        raise
    except Exception as error:
        forget_frames(error)
        raise RunFault(f"poptorch: {doing}: {describe_error(error)}") from error


def describe_error(error: Any) -> str:
    """Return an error's kind and message, and the remedy if it is known."""
    text = " ".join(str(getattr(error, "message", error)).split())
    hints = [f": {hint}" for words, hint in HINTS.items() if any(word in text for word in words)]
    return f"{getattr(error, 'type', type(error).__name__)}: {text[:400]}" + "".join(hints)


class Snapshot(NamedTuple):
    """The state after `update` updates: weights by unsplit names, optimizer state by PopTorch's
    names.
    """

    update: int
    model: dict[str, torch.Tensor]
    optimizer: IpuState | None


class Executors:
    """The training and the inference model of a wrapped copy, and their optimizer.

    One of the two models is attached at a time, unless both fit. `rows`: the samples of an
    evaluation's call, known when the inference model is made.
    """

    @describe_errors("making the training model")
    def __init__(
        self,
        run: Run,
        wrapped: Wrapped,
        make_options: Callable[[bool], Any],
        example: torch.Tensor,
        start: Snapshot,
        timeline: CallTimes,
    ) -> None:
        """Make the training model.

        `make_options`: returns the options of the training model (True) or the inference model.
        `example`: a microbatch's input. `start`: the state to start from.
        """
        import poptorch

        for name, value in wrapped.state_dict().items():
            if get_unsplit_name(name) in start.model:
                value.copy_(start.model[str(get_unsplit_name(name))])
        self._run = run
        self._options: IpuOptions = run.options
        self.wrapped = wrapped
        # It shares the weights. PopTorch would upload them once more for a model that it has
        # wrapped for training.
        self._evaluated = copy.copy(wrapped)
        self._make_options = make_options
        self.timeline = timeline
        self._example = example
        self._start = start
        ipu = self._options.ipu
        self._detaches = ipu.detach_for_evaluation or ipu.local == "decoupled"
        self.optimizer: Any = translate_optimizer(run, wrapped, start.update)
        self.training_options = make_options(True)
        self.training: Any = poptorch.trainingModel(wrapped, self.training_options, self.optimizer)
        self.inference: Any = None
        self.rows = 0

    # ---- training

    @describe_errors("compiling the training model")
    def compile(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Compile the training model for the input of a call, and attach to the IPUs."""
        self.training.compile(x, y)

    def call(
        self, updates: range, rates_of: int, x: torch.Tensor, y: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """Make these updates in one call at the learning rates of update `rates_of`; return the
        model's outputs.
        """
        with describe_errors(f"update {updates[0]}"):
            # by the input of the first call
            if not self.training.isCompiled():
                self.compile(x, y)
                # only the compiled model tells the names of its optimizer state
                if self._start.update:
                    write_state(self.training, self.optimizer, self._start.optimizer)
            # an evaluation has released the IPUs
            if not self.training.isAttachedToDevice():
                self.training.attachToDevice()
            scaling = self._options.ipu.get_loss_scaling(rates_of)
            update_optimizer(self.training, self.optimizer, self._run.rules, rates_of, scaling)
            start_ns = time.perf_counter_ns()
            outputs: Sequence[torch.Tensor] = self.training(x, y)
        end_ns = time.perf_counter_ns()
        sent = count_bytes((x, y))
        received = count_bytes(outputs)
        self.timeline.add_call(self.training, updates, start_ns, end_ns, len(x), sent, received)
        return outputs

    # ---- evaluation

    @describe_errors("compiling the inference model")
    def make_inference(self) -> None:
        """Make the inference model after the training model and compile it in evaluation mode,
        which needs IPUs.
        """
        import poptorch

        options = self._make_options(False)
        # the copy that is put into evaluation mode shares its modules with the model that is
        # trained
        with restore_modes(self.wrapped):
            self.rows = (
                self._options.micro_batch_size
                * options.device_iterations
                * options.replication_factor
            )
            inference = poptorch.inferenceModel(self._evaluated.eval(), options)
            inference.compile(
                convert_input(fill_up(self._example, self.rows), self._options.precision)
            )
        self.inference = inference

    @contextlib.contextmanager
    def hold_inference(self) -> Iterator[None]:
        """Attach the inference model inside the context, with the training model's weights."""
        self._begin_evaluation()
        try:
            yield
        except BaseException:
            # a loader or a metric may fail, after which training goes on; of a lost device the
            # first error counts
            with contextlib.suppress(Exception):
                self._end_evaluation()
            raise
        self._end_evaluation()

    @describe_errors("making room for the evaluation")
    def _begin_evaluation(self) -> None:
        self.leave_training(self._detaches)
        if self.inference is None:
            # compiling attaches, and attaching copies the weights
            self.make_inference()
        elif self.inference.isAttachedToDevice():
            self.inference.copyWeightsToDevice()
        else:
            self.inference.attachToDevice()

    def leave_training(self, detaches: bool) -> None:
        """Bring the training model's weights to the host, and with `detaches` free its IPUs."""
        if self.training.isCompiled() and self.training.isAttachedToDevice():
            self.training.detachFromDevice() if detaches else self.training.copyWeightsToHostIfNeeded()

    @describe_errors("evaluation")
    def infer(self, x: torch.Tensor) -> list[Any]:
        """Return the outputs of one call of the inference model, of `rows` samples."""
        return list(self.inference(convert_input(x, self._options.precision)))

    @describe_errors("leaving the evaluation's IPUs")
    def _end_evaluation(self) -> None:
        """Release the IPUs for the training model if they do not hold both models."""
        if self._detaches:
            self.inference.detachFromDevice()

    # ---- state

    @describe_errors("reading the weights")
    def snapshot(self, update: int, with_optimizer: bool = True) -> Snapshot:
        """Return copies of the present weights and optimizer state."""
        like = self._run.model.state_dict()
        # the IPUs are kept: training goes on
        self.leave_training(False)
        model = {}
        for name_here, value in self.wrapped.state_dict().items():
            name = get_unsplit_name(name_here)
            if name is not None:
                # the copy may be in half precision, and the user's model is not
                model[name] = value.detach().clone().to(like[name].dtype)
        return Snapshot(update, model, read_state(self.optimizer) if with_optimizer else None)

    def drop(self) -> None:
        """Release the IPUs; ignore errors of a lost device.

        `destroy` first reads from the device, so for a lost one it fails and frees nothing. Then
        the executor's last reference releases the IPUs.
        """
        for executor in (self.inference, self.training):
            with contextlib.suppress(Exception):
                executor.destroy()
        self.training = self.inference = self.optimizer = None
