"""What a loss reads of a model's output that is an object, a mapping or a tuple, and losses that models compute themselves.

output -> take -> scores -> loss(scores, y)          model.output: logits, an index, or a function
output -> its loss                                   loss: model

What a loss asks for of the batch besides its labels comes with them (`ipu_pipe.model.asking`).
"""

from __future__ import annotations

from typing import Any, Callable, List, Mapping, Optional, Tuple, Union

import torch

from ipu_pipe.errors import BadInput
from ipu_pipe.model.probe import Loss

Take = Callable[[Any], Any]
LOSS, SCORES = "loss", "logits"  # fields of an output, as Hugging Face names them


class OfOutput:
    """The loss `plain` of what `take` picks out of a model's output, all of it where None, and of what it asks for of the batch,
    the names of which are `asks`."""

    def __init__(self, plain: Callable[..., torch.Tensor], take: Optional[Take], asks: Tuple[str, ...] = ()) -> None:
        self.plain, self.take, self.asks = plain, take, asks

    def __call__(self, output: Any, y: Any) -> torch.Tensor:
        """The loss of a model's output and labels."""
        taken = scores(self, output)
        return self.plain(taken, y.labels, **y.asked) if self.asks else self.plain(taken, y)


class OwnLoss:
    """The loss that a model computes itself and gives with its output: the output if it is one number, else its field `loss`, of
    a tuple the one element that is one number. `take`: what accuracy is told from, the field `logits` where nothing is said."""

    def __init__(self, take: Optional[Take] = None) -> None:
        self.take: Take = take or _scores

    def __call__(self, output: Any, y: Any) -> torch.Tensor:
        """Whatever the labels: the model has seen them."""
        held = _field(output, LOSS)
        found = [held] if held is not None else list(output) if isinstance(output, (tuple, list)) else [output]
        losses = [value for value in found if isinstance(value, torch.Tensor) and value.numel() == 1]
        if len(losses) != 1:
            raise BadInput(
                f"loss: model: the model returns {told(output)}: must be one number, or hold it as {LOSS}, or be a tuple with "
                "one number in it: was it given labels?"
            )
        return losses[0]


class Part:
    """Takes the field or element `key` of a model's output. A tensor, which has none, is the output itself: that of an auxiliary
    head."""

    def __init__(self, key: Union[int, str]) -> None:
        self.key = key

    def __call__(self, found: Any) -> Any:
        """The part. Raises BadInput where there is none."""
        if isinstance(found, torch.Tensor):
            return found
        value = _field(found, self.key)
        if value is None:
            raise BadInput(f"model.output: {self.key}: the model returns {told(found)}")
        return value


def scores(loss: Loss, output: Any) -> Any:
    """What of a model's output its loss is of, and accuracy."""
    return loss.take(output) if isinstance(loss, (OfOutput, OwnLoss)) and loss.take is not None else output


def plain(loss: Loss) -> Loss:
    """The loss of what is taken."""
    return loss.plain if isinstance(loss, OfOutput) else loss


def takes_all(loss: Loss) -> bool:
    """Whether the loss is of the output as it is."""
    return not isinstance(loss, OwnLoss) and (not isinstance(loss, OfOutput) or loss.take is None)


def _scores(output: Any) -> Any:
    return _field(output, SCORES)


def _field(output: Any, key: Union[int, str]) -> Any:
    """None where there is none."""
    if isinstance(key, int):
        held = list(output.values()) if isinstance(output, Mapping) else output
        return held[key] if isinstance(held, (tuple, list)) and -len(held) <= key < len(held) else None
    return output.get(key) if isinstance(output, Mapping) else getattr(output, key, None)


def fields(output: Any) -> List[Union[int, str]]:
    """What there is to take from an output, by name or index; nothing of a tensor."""
    if isinstance(output, Mapping):
        return [key for key in output if isinstance(key, str)]
    if isinstance(output, (tuple, list)):
        return [*getattr(output, "_fields", range(len(output)))]
    own = getattr(output, "__dict__", {})
    return [] if isinstance(output, torch.Tensor) else [key for key, value in own.items() if value is not None]


def told(output: Any) -> str:
    """An output for the user: its kind, and what is in it."""
    if isinstance(output, torch.Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    held = ", ".join(map(str, fields(output)))
    return f"{type(output).__name__}({held})"
