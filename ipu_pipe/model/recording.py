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
from typing import Any, Dict, Iterator, List, Sequence, Tuple

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ipu_pipe.errors import BadInput
from ipu_pipe.model.arguments import Arguments
from ipu_pipe.model.calling import call
from ipu_pipe.model.execution import full_name
from ipu_pipe.model.liveness import Liveness
from ipu_pipe.model.observation import modules_around
from ipu_pipe.model.randomness import generators
from ipu_pipe.model.recorded import Node, Place, Recorded, State, autocast_blocks, operation_name, state_now
from ipu_pipe.model.templates import Constant, Template, leaves_of, tensors_of

READS = {"tolist", "numpy", "__array__", "__dlpack__"}  # what gives Python a tensor's values without an operation
KEPT = {"register_hook", "retain_grad"}  # recorded although they give no tensor


class Recorder(TorchFunctionMode):
    """Watches one forward. `begins`: the modules at which stages 1 and on begin; those around them are no calls of their own."""

    def __init__(self, model: nn.Module, begins: Sequence[str], x: Any) -> None:
        super().__init__()
        self.found, self._place = Recorded(base=State(torch.is_grad_enabled())), Place(model)
        self._stages = len(begins)
        self._begins = {id(model.get_submodule(name)): (name, s) for s, name in enumerate(begins, 1)}
        self._around = {id(model.get_submodule(name)) for name in around(begins)}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._inside, self._quiet = 0, 0  # of recorded calls; of what this does itself
        self._has_read = False  # the module that runs, a tensor's values
        inputs, weights = tensors_of(x), [*model.parameters(), *model.buffers()]
        self._drawing = generators(inputs[0].device if inputs else torch.device("cpu"))
        self._before = self._drawn()  # the module that runs
        self.liveness = Liveness(weights, inputs, self._refuse_read, self._refuse_hidden)
        self.found.weights.update([*model.named_parameters(), *model.named_buffers()])
        self._arguments = Arguments(self.found, self._place, self.liveness)
        self._outside = autocast_blocks()
        self._called = self._add(None, Constant(()), Constant({}), state_now(self._outside))
        self._arguments.given(self._called, x)

    def _add(self, target: Any, args: Template, keywords: Template, state: State) -> Node:
        node = Node(len(self.found.nodes), self._place.stage, target, args, keywords, state)
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
        """What a module gives besides tensors is the recording's each time: it may not come from values, or from chance."""
        others = [leaf for leaf in leaves_of(output) if not (leaf is None or isinstance(leaf, torch.Tensor))]
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
            self._has_read |= getattr(func, "__name__", "") in READS
            return func(*args, **kwargs)
        if func is torch.Tensor.__iter__:
            return iter(self._function(torch.Tensor.unbind, args, {}))
        return self._function(func, args, kwargs)

    def _function(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = operation_name(func)
        if any(map(_is_wrapped, tensors_of((args, kwargs)))):
            self._place.refuse(name, "it runs inside of torch.func (vmap, grad): put that into a module of its own")
        if name in READS and self.liveness.is_live(args[0]):
            self._refuse_read(name)
        drawn, state = self._drawn(), state_now(self._outside)
        self.liveness.begin()
        result = func(*args, **kwargs)
        gives = bool(tensors_of(result))
        if not gives and not (result is None and tensors_of((args, kwargs))) and name not in KEPT:
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
        """A module begins to run."""
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
        self._called = self._add(name, *taken, state_now(self._outside))
        self._has_read, self._before = False, self._drawn()
        self.liveness.begin()
        self._quiet -= 1
        self._inside += 1

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A module has run."""
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

    def finish(self, output: Any) -> Recorded:
        """The model has given its output."""
        if self._place.stage != self._stages:
            late = next(name for name, stage in self._begins.values() if stage > self._place.stage)
            raise BadInput(f"stages: {late}: does not run in this forward after the stages before: no stage can begin there")
        self.found.output = self._arguments.taken(output)
        self.found.settle(self.liveness.is_live)
        return self.found


def around(begins: Sequence[str]) -> List[str]:
    """Names of the modules around boundaries."""
    return list(dict.fromkeys(name for begin in begins for name in modules_around(begin)))


def _is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether it stands for others, inside of a transformation of torch.func."""
    return bool(torch._C._functorch.is_batchedtensor(tensor) or torch._C._functorch.is_gradtrackingtensor(tensor))


def _counters(model: nn.Module, begins: Sequence[str]) -> Dict[str, Any]:
    """Numbers that the modules around cuts have as attributes."""
    owners = [(name, model.get_submodule(name)) for name in around(begins)]
    return {full_name(n, own): v for n, o in owners for own, v in vars(o).items() if type(v) in (int, float)}


def _random_states() -> Any:
    """Python's and numpy's own."""
    return random.getstate(), pickle.dumps(np.random.get_state())


def _buffers(model: nn.Module, begins: Sequence[str]) -> Dict[str, Any]:
    """Of the modules around cuts."""
    owners = [(name, model.get_submodule(name)) for name in around(begins)]
    return {full_name(name, own): tensor for name, owner in owners for own, tensor in owner._buffers.items()}


def _refuse_hooks(model: nn.Module, begins: Sequence[str]) -> None:
    """Hooks on modules around cuts: these are not called by the pieces."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for name in around(begins):
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
        for table, held in zip(tables, hooks):
            table.update(held)


class ReadsValues(BadInput):
    """The forward reads a tensor's values where it is cut."""


def record(model: nn.Module, begins: Sequence[str], x: Any, traced: bool) -> Tuple[Recorded, Liveness]:
    """Record one forward of input `x`, which it may overwrite, in the mode in which the model is; `traced`: with
    `torch.jit.is_tracing` true, for which models leave out branches on values. Raises BadInput."""
    _refuse_hooks(model, begins)
    drawn, buffers, counters = _random_states(), _buffers(model, begins), _counters(model, begins)
    recorder = Recorder(model, begins, x)
    with _watched(model, recorder, traced):
        output = call(model, x)
    found = recorder.finish(output)
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
    return found, recorder.liveness
