"""The one look at a model before training: its passes observed operation by operation.

A *call* is a module's first run; what happens from there to the next module's first run is the call's: FLOPs of the forward and,
by the autograd nodes that this makes, of the backward; what is saved for the backward; tensors that are made. So every way to cut
the calls into stages is answered from one pass:

    calls      conv1    norm1    relu     conv2     ...
    live            c1       n1       r1             bytes that cross if a stage ends here: all that was made before and is read
                                                     behind, the model's input too where it is

A training forward shows besides what it does to the model (`ForwardEffects`), and of which weights it saves derived values.
Everything here leaves weights, buffers, gradients, modes and random states as they were.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, FrozenSet, Iterator, List, Mapping, NamedTuple, Sequence, Set, Tuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from ipu_pipe.model.batch import call_model, clone_tensors, get_first_tensor, iterate_tensors, list_tensors
from ipu_pipe.model.flops import BACKWARD, FlopCounterMode, count_by_formula, get_formulas, separate_attention
from ipu_pipe.model.meta import move_to_meta
from ipu_pipe.model.randomness import list_generators
from ipu_pipe.model.restoring import OperationWatch, undisturbed


@dataclass
class ModuleCall:
    """A module's first run: its place in the order of execution, what it computes, and the parameters it answers for."""

    name: str
    module: nn.Module
    works: bool  # computes something itself: none of its children runs, or it owns parameters
    alone: bool = True  # none of its children runs
    flops: float = 0.0  # forward, of all that runs from here to the next module's first run
    backward_flops: float = 0.0
    moved: float = 0.0  # bytes that operations without FLOPs read and write, forward, as above
    backward_moved: float = 0.0
    saved: Dict[int, int] = field(default_factory=dict)  # storage kept for the backward -> its bytes; weights apart


class ForwardEffects(NamedTuple):
    """What a training forward does besides giving its output.

    draws: the modules whose own forward draws random numbers (dropout and the like), and how often each runs
    buffers: names of those that it changes, without BatchNorm's, which it does not read
    weights: names of those that it writes (max_norm of an embedding)
    """

    draws: Dict[str, int] = {}
    buffers: Sequence[str] = ()
    weights: Sequence[str] = ()


@dataclass
class Observation:
    """What one pass showed.

    `runs`: names of all runs of modules in order, repeats too. `live[k]`: bytes that cross if a stage begins with call k.
    `backward`: whether that of the pass could be run. `derived`: names of parameters from which the forward derives a tensor
    that it saves for the backward, without the input. A backward that shall read newer weights gets them written into the
    parameters' own storage; what was derived from a weight alone (`w * 1`, weight norm, InstanceNorm's repeated scale,
    autocast's low-precision copy) keeps the old values, and the method would silently become another one.
    """

    calls: List[ModuleCall] = field(default_factory=list)
    runs: List[str] = field(default_factory=list)
    live: List[int] = field(default_factory=list)
    backward: bool = False
    derived: List[str] = field(default_factory=list)
    effects: ForwardEffects = ForwardEffects()


def count_saved_bytes(calls: Sequence[ModuleCall]) -> int:
    """Return the bytes that `calls` together keep for the backward, each storage once."""
    return sum({storage: size for call in calls for storage, size in call.saved.items()}.values())


def observe_costs(model: nn.Module, x: Any, forward: Callable[[], Any], counted: bool = True) -> Observation:
    """Observe all of `forward`, a pass of the model's input `x` that returns a loss or outputs, and of its backward; only the
    order of modules if not `counted`."""
    seen = Observation()
    if not counted:
        with _watch_calls(model, seen, []), torch.enable_grad():
            forward()
        return seen
    counter = _Counter(model, x, seen.calls)
    with separate_attention(), torch.enable_grad():
        with _watch_calls(model, seen, counter.running, counter.begin), OperationWatch(counter.run):
            with torch.autograd.graph.saved_tensors_hooks(counter.save, lambda tensor: tensor):
                results = [t for t in tree_flatten(forward())[0] if isinstance(t, torch.Tensor) and t.requires_grad]
        seen.live = list(itertools.accumulate(counter.steps))[: len(seen.calls)]
        seen.derived = [name for name, _ in model.named_parameters() if name in counter.derived]
        counter.is_forward = False
        trained = [p for p in model.parameters() if p.requires_grad]
        try:
            if results and trained:
                # of one number PyTorch makes it itself, without its symbolic algebra
                gradients = [None if t.numel() == 1 else torch.ones_like(t) for t in results]
                with OperationWatch(counter.run):
                    torch.autograd.grad(results, trained, gradients, allow_unused=True)
            seen.backward = True
        # the user's model may raise anything; training reports it with its place
        except Exception:
            if any(t.is_meta for t in results):
                raise
    if FlopCounterMode is None:
        for call in seen.calls:
            call.backward_flops = BACKWARD * call.flops
    return seen


def observe_training(model: nn.Module, x: Any, y: Any, run: Callable[[Any, Any], Any]) -> Observation:
    """Observe a training pass of one microbatch, its backward and its effects. `run(x, y)` makes the loss."""
    if get_first_tensor(x).is_meta:
        with move_to_meta(model):
            return observe_costs(model, x, lambda: run(x, y))
    a = clone_tensors(x)
    with undisturbed(model), _watch_effects(model, get_first_tensor(x).device) as read_effects:
        seen = observe_costs(model, a, lambda: run(a, y))
        seen.effects = read_effects()
    return seen


def observe_effects(model: nn.Module, x: Any) -> ForwardEffects:
    """Run one training forward of `x` and return what it did; the model is left as it was."""
    with undisturbed(model), _watch_effects(model, get_first_tensor(x).device) as read_effects:
        model.train()
        call_model(model, clone_tensors(x))
        return read_effects()


@contextlib.contextmanager
def _watch_effects(model: nn.Module, device: torch.device) -> Iterator[Callable[[], ForwardEffects]]:
    """Watch a forward inside; the function given returns what it did."""
    names = {id(module): name for name, module in model.named_modules()}
    norms = {name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._NormBase)}
    drawn: Set[str] = set()
    runs: Dict[str, int] = {}
    drawing = list_generators(device)
    stack: List[List[torch.Tensor]] = []

    def before(module: nn.Module, inputs: Any) -> None:
        # do not count the second forward of activation checkpointing
        if torch._C._current_graph_task_id() == -1:
            runs[names[id(module)]] = runs.get(names[id(module)], 0) + 1
        stack.append([generator.get_state() for generator in drawing])

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        start = stack.pop()
        if not all(torch.equal(a, generator.get_state()) for a, generator in zip(start, drawing)):
            drawn.add(names[id(module)])
            for generator, state in zip(drawing, start):  # the module around is seen to draw only if it does itself
                generator.set_state(state)

    buffers = {name: t.clone() for name, t in model.named_buffers() if name.rpartition(".")[0] not in norms}
    weights = [(name, p, p.detach().clone()) for name, p in model.named_parameters() if not p.is_meta]

    def read() -> ForwardEffects:
        now = dict(model.named_buffers())
        changed = [name for name, value in buffers.items() if name in now and not _is_equal(now[name], value)]
        written = [name for name, p, value in weights if not _is_equal(p, value)]
        return ForwardEffects({name: runs[name] for name in sorted(drawn)}, changed, written)

    handles = [m.register_forward_pre_hook(before) for m in model.modules()]
    handles += [m.register_forward_hook(after) for m in model.modules()]
    try:
        yield read
    finally:
        for handle in handles:
            handle.remove()


def _is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.is_meta or a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


@contextlib.contextmanager
def _watch_calls(
    model: nn.Module, seen: Observation, running: List[nn.Module], begun: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Add to `seen` the calls of modules that run inside, and keep `running` the modules that run, the innermost last; `begun` is
    called at the beginning of each call."""
    names = {id(module): name for name, module in model.named_modules()}
    at: Dict[str, ModuleCall] = {}

    def before(module: nn.Module, inputs: Any, keywords: Any) -> None:
        name = names[id(module)]
        seen.runs.append(name)
        running.append(module)
        if name not in at:
            owns_weights = any(True for _ in module.parameters(recurse=False))
            at[name] = ModuleCall(name, module, owns_weights)
            seen.calls.append(at[name])
            begun()

    def after(module: nn.Module, inputs: Any, keywords: Any, output: Any) -> None:
        running.pop()
        if FlopCounterMode is None:
            at[names[id(module)]].flops += count_by_formula(module, [*inputs, *keywords.values()], output)

    handles = [m.register_forward_pre_hook(before, with_kwargs=True) for m in model.modules()]
    handles += [m.register_forward_hook(after, with_kwargs=True) for m in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    around = {outer for name in at for outer in list_ancestors(name)}
    for call in seen.calls:
        call.alone = call.name not in around
        call.works = call.works or call.alone


def list_ancestors(name: str) -> List[str]:
    """Return the names of the modules around a module, the model's own ("") and the outermost first."""
    parts = name.split(".") if name else []
    return [".".join(parts[:n]) for n in range(len(parts))]


def get_storage(tensor: torch.Tensor) -> int:
    """Return a number that tensors in the same memory share."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)


def _bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the memory in which a tensor lies."""
    dense = tensor.layout is torch.strided
    return int(tensor.untyped_storage().nbytes()) if dense else tensor.numel() * tensor.element_size()


def _view(tensor: torch.Tensor) -> Tuple[Any, ...]:
    """Return a key that tensors share if they show the same numbers of one memory."""
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    return (get_storage(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


TAKES_MEMORY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


def _moved(operation: Any, arguments: Any, result: Any) -> float:
    """Return the bytes that an operation reads and writes, each tensor once; 0 for views and allocations."""
    looks = any(r.alias_info is not None and not r.alias_info.is_write for r in operation._schema.returns)
    if looks or operation.overloadpacket.__name__ in TAKES_MEMORY:
        return 0.0
    return float(sum(min(_bytes(t), t.numel() * t.element_size()) for t in iterate_tensors((*arguments, result))))


class _Counter:
    """Counts, and follows by memory, every operation of a forward, and counts those of its backward."""

    def __init__(self, model: nn.Module, x: Any, calls: List[ModuleCall]) -> None:
        self.calls = calls
        self.running: List[nn.Module] = []
        self.is_forward = True
        self.steps = [0]  # by how much more bytes cross before each call than before the one before
        self.derived: Set[str] = set()  # parameters of which the forward saves derived values
        # storage numbers are not reused while these tensors are referenced
        self._held: List[torch.Tensor] = list_tensors(x)
        self._formulas = get_formulas()
        self._first: List[int] = []  # autograd node of each call
        self._made: Dict[Any, int] = {_view(t): 0 for t in self._held}  # call in which a tensor is made
        self._reached: Dict[Any, int] = {}  # the last that reads it
        self._own = {get_storage(t) for t in [*model.parameters(), *model.buffers()]}
        # memory -> the parameters whose values are in it; what depends on the input is not there
        self._sources: Dict[int, FrozenSet[str]] = {
            get_storage(p): frozenset([name]) for name, p in model.named_parameters()
        }
        self._given = {get_storage(t) for t in self._held}  # memory that depends on the input

    def begin(self) -> None:
        """Note that a call begins."""
        self.steps.append(0)
        if self._formulas:
            self._first.append(torch._C._autograd._get_sequence_nr())  # type: ignore[attr-defined]

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note a tensor that is saved for the backward; weights and buffers are there anyway."""
        place = get_storage(tensor)
        if self.calls and place not in self._own:
            self.calls[-1].saved[place] = _bytes(tensor)
            self._held.append(tensor.detach())
            if tensor.is_floating_point():
                self.derived |= self._sources.get(place, frozenset())
        # returning the tensor itself would make a cycle that is never freed
        return tensor.detach()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation and count it for its call."""
        formula = self._formulas.get(func.overloadpacket)
        if formula is None and torch.is_inference_mode_enabled():  # functions come whole then
            with OperationWatch(self.run):
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        inputs = list(iterate_tensors((*args, *kwargs.values())))
        if self.is_forward:
            self._read(inputs)
        result = func(*args, **kwargs)
        if self.calls and self._formulas:
            call = self.calls[-1] if self.is_forward else self.calls[self._find_call_of_node()]
            flops = 0.0 if formula is None else float(formula(*args, **kwargs, out_val=result))
            moved = _moved(func, (*args, *kwargs.values()), result) if formula is None else 0.0
            if self.is_forward:
                call.flops, call.moved = call.flops + flops, call.moved + moved
            else:
                call.backward_flops, call.backward_moved = call.backward_flops + flops, call.backward_moved + moved
        if self.is_forward:
            self._make(func.overloadpacket.__name__, inputs, result)
        return result

    def _find_call_of_node(self) -> int:
        """Return the call that made the autograd node that runs."""
        node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
        if node is None:
            return len(self.calls) - 1
        return max(0, bisect.bisect_right(self._first, node._sequence_nr()) - 1)

    def _read(self, inputs: Sequence[torch.Tensor]) -> None:
        call = len(self.calls) - 1
        for tensor in inputs:
            key = _view(tensor)
            reached = self._reached.get(key, self._made.get(key, call))
            if reached < call:
                size = tensor.numel() * tensor.element_size()
                self.steps[reached + 1] += size
                self.steps[call + 1] -= size
                self._reached[key] = call

    def _make(self, name: str, inputs: Sequence[torch.Tensor], result: Any) -> None:
        places = {get_storage(tensor) for tensor in inputs}
        # a recurrent layer's first state is zero: what it computes of weights alone is an activation, of any input
        is_recurrent = any(isinstance(module, nn.RNNBase) for module in self.running)
        # these functions read the shape only
        takes_size = "like" in name or "new_" in name
        of_input = is_recurrent or (not takes_size and not places.isdisjoint(self._given))
        sources = frozenset().union(*(self._sources.get(place, ()) for place in places))
        for tensor in iterate_tensors((result,)):
            key, place = _view(tensor), get_storage(tensor)
            self._made[key] = max(0, len(self.calls) - 1)
            self._reached.pop(key, None)
            self._held.append(tensor)
            if of_input:
                self._given.add(place)
                if place not in self._own:
                    self._sources.pop(place, None)
            elif sources and place not in self._given and place not in self._own:
                self._sources[place] = sources


def observe_execution(model: nn.Module, example: Any, counted: bool = False) -> Observation:
    """Observe the order in which all modules run; `counted`: with what each costs.

    One forward is observed in evaluation mode, in which nothing is left to chance (stochastic depth), and, where modules did
    not run there, one in training mode, which counts if it runs more (auxiliary heads).
    """
    seen = _observe(model, example, False, counted)
    can_run = {name for name, m in model.named_modules() if type(m).forward is not nn.Module.forward}
    if can_run - set(seen.runs):
        more = _observe(model, example, True, False)
        if set(more.runs) - set(seen.runs):
            seen = _observe(model, example, True, counted) if counted else more
    return seen


def _observe(model: nn.Module, example: Any, training: bool, counted: bool) -> Observation:
    """Observe one forward, and its backward if `counted`; the model is left as it was.

    BatchNorm stays in evaluation mode: in training it refuses an example of one value a channel.
    """

    x = clone_tensors(example)
    with undisturbed(model), move_to_meta(model) if get_first_tensor(x).is_meta else contextlib.nullcontext():
        model.train(training)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.training = False
        return observe_costs(model, x, lambda: call_model(model, x), counted)


def find_running_ancestor(name: str, at_call: Mapping[str, int]) -> str:
    """Return the nearest module around `name` (itself included) that runs: it computes with the parameters of `name`."""
    while name not in at_call:
        name = name.rpartition(".")[0]
    return name


def join_name(module: str, name: str) -> str:
    """Return a name in the model of what a module calls `name`."""
    return f"{module}.{name}" if module else name


class WeightUse(NamedTuple):
    """A use of a weight: index of the call by then, that of its module's first run, which is another one where the module runs
    again, and the weight's name there."""

    call: int
    first: int
    name: str


def find_weight_uses(model: nn.Module, seen: Observation) -> Dict[str, List[WeightUse]]:
    """Return the uses of every parameter: by the nearest running module around it, again where that runs again, and by modules
    in which no other runs, which hold another's and compute with it."""
    order = {call.name: i for i, call in enumerate(seen.calls)}
    names = {id(p): name for name, p in model.named_parameters()}
    uses: Dict[str, List[WeightUse]] = {name: [] for name in names.values()}
    owned: Dict[str, List[Tuple[str, str]]] = {}  # running module -> (weight, its name there)
    known: Set[int] = set()
    for module, owner in model.named_modules(remove_duplicate=False):
        user = find_running_ancestor(module, order)
        if id(owner) in known and not seen.calls[order[user]].alone:
            continue
        for name, parameter in owner.named_parameters(module, recurse=False):
            weight = names[id(parameter)]
            uses[weight].append(WeightUse(order[user], order[user], name))
            if id(owner) not in known:
                owned.setdefault(user, []).append((weight, name))
        known.add(id(owner))
    ran: Set[str] = set()
    reached = 0
    for module in seen.runs:
        reached = max(reached, order[module])
        for weight, name in owned.get(module, ()) if module in ran else ():
            uses[weight].append(WeightUse(reached, order[module], name))
        ran.add(module)
    return uses


def group_weights(model: nn.Module, calls: List[ModuleCall]) -> List[Tuple[ModuleCall, List[str]]]:
    """Return (module that runs, parameter names) of each weight in the order of execution, a bias joined to the previous
    weight."""
    order = {call.name: i for i, call in enumerate(calls)}
    owned: List[List[List[str]]] = [[] for _ in calls]
    for module, owner in model.named_modules():
        for name, _ in owner.named_parameters(module, recurse=False):
            groups = owned[order[find_running_ancestor(module, order)]]
            if groups and "bias" in name.rpartition(".")[2] and groups[-1][0].rpartition(".")[0] == module:
                groups[-1].append(name)
            else:
                groups.append([name])
    return [(call, group) for call, groups in zip(calls, owned) for group in groups]


def find_unkeyed_draws(model: nn.Module, device: torch.device) -> List[str]:
    """Return the names of the modules that draw from a state of their own, which no seed of a microbatch reaches: cuDNN's
    recurrent layers keep one for the dropout between their layers."""
    if device.type != "cuda":
        return []
    modules = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.RNNBase)]
    return [name for name, m in modules if m.dropout > 0 and m.num_layers > 1]
