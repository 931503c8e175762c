"""One pass of a model watched, operation by operation: in which order its modules run, and what each costs.

A *call* is a module's first run; what happens from there to the next module's first run is the call's: FLOPs of the forward and,
by the autograd nodes that this makes, of the backward; what is saved for the backward; tensors that are made. So every way to cut
the calls into stages is answered from one pass:

    calls      conv1    norm1    relu     conv2     ...
    live            c1       n1       r1             bytes that cross if a stage ends here: all that was made before and is read
                                                     behind, the model's input too where it is
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Sequence, Tuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from ipu_pipe.errors import BadInput
from ipu_pipe.model.batch import call_model, clone_tensors, iterate_tensors, list_tensors
from ipu_pipe.model.flops import BACKWARD, FlopCounterMode, count_by_formula, get_formulas, separate_attention
from ipu_pipe.model.meta import is_faster_on_meta, move_to_meta, to_meta
from ipu_pipe.model.precision import is_cast, uncast_temporarily
from ipu_pipe.model.restoring import undisturbed


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


@dataclass
class Observation:
    """What one pass showed: `runs`, names of all runs of modules in order, repeats too; `live[k]`, bytes that cross if a stage
    begins with call k; `backward`: whether that of the pass could be run."""

    calls: List[ModuleCall]
    runs: List[str]
    live: List[int] = field(default_factory=list)
    backward: bool = False

    def by_stage(self, stage_of: Mapping[str, int], count: int) -> List[List[ModuleCall]]:
        """Return the calls of each of `count` stages."""
        stages: List[List[ModuleCall]] = [[] for _ in range(count)]
        for call in self.calls:
            stages[stage_of[call.name]].append(call)
        return stages

    def crossing(self, stage_of: Mapping[str, int], count: int) -> List[int]:
        """Return the bytes that cross each of the boundaries of `count` stages."""
        sizes = [0] * (count - 1)
        before = 0
        for call, size in zip(self.calls, self.live):
            for boundary in range(before, stage_of[call.name]):
                sizes[boundary] = size
            before = max(before, stage_of[call.name])
        return sizes


def count_saved_bytes(calls: Sequence[ModuleCall]) -> int:
    """Return the bytes that `calls` together keep for the backward, each storage once."""
    return sum({storage: size for call in calls for storage, size in call.saved.items()}.values())


def observe_order(model: nn.Module, x: Any, forward: Callable[[], Any]) -> Observation:
    """Observe only the order of modules in `forward`, a pass of the model's input `x`. Gradients may be asked for inside."""
    with _calls(model, lambda: None) as seen, torch.enable_grad():
        forward()
    return seen


def observe_costs(model: nn.Module, x: Any, forward: Callable[[], Any]) -> Observation:
    """Observe all of `forward`, a pass of the model's input `x` that returns a loss or outputs, and of its backward."""
    weights = {get_storage(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    counter = _Counter(x)
    with _calls(model, counter.begin) as seen, separate_attention(), torch.enable_grad():
        counter.calls = seen.calls

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            place = get_storage(tensor)
            if seen.calls and place not in weights:
                seen.calls[-1].saved[place] = _bytes(tensor)
                counter.held.append(tensor.detach())
            return tensor.detach()  # the tensor itself would be a cycle that is never freed

        with counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            results = [t for t in tree_flatten(forward())[0] if isinstance(t, torch.Tensor) and t.requires_grad]
        seen.live = counter.live()
        counter.forward = False
        trained = [p for p in model.parameters() if p.requires_grad]
        try:
            if results and trained:
                # of one number PyTorch makes it itself, without its symbolic algebra
                gradients = [None if t.numel() == 1 else torch.ones_like(t) for t in results]
                with counter:
                    torch.autograd.grad(results, trained, gradients, allow_unused=True)
            seen.backward = True
        except Exception:  # whatever the user's model raises: it is told where it trains
            if any(t.is_meta for t in results):
                raise
    if FlopCounterMode is None:
        for call in seen.calls:
            call.backward_flops = BACKWARD * call.flops
    return seen


@contextlib.contextmanager
def _calls(model: nn.Module, begun: Callable[[], None]) -> Iterator[Observation]:
    """Record the calls of modules that run inside; `begun` is called at the beginning of each."""
    names = {id(module): name for name, module in model.named_modules()}
    seen = Observation([], [])
    at: Dict[str, ModuleCall] = {}

    def before(module: nn.Module, inputs: Any, keywords: Any) -> None:
        name = names[id(module)]
        seen.runs.append(name)
        if name not in at:
            owns_weights = any(True for _ in module.parameters(recurse=False))
            at[name] = ModuleCall(name, module, owns_weights)
            seen.calls.append(at[name])
            begun()

    def after(module: nn.Module, inputs: Any, keywords: Any, output: Any) -> None:
        at[names[id(module)]].flops += count_by_formula(module, [*inputs, *keywords.values()], output)

    handles = [m.register_forward_pre_hook(before, with_kwargs=True) for m in model.modules()]
    if FlopCounterMode is None:
        handles += [m.register_forward_hook(after, with_kwargs=True) for m in model.modules()]
    try:
        yield seen
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


class _Counter(TorchDispatchMode):
    """Sees every operation of a forward, and of its backward."""

    def __init__(self, x: Any) -> None:
        super().__init__()
        self.calls: List[ModuleCall] = []
        self.held: List[torch.Tensor] = list_tensors(x)  # so that a storage's number stays its own
        self.forward = True
        self._formulas = get_formulas()
        self._first: List[int] = []  # autograd node of each call
        self._made: Dict[Any, int] = {_view(t): 0 for t in self.held}  # call in which a tensor is made
        self._reached: Dict[Any, int] = {}  # the last that reads it
        self._steps = [0]  # by how much more bytes cross before each call than before the one before

    def begin(self) -> None:
        """Note that a call begins."""
        self._steps.append(0)
        if self._formulas:
            self._first.append(torch._C._autograd._get_sequence_nr())  # type: ignore[attr-defined]

    def live(self) -> List[int]:
        """Return the bytes that cross before each call."""
        return list(itertools.accumulate(self._steps))[: len(self.calls)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = self._formulas.get(func.overloadpacket)
        if formula is None and torch.is_inference_mode_enabled():  # functions come whole then
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if self.forward:
            self._read(args, kwargs)
        result = func(*args, **kwargs)
        if self.calls and self._formulas:
            call = self.calls[-1] if self.forward else self.calls[self._of_node()]
            flops = 0.0 if formula is None else float(formula(*args, **kwargs, out_val=result))
            moved = _moved(func, (*args, *kwargs.values()), result) if formula is None else 0.0
            if self.forward:
                call.flops, call.moved = call.flops + flops, call.moved + moved
            else:
                call.backward_flops, call.backward_moved = call.backward_flops + flops, call.backward_moved + moved
        if self.forward:
            self._make(result)
        return result

    def _of_node(self) -> int:
        """Return the call that made the autograd node that runs."""
        node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
        if node is None:
            return len(self.calls) - 1
        return max(0, bisect.bisect_right(self._first, node._sequence_nr()) - 1)

    def _read(self, args: Any, kwargs: Any) -> None:
        call = len(self.calls) - 1
        for tensor in iterate_tensors((*args, *kwargs.values())):
            key = _view(tensor)
            reached = self._reached.get(key, self._made.get(key, call))
            if reached < call:
                size = tensor.numel() * tensor.element_size()
                self._steps[reached + 1] += size
                self._steps[call + 1] -= size
                self._reached[key] = call

    def _make(self, result: Any) -> None:
        for tensor in iterate_tensors((result,)):
            key = _view(tensor)
            self._made[key] = max(0, len(self.calls) - 1)
            self._reached.pop(key, None)
            self.held.append(tensor)


def observe_execution(model: nn.Module, example: Any, counted: bool = False) -> Tuple[List[ModuleCall], List[str]]:
    """Return the first runs of all modules in order, and the names of all runs; `counted`: with what each costs.

    One forward is observed in evaluation mode, in which nothing is left to chance (stochastic depth), and one in training mode,
    which counts if it runs more modules (auxiliary heads): on the meta device if the model can run there.
    """
    seen = _observe(model, example, False, counted)
    more = _observe(model, example, True, False)
    if set(more.runs) - set(seen.runs):
        seen = _observe(model, example, True, counted) if counted else more
    return seen.calls, seen.runs


def _observe(model: nn.Module, example: Any, training: bool, counted: bool) -> Observation:
    observe = observe_costs if counted else observe_order

    def run(x: Any) -> Observation:
        return observe(model, x, lambda: _run_quietly(model, x, training))

    def run_anywhere() -> Observation:
        if is_faster_on_meta(model, example):
            try:
                with move_to_meta(model):
                    return run(to_meta(example))
            except Exception:  # its forward looks at values: what the user's code raises then may be anything
                pass
        return run(example)

    try:
        with uncast_temporarily(model):
            return run_anywhere()
    except Exception:  # it may have a block of its own, whose bfloat16 goes on to layers that count on ours
        if not is_cast(model):
            raise
        return run_anywhere()


def _run_quietly(model: nn.Module, example: Any, training: bool) -> Any:
    """Run one forward and leave weights, buffers, modes and random states as they were.

    BatchNorm stays in evaluation mode: in training it refuses an example of one value a channel.
    """
    with undisturbed(model):
        model.train(training)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.training = False
        return call_model(model, clone_tensors(example))


def check_runs_modules(calls: List[ModuleCall]) -> None:
    if not any(call.works for call in calls):
        raise BadInput("model: no module of it runs in forward: nothing to divide into stages")


def find_running_ancestor(name: str, at_call: Mapping[str, int]) -> str:
    """Return the nearest module around `name` (itself included) that runs: it computes with the parameters of `name`."""
    while name not in at_call:
        name = name.rpartition(".")[0]
    return name


def join_name(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def list_parameters(model: nn.Module) -> Iterable[Tuple[str, str, nn.Parameter]]:
    """Iterate over (module name, parameter's own name, parameter), shared ones once for every owner."""
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield module_name, name, parameter


def group_weights(model: nn.Module, calls: List[ModuleCall]) -> List[Tuple[ModuleCall, List[str]]]:
    """Return (module that runs, parameter names) of each weight in the order of execution, a bias joined to the previous
    weight."""
    order = {call.name: call for call in calls}
    at_call = dict.fromkeys(order, 0)
    owned: Dict[str, List[List[str]]] = {}
    for module, name, _ in list_parameters(model):
        groups = owned.setdefault(find_running_ancestor(module, at_call), [])
        if groups and "bias" in name and groups[-1][0].rpartition(".")[0] == module:
            groups[-1].append(join_name(module, name))
        else:
            groups.append([join_name(module, name)])
    return [(call, group) for call in calls for group in owned.get(call.name, [])]
