"""Restore a model's state: contexts that undo at their end what a forward or a backward changed,
and `load_state`.

Modes, buffers, attributes and weights each have a context; `restore_all` restores all of them,
gradients and random states too. `restore_function` restores what a user's function (a loss) keeps
between calls. The library uses them for every trial run: shape inference, cost measurement, the
verification of pieces, warm-ups.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from ipu_pipe.model.devices import fork_random

# larger tensors that a function reads are data, not its state
MOST_NUMBERS = 1 << 20
MOST_PARTS = 100_000


def record_modes(*models: nn.Module) -> Callable[[], None]:
    """Return a function that restores the present training mode of each module of `models`.

    `requires_grad` of the parameters too, because a user's `train()` may freeze some.
    """
    modes = [(module, module.training) for model in models for module in model.modules()]
    trainability = [(p, p.requires_grad) for model in models for p in model.parameters()]

    def restore() -> None:
        for module, mode in modes:
            # not train(), which a user may override, and which would take the modules inside with
            # it
            module.training = mode
        for parameter, is_trained in trainability:
            if parameter.requires_grad != is_trained:
                parameter.requires_grad_(is_trained)

    return restore


@contextlib.contextmanager
def restore_modes(*models: nn.Module) -> Iterator[None]:
    """Restore at the end of the context what `record_modes` does."""
    restore = record_modes(*models)
    try:
        yield
    finally:
        restore()


@contextlib.contextmanager
def _restore_values(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Restore the values of tensors, which a forward may write."""
    # expanded tensors cannot be written
    values = [(t, t.detach().clone()) for t in tensors if 0 not in t.stride()]
    try:
        yield
    finally:
        for tensor, value in values:
            # through `data`, because autograd refuses to write to a weight
            tensor.data.copy_(value)


@contextlib.contextmanager
def restore_buffers(model: nn.Module) -> Iterator[None]:
    """Restore every buffer: its values, and the tensor itself if a forward has bound another one to
    its name (`self.count = self.count + 1`)."""
    tables = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    buffers = [t for _, content in tables for t in content.values() if t is not None]
    with _restore_values(buffers):
        try:
            yield
        finally:
            for table, content in tables:
                table.update(content)


@contextlib.contextmanager
def restore_attributes(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of modules and the contents of their containers (tables of parameters
    and buffers, caches), where a forward may keep tensors or counters. Tensors among them that are
    neither parameters nor buffers get their values back.
    """
    with _restore_objects(list(model.modules())):
        yield


@contextlib.contextmanager
def _restore_objects(objects: Sequence[Any], others: Sequence[Any] = ()) -> Iterator[None]:
    """Restore the attributes of objects, and the contents of the containers among these attributes
    and among `others`.
    """
    tables = [vars(one) for one in objects]
    values = [*tables, *(value for table in tables for value in table.values()), *others]
    names = ("dict", "list", "set", "OrderedDict")
    contents = [(value, value.copy()) for value in values if type(value).__name__ in names]
    registered = ("_parameters", "_buffers")
    parts = [
        (value, sys.maxsize if isinstance(one, nn.Module) else MOST_NUMBERS)
        for one, table in zip(objects, tables)
        for key, value in table.items()
        if key not in registered
    ] + [(value, MOST_NUMBERS) for value in others]
    copies: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
    for value, most in parts:
        for tensor in _list_plain_tensors(value, most):
            # whole storages, since views may overlap
            storage = tensor.untyped_storage()
            # several views may have one storage
            if storage.data_ptr() not in copies:
                copies[storage.data_ptr()] = storage, _view_bytes(storage).clone()
    try:
        yield
    finally:
        for container, content in contents:
            # another thread may be reading one that no forward has changed
            if _list_ids(container) != _list_ids(content):
                container.clear()
                container.update(content) if isinstance(
                    container, (dict, set)
                ) else container.extend(content)
        for storage, content in copies.values():
            # a resized one has no place for it
            if storage.nbytes() == content.numel():
                present = _view_bytes(storage)
                # one that has not changed may be read-only
                if not torch.equal(present, content):
                    present.copy_(content)


def _view_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _list_plain_tensors(nest: Any, most: int) -> list[torch.Tensor]:
    """List the tensors in nested containers, each once; none if these are data: more than `most`
    numbers, or more than MOST_PARTS parts.
    """
    tensors: list[torch.Tensor] = []
    seen: set[int] = set()
    parts = [nest]
    while parts and len(seen) <= MOST_PARTS:
        part = parts.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, (dict, list, tuple, set)):
            parts.extend(part.values() if isinstance(part, dict) else part)
        elif type(part) is torch.Tensor and part.layout is torch.strided and not part.is_meta:
            tensors.append(part)
    is_data = bool(parts) or sum(t.numel() for t in tensors) > most
    return [] if is_data else tensors


def _list_ids(container: Any) -> list[int]:
    values = (
        [part for item in container.items() for part in item]
        if isinstance(container, dict)
        else container
    )
    return [id(value) for value in values]


def load_state(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy `tensors`, one for each name of the model's state dict, into `model`."""
    # the model's own state dict has the modules' versions, without which torchvision's MNASNet
    # refuses to load
    state = model.state_dict()
    state.update(tensors)
    model.load_state_dict(state)


@contextlib.contextmanager
def restore_all(model: nn.Module) -> Iterator[None]:
    """Restore weights, buffers, gradients, attributes, modes and random states: all that a forward
    and a backward can change.
    """
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters]
    device = parameters[0].device if parameters else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(fork_random(device))
        for restore in (restore_modes, restore_attributes, restore_buffers):
            stack.enter_context(restore(model))
        stack.enter_context(_restore_values(parameters))
        try:
            for p in parameters:
                # the backward of a trial must not add to the caller's gradients
                p.grad = None
            yield
        finally:
            for p, gradient in zip(parameters, gradients):
                p.grad = gradient


@contextlib.contextmanager
def restore_function(function: Any) -> Iterator[None]:
    """Restore what a user's function keeps between calls, such as counters and running statistics.

    It may keep them in its object, module or defaults, and in variables outside of it (of an
    enclosing function, or global).
    """
    variables: list[tuple[Any, str, Any]] = []
    values = _list_shared_values(function, variables)
    modules = [value for value in values if isinstance(value, nn.Module)]
    objects = [
        value
        for value in values
        if hasattr(value, "__dict__") and not isinstance(value, torch.Tensor)
    ]
    generators = [
        (value, value.get_state()) for value in values if isinstance(value, torch.Generator)
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_restore_objects(objects, values))
        for module in modules:
            stack.enter_context(restore_attributes(module))
            stack.enter_context(restore_buffers(module))
        try:
            yield
        finally:
            for owner, name, value in variables:
                if isinstance(owner, dict):
                    owner[name] = value
                else:
                    setattr(owner, name, value)
            for generator, state in generators:
                generator.set_state(state)


def _list_shared_values(function: Any, variables: list[tuple[Any, str, Any]]) -> list[Any]:
    """List the functions, objects, containers and tensors in which a function may keep values; add
    its outer variables, each as (cell or dictionary of globals, name, value), to `variables`."""
    values_by_id: dict[int, Any] = {}
    waiting = [function]
    while waiting:
        value = waiting.pop()
        has_no_state = isinstance(
            value, (type, types.ModuleType, types.BuiltinFunctionType, str, int, float)
        )
        if has_no_state or id(value) in values_by_id:
            continue
        values_by_id[id(value)] = value
        if isinstance(value, functools.partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, types.MethodType):
            waiting += [value.__self__, value.__func__]
        # the globals of torch's own functions are not the user's
        elif isinstance(value, types.FunctionType) and not str(value.__module__).startswith(
            "torch."
        ):
            outer = list(_walk_outer_variables(value))
            variables += outer
            waiting += [content for _, _, content in outer]
            waiting += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        elif isinstance(value, (dict, list, tuple, set)):
            waiting += value.values() if isinstance(value, dict) else value
    wrappers = (types.MethodType, functools.partial)
    return [value for value in values_by_id.values() if not isinstance(value, wrappers)]


def _walk_outer_variables(function: types.FunctionType) -> Iterator[tuple[Any, str, Any]]:
    """Yield (cell or dictionary of globals, name, value) of a function's outer variables, but not
    functions of other modules.
    """
    for cell in function.__closure__ or ():
        # a variable that is assigned later has an empty cell
        with contextlib.suppress(ValueError):
            yield cell, "cell_contents", cell.cell_contents
    for name in function.__code__.co_names:
        if name in function.__globals__:
            value = function.__globals__[name]
            if getattr(value, "__globals__", function.__globals__) is function.__globals__:
                yield function.__globals__, name, value
