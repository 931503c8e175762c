"""A recorded forward taken apart into stages: what each runs, takes and hands on.

    stage 0   embed(x)  add  blocks.0  |  stage 1   blocks.1  mul(scale)   crosses: what blocks.0 gave,
                                                                           and `scale`, which an earlier stage holds

What depends on sizes alone is made again where it is needed. What a later stage needs is handed on by those between.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple

import torch

from ipu_pipe.errors import BadInput
from ipu_pipe.model.execution import answering
from ipu_pipe.model.liveness import Liveness
from ipu_pipe.model.observation import storage
from ipu_pipe.model.recorded import Node, Recorded, State
from ipu_pipe.model.templates import Key, Nest, Template, Value, Weight, alike, keys_in


def memory_order(tensor: torch.Tensor) -> Tuple[int, ...]:
    """Return the order in which a tensor's dimensions lie in memory; () where that is their own, or there is no gapless one."""
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda d: (-strides[d], d)))
    return () if tensor.is_contiguous() or not tensor.permute(order).is_contiguous() else order


def inverse(order: Sequence[int]) -> List[int]:
    """Return the permutation that undoes `order`."""
    return [list(order).index(d) for d in range(len(order))]


@dataclass(frozen=True)
class Shape:
    """A tensor that crosses a cut: shape, dtype, whether a gradient comes back for it, and the order in which its dimensions lie
    in memory, which kernels see: () for their own. A message has them in that order. `gradient_order`: the order in which the
    dimensions of the message's gradient lie in memory; () for the message's."""

    shape: Tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool
    order: Tuple[int, ...] = ()
    gradient_order: Tuple[int, ...] = ()

    @property
    def gradient(self) -> Shape:
        """Return the shape of the message with the gradient."""
        return Shape(self.sent, self.dtype, False, self.gradient_order)

    def with_gradient_in(self, order: Sequence[int]) -> Shape:
        """Return the shape of a tensor whose gradient's dimensions lie in memory in this order; () for their own."""
        places = inverse(self.order or range(len(self.shape)))
        gradient = tuple(places[d] for d in order or range(len(self.shape)))
        return replace(self, gradient_order=() if gradient == tuple(range(len(gradient))) else gradient)

    @property
    def sent(self) -> Tuple[int, ...]:
        """The message's shape."""
        return tuple(self.shape[d] for d in self.order) if self.order else self.shape

    @property
    def bytes(self) -> int:
        """Of one message."""
        return math.prod(self.shape) * torch.empty((), dtype=self.dtype).element_size()


@dataclass(frozen=True)
class Crossing:
    """What one piece hands to the next: a tensor, or a tuple of them."""

    tensors: Tuple[Shape, ...]

    def flatten(self, value: Any) -> List[torch.Tensor]:
        """A value that crosses as messages."""
        found = value if isinstance(value, tuple) else (value,)
        for t, shape in zip(found, self.tensors):
            if (tuple(t.shape), t.dtype) != (shape.shape, shape.dtype):
                raise BadInput(
                    f"model: hands on a tensor of shape {tuple(t.shape)}, {t.dtype}, where a stage ends, and of shape"
                    f" {shape.shape}, {shape.dtype} in the forward that was recorded: what crosses must be of one shape"
                )
        return [t.permute(shape.order) if shape.order else t for t, shape in zip(found, self.tensors)]

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The value whose messages are `tensors`."""
        found = tuple(
            t.permute(inverse(shape.order)) if shape.order else t for t, shape in zip(tensors, self.tensors)
        )
        return found[0] if len(found) == 1 else found

    def enter(self, messages: Sequence[torch.Tensor]) -> List[torch.Tensor]:
        """Have a backward leave a gradient on the messages for which one goes back. A leaf's own `grad` takes the leaf's memory
        layout; where the gradient has another, it is kept as it comes: kernels may sum in another order."""
        for t, shape in zip(messages, self.tensors):
            if shape.differentiable:
                t.requires_grad_()
                if shape.gradient_order:
                    raw: List[torch.Tensor] = []
                    t.register_hook(raw.append)
                    t.raw_gradient = raw  # type: ignore[attr-defined]
        return list(messages)

    def leave(self, messages: Sequence[torch.Tensor]) -> List[torch.Tensor]:
        """Return the gradients that a backward left on what entered, as messages."""
        found = []
        for t, shape in zip(messages, self.tensors):
            if shape.differentiable:
                gradient = t.raw_gradient.pop() if getattr(t, "raw_gradient", None) else t.grad  # type: ignore[attr-defined]
                gradient = torch.zeros_like(t) if gradient is None else gradient
                found.append(gradient.permute(shape.gradient_order) if shape.gradient_order else gradient)
        return found

    def gradients(self, messages: Sequence[torch.Tensor]) -> List[torch.Tensor]:
        """Return the gradients that came back as `messages`, one for each tensor that is differentiable."""
        orders = [shape.gradient_order for shape in self.tensors if shape.differentiable]
        return [g.permute(inverse(order)) if order else g for g, order in zip(messages, orders)]


@dataclass(frozen=True)
class Part:
    """One stage of a recording. `copied`: what enters and is overwritten here."""

    nodes: List[Node]
    enters: List[Key]
    leaves: Template
    copied: Set[Key]
    entering: Tuple[Tuple[int, ...], ...]  # shapes, as tensors have them


@dataclass(frozen=True)
class Staged:
    """A recording in stages. `homes`: stage in which each module first runs; `written`: parameters that the forward changes;
    `runs`: how often each module runs in each stage."""

    parts: List[Part]
    crossings: List[Crossing]
    homes: Mapping[str, int]
    base: State
    written: Set[str]
    runs: Mapping[Tuple[int, str], int]

    @property
    def modules(self) -> List[List[str]]:
        """By stage, the modules that it calls, in the order of their first runs."""
        called = [[n.target for n in part.nodes if isinstance(n.target, str)] for part in self.parts]
        return [list(dict.fromkeys(names)) for names in called]


def staged(found: Recorded, liveness: Liveness, count: int, homes: Mapping[str, int]) -> Staged:
    """A recording as `count` stages. `homes`: of modules that ran in an earlier recording: weights stay where they are. Raises
    BadInput."""
    split = _Split(found, liveness, count, {**found.reached, **homes})
    crossing = [split.crossing(cut) for cut in range(count - 1)]
    parts = []
    for s in range(count):
        enters = crossing[s - 1] if s else []
        leaves = found.output if s == count - 1 else _together(crossing[s])
        copied: Set[Key] = {k for k in enters if isinstance(k, Value) and liveness.is_written(found.tensors[k], s)}
        entering = tuple(tuple(split.tensor(key).shape) for key in enters)
        parts.append(Part(split.nodes_of(s), enters, leaves, copied, entering))
    shapes = [Crossing(tuple(split.shape(key) for key in keys)) for keys in crossing]
    stages = range(count)
    written = {name for name, weight in found.weights.items() if any(liveness.is_written(weight, s) for s in stages)}
    return Staged(parts, shapes, found.reached, found.base, written, found.runs)


def differing(a: Staged, b: Staged, numbers: bool = False) -> Optional[str]:
    """The first call in which two recordings of one model differ, but for sizes; `numbers`: in these, too. None: in none."""
    for stage, (one, other) in enumerate(zip(a.parts, b.parts)):
        for x, y in itertools.zip_longest(one.nodes, other.nodes):
            if x is None or y is None or x.target != y.target:
                return f"stage {stage}: {x.name if x else 'nothing'} once, {y.name if y else 'nothing'} another time"
            if not (alike(x.args, y.args, numbers) and alike(x.keywords, y.keywords, numbers)):
                return f"stage {stage}: {x.name} is given something else another time"
        if not alike(one.leaves, other.leaves, numbers):
            return f"stage {stage}: it gives something else"
    return None


def _together(keys: Sequence[Key]) -> Template:
    return keys[0] if len(keys) == 1 else Nest(tuple(keys), tuple, tuple)


class _Split:
    """Where the values of a recording are made and last needed."""

    def __init__(self, found: Recorded, liveness: Liveness, count: int, homes: Mapping[str, int]) -> None:
        self._found, self._liveness, self._count, self._homes = found, liveness, count, homes
        self._last: Dict[Key, int] = {}  # the last stage that needs it
        self._again: List[Set[int]] = [set() for _ in range(count)]  # nodes made again, by stage
        for node in found.nodes:
            if not node.free:
                for key in node.needs():
                    self._need(key, node.stage, node.name)
        for key in keys_in(found.output):
            self._need(key, count - 1, "the output")
        for cut in range(count - 1):
            self._refuse_shared_memory(cut)

    def _need(self, key: Key, stage: int, name: str) -> None:
        if isinstance(key, Value) and self._found.nodes[key.node].free:
            if key.node not in self._again[stage]:
                self._again[stage].add(key.node)
                for needed in self._found.nodes[key.node].needs():
                    self._need(needed, stage, name)
            return
        made = self._made(key)
        if made > stage:  # of a weight
            raise BadInput(
                f"model: {self.told(key)}: {name} uses it on stage {stage}, and it lies on stage {made}, where its module first"
                " runs: begin that stage before"
            )
        self._last[key] = max(self._last.get(key, 0), stage)

    def _made(self, key: Key) -> int:
        if isinstance(key, Value):
            return self._found.nodes[key.node].stage
        return self._homes[answering(key.name.rpartition(".")[0], self._homes)]

    def told(self, key: Key) -> str:
        """For people."""
        return key.name if isinstance(key, Weight) else f"what {self._found.nodes[key.node].name or 'the input'} gives"

    def _refuse_shared_memory(self, cut: int) -> None:
        """Of tensors that cross and are views of each other, copies arrive: none may be overwritten behind."""
        keys = self.crossing(cut)
        places = [storage(self.tensor(key)) for key in keys]
        for key, place in zip(keys, places):
            behind = [s for s in range(cut + 1, self._count) if self._liveness.is_written(self.tensor(key), s)]
            if behind and places.count(place) > 1:
                raise BadInput(
                    f"stages: {self.told(key)} and a view of it both go on to stage {cut + 1}, and stage {behind[0]} overwrites"
                    " them: clone one of them before, or begin the stage elsewhere"
                )

    def crossing(self, cut: int) -> List[Key]:
        """What is made up to stage `cut` and needed behind it: weights, then values in order."""
        keys = [key for key, last in self._last.items() if self._made(key) <= cut < last]
        return sorted(keys, key=lambda key: (key.node, key.leaf) if isinstance(key, Value) else (-1, 0))

    def nodes_of(self, stage: int) -> List[Node]:
        """What a stage runs."""
        return [n for n in self._found.nodes if n.index in self._again[stage] or (n.stage == stage and not n.free)]

    def tensor(self, key: Key) -> torch.Tensor:
        """Of the recording."""
        return self._found.tensors[key] if isinstance(key, Value) else self._found.weights[key.name]

    def shape(self, key: Key) -> Shape:
        """How it crosses."""
        tensor = self.tensor(key)
        return Shape(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, memory_order(tensor))
