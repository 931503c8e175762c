"""The seam between two calls: what the caller's objects look like now, against the last call's end.

    end of a call    note_step()       a picture of what this backend does not read live
    next `step`      list_changes()    what the caller has changed since, by name
    then                               each change is taken over, or refused with the remedy

The engine itself moves weights, counters and buffers during a call, so the picture is taken at its
end. A change is not seen if it is inside an object of the caller's own, in a class's attribute, in
another function that the loss calls, or in the memory behind a tensor (`p.data.mul_()`, a NumPy
view). So weights that are elsewhere have no memory here: torch refuses to write them.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, Iterator, Mapping, NamedTuple, Sequence, Tuple

import torch
from torch import nn

# what torch keeps in a module itself: the caller's attributes are the rest
OF_TORCH = frozenset(vars(nn.Module()))
HOOKS = tuple(name for name in sorted(OF_TORCH) if name.endswith("_hooks"))
HOOKS_OF_OPTIMIZER = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
# containers of the caller's with more elements are not looked into
LONGEST = 100
# levels of lists, tuples and dictionaries that are looked into
DEPTH = 2

# (module, attribute), such as ("0", "weight") -> what it is now
Picture = Dict[Tuple[str, str], Any]


class Change(NamedTuple):
    """A change by the caller: its kind (a row of `LOOKS`), and where it is."""

    kind: str
    where: str


class Objects:
    """The caller's objects. The names of modules are kept, because walking over a large model takes
    longer than looking at it.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self._children: list[Any] = []
        self._tensors: list[Any] = []
        self._attributes: list[Any] = []
        self.modules: list[tuple[str, nn.Module]] = []
        self.hooks: list[tuple[str, str, Mapping[Any, Any]]] = []
        # each with the name of its module and its own
        self.parameters: list[tuple[str, str, nn.Parameter]] = []
        self.names: dict[Any, str] = {}
        # the caller's own attributes of each module
        self.attributes: list[tuple[str, Mapping[str, Any], list[str]]] = []

    def refresh(self) -> None:
        """Walk over the model again if a module, parameter or attribute was added, removed or
        replaced.
        """
        if not self.modules or self._children != self._list_children():
            self.modules = list(self.model.named_modules())
            self._children = self._list_children()
            self.hooks = [(n, key, m.__dict__[key]) for n, m in self.modules for key in HOOKS]
        # compared by identity: tensors have an == of their own
        tensors = [id(p) for _, module in self.modules for p in module._parameters.values()]
        if tensors != self._tensors:
            self._tensors = tensors
            self.parameters = [
                (name, key, parameter)
                for name, module in self.modules
                for key, parameter in module._parameters.items()
                if parameter is not None
            ]
            self.names = {p: f"{name}.{key}" for name, key, p in self.parameters}
        attributes = [tuple(module.__dict__) for _, module in self.modules]
        if attributes != self._attributes:
            self._attributes = attributes
            self.attributes = [
                (name, module.__dict__, [key for key in module.__dict__ if key not in OF_TORCH])
                for name, module in self.modules
            ]

    def _list_children(self) -> list[Any]:
        return [list(module._modules.values()) for _, module in self.modules]


# ---- pictures, one function a kind


def _look_at_modes(objects: Objects) -> Picture:
    return {(name, "training"): module.training for name, module in objects.modules}


def _look_at_values(objects: Objects) -> Picture:
    return {
        (name, key): _describe(values[key])
        for name, values, keys in objects.attributes
        for key in keys
    }


def _look_at_modules(objects: Objects) -> Picture:
    return {
        (name, key): child
        for name, module in objects.modules
        for key, child in module._modules.items()
    }


def _look_at_weights(objects: Objects) -> Picture:
    return {(n, key): _describe_tensor(p) for n, key, p in objects.parameters}


def _look_at_buffers(objects: Objects) -> Picture:
    return {
        (name, key): _describe_tensor(buffer)
        for name, module in objects.modules
        for key, buffer in module._buffers.items()
        if buffer is not None
    }


def _look_at_training_of_weights(objects: Objects) -> Picture:
    return {(n, f"{key}.requires_grad"): p.requires_grad for n, key, p in objects.parameters}


def _look_at_hooks(objects: Objects) -> Picture:
    of_modules = {place[:2]: list(place[2]) for place in objects.hooks if place[2]}
    of_weights = {
        (name, f"{key}'s hooks"): [list(hooks) for hooks in _list_hooks_of_tensor(p)]
        for name, key, p in objects.parameters
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)
    }
    return {**of_modules, **of_weights}


def _list_hooks_of_tensor(tensor: torch.Tensor) -> list[Any]:
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return [getattr(tensor, name, None) or {} for name in names]


def _look_at_optimizer(objects: Objects) -> Picture:
    names = objects.names
    picture: Picture = {
        ("optimizer.state", names.get(p, "a parameter")): _describe(state)
        for p, state in objects.optimizer.state.items()
    }
    for key in HOOKS_OF_OPTIMIZER:
        picture["optimizer", key] = list(getattr(objects.optimizer, key, ()))
    return picture


def _look_at_loss(objects: Objects) -> Picture:
    return {("loss", name): _describe(value) for name, value in _list_values_of(objects.loss)}


def _list_values_of(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a loss reads by name: attributes, what it closes over, arguments that are bound,
    and globals.
    """
    if isinstance(function, functools.partial):
        yield from enumerate_names("argument", function.args)
        yield from function.keywords.items()
        yield from _list_values_of(function.func)
        return
    if isinstance(function, nn.Module):
        for name, module in function.named_modules():
            for key, value in module.__dict__.items():
                if key not in OF_TORCH or key == "training":
                    yield _name((name, key)), value
        yield from function.named_parameters()
        yield from function.named_buffers()
        return
    owner = getattr(function, "__self__", None)
    if owner is not None and not isinstance(owner, nn.Module):
        yield from getattr(owner, "__dict__", {}).items()
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        try:
            yield name, cell.cell_contents
        # a variable that is not set yet
        except ValueError:
            continue
    for name in code.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]


def sum_tensors(model: nn.Module) -> dict[str, str]:
    """Return two sums of each weight and buffer, which a write through `.data` changes, too."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        doubles = {name: t.detach().double() for name, t in tensors.items() if not t.is_complex()}
        # repr, because not a number is unequal to itself
        return {name: repr((t.sum().item(), t.abs().sum().item())) for name, t in doubles.items()}


def enumerate_names(name: str, values: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield values with numbered names."""
    for i, value in enumerate(values):
        yield f"{name} {i}", value


def _describe(value: Any, depth: int = DEPTH) -> Any:
    """Return what can be compared later without keeping what may change: numbers and strings as
    they are, tensors by identity and version, short containers by their elements, else the object.
    """
    if isinstance(value, (int, float, complex, str, bytes, type(None))):
        # True is not 1 here, and not a number is itself
        return type(value), value if value == value else None
    if isinstance(value, torch.Tensor):
        return _describe_tensor(value)
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        if not depth or len(value) > LONGEST:
            return type(value), len(value)
        if isinstance(value, dict):
            return [(_describe(k, 0), _describe(v, depth - 1)) for k, v in value.items()]
        return [type(value), *(_describe(element, depth - 1) for element in value)]
    return _Same(value)


class _Same:
    """An object that is compared by identity: its own `==` may be slow, or return an array."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def _describe_tensor(tensor: torch.Tensor) -> Any:
    # torch counts no version of a tensor that was made in inference mode
    version = None if tensor.is_inference() else tensor._version
    return _Same(tensor), version, tensor.data_ptr()


def _name(where: tuple[str, str]) -> str:
    """Return a place as a caller writes it."""
    module, attribute = where
    return f"{module or 'model'}.{attribute}"


class Look(NamedTuple):
    """A kind of change: the function that takes its picture, and how a caller does it instead."""

    look: Callable[[Objects], Picture]
    remedy: str


IN_WHOLE_MODEL = "change it inside `with pipe.whole_model():`"
WITH_THE_BATCH = "pass it with the batch, or keep it in a buffer"
LOOKS: Mapping[str, Look] = {
    "mode": Look(_look_at_modes, "set it back"),
    "value": Look(_look_at_values, WITH_THE_BATCH),
    "module": Look(_look_at_modules, "make a new pipeline"),
    "weight": Look(_look_at_weights, IN_WHOLE_MODEL),
    "buffer": Look(_look_at_buffers, IN_WHOLE_MODEL),
    "requires_grad": Look(_look_at_training_of_weights, "make a new pipeline"),
    "hook": Look(_look_at_hooks, "register it before the first step"),
    "optimizer": Look(_look_at_optimizer, "use pipe.state_dict() and pipe.load_state_dict()"),
    "loss": Look(_look_at_loss, WITH_THE_BATCH),
}

# ---- what a backend does with a change

LIVE = "live"  # the next batch reads it, and no earlier one: not looked at
DRAINED = (
    "drained"  # the next passes read it, of whatever batch: refused while updates are in flight
)
REBUILT = "rebuilt"  # taken over by building again: refused while updates are in flight
NEVER = "never"  # refused

# A kind that a row does not name is refused.
TAKEN_OVER: Mapping[str, Mapping[str, str]] = {
    # all passes of a batch run in its own step
    "emulator": {
        **dict.fromkeys(("value", "weight", "buffer", "hook", "optimizer", "loss"), LIVE),
        **dict.fromkeys(("mode", "module", "requires_grad"), REBUILT),
    },
    # torch refuses to write weights of other ranks, which have no memory here
    "distributed": {
        **dict.fromkeys(("weight", "buffer", "hook", "optimizer", "loss"), DRAINED),
        **dict.fromkeys(("mode", "value", "requires_grad"), REBUILT),
    },
    "xla": dict.fromkeys(("mode", "value", "loss"), REBUILT),
    "poptorch": {},
}


# what a call does not change itself: compared with the last step, whatever was called since
STEADY = ("mode", "module", "requires_grad", "hook")


class Seam:
    """The pictures that a backend needs, of the kinds that it does not read live."""

    def __init__(self, backend: str, objects: Objects) -> None:
        self._objects = objects
        kinds = [kind for kind in LOOKS if get_treatment(backend, kind) != LIVE]
        self._moving = [kind for kind in kinds if kind not in STEADY]
        self._pictures: dict[str, Picture] = {}
        # what the caller has changed before another call than a step
        self._waiting: list[Change] = []
        self._note(kinds)

    def _note(self, kinds: Sequence[str]) -> None:
        self._objects.refresh()
        self._pictures.update({kind: LOOKS[kind].look(self._objects) for kind in kinds})

    def note_step(self) -> None:
        """Take the pictures at the end of a step, which has taken all changes over."""
        self._waiting = []
        self._note(list(self._pictures))

    def begin_other_call(self) -> None:
        """Keep the caller's changes for the next step: another call begins."""
        self._waiting = [c for c in self.list_changes() if c.kind in self._moving]

    def note_other_call(self) -> None:
        """Take the pictures of what another call may have changed itself."""
        self._note(self._moving)

    def list_changes(self) -> list[Change]:
        """List what the caller has changed since the last step."""
        changes = list(self._waiting)
        self._objects.refresh()
        for kind, before in self._pictures.items():
            now = LOOKS[kind].look(self._objects)
            if now != before:
                places = [*before, *(where for where in now if where not in before)]
                changed = [where for where in places if before.get(where) != now.get(where)]
                changes += [Change(kind, _name(where)) for where in changed]
        return changes


def get_treatment(backend: str, kind: str) -> str:
    """Return what a backend does with a kind of change."""
    return TAKEN_OVER.get(backend, {}).get(kind, NEVER)


def explain_refusal(call: str, backend: str, change: Change, in_flight: int) -> str:
    """Return the line for a change that a backend cannot take over now."""
    if get_treatment(backend, change.kind) == NEVER:
        return (
            f"{call}: {change.where}: was changed after the last call, and backend {backend} would "
            f"not see it: {LOOKS[change.kind].remedy}, or set it back"
        )
    return (
        f"{call}: {change.where}: was changed while {in_flight} updates are in flight: call "
        f"pipe.drain() before the change, or set it back"
    )
