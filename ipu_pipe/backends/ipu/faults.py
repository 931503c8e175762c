"""What PopTorch raises, told in a line."""

from __future__ import annotations

import contextlib
import os
import traceback
from typing import Any, Iterator, Optional

from ipu_pipe.backends.ipu.config import IpuConfig
from ipu_pipe.errors import BadInput, RunFault

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
