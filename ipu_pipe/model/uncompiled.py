"""PyTorch without its compiler, whose import takes longer than all that is planned here.

Functions that PyTorch keeps out of compilation (an optimizer's `add_param_group`, the shapes of many operations) import it when
they are first called, to tell it so, although nothing here compiles.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from types import ModuleType
from typing import Any, Iterator

import torch

COMPILER = "torch._dynamo"


class _Deferred(ModuleType):
    """Stands for the compiler until anything but `disable` is asked of it."""

    @staticmethod
    def disable(function: Any, *args: Any, **options: Any) -> Any:
        """The function itself: nothing compiles it."""
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # what the import system looks at
            raise AttributeError(name)
        _forget(self)
        return getattr(importlib.import_module(COMPILER), name)


def _forget(module: ModuleType) -> None:
    if sys.modules.get(COMPILER) is module:
        del sys.modules[COMPILER]
    if vars(torch).get("_dynamo") is module:
        del vars(torch)["_dynamo"]


def import_compiler() -> None:
    """Import it now: an optimizer's first step would, and that would be part of the step's time."""
    importlib.import_module(COMPILER)


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Inside, PyTorch's compiler is imported only if something really asks for it."""
    if COMPILER in sys.modules:
        yield
        return
    stand_in = _Deferred(COMPILER)
    sys.modules[COMPILER] = stand_in
    vars(torch)["_dynamo"] = stand_in
    try:
        yield
    finally:
        _forget(stand_in)
