"""One real forward of a model recorded, as calls of modules and of torch functions, with the stage in which each runs.

    model's forward         h = self.embed(x) + self.position; for block in self.blocks: h = block(h) ...
    recorded, blocks.1      0 embed(x)  1 add(0, position)  2 blocks.0(1) | 3 blocks.1(2) ...
    being a boundary                          stage 0                     |   stage 1

A module is one call unless a boundary lies inside it: then what it does is recorded in its place. Module calls are seen by
hooks, torch functions between them by a TorchFunctionMode, both silent inside of a recorded call. Python in between runs once,
while recording: its sizes, branches and counters are the recording's.
"""

from __future__ import annotations

import contextlib
import pickle
import random
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, NoReturn, Sequence, Set, Tuple, Type, Union

import numpy as np
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ipu_pipe.errors import BadInput
from ipu_pipe.model.batch import call_model, iterate_tensors
from ipu_pipe.model.observation import get_storage, join_name, list_ancestors
from ipu_pipe.model.randomness import list_generators
from ipu_pipe.model.templates import (
    Constant,
    Key,
    Template,
    Value,
    Weight,
    flatten_tensors,
    iterate_keys,
    list_leaves,
    make_template,
)

Autocast = Tuple[Tuple[str, bool, Any], ...]
DEVICES = ("cpu", "cuda")  # whose autocast is followed


class AutogradState(NamedTuple):
    """Whether gradients are on, and inside of an autocast block each device's setting (device, on, dtype); () outside."""

    grad: bool
    autocast: Autocast = ()


def read_autograd_state(outside: int) -> AutogradState:
    """Return the grad mode and autocast now; `outside`: the autocast depth around the forward."""
    return AutogradState(torch.is_grad_enabled(), _autocast() if count_autocast_blocks() != outside else ())


def count_autocast_blocks() -> int:
    """Return the current autocast nesting depth."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _autocast() -> Autocast:
    settings: List[Tuple[str, bool, Any]] = []
    for device in DEVICES:
        if hasattr(torch, "get_autocast_dtype"):
            settings.append((device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)))
        elif device == "cpu":
            settings.append((device, torch.is_autocast_cpu_enabled(), torch.get_autocast_cpu_dtype()))
        else:
            settings.append((device, torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype()))
    return tuple(settings)


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

    nodes: List[RecordedCall] = field(default_factory=list)
    output: Template = Constant(None)
    tensors: Dict[Value, torch.Tensor] = field(default_factory=dict)
    weights: Dict[str, torch.Tensor] = field(
        default_factory=dict
    )  # parameters and buffers, by the first of their names
    reached: Dict[str, int] = field(default_factory=dict)  # module that ran -> stage of its first run
    base: AutogradState = AutogradState(True)
    runs: Dict[Tuple[int, str], int] = field(default_factory=dict)  # (stage, module) -> how often it runs

    def settle(self, is_live: Callable[[torch.Tensor], bool]) -> None:
        """Find out which nodes are free: what was written into later is no more what its node gave."""
        for value, tensor in self.tensors.items():
            self.nodes[value.node].free &= not is_live(tensor)
        for node in self.nodes:
            node.free &= all(isinstance(key, Value) and self.nodes[key.node].free for key in node.needs())


@dataclass
class Whereabouts:
    """Where a forward stands: its stage, the modules around cuts that it is in, the module or function called last."""

    model: nn.Module
    stage: int = 0
    around: List[str] = field(default_factory=list)
    called: str = "the model"

    def refuse(self, operation: str, why: str, kind: Type[BadInput] = BadInput) -> NoReturn:
        """Raise BadInput: what is done here cannot be cut."""
        where = (self.around[-1] if self.around else "") or "the model's own forward"
        raise kind(f"model: {type(self.model).__name__}: stage {self.stage}: {operation} in {where}: {why}")


ANYWHERE = -1  # in place of a stage: of weights and buffers, which every stage may read by name
VALUE_READS = {
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "allclose",
}  # operations that give Python a tensor's values


class Liveness(TorchDispatchMode):
    """Follows the forward of a model whose stage is `stage`. `read(operation)` is called where values of live memory reach
    Python, `hidden(operation)` where memory of an earlier stage is read that nobody handed on: both only raise."""

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor],
        read: Callable[[str], None],
        hidden: Callable[[str], None],
    ) -> None:
        super().__init__()
        self.stage = 0
        self._made: Dict[int, int] = {get_storage(t): ANYWHERE for t in weights}  # live memory -> stage
        self._made.update({get_storage(t): 0 for t in given})
        self._handed: Set[int] = set()  # memory that this stage was handed
        self._written: Dict[int, Set[int]] = {}  # stage -> memory
        self._kept: List[Any] = [*weights, *given]
        self._since: Set[int] = set()  # memory that the node that runs has made
        self._read, self._hidden = read, hidden
        self._writing: Dict[Any, List[Any]] = {}  # operation -> what it writes: numbers and names of arguments

    def enter(self, stage: int) -> None:
        """Begin the next stage."""
        self.stage = stage
        self._handed = set()

    def begin(self) -> None:
        """Begin a node."""
        self._since = set()

    def hand(self, tensor: torch.Tensor) -> None:
        """Note that this stage has been given `tensor`."""
        self._handed.add(get_storage(tensor))

    def is_live(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor depends on the input or on weights."""
        return get_storage(tensor) in self._made

    def is_written(self, tensor: torch.Tensor, stage: int) -> bool:
        """Tell whether a stage wrote into a tensor's memory."""
        return get_storage(tensor) in self._written.get(stage, ())

    def _keep(self, tensor: torch.Tensor) -> None:
        """Keep memory from being freed, so that its number does not come again."""
        self._kept.append(StorageWeakRef(tensor.untyped_storage()) if tensor.layout is torch.strided else tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        storages_read = {get_storage(t) for t in iterate_tensors((*args, *kwargs.values()))}
        stages = [self._made[place] for place in storages_read if place in self._made]
        if stages:
            name = func.overloadpacket.__name__
            if name in VALUE_READS:
                self._read(name)
            earlier = [s for s in storages_read if ANYWHERE < self._made.get(s, ANYWHERE) < self.stage]
            if any(place not in self._handed for place in earlier):
                self._hidden(name)
        result = func(*args, **kwargs)
        for tensor in iterate_tensors((result,)):
            place = get_storage(tensor)
            if place in storages_read:
                continue
            self._since.add(place)
            self._keep(tensor)
            if stages:
                self._made[place] = self.stage
        for place in self._writes(func, args, kwargs):
            self._written.setdefault(self.stage, set()).add(place)
            if stages or place not in self._since:
                self._made.setdefault(place, self.stage)
        return result

    def _writes(self, func: Any, args: Any, kwargs: Any) -> List[int]:
        if func not in self._writing:
            arguments = func._schema.arguments
            self._writing[func] = [
                (i, argument.name)
                for i, argument in enumerate(arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
        written = [args[i] if i < len(args) else kwargs.get(name) for i, name in self._writing[func]]
        return [get_storage(t) for t in iterate_tensors(written)]


PLAIN = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format,
    torch.Size, type(Ellipsis), type, nn.Module,
)  # fmt: skip
MOST_SEEN = 10_000  # objects looked at for tensors inside


class Arguments:
    """Of the calls of one forward, in order."""

    def __init__(self, found: Recording, place: Whereabouts, liveness: Liveness) -> None:
        self._found, self._place, self._liveness = found, place, liveness
        self._weights = {id(tensor): name for name, tensor in found.weights.items()}
        self._values: Dict[int, Value] = {}  # by the id of a tensor
        self._differentiable: Dict[Value, bool] = {}
        self._kept: List[Any] = []  # whose ids must stay theirs

    def taken(self, value: Any) -> Template:
        """Return the template of what a call takes, or the model returns. Raise BadInput."""
        return make_template(value, self._leaf)

    def given(self, node: RecordedCall, result: Any) -> None:
        """Note what a call returns."""
        for i, tensor in enumerate(list_leaves(result)):
            if isinstance(tensor, torch.Tensor):
                value = Value(node.index, i)
                self._values[id(tensor)] = value
                self._found.tensors[value], self._differentiable[value] = tensor, tensor.requires_grad
        for key in node.needs():  # what is changed in place may have come to need a gradient
            if isinstance(key, Value):
                self._differentiable[key] = self._found.tensors[key].requires_grad

    def refuse_filled(self, value: Any) -> None:
        """Raise BadInput if a call has put tensors into an object that it took."""
        make_template(value, self._look)

    def _leaf(self, value: Any) -> Template:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        self._look(value)
        self._kept.append(value)
        return Constant(value)

    def _tensor(self, tensor: torch.Tensor) -> Template:
        if id(tensor) in self._values:
            value = self._values[id(tensor)]
            self._liveness.hand(tensor)
            if tensor.requires_grad != self._differentiable[value]:
                self._place.refuse(
                    self._found.nodes[value.node].name,
                    "it runs inside of an autograd function (torch.autograd.Function, checkpoint with use_reentrant), where the"
                    " model is cut: put that into a module that stays whole, or use_reentrant=False",
                )
            return value
        if id(tensor) in self._weights:
            return Weight(self._weights[id(tensor)])
        if self._liveness.is_live(tensor):
            self._place.refuse(
                f"a tensor of shape {tuple(tensor.shape)}",
                "it was kept aside (an attribute, an object that a module gave): modules around a cut must be given tensors and"
                " give them, in tuples, lists and dicts",
            )
        self._kept.append(tensor)
        return Constant(tensor)

    def _look(self, value: Any) -> Template:
        """Raise BadInput if an object collects tensors of this forward."""
        if not isinstance(value, (torch.Tensor, *PLAIN)) and not callable(value):
            for tensor in _held(value):
                if id(tensor) not in self._weights and self._liveness.is_live(tensor):
                    kind = type(value).__name__
                    hint = "config.use_cache = False" if "Cache" in kind else "hand on tensors instead"
                    self._place.refuse(
                        self._place.called,
                        f"it takes a {kind}, which keeps tensors from call to call and cannot cross: {hint}",
                    )
        return Constant(None)


def _held(value: Any) -> Iterator[torch.Tensor]:
    """Iterate over the tensors inside an object."""
    seen: Set[int] = set()
    todo: List[Any] = [value]
    while todo and len(seen) < MOST_SEEN:
        one = todo.pop()
        if id(one) in seen or isinstance(one, PLAIN):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, dict):
            todo += one.values()
        elif isinstance(one, (list, tuple, set)):
            todo += one
        elif hasattr(one, "__dict__") and not callable(one):
            todo += vars(one).values()


PYTHON_READS = {
    "tolist",
    "numpy",
    "__array__",
    "__dlpack__",
}  # what gives Python a tensor's values without an operation
KEPT = {"register_hook", "retain_grad"}  # recorded although they give no tensor


class Recorder(TorchFunctionMode):
    """Watches one forward. `begins`: the modules at which stages 1 and on begin; those around them are no calls of their own."""

    def __init__(self, model: nn.Module, begins: Sequence[str], x: Any) -> None:
        super().__init__()
        self.found, self._place = Recording(base=AutogradState(torch.is_grad_enabled())), Whereabouts(model)
        self._stages = len(begins)
        self._begins = {id(model.get_submodule(name)): (name, s) for s, name in enumerate(begins, 1)}
        self._around = {id(model.get_submodule(name)) for name in list_cut_modules(begins)}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._inside, self._quiet = 0, 0  # of recorded calls; of what this does itself
        self._has_read = False  # the module that runs, a tensor's values
        inputs, weights = flatten_tensors(x), [*model.parameters(), *model.buffers()]
        self._drawing = list_generators(inputs[0].device if inputs else torch.device("cpu"))
        self._before = self._drawn()  # the module that runs
        self.liveness = Liveness(weights, inputs, self._refuse_read, self._refuse_hidden)
        self.found.weights.update([*model.named_parameters(), *model.named_buffers()])
        self._arguments = Arguments(self.found, self._place, self.liveness)
        self._outside = count_autocast_blocks()
        self._called = self._add(None, Constant(()), Constant({}), read_autograd_state(self._outside))
        self._arguments.given(self._called, x)

    def _add(self, target: Any, args: Template, keywords: Template, state: AutogradState) -> RecordedCall:
        node = RecordedCall(len(self.found.nodes), self._place.stage, target, args, keywords, state)
        self.found.nodes.append(node)
        return node

    # --- refusals

    def _refuse_read(self, operation: str) -> None:
        self._has_read = True
        if not self._inside:
            name = {"_local_scalar_dense": "a number read from a tensor (if, item, int)"}.get(operation, operation)
            self._place.refuse(
                name,
                kind=ReadsValues,
                why="what the forward does there depends on a tensor's values, where it is cut: begin stages at whole"
                " modules around it, put it into a module of its own, or use backend: {name: emulator}",
            )

    def _refuse_hidden(self, operation: str) -> None:
        if self._inside:
            self._place.refuse(
                self._called.name,
                f"its {operation} reads a tensor that an earlier stage made and kept aside (an attribute, a list): give it to"
                " the module as an argument, or begin the stage elsewhere",
            )

    def _refuse_numbers(self, output: Any) -> None:
        """Raise BadInput if a module returns numbers that come from values or from chance: they are the recording's each
        time."""
        others = [leaf for leaf in list_leaves(output) if not (leaf is None or isinstance(leaf, torch.Tensor))]
        if others and (self._has_read or self._before != self._drawn()):
            self._place.refuse(
                self._called.name,
                f"it gives a {type(others[0]).__name__}, and reads tensors' values or draws random numbers: give a tensor"
                " instead, or begin stages at modules around what uses it",
            )

    # --- functions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._quiet or self._inside:
            self._has_read |= getattr(func, "__name__", "") in PYTHON_READS
            return func(*args, **kwargs)
        if func is torch.Tensor.__iter__:
            return iter(self._function(torch.Tensor.unbind, args, {}))
        return self._function(func, args, kwargs)

    def _function(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = name_operation(func)
        if any(map(_is_wrapped, flatten_tensors((args, kwargs)))):
            self._place.refuse(name, "it runs inside of torch.func (vmap, grad): put that into a module of its own")
        if name in PYTHON_READS and self.liveness.is_live(args[0]):
            self._refuse_read(name)
        drawn, state = self._drawn(), read_autograd_state(self._outside)
        self.liveness.begin()
        result = func(*args, **kwargs)
        gives = bool(flatten_tensors(result))
        if not gives and not (result is None and flatten_tensors((args, kwargs))) and name not in KEPT:
            return result  # sizes, types
        if drawn != self._drawn():
            self._place.refuse(
                name,
                "draws random numbers outside of the modules that stay whole: begin stages at modules around it, or draw in a"
                " module (nn.Dropout)",
            )
        node = self._add(func, self._arguments.taken(args), self._arguments.taken(kwargs), state)
        node.free = gives
        self._arguments.given(node, result)
        return result

    def _drawn(self) -> List[bytes]:
        return [generator.get_state().numpy().tobytes() for generator in self._drawing]

    # --- modules

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note that a module begins to run."""
        name = self._names[id(module)]
        if id(module) in self._begins:
            self._enter(*self._begins[id(module)])
        run = self._place.stage, name
        self.found.runs[run] = self.found.runs.get(run, 0) + 1
        if self._inside:
            self._inside += 1
            return
        self.found.reached.setdefault(name, self._place.stage)
        if id(module) in self._around:
            self._place.around.append(name)
            return
        self._quiet += 1
        self._place.called = name or "the model"
        taken = self._arguments.taken(args), self._arguments.taken(kwargs)
        self._called = self._add(name, *taken, read_autograd_state(self._outside))
        self._has_read, self._before = False, self._drawn()
        self.liveness.begin()
        self._quiet -= 1
        self._inside += 1

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Note that a module has run."""
        if not self._inside:
            self._place.around.pop()
            return
        if self._inside == 1:
            self._arguments.refuse_filled((args, kwargs))
            self._refuse_numbers(output)
            self._arguments.given(self._called, output)
        self._inside -= 1

    def _enter(self, name: str, stage: int) -> None:
        now = self._place.stage
        if stage <= now:
            return  # it runs once more
        if stage != now + 1:
            raise BadInput(f"stages: {name}: begins stage {stage}, but runs while stage {now} does: must be in order")
        if self._inside:
            raise BadInput(
                f"stages: {name}: first runs inside of {self._called.name}, which is no module around it: no stage can begin"
                " there"
            )
        self._place.stage = stage
        self.liveness.enter(stage)

    def finish(self, output: Any) -> Recording:
        """Note the model's output and return the recording."""
        if self._place.stage != self._stages:
            late = next(name for name, stage in self._begins.values() if stage > self._place.stage)
            raise BadInput(
                f"stages: {late}: does not run in this forward after the stages before: no stage can begin there"
            )
        self.found.output = self._arguments.taken(output)
        self.found.settle(self.liveness.is_live)
        return self.found


def list_cut_modules(begins: Sequence[str]) -> List[str]:
    """Return the names of the modules around boundaries."""
    return list(dict.fromkeys(name for begin in begins for name in list_ancestors(begin)))


def _is_wrapped(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor stands for others, inside a transformation of torch.func."""
    return bool(torch._C._functorch.is_batchedtensor(tensor) or torch._C._functorch.is_gradtrackingtensor(tensor))


def _counters(model: nn.Module, begins: Sequence[str]) -> Dict[str, Any]:
    """Return the numbers that modules around cuts have as attributes."""
    owners = [(name, model.get_submodule(name)) for name in list_cut_modules(begins)]
    return {
        join_name(n, attribute): v for n, o in owners for attribute, v in vars(o).items() if type(v) in (int, float)
    }


def _random_states() -> Any:
    """Return the states of Python's and numpy's generators."""
    return random.getstate(), pickle.dumps(np.random.get_state())


def _buffers(model: nn.Module, begins: Sequence[str]) -> Dict[str, Any]:
    """Return the buffers of the modules around cuts."""
    owners = [(name, model.get_submodule(name)) for name in list_cut_modules(begins)]
    return {
        join_name(name, attribute): tensor for name, owner in owners for attribute, tensor in owner._buffers.items()
    }


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
def _watched(model: nn.Module, recorder: Recorder, traced: bool) -> Iterator[None]:
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
        with recorder.liveness, recorder:
            yield
    finally:
        torch.jit.is_tracing = is_tracing
        torch.set_autocast_cache_enabled(caches)
        for handle in handles:
            handle.remove()
        for table, saved_hooks in zip(tables, hooks):
            table.update(saved_hooks)


class ReadsValues(BadInput):
    """The forward reads a tensor's values where it is cut."""


def record_forward(model: nn.Module, begins: Sequence[str], x: Any, traced: bool) -> Tuple[Recording, Liveness]:
    """Record one forward of input `x`, which it may overwrite, in the mode in which the model is; `traced`: with
    `torch.jit.is_tracing` true, for which models leave out branches on values. Raises BadInput."""
    _refuse_hooks(model, begins)
    drawn, buffers, counters = _random_states(), _buffers(model, begins), _counters(model, begins)
    recorder = Recorder(model, begins, x)
    with _watched(model, recorder, traced):
        output = call_model(model, x)
    recording = recorder.finish(output)
    for name, tensor in _buffers(model, begins).items():
        if tensor is not buffers.get(name):
            raise BadInput(
                f"model: {name}: the forward binds another tensor to this buffer, in a module that is cut: write it in place"
                " (self.count.add_(1)), or begin no stage inside of that module"
            )
    for name, number in _counters(model, begins).items():
        if counters.get(name, number) != number:
            raise BadInput(
                f"model: {name}: the forward changes this number, in a module that is cut, where Python runs once: keep it in a"
                " buffer (self.count.add_(1)) or in a module inside, or begin no stage inside of that module"
            )
    if _random_states() != drawn:
        raise BadInput(
            f"model: {type(model).__name__}: its forward draws from Python's random or numpy's, which no seed of a microbatch "
            "reaches: draw from torch"
        )
    return recording, recorder.liveness
