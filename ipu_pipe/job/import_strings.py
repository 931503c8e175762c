"""Import strings, `module:name`: how a config names models, losses and data without registering them."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any, Callable, Mapping

from ipu_pipe.errors import BadInput, summarize
from ipu_pipe.shipped import MODELS
from ipu_pipe.text import find_nearest, show


def resolve_entry(entry: str, key: str) -> Callable[..., Any]:
    """What an import string `module:attribute` names, looked for in the current folder too. `key` is for the error."""
    module_name, colon, attribute = entry.partition(":")
    if not colon or not module_name or not attribute:
        raise BadInput(f"{key}: {show(entry)}: must be an import string module:name, such as models.resnet:resnet50")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = _imported(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise BadInput(
                f"{key}: {show(entry)}: no module {error.name} in the current folder or installed"
            ) from None
        raise BadInput(f"{key}: {show(entry)}: importing {module_name} fails: {error}") from error
    except Exception as error:  # whatever the user's module raises
        raise BadInput(
            f"{key}: {show(entry)}: importing {module_name} fails: {type(error).__name__}: {error}"
        ) from error
    found: Any = module
    for name in attribute.split("."):
        if not hasattr(found, name):
            near = find_nearest(name, [n for n in dir(found) if not n.startswith("_")], 3)
            raise BadInput(
                f"{key}: {show(entry)}: {module_name} has no {name}" + (f", nearest are {near}" if near else "")
            )
        found = getattr(found, name)
    if not callable(found):
        raise BadInput(f"{key}: {show(entry)}: is a {type(found).__name__}, must be callable")
    called: Callable[..., Any] = found
    return called


def _imported(name: str) -> Any:
    """The module of that name: the user's own, else of models that came with the library."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        top = name.partition(".")[0]
        if top != MODELS or error.name not in (top, name):
            raise
        try:
            return importlib.import_module(f"ipu_pipe.{name}")
        except ModuleNotFoundError as second:
            missing = name if second.name == f"ipu_pipe.{name}" else error.name
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing) from None


def check_arguments(function: Callable[..., Any], args: Mapping[str, Any], key: str) -> None:
    """Refuse (BadInput, every fault) keyword arguments that `function` does not take or misses, told under `key`."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some built-in callables do not tell: calling them will
        return
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    faults = [
        f"{key}.{show(name)}: {show(value)}: unknown argument, allowed are {', '.join(named)}"
        for name, value in args.items()
        if name not in named and not open_ended
    ]
    faults += [
        f"{key}.{name}: missing: must be given"
        for name, parameter in named.items()
        if parameter.default is parameter.empty and name not in args
    ]
    if faults:
        raise BadInput(faults)


def call_entry(function: Callable[..., Any], args: Mapping[str, Any], key: str) -> Any:
    """`function(**args)`; arguments that it does not take or misses are told under `key`."""
    check_arguments(function, args, key)
    try:
        return function(**args)
    except BadInput as error:
        raise BadInput([f"{key}: {fault}" for fault in error.faults]) from None
    except (TypeError, ValueError) as error:
        raise BadInput(f"{key}: {show(dict(args))}: {error}") from error
    except Exception as error:  # whatever the user's function raises
        raise BadInput(f"{key}: {show(dict(args))}: {summarize(error)}") from error
