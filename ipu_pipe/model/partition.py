"""Stages from boundaries between modules: which module begins which stage, and which parameters that gives it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Dict, List, Mapping, NamedTuple, Sequence, Set, Tuple

from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.model.observation import ModuleCall, find_running_ancestor, join_name, list_parameters
from ipu_pipe.text import find_nearest


@dataclass(frozen=True)
class PartitionStage:
    """One stage: its `index` from 0, the `name` of the module it begins with, and its parameters' unsplit names."""

    index: int
    name: str
    parameters: Tuple[str, ...]


class Use(NamedTuple):
    """A stage that uses a weight, and the weight's name there; `again`: of a module, which ran before."""

    stage: int
    name: str
    again: bool = False


@dataclass(frozen=True)
class Partition:
    """Stages of a model in order. `begins` maps the name of each module at which the stage changes to that stage.

    `spread`: single weights were spread over the stages, so that the names in `begins` alone do not give them. `shared`: weights
    that several stages use, by name, in the order of these; the first of them holds the weight as its parameter, the others a
    replica.
    """

    stages: Tuple[PartitionStage, ...]
    begins: Mapping[str, int]
    spread: bool = False
    shared: Mapping[str, Tuple[Use, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.stages)

    def begin_names(self) -> List[str]:
        """Return the modules at which stages 1 and later begin, as a config's `stages` may say them."""
        names: Dict[int, str] = {}
        for name, stage in self.begins.items():
            names.setdefault(stage, name)
        return [names[stage] for stage in sorted(names) if stage]

    def stage_of(self) -> Dict[str, int]:
        """Return the stage index of every parameter, by its name in the unsplit model."""
        return {name: stage.index for stage in self.stages for name in stage.parameters}

    def replicas(self, stage: int) -> List[str]:
        """Return the names of the weights that a stage uses and an earlier stage holds."""
        return [name for name, uses in self.shared.items() if stage in [use.stage for use in uses[1:]]]


def open_stages(calls: List[ModuleCall], marked: Set[str]) -> Dict[str, int]:
    """Return module name -> stage for the marked modules, in order. A mark opens a stage only if the current one has work."""
    begins: Dict[str, int] = {}
    stage, has_work = 0, False
    for call in calls:
        if call.name in marked and has_work:
            stage, has_work = stage + 1, False
            begins[call.name] = stage
        has_work = has_work or call.works
    return begins


def check_names(model: nn.Module, calls: List[ModuleCall], names: Sequence[str]) -> None:
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
                f"stages: {name}: this module does not run in the model's forward, so no stage can begin there"
            )
    if len(set(names)) != len(names):
        faults.append("stages: a module is named twice")
    if not faults:
        opened = open_stages(calls, set(names))
        order = [call.name for call in calls if call.name in set(names)]
        if order != list(names):
            faults.append(f"stages: names must stand in the order of execution: {', '.join(order)}")
        first = next(call for call in calls if call.works).name
        for name in names:
            if name not in opened:
                faults.append(
                    f"stages: {name}: nothing runs between this boundary and the one before (the model begins at {first})"
                )
    if faults:
        raise BadInput(faults)


def build_partition(model: nn.Module, calls: List[ModuleCall], runs: List[str], begins: Dict[str, int]) -> Partition:
    """Build stages from boundaries between modules: a parameter lies where the module that owns it first runs."""
    at_call = map_calls_to_stages(calls, begins)
    owner = {name: at_call[find_running_ancestor(name, at_call)] for name, _ in model.named_modules()}
    stage_of = {join_name(m, p): owner[m] for m, p, _ in list_parameters(model)}
    return finish_partition(model, runs, calls, begins, stage_of)


def map_calls_to_stages(calls: List[ModuleCall], begins: Mapping[str, int]) -> Dict[str, int]:
    at_call, stage = {}, 0
    for call in calls:
        stage = begins.get(call.name, stage)
        at_call[call.name] = stage
    return at_call


def finish_partition(
    model: nn.Module, runs: List[str], calls: List[ModuleCall], begins: Dict[str, int], stage_of: Dict[str, int]
) -> Partition:
    """Build stages from boundaries and from the stage in which each parameter is first used under each of its names."""
    at_call = map_calls_to_stages(calls, begins)
    uses = _uses(model, runs, begins, stage_of, {call.name: at_call[call.name] for call in calls if call.alone})
    count = 1 + max([0, *begins.values(), *stage_of.values()])
    first_module: Dict[int, str] = {}
    for call in calls:
        if call.works:
            first_module.setdefault(at_call[call.name], call.name)
    names: List[List[str]] = [[] for _ in range(count)]
    for name, _ in model.named_parameters():
        names[uses[name][0].stage].append(name)
    stages = tuple(PartitionStage(s, first_module.get(s, ""), tuple(names[s])) for s in range(count))
    return Partition(
        stages, begins, shared={name: weight_uses for name, weight_uses in uses.items() if len(weight_uses) > 1}
    )


def _uses(
    model: nn.Module,
    runs: List[str],
    begins: Mapping[str, int],
    stage_of: Mapping[str, int],
    alone: Mapping[str, int],
) -> Dict[str, Tuple[Use, ...]]:
    """Return the stages that use each weight, ascending. `alone`: stages of the modules in which no other runs: they compute
    with what they hold of another's weights."""
    uses_by_weight: Dict[int, List[Use]] = {}
    owned: Dict[str, List[Tuple[int, str]]] = {}
    for module, weight_uses, parameter in list_parameters(model):
        name = join_name(module, weight_uses)
        uses_by_weight.setdefault(id(parameter), []).append(Use(stage_of[name], name))
        owned.setdefault(module, []).append((id(parameter), name))
    known = {name for name, _ in model.named_modules()}
    for module, owner in model.named_modules(remove_duplicate=False):
        around = find_running_ancestor(module, {"": 0, **alone})
        if module not in known and around in alone:
            for name, parameter in owner.named_parameters(module, recurse=False):
                uses_by_weight[id(parameter)].append(Use(alone[around], name))
    reach: Dict[str, int] = {}
    stage = 0
    for module in runs:  # one that runs again later uses its weights there
        stage = max(stage, begins.get(module, stage))
        if reach.setdefault(module, stage) != stage:
            for weight, name in owned.get(module, ()):
                uses_by_weight[weight].append(Use(stage, name, again=True))
    names = {id(p): name for name, p in model.named_parameters()}
    by_stage = {names[weight]: {use.stage: use for use in reversed(uses)} for weight, uses in uses_by_weight.items()}
    return {name: tuple(uses[stage] for stage in sorted(uses)) for name, uses in by_stage.items()}


def share_weights(part: Partition, stages: Mapping[str, Sequence[int]], model: nn.Module) -> Partition:
    """Return the partition with the weights shared that several `stages` use, by name."""
    shared = {
        name: part.shared[name]
        if [use.stage for use in part.shared.get(name, ())] == list(indices)
        else tuple(Use(stage, name) for stage in indices)
        for name, indices in stages.items()
    }
    holder = {**part.stage_of(), **{name: uses[0].stage for name, uses in shared.items()}}
    names = [name for name, _ in model.named_parameters()]
    new_stages = (replace(s, parameters=tuple(n for n in names if holder[n] == s.index)) for s in part.stages)
    return replace(part, stages=tuple(new_stages), shared=shared)


def refuse_shared(part: Partition, why: str) -> None:
    """Raise BadInput if two stages use one weight; `why`: appended to the reason."""
    more, faults = f": {why}" if why else "", []
    for first, *others in part.shared.values():
        for use in others:
            if use.again:
                module = use.name.rpartition(".")[0]
                said = (
                    f"stages: {module} runs on stage {first.stage} and again on stage {use.stage}: a weight used in two stages "
                    "is refused, both uses must lie in one stage"
                )
            else:
                said = (
                    f"stages: {first.name} on stage {first.stage} and {use.name} on stage {use.stage} are one shared weight: "
                    "both uses must lie in one stage"
                )
            faults.append(said + more)
    if faults:
        raise BadInput(list(dict.fromkeys(faults)))
