"""One look at a model before training: what its stages keep, what crosses their boundaries, what in it is random, and
whether a backward would see weights that were written after its forward.

Everything here runs the model on one microbatch and leaves weights, buffers, gradients, modes and random states as found.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from ipu_pipe.model.buffers import buffers_restored
from ipu_pipe.model.modes import modes_restored
from ipu_pipe.model.randomness import generators
from ipu_pipe.model.stages import Partition

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Footprint:
    """Per microbatch: `saved_bytes[s]` that stage s keeps for its backward (weights and buffers apart), and
    `boundary_bytes[s]` of activations that travel from stage s to stage s + 1, those on their way further included."""

    saved_bytes: Tuple[int, ...]
    boundary_bytes: Tuple[int, ...]


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put back weights, buffers, gradients, modes and random states at the end."""
    parameters = list(model.parameters())
    values = [p.detach().clone() for p in parameters]
    gradients = [p.grad for p in parameters]
    cuda = [t.device for t in parameters[:1] if t.is_cuda]
    with torch.random.fork_rng(devices=cuda), buffers_restored(model), modes_restored(model):
        try:
            for p in parameters:
                p.grad = None
            yield
        finally:
            for p, value, gradient in zip(parameters, values, gradients):
                p.data.copy_(value)
                p.grad = gradient


class StageClock:
    """Which stage is running, kept by hooks on the modules at which the stage changes."""

    def __init__(self, model: nn.Module, part: Partition) -> None:
        self.stage = 0
        self._model, self._part = model, part
        self._handles: List[Any] = []

    def __enter__(self) -> "StageClock":
        for name, stage in self._part.begins.items():

            def enter(module: nn.Module, inputs: Any, stage: int = stage) -> None:
                self.stage = max(self.stage, stage)

            self._handles.append(self._model.get_submodule(name).register_forward_pre_hook(enter))
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()


def _storage(tensor: torch.Tensor) -> Tuple[int, str]:
    return tensor.untyped_storage().data_ptr(), str(tensor.device)


# ---- footprint


class _Crossings(TorchDispatchMode):
    """Sees every operation: a tensor made on an earlier stage than the one that reads it crosses each boundary between."""

    def __init__(self, clock: StageClock, boundaries: int) -> None:
        super().__init__()
        self.bytes = [0] * boundaries
        self._clock = clock
        self._made: Dict[int, Tuple[int, torch.Tensor]] = {}  # the tensor is held so that its id stays its own
        self._reached: Dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stage = self._clock.stage
        for tensor in tree_flatten((args, kwargs or {}))[0]:
            if isinstance(tensor, torch.Tensor) and id(tensor) in self._made:
                reached = self._reached.get(id(tensor), self._made[id(tensor)][0])
                for boundary in range(reached, stage):
                    self.bytes[boundary] += tensor.numel() * tensor.element_size()
                self._reached[id(tensor)] = max(reached, stage)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(result)[0]:
            if isinstance(tensor, torch.Tensor):
                self._made[id(tensor)] = (stage, tensor)
                self._reached.pop(id(tensor), None)
        return result


def footprint(model: nn.Module, part: Partition, loss: Loss, x: torch.Tensor, y: torch.Tensor) -> Footprint:
    """Measure what one microbatch `x`, `y` leaves on each stage and sends over each boundary (bytes)."""
    weights = {_storage(t) for t in [*model.parameters(), *model.buffers()]}
    kept: List[Dict[Tuple[int, str], Tuple[int, torch.Tensor]]] = [{} for _ in part.stages]
    with undisturbed(model):
        with StageClock(model, part) as clock, _Crossings(clock, len(part) - 1) as crossings, torch.no_grad():
            loss(model(x), y)
        with StageClock(model, part) as clock:

            def keep(tensor: torch.Tensor) -> torch.Tensor:
                place = _storage(tensor)
                if place not in weights:  # two views of one storage are kept once, the longer counts
                    size = tensor.numel() * tensor.element_size()
                    held = kept[clock.stage].get(place, (0, tensor))
                    kept[clock.stage][place] = (max(size, held[0]), tensor.detach())
                return tensor.detach()  # the tensor itself would be a cycle that is never freed

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss(model(x), y)
    saved = tuple(sum(size for size, _ in stage.values()) for stage in kept)
    return Footprint(saved, tuple(crossings.bytes))


# ---- randomness


def random_modules(model: nn.Module, x: torch.Tensor) -> List[str]:
    """Names of the modules whose own forward draws random numbers (dropout and the like), in training mode."""
    names = {id(module): name for name, module in model.named_modules()}
    drawn: Set[str] = set()
    drawing = generators(x.device)
    stack: List[List[torch.Tensor]] = []

    def states() -> List[torch.Tensor]:
        return [generator.get_state() for generator in drawing]

    def before(module: nn.Module, inputs: Any) -> None:
        stack.append(states())

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        start = stack.pop()
        if not all(torch.equal(a, b) for a, b in zip(start, states())):
            drawn.add(names[id(module)])
            for generator, state in zip(drawing, start):  # the module around is seen to draw only if it does itself
                generator.set_state(state)

    with undisturbed(model), torch.no_grad():
        model.train()
        handles = [m.register_forward_pre_hook(before) for m in model.modules()]
        handles += [m.register_forward_hook(after) for m in model.modules()]
        try:
            model(x)
        finally:
            for handle in handles:
                handle.remove()
    return sorted(drawn)


def drawn_unkeyed(model: nn.Module, device: torch.device) -> List[str]:
    """Names of the modules that draw from a state of their own, which no seed of a microbatch reaches: cuDNN's recurrent layers
    keep one for the dropout between their layers."""
    if device.type != "cuda":
        return []
    modules = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.RNNBase)]
    return [name for name, m in modules if m.dropout > 0 and m.num_layers > 1]


def changing_buffers(model: nn.Module, x: torch.Tensor) -> List[str]:
    """Names of the buffers that a forward in training changes, those of BatchNorm apart, which it does not read there."""
    norms = {name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._NormBase)}
    before = {name: t.clone() for name, t in model.named_buffers() if name.rpartition(".")[0] not in norms}
    if not before:
        return []
    with undisturbed(model), torch.no_grad():
        model.train()
        model(x)
        return [name for name, t in model.named_buffers() if name in before and not torch.equal(t, before[name])]


# ---- weights that a backward would not see


def derived_weights(model: nn.Module, loss: Loss, x: torch.Tensor, y: torch.Tensor) -> List[str]:
    """Names of parameters from which the forward derives a tensor that it saves for the backward.

    A backward that shall read newer weights gets them written into the parameters' own storage. What the forward derived
    from a weight alone (`w * 1`, weight norm, InstanceNorm's repeated scale, autocast's low-precision copy) keeps the old
    values, and so the method would silently become another one. Such a saved tensor is known by three properties: it lies
    in no parameter's storage, it stays when the input changes, and it changes when the weights change.
    """

    def changed_by(parameters: List[nn.Parameter]) -> bool:
        """Whether one of the suspects differs with other values of these parameters."""
        values = [p.detach().clone() for p in parameters]
        _nudge(parameters)
        after = _saved(model, loss, x, y)
        for p, value in zip(parameters, values):
            p.data.copy_(value)
        return any(i < len(after) and after[i] is not None and not _same(here[i], after[i]) for i in suspects)

    with undisturbed(model):
        model.train()
        other = x.flatten()[torch.randperm(x.numel(), device=x.device)].view_as(x)
        _nudge(list(model.parameters()))  # away from special points, such as scales that start at zero
        here, there = _saved(model, loss, x, y), _saved(model, loss, other, y)
        suspects = [i for i, (a, b) in enumerate(zip(here, there)) if _same(a, b)]
        if not suspects or not changed_by(list(model.parameters())):
            return []
        named = [(name, p) for name, p in model.named_parameters() if not _first_state(model, name)]
        return [name for name, parameter in named if changed_by([parameter])]


def _first_state(model: nn.Module, name: str) -> bool:
    """A recurrent layer's bias: its first state is zero, so what it saves there is an activation that equals the bias."""
    module, _, own = name.rpartition(".")
    return isinstance(model.get_submodule(module), nn.RNNBase) and own.startswith("bias")


def _nudge(parameters: List[nn.Parameter]) -> None:
    for p in parameters:
        p.data.mul_(1.1).add_(torch.rand_like(p.data), alpha=0.05)


def _saved(model: nn.Module, loss: Loss, x: torch.Tensor, y: torch.Tensor) -> List[Optional[torch.Tensor]]:
    """Copies of the tensors saved for the backward, in order; None for those in a weight's or the input's storage."""
    given = {_storage(t) for t in [*model.parameters(), *model.buffers(), x, y]}
    saved: List[Optional[torch.Tensor]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        # whole numbers (a max pool's indices) are no weights
        plain = tensor.layout == torch.strided and tensor.is_floating_point() and _storage(tensor) not in given
        saved.append(tensor.detach().clone() if plain else None)
        return tensor

    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []), buffers_restored(model):
        torch.manual_seed(0)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss(model(x), y)
    return saved


def _same(a: Optional[torch.Tensor], b: Optional[torch.Tensor]) -> bool:
    return a is not None and b is not None and a.shape == b.shape and torch.equal(a, b)
