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
    """Import what `module:attribute` names, from the current folder too. Raise `BadInput`, about `key`, if there is none."""
    place = f"{key}: {show(entry)}"
    module_name, colon, attribute = entry.partition(":")
    if not colon or not module_name or not attribute:
        raise BadInput(f"{place}: must be an import string module:name, such as models.resnet:resnet50")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        value = _import_module(module_name)
    except Exception as error:  # whatever the user's module raises
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and (module_name == missing or module_name.startswith(missing + ".")):
            raise BadInput(f"{place}: no module {missing} in the current folder or installed") from None
        raise BadInput(f"{place}: importing {module_name} fails: {type(error).__name__}: {error}") from error
    for name in attribute.split("."):
        if not hasattr(value, name):
            near = find_nearest(name, [known for known in dir(value) if not known.startswith("_")], 3)
            raise BadInput(f"{place}: {module_name} has no {name}" + (f", nearest are {near}" if near else ""))
        value = getattr(value, name)
    if not callable(value):
        raise BadInput(f"{place}: is a {type(value).__name__}, must be callable")
    function: Callable[..., Any] = value
    return function


def _import_module(name: str) -> Any:
    """Import a module: the user's own, else one of the models that come with the library."""
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
    """Raise `BadInput` for all keyword arguments that `function` does not take, or misses; `key` holds them in the config."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some built-in callables do not say: calling them will
        return
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    faults = [
        f"{key}.{show(name)}: {show(value)}: unknown argument, allowed are {', '.join(named)}"
        for name, value in args.items()
        if name not in named and not takes_any
    ]
    faults += [
        f"{key}.{name}: missing: must be given"
        for name, parameter in named.items()
        if parameter.default is parameter.empty and name not in args
    ]
    if faults:
        raise BadInput(faults)


def call_entry(function: Callable[..., Any], args: Mapping[str, Any], key: str) -> Any:
    """Return `function(**args)`. Raise `BadInput` if it fails; `key` holds its arguments in the config."""
    check_arguments(function, args, key)
    try:
        return function(**args)
    except BadInput as error:
        raise BadInput([f"{key}: {fault}" for fault in error.faults]) from None
    except Exception as error:  # whatever the user's function raises
        message = str(error) if isinstance(error, (TypeError, ValueError)) else summarize(error)
        raise BadInput(f"{key}: {show(dict(args))}: {message}") from error
