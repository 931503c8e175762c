"""A model cut into pieces that run one after another, for backends that put stages on devices of their own.

A piece is a run of the model's top-level sequence, nn.Sequential children unfolded into theirs:

    conv1  bn1  relu  layer1.0  layer1.1 | layer2.0  layer2.1  ... | avgpool  flatten  fc
    piece 0                                piece 1                   piece 2

so every cut lies between modules that pass on one value (a tensor, or a tuple of tensors). Modules keep their names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, Sequence, Tuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ipu_pipe.errors import BadInput
from ipu_pipe.stages import Partition, Profile, balance, profile


@dataclass(frozen=True)
class Shape:
    """A tensor that crosses a cut: shape, dtype, and whether a gradient comes back for it."""

    shape: Tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    @property
    def bytes(self) -> int:
        """Of one message."""
        count = 1
        for size in self.shape:
            count *= size
        return count * torch.empty((), dtype=self.dtype).element_size()


@dataclass(frozen=True)
class Crossing:
    """What one piece hands to the next: the tensors, and how they are nested."""

    tensors: Tuple[Shape, ...]
    structure: Any

    def flatten(self, value: Any) -> List[torch.Tensor]:
        """The tensors of a value that crosses."""
        return list(tree_flatten(value)[0])

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The value that was flattened into `tensors`."""
        return tree_unflatten(list(tensors), self.structure)


def links_of(model: nn.Module) -> List[Tuple[str, nn.Module]]:
    """(name, module) of the model's sequence. Raises BadInput for models that are no sequence."""

    def unfold(name: str, module: nn.Module) -> List[Tuple[str, nn.Module]]:
        if type(module).forward is not nn.Sequential.forward:
            return [(name, module)]
        return [
            link for child, sub in module.named_children() for link in unfold(f"{name}.{child}" if name else child, sub)
        ]

    if type(model).forward is not nn.Sequential.forward:
        raise BadInput(
            f"model: {type(model).__name__}: a backend that runs stages on devices of their own needs an nn.Sequential at the"
            " top level: make it one, or use backend: {name: emulator}"
        )
    return unfold("", model)


def cuttable(profiles: Sequence[Profile]) -> List[int]:
    """The links, by their profiles, before which the model may be cut: those with which a stage begins. What begins inside a
    link (a residual block, say), after something of it has run, is left out."""
    return [i for i in range(1, len(profiles)) if profiles[i].first > profiles[i - 1].last]


def merge_stages(model: nn.Module, part: Partition, count: int, x: torch.Tensor) -> List[str]:
    """Names of the modules at which `count` stages begin that are consecutive stages of `part` taken together, the greatest
    sum of FLOPs being least. Empty for one. Raises BadInput where there are not so many cuts."""
    names = [name for name, _ in links_of(model)]
    profiles = profile(model, part, x, names)
    starts = cuttable(profiles)
    if count > len(starts) + 1:
        inside = len(part) - 1 - len(starts)
        raise BadInput(
            f"stages: {len(part)}: the model can be cut into at most {len(starts) + 1} devices' parts, {count} are asked for"
            + (f": {inside} of its stages begin inside a module of its top-level sequence" if inside > 0 else "")
        )
    edges = [0, *starts, len(names)]
    costs = [sum(p.flops for p in profiles[a:b]) for a, b in zip(edges, edges[1:])]
    return [names[edges[k]] for k in balance(costs, count)[1:]]


class Piece(nn.Module):
    """Links of a model that run one after another. The modules are the model's own, under its names in `names`."""

    def __init__(self, links: Sequence[Tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.names = [name for name, _ in links]
        self.links = nn.ModuleList([module for _, module in links])

    def forward(self, value: Any) -> Any:
        """The value that the last link gives."""
        for link in self.links:
            value = link(value)
        return value


def pieces(model: nn.Module, begins: Sequence[str]) -> List[Piece]:
    """The model's sequence cut before each of `begins`, names of links or of nn.Sequentials around them."""
    links = links_of(model)
    starts = [next(i for i, (name, _) in enumerate(links) if f"{name}.".startswith(f"{begin}.")) for begin in begins]
    edges = [0, *starts, len(links)]
    return [Piece(links[a:b]) for a, b in zip(edges, edges[1:])]


def crossings(parts: Sequence[Piece], model: nn.Module, x: torch.Tensor) -> List[Crossing]:
    """What crosses each cut, seen in one forward of the microbatch `x`."""
    seen: List[Crossing] = []

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        tensors, structure = tree_flatten(output)
        if not all(isinstance(t, torch.Tensor) for t in tensors):
            raise BadInput(f"model: {type(module).__name__}: what crosses between devices must be tensors")
        seen.append(Crossing(tuple(Shape(tuple(t.shape), t.dtype, t.is_floating_point()) for t in tensors), structure))

    handles = [part.links[-1].register_forward_hook(look) for part in parts[:-1]]
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            model.eval()(x)
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes:
            module.training = mode
    return seen
