"""Gradients -> weights: torch.optim optimizers, one parameter group (or two, with `no_decay`) a stage.

All stages share one optimizer object whose state (momentum and the like) is kept by parameter and so by stage. Updates are
told apart by group: a group knows its stage (`group["stage"]`), by which the rules treat stages differently.
"""

from __future__ import annotations

import fnmatch
import functools
import math
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple, Union, cast

import torch
from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.model.stages import Partition
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.table import Schedule

Groups = List[Dict[str, Any]]
OptimizerFactory = Callable[[Groups], torch.optim.Optimizer]

_NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
)


def optimizer_factory(name: str, **settings: Any) -> OptimizerFactory:
    """`sgd`, `adam` or `adamw` of torch.optim with these settings, as a function of the parameter groups."""
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    if name not in kinds:
        raise BadInput(f"optimizer.name: {name}: must be one of {', '.join(kinds)}")
    return functools.partial(kinds[name], **settings)


def parameter_groups(model: nn.Module, part: Partition, no_decay: Union[str, Sequence[str]] = ()) -> Groups:
    """Parameter groups in stage order. Parameters whose names match `no_decay` (patterns as of a shell, or the word
    `norms_and_biases`) form a second group of their stage with `weight_decay` 0.

    Parameters that need no gradient are left out. Raises BadInput where a pattern matches nothing.
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


def stage_groups(groups: Groups, stage: int) -> Groups:
    """The groups of one stage alone, for a process that holds no other. A stage without weights gets an empty parameter,
    since optimizers want one."""
    own = [group for group in groups if group["stage"] == stage]
    return own or [{"params": [nn.Parameter(torch.zeros(0))], "stage": stage}]


def only(groups: Groups, wanted: Set[int]) -> Groups:
    """The groups with those parameters alone whose id is in `wanted`."""
    kept = [{**group, "params": [p for p in group["params"] if id(p) in wanted]} for group in groups]
    return [group for group in kept if group["params"]]


def _undecayed(model: nn.Module, names: Iterable[str], patterns: Sequence[str]) -> List[str]:
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


def clip(optimizer: torch.optim.Optimizer, norm: float, scope: str) -> None:
    """Scale gradients to a Euclidean norm of at most `norm`: over all stages (`global`) or each stage alone (`stage`)."""
    stages: Mapping[Any, List[torch.Tensor]] = parameters_by_stage(optimizer)
    chosen = stages.values() if scope == "stage" else [[p for ps in stages.values() for p in ps]]
    for parameters in chosen:
        scale_to(norm, parameters, gradient_norms(parameters))


def gradient_norms(parameters: Iterable[torch.Tensor]) -> List[torch.Tensor]:
    """Euclidean norms of the gradients that there are, one tensor a kernel: where a stage has a process of its own and where it
    has none, the same kernels must give them (torch's own clipping takes all tensors of a GPU at once)."""
    return [torch.linalg.vector_norm(p.grad) for p in parameters if p.grad is not None]


def scale_to(norm: float, parameters: Iterable[torch.Tensor], norms: Sequence[torch.Tensor]) -> None:
    """Scale gradients so that the norm of all of which `norms` are known, these and maybe others, is at most `norm`."""
    if not norms:
        return
    total = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
    scale = torch.clamp(norm / (total + 1e-6), max=1.0)
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(scale.to(p.grad.device))


def own_norm(parameters: Iterable[torch.Tensor]) -> Optional[float]:
    """Euclidean norm of the gradients of these parameters; None where there is none."""
    norms = gradient_norms(parameters)
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else None


class DelayedGlobalNorm:
    """Clipping of asynchronous methods by a global norm. A stage updates before the other stages have their gradients, so it
    takes the newest update that all stages have done before any of them does this one: `lag` updates back. Right after a
    drain there is none yet, and the stage's own norm clips.
    """

    def __init__(self, norm: float, schedule: Schedule) -> None:
        self._norm, self._schedule = norm, schedule
        self.lag = _common_lag(schedule)
        self._totals: Dict[int, float] = {}

    def source(self, k: int) -> Optional[int]:
        """The update whose global norm clips update k, or None: the stage's own norm does."""
        begin, _ = self._schedule.stretch(k)
        return k - self.lag if k - self.lag >= begin else None

    def is_needed(self, k: int) -> bool:
        """Whether the norm of update k clips a later update."""
        return k + self.lag < self._schedule.stretch(k)[1]

    def remember(self, k: int, norms: Sequence[Optional[float]]) -> None:
        """The stages' norms of update k, in order."""
        self._totals[k] = math.sqrt(sum(n * n for n in norms if n is not None))
        self._totals.pop(k - 2 * self.lag - 1, None)

    def clip(self, k: int, parameters: Sequence[torch.Tensor], own: Optional[float]) -> None:
        """Scale a stage's gradients of update k, whose own norm is `own`."""
        source = self.source(k)
        total = own if source is None else self._totals[source]
        if total is None:
            return
        scale = min(self._norm / (total + 1e-6), 1.0)
        for p in parameters:
            if p.grad is not None:
                p.grad.mul_(scale)


def _common_lag(schedule: Schedule) -> int:
    """The least g such that all stages have done update k - g before any stage does update k, whatever k."""
    longest = max(schedule.parts, key=lambda part: part.microbatches)
    first = longest.first_microbatch // schedule.accumulate
    count = min(longest.microbatches // schedule.accumulate, 4 * schedule.stages + 8)
    slots = schedule.slots(Kind.UPDATE, first, first + count)
    earliest, latest = slots.min(axis=0), slots.max(axis=0)
    for lag in range(1, count):
        if (latest[:-lag] < earliest[lag:]).all():
            return lag
    return max(count, 1)


def parameters_by_stage(optimizer: torch.optim.Optimizer) -> Dict[int, List[torch.Tensor]]:
    """The optimizer's parameters, by stage."""
    by_stage: Dict[int, List[torch.Tensor]] = {}
    for group in optimizer.param_groups:
        by_stage.setdefault(group["stage"], []).extend(group["params"])
    return by_stage


def optimizer_bytes(optimizer: torch.optim.Optimizer, stages: int) -> List[int]:
    """Bytes of optimizer state (momentum, moments, step counts) held for each stage."""
    held = [0] * stages
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor):
                    held[group["stage"]] += value.numel() * value.element_size()
    return held


def export_state(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]
) -> Tuple[Dict[str, torch.Tensor], Dict[str, Any]]:
    """(tensors, plain values) of the optimizer's state, keyed `parameter/entry` by unsplit parameter names; of the parameters
    that have one in `names`."""
    tensors: Dict[str, torch.Tensor] = {}
    plain: Dict[str, Any] = {}
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
    """Put back what `export_state` gave, whatever the number of stages was; of parameters that the optimizer holds."""
    own = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    by_name = {name: parameter for parameter, name in names.items()}
    entries: Dict[str, Dict[str, Any]] = {}
    for key, value in [*tensors.items(), *plain.items()]:
        name, _, entry = key.rpartition("/")
        if name not in by_name:
            raise BadInput(f"checkpoint: optimizer state of {name}: the model has no parameter of that name")
        entries.setdefault(name, {})[entry] = value
    for name, state in entries.items():
        parameter = by_name[name]
        if id(parameter) not in own:
            continue
        group = own[id(parameter)]
        counts_there = bool(
            group.get("fused") or group.get("capturable")
        )  # other optimizers keep step counts on the CPU
        for entry, value in state.items():
            if isinstance(value, torch.Tensor):
                state[entry] = value.to(parameter.device if entry != "step" or counts_there else "cpu")
        optimizer.state[parameter] = state


def kind(optimizer: torch.optim.Optimizer) -> str:
    """sgd, adam or adamw for PyTorch's own classes, else the class's name: a subclass may step otherwise."""
    kinds = {torch.optim.SGD: "sgd", torch.optim.Adam: "adam", torch.optim.AdamW: "adamw"}
    return kinds.get(type(optimizer), type(optimizer).__name__)
