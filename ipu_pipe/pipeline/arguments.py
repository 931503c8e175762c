"""Arguments of `Pipeline` that a config words otherwise: the device, the deadline, the process
group, settings of heads.
"""

from __future__ import annotations

import math
from typing import Any, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from ipu_pipe.config.schema import BackendConfig
from ipu_pipe.config.sections import BY_STAGE, is_by_stage
from ipu_pipe.errors import BadInput, raise_faults
from ipu_pipe.model.devices import get_kind
from ipu_pipe.model.stages import explain_too_many
from ipu_pipe.schedule.methods import METHODS
from ipu_pipe.text import describe_kind, list_some, show
from ipu_pipe.update.optimizer import list_settings_of

# seconds; as in a config
DEADLINE = 300.0


def make_backend_section(
    model: nn.Module,
    name: str,
    device: str | torch.device | None,
    deadline: float,
    backend_args: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the config's section of the backend. Raise `BadInput` if `backend_args` contradicts
    another argument.
    """
    section = {"name": name, **(backend_args or {})}
    if device is not None:
        # what is no device goes on as it was written, and the config's check names it
        kind = torch.device(device).type if _is_device(device) else str(device)
        _require_agreement(section, "device", kind)
        section["device"] = kind
    # an argument that was left out cannot contradict `backend_args`
    if deadline != DEADLINE:
        _require_agreement(section, "deadline", deadline)
        section["deadline"] = deadline
    section.setdefault("device", _find_device(model))
    section.setdefault("deadline", deadline)
    return section


def make_clip_section(clip: Any, method: Any) -> dict[str, Any] | None:
    """Return the config's section of clipping. Raise `BadInput` unless `clip` is a norm, a pair of
    it and a scope, or None for no clipping.

    A norm alone is of all gradients, as in a plain loop, if the method flushes, else of a stage's.
    """
    if clip is None:
        return None
    if isinstance(clip, (int, float)) and not isinstance(clip, bool):
        # a method that does not exist is named by the config's check, later
        row = METHODS.get(method) if isinstance(method, str) else None
        return {"norm": clip, "scope": "global" if row is not None and row.flushes else "stage"}
    if not isinstance(clip, (tuple, list)) or len(clip) != 2:
        raise BadInput(
            f'clip: {show(clip)}: must be a norm, or a pair (norm, scope), such as (1.0, "stage")'
        )
    return {"norm": clip[0], "scope": clip[1]}


def require_values(model: nn.Module) -> None:
    """Raise `BadInput` for a model on the meta device, whose weights have no values."""
    absent = [name for name, p in model.named_parameters() if p.is_meta]
    if absent:
        raise BadInput(
            f"model: {list_some(absent)}: on the meta device, without values: call "
            f"model.to_empty(device=...), and load or initialize its weights"
        )


def require_weights_for(model: nn.Module, stages: Any) -> None:
    """Raise `BadInput` for more stages than layers with weights. Otherwise a batch, whose
    microbatches are as many by default, would be blamed.
    """
    count = stages.get("count") if isinstance(stages, Mapping) else stages
    # a bias that was left out is None in the table
    layers = [m for m in model.modules() if any(p is not None for p in m._parameters.values())]
    # a model without weights is refused later, and for that
    if isinstance(count, int) and count > max(len(layers), 1):
        raise BadInput(explain_too_many(count, len(layers)))


def require_kinds(
    method_args: Any, backend_args: Any, warmup: Any, example: Any, deadline: Any
) -> None:
    """Raise `BadInput` for arguments that are not of the kind that they must be."""
    mappings = {"method_args": method_args, "backend_args": backend_args}
    faults: dict[str, Any] = {
        f"{name}: {show(value)}: must be a mapping, or None": value is not None
        and not isinstance(value, Mapping)
        for name, value in mappings.items()
    }
    # a bool is an int in Python, and warmup=True would be one update
    is_count = isinstance(warmup, int) and not isinstance(warmup, bool) and warmup >= 0
    faults[f"warmup: {show(warmup)}: must be a number of updates"] = not is_count
    is_number = isinstance(deadline, (int, float))
    faults[f"deadline: {show(deadline)}: must be a number of seconds"] = not is_number
    is_pair = isinstance(example, (tuple, list)) and len(example) == 2
    faults[f"example: {describe_kind(example)}: must be a pair (x, y), or None"] = (
        example is not None and not is_pair
    )
    raise_faults(faults)


def require_metrics(metrics: Any) -> Any:
    """Return the metrics of `evaluate`; none for None. Raise `BadInput` for another kind than a list
    or a mapping.
    """
    if metrics is not None and not isinstance(metrics, (list, tuple, Mapping)):
        raise BadInput(
            f"evaluate: metrics: {show(metrics)}: must be a list, or a mapping from names, such as "
            f'["accuracy"]'
        )
    return metrics or ()


def require_iterable(call: str, name: str, value: Any) -> None:
    """Raise `BadInput` for an argument of a call that cannot be iterated over."""
    # `iter` also takes objects with __getitem__ alone, as torch's map-style data sets are
    if not isinstance(value, Iterable) and not hasattr(value, "__getitem__"):
        raise BadInput(f"{call}: {name}: {describe_kind(value)}: must be an iterable of batches")


def _is_device(device: str | torch.device) -> bool:
    try:
        torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


def _require_agreement(section: Mapping[str, Any], key: str, value: Any) -> None:
    if section.get(key, value) != value:
        why = (
            f"backend_args has {show(section[key])}: must be one of them: leave it out of "
            f"backend_args"
        )
        raise BadInput(f"{key}: {show(value)}: {why}")


def _find_device(model: nn.Module) -> str:
    """Return the kind of device on which the model is; the CPU for a model without values."""
    tensors = [*model.parameters(), *model.buffers()]
    kinds = sorted({tensor.device.type for tensor in tensors if not tensor.is_meta})
    if len(kinds) > 1:
        raise BadInput(
            f"device: None: the model is on {' and '.join(kinds)}: move all of it to one, or give "
            f"device"
        )
    return kinds[0] if kinds else "cpu"


def require_current_gpu(model: nn.Module, device: str | torch.device | None) -> None:
    """Raise `BadInput` if another GPU is meant than the current one, on which a pipeline trains.

    `device`: the argument; None: where the model is.
    """
    named = [p.device for p in model.parameters()] if device is None else [torch.device(device)]
    places = [where for where in named if where.index is not None]
    # a device without a number is the current one
    kind = get_kind(places[0]) if places else get_kind("cpu")
    if not (kind.is_accelerator and kind.is_available() and kind.offers("current_device")):
        return
    current = kind.get_current()
    others = {where.index for where in places if where.type == kind.name} - {current}
    if others:
        index = min(others)
        raise BadInput(
            f"device: {kind.name}:{index}: the current one is {kind.name}:{current}: call "
            f"torch.{kind.name}.set_device({index}) first, and move the model there"
        )


def require_group(argument: str, group: Any, backend: BackendConfig) -> None:
    """Raise `BadInput` if `group`, of the argument process_group or data_group, is not a process
    group with this rank; None is none.
    """
    if group is None:
        return
    if not backend.facts.uses_processes:
        raise BadInput(
            f"{argument}: backend {backend.name} has no processes: leave it out, or use "
            f"backend='distributed'"
        )
    if not isinstance(group, dist.ProcessGroup):
        # new_group returns this to the ranks that are not in the group
        is_outside = group == dist.GroupMember.NON_GROUP_MEMBER
        what = "a group without this rank" if is_outside else describe_kind(group)
        raise BadInput(f"{argument}: {what}: must be a torch.distributed.ProcessGroup, or None")


def count_replicas(replicas: int, process_group: Any, data_group: Any) -> int:
    """Return the replicas of a pipeline, which are the ranks of its data group if there is one.
    Raise `BadInput` if the two groups do not fit, or `replicas` contradicts them.
    """
    if data_group is None:
        return replicas
    # others are refused by `require_group`
    if not all(
        isinstance(group, dist.ProcessGroup) for group in (process_group, data_group) if group
    ):
        return 1
    if process_group is None:
        raise BadInput(
            "data_group: without process_group all ranks hold stages: give the group of the stages, "
            'such as mesh["pp"].get_group()'
        )
    ranks = dist.get_process_group_ranks(data_group)
    stages = dist.get_process_group_ranks(process_group)
    shared = sorted({*ranks} & {*stages} - {dist.get_rank()})
    if shared:
        raise BadInput(
            f"data_group: rank {shared[0]} is in process_group, too: the groups must share this "
            f"rank alone"
        )
    # 1 is the default, which says nothing
    if replicas not in (1, len(ranks)):
        raise BadInput(
            f"replicas: {replicas}: data_group has {len(ranks)} ranks, which are the replicas: "
            f"leave it out"
        )
    return len(ranks)


def explain_unlike(value: Any, default: Any) -> str:
    """Return why a setting of an optimizer may not stand for its default, "" if it may.

    A number stands for a number, and several numbers for as many.
    """
    if _is_like(value, default):
        return ""
    is_single = isinstance(value, torch.Tensor) and value.numel() == 1
    is_number = isinstance(value, float) or is_single
    is_too_large = is_number and not isinstance(default, (tuple, list))
    allowed = "in the range of float32" if is_too_large else f"of the kind of {show(default)}"
    return f"{show(value)}: must be {allowed}"


def _is_like(value: Any, default: Any) -> bool:
    if isinstance(default, (tuple, list)):
        is_sequence = isinstance(value, (tuple, list)) and len(value) == len(default)
        return is_sequence and all(map(_is_like, value, default))
    if isinstance(default, bool) or not isinstance(default, (int, float, torch.Tensor)):
        return True
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.dtype is not torch.float64:
            return value.numel() == (default.numel() if isinstance(default, torch.Tensor) else 1)
        value = value.item()
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    # torch takes no whole number beyond 64 bits, and converts others to the type of the weights
    largest = 2**63 - 1 if isinstance(value, int) else torch.finfo(torch.float32).max
    return not largest < abs(value) < math.inf


def require_settings_of(
    optimizer: torch.optim.Optimizer, argument: str, settings: Mapping[str, Any]
) -> None:
    """Raise `BadInput` if `settings`, of the `argument` heads or by_stage, are not settings of the
    optimizer.
    """
    if not isinstance(settings, Mapping):
        raise BadInput(
            f"{argument}: {show(settings)}: must be a mapping of the optimizer's settings, such as "
            f"{{'lr': 0.1}}"
        )
    allowed = ", ".join(optimizer.defaults)
    kind = type(optimizer)
    unknown = [key for key in settings if key not in optimizer.defaults]
    raise_faults(
        [
            f"{argument}: {show(key)}: must be a setting of {kind.__name__}: {allowed}"
            for key in unknown
        ]
    )
    for key, value in settings.items():
        if why := explain_unlike(value, optimizer.defaults[key]):
            raise BadInput(f"{argument}: {key}: {why}")
    # the constructors of PyTorch's own optimizers check values, and have no effect
    if not kind.__module__.startswith("torch.optim."):
        return
    accepted = list_settings_of(kind)
    # constructors also check settings against one another: Nesterov needs momentum
    both = {**optimizer.defaults, **settings}
    try:
        kind(
            # a matrix, since Muon refuses other parameters
            [nn.Parameter(torch.zeros(1, 1))],
            **{key: value for key, value in both.items() if key in accepted},
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(f"{argument}: {error}") from error


def parse_by_stage(by_stage: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return settings by stage as a config has them. Raise `BadInput` for settings that are not the
    optimizer's, or have another form.
    """
    if not isinstance(by_stage, Mapping):
        example = "{'lr': [0.1, 0.05]}"
        raise BadInput(f"by_stage: {show(by_stage)}: must be a mapping of settings, as {example}")
    # names alone are checked here, by values that pass: a list by stage is no value of a setting
    present = {key: optimizer.defaults.get(key) for key in by_stage}
    require_settings_of(optimizer, "by_stage", present)
    parsed: dict[str, Any] = {}
    for key, values in by_stage.items():
        # a config, as YAML gives it, has lists
        parsed[key] = list(values) if isinstance(values, tuple) else values
        if isinstance(values, Mapping):
            parsed[key] = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
        if not is_by_stage(parsed[key]):
            raise BadInput(f"by_stage.{key}: {show(values)}: {BY_STAGE}")
    return parsed
