"""Watch the operations of a forward or backward: at the dispatcher's level, or as Python calls
torch's functions.
"""

from __future__ import annotations

from typing import Any, Callable

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Handler = Callable[[Any, Any, Any], Any]


class OperationWatch(TorchDispatchMode):
    """Route every operation (ATen) inside the context, including those of backwards, through
    `run(operation, args, kwargs)`.

    `run` must call it.
    """

    def __init__(self, run: Handler) -> None:
        super().__init__()
        self._run = run

    # torch switches the mode off while this runs, so that `run` can call operations without end
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._run(func, args, kwargs or {})


class FunctionWatch(TorchFunctionMode):
    """Route every call of a torch function from Python inside the context through
    `run(function, args, kwargs)`.

    `run` must call it. Functions that a torch function calls itself are not seen.
    """

    def __init__(self, run: Handler) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._run(func, args, kwargs or {})
