"""Recomputation of activations with the weights current at recomputation, on the whole unsplit model (PipeMare, appendix A).

In a pipeline each segment of stages keeps only its inputs and runs its forward a second time before its backward, with the
weights that are in memory by then. Here the model runs twice:

    record   the forward whose output counts: every tensor that crosses into a later segment is stored
    repeat   the forward that the backward goes through: a tensor that crosses is replaced by the stored one, so that each
             segment starts from its actual inputs; gradients pass through the replacement
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Sequence, Tuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ipu_pipe.errors import BadInput
from ipu_pipe.job.user_code import StageWatch
from ipu_pipe.model.restoring import FunctionWatch, buffers_restored
from ipu_pipe.model.stages import Partition

ArgumentPosition = Tuple[int, int]  # (operation, argument)


class Recomputation:
    """Run a model twice and track the segment that computed each tensor. `segment_of`: the last stage of each stage's segment."""

    def __init__(self, model: nn.Module, part: Partition, segment_of: Sequence[int]) -> None:
        self._model, self._part, self._segment_of = model, part, list(segment_of)
        self._repeats = False
        # the tensors that cross into a later segment
        self._entered: Dict[ArgumentPosition, torch.Tensor] = {}
        # of one forward, by id of a tensor, which is referenced so that no other gets its id
        self._segments: Dict[int, Tuple[int, torch.Tensor]] = {}
        self._replaced: Dict[int, torch.Tensor] = {}
        self._operation = 0

    def record(self, run: Callable[[], Any]) -> Any:
        """Return `run()`, a forward of the model without a graph, and store what crosses into later segments.

        Raise `BadInput` if an operation changes such a tensor in place.
        """
        self._entered = {}
        with torch.no_grad():
            return self._run(run, repeats=False)

    def repeat(self, run: Callable[[], Any]) -> Any:
        """Return `run()`, the same forward with the parameters as they are now, and leave buffers as they are."""
        with buffers_restored(self._model):
            result = self._run(run, repeats=True)
        self._entered = {}
        return result

    def _run(self, run: Callable[[], Any], repeats: bool) -> Any:
        self._repeats, self._operation = repeats, 0
        with StageWatch(self._model, self._part) as self._watch, FunctionWatch(self._call):
            result = run()
        self._segments, self._replaced = {}, {}
        return result

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        segment = self._segment_of[self._watch.stage]
        flat, shape = tree_flatten((args, kwargs))
        for index, value in enumerate(flat):
            if isinstance(value, torch.Tensor) and self._segments.get(id(value), (segment, value))[0] < segment:
                flat[index] = self._cross(value, (self._operation, index))
        self._operation += 1
        args, kwargs = tree_unflatten(flat, shape)
        if self._repeats:
            result = func(*args, **kwargs)
        else:
            # detached and viewed tensors share the counter, so an operation on a view is seen too
            versions = [value._version for value in self._entered.values()]
            result = func(*args, **kwargs)
            if versions != [value._version for value in self._entered.values()]:
                name = getattr(func, "__name__", str(func))
                why = "changes a tensor of an earlier segment in place: use the out-of-place operation"
                raise BadInput(f"method_args.recompute: {name}: {why}")
        for value in tree_flatten(result)[0]:
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self._segments[id(value)] = (segment, value)
        return result

    def _cross(self, value: torch.Tensor, position: ArgumentPosition) -> torch.Tensor:
        """Store a tensor that crosses into a later segment, or return its replacement in the second forward."""
        if not self._repeats:
            self._entered[position] = value.detach()
            return value
        if id(value) not in self._replaced:
            self._replaced[id(value)] = _StraightThrough.apply(value, self._entered[position])  # type: ignore[no-untyped-call]
        return self._replaced[id(value)]


class _StraightThrough(torch.autograd.Function):
    """Return the value of the second argument; the gradient goes to the first."""

    @staticmethod
    def forward(ctx: Any, repeated: torch.Tensor, entered: torch.Tensor) -> torch.Tensor:
        return entered.view_as(entered)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None
