"""Model -> stages: where a stage begins, and which parameters belong to which stage.

A *stage* is a group of parameters (and weightless operations) that share one delay. Boundaries are marked in the model,

    self.conv2 = begin_stage(nn.Conv2d(16, 16, 3))     # a new stage begins when conv2 first runs

or chosen from outside by names, by a count that balances a cost, or as fine as possible. Whatever way, a stage holds all
that runs from its first module to the next boundary, in the order of execution seen in one forward of an example:

    forward    conv1  norm1  relu | conv2  norm2 | add | pool  linear | loss
    stage            0            |      1       |  2  |       3      |  4
"""

from __future__ import annotations

import copy
import difflib
import time
from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, TypeVar, Union

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ipu_pipe.errors import BadInput
from ipu_pipe.model.balance import Cuts, greatest
from ipu_pipe.model.buffers import buffers_restored
from ipu_pipe.model.flops import by_formula, metered

Module = TypeVar("Module", bound=nn.Module)
StageChoice = Union[None, str, int, Sequence[str], Mapping[str, Any]]

COSTS = ("flops", "parameters", "time")


def begin_stage(module: Module) -> Module:
    """Mark that a new pipeline stage begins when `module` first runs; returns the module itself.

    The mark survives copying and pickling and changes neither the module's behaviour nor its state dict.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"begin_stage takes a torch.nn.Module, not {type(module).__name__}")
    module.begins_stage = True  # type: ignore[assignment]
    return module


@dataclass(frozen=True)
class Stage:
    """One stage: its `index` from 0, the `name` of the module it begins with, and its parameters' unsplit names."""

    index: int
    name: str
    parameters: Tuple[str, ...]


@dataclass(frozen=True)
class Partition:
    """Stages of a model in order. `begins` maps the name of each module at which the stage changes to that stage.

    `spread`: single weights were spread over the stages, so that the names in `begins` alone do not give them.
    """

    stages: Tuple[Stage, ...]
    begins: Mapping[str, int]
    spread: bool = False

    def __len__(self) -> int:
        return len(self.stages)

    def begin_names(self) -> List[str]:
        """The modules at which stages 1 and on begin, as a config's `stages` may say them."""
        names: Dict[int, str] = {}
        for name, stage in self.begins.items():
            names.setdefault(stage, name)
        return [names[stage] for stage in sorted(names) if stage]

    def stage_of(self) -> Dict[str, int]:
        """Stage index of every parameter, by its name in the unsplit model."""
        return {name: stage.index for stage in self.stages for name in stage.parameters}


@dataclass
class _Call:
    """A module's first run: its place in the order of execution, what it computes, and the parameters it answers for."""

    name: str
    module: nn.Module
    works: bool  # computes something itself: none of its children runs, or it owns parameters
    alone: bool = True  # none of its children runs
    flops: float = 0.0  # of all that runs from here to the next module's first run
    inputs: Any = ()  # (arguments, keyword arguments)


def partition(
    model: nn.Module, example: torch.Tensor, stages: StageChoice = None, between_top: bool = False
) -> Partition:
    """Assign every parameter of `model` to a stage.

    `example`: one microbatch of input, run in evaluation and in training mode without gradients to see the order of
    execution: evaluation's, or training's where modules run in training alone (auxiliary heads).
    `stages`: None, the model's own `begin_stage` marks; a list of module names at which stages begin (stage 0 begins with
    the model); a whole number, that many stages balanced by FLOPs, or `{"count": 4, "by": "flops" | "parameters" | "time"}`;
    "finest", one stage a weight tensor in the order of execution, weight and bias of one module together (107 for
    ResNet-50), or `{"finest": P}`, which puts weight j of n on stage `floor(j P / n)`, some stages then without weights.
    A count gives exactly so many stages: between modules of the model's top-level sequence if no stage then costs over
    half more than it must, else at any modules, nested ones too (see `ipu_pipe.model.balance`). `between_top`: always the
    former where its modules are enough, for devices that hand activations on.

    Raises BadInput: unknown module names, impossible counts, a weight used in two stages.
    """
    calls, stages_of_calls = _execution(model, example)
    _refuse_unused(calls)
    if stages is None:
        begins = _begins_at(calls, {c.name for c in calls if getattr(c.module, "begins_stage", False)})
        return _from_begins(model, calls, stages_of_calls, begins)
    if isinstance(stages, (list, tuple)):
        _check_names(model, calls, stages)
        return _from_begins(model, calls, stages_of_calls, _begins_at(calls, set(stages)))
    count, by, finest = _read_choice(stages)
    groups = _weight_groups(model, calls)
    if finest or count > len(groups):
        return _spread(model, calls, stages_of_calls, groups, count or len(groups))
    return _balanced(model, calls, stages_of_calls, groups, count, by, between_top)


@dataclass(frozen=True)
class Profile:
    """Of a module in one forward: the stages of the first and the last thing that is computed in it, and its FLOPs."""

    first: int
    last: int
    flops: float


def profile(model: nn.Module, part: Partition, example: torch.Tensor, names: Sequence[str]) -> List[Profile]:
    """The modules `names`, which run one after another, seen in one forward of `example`. FLOPs as for `by: flops`."""
    calls, _ = _execution(model, example)
    at_call = _stage_at_call(calls, part.begins)
    found = []
    for name in names:
        inside = [call for call in calls if f"{call.name}.".startswith(f"{name}.")]
        stages = [at_call[call.name] for call in inside if call.works] or [at_call.get(name, 0)]
        found.append(Profile(stages[0], stages[-1], sum(call.flops for call in inside)))
    return found


def stage_flops(model: nn.Module, part: Partition, example: torch.Tensor) -> List[float]:
    """Forward FLOPs of each stage for the microbatch `example`, as for `by: flops`."""
    calls, _ = _execution(model, example)
    at_call = _stage_at_call(calls, part.begins)
    total = [0.0] * len(part)
    for call in calls:
        total[at_call[call.name]] += call.flops
    return total


# ---- the order of execution


def _execution(model: nn.Module, example: torch.Tensor) -> Tuple[List[_Call], List[str]]:
    """First runs of all modules in order, and the names of every run (repeats too), seen in one forward.

    In evaluation mode, in which nothing is left to chance (stochastic depth), unless training runs more modules than that.
    """
    calls, runs = _observe(model, example, training=False)
    more, more_runs = _observe(model, example, training=True)
    return (more, more_runs) if set(more_runs) - set(runs) else (calls, runs)


def _observe(model: nn.Module, example: torch.Tensor, training: bool) -> Tuple[List[_Call], List[str]]:
    names = {id(module): name for name, module in model.named_modules()}
    calls: List[_Call] = []
    runs: List[str] = []
    seen: Dict[str, _Call] = {}

    def before(module: nn.Module, inputs: Any, keywords: Any) -> None:
        name = names[id(module)]
        runs.append(name)
        if meter is not None and calls:
            calls[-1].flops += meter.read()
        if name not in seen:
            own = any(True for _ in module.parameters(recurse=False))
            seen[name] = _Call(name, module, own, inputs=(inputs, keywords))
            calls.append(seen[name])

    def after(module: nn.Module, inputs: Any, keywords: Any, output: Any) -> None:
        if meter is None:
            seen[names[id(module)]].flops += by_formula(module, [*inputs, *keywords.values()], output)

    handles = [m.register_forward_pre_hook(before, with_kwargs=True) for m in model.modules()]
    handles += [m.register_forward_hook(after, with_kwargs=True) for m in model.modules()]
    try:
        with torch.no_grad(), metered() as meter:
            _run_quietly(model, example, training)
            if meter is not None and calls:
                calls[-1].flops += meter.read()
    finally:
        for handle in handles:
            handle.remove()
    around = {outer for name in seen for outer in _around(name)}
    for call in calls:
        call.alone = call.name not in around
        call.works = call.works or call.alone
    return calls, runs


def _around(name: str) -> List[str]:
    """Names of the modules around a module, the model's own ("") and the outermost first."""
    parts = name.split(".") if name else []
    return [".".join(parts[:n]) for n in range(len(parts))]


def _run_quietly(model: nn.Module, example: torch.Tensor, training: bool) -> None:
    """One forward that leaves buffers, modes and random states as they were.

    BatchNorm stays in evaluation mode: in training it refuses an example of one value a channel.
    """
    modes = {module: module.training for module in model.modules()}
    devices = [example.device] if example.is_cuda else []
    with torch.random.fork_rng(devices=devices), buffers_restored(model):
        model.train(training)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.training = False
        try:
            model(example)
        finally:
            for module, mode in modes.items():
                module.training = mode


def _refuse_unused(calls: List[_Call]) -> None:
    if not any(call.works for call in calls):
        raise BadInput("model: no module of it runs in forward: nothing to divide into stages")


# ---- boundaries


def _begins_at(calls: List[_Call], marked: Set[str]) -> Dict[str, int]:
    """Module name -> stage for the marked modules, in order. A mark opens a stage only if the current one has work."""
    begins: Dict[str, int] = {}
    stage, has_work = 0, False
    for call in calls:
        if call.name in marked and has_work:
            stage, has_work = stage + 1, False
            begins[call.name] = stage
        has_work = has_work or call.works
    return begins


def _check_names(model: nn.Module, calls: List[_Call], names: Sequence[str]) -> None:
    known = [name for name, _ in model.named_modules() if name]
    run = {call.name for call in calls}
    faults = []
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"nearest is {near[0]}" if near else "see model.named_modules()"
            faults.append(f"stages: {name}: the model has no module of that name, {hint}")
        elif name not in run:
            faults.append(
                f"stages: {name}: this module does not run in the model's forward, so no stage can begin there"
            )
    if len(set(names)) != len(names):
        faults.append("stages: a module is named twice")
    if not faults:
        opened = _begins_at(calls, set(names))
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


def _from_begins(model: nn.Module, calls: List[_Call], runs: List[str], begins: Dict[str, int]) -> Partition:
    """Stages from boundaries between modules: a parameter lies where the module that owns it first runs."""
    at_call = _stage_at_call(calls, begins)
    owner = {name: at_call[_answering(name, at_call)] for name, _ in model.named_modules()}
    stage_of = {_join(m, p): owner[m] for m, p, _ in _parameters_by_module(model)}
    return _finish(model, runs, calls, begins, stage_of)


def _stage_at_call(calls: List[_Call], begins: Mapping[str, int]) -> Dict[str, int]:
    at_call, stage = {}, 0
    for call in calls:
        stage = begins.get(call.name, stage)
        at_call[call.name] = stage
    return at_call


def _answering(name: str, at_call: Mapping[str, int]) -> str:
    """The nearest module around `name` (itself included) that runs: it computes with the parameters of `name`."""
    while name not in at_call:
        name = name.rpartition(".")[0]
    return name


def _join(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def _parameters_by_module(model: nn.Module) -> Iterable[Tuple[str, str, nn.Parameter]]:
    """(module name, parameter's own name, parameter), shared ones once for every owner."""
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield module_name, name, parameter


def _finish(
    model: nn.Module, runs: List[str], calls: List[_Call], begins: Dict[str, int], stage_of: Dict[str, int]
) -> Partition:
    _refuse_shared(model, runs, begins, stage_of)
    count = 1 + max([0, *begins.values(), *stage_of.values()])
    at_call = _stage_at_call(calls, begins)
    first_module: Dict[int, str] = {}
    for call in calls:
        if call.works:
            first_module.setdefault(at_call[call.name], call.name)
    names: List[List[str]] = [[] for _ in range(count)]
    for name, _ in model.named_parameters():
        names[stage_of[name]].append(name)
    stages = tuple(Stage(s, first_module.get(s, ""), tuple(names[s])) for s in range(count))
    return Partition(stages, begins)


def _refuse_shared(model: nn.Module, runs: List[str], begins: Mapping[str, int], stage_of: Mapping[str, int]) -> None:
    """A weight with two delays has no meaning: both uses must lie in one stage."""
    first: Dict[int, str] = {}
    faults = []
    for module, own, parameter in _parameters_by_module(model):
        name = _join(module, own)
        other = first.setdefault(id(parameter), name)
        if stage_of[other] != stage_of[name]:
            faults.append(
                f"stages: {other} on stage {stage_of[other]} and {name} on stage {stage_of[name]} are one shared weight: "
                "both uses must lie in one stage"
            )
    reach: Dict[str, int] = {}
    stage = 0
    for name in runs:  # a module that runs again later uses its weights there
        stage = max(stage, begins.get(name, stage))
        owns = any(True for _ in model.get_submodule(name).parameters(recurse=False))
        if owns and reach.setdefault(name, stage) != stage:
            faults.append(
                f"stages: {name} runs on stage {reach[name]} and again on stage {stage}: a weight used in two stages is "
                "refused, both uses must lie in one stage"
            )
    if faults:
        raise BadInput(faults)


# ---- counts


def _read_choice(stages: Any) -> Tuple[int, str, bool]:
    """(count, cost, finest) of a choice that is no list; count 0 stands for one stage a weight."""
    if stages == "finest":
        return 0, "flops", True
    if isinstance(stages, int) and not isinstance(stages, bool):
        stages = {"count": stages}
    if isinstance(stages, Mapping) and set(stages) == {"finest"}:
        count, by, finest = stages["finest"], "flops", True
    elif isinstance(stages, Mapping) and "count" in stages and set(stages) <= {"count", "by"}:
        count, by, finest = stages["count"], stages.get("by", "flops"), False
    else:
        raise BadInput(
            f"stages: {stages}: must be a count, 'finest', a list of module names, {{count: P, by: {'|'.join(COSTS)}}} "
            "or {finest: P}"
        )
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise BadInput(f"stages: {count}: must be a whole number >= 1")
    if by not in COSTS:
        raise BadInput(f"stages: by: {by}: must be one of {', '.join(COSTS)}")
    return count, by, finest


def _weight_groups(model: nn.Module, calls: List[_Call]) -> List[Tuple[_Call, List[str]]]:
    """(module that runs, parameter names) of each weight in the order of execution, a bias joined to the weight before it."""
    order = {call.name: call for call in calls}
    at_call = dict.fromkeys(order, 0)
    owned: Dict[str, List[List[str]]] = {}
    for module, name, _ in _parameters_by_module(model):
        groups = owned.setdefault(_answering(module, at_call), [])
        if groups and "bias" in name and groups[-1][0].rpartition(".")[0] == module:
            groups[-1].append(_join(module, name))
        else:
            groups.append([_join(module, name)])
    return [(call, group) for call in calls for group in owned.get(call.name, [])]


def _spread(
    model: nn.Module, calls: List[_Call], runs: List[str], groups: List[Tuple[_Call, List[str]]], count: int
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
    made = _finish(model, runs, calls, begins, stage_of)
    empty = tuple(Stage(s, "", ()) for s in range(len(made), count))
    return Partition(made.stages + empty, made.begins, spread=True)


TOP_SLACK = 1.5  # how much more the greatest stage may cost for a cut that every backend can make
MOST_PLACES = 2000  # among which the best cut is searched, in time and memory of their square


class _Place(NamedTuple):
    """Where a stage may begin: at call `at`, of the module `name`, which cuts `through` so many modules that are no
    sequences."""

    at: int
    name: str
    through: int


def _balanced(
    model: nn.Module,
    calls: List[_Call],
    runs: List[str],
    groups: List[Tuple[_Call, List[str]]],
    count: int,
    by: str,
    between_top: bool,
) -> Partition:
    """Exactly `count` stages: between modules of the top-level sequence, where every backend can cut, unless a stage of that
    costs over TOP_SLACK times what it must; then at any modules, nested ones too."""
    costs = _costs(model, calls, groups, by)
    places = _places(calls, _held_together(model, calls, runs))
    if len(places) < count:  # what is shared cannot be divided: its refusal names it
        places = _places(calls, set())
    top = [place for place in places if place.through == 0]
    starts: Optional[List[int]] = None
    chosen, units = top, _sums(costs, top)
    if count <= len(top):
        starts = Cuts(units, [1] * len(top), [0] * len(top)).best(count)
    if starts is None or not between_top:
        while len(places) > max(MOST_PLACES, len(top)):
            deepest = max(place.through for place in places)
            places = [place for place in places if place.through < deepest]
        order = {call.name: i for i, call in enumerate(calls)}
        own = [0] * len(calls)
        for call, _ in groups:
            own[order[call.name]] += 1
        weights = [int(total) for total in _sums(own, places)]
        cuts = Cuts(_sums(costs, places), weights, [place.through for place in places])
        if starts is None or greatest(units, starts) > TOP_SLACK * cuts.least(count):
            chosen, starts = places, cuts.best(count)
    if starts is None:  # several weights in one module
        return _spread(model, calls, runs, groups, count)
    begins = _begins_at(calls, {chosen[start].name for start in starts[1:]})
    return _from_begins(model, calls, runs, begins)


def _places(calls: List[_Call], together: Set[int]) -> List[_Place]:
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
            for around in _around(name)
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


def _held_together(model: nn.Module, calls: List[_Call], runs: List[str]) -> Set[int]:
    """Calls at which no stage can begin: between two uses of one weight."""
    order = {call.name: i for i, call in enumerate(calls)}
    uses: Dict[int, List[int]] = {}
    reached = 0
    users = {name: _answering(name, order) for name, _ in model.named_modules()}
    owned: Dict[str, List[int]] = {}
    for module, _, parameter in _parameters_by_module(model):
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


def _costs(model: nn.Module, calls: List[_Call], groups: List[Tuple[_Call, List[str]]], by: str) -> List[float]:
    """Cost of each call: of what runs from there to the next one."""
    if by == "flops":
        return [call.flops for call in calls]
    if by == "time":
        return [_seconds(call) if call.alone else 0.0 for call in calls]
    owned: Dict[str, float] = {}
    seen: Set[int] = set()
    for call, names in groups:
        for parameter in (model.get_parameter(name) for name in names):
            owned[call.name] = owned.get(call.name, 0.0) + (parameter.numel() if id(parameter) not in seen else 0)
            seen.add(id(parameter))
    return [owned.get(call.name, 0.0) for call in calls]


def _seconds(call: _Call, repeats: int = 3) -> float:
    """Least time of a forward and backward of a copy of the module alone, on the inputs it saw."""
    module = copy.deepcopy(call.module)

    def fresh(x: Any) -> Any:  # no leaf of the graph: the module may work in place
        return x.detach().requires_grad_(x.is_floating_point()).clone() if isinstance(x, torch.Tensor) else x

    best = float("inf")
    for _ in range(repeats):
        inputs, keywords = tree_map(fresh, call.inputs)
        _finish_on_gpu()  # what was asked before is not this module's
        start = time.perf_counter()
        output = module(*inputs, **keywords)
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.sum().backward()
        _finish_on_gpu()
        best = min(best, time.perf_counter() - start)
    return best


def _finish_on_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def describe(part: Partition, model: nn.Module, limit: Optional[int] = None) -> List[Tuple[int, str, int]]:
    """(index, first module, number of parameters) of each stage, for printing; the first `limit` stages."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    return [(s.index, s.name, sum(sizes[n] for n in s.parameters)) for s in part.stages[:limit]]
