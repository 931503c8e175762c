"""How a model is called with a batch's input."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Tuple

from torch import nn


def call(model: nn.Module, x: Any) -> Any:
    """The output of `model` for the input `x`: a mapping is its keyword arguments, a tuple or list its positional ones, whatever
    these hold; anything else is its one argument."""
    if isinstance(x, Mapping):
        return model(**x)
    if isinstance(x, (tuple, list)):
        return model(*x)
    return model(x)


def called_with(inputs: Tuple[Any, ...], named: Dict[str, Any]) -> Any:
    """The input for which `call` gave a model these arguments."""
    alone = len(inputs) == 1 and not named and not isinstance(inputs[0], (Mapping, tuple, list))
    return inputs[0] if alone else named or inputs
