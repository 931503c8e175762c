"""Losses: what they read of a model's output and of a batch, and losses that models compute themselves.

output -> take -> scores -> loss(scores, y)          model.output: logits, an index, or a function
output -> its loss                                   loss: model

The names of a loss's keyword-only parameters say what it asks for of the batch besides the labels:

    def loss(output, y, *, weights)    its field `weights`, which the model is not given
    def loss(output, y, *, batch)      all of it, as the data gives it; the model is given what it would be anyway
"""

from __future__ import annotations

import inspect
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple, Union

import torch
from torch import nn

from ipu_pipe.errors import BadInput

Loss = Callable[[Any, Any], torch.Tensor]
Take = Callable[[Any], Any]
LOSS, SCORES = "loss", "logits"  # fields of an output, as Hugging Face names them


class LossOfOutput:
    """Calls the loss `plain` on the part of a model's output that `take` selects (None: all of it), with the fields of the batch
    that are named in `asks` as keyword arguments."""

    def __init__(self, plain: Callable[..., torch.Tensor], take: Optional[Take], asks: Tuple[str, ...] = ()) -> None:
        self.plain, self.take, self.asks = plain, take, asks

    def __call__(self, output: Any, y: Any) -> torch.Tensor:
        """Return the loss of a model's output and labels."""
        taken = take_scores(self, output)
        return self.plain(taken, y.labels, **y.asked) if self.asks else self.plain(taken, y)


class OwnLoss:
    """The loss that a model computes itself and gives with its output: the output if it is one number, else its field `loss`, of
    a tuple the one element that is one number. `take`: what accuracy is told from, the field `logits` where nothing is said."""

    def __init__(self, take: Optional[Take] = None) -> None:
        self.take: Take = take or _scores

    def __call__(self, output: Any, y: Any) -> torch.Tensor:
        """Return the loss in a model's output; the model has seen the labels."""
        loss_field = _field(output, LOSS)
        values = (
            [loss_field] if loss_field is not None else list(output) if isinstance(output, (tuple, list)) else [output]
        )
        losses = [value for value in values if isinstance(value, torch.Tensor) and value.numel() == 1]
        if len(losses) != 1:
            raise BadInput(
                f"loss: model: the model returns {describe_output(output)}: must be one number, or hold it as {LOSS}, or "
                "be a tuple with one number in it: was it given labels?"
            )
        return losses[0]


class TakePart:
    """Takes the field or element `key` of a model's output. A tensor, which has none, is the output itself: that of an auxiliary
    head."""

    def __init__(self, key: Union[int, str]) -> None:
        self.key = key

    def __call__(self, found: Any) -> Any:
        """Return the part of an output. Raise BadInput if there is none."""
        if isinstance(found, torch.Tensor):
            return found
        value = _field(found, self.key)
        if value is None:
            raise BadInput(f"model.output: {self.key}: the model returns {describe_output(found)}")
        return value


def take_scores(loss: Loss, output: Any) -> Any:
    """Return the part of a model's output of which its loss and its accuracy are."""
    return loss.take(output) if isinstance(loss, (LossOfOutput, OwnLoss)) and loss.take is not None else output


def get_plain_loss(loss: Loss) -> Loss:
    """Return the loss of the part that is taken."""
    return loss.plain if isinstance(loss, LossOfOutput) else loss


def takes_whole_output(loss: Loss) -> bool:
    """Tell whether the loss is of the whole output."""
    return not isinstance(loss, OwnLoss) and (not isinstance(loss, LossOfOutput) or loss.take is None)


def _scores(output: Any) -> Any:
    return _field(output, SCORES)


def _field(output: Any, key: Union[int, str]) -> Any:
    """Return a field or element of an output; None if there is none."""
    if isinstance(key, int):
        elements = list(output.values()) if isinstance(output, Mapping) else output
        return elements[key] if isinstance(elements, (tuple, list)) and -len(elements) <= key < len(elements) else None
    return output.get(key) if isinstance(output, Mapping) else getattr(output, key, None)


def list_fields(output: Any) -> List[Union[int, str]]:
    """List what can be taken from an output, by name or index; nothing of a tensor."""
    if isinstance(output, Mapping):
        return [key for key in output if isinstance(key, str)]
    if isinstance(output, (tuple, list)):
        return [*getattr(output, "_fields", range(len(output)))]
    attributes = getattr(output, "__dict__", {})
    return [] if isinstance(output, torch.Tensor) else [key for key, value in attributes.items() if value is not None]


def describe_output(output: Any) -> str:
    """Describe an output for the user: its type and its fields."""
    if isinstance(output, torch.Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    names = ", ".join(map(str, list_fields(output)))
    return f"{type(output).__name__}({names})"


WHOLE = "batch"  # what asks for all of it
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Labels(NamedTuple):
    """A nest that stands for the labels where the loss asks for more: the labels, and what it asks for, by name."""

    labels: Any
    asked: Dict[str, Any]


def get_labels(y: Any) -> Any:
    """Return the labels themselves."""
    return y.labels if isinstance(y, Labels) else y


def list_requested_fields(loss: Any) -> Tuple[str, ...]:
    """Return a loss's keyword-only parameters without a default. Raise BadInput if it cannot be called with two arguments
    and these."""
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    # a callable that is not written in Python has no signature
    except (TypeError, ValueError):
        return ()
    needed = [p for p in signature.parameters.values() if p.default is p.empty]
    further = [p.name for p in needed if p.kind in _POSITIONAL][2:]
    if further:
        raise BadInput(
            f"loss: takes {', '.join(further)} besides outputs and labels: of the batch it can have fields by name, as in "
            f"loss(output, y, *, {further[0]}), or all of it, as in loss(output, y, *, {WHOLE})"
        )
    return tuple(p.name for p in needed if p.kind is p.KEYWORD_ONLY)


def split_requested_fields(batch: Any, x: Any, y: Any, names: Tuple[str, ...]) -> Tuple[Any, Labels]:
    """Return inputs and labels of a batch, `x` and `y`, for a loss that asks for the fields `names`. Raise BadInput if a
    field is missing."""
    fields = x if isinstance(x, Mapping) else {}
    lacking = [name for name in names if name != WHOLE and name not in fields]
    if lacking:
        there = f"has {', '.join(map(str, fields))}" if fields else "has no fields by name"
        raise BadInput(
            f"loss: takes {', '.join(lacking)} of the batch, which besides labels {there}: must be among these, or {WHOLE}, "
            "all of it"
        )
    rest = {name: value for name, value in fields.items() if name not in names} if fields else x
    return rest, Labels(y, {name: batch if name == WHOLE else fields[name] for name in names})
