"""The optimizer's parameter groups: one for each stage, or two with `no_decay`.

A group knows its stage (`group["stage"]`), by which rates and rules treat stages differently.
"""

from __future__ import annotations

import fnmatch
from typing import Any, Callable, Dict, Iterable, List, Sequence, Set, Union

import torch
from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.model.stages import Partition

Groups = List[Dict[str, Any]]

_NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
)


def make_groups(model: nn.Module, part: Partition, no_decay: Union[str, Sequence[str]] = ()) -> Groups:
    """Make parameter groups in stage order.

    Parameters whose names match `no_decay` (patterns as in a shell, or the word `norms_and_biases`) form a second group of their
    stage with `weight_decay` 0. Parameters that need no gradient are left out. Raise `BadInput` if a pattern matches nothing.
    """
    parameters = dict(model.named_parameters())
    undecayed = _undecayed(model, parameters, [no_decay] if isinstance(no_decay, str) else list(no_decay))
    groups: Groups = []
    for stage in part.stages:
        for decays in (True, False):
            chosen = [n for n in stage.parameters if (n not in undecayed) == decays and parameters[n].requires_grad]
            if chosen:
                group: Dict[str, Any] = {"params": [parameters[n] for n in chosen], "stage": stage.index}
                groups.append(group if decays else {**group, "weight_decay": 0.0})
    if not groups:
        raise BadInput("model: it has no parameter that needs a gradient: nothing to train")
    return groups


def replace_parameters(groups: Groups, changed: Callable[[nn.Parameter], nn.Parameter]) -> Groups:
    """Replace each parameter by what the optimizer changes in its place, such as its master copy."""
    return [{**group, "params": [changed(p) for p in group["params"]]} for group in groups]


def select_stage(groups: Groups, stage: int) -> Groups:
    """Return the groups of one stage, for a process that holds no other.

    A stage without weights gets an empty parameter, since optimizers want one.
    """
    stage_groups = [group for group in groups if group["stage"] == stage]
    return stage_groups or [{"params": [nn.Parameter(torch.zeros(0))], "stage": stage}]


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
