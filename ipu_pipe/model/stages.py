"""Divide a model into stages: the module at which each stage begins, and the stage of each
parameter.

A *stage* is a group of parameters (and operations without weights) that share one delay. Boundaries
are marked in the model,

    self.conv2 = begin_stage(nn.Conv2d(16, 16, 3))     # a new stage begins when conv2 first runs

or chosen from outside by names, by a count that balances a cost, or as fine as possible. A stage
has everything that runs from its first module to the next boundary, in the order of execution of
one forward of an example:

    forward    conv1  norm1  relu | conv2  norm2 | add | pool  linear | loss
    stage            0            |      1       |  2  |       3      |  4
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field, replace
from typing import Any, List, Mapping, NamedTuple, Sequence, Tuple, TypeVar, Union

import torch
from torch import nn

from ipu_pipe.errors import BadInput, raise_faults
from ipu_pipe.model.balance import WeightedCuts, balance, find_greatest
from ipu_pipe.model.batch import call_model, clone_tensors, flatten_tensors
from ipu_pipe.model.observation import (
    ModuleCall,
    Observation,
    count_saved_bytes,
    find_weight_uses,
    group_weights,
    list_ancestors,
    observe_execution,
)
from ipu_pipe.model.restoring import restore_modes
from ipu_pipe.model.timing import time_passes
from ipu_pipe.text import find_nearest
from ipu_pipe.trace.events import UnitRow

Module = TypeVar("Module", bound=nn.Module)
# unlike an annotation an alias is evaluated, and Python 3.8 knows no X | Y
StageChoice = Union[None, str, int, Sequence[str], Mapping[str, Any]]


def begin_stage(module: Module) -> Module:
    """Mark that a new pipeline stage begins when `module` first runs; returns the module itself.

    The mark survives copying and pickling and changes neither the module's behaviour nor its state
    dict.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"begin_stage takes a torch.nn.Module, not {type(module).__name__}")
    module.begins_stage = True  # type: ignore[assignment]
    return module


def partition(
    model: nn.Module,
    example: Any,
    stages: StageChoice = None,
    between_top: bool = False,
    one_stage: str | None = "",
) -> Partition:
    """Assign every parameter of `model` to a stage.

    `example`: one microbatch of input. A forward in evaluation mode gives the order of execution,
    or one in training mode if some modules run only there (auxiliary heads). `stages` is one of

        None                         the model's own `begin_stage` marks
        ["conv2", "head"]            the names of the modules at which stages 1 and later begin
        P or {"count": P, "by": C}   exactly P stages, balanced by the cost C: "flops" (default), "parameters" or "time"
        "finest"                     a stage per weight tensor in the order of execution, a module's weight and bias together
        {"finest": P}                weight j of n on stage `floor(j P / n)`, so that some stages may have no weights

    A count cuts between modules of the model's top-level sequence if no stage then costs more than
    1.5 times what it must, else at any modules, nested ones too (see `ipu_pipe.model.balance`).
    `between_top`: always cut between top-level modules if there are enough, for backends that send
    activations. `one_stage`: the reason why all uses of a weight must be in one stage, None if they
    need not (`schedule.methods.Method.one_stage_reason`).

    Raise `BadInput` for unknown module names, impossible counts, or a weight of two stages that
    must be in one.
    """
    is_named = stages is None or isinstance(stages, (list, tuple))
    count, by, finest = (0, "", False) if is_named else _read_choice(stages)
    # marks, names and "finest" need no costs, which take a backward, too
    observation = observe_execution(model, example, counted=not is_named and not finest)
    if stages is None:
        marked = {c.name for c in observation.calls if getattr(c.module, "begins_stage", False)}
        part = build_partition(model, observation, open_stages(observation.calls, marked))
    elif isinstance(stages, (list, tuple)):
        require_names(model, observation.calls, stages)
        part = build_partition(model, observation, open_stages(observation.calls, set(stages)))
    else:
        groups = group_weights(model, observation)
        if finest:
            part = spread_weights(model, observation, groups, count or len(groups))
        elif count > len(groups):
            raise BadInput(explain_too_many(count, len(groups)))
        else:
            costs = compute_costs(model, observation.calls, groups, by, example)
            part = balance_stages(
                model, observation, groups, count, costs, between_top, one_stage is None
            )
    if one_stage is not None:
        require_one_stage(part, model, one_stage)
    return part


def explain_too_many(count: int, most: int) -> str:
    """Return the fault of a `count` of stages, of which some would have no weights; `most`: the
    greatest possible count.
    """
    spread = f"{{finest: {count}}} is a finer delay for each weight, with stages that have none"
    return (
        f"stages: {count}: must be at most {most}, the layers with weights at which a stage can "
        f"begin: {spread}"
    )


def _read_choice(stages: Any) -> tuple[int, str, bool]:
    """Read (count, cost, finest) from a choice that is not a list; count 0 means one stage per
    weight.
    """
    if stages == "finest":
        return 0, "flops", True
    # True is an int, too
    if isinstance(stages, int) and not isinstance(stages, bool):
        stages = {"count": stages}
    if isinstance(stages, Mapping) and set(stages) == {"finest"}:
        count = stages["finest"]
        by = "flops"
        finest = True
    elif isinstance(stages, Mapping) and "count" in stages and set(stages) <= {"count", "by"}:
        count = stages["count"]
        by = stages.get("by", "flops")
        finest = False
    else:
        raise BadInput(
            f"stages: {stages}: must be a count, 'finest', a list of module names, {{count: P, by: "
            f"{'|'.join(COSTS)}}} "
            "or {finest: P}"
        )
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise BadInput(f"stages: {count}: must be a whole number >= 1")
    if by not in COSTS:
        raise BadInput(f"stages: by: {by}: must be one of {', '.join(COSTS)}")
    return count, by, finest


def describe_stages(part: Partition, model: nn.Module) -> list[tuple[int, str, int]]:
    """Return (index, first module, number of parameters) of each stage, for printing."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    return [(s.index, s.name, sum(sizes[n] for n in s.parameters)) for s in part.stages]


# ---- stages from boundaries between modules


@dataclass(frozen=True)
class PartitionStage:
    """One stage: its `index` from 0, the `name` of the module it begins with, and its parameters'
    unsplit names.
    """

    index: int
    name: str
    parameters: tuple[str, ...]


class Use(NamedTuple):
    """A stage that uses a weight, and the weight's name there; `repeated`: its module ran on an
    earlier stage before.
    """

    stage: int
    name: str
    repeated: bool = False


@dataclass(frozen=True)
class Partition:
    """The stages of a model in order. `begins`: name of each module at which the stage changes ->
    that stage.

    `spread`: single weights were spread over the stages, so `begins` alone does not give the
    partition. `shared`: name of each weight that several stages use -> its uses in the order of
    stages; the first stage holds the weight as its parameter, the others have a replica.
    """

    stages: tuple[PartitionStage, ...]
    begins: Mapping[str, int]
    spread: bool = False
    shared: Mapping[str, tuple[Use, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.stages)

    def begin_names(self) -> list[str]:
        """Return the modules at which stages 1 and later begin, as in a config's `stages`."""
        names: dict[int, str] = {}
        for name, stage in self.begins.items():
            names.setdefault(stage, name)
        return [names[stage] for stage in sorted(names) if stage]

    def stage_of(self) -> dict[str, int]:
        """Return the stage index of every parameter, by its name in the unsplit model."""
        return {name: stage.index for stage in self.stages for name in stage.parameters}

    def list_tied(self, model: nn.Module) -> dict[str, tuple[Use, ...]]:
        """Return the shared weights that are trained; frozen ones have one version and no
        gradient.
        """
        return {
            name: uses
            for name, uses in self.shared.items()
            if model.get_parameter(name).requires_grad
        }

    def list_replicas(self, stage: int) -> list[str]:
        """Return the names of the weights that a stage uses and an earlier stage holds."""
        return [
            name for name, uses in self.shared.items() if stage in [use.stage for use in uses[1:]]
        ]


def open_stages(calls: list[ModuleCall], marked: set[str]) -> dict[str, int]:
    """Return module name -> stage for the marked modules in order; a mark begins a stage only if
    the current one has work.
    """
    begins: dict[str, int] = {}
    stage = 0
    has_work = False
    for call in calls:
        if call.name in marked and has_work:
            stage = stage + 1
            has_work = False
            begins[call.name] = stage
        has_work = has_work or call.computes
    return begins


def require_names(model: nn.Module, calls: list[ModuleCall], names: Sequence[str]) -> None:
    """Raise BadInput unless a stage can begin at each of the modules `names`, in this order."""
    known = [name for name, _ in model.named_modules() if name]
    run = {call.name for call in calls}
    faults = []
    for name in names:
        if name not in known:
            near = find_nearest(name, known)
            hint = f"nearest is {near}" if near else "see model.named_modules()"
            faults.append(f"stages: {name}: the model has no module of that name, {hint}")
        elif name not in run:
            faults.append(
                f"stages: {name}: this module does not run in the model's forward, so no stage can "
                f"begin there"
            )
    if len(set(names)) != len(names):
        faults.append("stages: a module is named twice")
    # the order can be judged only if all names run
    if not faults:
        opened = open_stages(calls, set(names))
        order = [call.name for call in calls if call.name in set(names)]
        if order != list(names):
            faults.append(f"stages: names must be in the order of execution: {', '.join(order)}")
        # the message names where the model begins, since a mark there begins no stage
        first = next(call for call in calls if call.computes).name
        for name in names:
            if name not in opened:
                faults.append(
                    f"stages: {name}: nothing runs between this boundary and the one before (the "
                    f"model begins at {first})"
                )
    raise_faults(faults)


def build_partition(
    model: nn.Module,
    observation: Observation,
    begins: dict[str, int],
    stage_of_weight: Mapping[str, int] | None = None,
) -> Partition:
    """Build stages from boundaries between modules: a parameter belongs to the stage in which its
    module first runs.

    `stage_of_weight`: the stages of single weights, which override that.
    """
    stage_at = map_calls_to_stages(observation.calls, begins)
    shared: dict[str, tuple[Use, ...]] = {}
    holders: dict[str, int] = {}
    for name, weight_uses in find_weight_uses(model, observation).items():
        by_stage: dict[int, Use] = {}
        for call, first, used_name in weight_uses:
            if call == first:
                stage = (stage_of_weight or {}).get(used_name, stage_at[call])
                by_stage.setdefault(stage, Use(stage, used_name))
            # a module that runs again on a later stage uses its weights there, too
            elif stage_at[call] != stage_at[first]:
                by_stage.setdefault(stage_at[call], Use(stage_at[call], used_name, repeated=True))
        holders[name] = min(by_stage)
        if len(by_stage) > 1:
            shared[name] = tuple(by_stage[stage] for stage in sorted(by_stage))
    first_module: dict[int, str] = {}
    for stage, module_call in zip(stage_at, observation.calls):
        # a container that only calls others names no stage
        if module_call.computes:
            first_module.setdefault(stage, module_call.name)
    names: list[list[str]] = [
        [] for _ in range(1 + max([0, *begins.values(), *(stage_of_weight or {}).values()]))
    ]
    for name, stage in holders.items():
        names[stage].append(name)
    stages = (
        PartitionStage(s, first_module.get(s, ""), tuple(stage_names))
        for s, stage_names in enumerate(names)
    )
    return Partition(tuple(stages), begins, shared=shared)


def map_calls_to_stages(calls: Sequence[ModuleCall], begins: Mapping[str, int]) -> list[int]:
    """Return the stage of each call."""
    stages = []
    stage = 0
    for call in calls:
        stage = begins.get(call.name, stage)
        stages.append(stage)
    return stages


def share_weights(
    part: Partition, stages: Mapping[str, Sequence[int]], model: nn.Module
) -> Partition:
    """Return the partition with other shared weights, `stages`: name of a trained weight -> the
    stages that use it.
    """
    # `stages` says nothing of frozen weights, which stay as they are
    frozen = {
        name: uses
        for name, uses in part.shared.items()
        if not model.get_parameter(name).requires_grad
    }
    shared = {
        # these uses know the weight's name on each stage, and which of them repeat a module
        name: part.shared[name]
        if [use.stage for use in part.shared.get(name, ())] == list(indices)
        else tuple(Use(stage, name) for stage in indices)
        for name, indices in stages.items()
    }
    shared.update(frozen)
    holder = {**part.stage_of(), **{name: uses[0].stage for name, uses in shared.items()}}
    names = [name for name, _ in model.named_parameters()]
    new_stages = (
        replace(s, parameters=tuple(n for n in names if holder[n] == s.index)) for s in part.stages
    )
    return replace(part, stages=tuple(new_stages), shared=shared)


def require_one_stage(part: Partition, model: nn.Module, why: str) -> None:
    """Raise `BadInput` if two stages use one trained weight; `why` is appended to the message."""
    reason = f": {why}" if why else ""
    faults = []
    for first, *others in part.list_tied(model).values():
        for use in others:
            if use.repeated:
                module = use.name.rpartition(".")[0]
                fault = (
                    f"stages: {module} runs on stage {first.stage} and again on stage {use.stage}: "
                    f"both uses of a weight must be "
                    "in one stage"
                )
            else:
                fault = (
                    f"stages: {first.name} on stage {first.stage} and {use.name} on stage "
                    f"{use.stage} are one shared weight: "
                    "both uses must be in one stage"
                )
            faults.append(fault + reason)
    if faults:
        # each weight of a module that runs again gives the same line
        raise BadInput(list(dict.fromkeys(faults)))


# ---- a count of stages


# the factor by which the greatest stage may cost more for a cut that every backend can make
TOP_SLACK = 1.5
# the most cut points among which the best cut is searched; time and memory grow with their square
MOST_CUT_POINTS = 2000


# weights that stay together, in the order of execution
WeightGroups = List[Tuple[ModuleCall, List[str]]]


class _CutPoint(NamedTuple):
    """A point where a stage may begin: at call number `call`, of the module `name`.

    `divided`: the number of modules, other than sequences, that a cut there divides.
    """

    call: int
    name: str
    divided: int


def spread_weights(
    model: nn.Module, observation: Observation, groups: WeightGroups, count: int
) -> Partition:
    """Assign weight j of n to stage floor(j count / n); the stages between hold no weight."""
    if not groups:
        raise BadInput("stages: finest: the model has no weights")
    stage_of: dict[str, int] = {}
    begins: dict[str, int] = {}
    for j, (call, names) in enumerate(groups):
        stage = j * count // len(groups)
        stage_of.update(dict.fromkeys(names, stage))
        if stage and call.name not in begins and stage not in begins.values():
            begins[call.name] = stage
    # weights that no forward reads go where the loss runs
    stage_of.update(dict.fromkeys(observation.unread, count - 1))
    part = build_partition(model, observation, begins, stage_of)
    # `build_partition` counts up to the last stage that has a weight
    empty = tuple(PartitionStage(s, "", ()) for s in range(len(part), count))
    return replace(part, stages=part.stages + empty, spread=True)


def balance_stages(
    model: nn.Module,
    observation: Observation,
    groups: WeightGroups,
    count: int,
    costs: Sequence[float],
    between_top: bool,
    shares: bool,
) -> Partition:
    """Divide the model into exactly `count` stages.

    Cut between modules of the top-level sequence, where every backend can cut, unless a stage then
    costs over TOP_SLACK times what it must; else cut at any modules, nested ones too. `shares`: a
    cut between two uses of one weight is allowed.
    """
    calls = observation.calls
    cut_points = _list_cut_points(
        calls, set() if shares else _find_held_together(model, observation)
    )
    # modules that share cannot be divided; the error below names them
    if len(cut_points) < count:
        cut_points = _list_cut_points(calls, set())
    top = [point for point in cut_points if point.divided == 0]
    starts: list[int] | None = None
    chosen = top
    units = _sum_between(costs, top)
    owners = [call.name for call, _ in groups]
    weights_of_calls = [owners.count(call.name) for call in calls]
    if count <= len(top):
        weights = [int(total) for total in _sum_between(weights_of_calls, top)]
        # between top-level modules a cut divides none
        starts = WeightedCuts(units, weights, [0] * len(top)).find_best(count)
    if starts is None or not between_top:
        # the deepest ones go first: a cut there divides the most modules
        while len(cut_points) > max(MOST_CUT_POINTS, len(top)):
            deepest = max(point.divided for point in cut_points)
            cut_points = [point for point in cut_points if point.divided < deepest]
        weights = [int(total) for total in _sum_between(weights_of_calls, cut_points)]
        cuts = WeightedCuts(
            _sum_between(costs, cut_points), weights, [point.divided for point in cut_points]
        )
        if starts is None or find_greatest(units, starts) > TOP_SLACK * cuts.find_least(count):
            chosen = cut_points
            starts = cuts.find_best(count)
    # there are enough weights only if several weights of one module are separated
    if starts is None:
        return spread_weights(model, observation, groups, count)
    return build_partition(
        model, observation, open_stages(calls, {chosen[start].name for start in starts[1:]})
    )


def list_top_cut_points(model: nn.Module, observation: Observation) -> list[str]:
    """Return, in order, the modules at which a stage may begin on every backend: between modules of
    the top-level sequence, and not between two uses of one weight."""
    cut_points = _list_cut_points(observation.calls, _find_held_together(model, observation))
    return [point.name for point in cut_points if point.divided == 0]


def find_top_cut_points(observation: Observation, names: Sequence[str]) -> dict[str, str]:
    """Return the modules of `names` that first run between modules of the top-level sequence, with
    the outermost module that
    begins there: name -> outermost name.
    """
    leaf_calls = [i for i, call in enumerate(observation.calls) if call.is_leaf]
    cut_points = _list_cut_points(observation.calls, set())
    tops = {}
    for i, call in enumerate(observation.calls):
        if call.name in names:
            # the first leaf in or after the module, which has one cut point
            k = bisect.bisect_left(leaf_calls, i)
            if k < len(leaf_calls) and cut_points[k].divided == 0:
                tops[call.name] = cut_points[k].name
    return tops


def _list_cut_points(calls: Sequence[ModuleCall], together: set[int]) -> list[_CutPoint]:
    """List the points where stages may begin, the model's beginning first. A leaf module runs after
    each.
    """
    cut_points: list[_CutPoint] = []
    call_numbers: dict[str, int] = {}
    # the first call after the last leaf module
    after_leaf = 0
    for i, call in enumerate(calls):
        call_numbers[call.name] = i
        if not call.is_leaf:
            continue
        # the outermost module that begins here; a sequence around it is no module to divide
        outer = next(
            k
            for k in range(after_leaf, i + 1)
            if k == i or not isinstance(calls[k].module, nn.Sequential)
        )
        name = calls[outer].name
        divided = [
            outer_name
            for outer_name in list_ancestors(name)
            if outer_name
            # a cut divides an outer module only if a part of it has run before
            and call_numbers.get(outer_name, outer) < after_leaf
            and not isinstance(calls[call_numbers[outer_name]].module, nn.Sequential)
        ]
        if not cut_points:
            # the model's beginning is call 0, whatever runs there first
            cut_points.append(_CutPoint(0, name, 0))
        elif not together.intersection(range(after_leaf, outer + 1)):
            cut_points.append(_CutPoint(outer, name, len(divided)))
        after_leaf = i + 1
    return cut_points


def _find_held_together(model: nn.Module, observation: Observation) -> set[int]:
    """Return the calls at which no stage can begin, because they are between two uses of one
    weight.
    """
    uses_by_name = find_weight_uses(model, observation).items()
    calls_by_weight = [
        [use.call for use in uses]
        for name, uses in uses_by_name
        # frozen weights have one version, so that their uses may be apart
        if model.get_parameter(name).requires_grad
    ]
    return {i for calls in calls_by_weight for i in range(min(calls) + 1, max(calls) + 1)}


def _sum_between(values: Sequence[float], cut_points: Sequence[_CutPoint]) -> list[float]:
    """Sum the values of the calls from each cut point to the next."""
    edges = [*[point.call for point in cut_points], len(values)]
    return [float(sum(values[a:b])) for a, b in zip(edges, edges[1:])]


@dataclass(frozen=True)
class Footprint:
    """The costs of a microbatch by stage.

    `saved_bytes[s]`: the bytes that stage s saves for its backward, without weights and buffers.
    `boundary_bytes[s]`: the bytes of activations from stage s to stage s + 1, including those for
    later stages. `forward_flops`, `backward_flops`: FLOPs of each stage's passes; the latter is
    None if the backward cannot run. `units`: the model between all points where a stage may begin.
    """

    saved_bytes: tuple[int, ...]
    boundary_bytes: tuple[int, ...]
    forward_flops: tuple[float, ...]
    backward_flops: tuple[float, ...] | None
    units: tuple[UnitRow, ...] = ()


def make_footprint(model: nn.Module, part: Partition, observation: Observation) -> Footprint:
    """Return the costs of an observed microbatch on each stage and across each boundary."""
    stage_at = map_calls_to_stages(observation.calls, part.begins)
    calls_by_stage: list[list[ModuleCall]] = [[] for _ in part.stages]
    crossing = [0] * (len(part) - 1)
    for call, size, before, stage in zip(
        observation.calls, observation.live, [0, *stage_at], stage_at
    ):
        calls_by_stage[stage].append(call)
        # a stage without calls of its own hands on what enters it
        for boundary in range(before, stage):
            crossing[boundary] = size
    backward = (
        tuple(sum(call.backward_flops for call in calls) for calls in calls_by_stage)
        if observation.backward
        else None
    )
    return Footprint(
        tuple(map(count_saved_bytes, calls_by_stage)),
        tuple(crossing),
        tuple(sum(call.flops for call in calls) for calls in calls_by_stage),
        backward,
        _make_units(model, part, observation, stage_at),
    )


def _make_units(
    model: nn.Module, part: Partition, observation: Observation, stage_at: Sequence[int]
) -> tuple[UnitRow, ...]:
    """Return the units: the model divided at the boundaries and at all points where a stage may
    begin on every backend.
    """
    first, *others = list_top_cut_points(model, observation)
    names = {*others, *part.begins}
    starts = [0, *(i for i, call in enumerate(observation.calls) if i and call.name in names)]
    return tuple(
        UnitRow(
            # the first call is the model itself, which has no name
            name=observation.calls[a].name if a else first,
            stage=stage_at[a],
            forward_flops=sum(call.flops for call in observation.calls[a:b]),
            backward_flops=sum(call.backward_flops for call in observation.calls[a:b]),
            crossing_bytes=observation.live[a],
        )
        for a, b in zip(starts, [*starts[1:], len(observation.calls)])
    )


def group_stages(
    model: nn.Module, part: Partition, count: int, x: Any, allowed: Sequence[str] | None = None
) -> dict[int, str]:
    """Merge consecutive stages of `part` into `count` groups with the least greatest sum of FLOPs.

    Return the stage at which each group but the first begins -> the module there. If enough stages
    begin between modules of the model's top-level sequence, groups begin only there. `allowed`: the
    modules at which groups may begin; None: all. Raise `BadInput` if there are too few cut points.
    """
    names = part.begin_names()
    # with nothing to merge, no forward has to be observed
    if count == len(names) + 1 and allowed is None:
        return dict(enumerate(names, 1))
    observation = observe_execution(model, x, counted=True)
    tops = find_top_cut_points(observation, names)
    starts = [
        s
        for s, name in enumerate(names, 1)
        if name in tops and (allowed is None or name in allowed)
    ]
    if count > len(starts) + 1:
        starts = [s for s, name in enumerate(names, 1) if allowed is None or name in allowed]
    if count > len(starts) + 1:
        inside = len(names) - len(starts)
        raise BadInput(
            f"stages: {len(part)}: the model can be cut for at most {len(starts) + 1} devices, not "
            f"{count}"
            + (f": {inside} of its stages begin where several activations cross" if inside else "")
        )
    edges = [0, *starts, len(part)]
    # forwards alone: a model whose backward cannot run has no other FLOPs
    flops = make_footprint(model, part, observation).forward_flops
    costs = [sum(flops[a:b]) for a, b in zip(edges, edges[1:])]
    begins = [edges[k] for k in balance(costs, count)[1:]]
    return {stage: tops.get(names[stage - 1], names[stage - 1]) for stage in begins}


COSTS = ("flops", "parameters", "time")


def compute_costs(
    model: nn.Module,
    calls: list[ModuleCall],
    groups: list[tuple[ModuleCall, list[str]]],
    by: str,
    example: Any,
) -> list[float]:
    """Return the cost of each call, forward and backward, up to the next call."""
    if by == "flops":
        return [call.flops + call.backward_flops for call in calls]
    if by == "time":
        return _time_calls(model, calls, example)
    owned: dict[str, float] = {}
    # a shared weight counts once, where it first runs
    counted: set[int] = set()
    for call, names in groups:
        for parameter in (model.get_parameter(name) for name in names):
            owned[call.name] = owned.get(call.name, 0.0) + (
                parameter.numel() if id(parameter) not in counted else 0
            )
            counted.add(id(parameter))
    return [owned.get(call.name, 0.0) for call in calls]


def _time_calls(model: nn.Module, calls: list[ModuleCall], example: Any) -> list[float]:
    """Return the seconds of each call's passes, forward and backward."""
    begins = {call.name: i for i, call in enumerate(calls)}

    def run() -> list[torch.Tensor]:
        outputs = flatten_tensors(call_model(model, clone_tensors(example)))
        # a number for a backward; the loss itself belongs to no call
        return [t.sum() for t in outputs if t.is_floating_point()]

    with restore_modes(model), torch.enable_grad():
        for module in model.modules():
            # BatchNorm in training refuses a single value per channel
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.training = False
        seconds = time_passes(model, run, begins, [call.backward_flops for call in calls])
    return [forward + backward for forward, backward in zip(seconds.forward, seconds.backward)]
