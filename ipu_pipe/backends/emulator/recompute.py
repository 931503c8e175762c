"""Recomputation of activations with weights of its own, on the whole unsplit model (PipeMare, appendix A).

In a pipeline each segment of stages keeps only its inputs and runs its forward a second time before its backward, with the
weights that are in memory by then. Here the model runs twice:

    record   the forward that counts: every tensor that crosses into a later segment is remembered
    repeat   the forward that the backward goes through: a tensor that crosses is replaced by the one remembered, so that
             each segment starts from what really entered it; gradients pass through the replacement
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from ipu_pipe.errors import BadInput
from ipu_pipe.job.user_code import StageWatch
from ipu_pipe.model.restoring import buffers_restored
from ipu_pipe.model.stages import Partition

Place = Tuple[int, int]  # operation, argument


class Recomputation:
    """Runs a model twice. `segment_of`: the last stage of each stage's segment."""

    def __init__(self, model: nn.Module, part: Partition, segment_of: Sequence[int]) -> None:
        self._model, self._part, self._segment_of = model, part, list(segment_of)
        self._entered: Dict[Place, torch.Tensor] = {}

    def record(self, run: Callable[[], Any]) -> Any:
        """Return `run()`, a forward of the model without a graph, and remember what crosses into later segments."""
        self._entered = {}
        with torch.no_grad(), StageWatch(self._model, self._part) as watch:
            with _Crossing(watch, self._segment_of, self._entered, repeats=False):
                return run()

    def repeat(self, run: Callable[[], Any]) -> Any:
        """Return `run()`, the same forward with the parameters as they are now, and leave buffers as they are."""
        with buffers_restored(self._model), StageWatch(self._model, self._part) as watch:
            with _Crossing(watch, self._segment_of, self._entered, repeats=True):
                result = run()
        self._entered = {}
        return result


class _Crossing(TorchFunctionMode):
    """Sees every operation of a forward with its arguments, and knows in which segment each tensor was computed.

    `entered`: tensors that cross into a later segment, by operation and argument; `repeats`: they replace those of this forward.
    """

    def __init__(
        self, watch: StageWatch, segment_of: List[int], entered: Dict[Place, torch.Tensor], repeats: bool
    ) -> None:
        super().__init__()
        self._watch, self._segment_of, self._entered, self._repeats = watch, segment_of, entered, repeats
        self._segments: Dict[int, Tuple[int, torch.Tensor]] = {}  # by id of a tensor, which is held so that no other gets its id
        self._replaced: Dict[int, torch.Tensor] = {}
        self._operation = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        segment = self._segment_of[self._watch.stage]
        flat, shape = tree_flatten((args, kwargs or {}))
        for place, value in enumerate(flat):
            if isinstance(value, torch.Tensor) and self._segments.get(id(value), (segment, value))[0] < segment:
                flat[place] = self._cross(func, value, (self._operation, place))
        self._operation += 1
        args, kwargs = tree_unflatten(flat, shape)
        result = func(*args, **kwargs)
        for value in tree_flatten(result)[0]:
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self._segments[id(value)] = (segment, value)
        return result

    def _cross(self, func: Any, value: torch.Tensor, place: Place) -> torch.Tensor:
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.endswith("__"):
            raise BadInput(
                f"method_args.recompute: {name} changes a tensor of an earlier segment in place: use the operation that does not"
            )
        if not self._repeats:
            self._entered[place] = value.detach()
            return value
        if id(value) not in self._replaced:
            self._replaced[id(value)] = _StraightThrough.apply(value, self._entered[place])  # type: ignore[no-untyped-call]
        return self._replaced[id(value)]


class _StraightThrough(torch.autograd.Function):
    """Returns the value of the second argument; the gradient goes to the first."""

    @staticmethod
    def forward(ctx: Any, repeated: torch.Tensor, entered: torch.Tensor) -> torch.Tensor:
        return entered.view_as(entered)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None
