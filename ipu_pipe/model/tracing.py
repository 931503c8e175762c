"""One real forward of a model recorded, as calls of modules and of torch functions, with the stage in which each runs.

    model's forward         h = self.embed(x) + self.position; for block in self.blocks: h = block(h) ...
    recorded, blocks.1      0 input  1 embed(x)  2 add(1, position)  3 blocks.0(2) | 4 blocks.1(3) ...
    being a boundary                                  stage 0                      |   stage 1

A module is one call unless a boundary lies inside it: then what it does is recorded in its place. Module calls are seen by
hooks, torch functions between them by a `FunctionWatch`, both silent inside of a recorded call. Python in between runs once,
while recording: its sizes, branches and counters are the recording's. So are tensors that depend on sizes alone (masks,
positions): a tensor is *live* if its memory depends on the input or on weights, and all others are constants.

What a recording cannot see, the rehearsal finds (ipu_pipe.model.rehearsal); refused here is what that could miss: branches on
values, tensors kept aside from stage to stage, Python's counters and random numbers.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import random
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, NoReturn, Sequence, Set, Tuple, Type, Union

import numpy as np
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten

from ipu_pipe.errors import BadInput
from ipu_pipe.model.batch import call_model, flatten_tensors, iterate_tensors, list_leaves
from ipu_pipe.model.observation import get_storage, join_name, list_ancestors
from ipu_pipe.model.precision import enter_model_autocast
from ipu_pipe.model.restoring import FunctionWatch, OperationWatch


@dataclass(frozen=True)
class Value:
    """A tensor that a call gives: number `leaf` of its results."""

    call: int
    leaf: int


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer, read by its name when it is needed."""

    name: str


Key = Union[Value, Weight]


@dataclass(frozen=True)
class Template:
    """A nest of arguments or results: its leaves, of which keys stand for tensors, and how PyTorch puts them together."""

    leaves: Tuple[Any, ...]
    spec: Any

    @property
    def keys(self) -> List[Key]:
        """Return the values and weights among the leaves, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, (Value, Weight))]

    def __deepcopy__(self, memo: Any) -> Template:
        return self  # copies of a model share its recordings; PyTorch warns where the description of a nest is copied


class AutogradState(NamedTuple):
    """Where a call's surroundings differ from those of the model's forward: whether gradients are on, and each device's autocast
    (device, on, dtype). None and () where they do not differ."""

    grad: Union[None, bool] = None
    autocast: Tuple[Tuple[str, bool, Any], ...] = ()


@dataclass
class RecordedCall:
    """A recorded call: of the module `target`, or of a function; None: the model's input."""

    index: int
    stage: int
    target: Union[None, str, Callable[..., Any]]
    arguments: Template  # of (args, kwargs)
    state: AutogradState

    @property
    def name(self) -> str:
        """Return its name for people."""
        if self.target is None or isinstance(self.target, str):
            return self.target or "the model"
        return name_operation(self.target)


def name_operation(function: Any) -> str:
    """Return a torch function's name for people; for a property the property's."""
    owner = getattr(function, "__self__", None)
    if getattr(function, "__name__", "") in ("__get__", "__set__") and owner is not None:
        return str(getattr(owner, "__name__", owner))
    return str(getattr(function, "__name__", function))


@dataclass
class Recording:
    """All of one forward. Its tensors are there as long as this is."""

    weights: Dict[str, torch.Tensor]  # parameters and buffers, by the first of their names
    calls: List[RecordedCall] = field(default_factory=list)
    output: Template = Template((), None)
    tensors: Dict[Value, torch.Tensor] = field(default_factory=dict)
    reached: Dict[str, int] = field(default_factory=dict)  # module that ran -> stage of its first run
    runs: Dict[Tuple[int, str], int] = field(default_factory=dict)  # (stage, module) -> how often it runs
    written: Dict[int, Set[int]] = field(default_factory=dict)  # stage -> memory that it writes

    def is_written(self, tensor: torch.Tensor, stage: int) -> bool:
        """Tell whether a stage wrote into a tensor's memory."""
        return get_storage(tensor) in self.written.get(stage, ())


class ReadsValues(BadInput):
    """The forward reads a tensor's values where it is cut."""


ANYWHERE = -1  # the stage of weights and buffers, which every stage may read by name
# operations that give Python a tensor's values, and functions that do so without an operation
VALUE_READS = {"_local_scalar_dense", "equal", "is_nonzero", "allclose"}
PYTHON_READS = {"tolist", "numpy", "__array__", "__dlpack__"}
HOOKS = {"register_hook", "retain_grad"}  # recorded although they give no tensor


class Recorder:
    """Watches one forward. `begins`: the modules at which stages 1 and on begin; those around them are no calls of their own."""

    def __init__(self, model: nn.Module, begins: Sequence[str], x: Any) -> None:
        named = dict([*model.named_parameters(), *model.named_buffers()])
        inputs, weights = flatten_tensors(x), [*model.parameters(), *model.buffers()]
        self.recording = Recording(named)
        self._model, self._stages, self._stage = model, len(begins), 0
        self._begins = {id(model.get_submodule(name)): (name, s) for s, name in enumerate(begins, 1)}
        self._around = {id(model.get_submodule(name)) for name in list_cut_modules(begins)}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._path: List[str] = []  # the modules around cuts that run
        self._inside, self._is_busy = 0, False  # depth in a recorded call; whether the recorder itself calls functions
        with enter_model_autocast(model):
            self._base = torch.is_grad_enabled(), _read_autocast()
        self._weights = {id(tensor): name for name, tensor in named.items()}
        self._values: Dict[int, Value] = {}  # by the id of a tensor
        # ids and storage numbers are not reused while these tensors are referenced
        self._alive: List[Any] = [*weights, *inputs]
        # live memory -> the stage that made it
        self._live: Dict[int, int] = {get_storage(t): ANYWHERE for t in weights}
        self._live.update({get_storage(t): 0 for t in inputs})
        self._handed: Set[int] = set()  # memory that calls of this stage are given
        self._made: Set[int] = set()  # memory that the call that runs has made
        self._called = ""  # the call that runs
        self._note_result(self._add(None, (), {}), x)

    def _add(self, target: Any, args: Any, keywords: Any) -> RecordedCall:
        for value in (*args, *keywords.values(), *tree_flatten((args, keywords))[0]):  # PyTorch may know it as a nest
            if type(value).__name__.endswith("Cache"):
                self._fail(
                    self._called,
                    f"it takes a {type(value).__name__}, which keeps tensors from call to call and cannot cross:"
                    " config.use_cache = False",
                )
        grad, (base_grad, base) = torch.is_grad_enabled(), self._base
        autocast = tuple(setting for setting, usual in zip(_read_autocast(), base) if setting != usual)
        state = AutogradState(None if grad == base_grad else grad, autocast)
        call = RecordedCall(len(self.recording.calls), self._stage, target, self._describe((args, keywords)), state)
        self.recording.calls.append(call)
        return call

    def _fail(self, operation: str, why: str, kind: Type[BadInput] = BadInput) -> NoReturn:
        """Raise BadInput: what is done here cannot be cut."""
        where = (self._path[-1] if self._path else "") or "the model's own forward"
        raise kind(f"model: {type(self._model).__name__}: stage {self._stage}: {operation} in {where}: {why}")

    def _fail_on_values(self, operation: str) -> NoReturn:
        self._fail(
            {"_local_scalar_dense": "a number read from a tensor (if, item, int)"}.get(operation, operation),
            "what the forward does there depends on a tensor's values, where it is cut: begin stages at whole modules around it,"
            " put it into a module of its own, or use backend: {name: emulator}",
            ReadsValues,
        )

    # --- memory

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation and follow the memory that it reads, makes and writes."""
        places = {get_storage(t) for t in iterate_tensors((*args, *kwargs.values()))}
        is_live, name = not places.isdisjoint(self._live), func.overloadpacket.__name__
        if is_live and name in VALUE_READS and not self._inside:
            self._fail_on_values(name)
        if self._inside and any(
            ANYWHERE < self._live.get(place, ANYWHERE) < self._stage and place not in self._handed for place in places
        ):
            self._fail(
                self._called,
                f"its {name} reads a tensor that an earlier stage made and kept aside (an attribute, a list): give it to the"
                " module as an argument, or begin the stage elsewhere",
            )
        result = func(*args, **kwargs)
        for tensor in iterate_tensors((result,)):
            place = get_storage(tensor)
            if place not in places:
                self._made.add(place)
                self._alive.append(
                    StorageWeakRef(tensor.untyped_storage()) if tensor.layout is torch.strided else tensor
                )
                if is_live:
                    self._live[place] = self._stage
        for place in _list_written(func, args, kwargs):
            self.recording.written.setdefault(self._stage, set()).add(place)
            if is_live or place not in self._made:
                self._live.setdefault(place, self._stage)
        return result

    # --- arguments and results

    def _describe(self, nest: Any) -> Template:
        leaves, spec = tree_flatten(nest)
        return Template(tuple(map(self._name_leaf, leaves)), spec)

    def _name_leaf(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in self._values:
            self._handed.add(get_storage(value))
            return self._values[id(value)]
        if id(value) in self._weights:
            return Weight(self._weights[id(value)])
        if _is_wrapped(value) or get_storage(value) in self._live:
            self._fail(
                f"a tensor of shape {tuple(value.shape)}",
                "it was kept aside (an attribute, an object that a module gave), or made inside of torch.func: modules around a"
                " cut must be given tensors and give them, in tuples, lists and dicts",
            )
        self._alive.append(value)
        return value

    def _note_result(self, call: RecordedCall, result: Any) -> None:
        for i, tensor in enumerate(list_leaves(result)):
            if isinstance(tensor, torch.Tensor):
                self._values[id(tensor)] = Value(call.index, i)
                self.recording.tensors[Value(call.index, i)] = tensor

    # --- functions and modules

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function and record it, unless it is inside of a recorded call."""
        if self._is_busy or self._inside:
            return func(*args, **kwargs)
        if func is torch.Tensor.__iter__:
            return iter(self.call(torch.Tensor.unbind, args, {}))
        name = name_operation(func)
        if name in PYTHON_READS and get_storage(args[0]) in self._live:
            self._fail_on_values(name)
        self._called, self._made = name, set()
        result = func(*args, **kwargs)
        # other results are sizes and types
        if flatten_tensors(result) or (result is None and flatten_tensors((args, kwargs))) or name in HOOKS:
            self._note_result(self._add(func, args, kwargs), result)
        return result

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note that a module begins to run."""
        name, recording = self._names[id(module)], self.recording
        if id(module) in self._begins:
            self._enter(*self._begins[id(module)])
        recording.runs[self._stage, name] = recording.runs.get((self._stage, name), 0) + 1
        if self._inside:
            self._inside += 1
            return
        recording.reached.setdefault(name, self._stage)
        if id(module) in self._around:
            self._path.append(name)
            return
        self._is_busy, self._called, self._made = True, name, set()
        self._add(name, args, kwargs)
        self._is_busy, self._inside = False, 1

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Note that a module has run."""
        if not self._inside:
            self._path.pop()
            return
        if self._inside == 1:
            self._note_result(self.recording.calls[-1], output)
        self._inside -= 1

    def _enter(self, name: str, stage: int) -> None:
        if stage <= self._stage:
            return  # it runs once more
        if stage != self._stage + 1:
            raise BadInput(
                f"stages: {name}: begins stage {stage}, but runs while stage {self._stage} does: must be in order"
            )
        if self._inside:
            raise BadInput(
                f"stages: {name}: first runs inside of {self._called}, which is no module around it: no stage can begin"
                " there"
            )
        self._stage, self._handed = stage, set()

    def finish(self, output: Any) -> Recording:
        """Note the model's output, turn values that are not live into constants, and return the recording."""
        if self._stage != self._stages:
            late = next(name for name, stage in self._begins.values() if stage > self._stage)
            raise BadInput(
                f"stages: {late}: does not run in this forward after the stages before: no stage can begin there"
            )
        recording = self.recording
        output_template = self._describe(output)
        results: Dict[int, Dict[Value, torch.Tensor]] = {}
        for key, tensor in recording.tensors.items():
            results.setdefault(key.call, {})[key] = tensor
        constants: Dict[Any, torch.Tensor] = {}

        def fold(template: Template) -> Template:
            leaves = (constants.get(leaf, leaf) if isinstance(leaf, Value) else leaf for leaf in template.leaves)
            return Template(tuple(leaves), template.spec)

        calls, recording.calls = recording.calls, []
        for call in calls:
            call.arguments, values = fold(call.arguments), results.get(call.index, {})
            is_live = any(get_storage(t) in self._live for t in values.values())
            if is_live or call.arguments.keys or call.target is None or isinstance(call.target, str):
                recording.calls.append(call)
            else:
                constants.update(values)
        recording.output = fold(output_template)
        return recording


def _read_autocast() -> Tuple[Tuple[str, bool, Any], ...]:
    if hasattr(torch, "get_autocast_dtype"):
        devices = ("cpu", "cuda")
        return tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices)
    cpu = ("cpu", torch.is_autocast_cpu_enabled(), torch.get_autocast_cpu_dtype())
    return (cpu, ("cuda", torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype()))


@functools.lru_cache(maxsize=None)
def _find_written_arguments(func: Any) -> List[Tuple[int, str]]:
    """Return the numbers and names of the arguments that an operation writes."""
    arguments = enumerate(func._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]


def _list_written(func: Any, args: Any, kwargs: Any) -> List[int]:
    """Return the memory that an operation writes."""
    written = [args[i] if i < len(args) else kwargs.get(name) for i, name in _find_written_arguments(func)]
    return [get_storage(t) for t in iterate_tensors(written)]


def list_cut_modules(begins: Sequence[str]) -> List[str]:
    """Return the names of the modules around boundaries."""
    return list(dict.fromkeys(name for begin in begins for name in list_ancestors(begin)))


def _is_wrapped(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor stands for others, inside a transformation of torch.func."""
    return bool(torch._C._functorch.is_batchedtensor(tensor) or torch._C._functorch.is_gradtrackingtensor(tensor))


@contextlib.contextmanager
def _watch_modules(model: nn.Module, recorder: Recorder, traced: bool) -> Iterator[None]:
    """Put hooks on all modules. `traced`: what models leave out where nothing is padded, unless they are traced, is not left out.
    Hooks of backwards, of which there is none, are away: they would wrap what a module gives after it was seen."""
    tables = [table for m in model.modules() for table in (m._backward_hooks, m._backward_pre_hooks)]
    hooks = [table.copy() for table in tables]
    is_tracing, caches = torch.jit.is_tracing, torch.is_autocast_cache_enabled()
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(recorder.before, prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(recorder.after, with_kwargs=True))
    try:
        for table in tables:
            table.clear()
        if traced:
            torch.jit.is_tracing = lambda: True
        # with the cache, a weight that two stages use would be cast in the first one only
        torch.set_autocast_cache_enabled(False)
        with OperationWatch(recorder.run), FunctionWatch(recorder.call):
            yield
    finally:
        torch.jit.is_tracing = is_tracing
        torch.set_autocast_cache_enabled(caches)
        for handle in handles:
            handle.remove()
        for table, saved_hooks in zip(tables, hooks):
            table.update(saved_hooks)


def record_forward(model: nn.Module, begins: Sequence[str], x: Any, traced: bool) -> Recording:
    """Record one forward of input `x`, which it may overwrite, in the mode in which the model is; `traced`: with
    `torch.jit.is_tracing` true, for which models leave out branches on values. Raises BadInput."""
    owners = [(name, model.get_submodule(name)) for name in list_cut_modules(begins)]
    for name, owner in owners:
        if owner._forward_hooks or owner._forward_pre_hooks or owner._backward_hooks or owner._backward_pre_hooks:
            raise BadInput(
                f"stages: {name or 'the model'}: has hooks, and stages begin inside of it, where they would not run: put them on"
                " modules inside, or begin stages elsewhere"
            )

    def read_numbers() -> Dict[str, Any]:
        return {
            join_name(n, key): v for n, owner in owners for key, v in vars(owner).items() if type(v) in (int, float)
        }

    def read_random() -> Any:
        return random.getstate(), pickle.dumps(np.random.get_state())

    numbers, drawn_from = read_numbers(), read_random()
    recorder = Recorder(model, begins, x)
    with _watch_modules(model, recorder, traced):
        output = call_model(model, x)
    recording = recorder.finish(output)
    if read_random() != drawn_from:
        raise BadInput(
            f"model: {type(model).__name__}: its forward draws from Python's random or numpy's, which no seed of a microbatch"
            " reaches: draw from torch"
        )
    for name, value in read_numbers().items():
        if numbers.get(name, value) != value:
            raise BadInput(
                f"model: {name}: the forward changes this number, in a module that is cut, where Python runs once: keep it in a"
                " buffer (self.count.add_(1)) or in a module inside, or begin no stage inside of that module"
            )
    return recording
