"""Losses: the part of a model's output and the fields of a batch that they take, losses that models
compute themselves, losses of blocks, and the labels that a loss allows and that a model gets right.

output -> take -> scores -> loss(scores, y)          model.output: logits, an index, or a function
output -> its loss                                   loss: model

The keyword-only parameters of a loss name the fields of the batch that it takes besides the labels:

    def loss(output, y, *, weights)    the field `weights`, which the model does not get
    def loss(output, y, *, batch)      the whole batch as the data returns it; the model gets its usual input
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, List, Mapping, NamedTuple

import torch
from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.model.batch import clone_tensors, describe_tensors, list_tensors
from ipu_pipe.refusals import OWN_LOSS, Words
from ipu_pipe.text import describe_kind

Loss = Callable[[Any, Any], torch.Tensor]
# labels of a microbatch -> its weight in the mean loss of its update
LossWeight = Callable[[Any], Any]
Take = Callable[[Any], Any]
# fields of an output, as Hugging Face names them
LOSS = "loss"
SCORES = "logits"
# the default ignored label of torch's cross-entropy
IGNORED = -100


class LossOfOutput:
    """The loss `plain` of the part of a model's output that `take` selects (None: the whole
    output).

    `asks`: the fields of the batch that the loss gets as keyword arguments.
    """

    def __init__(
        self,
        plain: Callable[..., torch.Tensor],
        take: Take | None,
        asks: tuple[str, ...] = (),
    ) -> None:
        self.plain = plain
        self.take = take
        self.asks = asks

    def __call__(self, output: Any, y: Any) -> torch.Tensor:
        """Return the loss of a model's output and labels."""
        taken = take_scores(self, output)
        # a loss that asks for fields gets `Labels`, never plain labels
        return self.plain(taken, y.labels, **y.asked) if self.asks else self.plain(taken, y)


class OwnLoss:
    """The loss that a model computes itself: the output if it is one number, its field `loss`, or
    the one number in a tuple.

    `take`: selects the scores for the accuracy, the field `logits` by default.
    """

    def __init__(self, take: Take | None = None) -> None:
        self.take: Take = take or _get_scores

    def __call__(self, output: Any, y: Any) -> torch.Tensor:
        """Return the loss in a model's output; the model has seen the labels."""
        loss_field = _get_field(output, LOSS)
        values = (
            [loss_field]
            if loss_field is not None
            else list(output)
            # scores may be beside it in the tuple: only one number is allowed
            if isinstance(output, (tuple, list))
            else [output]
        )
        losses = [
            value for value in values if isinstance(value, torch.Tensor) and value.numel() == 1
        ]
        if len(losses) != 1:
            raise BadInput(
                f"{OWN_LOSS}: the model returns {describe_output(output)}: must be one number, "
                f"have it as field {LOSS}, or "
                "be a tuple with one number in it: does the model get the labels?"
            )
        return losses[0]


class TakePart:
    """Select the field or element `key` of a model's output; return a tensor (an auxiliary head's
    output) unchanged.
    """

    def __init__(self, key: int | str) -> None:
        self.key = key

    def __call__(self, output: Any) -> Any:
        """Return the part of an output. Raise `BadInput` if there is none."""
        if isinstance(output, torch.Tensor):
            return output
        value = _get_field(output, self.key)
        if value is None:
            raise BadInput(f"model.output: {self.key}: the model returns {describe_output(output)}")
        return value


class BlockOutputs(List[Any]):
    """The outputs of all blocks in a training forward, the model's own last."""


class SumOfLosses:
    """The sum of the losses of all blocks; for a single output the loss itself."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss

    def __call__(self, output: Any, y: Any) -> torch.Tensor:
        losses = compute_losses(self, output, y)
        return (
            losses[0]
            if len(losses) == 1
            # a user's loss may have the shape (1,)
            else torch.stack([loss.reshape(()) for loss in losses]).sum()
        )


def wrap_loss(plain: Callable[..., torch.Tensor], take: Take | None = None) -> Loss:
    """Return a loss that a user wrote as a loss of what `take` selects, with the fields of the
    batch that it asks for. Raise `BadInput` if it asks for something that it cannot be given.
    """
    asks = list_requested_fields(plain)
    return plain if take is None and not asks else LossOfOutput(plain, take, asks)


def get_block_loss(loss: Loss) -> Loss:
    """Return the loss of one output: that of each block, if the blocks of a model have losses of
    their own.
    """
    return loss.loss if isinstance(loss, SumOfLosses) else loss


def compute_losses(loss: Loss, output: Any, y: Any) -> list[torch.Tensor]:
    """Return one loss for each block that has its own, the model's own last."""
    block_loss = get_block_loss(loss)
    if not isinstance(output, BlockOutputs):
        return [call_loss(block_loss, output, y)]
    # copies, because a loss may write to its labels, which the next one reads
    return [call_loss(block_loss, one, clone_tensors(y)) for one in output]


def call_loss(loss: Loss, output: Any, y: Any) -> torch.Tensor:
    """Return the loss of one output. Raise `BadInput` if the user's function returns something else
    than for the first batch.
    """
    value: Any = loss(output, y)
    if not isinstance(value, torch.Tensor):
        raise BadInput(f"loss: returned {describe_kind(value)}: must return one number, a tensor")
    return value


class _Zero(torch.autograd.Function):
    """Return 0, whose gradients are zeros, whatever the values are."""

    @staticmethod
    def forward(ctx: Any, *values: torch.Tensor) -> torch.Tensor:
        # gradients of zeros need the shapes of the values
        ctx.save_for_backward(*values)
        # not a sum times 0, which is NaN where a value is not finite
        return values[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return tuple(torch.zeros_like(value) for value in ctx.saved_tensors)


def compute_zero_losses(loss: Loss, output: Any) -> list[torch.Tensor]:
    """Return a loss of 0 for each block that has its own, without calling the loss, which may be
    NaN.

    The gradients are exactly 0, of the same parameters that a loss of the whole output trains.
    """
    zeros = []
    for block_output in output if isinstance(output, BlockOutputs) else [output]:
        values = [value for value in list_tensors(block_output) if value.requires_grad]
        if isinstance(loss, OwnLoss):
            # the model has computed its loss, so the gradients begin at the rest of its output
            values = [value for value in values if value.numel() > 1] or values
        zeros.append(_Zero.apply(*values) if values else torch.zeros(()))  # type: ignore[no-untyped-call]
    return zeros


def take_scores(loss: Loss, output: Any) -> Any:
    """Return the part of a model's output, or of a block's, from which loss and accuracy are
    computed.
    """
    loss = get_block_loss(loss)
    return (
        loss.take(output)
        if isinstance(loss, (LossOfOutput, OwnLoss)) and loss.take is not None
        else output
    )


def get_plain_loss(loss: Loss) -> Loss:
    """Return the loss without the selection of a part of the output."""
    return loss.plain if isinstance(loss, LossOfOutput) else loss


def takes_whole_output(loss: Loss) -> bool:
    """Tell whether the loss takes the whole output."""
    return not isinstance(loss, OwnLoss) and (
        not isinstance(loss, LossOfOutput) or loss.take is None
    )


def _get_scores(output: Any) -> Any:
    return _get_field(output, SCORES)


def _get_field(output: Any, key: int | str) -> Any:
    """Return a field or element of an output; None if there is none."""
    if isinstance(key, int):
        elements = list(output.values()) if isinstance(output, Mapping) else output
        return (
            elements[key]
            if isinstance(elements, (tuple, list)) and -len(elements) <= key < len(elements)
            else None
        )
    return output.get(key) if isinstance(output, Mapping) else getattr(output, key, None)


def list_fields(output: Any) -> list[int | str]:
    """List the names or indices that can be selected from an output; none for a tensor."""
    if isinstance(output, Mapping):
        return [key for key in output if isinstance(key, str)]
    if isinstance(output, (tuple, list)):
        return [*getattr(output, "_fields", range(len(output)))]
    attributes = getattr(output, "__dict__", {})
    return (
        []
        if isinstance(output, torch.Tensor)
        else [key for key, value in attributes.items() if value is not None]
    )


def describe_output(output: Any) -> str:
    """Describe an output for the user: its type and its fields."""
    if isinstance(output, torch.Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    names = ", ".join(map(str, list_fields(output)))
    return f"{type(output).__name__}({names})"


# the parameter name that asks for the whole batch
WHOLE_BATCH = "batch"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Labels(NamedTuple):
    """The labels together with the fields `asked` that the loss takes; a nest that replaces plain
    labels.
    """

    labels: Any
    asked: dict[str, Any]


def get_labels(y: Any) -> Any:
    """Return the labels themselves."""
    return y.labels if isinstance(y, Labels) else y


def count_right(output: Any, y: Any, among: int = 1) -> torch.Tensor | None:
    """Return (right, counted): labels among the `among` greatest outputs, and labels that are not
    -100.

    None unless outputs are (b, classes, ...) and labels integers (b, ...).
    """
    y = get_labels(y)
    if (
        not isinstance(output, torch.Tensor)
        or not isinstance(y, torch.Tensor)
        or y.is_floating_point()
    ):
        return None
    if (
        output.dim() != y.dim() + 1
        or output.shape[0] != y.shape[0]
        or output.shape[2:] != y.shape[1:]
    ):
        return None
    if among == 1:
        # an ignored label is below 0, and so never right
        right = output.detach().argmax(dim=1) == y
    else:
        # topk refuses more than there are classes
        # (b, among, ...)
        best = output.detach().topk(min(among, output.shape[1]), dim=1).indices
        right = (best == y.unsqueeze(1)).any(dim=1)
    return torch.stack([right.sum(), (y != IGNORED).sum()])


class CountTokens:
    """Count the labels that a loss does not ignore: the weight `tokens` of a microbatch."""

    def __init__(self, ignored: int) -> None:
        self.ignored = ignored

    def __call__(self, labels: Any) -> int:
        """Return the number of labels. Raise `BadInput` unless they are one tensor of integers."""
        if isinstance(labels, torch.Tensor) and not (
            labels.is_floating_point() or labels.is_complex()
        ):
            return int((labels != self.ignored).sum())
        described = (
            f"of {labels.dtype}"
            if isinstance(labels, torch.Tensor)
            else describe_tensors(labels) or "missing"
        )
        raise BadInput(
            f"loss_weight: tokens: the labels are {described}: must be one tensor of class "
            f"numbers; use a function of the labels{Words('', ' (module:name)')}"
        )


def make_token_count(loss: Any) -> CountTokens:
    """Return the count of the labels that `loss` does not ignore: its `ignore_index`, -100 if it
    has none.

    Raise `BadInput` for a sum over the labels, which weighs microbatches already.
    """
    if is_sum(loss):
        raise BadInput(
            "loss_weight: tokens: the loss is a sum over the labels: must be their mean "
            "(reduction: mean)"
        )
    ignored = _get_settings(loss).get("ignore_index")
    return CountTokens(ignored if isinstance(ignored, int) else IGNORED)


def is_sum(loss: Any) -> bool:
    """Return whether a loss is a sum over its batch, as torch's are with `reduction="sum"`."""
    return bool(_get_settings(loss).get("reduction", "mean") == "sum")


def _get_settings(loss: Any) -> Mapping[str, Any]:
    return loss.keywords if isinstance(loss, partial) else getattr(loss, "__dict__", {})


def is_cross_entropy(loss: Any) -> bool:
    """Return whether a loss is cross-entropy over all labels but -100, which weigh the same."""
    if isinstance(loss, nn.CrossEntropyLoss):
        return loss.weight is None and loss.ignore_index == IGNORED
    return loss is nn.functional.cross_entropy


@dataclass(frozen=True)
class LabelRange:
    """The labels that a loss allows: 0 to `classes` - 1, and `ignored`."""

    classes: int
    ignored: int = IGNORED

    def check(self, y: Any) -> None:
        """Raise `BadInput` if a label is not allowed."""
        if not isinstance(y, torch.Tensor) or y.is_floating_point() or not y.numel():
            return
        counted = y[y != self.ignored]
        wrong = counted[(counted < 0) | (counted >= self.classes)]
        if wrong.numel():
            raise BadInput(
                f"{Words('step: y', 'data')}: label {int(wrong[0])}: the model gives {self.classes} "
                f"classes: must be from 0 to {self.classes - 1}"
            )


def find_label_range(loss: Any, output: Any, y: Any) -> LabelRange | None:
    """Return the labels that a mean cross-entropy of `output` (b, classes, ...) with integers `y`
    (b, ...) allows.

    Return None for other losses. A GPU's kernel that meets another label aborts far from its cause,
    so the host looks first.
    """
    is_module = isinstance(loss, nn.CrossEntropyLoss)
    if not is_module and loss is not nn.functional.cross_entropy:
        return None
    if (
        not isinstance(output, torch.Tensor)
        or not isinstance(y, torch.Tensor)
        or y.is_floating_point()
    ):
        return None
    if output.dim() < 2 or output.dim() != y.dim() + 1:
        return None
    return LabelRange(output.shape[1], loss.ignore_index if is_module else IGNORED)


def list_requested_fields(loss: Any) -> tuple[str, ...]:
    """Return a loss's keyword-only parameters without a default. Raise `BadInput` if it needs other
    arguments besides two.
    """
    try:
        # the call of a Module takes any arguments, and says nothing
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    # a callable that is not written in Python has no signature
    except (TypeError, ValueError):
        return ()
    # *args and **kwargs have no default, either: their kinds leave them out below
    needed = [p for p in signature.parameters.values() if p.default is p.empty]
    further = [p.name for p in needed if p.kind in _POSITIONAL][2:]
    if further:
        raise BadInput(
            f"loss: takes {', '.join(further)} besides outputs and labels: use a field of the "
            f"batch by name, as in "
            f"loss(output, y, *, {further[0]}), or the whole batch, as in loss(output, y, *, "
            f"{WHOLE_BATCH})"
        )
    return tuple(p.name for p in needed if p.kind is p.KEYWORD_ONLY)


def split_requested_fields(
    batch: Any, x: Any, y: Any, names: tuple[str, ...]
) -> tuple[Any, Labels]:
    """Return inputs and labels of a batch with inputs `x` and labels `y`, for a loss that takes the
    fields `names`.

    Raise `BadInput` if a field is missing.
    """
    fields = x if isinstance(x, Mapping) else {}
    lacking = [name for name in names if name != WHOLE_BATCH and name not in fields]
    if lacking:
        there = f"has {', '.join(map(str, fields))}" if fields else "has no fields by name"
        raise BadInput(
            f"loss: takes {', '.join(lacking)} of the batch, which besides labels {there}: must be "
            f"among these, or {WHOLE_BATCH} "
            "for the whole batch"
        )
    rest = {name: value for name, value in fields.items() if name not in names} if fields else x
    return rest, Labels(y, {name: batch if name == WHOLE_BATCH else fields[name] for name in names})
