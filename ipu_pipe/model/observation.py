"""Observe a model's passes before training, operation by operation: order of modules, FLOPs, saved
and crossing bytes, effects.

A *call* is a module's first run. Everything until the next module's first run counts for the call:
the FLOPs of the forward and (by the autograd nodes made there) of the backward, the tensors saved
for the backward, and the tensors made. So one pass gives the costs of every way to cut the calls
into stages:

    calls      conv1    norm1    relu     conv2     ...
    live            c1       n1       r1             bytes that cross if a stage ends here: tensors that are made before and
                                                     read after, including the model's input

A training forward also shows its effects on the model (`ForwardEffects`), and the weights of which
it saves derived values. All functions here leave weights, buffers, gradients, modes and random
states as they were.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from dataclasses import dataclass, field
from typing import Any, Callable, Container, Iterator, Mapping, NamedTuple, Sequence

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from ipu_pipe.model.batch import (
    call_model,
    clone_tensors,
    count_bytes,
    get_first_tensor,
    list_tensors,
)
from ipu_pipe.model.flops import (
    BACKWARD,
    FlopCounterMode,
    count_by_formula,
    get_formulas,
    separate_attention,
)
from ipu_pipe.model.meta import move_to_meta
from ipu_pipe.model.modes import set_mode
from ipu_pipe.model.randomness import list_generators
from ipu_pipe.model.restoring import restore_all
from ipu_pipe.model.watching import OperationWatch


@dataclass
class ModuleCall:
    """A module's first run, with the costs from there to the next module's first run.

    `computes`: the module computes something itself, because none of its children runs or it owns
    parameters. `is_leaf`: none of its children runs. `moved`: the bytes that operations without
    FLOPs read and write. `saved`: storage kept for the backward (not weights) -> its bytes.
    """

    name: str
    module: nn.Module
    computes: bool
    is_leaf: bool = True
    flops: float = 0.0
    backward_flops: float = 0.0
    moved: float = 0.0
    backward_moved: float = 0.0
    saved: dict[int, int] = field(default_factory=dict)


class ForwardEffects(NamedTuple):
    """The side effects of a training forward.

    draws: module whose own forward draws random numbers (dropout and the like) -> number of its
    runs
    buffers: names of the buffers that it changes, except BatchNorm's, which a training forward does
    not read
    weights: names of the weights that it writes (max_norm of an embedding)
    """

    draws: dict[str, int] = {}
    buffers: Sequence[str] = ()
    weights: Sequence[str] = ()


@dataclass
class Observation:
    """The result of observing one pass.

    `runs`: names of all runs of modules in order, with repetitions. `live[k]`: bytes that cross if
    a stage begins with call k. `backward`: whether the backward could run. `derived`: names of
    parameters from which the forward derives a tensor, without the input, that it saves for the
    backward. A backward that reads newer weights finds them in the parameters' own storage, but a
    tensor derived from a weight alone (`w * 1`, weight norm, InstanceNorm's repeated scale,
    autocast's low-precision copy) keeps the old values, and the method would silently be another
    one. `last_running`: the modules that run when the last call begins. `unread`: names of the
    weights that no operation of a forward reads (`find_home`); only `observe_execution` finds them.
    """

    calls: list[ModuleCall] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    backward: bool = False
    derived: list[str] = field(default_factory=list)
    effects: ForwardEffects = ForwardEffects()
    last_running: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)


def count_saved_bytes(calls: Sequence[ModuleCall]) -> int:
    """Return the bytes that `calls` together save for the backward, counting each storage once."""
    return sum({storage: size for call in calls for storage, size in call.saved.items()}.values())


def observe_costs(
    model: nn.Module, x: Any, forward: Callable[[], Any], counted: bool = True
) -> Observation:
    """Observe `forward`, a pass on the model's input `x` that returns a loss or outputs, and its
    backward.

    Without `counted` observe only the order of modules.
    """
    observation = Observation()
    if not counted:
        with _watch_calls(model, observation, []), torch.enable_grad():
            forward()
        return observation
    counter = _Counter(model, x, observation.calls)
    with separate_attention(), torch.enable_grad():
        with _watch_calls(model, observation, counter.running, counter.begin), OperationWatch(
            counter.run
        ):
            with torch.autograd.graph.saved_tensors_hooks(counter.save, lambda tensor: tensor):
                results = [
                    t
                    for t in tree_flatten(forward())[0]
                    if isinstance(t, torch.Tensor) and t.requires_grad
                ]
        # the last difference lies behind the last call
        observation.live = list(itertools.accumulate(counter.live_changes))[
            : len(observation.calls)
        ]
        observation.derived = [
            name for name, _ in model.named_parameters() if name in counter.derived
        ]
        counter.is_forward = False
        trained = [p for p in model.parameters() if p.requires_grad]
        try:
            if results and trained:
                # PyTorch makes the gradient of one number itself, without importing its symbolic
                # algebra
                gradients = [None if t.numel() == 1 else torch.ones_like(t) for t in results]
                with OperationWatch(counter.run):
                    torch.autograd.grad(results, trained, gradients, allow_unused=True)
            observation.backward = True
        # the user's model may raise anything; training reports it with its place
        except Exception:
            # meta tensors fail where values are read: the caller tries real ones
            if any(t.is_meta for t in results):
                raise
    if FlopCounterMode is None:
        for call in observation.calls:
            call.backward_flops = BACKWARD * call.flops
    return observation


def observe_training(
    model: nn.Module, x: Any, y: Any, run: Callable[[Any, Any], Any]
) -> Observation:
    """Observe a training pass of one microbatch, its backward and its effects. `run(x, y)` returns
    the loss.
    """
    if get_first_tensor(x).is_meta:
        with move_to_meta(model):
            return observe_costs(model, x, lambda: run(x, y))
    # a model and a loss may write to what they get
    a = clone_tensors(x)
    labels = clone_tensors(y)
    with restore_all(model), _watch_effects(model, get_first_tensor(x).device) as read_effects:
        observation = observe_costs(model, a, lambda: run(a, labels))
        observation.effects = read_effects()
    return observation


def observe_effects(model: nn.Module, x: Any) -> ForwardEffects:
    """Run one training forward of `x` and return its effects; the model is left as it was."""
    with restore_all(model), _watch_effects(model, get_first_tensor(x).device) as read_effects:
        set_mode(model, training=True)
        call_model(model, clone_tensors(x))
        return read_effects()


@contextlib.contextmanager
def _watch_effects(
    model: nn.Module, device: torch.device
) -> Iterator[Callable[[], ForwardEffects]]:
    """Watch the forward inside the context; the yielded function returns its effects."""
    names = {id(module): name for name, module in model.named_modules()}
    norms = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
    }
    drawn: set[str] = set()
    runs: dict[str, int] = {}
    generators = list_generators(device)
    states: list[list[torch.Tensor]] = []

    def begin_module(module: nn.Module, inputs: Any) -> None:
        # do not count the second forward of activation checkpointing
        if torch._C._current_graph_task_id() == -1:
            runs[names[id(module)]] = runs.get(names[id(module)], 0) + 1
        states.append([generator.get_state() for generator in generators])

    def end_module(module: nn.Module, inputs: Any, output: Any) -> None:
        start = states.pop()
        if not all(
            torch.equal(a, generator.get_state()) for a, generator in zip(start, generators)
        ):
            drawn.add(names[id(module)])
            # a module around this one counts as drawing only if its own forward draws
            for generator, state in zip(generators, start):
                generator.set_state(state)

    buffers = {
        name: t.clone() for name, t in model.named_buffers() if name.rpartition(".")[0] not in norms
    }
    weights = [
        (name, p, p.detach().clone()) for name, p in model.named_parameters() if not p.is_meta
    ]

    def read() -> ForwardEffects:
        # asked again: a forward may bind another tensor to a buffer's name
        now = dict(model.named_buffers())
        changed = [
            name
            for name, value in buffers.items()
            if name in now and not has_equal_values(now[name], value)
        ]
        written = [name for name, p, value in weights if not has_equal_values(p, value)]
        return ForwardEffects({name: runs[name] for name in sorted(drawn)}, changed, written)

    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_pre_hook(begin_module))
            hooks.enter_context(module.register_forward_hook(end_module))
        yield read


def has_equal_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two tensors have one shape and the same values, where NaN equals NaN. Meta
    tensors count as equal.
    """
    return a.is_meta or a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


@contextlib.contextmanager
def _watch_calls(
    model: nn.Module,
    observation: Observation,
    running: list[nn.Module],
    on_call: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Add the calls inside the context to `observation`; `running` lists the running modules, the
    innermost last.

    `on_call` is called at the beginning of each call.
    """
    names = {id(module): name for name, module in model.named_modules()}
    call_by_name: dict[str, ModuleCall] = {}

    def begin_module(module: nn.Module, inputs: Any, keywords: Any) -> None:
        name = names[id(module)]
        running.append(module)
        # no stage can begin at a module that the loss calls: its costs count for the last call
        if running[0] is not model:
            return
        observation.runs.append(name)
        if name not in call_by_name:
            owns_weights = any(True for _ in module.parameters(recurse=False))
            call_by_name[name] = ModuleCall(name, module, owns_weights)
            observation.calls.append(call_by_name[name])
            observation.last_running = [names[id(m)] for m in running]
            on_call()

    def end_module(module: nn.Module, inputs: Any, keywords: Any, output: Any) -> None:
        running.pop()
        if FlopCounterMode is None:
            call = call_by_name.get(names[id(module)], observation.calls[-1])
            call.flops += count_by_formula(module, [*inputs, *keywords.values()], output)

    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_pre_hook(begin_module, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(end_module, with_kwargs=True))
        yield
    outer_modules = {outer for name in call_by_name for outer in list_ancestors(name)}
    for call in observation.calls:
        call.is_leaf = call.name not in outer_modules
        call.computes = call.computes or call.is_leaf


def list_ancestors(name: str) -> list[str]:
    """Return the names of the modules around a module, the model's own ("") and the outermost
    first.
    """
    parts = name.split(".") if name else []
    return [".".join(parts[:n]) for n in range(len(parts))]


def get_storage(tensor: torch.Tensor) -> int:
    """Return a number that tensors in the same memory share."""
    # not data_ptr(), which is 0 for every meta tensor
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)


def list_at_one_address(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return the names of different tensors in one memory, such as views of one weight, a list for
    each memory.
    """
    names_by_address: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        # the address, since views of one storage may lie beside one another; a shard is a DTensor
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        names_by_address.setdefault(local.data_ptr(), []).append(name)
    # meta tensors and empty ones have no address
    names_by_address.pop(0, None)
    return [names for names in names_by_address.values() if len(names) > 1]


def _count_storage_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's whole storage."""
    dense = tensor.layout is torch.strided
    return (
        int(tensor.untyped_storage().nbytes()) if dense else tensor.numel() * tensor.element_size()
    )


def _make_view_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that two tensors share if they are the same view of one storage."""
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    return (
        get_storage(tensor),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
    )


TAKES_MEMORY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


def _count_moved_bytes(operation: Any, arguments: Any, result: Any) -> float:
    """Return the bytes that an operation reads and writes, each tensor once; 0 for views and
    allocations.
    """
    # an operation in place returns an alias, too, but one that it writes
    is_view = any(
        r.alias_info is not None and not r.alias_info.is_write for r in operation._schema.returns
    )
    if is_view or operation.overloadpacket.__name__ in TAKES_MEMORY:
        return 0.0
    # an expanded tensor has more elements than its storage
    return float(
        sum(
            min(_count_storage_bytes(t), count_bytes(t)) for t in list_tensors((*arguments, result))
        )
    )


class _Counter:
    """Count the operations of a forward and its backward, and track the storages of the forward."""

    def __init__(self, model: nn.Module, x: Any, calls: list[ModuleCall]) -> None:
        self.calls = calls
        self.running: list[nn.Module] = []
        self.is_forward = True
        # the differences of `Observation.live`
        self.live_changes = [0]
        # parameters of which the forward saves derived values
        self.derived: set[str] = set()
        # storage numbers are not reused while these tensors are referenced
        self._alive: list[torch.Tensor] = list_tensors(x)
        self._formulas = get_formulas()
        # the number of the first autograd node of each call
        self._first_nodes: list[int] = []
        # the call that makes a tensor, and the last call so far that reads it
        self._making_call: dict[Any, int] = {_make_view_key(t): 0 for t in self._alive}
        self._last_read: dict[Any, int] = {}
        self._weight_storages = {get_storage(t) for t in [*model.parameters(), *model.buffers()]}
        # storage -> the parameters from which alone its values are derived
        self._source_weights: dict[int, frozenset[str]] = {
            get_storage(p): frozenset([name]) for name, p in model.named_parameters()
        }
        # storages that depend on the input
        self._input_storages = {get_storage(t) for t in self._alive}

    def begin(self) -> None:
        """Begin a new call."""
        self.live_changes.append(0)
        if self._formulas:
            self._first_nodes.append(torch._C._autograd._get_sequence_nr())  # type: ignore[attr-defined]

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that is saved for the backward; weights and buffers are in memory
        anyway.
        """
        storage = get_storage(tensor)
        if self.calls and storage not in self._weight_storages:
            self.calls[-1].saved[storage] = _count_storage_bytes(tensor)
            self._alive.append(tensor.detach())
            if tensor.is_floating_point():
                self.derived |= self._source_weights.get(storage, frozenset())
        # returning the tensor itself would make a cycle that is never freed
        return tensor.detach()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation and count it for its call."""
        formula = self._formulas.get(func.overloadpacket)
        # in inference mode composite functions arrive undivided
        is_composite = formula is None or func.overloadpacket is torch.ops.aten.linear
        if is_composite and torch.is_inference_mode_enabled():
            with OperationWatch(self.run):
                result = func.decompose(*args, **kwargs)
            # NotImplemented: it is not composed of others
            if result is not NotImplemented:
                return result
        inputs = list_tensors((*args, *kwargs.values()))
        if self.is_forward:
            self._track_reads(inputs)
        result = func(*args, **kwargs)
        if self.calls and self._formulas:
            call = self.calls[-1] if self.is_forward else self.calls[self._find_call_of_node()]
            flops = 0.0 if formula is None else float(formula(*args, **kwargs, out_val=result))
            moved = (
                _count_moved_bytes(func, (*args, *kwargs.values()), result)
                if formula is None
                else 0.0
            )
            if self.is_forward:
                call.flops = call.flops + flops
                call.moved = call.moved + moved
            else:
                call.backward_flops = call.backward_flops + flops
                call.backward_moved = call.backward_moved + moved
        if self.is_forward:
            self._track_results(func.overloadpacket.__name__, inputs, result)
        return result

    def _find_call_of_node(self) -> int:
        """Return the call that made the autograd node that is running."""
        node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
        if node is None:
            return len(self.calls) - 1
        return max(0, bisect.bisect_right(self._first_nodes, node._sequence_nr()) - 1)

    def _track_reads(self, inputs: Sequence[torch.Tensor]) -> None:
        call = len(self.calls) - 1
        for tensor in inputs:
            key = _make_view_key(tensor)
            last_read = self._last_read.get(key, self._making_call.get(key, call))
            # the tensor crosses every boundary between its last reader, or its maker, and this call
            if last_read < call:
                size = tensor.numel() * tensor.element_size()
                self.live_changes[last_read + 1] += size
                self.live_changes[call + 1] -= size
                self._last_read[key] = call

    def _track_results(self, name: str, inputs: Sequence[torch.Tensor], result: Any) -> None:
        storages = {get_storage(tensor) for tensor in inputs}
        # a recurrent layer's first state is zero, so results of weights alone are activations there
        is_recurrent = any(isinstance(module, nn.RNNBase) for module in self.running)
        # these functions read only the shape
        reads_only_shape = "like" in name or "new_" in name
        of_input = is_recurrent or (
            not reads_only_shape and not storages.isdisjoint(self._input_storages)
        )
        weights = frozenset().union(
            *(self._source_weights.get(storage, ()) for storage in storages)
        )
        for tensor in list_tensors(result):
            key = _make_view_key(tensor)
            storage = get_storage(tensor)
            self._making_call[key] = max(0, len(self.calls) - 1)
            # an operation in place makes its tensor anew, which crosses from here on
            self._last_read.pop(key, None)
            self._alive.append(tensor)
            if of_input:
                self._input_storages.add(storage)
                if storage not in self._weight_storages:
                    self._source_weights.pop(storage, None)
            elif (
                weights
                and storage not in self._input_storages
                and storage not in self._weight_storages
            ):
                self._source_weights[storage] = weights


def observe_execution(model: nn.Module, example: Any, counted: bool = False) -> Observation:
    """Observe the order in which all modules run; `counted`: with their costs.

    One forward runs in evaluation mode, which has no random depth. If modules did not run or
    weights were not read there, a second forward runs in training mode, and counts if it runs more
    modules (auxiliary heads).
    """
    observation = _observe(model, example, False, counted)
    # a container such as ModuleList has no forward of its own, and never runs
    can_run = {
        name for name, m in model.named_modules() if type(m).forward is not nn.Module.forward
    }
    if can_run - set(observation.runs) or observation.unread:
        more = _observe(model, example, True, False)
        unread = observation.unread & more.unread
        if set(more.runs) - set(observation.runs):
            observation = _observe(model, example, True, counted) if counted else more
        observation.unread = unread
    return observation


def _observe(model: nn.Module, example: Any, training: bool, counted: bool) -> Observation:
    """Observe one forward, and its backward if `counted`; the model is left as it was.

    BatchNorm stays in evaluation mode: in training it refuses an example of one value a channel.
    """

    x = clone_tensors(example)
    with restore_all(model), move_to_meta(model) if get_first_tensor(
        x
    ).is_meta else contextlib.nullcontext():
        set_mode(model, training)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.training = False
        # the forward may bind other tensors to these names
        named = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        read: set[int] = set()

        def note_reads(func: Any, args: Any, kwargs: Any) -> Any:
            read.update(get_storage(t) for t in list_tensors((*args, *kwargs.values())))
            return func(*args, **kwargs)

        def forward() -> Any:
            with OperationWatch(note_reads):
                return call_model(model, x)

        observation = observe_costs(model, x, forward, counted)
        order = {call.name: i for i, call in enumerate(observation.calls)}
        # a module that ends before the last call may read its weights in another forward, as a
        # mixture reads the experts that no token of this one reached
        observation.unread = {
            name
            for name, tensor in named
            if get_storage(tensor) not in read
            and find_running_ancestor(name, order) in observation.last_running
        }
        return observation


def find_running_ancestor(name: str, running: Mapping[str, int]) -> str:
    """Return the nearest module around `name`, or `name` itself, among the `running` modules."""
    # ends at "", the model itself, which runs first
    while name not in running:
        name = name.rpartition(".")[0]
    return name


def find_home(weight: str, homes: Mapping[str, int], unread: Container[str], last: int) -> int:
    """Return the stage, or the call, to which a parameter or buffer belongs.

    `homes`: running module -> the stage, or call, of its first run. A weight belongs to the nearest
    running module around it. But one that no operation of the forward reads (`unread`), such as a
    head that the loss calls, belongs to the `last`, where the loss runs.
    """
    return last if weight in unread else homes[find_running_ancestor(weight, homes)]


def join_name(module: str, name: str) -> str:
    """Return the name in the model of an attribute `name` of a module."""
    return f"{module}.{name}" if module else name


class WeightUse(NamedTuple):
    """A use of a weight.

    `call`: the index of the call at that time; `first`: the call of its module's first run, which
    differs if the module runs again; `name`: the weight's name in that module.
    """

    call: int
    first: int
    name: str


def find_weight_uses(model: nn.Module, observation: Observation) -> dict[str, list[WeightUse]]:
    """Return the uses of every parameter.

    A parameter is used by the nearest running module around it, at each of its runs, and by other
    modules that hold the same parameter, if no module runs inside them. One that the forward does
    not read counts as used in the last call.
    """
    order = {call.name: i for i, call in enumerate(observation.calls)}
    names = {id(p): name for name, p in model.named_parameters()}
    uses: dict[str, list[WeightUse]] = {name: [] for name in names.values()}
    owned: dict[str, list[tuple[str, str]]] = {}  # running module -> (weight, its name there)
    known: set[int] = set()
    for module, owner in model.named_modules(remove_duplicate=False):
        user = find_running_ancestor(module, order)
        if id(owner) in known and not observation.calls[order[user]].is_leaf:
            continue
        for name, parameter in owner.named_parameters(module, recurse=False):
            weight = names[id(parameter)]
            home = find_home(name, order, observation.unread, len(order) - 1)
            uses[weight].append(WeightUse(home, home, name))
            if id(owner) not in known:
                owned.setdefault(observation.calls[home].name, []).append((weight, name))
        known.add(id(owner))
    ran: set[str] = set()
    reached = 0
    for module in observation.runs:
        # calls are first runs: a repeated run lies in the newest call that was reached
        reached = max(reached, order[module])
        for weight, name in owned.get(module, ()) if module in ran else ():
            uses[weight].append(WeightUse(reached, order[module], name))
        ran.add(module)
    return uses


def group_weights(model: nn.Module, observation: Observation) -> list[tuple[ModuleCall, list[str]]]:
    """Return (running module, parameter names) of each weight in the order of execution; a bias
    joins the weight before it, and weights that the forward does not read join the last one.
    """
    calls = observation.calls
    order = {call.name: i for i, call in enumerate(calls)}
    owned: list[list[list[str]]] = [[] for _ in calls]
    unread: list[str] = []
    for module, owner in model.named_modules():
        for name, _ in owner.named_parameters(module, recurse=False):
            groups = owned[find_home(name, order, observation.unread, len(calls) - 1)]
            if name in observation.unread:
                unread.append(name)
            elif (
                groups
                and "bias" in name.rpartition(".")[2]
                and groups[-1][0].rpartition(".")[0] == module
            ):
                groups[-1].append(name)
            else:
                groups.append([name])
    weights = [(call, group) for call, groups in zip(calls, owned) for group in groups]
    if unread:
        # no stage can begin at them
        call, group = weights.pop() if weights else (calls[-1], [])
        weights.append((call, [*group, *unread]))
    return weights
