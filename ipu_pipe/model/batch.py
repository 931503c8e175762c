"""Batches as nests: a tensor, or mappings, tuples and lists of tensors to any depth; and the call
of a model with a batch.

A nest of one tensor is that tensor. A nest may contain None for an argument that the model does not
get.
"""

from __future__ import annotations

# not from typing: its isinstance takes ten times as long, and every pass calls it
from collections.abc import Mapping
from typing import Any, Callable, Iterator, Sequence

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from ipu_pipe.errors import BadInput
from ipu_pipe.refusals import BATCH, EMULATOR
from ipu_pipe.text import describe_kind


def map_tensors(change: Callable[[torch.Tensor], Any], nest: Any) -> Any:
    """Return the nest with `change` applied to every tensor. Mappings of any kind become
    dictionaries.
    """
    if isinstance(nest, torch.Tensor):
        return change(nest)
    if isinstance(nest, Mapping):
        return {key: map_tensors(change, value) for key, value in nest.items()}
    return (
        _map_parts(lambda value: map_tensors(change, value), nest)
        if isinstance(nest, (tuple, list))
        else nest
    )


def sort_keys(nest: Any) -> Any:
    """Return the nest with the keys of its mappings sorted."""
    if isinstance(nest, Mapping):
        # keys of several types, such as 1 and "a", have no order among themselves
        return {key: sort_keys(nest[key]) for key in sorted(nest, key=str)}
    return _map_parts(sort_keys, nest) if isinstance(nest, (tuple, list)) else nest


def _map_parts(change: Callable[[Any], Any], nest: Any) -> Any:
    """Return a tuple or list with `change` applied to its parts; a named tuple keeps its names."""
    parts = [change(value) for value in nest]
    return (
        parts
        if isinstance(nest, list)
        else type(nest)(*parts)
        # named tuples have no common base class, and take their parts as arguments, not as one
        # iterable
        if hasattr(nest, "_fields")
        else tuple(parts)
    )


def walk_leaves(nest: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over (name, leaf) of a nest in order: "" names a single leaf, `key.0.key` a deeper
    one.
    """
    items = (
        nest.items()
        if isinstance(nest, Mapping)
        else enumerate(nest)
        if isinstance(nest, (tuple, list))
        else None
    )
    if items is None:
        yield name, nest
        return
    for key, value in items:
        yield from walk_leaves(value, f"{name}.{key}" if name else str(key))


def list_tensors(nest: Any) -> list[torch.Tensor]:
    """Return the tensors of a nest, in order."""
    if isinstance(nest, torch.Tensor):
        return [nest]
    parts = (
        nest
        if isinstance(nest, (tuple, list))
        else nest.values()
        if isinstance(nest, Mapping)
        else ()
    )
    return [tensor for part in parts for tensor in list_tensors(part)]


def list_leaves(value: Any) -> Sequence[Any]:
    """Return the leaves of the result of a model or a function, which may be any nest that PyTorch
    knows.
    """
    if isinstance(value, torch.Tensor):
        return (value,)
    leaves: list[Any] = []
    for leaf in tree_flatten(value)[0]:
        # older versions do not know the named tuples of torch.max and the like as nests
        leaves += leaf if isinstance(leaf, tuple) else (leaf,)
    return leaves


def list_arguments(nest: Any) -> list[torch.Tensor]:
    """Return the tensors of a nest in the order in which graphs take them, whatever the order of
    the keys of its mappings.
    """
    return list_tensors(sort_keys(nest))


def flatten_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in the result of a model or a function."""
    return [leaf for leaf in list_leaves(value) if isinstance(leaf, torch.Tensor)]


def get_first_tensor(nest: Any) -> torch.Tensor:
    """Return the first tensor of a nest, on whose device all tensors are. Raise `BadInput` if it
    has none.
    """
    if isinstance(nest, torch.Tensor):
        return nest
    tensors = list_tensors(nest)
    if not tensors:
        allowed = "must be a tensor, or tensors in mappings, tuples and lists"
        raise BadInput(f"{BATCH}: {describe_kind(nest)} without a tensor: {allowed}")
    return tensors[0]


def count_samples(nest: Any) -> int:
    """Return the number of samples of a batch: the first dimension of its tensors."""
    tensor = get_first_tensor(nest)
    if not tensor.dim():
        raise BadInput(
            f"{BATCH}: a tensor of no dimensions: the first dimension must be the samples"
        )
    return len(tensor)


def clone_tensors(nest: Any) -> Any:
    """Clone the tensors of a nest, for code that may work in place."""
    return map_tensors(torch.Tensor.clone, nest)


def take_samples(nest: Any, count: int) -> Any:
    """Return the first samples of a batch, as views."""
    return map_tensors(lambda t: t[:count], nest)


def count_numbers(nest: Any) -> int:
    """Return how many numbers a nest holds."""
    return sum(t.numel() for t in list_tensors(nest))


def count_bytes(nest: Any) -> int:
    """Return the bytes of a nest's tensors; of a DTensor those of this process's part."""
    tensors = [t.to_local() if hasattr(t, "to_local") else t for t in list_tensors(nest)]
    return sum(t.numel() * t.element_size() for t in tensors)


def describe_tensors(nest: Any) -> str:
    """Describe a batch's shapes and dtypes for the user."""
    if isinstance(nest, torch.Tensor):
        return f"{tuple(nest.shape)}, {nest.dtype}"
    leaves = ((name, value) for name, value in walk_leaves(nest) if isinstance(value, torch.Tensor))
    return "; ".join(f"{name} {tuple(value.shape)}, {value.dtype}" for name, value in leaves)


def require_tensors(nest: Any, what: str, by_sample: bool = False) -> None:
    """Raise `BadInput` unless a nest consists of tensors and None, with at least one tensor.

    `by_sample`: also require that the first dimension of all tensors is equal. `what`: the name of
    the nest in messages.
    """
    if isinstance(nest, torch.Tensor):
        return
    leaves = [(name, value) for name, value in walk_leaves(nest) if value is not None]
    for name, value in leaves:
        if not isinstance(value, torch.Tensor):
            raise BadInput(
                f"{BATCH}: {what}{name and ': ' + name}: is of type {type(value).__name__}: must be "
                f"a tensor, or tensors in mappings, tuples and lists"
            )
    if not leaves:
        raise BadInput(f"{BATCH}: {what}: contain no tensor")
    first, tensor = leaves[0]
    for name, value in leaves if by_sample else ():
        if not value.dim() or not tensor.dim() or len(value) != len(tensor):
            raise BadInput(
                f"{BATCH}: {name} has the shape {tuple(value.shape)}, {first} {tuple(tensor.shape)}"
                f": the first dimension of each input must be the batch's samples"
            )


def check_same_shapes(x: Any, example: Any, m: int, what: str) -> None:
    """Raise BadInput if a part of microbatch m differs in shape or dtype from the example's.
    `what`: inputs or labels, in messages.
    """
    # every microbatch asks: one tensor is compared without the walk by name
    if (
        isinstance(x, torch.Tensor)
        and isinstance(example, torch.Tensor)
        and (x.shape, x.dtype) == (example.shape, example.dtype)
    ):
        return
    wanted, actual = (
        {name: t for name, t in walk_leaves(nest) if t is not None} for nest in (example, x)
    )
    # a dict keeps the order of the inputs, so that the first difference is reported; a set would
    # not
    for name in {**wanted, **actual}:
        now, first = (describe_tensors(nest.get(name)) or "None" for nest in (actual, wanted))
        if now != first:
            raise BadInput(
                f"{BATCH}: microbatch {m}: {what}{name and ': ' + name}: {now}, of the first "
                f"microbatch {first}: this backend compiles one shape and dtype: pad to one length, "
                f"give the same {what}, or use {EMULATOR}"
            )


def call_model(model: nn.Module, x: Any) -> Any:
    """Call `model` with the input `x`: a mapping is its keyword arguments, a tuple or list its
    positional ones, anything else its one argument."""
    if isinstance(x, Mapping):
        return model(**x)
    if isinstance(x, (tuple, list)):
        return model(*x)
    return model(x)


def join_arguments(inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Return the input for which `call_model` gives a model these arguments."""
    # an argument that is itself a nest stays inside a tuple, else `call_model` would unpack it
    # only a single plain argument loses its tuple
    alone = len(inputs) == 1 and not named and not isinstance(inputs[0], (Mapping, tuple, list))
    return inputs[0] if alone else named or inputs
