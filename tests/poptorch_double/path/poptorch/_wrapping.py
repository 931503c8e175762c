"""Wrap the user's model as trainingModel does: in classes whose attributes fetch the trained
weights on access.

The user's module, its parameters and its buffers get subclasses of their own classes; destroy()
restores the old ones. Only a weak reference leads to the executor: when it is gone the model stays
wrapped, with its current weights.
"""

from __future__ import annotations

import collections
import weakref
from typing import Any

import torch

from poptorch._errors import make_py_error


def is_wrapped(model: Any) -> bool:
    return hasattr(type(model), "_unwrapped_model")


def wrap(model: torch.nn.Module, executor: Any) -> None:
    parent = weakref.ref(executor)
    for buffer in model.buffers():
        if type(buffer) is not torch.Tensor:
            raise make_py_error(
                f"All buffers must be an instance of torch.Tensor (Got {type(buffer)})"
            )
    parameter_class, buffer_class = (
        _make_tensor_class(torch.nn.Parameter, parent),
        _make_tensor_class(torch.Tensor, parent),
    )
    for parameter in model.parameters():
        parameter.__class__ = parameter_class
    for buffer in model.buffers():
        buffer.__class__ = buffer_class
    model.__class__ = _make_model_class(type(model), parent)


def unwrap(model: Any) -> None:
    model.__class__ = type(model)._unwrapped_model
    for tensor in [*model.parameters(), *model.buffers()]:
        if hasattr(type(tensor), "_unwrapped"):
            tensor.__class__ = type(tensor)._unwrapped


def _sync_weights(parent: Any) -> bool:
    executor = parent()
    return executor is not None and bool(executor._sync_if_needed())


def _make_tensor_class(base: Any, parent: Any) -> Any:
    class PoptorchTensor(base):
        _unwrapped = base

        def __getattribute__(self, name: str) -> Any:
            _sync_weights(parent)
            return object.__getattribute__(self, name)

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            _sync_weights(parent)
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

    return PoptorchTensor


def _make_model_class(base: Any, parent: Any) -> Any:
    class PoptorchModel(base):
        _unwrapped_model = base

        def copyWeightsToHostIfNeeded(self) -> bool:
            return _sync_weights(parent)

        def __getattribute__(self, name: str) -> Any:
            if name == "_host_weights_version":
                executor = parent()
                return None if executor is None else executor._host_weights_version
            if name in ("_buffers", "_parameters", "forward"):
                _sync_weights(parent)
            return object.__getattribute__(self, name)

        def state_dict(
            self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
        ) -> Any:
            """Return plain tensors, which load without PopTorch. The arguments are passed by
            position, of which torch warns."""
            state = super().state_dict(*(args or (destination, prefix, keep_vars)))
            out = collections.OrderedDict()
            for name, value in state.items():
                out[name] = value.detach() if isinstance(value, torch.Tensor) else value
            return out

    PoptorchModel.__name__ = f"Poptorch{base.__name__}"
    return PoptorchModel
