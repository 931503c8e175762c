"""What recorded calls take and give: which tensor is what earlier call's, and what cannot be told."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Set

import torch
from torch import nn

from ipu_pipe.model.liveness import Liveness
from ipu_pipe.model.recorded import Node, Place, Recorded
from ipu_pipe.model.templates import Constant, Template, Value, Weight, leaves_of, template

PLAIN = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format,
    torch.Size, type(Ellipsis), type, nn.Module,
)  # fmt: skip
MOST_SEEN = 10_000  # objects looked at for tensors inside


class Arguments:
    """Of the calls of one forward, in order."""

    def __init__(self, found: Recorded, place: Place, liveness: Liveness) -> None:
        self._found, self._place, self._liveness = found, place, liveness
        self._weights = {id(tensor): name for name, tensor in found.weights.items()}
        self._values: Dict[int, Value] = {}  # by the id of a tensor
        self._differentiable: Dict[Value, bool] = {}
        self._kept: List[Any] = []  # whose ids must stay theirs

    def taken(self, value: Any) -> Template:
        """The template of what a call takes, or the model gives. Raises BadInput."""
        return template(value, self._leaf)

    def given(self, node: Node, result: Any) -> None:
        """What a call gives."""
        for i, tensor in enumerate(leaves_of(result)):
            if isinstance(tensor, torch.Tensor):
                value = Value(node.index, i)
                self._values[id(tensor)] = value
                self._found.tensors[value], self._differentiable[value] = tensor, tensor.requires_grad
        for key in node.needs():  # what is changed in place may have come to need a gradient
            if isinstance(key, Value):
                self._differentiable[key] = self._found.tensors[key].requires_grad

    def refuse_filled(self, value: Any) -> None:
        """Objects among what a call took, into which it has put tensors."""
        template(value, self._look)

    def _leaf(self, value: Any) -> Template:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        self._look(value)
        self._kept.append(value)
        return Constant(value)

    def _tensor(self, tensor: torch.Tensor) -> Template:
        if id(tensor) in self._values:
            value = self._values[id(tensor)]
            self._liveness.hand(tensor)
            if tensor.requires_grad != self._differentiable[value]:
                self._place.refuse(
                    self._found.nodes[value.node].name,
                    "it runs inside of an autograd function (torch.autograd.Function, checkpoint with use_reentrant), where the"
                    " model is cut: put that into a module that stays whole, or use_reentrant=False",
                )
            return value
        if id(tensor) in self._weights:
            return Weight(self._weights[id(tensor)])
        if self._liveness.is_live(tensor):
            self._place.refuse(
                f"a tensor of shape {tuple(tensor.shape)}",
                "it was kept aside (an attribute, an object that a module gave): modules around a cut must be given tensors and"
                " give them, in tuples, lists and dicts",
            )
        self._kept.append(tensor)
        return Constant(tensor)

    def _look(self, value: Any) -> Template:
        """Refuses an object that collects tensors of this forward."""
        if not isinstance(value, (torch.Tensor, *PLAIN)) and not callable(value):
            for tensor in _held(value):
                if id(tensor) not in self._weights and self._liveness.is_live(tensor):
                    kind = type(value).__name__
                    hint = "config.use_cache = False" if "Cache" in kind else "hand on tensors instead"
                    self._place.refuse(
                        self._place.called, f"it takes a {kind}, which keeps tensors from call to call and cannot cross: {hint}"
                    )
        return Constant(None)


def _held(value: Any) -> Iterator[torch.Tensor]:
    """Tensors inside of an object."""
    seen: Set[int] = set()
    todo: List[Any] = [value]
    while todo and len(seen) < MOST_SEEN:
        one = todo.pop()
        if id(one) in seen or isinstance(one, PLAIN):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, dict):
            todo += one.values()
        elif isinstance(one, (list, tuple, set)):
            todo += one
        elif hasattr(one, "__dict__") and not callable(one):
            todo += vars(one).values()
