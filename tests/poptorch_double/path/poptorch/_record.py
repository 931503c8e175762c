"""Record the calls and events of the double in `poptorch.recorded`, and raise the device faults
that a test orders."""

from __future__ import annotations

import os
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch

_depth = threading.local()


@dataclass
class Call:
    """One call of the public API as the user made it (not those PopTorch makes of itself), defaults left out."""

    name: str
    arguments: Dict[str, Any]


@dataclass(frozen=True)
class Placement:
    """Stage and IPU of a block in the trace, for all operations until the next block."""

    block: str
    stage: int
    ipu: int


@dataclass(frozen=True)
class Loss:
    """A loss in the trace. `final`: the one whose gradient is computed; `returned`: its place
    among the outputs."""

    function: str
    stage: int
    ipu: int
    final: bool
    returned: Optional[int]


@dataclass
class Compilation:
    """A model that became an executable: its options and its layout."""

    training: bool
    options: Dict[str, Any]  # Options.toDict(), with execution_mode and the PopART options
    strategy: str  # class name of the execution strategy
    stages: Dict[int, int]  # stage -> IPU, the stages that compute something
    ipus: int  # reserved, all replicas and rounding included
    forward_stages: int  # F as PopTorch counts it
    parameters: Dict[str, int]  # name -> IPU
    losses: List[Loss]
    micro_batch: List[Tuple[int, ...]]  # shapes of the tensors one forward sees
    optimizer: Optional[Dict[str, Any]]


@dataclass
class Run:
    """One execution of a wrapped model."""

    shapes: List[Tuple[int, ...]]
    updates: int


class Recorder:
    """`calls` of the API in order, `compilations`, `runs`, device `events` in order (compile, attach, detach, execute,
    weights to host or device, destroy; each with the index of its executor) and `warnings` PopTorch would have logged."""

    def __init__(self) -> None:
        self.calls: List[Call] = []
        self.compilations: List[Compilation] = []
        self.runs: List[Run] = []
        self.events: List[Tuple[str, int]] = []
        self.warnings: List[str] = []
        self.executors = 0
        self._counts: Counter[str] = Counter()
        self._failures: Dict[Tuple[str, int], BaseException] = {}

    def names(self) -> List[str]:
        """Return the names of the calls, in order."""
        return [call.name for call in self.calls]

    def of(self, name: str) -> List[Dict[str, Any]]:
        """Return the arguments of every call of `name`, for example `Options.deviceIterations`."""
        return [call.arguments for call in self.calls if call.name == name]

    def fail(
        self, on: str = "execute", call: int = 1, error: Optional[BaseException] = None
    ) -> None:
        """Raise `error` at the `call`-th event `on` (compile, attach, execute or copyWeightsToHost) from now.

        Default: a RecoverableError that asks for IPU_RESET. A fault of the device (execute, copyWeightsToHost) loses the
        executor's device and with it the weights that were not copied to the host.
        """
        from poptorch._errors import RecoverableError

        if on not in ("compile", "attach", "execute", "copyWeightsToHost"):
            raise ValueError(f"no event {on} can fail")
        fault = error or RecoverableError("simulated device fault", "poplar_recoverable_error")
        self._failures[on, self._counts[on] + call] = fault

    def event(self, name: str, executor: int) -> None:
        """Record an event, and raise if a fault was ordered for it."""
        self.events.append((name, executor))
        self._counts[name] += 1
        error = self._failures.pop((name, self._counts[name]), None)
        if error is not None:
            raise error

    def warn(self, text: str) -> None:
        """Record a warning of PopTorch."""
        self.warnings.append(text)


recorded = Recorder()


class ApiCall:
    """Context of a call of the API; calls within it are PopTorch's own and are not recorded."""

    def __enter__(self) -> bool:
        _depth.value = getattr(_depth, "value", 0) + 1
        return bool(_depth.value == 1)

    def __exit__(self, *_: Any) -> None:
        _depth.value -= 1


def summarize(value: Any) -> Any:
    """Return a value as it is recorded: tensors and modules as text, so that the record does not
    keep them alive."""
    if isinstance(value, torch.Tensor):
        return f"tensor{list(value.shape)} {str(value.dtype).replace('torch.', '')}"
    if isinstance(value, (list, tuple)):
        return [summarize(item) for item in value]
    if isinstance(value, dict):
        return {key: summarize(item) for key, item in value.items()}
    if isinstance(value, (bool, int, float, str, type(None), torch.dtype)):
        return value
    return f"{type(value).__name__}"


# ---- in a process of its own: environment variables of the double


def _parse_faults(text: str) -> Iterator[Tuple[str, int, BaseException]]:
    """Yield the faults of a text such as
    `execute:3:RecoverableError:LINK_RESET,compile:1:Error`."""
    from poptorch import _errors

    for part in filter(None, text.split(",")):
        on, call, name, *action = part.split(":")
        error = getattr(_errors, name)("simulated device fault", "poplar_error")
        if action:
            error.recovery_action = action[0]
        yield on, int(call), error


def order_faults() -> None:
    """Order the faults of POPTORCH_DOUBLE_FAIL."""
    for on, call, error in _parse_faults(os.environ.get("POPTORCH_DOUBLE_FAIL", "")):
        recorded.fail(on, call, error)
