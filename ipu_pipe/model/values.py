"""List the values that a caller's modules and loss read beside weights: attributes, what a function
closes over, arguments that are bound, and globals.

A change of one of them is seen between two calls (`ipu_pipe.pipeline.seam`), so a compiled pass may
read them as they are now. Containers are looked into `DEPTH` levels deep.
"""

from __future__ import annotations

import collections
import functools
from typing import Any, Iterator, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn

# what torch keeps in a module itself: the caller's attributes are the rest
OF_TORCH = frozenset(vars(nn.Module()))
# containers of the caller's with more elements are not looked into
LONGEST = 100
# levels of lists, tuples and dictionaries that are looked into
DEPTH = 2

# (module, attribute), such as ("0", "weight")
Place = Tuple[str, str]


def name_place(where: Place) -> str:
    """Return a place as a caller writes it."""
    module, attribute = where
    return f"{module or 'model'}.{attribute}"


class Source(NamedTuple):
    """Where a caller's object keeps a value: `table[key]`. `is_written`: a forward may change it."""

    table: Any
    key: Any
    is_written: bool = True

    @property
    def value(self) -> Any:
        """Return the value that is there now."""
        return self.table[self.key]


# a value by name; its place, None if only the caller can change it
Named = Tuple[str, Any, Optional[Source]]


def list_attributes(name: str, table: Any) -> Iterator[Named]:
    """Yield the caller's values in a module's or an object's table of attributes."""
    for key, value in table.items():
        if key not in OF_TORCH:
            yield name_place((name, key)), value, Source(table, key)


def list_values_of(function: Any) -> Iterator[Named]:
    """Yield what a loss reads: attributes, weights and buffers, what it closes over, arguments that
    are bound, and globals; the second one of a name as `name (2)`.
    """
    counts: collections.Counter[str] = collections.Counter()
    for name, value, source in _walk_values_of(function):
        counts[name] += 1
        yield name if counts[name] == 1 else f"{name} ({counts[name]})", value, source


def _walk_values_of(function: Any) -> Iterator[Named]:
    if isinstance(function, functools.partial):
        keywords = function.keywords.items()
        for name, value in (*_enumerate_names("argument", function.args), *keywords):
            yield name, value, None
        yield from _walk_values_of(function.func)
        return
    if isinstance(function, nn.Module):
        for name, module in function.named_modules():
            yield name_place((name, "training")), module.training, None
            for table in (vars(module), module._parameters, module._buffers):
                yield from list_attributes(name, table)
        return
    if not hasattr(function, "__code__") and not hasattr(function, "__self__"):
        # an object that is called
        function = getattr(function, "__call__", function)  # noqa: B004
    owner = getattr(function, "__self__", None)
    if owner is not None and not isinstance(owner, nn.Module):
        for key, value in getattr(owner, "__dict__", {}).items():
            yield key, value, Source(vars(owner), key)
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        try:
            yield name, cell.cell_contents, None
        # a variable that is not set yet
        except ValueError:
            continue
    for name in code.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name], None


def _enumerate_names(name: str, values: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield values with numbered names."""
    for i, value in enumerate(values):
        yield f"{name} {i}", value


def walk_tensors(name: str, value: Any, depth: int = DEPTH) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a value by name, as deep as a change of the value is seen."""
    if isinstance(value, torch.Tensor):
        yield name, value
    if not isinstance(value, (list, tuple, dict)) or not depth or len(value) > LONGEST:
        return
    elements = value.items() if isinstance(value, dict) else enumerate(value)
    for key, element in elements:
        yield from walk_tensors(f"{name}[{key!r}]", element, depth - 1)
