"""One real forward of a model recorded, as calls of modules and of torch functions, with the stage in which each runs.

    model's forward         h = self.embed(x) + self.position; for block in self.blocks: h = block(h) ...
    recorded, blocks.1      0 embed(x)  1 add(0, position)  2 blocks.0(1) | 3 blocks.1(2) ...
    being a boundary                          stage 0                     |   stage 1

A module is one call unless a boundary lies inside it: then what it does is recorded in its place. Module calls are seen by
hooks, torch functions between them by a `FunctionWatch`, both silent inside of a recorded call. Python in between runs once,
while recording: its sizes, branches and counters are the recording's.

Arguments and results are nests in which what stands for a tensor is put in its place when a piece runs:

    call       torch.cat((a, b), dim=1)
    template   Nest((Nest((Value(3, 0), Value(7, 0)), tuple), Constant(1)), ...)

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
from torch.utils._pytree import tree_flatten, tree_unflatten

from ipu_pipe.errors import BadInput
from ipu_pipe.model.batch import call_model, flatten_tensors, iterate_tensors, list_leaves
from ipu_pipe.model.observation import get_storage, join_name, list_ancestors
from ipu_pipe.model.watching import FunctionWatch, OperationWatch

# ---- templates


@dataclass(frozen=True)
class Value:
    """A tensor that a node gives: number `leaf` of its results."""

    node: int
    leaf: int


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer, read by its name when it is needed."""

    name: str


Key = Union[Value, Weight]


@dataclass(frozen=True)
class Constant:
    """What is the same each time."""

    value: Any


@dataclass(frozen=True)
class Nest:
    """Parts and how they are put together; `kind`: of what, for comparing."""

    parts: Tuple[Any, ...]
    build: Callable[[List[Any]], Any]
    kind: Any


Template = Union[Value, Weight, Constant, Nest]


def make_template(value: Any, of_leaf: Callable[[Any], Template]) -> Template:
    """Make the template of a nest; `of_leaf` makes that of a leaf (a tensor or anything that is not a nest)."""
    kind = type(value)
    if kind in (tuple, list):
        return Nest(tuple(make_template(part, of_leaf) for part in value), kind, kind)
    if kind is dict:
        keys = tuple(value)
        parts = tuple(make_template(part, of_leaf) for part in value.values())
        return Nest(parts, lambda leaves: dict(zip(keys, leaves)), keys)
    if kind is slice:
        ends = tuple(make_template(part, of_leaf) for part in (value.start, value.stop, value.step))
        return Nest(ends, lambda leaves: slice(*leaves), kind)
    if isinstance(value, torch.Tensor) or kind.__name__.endswith("Cache"):
        return of_leaf(value)
    leaves, spec = tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return of_leaf(value)
    parts = tuple(make_template(leaf, of_leaf) for leaf in leaves)
    return Nest(parts, functools.partial(_unflatten, spec), kind)


def _unflatten(spec: Any, leaves: List[Any]) -> Any:
    return tree_unflatten(leaves, spec)


def iterate_keys(template: Template) -> Iterator[Key]:
    """Iterate over the values and weights of a template, in order."""
    if isinstance(template, (Value, Weight)):
        yield template
    elif isinstance(template, Nest):
        for part in template.parts:
            yield from iterate_keys(part)


Getter = Callable[[List[Any]], Any]  # of all values by then


def make_getter(template: Template, get: Callable[[Key], Getter]) -> Getter:
    """Make the function from all values so far to what a template stands for. `get` makes that of a value or weight."""
    if isinstance(template, (Value, Weight)):
        return get(template)
    if isinstance(template, Constant):
        value = template.value
        return lambda values: value
    parts, build = [make_getter(part, get) for part in template.parts], template.build
    if template.kind in (tuple, slice) and all(isinstance(part, Constant) for part in template.parts):
        constant = build([part.value for part in template.parts])
        return lambda values: constant
    return lambda values: build([part(values) for part in parts])


def is_alike(a: Template, b: Template, numbers: bool) -> bool:
    """Tell whether two templates are the same; `numbers`: numbers (sizes, above all) included."""
    if isinstance(a, Nest) and isinstance(b, Nest):
        same = a.kind == b.kind and len(a.parts) == len(b.parts)
        return same and all(is_alike(x, y, numbers) for x, y in zip(a.parts, b.parts))
    if isinstance(a, Constant) and isinstance(b, Constant):
        compared = (bool, str, type(None), *((int, float, complex, torch.Size) if numbers else ()))
        same = type(a.value) is type(b.value) and (not isinstance(a.value, compared) or a.value == b.value)
        return same or (type(a.value) is type(b.value) is float and a.value != a.value and b.value != b.value)
    return a == b


# ---- the recording


Autocast = Tuple[Tuple[str, bool, Any], ...]


class AutogradState(NamedTuple):
    """Whether gradients are on, and inside of an autocast block each device's setting (device, on, dtype); () outside."""

    grad: bool
    autocast: Autocast = ()


def _count_autocast_blocks() -> int:
    """Return the current autocast nesting depth."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _read_autocast() -> Autocast:
    if hasattr(torch, "get_autocast_dtype"):
        devices = ("cpu", "cuda")
        return tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices)
    cpu = ("cpu", torch.is_autocast_cpu_enabled(), torch.get_autocast_cpu_dtype())
    return (cpu, ("cuda", torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype()))


@dataclass
class RecordedCall:
    """A recorded call: of the module `target`, or of a function; None: the model's input. `free`: of sizes alone, every stage can
    make it again."""

    index: int
    stage: int
    target: Union[None, str, Callable[..., Any]]
    args: Template
    keywords: Template
    state: AutogradState
    free: bool = False

    def needs(self) -> List[Key]:
        """Return the values and weights among its arguments."""
        return [*iterate_keys(self.args), *iterate_keys(self.keywords)]

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
    base: AutogradState
    nodes: List[RecordedCall] = field(default_factory=list)
    output: Template = Constant(None)
    tensors: Dict[Value, torch.Tensor] = field(default_factory=dict)
    reached: Dict[str, int] = field(default_factory=dict)  # module that ran -> stage of its first run
    runs: Dict[Tuple[int, str], int] = field(default_factory=dict)  # (stage, module) -> how often it runs
    written: Dict[int, Set[int]] = field(default_factory=dict)  # stage -> memory that it writes

    def is_written(self, tensor: torch.Tensor, stage: int) -> bool:
        """Tell whether a stage wrote into a tensor's memory."""
        return get_storage(tensor) in self.written.get(stage, ())


class ReadsValues(BadInput):
    """The forward reads a tensor's values where it is cut."""


ANYWHERE = -1  # in place of a stage: of weights and buffers, which every stage may read by name
# operations that give Python a tensor's values, and functions that do so without an operation
VALUE_READS = {"_local_scalar_dense", "equal", "is_nonzero", "allclose"}
PYTHON_READS = {"tolist", "numpy", "__array__", "__dlpack__"}
KEPT = {"register_hook", "retain_grad"}  # recorded although they give no tensor


class Recorder:
    """Watches one forward. `begins`: the modules at which stages 1 and on begin; those around them are no calls of their own."""

    def __init__(self, model: nn.Module, begins: Sequence[str], x: Any) -> None:
        inputs, weights = flatten_tensors(x), [*model.parameters(), *model.buffers()]
        named = dict([*model.named_parameters(), *model.named_buffers()])
        self.seen = Recording(named, AutogradState(torch.is_grad_enabled()))
        self._model, self._stages, self._stage = model, len(begins), 0
        self._begins = {id(model.get_submodule(name)): (name, s) for s, name in enumerate(begins, 1)}
        self._around = {id(model.get_submodule(name)) for name in list_cut_modules(begins)}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._path: List[str] = []  # the modules around cuts that run
        self._inside, self._quiet = 0, False  # depth in a recorded call; whether this itself is at work
        self._outside = _count_autocast_blocks()
        self._weights = {id(tensor): name for name, tensor in named.items()}
        self._values: Dict[int, Value] = {}  # by the id of a tensor
        self._kept: List[Any] = [*weights, *inputs]  # whose ids and memory must stay theirs
        # memory that depends on the input or on weights -> the stage that made it
        self._live: Dict[int, int] = {get_storage(t): ANYWHERE for t in weights}
        self._live.update({get_storage(t): 0 for t in inputs})
        self._handed: Set[int] = set()  # memory that this stage was handed
        self._made: Set[int] = set()  # memory that the node that runs has made
        self._called = self._add(None, (), {}, self._read_state())
        self._note_result(self._called, x)

    def _add(self, target: Any, args: Any, keywords: Any, state: AutogradState) -> RecordedCall:
        templates = make_template(args, self._make_leaf), make_template(keywords, self._make_leaf)
        node = RecordedCall(len(self.seen.nodes), self._stage, target, *templates, state)
        self.seen.nodes.append(node)
        return node

    def _read_state(self) -> AutogradState:
        return AutogradState(
            torch.is_grad_enabled(), _read_autocast() if _count_autocast_blocks() != self._outside else ()
        )

    def _refuse(self, operation: str, why: str, kind: Type[BadInput] = BadInput) -> NoReturn:
        """Raise BadInput: what is done here cannot be cut."""
        where = (self._path[-1] if self._path else "") or "the model's own forward"
        raise kind(f"model: {type(self._model).__name__}: stage {self._stage}: {operation} in {where}: {why}")

    def _refuse_read(self, operation: str) -> NoReturn:
        self._refuse(
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
            self._refuse_read(name)
        if self._inside and any(
            ANYWHERE < self._live.get(place, ANYWHERE) < self._stage and place not in self._handed for place in places
        ):
            self._refuse(
                self._called.name,
                f"its {name} reads a tensor that an earlier stage made and kept aside (an attribute, a list): give it to the"
                " module as an argument, or begin the stage elsewhere",
            )
        result = func(*args, **kwargs)
        for tensor in iterate_tensors((result,)):
            place = get_storage(tensor)
            if place not in places:
                self._made.add(place)
                # memory is not freed, so that its number does not come again
                self._kept.append(
                    StorageWeakRef(tensor.untyped_storage()) if tensor.layout is torch.strided else tensor
                )
                if is_live:
                    self._live[place] = self._stage
        for place in _list_written(func, args, kwargs):
            self.seen.written.setdefault(self._stage, set()).add(place)
            if is_live or place not in self._made:
                self._live.setdefault(place, self._stage)
        return result

    # --- arguments and results

    def _make_leaf(self, value: Any) -> Template:
        if not isinstance(value, torch.Tensor):
            if type(value).__name__.endswith("Cache"):
                self._refuse(
                    self._called.name,
                    f"it takes a {type(value).__name__}, which keeps tensors from call to call and cannot cross:"
                    " config.use_cache = False",
                )
        elif id(value) in self._values:
            self._handed.add(get_storage(value))
            return self._values[id(value)]
        elif id(value) in self._weights:
            return Weight(self._weights[id(value)])
        elif _is_wrapped(value) or get_storage(value) in self._live:
            self._refuse(
                f"a tensor of shape {tuple(value.shape)}",
                "it was kept aside (an attribute, an object that a module gave), or made inside of torch.func: modules around a"
                " cut must be given tensors and give them, in tuples, lists and dicts",
            )
        self._kept.append(value)
        return Constant(value)

    def _note_result(self, node: RecordedCall, result: Any) -> None:
        for i, tensor in enumerate(list_leaves(result)):
            if isinstance(tensor, torch.Tensor):
                self._values[id(tensor)] = Value(node.index, i)
                self.seen.tensors[Value(node.index, i)] = tensor

    # --- functions

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function and record it, unless it is inside of a recorded call."""
        if self._quiet or self._inside:
            return func(*args, **kwargs)
        if func is torch.Tensor.__iter__:
            return iter(self._record_function(torch.Tensor.unbind, args, {}))
        return self._record_function(func, args, kwargs)

    def _record_function(self, func: Any, args: Any, kwargs: Any) -> Any:
        name, state = name_operation(func), self._read_state()
        if name in PYTHON_READS and get_storage(args[0]) in self._live:
            self._refuse_read(name)
        self._made = set()
        result = func(*args, **kwargs)
        gives = bool(flatten_tensors(result))
        if not gives and not (result is None and flatten_tensors((args, kwargs))) and name not in KEPT:
            return result  # sizes, types
        node = self._add(func, args, kwargs, state)
        node.free = gives
        self._note_result(node, result)
        return result

    # --- modules

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note that a module begins to run."""
        name = self._names[id(module)]
        if id(module) in self._begins:
            self._enter(*self._begins[id(module)])
        run = self._stage, name
        self.seen.runs[run] = self.seen.runs.get(run, 0) + 1
        if self._inside:
            self._inside += 1
            return
        self.seen.reached.setdefault(name, self._stage)
        if id(module) in self._around:
            self._path.append(name)
            return
        self._quiet = True
        self._called = RecordedCall(-1, self._stage, name, Constant(()), Constant({}), self.seen.base)  # for refusals
        self._called = self._add(name, args, kwargs, self._read_state())
        self._made = set()
        self._quiet, self._inside = False, 1

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Note that a module has run."""
        if not self._inside:
            self._path.pop()
            return
        if self._inside == 1:
            self._note_result(self._called, output)
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
                f"stages: {name}: first runs inside of {self._called.name}, which is no module around it: no stage can begin"
                " there"
            )
        self._stage, self._handed = stage, set()

    def finish(self, output: Any) -> Recording:
        """Note the model's output and return the recording."""
        if self._stage != self._stages:
            late = next(name for name, stage in self._begins.values() if stage > self._stage)
            raise BadInput(
                f"stages: {late}: does not run in this forward after the stages before: no stage can begin there"
            )
        nodes = self.seen.nodes
        self.seen.output = make_template(output, self._make_leaf)
        for value, tensor in self.seen.tensors.items():  # what was written into later is no more what its node gave
            nodes[value.node].free &= get_storage(tensor) not in self._live
        for node in nodes:
            node.free &= all(isinstance(key, Value) and nodes[key.node].free for key in node.needs())
        return self.seen


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


def _read_python_state(model: nn.Module, begins: Sequence[str]) -> Dict[str, Any]:
    """Return what Python keeps between forwards: numbers of the modules around cuts, and states of its and numpy's generators."""
    owners = [(name, model.get_submodule(name)) for name in list_cut_modules(begins)]
    state = {join_name(n, key): v for n, owner in owners for key, v in vars(owner).items() if type(v) in (int, float)}
    return {**state, RANDOM: (random.getstate(), pickle.dumps(np.random.get_state()))}


RANDOM = " random"  # no name of an attribute


def _refuse_hooks(model: nn.Module, begins: Sequence[str]) -> None:
    """Raise BadInput if modules around cuts have hooks: the pieces do not call these modules."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for name in list_cut_modules(begins):
        if any(getattr(model.get_submodule(name), kind) for kind in kinds):
            raise BadInput(
                f"stages: {name or 'the model'}: has hooks, and stages begin inside of it, where they would not run: put them on"
                " modules inside, or begin stages elsewhere"
            )


@contextlib.contextmanager
def _watch_modules(model: nn.Module, recorder: Recorder, traced: bool) -> Iterator[None]:
    """Put hooks on all modules. `traced`: what models leave out where nothing is padded, unless they are traced, is not left out.
    Hooks of backwards, of which there is none, are away: they would wrap what a module gives after it was seen."""
    handles, tables = [], [table for m in model.modules() for table in (m._backward_hooks, m._backward_pre_hooks)]
    hooks = [table.copy() for table in tables]
    for table in tables:
        table.clear()
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(recorder.before, prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(recorder.after, with_kwargs=True))
    is_tracing = torch.jit.is_tracing
    if traced:
        torch.jit.is_tracing = lambda: True
    caches = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # a weight that two stages use would be cast in the first alone
    try:
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
    _refuse_hooks(model, begins)
    before = _read_python_state(model, begins)
    recorder = Recorder(model, begins, x)
    with _watch_modules(model, recorder, traced):
        output = call_model(model, x)
    recording = recorder.finish(output)
    for name, value in _read_python_state(model, begins).items():
        if before.get(name, value) != value:
            if name == RANDOM:
                raise BadInput(
                    f"model: {type(model).__name__}: its forward draws from Python's random or numpy's, which no seed of a "
                    "microbatch reaches: draw from torch"
                )
            raise BadInput(
                f"model: {name}: the forward changes this number, in a module that is cut, where Python runs once: keep it in a"
                " buffer (self.count.add_(1)) or in a module inside, or begin no stage inside of that module"
            )
    return recording
