"""What is recorded of a forward: its calls with what they take, and where it stands, for what is told of a refusal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, NamedTuple, NoReturn, Tuple, Type, Union

import torch
from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.model.templates import Constant, Key, Template, Value, keys_in

Autocast = Tuple[Tuple[str, bool, Any], ...]
DEVICES = ("cpu", "cuda")  # whose autocast is followed


class State(NamedTuple):
    """Whether gradients are on, and inside of an autocast block each device's setting (device, on, dtype); () outside."""

    grad: bool
    autocast: Autocast = ()


def state_now(outside: int) -> State:
    """`outside`: so many autocast blocks are around the forward."""
    return State(torch.is_grad_enabled(), _autocast() if autocast_blocks() != outside else ())


def autocast_blocks() -> int:
    """How many are around."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _autocast() -> Autocast:
    found: List[Tuple[str, bool, Any]] = []
    for device in DEVICES:
        if hasattr(torch, "get_autocast_dtype"):
            found.append((device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)))
        elif device == "cpu":
            found.append((device, torch.is_autocast_cpu_enabled(), torch.get_autocast_cpu_dtype()))
        else:
            found.append((device, torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype()))
    return tuple(found)


@dataclass
class Node:
    """A recorded call: of the module `target`, or of a function; None: the model's input. `free`: of sizes alone, every stage can
    make it again."""

    index: int
    stage: int
    target: Union[None, str, Callable[..., Any]]
    args: Template
    keywords: Template
    state: State
    free: bool = False

    def needs(self) -> List[Key]:
        """What its arguments hold."""
        return [*keys_in(self.args), *keys_in(self.keywords)]

    @property
    def name(self) -> str:
        """For people."""
        if self.target is None or isinstance(self.target, str):
            return self.target or "the model"
        return operation_name(self.target)


def operation_name(function: Any) -> str:
    """A torch function's name, for people; of a property the property's."""
    owner = getattr(function, "__self__", None)
    if getattr(function, "__name__", "") in ("__get__", "__set__") and owner is not None:
        return str(getattr(owner, "__name__", owner))
    return str(getattr(function, "__name__", function))


@dataclass
class Recorded:
    """All of one forward. Its tensors are there as long as this is."""

    nodes: List[Node] = field(default_factory=list)
    output: Template = Constant(None)
    tensors: Dict[Value, torch.Tensor] = field(default_factory=dict)
    weights: Dict[str, torch.Tensor] = field(default_factory=dict)  # parameters and buffers, by the first of their names
    reached: Dict[str, int] = field(default_factory=dict)  # module that ran -> stage of its first run
    base: State = State(True)
    runs: Dict[Tuple[int, str], int] = field(default_factory=dict)  # (stage, module) -> how often it runs

    def settle(self, is_live: Callable[[torch.Tensor], bool]) -> None:
        """Find out which nodes are free: what was written into later is no more what its node gave."""
        for value, tensor in self.tensors.items():
            self.nodes[value.node].free &= not is_live(tensor)
        for node in self.nodes:
            node.free &= all(isinstance(key, Value) and self.nodes[key.node].free for key in node.needs())


@dataclass
class Place:
    """Where a forward stands: its stage, the modules around cuts that it is in, the module or function called last."""

    model: nn.Module
    stage: int = 0
    around: List[str] = field(default_factory=list)
    called: str = "the model"

    def refuse(self, operation: str, why: str, kind: Type[BadInput] = BadInput) -> NoReturn:
        """Raise BadInput: what is done here cannot be cut."""
        where = (self.around[-1] if self.around else "") or "the model's own forward"
        raise kind(f"model: {type(self.model).__name__}: stage {self.stage}: {operation} in {where}: {why}")
