"""A number of stages: balanced by a cost between modules, single weights spread over stages, or stages merged."""

from __future__ import annotations

import bisect
from dataclasses import replace
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch
from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.model.balance import WeightedCuts, balance, find_greatest
from ipu_pipe.model.batch import call_model, clone_tensors, get_first_tensor
from ipu_pipe.model.observation import (
    ModuleCall,
    find_running_ancestor,
    list_ancestors,
    list_parameters,
    observe_execution,
)
from ipu_pipe.model.partition import (
    Partition,
    PartitionStage,
    build_partition,
    finish_partition,
    map_calls_to_stages,
    open_stages,
)
from ipu_pipe.model.restoring import undisturbed
from ipu_pipe.model.templates import flatten_tensors
from ipu_pipe.model.timing import PassSeconds, time_passes

TOP_SLACK = 1.5  # how much more the greatest stage may cost for a cut that every backend can make
MOST_PLACES = 2000  # among which the best cut is searched, in time and memory of their square


class _Place(NamedTuple):
    """Where a stage may begin: at call `at`, of the module `name`, which cuts `through` so many modules that are no
    sequences."""

    at: int
    name: str
    through: int


def spread_weights(
    model: nn.Module, calls: List[ModuleCall], runs: List[str], groups: List[Tuple[ModuleCall, List[str]]], count: int
) -> Partition:
    """Assign weight j of n to stage floor(j count / n); the stages between hold no weight."""
    if not groups:
        raise BadInput("stages: finest: the model has no weights")
    stage_of: Dict[str, int] = {}
    begins: Dict[str, int] = {}
    for j, (call, names) in enumerate(groups):
        stage = j * count // len(groups)
        stage_of.update(dict.fromkeys(names, stage))
        if stage and call.name not in begins and stage not in begins.values():
            begins[call.name] = stage
    part = finish_partition(model, runs, calls, begins, stage_of)
    empty = tuple(PartitionStage(s, "", ()) for s in range(len(part), count))
    return replace(part, stages=part.stages + empty, spread=True)


def balance_stages(
    model: nn.Module,
    calls: List[ModuleCall],
    runs: List[str],
    groups: List[Tuple[ModuleCall, List[str]]],
    count: int,
    costs: Sequence[float],
    between_top: bool,
    shares: bool,
) -> Partition:
    """Divide the model into exactly `count` stages: between modules of the top-level sequence, where every backend can cut,
    unless a stage then costs over TOP_SLACK times what it must; else at any modules, nested ones too. `shares`: also between
    two uses of one weight."""
    places = _places(calls, set() if shares else _held_together(model, calls, runs))
    if len(places) < count:  # what is shared cannot be divided: its refusal names it
        places = _places(calls, set())
    top = [place for place in places if place.through == 0]
    starts: Optional[List[int]] = None
    chosen, units = top, _sums(costs, top)
    if count <= len(top):
        starts = WeightedCuts(units, [1] * len(top), [0] * len(top)).find_best(count)
    if starts is None or not between_top:
        while len(places) > max(MOST_PLACES, len(top)):
            deepest = max(place.through for place in places)
            places = [place for place in places if place.through < deepest]
        order = {call.name: i for i, call in enumerate(calls)}
        weight_counts = [0] * len(calls)
        for call, _ in groups:
            weight_counts[order[call.name]] += 1
        weights = [int(total) for total in _sums(weight_counts, places)]
        cuts = WeightedCuts(_sums(costs, places), weights, [place.through for place in places])
        if starts is None or find_greatest(units, starts) > TOP_SLACK * cuts.find_least(count):
            chosen, starts = places, cuts.find_best(count)
    if starts is None:  # several weights in one module
        return spread_weights(model, calls, runs, groups, count)
    begins = open_stages(calls, {chosen[start].name for start in starts[1:]})
    return build_partition(model, calls, runs, begins)


def list_top_places(model: nn.Module, calls: List[ModuleCall], runs: List[str]) -> List[str]:
    """Return the names of the modules at which a stage may begin on every backend, in order: between modules of the top-
    level sequence, and not between two uses of one weight."""
    places = _places(calls, _held_together(model, calls, runs))
    return [place.name for place in places if place.through == 0]


def find_top_places(model: nn.Module, example: Any, names: Sequence[str]) -> Dict[str, str]:
    """Return those of `names` that first run between modules of the top-level sequence, each with the name of the outermost
    module that begins there."""
    calls, _ = observe_execution(model, example)
    alone = [i for i, call in enumerate(calls) if call.alone]
    places = _places(calls, set())
    tops = {}
    for i, call in enumerate(calls):
        if call.name in names:
            k = bisect.bisect_left(alone, i)
            if k < len(alone) and places[k].through == 0:
                tops[call.name] = places[k].name
    return tops


def _places(calls: List[ModuleCall], together: Set[int]) -> List[_Place]:
    """List where stages may begin, the model's beginning first: each place holds a module inside which no other runs."""
    places: List[_Place] = []
    begun: Dict[str, int] = {}
    since = 0  # the first call after the last module that works alone
    for i, call in enumerate(calls):
        begun[call.name] = i
        if not call.alone:
            continue
        outer = next(k for k in range(since, i + 1) if k == i or not _is_sequence(calls[k].module))
        name = calls[outer].name
        through = [
            around
            for around in list_ancestors(name)
            if around and begun.get(around, outer) < since and not _is_sequence(calls[begun[around]].module)
        ]
        if not places:
            places.append(_Place(0, name, 0))
        elif not together.intersection(range(since, outer + 1)):
            places.append(_Place(outer, name, len(through)))
        since = i + 1
    return places


def _is_sequence(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential)


def _held_together(model: nn.Module, calls: List[ModuleCall], runs: List[str]) -> Set[int]:
    """Return the calls at which no stage can begin: between two uses of one weight."""
    order = {call.name: i for i, call in enumerate(calls)}
    uses: Dict[int, List[int]] = {}
    reached = 0
    users = {name: find_running_ancestor(name, order) for name, _ in model.named_modules()}
    owned: Dict[str, List[int]] = {}
    for module, _, parameter in list_parameters(model):
        owned.setdefault(users[module], []).append(id(parameter))
    for name in runs:
        reached = max(reached, order[name])
        for weight in owned.get(name, ()):
            uses.setdefault(weight, []).append(reached)
    return {i for seen in uses.values() for i in range(min(seen) + 1, max(seen) + 1)}


def _sums(values: Sequence[float], places: Sequence[_Place]) -> List[float]:
    """Sum the calls' values from each place to the next."""
    edges = [*[place.at for place in places], len(values)]
    return [float(sum(values[a:b])) for a, b in zip(edges, edges[1:])]


class StageFlops(NamedTuple):
    """FLOPs of a stage's passes of a microbatch."""

    forward: float
    backward: float


def count_stage_flops(model: nn.Module, part: Partition, example: Any) -> List[StageFlops]:
    """Count the FLOPs of each stage for the microbatch `example`, as for `by: flops`."""
    calls, _ = observe_execution(model, example, counted=True)
    at_call = map_calls_to_stages(calls, part.begins)
    stages: List[List[ModuleCall]] = [[] for _ in range(len(part))]
    for call in calls:
        stages[at_call[call.name]].append(call)
    return [
        StageFlops(sum(c.flops for c in stage_calls), sum(c.backward_flops for c in stage_calls))
        for stage_calls in stages
    ]


def merge_stages(
    model: nn.Module, part: Partition, count: int, x: Any, where: Optional[Sequence[str]] = None
) -> List[str]:
    """Return the names of the modules at which `count` stages begin that are consecutive stages of `part` taken together, the
    greatest sum of FLOPs being least; empty for one stage.

    If enough stages begin between modules of the model's top-level sequence, only those places are kept. `where`: names at
    which stages may begin; None: anywhere. Raise BadInput if there are not that many places.
    """
    names = part.begin_names()
    if count == len(names) + 1 and where is None:
        return names
    tops = find_top_places(model, x, names)
    starts = [s for s, name in enumerate(names, 1) if name in tops and (where is None or name in where)]
    if count > len(starts) + 1:
        starts = [s for s, name in enumerate(names, 1) if where is None or name in where]
    if count > len(starts) + 1:
        inside = len(names) - len(starts)
        raise BadInput(
            f"stages: {len(part)}: the model can be cut into at most {len(starts) + 1} devices' parts, {count} are asked for"
            + (f": {inside} of its stages begin where several activations cross" if inside else "")
        )
    edges = [0, *starts, len(part)]  # names are of stages 1 and on
    flops = [stage.forward for stage in count_stage_flops(model, part, x)]
    costs = [sum(flops[a:b]) for a, b in zip(edges, edges[1:])]
    return [tops.get(names[edges[k] - 1], names[edges[k] - 1]) for k in balance(costs, count)[1:]]


COSTS = ("flops", "parameters", "time")
REPEATS = 3  # of a pass whose modules are timed


def compute_costs(
    model: nn.Module, calls: List[ModuleCall], groups: List[Tuple[ModuleCall, List[str]]], by: str, example: Any
) -> List[float]:
    """Return the cost of each call, forward and backward: of what runs from there to the next call."""
    if by == "flops":
        return [call.flops + call.backward_flops for call in calls]
    if by == "time":
        return _time_calls(model, calls, example)
    owned: Dict[str, float] = {}
    seen: Set[int] = set()
    for call, names in groups:
        for parameter in (model.get_parameter(name) for name in names):
            owned[call.name] = owned.get(call.name, 0.0) + (parameter.numel() if id(parameter) not in seen else 0)
            seen.add(id(parameter))
    return [owned.get(call.name, 0.0) for call in calls]


def _time_calls(model: nn.Module, calls: List[ModuleCall], example: Any) -> List[float]:
    """Return the seconds of each call's passes, forward and backward, the least of a few runs."""
    begins = {call.name: i for i, call in enumerate(calls)}

    def run() -> List[torch.Tensor]:
        outputs = flatten_tensors(call_model(model, clone_tensors(example)))
        return [t.sum() for t in outputs if t.is_floating_point()]

    with undisturbed(model), torch.enable_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):  # in training it refuses one value a channel
                module.training = False
        on_gpu = get_first_tensor(example).is_cuda
        runs = [time_passes(model, run, begins, len(calls), on_gpu) for _ in range(REPEATS)]
    # torch 2.0 does not tell the parts of a backward apart: it takes twice its forward
    return [min(times[i] for times in map(_add_passes, runs)) for i in range(len(calls))]


def _add_passes(passes: PassSeconds) -> List[float]:
    backward = passes.backward or [2 * forward for forward in passes.forward]
    return [forward + seconds for forward, seconds in zip(passes.forward, backward)]
