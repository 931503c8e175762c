"""What the double was asked and what it did: `poptorch.recorded`; and the device faults a test orders."""

from __future__ import annotations

import atexit
import json
import os
import threading
from dataclasses import asdict, dataclass
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch

_depth = threading.local()


@dataclass
class Call:
    """One call of the public API as the user made it (not those PopTorch makes of itself), defaults left out."""

    name: str
    arguments: Dict[str, Any]


@dataclass(frozen=True)
class Placed:
    """A block as the trace met it: where everything after it ran, until the next."""

    block: str
    stage: int
    ipu: int


@dataclass(frozen=True)
class Loss:
    """A loss the trace met. `final`: the one whose gradient is computed; `returned`: its place among the outputs."""

    function: str
    stage: int
    ipu: int
    final: bool
    returned: Optional[int]


@dataclass
class Compilation:
    """A model made into an executable: what was asked for, and how it was laid out."""

    executor: int  # the index of the wrapped model, in the order of wrapping
    training: bool
    options: Dict[
        str, Any
    ]  # Options.toDict(): option name -> value, with execution_mode and the PopART options
    strategy: str  # class name of the execution strategy
    blocks: List[Placed]
    stages: Dict[int, int]  # stage -> IPU, the stages that compute something
    ipus_per_replica: int
    ipus: int  # reserved, all replicas and rounding included
    forward_stages: int  # F as PopTorch counts it
    parameters: Dict[str, int]  # name -> IPU
    losses: List[Loss]
    micro_batch: List[Tuple[int, ...]]  # shapes of the tensors one forward sees
    optimizer: Optional[Dict[str, Any]]
    recomputation: (
        int  # autoRecomputation as PopTorch sets it: 3 in a pipeline unless told otherwise
    )


@dataclass
class Run:
    """One execution of the wrapped model `executor`."""

    executor: int
    shapes: List[Tuple[int, ...]]
    updates: int


@dataclass
class Failure:
    """A fault to raise at the `call`-th (from 1) of the events `on` from now."""

    on: str
    call: int
    error: BaseException


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
        self._failures: List[Failure] = []

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
        fault = (
            error
            if error is not None
            else RecoverableError("simulated device fault", "poplar_recoverable_error")
        )
        self._failures.append(Failure(on, call, fault))

    def event(self, name: str, executor: int) -> None:
        """Note an event, and raise if it was ordered to fail."""
        self.events.append((name, executor))
        due = [failure for failure in self._failures if failure.on == name]
        for failure in due:
            failure.call -= 1
        for failure in due:
            if failure.call == 0:
                self._failures.remove(failure)
                raise failure.error

    def warn(self, text: str) -> None:
        """What PopTorch logs as a warning."""
        self.warnings.append(text)


recorded = Recorder()


class outermost:
    """Within it, calls of the API are PopTorch's own and are not recorded."""

    def __enter__(self) -> bool:
        _depth.value = getattr(_depth, "value", 0) + 1
        return bool(_depth.value == 1)

    def __exit__(self, *_: Any) -> None:
        _depth.value -= 1


def summary(value: Any) -> Any:
    """Return a value as it is recorded: tensors and modules by their looks, so that nothing is kept alive."""
    if isinstance(value, torch.Tensor):
        return f"tensor{list(value.shape)} {str(value.dtype).replace('torch.', '')}"
    if isinstance(value, (list, tuple)):
        return [summary(item) for item in value]
    if isinstance(value, dict):
        return {key: summary(item) for key, item in value.items()}
    if isinstance(value, (bool, int, float, str, type(None), torch.dtype)):
        return value
    return f"{type(value).__name__}"


# ---- in a process of its own: environment variables of the double


def _faults_of(text: str) -> Iterator[Tuple[str, int, BaseException]]:
    """`execute:3:RecoverableError:LINK_RESET,compile:1:Error` -> the faults."""
    from poptorch import _errors

    for part in filter(None, text.split(",")):
        on, call, name, *action = part.split(":")
        error = getattr(_errors, name)("simulated device fault", "poplar_error")
        if action:
            error.recovery_action = action[0]
        yield on, int(call), error


def _write(path: str) -> None:
    content = {
        "calls": [asdict(call) for call in recorded.calls],
        "compilations": [asdict(compilation) for compilation in recorded.compilations],
        "runs": [asdict(run) for run in recorded.runs],
        "events": recorded.events,
        "warnings": recorded.warnings,
    }
    with open(path, "w") as file:
        json.dump(content, file, default=str)


def start() -> None:
    """POPTORCH_DOUBLE_FAIL orders faults; POPTORCH_DOUBLE_RECORD names the JSON file written when the process ends."""
    for on, call, error in _faults_of(os.environ.get("POPTORCH_DOUBLE_FAIL", "")):
        recorded.fail(on, call, error)
    if os.environ.get("POPTORCH_DOUBLE_RECORD"):
        atexit.register(_write, os.environ["POPTORCH_DOUBLE_RECORD"])
