"""api.json is the one place that states names, arguments, defaults and types; `typed` holds functions to it when called."""

from __future__ import annotations

import enum
import functools
import inspect
import json
import sys
import typing
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Optional, Type, TypeVar

import torch

from poptorch._record import Call, outermost, recorded, summary

DATA: Dict[str, Any] = json.loads((Path(__file__).resolve().parents[2] / "api.json").read_text())
API: Dict[str, Any] = DATA["api"]
Function = TypeVar("Function", bound=Callable[..., Any])

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_NAMES = {
    "Module": torch.nn.Module,
    "Tensor": torch.Tensor,
    "dtype": torch.dtype,
    "TorchOptimizer": torch.optim.Optimizer,
    "Dataset": object,  # any Python iterable will do
    "Sampler": torch.utils.data.Sampler,
    "ICustomArgParser": object,
    **{name: getattr(typing, name) for name in typing.__all__},
}


def make_enum(name: str, module: str) -> Any:
    """The enum of that name, members and values from the data."""
    entry = DATA["enums"][name]
    base = {"IntEnum": enum.IntEnum, "Enum": enum.Enum}[entry["base"]]
    return base(name, entry["values"], module=module)


@functools.lru_cache(maxsize=None)
def _type(text: str) -> Any:
    names = {**vars(sys.modules["poptorch"]), **_NAMES}
    return eval(text, {"__builtins__": __builtins__}, names)


def accepts(value: Any, kind: Any) -> bool:
    """Whether `value` is of the annotated type, strictly: NumPy's scalars are no numbers; a bool is an int but no float."""
    if kind is Any or kind is object:
        return True
    if kind is None or kind is type(None):
        return value is None
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and type(value).__module__ != "numpy"
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Union:
        return any(accepts(value, one) for one in inside)
    if origin is None:
        if kind is typing.Callable:
            return callable(value)
        return isinstance(value, getattr(kind, "__origin__", kind) or kind)
    name = getattr(origin, "__name__", "")
    if name == "Callable":
        return callable(value)
    if name == "Iterable":
        return hasattr(value, "__iter__")
    if name == "type":
        return isinstance(value, type)
    if not isinstance(value, origin):
        return False
    if not inside or isinstance(inside[0], TypeVar):  # bare List, as Python 3.8 shows it
        return True
    if name == "dict":
        return all(accepts(k, inside[0]) and accepts(v, inside[1]) for k, v in value.items())
    if name == "tuple":
        return len(inside) == len(value) and all(accepts(v, one) for v, one in zip(value, inside))
    return all(accepts(item, inside[0]) for item in value)


def typed(
    name: str, unchecked: Iterable[str] = (), error: Type[BaseException] = AssertionError, says: Optional[str] = None
) -> Callable[[Function], Function]:
    """Hold a function to the entry `name` of the data: its arguments are checked and the call is recorded.

    `unchecked`: arguments whose annotation PopTorch itself does not keep to; the body checks them.
    `error`, `says`: where PopTorch refuses with something else than an AssertionError of its options.
    """
    entry = {parameter["name"]: parameter for parameter in API[name].get("params", [])}

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        kinds = {p.name: p.kind for p in signature.parameters.values()}

        def check(option: str, value: Any) -> None:
            text = entry[option].get("type")
            default = signature.parameters[option].default
            if text is None or value is default or kinds[option] in _VARIADIC:
                return
            if not accepts(value, _type(text)):
                text = says or f"Unexpected type {type(value)} for option {option} of {name}. Expected {text}"
                raise error(text)

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            given.pop("self", None)
            with outermost() as first:
                if first:
                    recorded.calls.append(Call(name, {key: summary(value) for key, value in given.items()}))
                for option, value in given.items():
                    if option not in unchecked:
                        check(option, value)
                return function(*args, **kwargs)

        checked.entry = name
        return checked

    return decorate
