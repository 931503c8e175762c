"""The two ways to stand between a forward and PyTorch: before each operation, or before each function that Python calls."""

from __future__ import annotations

from typing import Any, Callable

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Run = Callable[[Any, Any, Any], Any]


class OperationWatch(TorchDispatchMode):
    """Have `run(operation, arguments, keywords)` run every operation inside, also of backwards, and return its result."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._run(func, args, kwargs or {})


class FunctionWatch(TorchFunctionMode):
    """Have `run(function, arguments, keywords)` run every torch function that Python calls inside and return its result. What a
    function calls itself is not seen."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._run(func, args, kwargs or {})
