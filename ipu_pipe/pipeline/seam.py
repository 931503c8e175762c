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

import itertools
from typing import Any, Callable, Collection, List, Mapping, NamedTuple, Sequence, Tuple

import torch
from torch import nn

from ipu_pipe.data.sources import compute_checksum
from ipu_pipe.model.values import DEPTH, LONGEST, OF_TORCH, Place, list_values_of, name_place

HOOKS = tuple(name for name in sorted(OF_TORCH) if name.endswith("_hooks"))
HOOKS_OF_OPTIMIZER = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
# numbers and strings that are equal only if they are the same, and cheap to compare
PLAIN = frozenset((int, bool, str, type(None)))
# an attribute that was removed
_MISSING = object()


class Picture(NamedTuple):
    """What is at each place now: lists of one value a place, which are compared by `==`.

    `places` also holds the objects whose ids are compared, so that no other object gets one.
    """

    places: Collection[Place]
    values: Tuple[List[Any], ...]


class Change(NamedTuple):
    """A change by the caller: its kind (a row of `LOOKS`), and where it is."""

    kind: str
    where: str


class Objects:
    """The caller's objects. The places of modules, parameters and attributes are listed once,
    because walking over a large model takes longer than looking at it.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self.modules: list[nn.Module] = []
        # where they are, each with what is there at the last `refresh`
        self.children: dict[Place, nn.Module] = {}
        self.parameters: dict[Place, nn.Parameter] = {}
        self.buffers: dict[Place, torch.Tensor] = {}
        # what holds the value, and its name there
        self.attributes: dict[Place, tuple[Mapping[str, Any], str]] = {}
        self.hooks: dict[Place, Mapping[Any, Any]] = {}
        self.modes: list[Place] = []
        self._contents: list[dict[str, Any]] = []
        self._attributes: list[dict[str, Any]] = []
        self._before: list[int] | None = None

    def refresh(self) -> None:
        """Walk over the model again if a module, parameter, buffer or attribute was added, removed
        or replaced.
        """
        # by identity, since tensors have an == of their own; attributes by their number, because
        # one that is removed is missing in a look
        if self._list_contents() != self._before:
            self._walk()

    def _list_contents(self) -> list[int]:
        values = itertools.chain.from_iterable(map(dict.values, self._contents))
        return [*map(id, values), *map(len, self._attributes)]

    def _walk(self) -> None:
        named = list(self.model.named_modules())
        self.modules = [module for _, module in named]
        self.modes = [(name, "training") for name, _ in named]
        self.children = {(n, key): m for n, module in named for key, m in module._modules.items()}
        self.parameters = {
            (n, key): p for n, m in named for key, p in m._parameters.items() if p is not None
        }
        self.buffers = {
            (n, key): b for n, m in named for key, b in m._buffers.items() if b is not None
        }
        self.attributes = {
            (n, key): (vars(m), key) for n, m in named for key in vars(m) if key not in OF_TORCH
        }
        self.hooks = {(n, key): vars(m)[key] for n, m in named for key in HOOKS}
        self._attributes = [vars(module) for module in self.modules]
        self._contents = [
            values for m in self.modules for values in (m._modules, m._parameters, m._buffers)
        ]
        self._before = self._list_contents()


# ---- pictures, one function a kind


def _look_at_modes(objects: Objects) -> Picture:
    return Picture(objects.modes, ([m.training for m in objects.modules],))


def _look_at_values(objects: Objects) -> Picture:
    values = [values.get(key, _MISSING) for values, key in objects.attributes.values()]
    described = [value if type(value) in PLAIN else _describe(value) for value in values]
    # by their types, too: True is not 1 here
    return Picture(objects.attributes, (described, list(map(type, values))))


def _look_at_modules(objects: Objects) -> Picture:
    return Picture(objects.children, (list(map(id, objects.children.values())),))


def _look_at_weights(objects: Objects) -> Picture:
    return _look_at_tensors(objects.parameters)


def _look_at_buffers(objects: Objects) -> Picture:
    return _look_at_tensors(objects.buffers)


def _look_at_tensors(tensors: Mapping[Place, torch.Tensor]) -> Picture:
    values = tensors.values()
    try:
        versions: list[Any] = [t._version for t in values]
    # a tensor that was made in inference mode has none
    except RuntimeError:
        versions = [_read_version(t) for t in values]
    return Picture(tensors, (list(map(id, values)), versions, [t.data_ptr() for t in values]))


def _look_at_training_of_weights(objects: Objects) -> Picture:
    places = [(name, f"{key}.requires_grad") for name, key in objects.parameters]
    return Picture(places, ([p.requires_grad for p in objects.parameters.values()],))


def _look_at_hooks(objects: Objects) -> Picture:
    picture: dict[Place, Any] = {}
    if any(objects.hooks.values()):
        picture = {place: list(hooks) for place, hooks in objects.hooks.items() if hooks}
    for (name, key), p in objects.parameters.items():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            hooks = [list(hooks) for hooks in _list_hooks_of_tensor(p)]
            picture[name, key + OF_HOOKS] = hooks
    return Picture(picture, (list(picture.values()),))


def _list_hooks_of_tensor(tensor: torch.Tensor) -> list[Any]:
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return [getattr(tensor, name, None) or {} for name in names]


def _look_at_optimizer(objects: Objects) -> Picture:
    state = objects.optimizer.state
    names: dict[Any, str] = {}
    if state:
        names = {p: name_place(place) for place, p in objects.parameters.items()}
    picture: dict[Place, Any] = {
        ("optimizer.state", names.get(p, "a parameter")): _describe(values)
        for p, values in state.items()
    }
    for key in HOOKS_OF_OPTIMIZER:
        picture["optimizer", key] = list(getattr(objects.optimizer, key, ()))
    return Picture(picture, (list(picture.values()),))


def _look_at_loss(objects: Objects) -> Picture:
    picture = {("loss", name): _describe(value) for name, value, _ in list_values_of(objects.loss)}
    return Picture(picture, (list(picture.values()),))


def compute_checksums(model: nn.Module) -> dict[str, int]:
    """Return the checksum of each weight and buffer, which a write through `.data` changes, too."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: compute_checksum(tensor) for name, tensor in tensors.items()}


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
    return _Same(tensor), _read_version(tensor), tensor.data_ptr()


def _read_version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _list_changed(before: Picture, now: Picture) -> list[Place]:
    """List the places where two pictures differ, in the order of the earlier one."""
    is_same_places = before.places is now.places or list(before.places) == list(now.places)
    if is_same_places and before.values == now.values:
        return []
    were = dict(zip(before.places, zip(*before.values)))
    are = dict(zip(now.places, zip(*now.values)))
    places = [*were, *(place for place in are if place not in were)]
    return [place for place in places if were.get(place) != are.get(place)]


class Look(NamedTuple):
    """A kind of change: the function that takes its picture, and how a caller does it instead."""

    look: Callable[[Objects], Picture]
    remedy: str


IN_WHOLE_MODEL = "change it inside `with pipe.whole_model():`"
WITH_THE_BATCH = "pass it with the batch, or keep it in a buffer"
LOOKS: Mapping[str, Look] = {
    "mode": Look(_look_at_modes, "make a new pipeline"),
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

# after the name of a parameter, where its hooks were changed
OF_HOOKS = "'s hooks"
# the emulator with methods whose blocks have losses of their own
BLOCKS = "emulator with blocks"
# A kind that a row does not name is refused.
TAKEN_OVER: Mapping[str, Mapping[str, str]] = {
    # all passes of a batch run in its own step
    "emulator": {
        **dict.fromkeys(("value", "weight", "buffer", "hook", "optimizer", "loss"), LIVE),
        **dict.fromkeys(("mode", "module", "requires_grad"), REBUILT),
    },
    # the same, with the model cut into blocks: what its own forward reads is recorded in pieces
    BLOCKS: {
        **dict.fromkeys(("weight", "buffer", "optimizer", "loss"), LIVE),
        **dict.fromkeys(("mode", "value", "hook", "requires_grad"), REBUILT),
    },
    # torch refuses to write weights of other ranks, which have no memory here
    "distributed": {
        **dict.fromkeys(("weight", "buffer", "optimizer", "loss"), DRAINED),
        **dict.fromkeys(("mode", "value", "hook", "requires_grad"), REBUILT),
    },
    "xla": dict.fromkeys(("mode", "value", "loss"), REBUILT),
    "poptorch": {},
}


# what a call does not change itself: compared with the last step, whatever was called since
STEADY = ("mode", "module", "requires_grad", "hook")


class Seam:
    """The pictures that a backend needs, of the kinds that it does not read live."""

    def __init__(self, backend: str, objects: Objects, looks_at: Collection[str] = ()) -> None:
        """`looks_at`: kinds that are looked at though the backend reads them live."""
        self._objects = objects
        kinds = [k for k in LOOKS if k in looks_at or get_treatment(backend, k) != LIVE]
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

    def keep_changes(self, kinds: Collection[str]) -> None:
        """Keep the caller's changes of these kinds for the next step, made inside another call."""
        changes = self.list_changes()[len(self._waiting) :]
        self._waiting += [change for change in changes if change.kind in kinds]

    def forget_changes(self, is_undone: Callable[[Change], bool]) -> None:
        """Forget the caller's changes that were undone since, by a state that was loaded."""
        self._waiting = [change for change in self._waiting if not is_undone(change)]

    def note_other_call(self) -> None:
        """Take the pictures of what another call may have changed itself."""
        self._note(self._moving)

    def list_changes(self) -> list[Change]:
        """List what the caller has changed since the last step."""
        changes = list(self._waiting)
        self._objects.refresh()
        for kind, before in self._pictures.items():
            now = LOOKS[kind].look(self._objects)
            changes += [Change(kind, name_place(place)) for place in _list_changed(before, now)]
        return changes


def get_treatment(backend: str, kind: str) -> str:
    """Return what a backend does with a kind of change."""
    return TAKEN_OVER.get(backend, {}).get(kind, NEVER)


def explain_refusal(call: str, backend: str, change: Change, in_flight: int) -> str:
    """Return the line for a change that a backend cannot take over now."""
    if get_treatment(backend, change.kind) == NEVER:
        remedy = LOOKS[change.kind].remedy
        # the one backend that takes over no weights that are changed in `whole_model`
        if remedy == IN_WHOLE_MODEL and not TAKEN_OVER.get(backend):
            remedy = "use pipe.load_state_dict()"
        return (
            f"{call}: {change.where}: was changed after the last call, and backend {backend} would "
            f"not see it: {remedy}, or set it back"
        )
    return (
        f"{call}: {change.where}: was changed while {in_flight} updates are in flight: call "
        f"pipe.drain() before the change, or set it back"
    )
