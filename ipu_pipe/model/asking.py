"""Losses that take more than output and labels: what the names of their keyword-only parameters ask for of the batch.

def loss(output, y, *, weights)    its field `weights`, which the model is not given
def loss(output, y, *, batch)      all of it, as the data gives it; the model is given what it would be anyway
"""

from __future__ import annotations

import inspect
from typing import Any, Dict, Mapping, NamedTuple, Tuple

from torch import nn

from ipu_pipe.errors import BadInput

WHOLE = "batch"  # what asks for all of it
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Labels(NamedTuple):
    """A nest that stands for the labels where the loss asks for more: the labels, and what it asks for, by name."""

    labels: Any
    asked: Dict[str, Any]


def labels_of(y: Any) -> Any:
    """The labels themselves."""
    return y.labels if isinstance(y, Labels) else y


def asked_by(loss: Any) -> Tuple[str, ...]:
    """The keyword-only parameters without a default of a loss. Raises BadInput where it cannot be called with two arguments and
    these."""
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except (TypeError, ValueError):  # not written in Python
        return ()
    needed = [p for p in signature.parameters.values() if p.default is p.empty]
    further = [p.name for p in needed if p.kind in _POSITIONAL][2:]
    if further:
        raise BadInput(
            f"loss: takes {', '.join(further)} besides outputs and labels: of the batch it can have fields by name, as in "
            f"loss(output, y, *, {further[0]}), or all of it, as in loss(output, y, *, {WHOLE})"
        )
    return tuple(p.name for p in needed if p.kind is p.KEYWORD_ONLY)


def asked_of(batch: Any, x: Any, y: Any, names: Tuple[str, ...]) -> Tuple[Any, Labels]:
    """Inputs and labels of a batch, which are `x` and `y` in it, for a loss that asks for `names`. Raises BadInput."""
    held = x if isinstance(x, Mapping) else {}
    lacking = [name for name in names if name != WHOLE and name not in held]
    if lacking:
        there = f"has {', '.join(map(str, held))}" if held else "has no fields by name"
        raise BadInput(
            f"loss: takes {', '.join(lacking)} of the batch, which besides labels {there}: must be among these, or {WHOLE}, "
            "all of it"
        )
    rest = {name: value for name, value in held.items() if name not in names} if held else x
    return rest, Labels(y, {name: batch if name == WHOLE else held[name] for name in names})
