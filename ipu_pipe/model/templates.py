"""Arguments and results of recorded calls: nests in which what stands for a tensor is put in its place when a piece runs.

call       torch.cat((a, b), dim=1)
template   Nest((Nest((Value(3, 0), Value(7, 0)), tuple), Constant(1)), ...)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Callable, Iterator, List, Sequence, Tuple, Union

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten


@dataclass(frozen=True)
class Value:
    """A tensor that a node gives: number `leaf` of its results."""

    node: int
    leaf: int


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer, read by its name when it is needed."""

    name: str


Key = Union[Value, Weight]


@dataclass(frozen=True)
class Constant:
    """What is the same each time."""

    value: Any


@dataclass(frozen=True)
class Nest:
    """Parts and how they are put together; `kind`: of what, for comparing."""

    parts: Tuple[Any, ...]
    build: Callable[[List[Any]], Any]
    kind: Any


Template = Union[Value, Weight, Constant, Nest]


def make_template(value: Any, of_leaf: Callable[[Any], Template]) -> Template:
    """Make the template of a nest; `of_leaf` makes that of a leaf (a tensor or anything that is not a nest)."""
    kind = type(value)
    if kind in (tuple, list):
        return Nest(tuple(make_template(part, of_leaf) for part in value), kind, kind)
    if kind is dict:
        keys = tuple(value)
        parts = tuple(make_template(part, of_leaf) for part in value.values())
        return Nest(parts, lambda made: dict(zip(keys, made)), keys)
    if kind is slice:
        ends = tuple(make_template(part, of_leaf) for part in (value.start, value.stop, value.step))
        return Nest(ends, lambda made: slice(*made), kind)
    if isinstance(value, torch.Tensor) or kind.__name__.endswith("Cache"):
        return of_leaf(value)
    leaves, spec = tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return of_leaf(value)
    parts = tuple(make_template(leaf, of_leaf) for leaf in leaves)
    return Nest(parts, functools.partial(_unflatten, spec), kind)


def _unflatten(spec: Any, made: List[Any]) -> Any:
    return tree_unflatten(made, spec)


def iterate_keys(found: Template) -> Iterator[Key]:
    """Iterate over the values and weights of a template, in order."""
    if isinstance(found, (Value, Weight)):
        yield found
    elif isinstance(found, Nest):
        for part in found.parts:
            yield from iterate_keys(part)


def list_leaves(value: Any) -> Sequence[Any]:
    """Return the leaves of a result, in the order by which values are numbered."""
    if isinstance(value, torch.Tensor):
        return (value,)
    leaves: List[Any] = []
    for leaf in tree_flatten(value)[0]:
        # what torch.max and the like give is no nest for older versions
        leaves += leaf if isinstance(leaf, tuple) else (leaf,)
    return leaves


def flatten_tensors(value: Any) -> List[torch.Tensor]:
    """Return the tensors of a result."""
    return [leaf for leaf in list_leaves(value) if isinstance(leaf, torch.Tensor)]


Getter = Callable[[List[Any]], Any]  # of all values by then


def make_getter(found: Template, get: Callable[[Key], Getter]) -> Getter:
    """Make the function from all values so far to what a template stands for. `get` makes that of a value or weight."""
    if isinstance(found, (Value, Weight)):
        return get(found)
    if isinstance(found, Constant):
        value = found.value
        return lambda values: value
    parts, build = [make_getter(part, get) for part in found.parts], found.build
    if found.kind in (tuple, slice) and all(isinstance(part, Constant) for part in found.parts):
        constant = build([part.value for part in found.parts])
        return lambda values: constant
    return lambda values: build([part(values) for part in parts])


def is_alike(a: Template, b: Template, numbers: bool) -> bool:
    """Tell whether two templates are the same; `numbers`: numbers (sizes, above all) included."""
    if isinstance(a, Nest) and isinstance(b, Nest):
        same = a.kind == b.kind and len(a.parts) == len(b.parts)
        return same and all(is_alike(x, y, numbers) for x, y in zip(a.parts, b.parts))
    if isinstance(a, Constant) and isinstance(b, Constant):
        compared = (bool, str, type(None), *((int, float, complex, torch.Size) if numbers else ()))
        same = type(a.value) is type(b.value) and (not isinstance(a.value, compared) or a.value == b.value)
        return same or (type(a.value) is type(b.value) is float and a.value != a.value and b.value != b.value)
    return a == b
