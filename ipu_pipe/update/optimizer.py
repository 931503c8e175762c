"""The torch.optim optimizer of a run: its parameter groups, its factories, the size of its state,
and its state in checkpoints.

All stages of a process share one optimizer, whose state (momentum and the like) belongs to
parameters and so to stages. If the config's groups have different optimizers, `OptimizersByGroup`
joins them.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import functools
import inspect
from collections import defaultdict
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    cast,
)

import torch
from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.model.batch import count_bytes
from ipu_pipe.model.stages import Partition
from ipu_pipe.text import describe_kind, list_some, show

# ---- the optimizer's parameter groups: by stage, by the config's `optimizer.groups`, and by `no_decay`
#
# A member is one entry of the config's `optimizer.groups`, with an optimizer of its own (without
# the key there is one member). A parameter group has its stage (`group["stage"]`), by which rates
# and rules treat stages differently, and the number of its member (`group["member"]`).

Groups = List[Dict[str, Any]]

_NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
)


class Member(NamedTuple):
    """The parameters that a member trains: those whose names match a pattern of `match` and that
    have `ndim` dimensions; None means all."""

    match: Sequence[str] | None = None
    ndim: int | None = None


# (name, parameter) -> the number of its member, None if it is not trained
ChooseMember = Callable[[str, nn.Parameter], Optional[int]]


def make_groups(
    model: nn.Module,
    part: Partition,
    no_decay: str | Sequence[str] = (),
    members: Sequence[Member] = (Member(),),
    choose_member: ChooseMember | None = None,
) -> Groups:
    """Make parameter groups in stage order. A parameter is in a group of the first of `members`
    that fits it.

    `choose_member` decides instead of what the members match; a parameter that it gives no member
    is left out.

    Parameters whose names match `no_decay` (patterns as in a shell, or the word `norms_and_biases`)
    form groups of their own with `weight_decay` 0. Parameters that need no gradient are left out.
    Raise `BadInput` if a pattern matches nothing, and for parameters that fit no member.
    """
    parameters = dict(model.named_parameters())
    undecayed = _list_undecayed(
        model, parameters, [no_decay] if isinstance(no_decay, str) else list(no_decay)
    )
    if choose_member is None:
        member_of: Mapping[str, int | None] = _assign_members(parameters, members)
    else:
        member_of = {name: choose_member(name, p) for name, p in parameters.items()}
    groups: Groups = []
    for stage in part.stages:
        trained = [name for name in stage.parameters if parameters[name].requires_grad]
        for number in range(len(members)):
            # weight decay is a setting of groups: parameters without it need their own
            for decays in (True, False):
                chosen = [
                    n
                    for n in trained
                    if member_of.get(n) == number and (n not in undecayed) == decays
                ]
                if chosen:
                    group: dict[str, Any] = {
                        "params": [parameters[n] for n in chosen],
                        "stage": stage.index,
                        "member": number,
                    }
                    groups.append(group if decays else {**group, "weight_decay": 0.0})
    if not groups:
        raise BadInput("model: it has no parameter that needs a gradient: nothing to train")
    return groups


def _assign_members(
    parameters: Mapping[str, nn.Parameter], members: Sequence[Member]
) -> dict[str, int]:
    """Return the number of the first member that fits each trained parameter, by name.

    Raise `BadInput` for parameters that fit none, and for patterns that match no parameter.
    """
    member_of: dict[str, int] = {}
    for number, (patterns, ndim) in enumerate(members):
        matched = list(parameters) if patterns is None else []
        for pattern in patterns or ():
            names = fnmatch.filter(parameters, pattern)
            if not names:
                raise BadInput(
                    f"optimizer.groups.{number}.match: {show(pattern)}: matches no parameter of "
                    f"the model"
                )
            matched += names
        for name in matched:
            if ndim is None or parameters[name].dim() == ndim:
                member_of.setdefault(name, number)
    # a frozen parameter needs no group
    others = [name for name, p in parameters.items() if p.requires_grad and name not in member_of]
    if others:
        raise BadInput(
            f"optimizer.groups: {list_some(others)}: in no group: add one for the rest, without "
            f"match and ndim"
        )
    return member_of


def spread_settings(
    by_stage: Mapping[str, Any], delays: Sequence[float], place: str = "optimizer.by_stage"
) -> list[dict[str, Any]]:
    """Return the settings of each stage, whose delays in updates are `delays` (P,).

    A setting is a list of one value a stage, or {from: a, to: b}, numbers or lists of them:
    a + (b - a) D / D_max, D the stage's delay and D_max the greatest; with over: stages,
    a + (b - a) D / P. Raise `BadInput`, about the settings at `place`, for a list of another length.
    """
    settings: list[dict[str, Any]] = [{} for _ in delays]
    for key, values in by_stage.items():
        if isinstance(values, Mapping):
            # without any delay all stages have `from`
            over = len(delays) if "over" in values else max(delays)
            values = [
                _interpolate(values["from"], values["to"], delay / over if over else 0.0)
                for delay in delays
            ]
        elif len(values) != len(delays):
            raise BadInput(
                f"{place}.{key}: {show(values)}: must be one for each of {len(delays)} stages"
            )
        for stage_settings, value in zip(settings, values):
            stage_settings[key] = value
    return settings


def _interpolate(first: Any, last: Any, share: float) -> Any:
    """Return the number, or the list of numbers, at `share` of the way from `first` to `last`."""
    if isinstance(first, list):
        return [_interpolate(a, b, share) for a, b in zip(first, last)]
    return float(first) + (float(last) - float(first)) * share


def replace_parameters(groups: Groups, replace: Callable[[nn.Parameter], nn.Parameter]) -> Groups:
    """Replace each parameter by the tensor that the optimizer updates instead, such as its master
    copy.
    """
    return [{**group, "params": [replace(p) for p in group["params"]]} for group in groups]


def select_stage(groups: Groups, stage: int) -> Groups:
    """Return the groups of one stage, for a process that has no other stage.

    A stage without weights gets an empty parameter, because optimizers need one.
    """
    stage_groups = [group for group in groups if group["stage"] == stage]
    return stage_groups or [make_placeholder(stage)]


def make_placeholder(stage: int) -> dict[str, Any]:
    """Make a group of one empty parameter with two dimensions, which the strictest optimizer (Muon)
    requires.
    """
    return {"params": [nn.Parameter(torch.zeros(0, 0))], "stage": stage, "member": 0}


def select_parameters(groups: Groups, wanted: set[int]) -> Groups:
    """Return the groups with only those parameters whose id is in `wanted`."""
    narrowed = [
        {**group, "params": [p for p in group["params"] if id(p) in wanted]} for group in groups
    ]
    return [group for group in narrowed if group["params"]]


def _list_undecayed(model: nn.Module, names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """List the names of the parameters that match a pattern. Raise `BadInput` if a pattern matches
    nothing.
    """
    chosen: list[str] = []
    for pattern in patterns:
        if pattern == "norms_and_biases":
            norms = {name for name, module in model.named_modules() if isinstance(module, _NORMS)}
            matched = [
                n
                for n in names
                if n.rpartition(".")[0] in norms or n.rpartition(".")[2].startswith("bias")
            ]
        else:
            matched = fnmatch.filter(list(names), pattern)
            if not matched:
                raise BadInput(f"optimizer.no_decay: {pattern}: matches no parameter of the model")
        chosen += matched
    return chosen


# ---- the optimizer

OptimizerFactory = Callable[[Groups], torch.optim.Optimizer]


def make_factory_by_name(name: str, **settings: Any) -> OptimizerFactory:
    """Return a function that makes `sgd`, `adam` or `adamw` of torch.optim with these settings from
    parameter groups.
    """
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    if name not in kinds:
        raise BadInput(f"optimizer.name: {name}: must be one of {', '.join(kinds)}")
    return functools.partial(kinds[name], **settings)


KINDS = {
    torch.optim.SGD: "sgd",
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adamw",
    torch.optim.RMSprop: "rmsprop",
}
# state without a dimension; the second is NAdam's
COUNTS = ("step", "mu_product")
# torch's optimizers that step each element by itself, and keep nothing in their groups
ELEMENTWISE = (
    *KINDS,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Rprop,
)
# assumed for optimizers that `count_moments` does not know
MOST_MOMENTS = 2


def list_settings_of(kind: type[torch.optim.Optimizer]) -> list[str]:
    """Return the settings that the constructor of a class of optimizers takes; torch adds defaults
    that it does not take, such as AdamW's decoupled_weight_decay.
    """
    parameters = inspect.signature(kind.__init__).parameters
    return [name for name in parameters if name not in ("self", "params")]


# methods by which schedule-free optimizers switch between the weights of evaluation and of training
MODES = ("eval", "train")


class RefusedStep:
    """A hook by which the optimizer of a pipeline refuses the caller's own steps, and not those of its
    copies, which have the same hooks.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Raise `RuntimeError` in a step of the optimizer itself."""
        if optimizer is self._optimizer:
            raise RuntimeError(
                "optimizer.step(): the pipeline steps this optimizer, each stage in its turn: call "
                "pipe.step(x, y) alone"
            )


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the caller has hooks in the steps of an optimizer."""
    kinds = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    hooks = [hook for kind in kinds for hook in getattr(optimizer, kind, {}).values()]
    return not all(isinstance(hook, RefusedStep) for hook in hooks)


def copy_without_groups(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer with the attributes and hooks of another one, and without groups.

    Raise `BadInput` if it has another optimizer inside, whose groups would stay those of the whole
    model.
    """
    attributes = vars(optimizer)
    inside = [n for n, value in attributes.items() if isinstance(value, torch.optim.Optimizer)]
    if inside:
        raise BadInput(
            f"optimizer: {type(optimizer).__name__}: {inside[0]}: is an optimizer of its own, which "
            f"would step the whole model: give one optimizer that steps its groups itself"
        )
    # not by the constructor, with whose arguments nobody knows the optimizer was made
    copied: torch.optim.Optimizer = object.__new__(type(optimizer))
    copied.__dict__.update(attributes)
    # a scheduler and a pipeline have put wrappers there, which call the original
    for name in ("step", "load_state_dict", *MODES):
        copied.__dict__.pop(name, None)
    copied.param_groups = []
    return copied


def copy_setting(value: Any) -> Any:
    """Copy a setting; a learning rate may be a tensor that its scheduler changes in place."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def copy_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the settings of a group."""
    return {key: copy_setting(value) for key, value in group.items() if key != "params"}


class RecordedSettings(Dict[str, Any]):
    """The settings of a group for one update; `changes`: for each, the number of the record with
    which the caller has changed it last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changes: dict[str, int] = {}


class OptimizersByGroup(torch.optim.Optimizer):
    """Several optimizers as one: with the parameter groups and the state of all, in the order of
    the stages.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__(
            sorted(
                (group for part in parts for group in part.param_groups), key=lambda g: g["stage"]
            ),
            {},
        )
        # all groups of a part are of one member
        self.parts = {part.param_groups[0]["member"]: part for part in parts}
        for part in parts:
            # one state, so that checkpoints and rules see that of all parts
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step all parameters that have a gradient."""
        for part in self.parts.values():
            # those of other stages may be hidden (`show_groups`)
            if part.param_groups:
                part.step()


def list_parts(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the parts of an `OptimizersByGroup`, or the optimizer itself."""
    return (
        list(optimizer.parts.values()) if isinstance(optimizer, OptimizersByGroup) else [optimizer]
    )


@contextlib.contextmanager
def show_groups(optimizer: torch.optim.Optimizer, groups: Groups) -> Iterator[None]:
    """Hide all parameter groups but these from the optimizer and its parts inside the context."""
    shown = {id(group) for group in groups}
    present = [(part, part.param_groups) for part in list_parts(optimizer)]
    for part, all_groups in present:
        part.param_groups = [group for group in all_groups if id(group) in shown]
    try:
        yield
    finally:
        for part, all_groups in present:
            part.param_groups = all_groups


def keeps_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether all parts are torch's own optimizers that step each element by itself, whose
    entries have the shape of their parameter.
    """
    return all(type(part) in ELEMENTWISE for part in list_parts(optimizer))


def get_kind(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
    """Return the kind of optimizer that steps a parameter group of `optimizer`.

    It is sgd, adam, adamw or rmsprop for PyTorch's own classes, else the name of the class, because
    a subclass may step differently.
    """
    part = (
        optimizer.parts[group["member"]] if isinstance(optimizer, OptimizersByGroup) else optimizer
    )
    kind = KINDS.get(type(part), type(part).__name__)
    # torch's Adam is its AdamW with this setting, which a group may have of its own
    if kind in ("adam", "adamw") and "decoupled_weight_decay" in group:
        return "adamw" if group["decoupled_weight_decay"] else "adam"
    return kind


def list_kinds(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the kinds of an optimizer's parts, each once."""
    return list(dict.fromkeys(get_kind(optimizer, group) for group in optimizer.param_groups))


def count_moments(kind: str, settings: Mapping[str, Any]) -> int:
    """Return the number of tensors of a parameter's shape in an optimizer's state for it.

    `kind`: as `get_kind` returns it, or a config's name; `settings`: the settings of the
    parameter's group. Memory, planning and the papers' figures all use this function.
    """
    name = kind.rpartition(".")[2].lower()
    if name == "sgd":
        return int(bool(settings.get("momentum")))
    if name == "rmsprop":
        return 1 + int(bool(settings.get("momentum"))) + int(bool(settings.get("centered")))
    if name in ("adagrad", "muon"):
        return 1
    return MOST_MOMENTS + int(bool(settings.get("amsgrad")))


def count_most_moments(optimizer: torch.optim.Optimizer) -> int:
    """Return the greatest `count_moments` of an optimizer's groups: a stage may have any of them."""
    return max(count_moments(get_kind(optimizer, group), group) for group in optimizer.param_groups)


def make_factory_by_group(factories: Sequence[OptimizerFactory]) -> OptimizerFactory:
    """Return a function that makes one optimizer from parameter groups: factory i makes the part
    for the groups of member i.
    """

    def make(groups: Groups) -> torch.optim.Optimizer:
        chosen = [
            [group for group in groups if group["member"] == number]
            for number in range(len(factories))
        ]
        return OptimizersByGroup(
            # a process may have no parameter of a member
            [call_factory(factory, part) for factory, part in zip(factories, chosen) if part]
        )

    return make


def call_factory(factory: OptimizerFactory, groups: Groups) -> torch.optim.Optimizer:
    """Make an optimizer. Raise `BadInput` if the user's function returns something else, or ignores
    its groups.
    """
    optimizer: Any = factory(groups)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadInput(
            f"optimizer: returned {describe_kind(optimizer)}: must return a torch.optim.Optimizer"
        )
    if not all("stage" in group for group in optimizer.param_groups):
        why = (
            "has other parameters: must be made from the groups of its argument, as "
            "functools.partial(torch.optim.SGD, lr=0.1)"
        )
        raise BadInput(f"optimizer: {why}")
    return optimizer


ALLOWED = (
    "a torch.optim class (with optimizer_args, or as (class, {...})), an optimizer, or a "
    "function of parameter groups"
)


def make_factory_of(optimizer: Any, args: Mapping[str, Any] | None = None) -> OptimizerFactory:
    """Return a function that makes an optimizer from Python from parameter groups, of which each
    stage has one or more.

        factory     functools.partial(torch.optim.SGD, lr=0.1)          called with the groups
        class       torch.optim.AdamW with its arguments `args`         the same
        instance    torch.optim.SGD(model.parameters(), lr=0.1)         its class and the settings of each of its groups, copied

    Raise `BadInput` for anything else.
    """
    is_pair = isinstance(optimizer, tuple) and len(optimizer) == 2
    if is_pair and inspect.isclass(optimizer[0]) and isinstance(optimizer[1], Mapping):
        optimizer, args = optimizer[0], {**optimizer[1], **(args or {})}
    if isinstance(optimizer, torch.optim.Optimizer):
        if args:
            raise BadInput(
                "optimizer_args: cannot be combined with an optimizer instance, which has its own "
                "settings"
            )
        return _CopyFactory(optimizer)
    if (
        inspect.isclass(optimizer) and not issubclass(optimizer, torch.optim.Optimizer)
    ) or not callable(optimizer):
        raise BadInput(f"optimizer: {describe_kind(optimizer)}: must be {ALLOWED}")
    return _CallFactory(optimizer, dict(args or {}))


class _CallFactory:
    """A factory that calls a class or a function with its arguments, and reports wrong arguments in
    one line.
    """

    def __init__(self, function: Any, args: dict[str, Any]) -> None:
        self._function = function
        self._args = args

    def __call__(self, groups: Groups) -> torch.optim.Optimizer:
        inner = (
            self._function.func if isinstance(self._function, functools.partial) else self._function
        )
        # without arguments none can be wrong: what it raises is its own
        if not self._args and not inspect.isclass(inner):
            return self._function(groups)  # type: ignore[no-any-return]
        name = getattr(inner, "__name__", type(inner).__name__)
        try:
            if inner is self._function:
                inspect.signature(inner).bind(groups, **self._args)
            return self._function(groups, **self._args)  # type: ignore[no-any-return]
        except (TypeError, ValueError) as error:
            raise BadInput(f"optimizer: {name}: {error}") from error


class _CopyFactory:
    """A factory that makes optimizers of the class and settings of an existing one, over the same
    parameters.
    """

    def __init__(self, original: torch.optim.Optimizer) -> None:
        if original.state:
            raise BadInput(
                f"optimizer: {type(original).__name__}: has stepped already, and its state would "
                f"be lost: give a new one, or its"
                " class and arguments"
            )
        self._original = original
        self._settings = {
            id(p): (
                number,
                # a scheduler of the original left initial_lr, from which a new one would begin
                {key: value for key, value in group.items() if key not in ("params", "initial_lr")},
            )
            for number, group in enumerate(original.param_groups)
            for p in group["params"]
        }

    def __call__(self, groups: Groups) -> torch.optim.Optimizer:
        copied = copy_without_groups(self._original)
        copied.state = defaultdict(dict)
        for group in groups:
            for subgroup in self._divide(group):
                copied.add_param_group(subgroup)
        return copied

    def _divide(self, group: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Divide the group of a stage into the groups of the optimizer that is copied, in its
        order.
        """
        others = {key: value for key, value in group.items() if key != "params"}
        # a stage may have no weights
        if not any(p.numel() for p in group["params"]):
            return [dict(group)]
        missing = sum(id(p) not in self._settings for p in group["params"])
        if missing:
            raise BadInput(
                f"optimizer: {type(self._original).__name__}: lacks {missing} of the {len(group['params'])} "
                f"parameters of stage"
                f" {group['stage']}: it must be made from all parameters of the given model; use "
                f"requires_grad_(False) for those"
                " that are not trained"
            )
        groups: dict[int, dict[str, Any]] = {}
        for p in group["params"]:
            number, settings = self._settings[id(p)]
            # what the stage's group says goes before, such as no_decay's weight_decay of 0
            groups.setdefault(number, {**settings, **others, "params": []})["params"].append(p)
        return [groups[number] for number in sorted(groups)]


def count_state_bytes(
    optimizer: torch.optim.Optimizer, stages: int, others: Sequence[Mapping[Any, Any]] = ()
) -> list[int]:
    """Count the bytes of optimizer state (momentum, moments, step counts) of each stage.

    `others`: state of the same parameters that is kept elsewhere, by parameter.
    """
    stage_bytes = [0] * stages
    for group in optimizer.param_groups:
        states = [state.get(p, {}) for state in (optimizer.state, *others) for p in group["params"]]
        stage_bytes[group["stage"]] += count_bytes(states)
    return stage_bytes


def export_state(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return (tensors, plain values) of the optimizer's state, keyed `parameter/entry`.

    `names` maps parameters to their names in the model before it was split; others are left out.
    """
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, Any] = {}
    for parameter, state in optimizer.state.items():
        name = names.get(cast(nn.Parameter, parameter))
        for entry, value in state.items() if name is not None else ():
            key = f"{name}/{entry}"
            if isinstance(value, torch.Tensor):
                tensors[key] = value.detach()
            else:
                plain[key] = value
    return tensors, plain


def import_state(
    optimizer: torch.optim.Optimizer,
    names: Mapping[nn.Parameter, str],
    tensors: Mapping[str, torch.Tensor],
    plain: Mapping[str, Any],
) -> None:
    """Put back the state that `export_state` returned, whatever the number of stages was then.

    State of other trained parameters than this optimizer's is skipped; those that had none have
    none afterwards. Raise `BadInput` for a name that the model does not have.
    """
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    by_name = {name: parameter for parameter, name in names.items()}
    entries: dict[str, dict[str, Any]] = {}
    for key, value in [*tensors.items(), *plain.items()]:
        name, _, entry = key.rpartition("/")
        if name not in by_name:
            raise BadInput(
                f"checkpoint: optimizer state of {name}: the model has no parameter of that name"
            )
        entries.setdefault(name, {})[entry] = value
    # no group has a frozen weight, whose entries wait until it trains again
    parameters = {p for p in names if id(p) in group_of or not p.requires_grad}
    for parameter in parameters:
        if names[parameter] not in entries:
            optimizer.state.pop(parameter, None)
    for name, state in entries.items():
        parameter = by_name[name]
        # a weight of another process's stages
        if parameter not in parameters:
            continue
        group = group_of.get(id(parameter), {})
        # other optimizers have their step counts on the CPU
        counts_there = bool(group.get("fused") or group.get("capturable"))
        for entry, value in state.items():
            # the last part, because entries of other replicas have a prefix (replay.replicas)
            is_count = entry.rpartition(".")[2] in COUNTS
            if isinstance(value, torch.Tensor):
                state[entry] = value.to(parameter.device if not is_count or counts_there else "cpu")
        optimizer.state[parameter] = state
