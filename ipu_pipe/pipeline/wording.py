"""Faults that are found in the keys of a config, in the words of the arguments of `Pipeline`."""

from __future__ import annotations

import contextlib
import re
from typing import Iterator

from ipu_pipe.errors import BadInput

# (pattern, replacement), applied one after another
ARGUMENTS: tuple[tuple[str, str], ...] = (
    (r"^configure: ", ""),
    (r" tools/train\.py CONFIG --set backend\.name=distributed", " your script"),
    (r"^backend\.name: ", "backend: "),
    (r" with backend\.ipu=null and precision=(\w+)", r' with precision="\1"'),
    (r"\bbackend\.name[:=] ?(\w+)", r'backend="\1"'),
    (r"\bbackend\.name\b", "backend"),
    (r"backend: \{name: (\w+)\}", r'backend="\1"'),
    (r"\bbackend\.(device|deadline)\b", r"\1"),
    (r"\bbackend\.(\w+)", r"backend_args.\1"),
    (r"\bgradient_accumulation\b", "microbatches"),
    (r"\bmethod_args(\.|: )warmup\b", "warmup"),
    (r"method_args: \{stash: true\}", 'method_args={"stash": True}'),
    (
        r"method_args: \{recompute: \{segments: \.\.\.\}\}",
        'method_args={"recompute": {"segments": ...}}',
    ),
    (r"^clip\.(scope|norm): ", "clip: "),
    (r"\bscope: stage with norm: ([\d.e+-]+)", r'clip=(\1, "stage")'),
    (r"\bscope: (global|delayed_global)\b", r'scope "\1"'),
    (r"^data: label ", "step: y: label "),
    (r"\bset which one, as in model\.output: (\w+),", r'take one in the loss, as in output["\1"],'),
    (r"; set model\.output", "; let the model return that"),
    (r"^loss: model: ", "loss: None: "),
    (r"\bloss: model\b", "loss=None"),
    (
        r"\bor an import string module:name of a function of the labels",
        "or a function of the labels",
    ),
    (
        r"\bneeds to know the devices: hardware: a name or file, or processes",
        'needs backend="distributed"',
    ),
    (
        r"\bneeds to know the devices: hardware: a name or file",
        "chooses by a hardware description, which a config has",
    ),
    (r"\bmust be null\b", "must be None"),
    (r"\bmust be true\b", "must be True"),
    (r"\bmust be false\b", "must be False"),
    (r": true\b", ": True"),
    (r": false\b", ": False"),
)


def reword(fault: str) -> str:
    """Return a fault of a config in the words of the arguments of `Pipeline`."""
    for pattern, replacement in ARGUMENTS:
        fault = re.sub(pattern, replacement, fault)
    return fault


@contextlib.contextmanager
def name_arguments() -> Iterator[None]:
    """Name the arguments of `Pipeline` in the faults of a `BadInput` that leaves the context,
    instead of the keys of a config.
    """
    try:
        yield
    except BadInput as error:
        error.faults = [reword(fault) for fault in error.faults]
        error.args = ("; ".join(error.faults),)
        raise
