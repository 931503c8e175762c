"""A number of stages: balanced by a cost between modules, or single weights spread over the stages."""

from __future__ import annotations

import bisect
from dataclasses import replace
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.model.balance import WeightedCuts, find_greatest
from ipu_pipe.model.boundaries import Partition, Stage, begins_at, finish, from_begins
from ipu_pipe.model.costs import costs_of
from ipu_pipe.model.execution import answering, execution, parameters_by_module
from ipu_pipe.model.observation import Call, modules_around

TOP_SLACK = 1.5  # how much more the greatest stage may cost for a cut that every backend can make
MOST_PLACES = 2000  # among which the best cut is searched, in time and memory of their square


class _Place(NamedTuple):
    """Where a stage may begin: at call `at`, of the module `name`, which cuts `through` so many modules that are no
    sequences."""

    at: int
    name: str
    through: int


def spread(
    model: nn.Module, calls: List[Call], runs: List[str], groups: List[Tuple[Call, List[str]]], count: int
) -> Partition:
    """Weight j of n on stage floor(j count / n); the stages between hold no weight."""
    if not groups:
        raise BadInput("stages: finest: the model has no weights")
    stage_of: Dict[str, int] = {}
    begins: Dict[str, int] = {}
    for j, (call, names) in enumerate(groups):
        stage = j * count // len(groups)
        stage_of.update(dict.fromkeys(names, stage))
        if stage and call.name not in begins and stage not in begins.values():
            begins[call.name] = stage
    made = finish(model, runs, calls, begins, stage_of)
    empty = tuple(Stage(s, "", ()) for s in range(len(made), count))
    return replace(made, stages=made.stages + empty, spread=True)


def balanced(
    model: nn.Module,
    calls: List[Call],
    runs: List[str],
    groups: List[Tuple[Call, List[str]]],
    count: int,
    by: str,
    between_top: bool,
    shares: bool,
) -> Partition:
    """Exactly `count` stages: between modules of the top-level sequence, where every backend can cut, unless a stage of that
    costs over TOP_SLACK times what it must; then at any modules, nested ones too. `shares`: between two uses of one weight, too.
    """
    costs = costs_of(model, calls, groups, by)
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
        own = [0] * len(calls)
        for call, _ in groups:
            own[order[call.name]] += 1
        weights = [int(total) for total in _sums(own, places)]
        cuts = WeightedCuts(_sums(costs, places), weights, [place.through for place in places])
        if starts is None or find_greatest(units, starts) > TOP_SLACK * cuts.find_least(count):
            chosen, starts = places, cuts.find_best(count)
    if starts is None:  # several weights in one module
        return spread(model, calls, runs, groups, count)
    begins = begins_at(calls, {chosen[start].name for start in starts[1:]})
    return from_begins(model, calls, runs, begins)


def top_places(model: nn.Module, calls: List[Call], runs: List[str]) -> List[str]:
    """Names of the modules at which a stage may begin on every backend, in order: between modules of the top-level sequence, and
    not between two uses of one weight."""
    places = _places(calls, _held_together(model, calls, runs))
    return [place.name for place in places if place.through == 0]


def between_top(model: nn.Module, example: Any, names: Sequence[str]) -> Dict[str, str]:
    """Those of `names`, modules that run, which run first between modules of the top-level sequence, each with the name of the
    outermost module that begins there."""
    calls, _ = execution(model, example)
    alone = [i for i, call in enumerate(calls) if call.alone]
    places = _places(calls, set())
    found = {}
    for i, call in enumerate(calls):
        if call.name in names:
            k = bisect.bisect_left(alone, i)
            if k < len(alone) and places[k].through == 0:
                found[call.name] = places[k].name
    return found


def _places(calls: List[Call], together: Set[int]) -> List[_Place]:
    """Where stages may begin, the model's beginning first: each holds a module that has no others running inside."""
    found: List[_Place] = []
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
            for around in modules_around(name)
            if around and begun.get(around, outer) < since and not _is_sequence(calls[begun[around]].module)
        ]
        if not found:
            found.append(_Place(0, name, 0))
        elif not together.intersection(range(since, outer + 1)):
            found.append(_Place(outer, name, len(through)))
        since = i + 1
    return found


def _is_sequence(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential)


def _held_together(model: nn.Module, calls: List[Call], runs: List[str]) -> Set[int]:
    """Calls at which no stage can begin: between two uses of one weight."""
    order = {call.name: i for i, call in enumerate(calls)}
    uses: Dict[int, List[int]] = {}
    reached = 0
    users = {name: answering(name, order) for name, _ in model.named_modules()}
    owned: Dict[str, List[int]] = {}
    for module, _, parameter in parameters_by_module(model):
        owned.setdefault(users[module], []).append(id(parameter))
    for name in runs:
        reached = max(reached, order[name])
        for weight in owned.get(name, ()):
            uses.setdefault(weight, []).append(reached)
    return {i for seen in uses.values() for i in range(min(seen) + 1, max(seen) + 1)}


def _sums(values: Sequence[float], places: Sequence[_Place]) -> List[float]:
    """Sums of the calls' values from each place to the next."""
    edges = [*[place.at for place in places], len(values)]
    return [float(sum(values[a:b])) for a, b in zip(edges, edges[1:])]
