"""What PopTorch raises, told in a line."""

from __future__ import annotations

import contextlib
import os
import traceback
from typing import Any, Iterator, Optional, Sequence

from ipu_pipe.backends.ipu.config import IpuConfig
from ipu_pipe.backends.work import refuse_nonfinite
from ipu_pipe.config.schema import Config
from ipu_pipe.errors import BadInput, RunFault

FRONT_END = (
    AssertionError,
    ValueError,
    AttributeError,
    TypeError,
    KeyError,
    IndexError,
    NotImplementedError,
    RuntimeError,
)
HINTS = (
    (
        ("Out of memory", "Memory allocation error"),
        "take more stages or a smaller micro_batch_size, or recomputation, tensor_locations.optimizer.on_chip=false, "
        "partials=half, another available_memory_proportion",
    ),
    (
        ("Failed to acquire", "No IPU detected", "No device found"),
        "see gc-info -l; backend.ipu.wait_for_ipu=true waits for others to end",
    ),
    (
        ('Parameter "weight" is unsupported',),
        "no class weights in PopTorch's losses: multiply what reduction='none' gives by the labels' weights",
    ),
)


def forget_frames(error: Optional[BaseException]) -> None:
    """Clear the local variables of the calls that an exception, and what it came from, has passed: one of them is what holds the
    IPUs. Where it was raised stays known."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


@contextlib.contextmanager
def describe_errors(doing: str) -> Iterator[None]:
    """Turn what PopTorch raises, of either family of exceptions, into a RunFault of one line; let recoverable errors pass."""
    import poptorch

    try:
        yield
    except (BadInput, RunFault, poptorch.RecoverableError):
        raise
    except poptorch.Error as error:
        forget_frames(error)
        raise RunFault(f"poptorch: {doing}: {describe_error(error)}") from error
    except FRONT_END as error:
        forget_frames(error)
        raise RunFault(f"poptorch: {doing}: {type(error).__name__}: {' '.join(str(error).split())[:400]}") from error


def describe_error(error: Any) -> str:
    """Return an error's kind and message, and what helps where that is known."""
    text = " ".join(str(error.message).split())
    hint = next((hint for words, hint in HINTS if any(word in text for word in words)), "")
    return f"{error.type}: {text[:400]}" + (f": {hint}" if hint else "")


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


def check_finite(config: Config, update: int, losses: Sequence[float]) -> None:
    """Raise RunFault for a loss that is not a finite number, unless the config allows it."""
    if not config.allow_nonfinite:
        scaling = ", with half precision another backend.ipu.loss_scaling"
        refuse_nonfinite(config.method, update, losses, scaling)


@contextlib.contextmanager
def describe_block_errors(rank: int, doing: str) -> Iterator[None]:
    """Add rank and block to a fault. A device error ends the run, since the other blocks cannot go back."""
    import poptorch

    try:
        yield
    except BadInput:
        raise
    except poptorch.RecoverableError as error:
        raise RunFault(
            f"rank {rank}, block {rank}: device error ({error.recovery_action}): {error.message}: do what it asks "
            "for, then go on with --resume"
        ) from error
    except RunFault as error:
        raise RunFault(f"rank {rank}, block {rank}: {error}") from error
    except RuntimeError as error:  # of torch.distributed
        said = " ".join(str(error).split())[:200]
        raise RunFault(f"rank {rank}, block {rank}: {doing}: another rank is lost: {said}") from error
