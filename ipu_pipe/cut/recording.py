"""Record one real forward of a model as calls of modules and torch functions, with the stage of
each call.

A model is cut at a module inside it, although its forward is plain Python that cannot be cut. So
the forward runs once while it is watched, and each stage then replays its part of the calls:

    model's forward         h = self.embed(x) + self.position; for block in self.blocks: h = block(h) ...
    recorded with           0 input  1 embed(x)  2 add(1, position)  3 blocks.0(2) | 4 blocks.1(3) ...
    boundary blocks.1                                 stage 0                      |   stage 1

    [1] a module is one call, unless there is a boundary inside it: then its inner calls are
        recorded instead (`begin_module`, `end_module`: hooks)
    [2] a torch function between them is a call; functions inside a call are ignored
        (`watch_function`: a `FunctionWatch`)
    [3] every tensor operation is watched, also inside calls (`watch_operation`: an
        `OperationWatch`): a tensor is *live* if its memory depends on the input or on weights; all
        others, such as masks and positions, are constants
    [4] at the end, calls whose results are all constant are left out (`finish`)

Python code between the calls runs only during the recording: sizes, branches and counters are those
of the recording. `ipu_pipe.cut.verification` finds what a recording cannot see. This file refuses
what the verification could miss: branches on values, tensors kept in attributes from stage to
stage, Python's counters and random numbers.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import random
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple, NoReturn, Sequence, Union

import numpy as np
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten

from ipu_pipe.errors import BadInput
from ipu_pipe.model.batch import call_model, flatten_tensors, list_leaves, list_tensors
from ipu_pipe.model.devices import read_autocast
from ipu_pipe.model.observation import get_storage, join_name, list_ancestors
from ipu_pipe.model.precision import enter_model_autocast
from ipu_pipe.model.watching import FunctionWatch, OperationWatch
from ipu_pipe.refusals import EMULATOR


@dataclass(frozen=True)
class Value:
    """A tensor that a call returns: number `leaf` of its results."""

    call: int
    leaf: int


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer, read by its name when it is needed."""

    name: str


Key = Union[Value, Weight]


@dataclass(frozen=True)
class Template:
    """A nest of arguments or results: its leaves, with keys in place of live tensors, and PyTorch's
    description of the nest.
    """

    leaves: tuple[Any, ...]
    spec: Any

    @property
    def keys(self) -> list[Key]:
        """The values and weights among the leaves, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, (Value, Weight))]

    def __deepcopy__(self, memo: Any) -> Template:
        # copies of a model share its recordings; PyTorch warns if the description of a nest is
        # copied
        return self


class AutogradState(NamedTuple):
    """The differences of a call's grad mode and autocast from those of the model's forward.

    `grad`: the grad mode, None if equal. `autocast`: (device, enabled, dtype) of each device whose
    autocast differs.
    """

    grad: None | bool = None
    autocast: tuple[tuple[str, bool, Any], ...] = ()


@dataclass
class RecordedCall:
    """A recorded call. `target`: a module's name, a function, or None for the model's input;
    `arguments`: (args, kwargs).
    """

    index: int
    stage: int
    target: None | str | Callable[..., Any]
    arguments: Template
    state: AutogradState

    @property
    def name(self) -> str:
        """The name of the call for messages."""
        if self.target is None or isinstance(self.target, str):
            return self.target or "the model"
        return name_operation(self.target)


def name_operation(function: Any) -> str:
    """Return the name of a torch function, or of a property, for messages."""
    owner = getattr(function, "__self__", None)
    if getattr(function, "__name__", "") in ("__get__", "__set__") and owner is not None:
        return str(getattr(owner, "__name__", owner))
    return str(getattr(function, "__name__", function))


@dataclass
class Recording:
    """The recording of one forward; it keeps the forward's tensors alive.

    `weights`: parameters and buffers by the first of their names. `homes`: module -> stage of its
    first run. `runs`: (stage, module) -> number of runs. `written`: stage -> storages that it
    writes.
    """

    weights: dict[str, torch.Tensor]
    calls: list[RecordedCall] = field(default_factory=list)
    output: Template = Template((), None)
    tensors: dict[Value, torch.Tensor] = field(default_factory=dict)
    homes: dict[str, int] = field(default_factory=dict)
    runs: dict[tuple[int, str], int] = field(default_factory=dict)
    written: dict[int, set[int]] = field(default_factory=dict)

    def is_written(self, tensor: torch.Tensor, stage: int) -> bool:
        """Tell whether a stage wrote into a tensor's memory."""
        return get_storage(tensor) in self.written.get(stage, ())


class ReadsValues(BadInput):
    """Raised for a forward that reads a tensor's values in a module that is cut."""


# the stage of weights and buffers, which every stage may read by name
ANYWHERE = -1
# operations that give Python a tensor's values, and functions that do so without an operation
VALUE_READS = {"_local_scalar_dense", "equal", "is_nonzero", "allclose"}
PYTHON_READS = {"tolist", "numpy", "__array__", "__dlpack__"}
PACK_INSIDE = "pass the padded tensor and the lengths, and pack in the module that needs it"
RETURN_A_NEST = "return the tensors in a tuple, NamedTuple, list or dict"
# recorded although they return no tensor
HOOKS = {"register_hook", "retain_grad"}


class Recorder:
    """Record one forward. `begins`: the modules at which stages 1 and later begin; modules around
    them are not calls.
    """

    def __init__(self, model: nn.Module, begins: Sequence[str], x: Any) -> None:
        named = dict([*model.named_parameters(), *model.named_buffers()])
        inputs = flatten_tensors(x)
        weights = [*model.parameters(), *model.buffers()]
        self.recording = Recording(named)
        self._model = model
        self._last_stage = len(begins)
        self._stage = 0
        self._begins = {
            id(model.get_submodule(name)): (name, s) for s, name in enumerate(begins, 1)
        }
        self._cut_modules = {id(model.get_submodule(name)) for name in list_cut_modules(begins)}
        self._names = {id(module): name for name, module in model.named_modules()}
        # the state inside the model's forward, from which calls may differ
        with enter_model_autocast(model):
            self._base = torch.is_grad_enabled(), read_autocast()
        # the running modules around cuts, the innermost last
        self._running: list[str] = []
        # the running call: its name, the depth of modules inside it (0 between calls), and the
        # storages that it has made
        self._call_name = ""
        self._depth = 0
        self._made: set[int] = set()
        # whether the recorder itself calls functions
        self._is_busy = False
        # id of a tensor -> its name or value
        self._weights = {id(tensor): name for name, tensor in named.items()}
        self._values: dict[int, Value] = {}
        # live memory -> the stage that made it
        self._live: dict[int, int] = {get_storage(t): ANYWHERE for t in weights}
        self._live.update({get_storage(t): 0 for t in inputs})
        # storages of random numbers, and of what was computed from them alone
        self._drawn: set[int] = set()
        # storages that are arguments of this stage's calls
        self._arguments: set[int] = set()
        # ids and storage numbers are not reused while these tensors are referenced
        self._alive: list[Any] = [*weights, *inputs]
        self._note_result(self._add_call(None, (), {}), x)

    def _fail(self, operation: str, why: str, kind: type[BadInput] = BadInput) -> NoReturn:
        """Raise `BadInput` for an operation that cannot be cut."""
        where = (self._running[-1] if self._running else "") or "the model's own forward"
        raise kind(
            f"model: {type(self._model).__name__}: stage {self._stage}: {operation} in {where}: "
            f"{why}"
        )

    def _fail_on_values(self, operation: str, is_drawn: bool = False) -> NoReturn:
        is_number = operation == "_local_scalar_dense"
        if is_drawn:
            self._fail(
                "a random number read from a tensor (LayerDrop?)" if is_number else operation,
                "in a module that is cut, Python runs only once, so every microbatch would take the "
                "branch of the first: draw in a module that no stage begins inside, or use "
                f"{EMULATOR}",
            )
        self._fail(
            "a number read from a tensor (if, item, int)" if is_number else operation,
            "in a module that is cut, the forward depends on a tensor's values: begin stages at "
            f"whole modules around it, put it into a module of its own, or use {EMULATOR}",
            ReadsValues,
        )

    # ---- [1] modules

    def begin_module(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a module's run, and its stage if it is a boundary: a forward pre-hook."""
        name = self._names[id(module)]
        recording = self.recording
        if id(module) in self._begins:
            self._begin_stage(*self._begins[id(module)])
        recording.runs[self._stage, name] = recording.runs.get((self._stage, name), 0) + 1
        if self._depth:
            self._depth += 1
            return
        recording.homes.setdefault(name, self._stage)
        if id(module) in self._cut_modules:
            self._running.append(name)
            return
        # the arguments are looked at by torch functions, which are no calls of the model
        self._is_busy = True
        self._call_name = name
        self._made = set()
        self._add_call(name, args, kwargs)
        self._is_busy = False
        self._depth = 1

    def end_module(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """End a module's run: a forward hook."""
        if not self._depth:
            self._running.pop()
            return
        if self._depth == 1:
            self._note_result(self.recording.calls[-1], output)
        self._depth -= 1

    def _begin_stage(self, name: str, stage: int) -> None:
        if stage <= self._stage:
            # the module runs once more
            return
        # a stage that is passed over would have no work
        if stage != self._stage + 1:
            raise BadInput(
                f"stages: {name}: begins stage {stage}, but runs during stage {self._stage}: must "
                f"be in order"
            )
        if self._depth:
            raise BadInput(
                f"stages: {name}: first runs inside {self._call_name}, which is not a module "
                f"around it: no stage can begin there"
            )
        self._stage = stage
        self._arguments = set()

    # ---- [2] functions

    def watch_function(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a torch function and record it, unless it is inside a recorded call."""
        if self._is_busy or self._depth:
            return func(*args, **kwargs)
        # an iterator cannot be played again; it yields the tensors that unbind returns
        if func is torch.Tensor.__iter__:
            return iter(self.watch_function(torch.Tensor.unbind, args, {}))
        name = name_operation(func)
        if name in PYTHON_READS and get_storage(args[0]) in self._live:
            self._fail_on_values(name)
        self._call_name = name
        self._made = set()
        if func is torch.autograd.grad:
            self._require_one_stage(*args, **kwargs)
        result = func(*args, **kwargs)
        # other functions return sizes and types
        if (
            flatten_tensors(result)
            # None: it may have written into an argument
            or (result is None and flatten_tensors((args, kwargs)))
            or name in HOOKS
        ):
            self._note_result(self._add_call(func, args, kwargs), result)
        return result

    def _require_one_stage(self, outputs: Any, inputs: Any, *rest: Any, **options: Any) -> None:
        """Raise `BadInput` if `autograd.grad` differentiates with respect to an earlier stage."""
        if any(self._get_maker(t) < self._stage for t in list_tensors(inputs)):
            self._fail(
                "torch.autograd.grad",
                "it differentiates with respect to a tensor of an earlier stage, and no graph crosses "
                "a boundary: put the call and what it differentiates into one module that no stage "
                f"begins inside, or use {EMULATOR}",
            )

    def _get_maker(self, tensor: torch.Tensor) -> int:
        """Return the stage that made a tensor, the present one if that is unknown."""
        return self._live.get(get_storage(tensor), self._stage)

    # ---- [3] memory

    def watch_operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation and track the storages that it reads, makes and writes."""
        read = {get_storage(t) for t in list_tensors((*args, *kwargs.values()))}
        is_live = not read.isdisjoint(self._live)
        name = func.overloadpacket.__name__
        is_drawn = not (is_live or read.isdisjoint(self._drawn))
        if (is_live or is_drawn) and name in VALUE_READS and not self._depth:
            self._fail_on_values(name, is_drawn)
        if self._depth and any(
            ANYWHERE < self._live.get(storage, ANYWHERE) < self._stage
            and storage not in self._arguments
            for storage in read
        ):
            self._fail(
                self._call_name,
                f"its {name} reads a tensor that an earlier stage made and kept aside (an "
                f"attribute, a list): give it to the"
                " module as an argument, or begin the stage elsewhere",
            )
        result = func(*args, **kwargs)
        is_drawn |= not is_live and torch.Tag.nondeterministic_seeded in func.tags
        for tensor in list_tensors(result):
            storage = get_storage(tensor)
            if is_drawn:
                self._drawn.add(storage)
            if storage not in read:
                self._made.add(storage)
                self._alive.append(
                    # keeps its number from being reused, not its memory
                    StorageWeakRef(tensor.untyped_storage())
                    if tensor.layout is torch.strided
                    else tensor
                )
                if is_live:
                    self._live[storage] = self._stage
        for storage in _list_written_storages(func, args, kwargs):
            self.recording.written.setdefault(self._stage, set()).add(storage)
            # memory of before this call that is written is no constant
            if is_live or storage not in self._made:
                self._live.setdefault(storage, self._stage)
        return result

    # ---- calls, their arguments and results

    def _add_call(self, target: Any, args: Any, keywords: Any) -> RecordedCall:
        # look at the arguments before and after flattening, because PyTorch may know a cache as a
        # nest
        leaves = tree_flatten((args, keywords))[0]
        for value in (*args, *keywords.values(), *leaves):
            # by its name: the classes are Hugging Face's, which need not be installed
            if type(value).__name__.endswith("Cache"):
                self._fail(
                    self._call_name,
                    f"it takes a {type(value).__name__}, which keeps tensors from call to call and "
                    f"cannot cross a boundary:"
                    " set config.use_cache = False",
                )
            if isinstance(value, nn.utils.rnn.PackedSequence):
                self._require_no_tensors(value, value, PACK_INSIDE)
        for leaf in leaves:
            # tensors, and PyTorch's nests, are followed
            if not isinstance(leaf, (torch.Tensor, nn.Module, type)) and hasattr(leaf, "__dict__"):
                self._require_no_tensors(leaf, vars(leaf).values(), RETURN_A_NEST)
        grad, (base_grad, base) = torch.is_grad_enabled(), self._base
        autocast = tuple(
            setting for setting, usual in zip(read_autocast(), base) if setting != usual
        )
        state = AutogradState(None if grad == base_grad else grad, autocast)
        call = RecordedCall(
            len(self.recording.calls),
            self._stage,
            target,
            self._make_template((args, keywords)),
            state,
        )
        self.recording.calls.append(call)
        return call

    def _make_template(self, nest: Any) -> Template:
        leaves, spec = tree_flatten(nest)
        return Template(tuple(map(self._replace_tensor, leaves)), spec)

    def _replace_tensor(self, value: Any) -> Any:
        """Return the key of a live tensor, another value unchanged."""
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in self._values:
            self._arguments.add(get_storage(value))
            return self._values[id(value)]
        if id(value) in self._weights:
            return Weight(self._weights[id(value)])
        if _is_wrapped(value) or get_storage(value) in self._live:
            self._fail(
                f"a tensor of shape {tuple(value.shape)}",
                "it was kept in an attribute or in an object that a module returned, or made "
                "inside torch.func: modules around a"
                " cut must take and return tensors, in tuples, lists and dicts",
            )
        self._alive.append(value)
        return value

    def _require_no_tensors(self, holder: Any, parts: Iterable[Any], remedy: str) -> None:
        """Raise `BadInput` if tensors of this forward are among the parts of an object that cannot
        be taken apart and put together again.
        """
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        if any(self._live.get(get_storage(t), ANYWHERE) > ANYWHERE for t in tensors):
            self._fail(
                self._call_name,
                f"it gets tensors in a {type(holder).__name__}, which cannot cross a boundary: "
                f"{remedy}",
            )

    def _note_result(self, call: RecordedCall, result: Any) -> None:
        for i, tensor in enumerate(list_leaves(result)):
            if isinstance(tensor, torch.Tensor):
                self._values[id(tensor)] = Value(call.index, i)
                self.recording.tensors[Value(call.index, i)] = tensor

    # ---- [4] the end

    def finish(self, output: Any) -> Recording:
        """Add the model's output, turn values that are not live into constants, and return the
        recording.
        """
        if self._stage != self._last_stage:
            late = next(name for name, stage in self._begins.values() if stage > self._stage)
            raise BadInput(
                f"stages: {late}: does not run in this forward after the stages before: no stage "
                f"can begin there"
            )
        recording = self.recording
        output_template = self._make_template(output)
        results: dict[int, dict[Value, torch.Tensor]] = {}
        for key, tensor in recording.tensors.items():
            results.setdefault(key.call, {})[key] = tensor
        constants: dict[Any, torch.Tensor] = {}

        def insert_constants(template: Template) -> Template:
            leaves = (
                constants.get(leaf, leaf) if isinstance(leaf, Value) else leaf
                for leaf in template.leaves
            )
            return Template(tuple(leaves), template.spec)

        calls = recording.calls
        recording.calls = []
        for call in calls:
            call.arguments = insert_constants(call.arguments)
            values = results.get(call.index, {})
            # a module stays in any case, since a piece holds the modules that it calls
            is_live = any(get_storage(t) in self._live for t in values.values())
            if (
                is_live
                or call.arguments.keys
                or call.target is None
                or isinstance(call.target, str)
            ):
                recording.calls.append(call)
            else:
                constants.update(values)
        recording.output = insert_constants(output_template)
        return recording


# asked for each operation of a forward, of which many are alike
@functools.lru_cache(maxsize=None)
def _find_written_arguments(func: Any) -> list[tuple[int, str]]:
    """Return the numbers and names of the arguments that an operation writes."""
    arguments = enumerate(func._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]


def _list_written_storages(func: Any, args: Any, kwargs: Any) -> list[int]:
    """Return the storages that an operation writes."""
    written = [
        args[i] if i < len(args) else kwargs.get(name) for i, name in _find_written_arguments(func)
    ]
    return [get_storage(t) for t in list_tensors(written)]


def list_cut_modules(begins: Sequence[str]) -> list[str]:
    """Return the names of the modules around boundaries."""
    return list(dict.fromkeys(name for begin in begins for name in list_ancestors(begin)))


def _is_wrapped(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is a wrapper inside a transformation of torch.func."""
    return bool(
        torch._C._functorch.is_batchedtensor(tensor)
        or torch._C._functorch.is_gradtrackingtensor(tensor)
    )


@contextlib.contextmanager
def _watch_modules(model: nn.Module, recorder: Recorder, pretends_tracing: bool) -> Iterator[None]:
    """Put the recorder's hooks on all modules inside the context.

    `pretends_tracing`: `torch.jit.is_tracing` returns true, so that models skip branches on values.
    Backward hooks are removed, because they would wrap a module's outputs after the recorder has
    seen them, and there is no backward here.
    """
    tables = [
        table for m in model.modules() for table in (m._backward_hooks, m._backward_pre_hooks)
    ]
    hooks = [table.copy() for table in tables]
    is_tracing = torch.jit.is_tracing
    is_caching = torch.is_autocast_cache_enabled()
    try:
        for table in tables:
            table.clear()
        if pretends_tracing:
            torch.jit.is_tracing = lambda: True
        # with the cache a tied weight would be cast on its first stage only
        torch.set_autocast_cache_enabled(False)
        with contextlib.ExitStack() as handles:
            for module in model.modules():
                # before the user's own hooks, so that what they call counts as inside the module
                handles.enter_context(
                    module.register_forward_pre_hook(
                        recorder.begin_module, prepend=True, with_kwargs=True
                    )
                )
                handles.enter_context(
                    module.register_forward_hook(recorder.end_module, with_kwargs=True)
                )
            with OperationWatch(recorder.watch_operation), FunctionWatch(recorder.watch_function):
                yield
    finally:
        torch.jit.is_tracing = is_tracing
        torch.set_autocast_cache_enabled(is_caching)
        for table, saved_hooks in zip(tables, hooks):
            table.update(saved_hooks)


@contextlib.contextmanager
def _require_unchanged_python(model: nn.Module, owners: Mapping[str, nn.Module]) -> Iterator[None]:
    """Raise `BadInput` if Python's or numpy's random state or a number in an attribute of `owners`
    changes inside the context.

    A replay of the calls would not change them.
    """

    def read_numbers() -> dict[str, Any]:
        return {
            join_name(n, key): v
            for n, owner in owners.items()
            for key, v in vars(owner).items()
            if type(v) in (int, float)
        }

    def read_random() -> Any:
        # as bytes, because numpy's state holds an array, which == compares element by element
        return random.getstate(), pickle.dumps(np.random.get_state())

    numbers = read_numbers()
    random_states = read_random()
    yield
    if read_random() != random_states:
        raise BadInput(
            f"model: {type(model).__name__}: its forward draws from Python's random or numpy's, "
            f"which no seed of a microbatch"
            " reaches: draw from torch, inside a module that no stage begins inside if Python branches "
            "on it"
        )
    for name, value in read_numbers().items():
        # an attribute that this forward has made is no counter
        if numbers.get(name, value) != value:
            raise BadInput(
                f"model: {name}: the forward changes this number in a module that is cut, where "
                f"Python code runs only once: keep"
                " it in a buffer (self.count.add_(1)) or in a module inside, or begin no stage "
                "inside that module"
            )


def record_forward(
    model: nn.Module, begins: Sequence[str], x: Any, pretends_tracing: bool
) -> Recording:
    """Record one forward of the input `x`, which the forward may overwrite, in the model's present
    mode.

    `pretends_tracing`: `torch.jit.is_tracing` returns true, so that models skip branches on values.
    Raise `BadInput` if the model cannot be cut at `begins`.
    """
    owners = {name: model.get_submodule(name) for name in list_cut_modules(begins)}
    for name, owner in owners.items():
        if (
            owner._forward_hooks
            or owner._forward_pre_hooks
            or owner._backward_hooks
            or owner._backward_pre_hooks
        ):
            raise BadInput(
                f"stages: {name or 'the model'}: has hooks, but stages begin inside it, where they "
                f"would not run: put them on"
                " modules inside, or begin stages elsewhere"
            )
    with _require_unchanged_python(model, owners):
        recorder = Recorder(model, begins, x)
        with _watch_modules(model, recorder, pretends_tracing):
            output = call_model(model, x)
        return recorder.finish(output)
