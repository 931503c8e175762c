"""Check calls against api.json, the one source of names, arguments, defaults and types:
`follow_api` does so for a function."""

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

from poptorch._record import ApiCall, Call, recorded, summarize

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
    """Return the enum `name` with the members and values of the data."""
    entry = DATA["enums"][name]
    base = {"IntEnum": enum.IntEnum, "Enum": enum.Enum}[entry["base"]]
    return base(name, entry["values"], module=module)


@functools.lru_cache(maxsize=None)
def _resolve_type(text: str) -> Any:
    names = {**vars(sys.modules["poptorch"]), **_NAMES}
    return eval(text, {"__builtins__": __builtins__}, names)


def matches_type(value: Any, kind: Any) -> bool:
    """Return whether `value` is of the annotated type. Strict: NumPy's scalars are not numbers;
    a bool is an int but not a float."""
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
        return any(matches_type(value, one) for one in inside)
    if origin is None:
        return isinstance(value, getattr(kind, "__origin__", kind) or kind)
    name = getattr(origin, "__name__", "")
    if name == "Iterable":
        return hasattr(value, "__iter__")
    if not isinstance(value, origin):
        return False
    if name == "dict":
        return all(
            matches_type(k, inside[0]) and matches_type(v, inside[1]) for k, v in value.items()
        )
    if name == "tuple":
        return len(inside) == len(value) and all(
            matches_type(v, one) for v, one in zip(value, inside)
        )
    return all(matches_type(item, inside[0]) for item in value)


def _make_parameter(entry: Dict[str, Any]) -> inspect.Parameter:
    default = entry.get("default", inspect.Parameter.empty)
    if isinstance(default, dict):
        enumeration, _, member = default["enum"].partition(".")
        default = getattr(getattr(sys.modules["poptorch.enums"], enumeration), member)
    kind = inspect._ParameterKind[entry.get("kind", "POSITIONAL_OR_KEYWORD")]
    return inspect.Parameter(entry["name"], kind, default=default)


def follow_api(name: str, unchecked: Iterable[str] = ()) -> Callable[[Function], Function]:
    """Give a function the signature of the entry `name` of the data: the arguments of a call are
    bound and checked by it, recorded, and passed on by position, `self` first if there is one.

    `unchecked`: arguments whose annotation PopTorch itself does not enforce; the body checks them.
    """
    params = API[name].get("params", [])
    types = {
        param["name"]: param.get("type")
        for param in params
        if "kind" not in param and param["name"] not in unchecked
    }

    def decorate(function: Function) -> Function:
        receiver = [p for p in inspect.signature(function).parameters.values() if p.name == "self"]
        signature = inspect.Signature([*receiver, *map(_make_parameter, params)])

        @functools.wraps(function)
        def call_checked(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            passed = {key: value for key, value in bound.arguments.items() if key != "self"}
            with ApiCall() as first:
                if first:
                    recorded.calls.append(
                        Call(name, {key: summarize(value) for key, value in passed.items()})
                    )
                for option, value in passed.items():
                    text = types.get(option)
                    if (
                        text
                        and value is not signature.parameters[option].default
                        and not matches_type(value, _resolve_type(text))
                    ):
                        raise AssertionError(
                            f"Unexpected type {type(value)} for option {option} of {name}. Expected {text}"
                        )
                bound.apply_defaults()
                return function(*bound.args, **bound.kwargs)

        call_checked.__signature__ = signature
        return call_checked

    return decorate
