"""The optimizer's parameter groups: by stage, by the config's `optimizer.groups`, and by `no_decay`.

A group knows its stage (`group["stage"]`), by which rates and rules treat stages differently, and the number of its optimizer
among those of the config (`group["member"]`).
"""

from __future__ import annotations

import fnmatch
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Union

import torch
from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.model.stages import Partition
from ipu_pipe.text import list_some, show

Groups = List[Dict[str, Any]]

_NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
)


class Member(NamedTuple):
    """Which parameters an optimizer of the config trains.

    Those whose names match a pattern of `match` and that have `ndim` dimensions; None: all.
    """

    match: Optional[Sequence[str]] = None
    ndim: Optional[int] = None


def make_groups(
    model: nn.Module,
    part: Partition,
    no_decay: Union[str, Sequence[str]] = (),
    members: Sequence[Member] = (Member(),),
) -> Groups:
    """Make parameter groups in stage order. A parameter is in a group of the first of `members` that fits it.

    Parameters whose names match `no_decay` (patterns as in a shell, or the word `norms_and_biases`) form groups of their own with
    `weight_decay` 0. Parameters that need no gradient are left out. Raise `BadInput` if a pattern matches nothing, and for
    parameters that fit no member.
    """
    parameters = dict(model.named_parameters())
    undecayed = _undecayed(model, parameters, [no_decay] if isinstance(no_decay, str) else list(no_decay))
    member_of = _assign_members(parameters, members)
    groups: Groups = []
    for stage in part.stages:
        trained = [name for name in stage.parameters if parameters[name].requires_grad]
        for number in range(len(members)):
            for decays in (True, False):
                chosen = [n for n in trained if member_of.get(n) == number and (n not in undecayed) == decays]
                if chosen:
                    group: Dict[str, Any] = {"params": [parameters[n] for n in chosen], "stage": stage.index, "member": number}
                    groups.append(group if decays else {**group, "weight_decay": 0.0})
    if not groups:
        raise BadInput("model: it has no parameter that needs a gradient: nothing to train")
    return groups


def _assign_members(parameters: Mapping[str, nn.Parameter], members: Sequence[Member]) -> Dict[str, int]:
    """Return the number of the first member that fits each trained parameter, by name.

    Raise `BadInput` for parameters that fit none, and for patterns that match no parameter.
    """
    member_of: Dict[str, int] = {}
    for number, (patterns, ndim) in enumerate(members):
        matched = list(parameters) if patterns is None else []
        for pattern in patterns or ():
            names = fnmatch.filter(parameters, pattern)
            if not names:
                raise BadInput(f"optimizer.groups.{number}.match: {show(pattern)}: matches no parameter of the model")
            matched += names
        for name in matched:
            if ndim is None or parameters[name].dim() == ndim:
                member_of.setdefault(name, number)
    others = [name for name, p in parameters.items() if p.requires_grad and name not in member_of]
    if others:
        raise BadInput(f"optimizer.groups: {list_some(others)}: in no group: add one for the rest, without match and ndim")
    return member_of


def spread_settings(by_stage: Mapping[str, Any], delays: Sequence[float], place: str = "optimizer") -> List[Dict[str, Any]]:
    """Return the settings of each stage, whose delays in updates are `delays` (P,).

    A setting is a list of one value a stage, or {from: a, to: b}, numbers or lists of them: a + (b - a) D / D_max, D the stage's
    delay and D_max the greatest; with over: stages, a + (b - a) D / P. Raise `BadInput`, about the optimizer at `place`, for a
    list of another length.
    """
    settings: List[Dict[str, Any]] = [{} for _ in delays]
    for key, values in by_stage.items():
        if isinstance(values, Mapping):
            over = len(delays) if "over" in values else max(delays)
            values = [_interpolate(values["from"], values["to"], delay / over if over else 0.0) for delay in delays]
        elif len(values) != len(delays):
            raise BadInput(f"{place}.by_stage.{key}: {show(values)}: must be one for each of {len(delays)} stages")
        for of_stage, value in zip(settings, values):
            of_stage[key] = value
    return settings


def _interpolate(first: Any, last: Any, share: float) -> Any:
    """Return the number, or the list of numbers, at `share` of the way from `first` to `last`."""
    if isinstance(first, list):
        return [_interpolate(a, b, share) for a, b in zip(first, last)]
    return float(first) + (float(last) - float(first)) * share


def replace_parameters(groups: Groups, changed: Callable[[nn.Parameter], nn.Parameter]) -> Groups:
    """Replace each parameter by what the optimizer changes in its place, such as its master copy."""
    return [{**group, "params": [changed(p) for p in group["params"]]} for group in groups]


def select_stage(groups: Groups, stage: int) -> Groups:
    """Return the groups of one stage, for a process that holds no other.

    A stage without weights gets an empty parameter, since optimizers want one.
    """
    stage_groups = [group for group in groups if group["stage"] == stage]
    return stage_groups or [make_placeholder(stage)]


def make_placeholder(stage: int) -> Dict[str, Any]:
    """Make a group of one empty parameter, of as many dimensions as the strictest optimizer wants (Muon's two)."""
    return {"params": [nn.Parameter(torch.zeros(0, 0))], "stage": stage, "member": 0}


def select_parameters(groups: Groups, wanted: Set[int]) -> Groups:
    """Return the groups with only those parameters whose id is in `wanted`."""
    narrowed = [{**group, "params": [p for p in group["params"] if id(p) in wanted]} for group in groups]
    return [group for group in narrowed if group["params"]]


def _undecayed(model: nn.Module, names: Iterable[str], patterns: Sequence[str]) -> List[str]:
    """List the names of the parameters that match a pattern. Raise `BadInput` if a pattern matches nothing."""
    chosen: List[str] = []
    for pattern in patterns:
        if pattern == "norms_and_biases":
            norms = {name for name, module in model.named_modules() if isinstance(module, _NORMS)}
            matched = [n for n in names if n.rpartition(".")[0] in norms or n.rpartition(".")[2].startswith("bias")]
        else:
            matched = fnmatch.filter(list(names), pattern)
            if not matched:
                raise BadInput(f"optimizer.no_decay: {pattern}: matches no parameter of the model")
        chosen += matched
    return chosen


OWN_RATES = "optimizer: parameter groups with learning rates of their own"


def has_own_rates(optimizer: torch.optim.Optimizer, base: float) -> bool:
    """Return whether any group has another learning rate than `base`."""
    return any(group["lr"] != base for group in optimizer.param_groups)
