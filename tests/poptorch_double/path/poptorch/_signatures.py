"""api.json is the one place that states names, arguments, defaults and types; `typed` holds functions to it when called."""

from __future__ import annotations

import enum
import functools
import inspect
import json
import sys
import typing
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, TypeVar

import torch

from poptorch._record import Call, outermost, recorded, summary

DATA: Dict[str, Any] = json.loads((Path(__file__).resolve().parents[2] / "api.json").read_text())
API: Dict[str, Any] = DATA["api"]
Function = TypeVar("Function", bound=Callable[..., Any])

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
    """Return the enum of that name, members and values from the data."""
    entry = DATA["enums"][name]
    base = {"IntEnum": enum.IntEnum, "Enum": enum.Enum}[entry["base"]]
    return base(name, entry["values"], module=module)


@functools.lru_cache(maxsize=None)
def _type(text: str) -> Any:
    names = {**vars(sys.modules["poptorch"]), **_NAMES}
    return eval(text, {"__builtins__": __builtins__}, names)


def accepts(value: Any, kind: Any) -> bool:
    """Return whether `value` is of the annotated type, strictly: NumPy's scalars are no numbers; a
    bool is an int but no float."""
    if kind is Any or kind is object:
        return True
    if kind is float:
        return (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and type(value).__module__ != "numpy"
        )
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Union:
        return any(accepts(value, one) for one in inside)
    if origin is None:
        return isinstance(value, getattr(kind, "__origin__", kind) or kind)
    name = getattr(origin, "__name__", "")
    if name == "Iterable":
        return hasattr(value, "__iter__")
    if not isinstance(value, origin):
        return False
    if name == "dict":
        return all(accepts(k, inside[0]) and accepts(v, inside[1]) for k, v in value.items())
    if name == "tuple":
        return len(inside) == len(value) and all(accepts(v, one) for v, one in zip(value, inside))
    return all(accepts(item, inside[0]) for item in value)


def _parameter(entry: Dict[str, Any]) -> inspect.Parameter:
    default = entry.get("default", inspect.Parameter.empty)
    if isinstance(default, dict):
        enumeration, _, member = default["enum"].partition(".")
        default = getattr(getattr(sys.modules["poptorch.enums"], enumeration), member)
    kind = inspect._ParameterKind[entry.get("kind", "POSITIONAL_OR_KEYWORD")]
    return inspect.Parameter(entry["name"], kind, default=default)


def typed(name: str, unchecked: Iterable[str] = ()) -> Callable[[Function], Function]:
    """Give a function the signature of the entry `name` of the data: a call's arguments are bound and checked by it, recorded,
    and handed on by position, `self` first where there is one.

    `unchecked`: arguments whose annotation PopTorch itself does not keep to; the body checks them.
    """
    params = API[name].get("params", [])
    types = {
        param["name"]: param.get("type")
        for param in params
        if "kind" not in param and param["name"] not in unchecked
    }

    def decorate(function: Function) -> Function:
        receiver = [p for p in inspect.signature(function).parameters.values() if p.name == "self"]
        signature = inspect.Signature([*receiver, *map(_parameter, params)])

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            passed = {key: value for key, value in bound.arguments.items() if key != "self"}
            with outermost() as first:
                if first:
                    recorded.calls.append(
                        Call(name, {key: summary(value) for key, value in passed.items()})
                    )
                for option, value in passed.items():
                    text = types.get(option)
                    if (
                        text
                        and value is not signature.parameters[option].default
                        and not accepts(value, _type(text))
                    ):
                        raise AssertionError(
                            f"Unexpected type {type(value)} for option {option} of {name}. Expected {text}"
                        )
                bound.apply_defaults()
                return function(*bound.args, **bound.kwargs)

        checked.__signature__ = signature
        return checked

    return decorate
