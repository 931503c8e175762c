"""One look at a model before training: what its stages keep, what crosses their boundaries, what in it is random, and
whether a backward would see weights that were written after its forward.

Everything here runs the model on one microbatch and leaves weights, buffers, gradients, modes and random states as found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ipu_pipe.model.balancing import list_top_places
from ipu_pipe.model.batch import call_model, clone_tensors, get_first_tensor, iterate_tensors, list_tensors, map_tensors
from ipu_pipe.model.loss import Loss
from ipu_pipe.model.meta import is_faster_on_meta, move_to_meta, to_meta
from ipu_pipe.model.observation import Observation, count_saved_bytes, get_storage, observe_costs
from ipu_pipe.model.partition import Partition, map_calls_to_stages
from ipu_pipe.model.randomness import list_generators
from ipu_pipe.model.restoring import buffers_restored, modes_restored, undisturbed
from ipu_pipe.trace.events import UnitRow


@dataclass(frozen=True)
class Footprint:
    """Per microbatch: `saved_bytes[s]` that stage s keeps for its backward (weights and buffers apart), `boundary_bytes[s]` of
    activations that travel from stage s to stage s + 1, those on their way further included, and FLOPs of each stage's passes;
    `backward_flops`: None where the backward cannot be run. `units`: places where a stage may begin."""

    saved_bytes: Tuple[int, ...]
    boundary_bytes: Tuple[int, ...]
    forward_flops: Tuple[float, ...]
    backward_flops: Optional[Tuple[float, ...]]
    units: Tuple[UnitRow, ...] = ()


def _storage(tensor: torch.Tensor) -> Tuple[int, str]:
    return tensor.untyped_storage().data_ptr(), str(tensor.device)


# ---- footprint


def observe_footprint(model: nn.Module, part: Partition, loss: Loss, x: Any, y: Any) -> Footprint:
    """Measure what one microbatch `x`, `y` computes and leaves on each stage and sends over each boundary: on the meta
    device if the model can run there, else with the microbatch itself."""
    seen = None
    if is_faster_on_meta(model, x):
        try:
            with move_to_meta(model):
                a, b = to_meta((x, y))
                seen = observe_costs(model, a, lambda: loss(call_model(model, a), b))
        except Exception:  # model or loss look at values: what the user's code raises then may be anything
            pass
    if seen is None:
        with undisturbed(model):
            seen = observe_costs(model, x, lambda: loss(call_model(model, x), y))
    stages, at_call = len(part), map_calls_to_stages(seen.calls, part.begins)
    calls_by_stage = seen.by_stage(at_call, stages)
    backward = tuple(sum(call.backward_flops for call in calls) for calls in calls_by_stage) if seen.backward else None
    return Footprint(
        tuple(map(count_saved_bytes, calls_by_stage)),
        tuple(seen.crossing(at_call, stages)),
        tuple(sum(call.flops for call in calls) for calls in calls_by_stage),
        backward,
        _units(model, part, seen, at_call),
    )


def _units(model: nn.Module, part: Partition, seen: Observation, stage_of: Mapping[str, int]) -> Tuple[UnitRow, ...]:
    """Return the units: what runs between one place where a stage may begin on every backend, or begins, and the next."""
    first, *others = list_top_places(model, seen.calls, seen.runs)
    places = {*others, *part.begins}
    starts = [0, *(i for i, call in enumerate(seen.calls) if i and call.name in places)]
    return tuple(
        UnitRow(
            name=seen.calls[a].name if a else first,
            stage=stage_of[seen.calls[a].name],
            forward_flops=sum(call.flops for call in seen.calls[a:b]),
            backward_flops=sum(call.backward_flops for call in seen.calls[a:b]),
            crossing_bytes=seen.live[a],
        )
        for a, b in zip(starts, [*starts[1:], len(seen.calls)])
    )


# ---- randomness


class ForwardEffects(NamedTuple):
    """What a training forward does besides giving its output.

    draws: the modules whose own forward draws random numbers (dropout and the like), and how often each runs
    buffers: names of those that it changes, without BatchNorm's, which it does not read
    weights: names of those that it writes (max_norm of an embedding)
    """

    draws: Dict[str, int]
    buffers: List[str]
    weights: List[str]


def observe_effects(model: nn.Module, x: Any) -> ForwardEffects:
    """Run one training forward of `x` and return what it did; the model is left as it was."""
    names = {id(module): name for name, module in model.named_modules()}
    norms = {name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._NormBase)}
    drawn: Set[str] = set()
    runs: Dict[str, int] = {}
    drawing = list_generators(get_first_tensor(x).device)
    stack: List[List[torch.Tensor]] = []

    def states() -> List[torch.Tensor]:
        return [generator.get_state() for generator in drawing]

    def before(module: nn.Module, inputs: Any) -> None:
        stack.append(states())
        runs[names[id(module)]] = runs.get(names[id(module)], 0) + 1

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        start = stack.pop()
        if not all(torch.equal(a, b) for a, b in zip(start, states())):
            drawn.add(names[id(module)])
            for generator, state in zip(drawing, start):  # the module around is seen to draw only if it does itself
                generator.set_state(state)

    with undisturbed(model):
        model.train()
        buffers = {name: t.clone() for name, t in model.named_buffers() if name.rpartition(".")[0] not in norms}
        weights = [(name, p, p.detach().clone()) for name, p in model.named_parameters() if not p.is_meta]
        handles = [m.register_forward_pre_hook(before) for m in model.modules()]
        handles += [m.register_forward_hook(after) for m in model.modules()]
        try:
            call_model(model, clone_tensors(x))
        finally:
            for handle in handles:
                handle.remove()
        now = dict(model.named_buffers())
        changed = [name for name, value in buffers.items() if name in now and not _is_equal(now[name], value)]
        written = [name for name, p, value in weights if not _is_equal(p, value)]
    return ForwardEffects({name: runs[name] for name in sorted(drawn)}, changed, written)


def _is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.is_meta or a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def find_unkeyed_draws(model: nn.Module, device: torch.device) -> List[str]:
    """Return the names of the modules that draw from a state of their own, which no seed of a microbatch reaches: cuDNN's
    recurrent layers keep one for the dropout between their layers."""
    if device.type != "cuda":
        return []
    modules = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.RNNBase)]
    return [name for name, m in modules if m.dropout > 0 and m.num_layers > 1]


# ---- weights that a backward would not see


def find_derived_weights(model: nn.Module, loss: Loss, x: Any, y: Any) -> List[str]:
    """Return the names of parameters from which the forward derives a tensor that it saves for the backward.

    A backward that shall read newer weights gets them written into the parameters' own storage. What the forward derived
    from a weight alone (`w * 1`, weight norm, InstanceNorm's repeated scale, autocast's low-precision copy) keeps the old
    values, and so the method would silently become another one. Such a saved tensor is known by three properties: it lies
    in no parameter's storage, it stays when the input changes, and it changes when the weights change.
    """
    if is_faster_on_meta(model, x) and not _may_derive(model, loss, x, y):
        return []

    def changed_by(parameters: List[nn.Parameter]) -> bool:
        """Tell whether one of the suspects differs with other values of these parameters."""
        values = [p.detach().clone() for p in parameters]
        _nudge(parameters)
        after = _saved(model, loss, x, y)
        for p, value in zip(parameters, values):
            p.data.copy_(value)
        return any(i < len(after) and after[i] is not None and not _same(here[i], after[i]) for i in suspects)

    with undisturbed(model):
        model.train()
        other = map_tensors(_shuffled, x)
        _nudge(list(model.parameters()))  # away from special points, such as scales that start at zero
        here, there = _saved(model, loss, x, y), _saved(model, loss, other, y)
        suspects = [i for i, (a, b) in enumerate(zip(here, there)) if _same(a, b)]
        if not suspects or not changed_by(list(model.parameters())):
            return []
        named = [(name, p) for name, p in model.named_parameters() if not _first_state(model, name)]
        return [name for name, parameter in named if changed_by([parameter])]


class _Origins(TorchDispatchMode):
    """Follows, by memory, what is computed from weights alone."""

    def __init__(self, weights: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.derived: Set[int] = set()
        self._held = [*weights, *given]
        self._weights = {get_storage(t) for t in weights}
        self._given = {get_storage(t) for t in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = {get_storage(t) for t in iterate_tensors((*args, *(kwargs or {}).values()))}
        result = func(*args, **(kwargs or {}))
        sized = (
            "like" in func.overloadpacket.__name__ or "new_" in func.overloadpacket.__name__
        )  # its numbers are read by nobody
        for tensor in iterate_tensors((result,)):
            place = get_storage(tensor)
            self._held.append(tensor)
            if place in self._weights or place in self._given:
                continue
            if read & self._given and not sized:
                self._given.add(place)
                self.derived.discard(place)
            elif read & (self._weights | self.derived):
                self.derived.add(place)
        return result


def _may_derive(model: nn.Module, loss: Loss, x: Any, y: Any) -> bool:
    """Tell whether the forward saves what is computed from weights and not from the input, seen on the meta device; True if
    that cannot be seen."""
    saved: List[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            saved.append(get_storage(tensor))
        return tensor.detach()

    try:
        with modes_restored(model), move_to_meta(model):
            model.train()
            a, b = to_meta((x, y))
            origins = _Origins(list(model.parameters()), list_tensors((a, b)))
            with origins, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss(call_model(model, a), b)
            return not origins.derived.isdisjoint(saved)
    except Exception:  # model or loss look at values: what the user's code raises then may be anything
        return True


def _first_state(model: nn.Module, name: str) -> bool:
    """Tell whether a parameter is a recurrent layer's bias: its first state is zero, so an activation that it saves equals
    the bias."""
    module, _, parameter = name.rpartition(".")
    return isinstance(model.get_submodule(module), nn.RNNBase) and parameter.startswith("bias")


def _shuffled(x: torch.Tensor) -> torch.Tensor:
    return x.flatten()[torch.randperm(x.numel(), device=x.device)].view_as(x)


def _nudge(parameters: List[nn.Parameter]) -> None:
    for p in parameters:
        p.data.mul_(1.1).add_(torch.rand_like(p.data), alpha=0.05)


def _saved(model: nn.Module, loss: Loss, x: Any, y: Any) -> List[Optional[torch.Tensor]]:
    """Return copies of the tensors saved for the backward, in order; None for those in a weight's or the input's storage."""
    storages = {_storage(t) for t in [*model.parameters(), *model.buffers(), *list_tensors((x, y))]}
    saved: List[Optional[torch.Tensor]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        # whole numbers (a max pool's indices) are no weights
        plain = tensor.layout == torch.strided and tensor.is_floating_point() and _storage(tensor) not in storages
        saved.append(tensor.detach().clone() if plain else None)
        return tensor

    device = get_first_tensor(x).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), buffers_restored(model):
        torch.manual_seed(0)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss(call_model(model, x), y)
    return saved


def _same(a: Optional[torch.Tensor], b: Optional[torch.Tensor]) -> bool:
    return a is not None and b is not None and a.shape == b.shape and torch.equal(a, b)
