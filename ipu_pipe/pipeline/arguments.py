"""Arguments of `Pipeline` that a config words otherwise: the device, the deadline, the process
group, settings of heads; and faults of a config in the words of these arguments.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from typing import Any, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn

from ipu_pipe.config.schema import BackendConfig
from ipu_pipe.errors import BadInput, raise_faults
from ipu_pipe.model.devices import get_kind
from ipu_pipe.refusals import PYTHON
from ipu_pipe.text import describe_kind, list_some, show

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
        kind = torch.device(device).type if _is_device(device) else str(device)
        _require_agreement(section, "device", kind)
        section["device"] = kind
    if deadline != DEADLINE:
        _require_agreement(section, "deadline", deadline)
        section["deadline"] = deadline
    section.setdefault("device", _find_device(model))
    section.setdefault("deadline", deadline)
    return section


def make_clip_section(clip: Any) -> dict[str, Any] | None:
    """Return the config's section of clipping. Raise `BadInput` unless `clip` is a pair, or None
    for no clipping.
    """
    if clip is None:
        return None
    if not isinstance(clip, (tuple, list)) or len(clip) != 2:
        raise BadInput(f'clip: {show(clip)}: must be a pair (norm, scope), such as (1.0, "stage")')
    return {"norm": clip[0], "scope": clip[1]}


def _is_device(device: str | torch.device) -> bool:
    try:
        torch.device(device)
    except (RuntimeError, TypeError):
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


def require_group_of_all(group: Any, backend: BackendConfig) -> None:
    """Raise `BadInput` if `group` is not one of all ranks in their order; None is the default
    group.
    """
    if group is None:
        return
    if not backend.facts.uses_processes:
        raise BadInput(
            f"process_group: backend {backend.name} has no processes: leave it out, or use "
            f"backend='distributed'"
        )
    if not isinstance(group, dist.ProcessGroup):
        is_outside = group == dist.GroupMember.NON_GROUP_MEMBER
        what = "a group without this rank" if is_outside else describe_kind(group)
        raise BadInput(
            f"process_group: {what}: must be a torch.distributed.ProcessGroup of all ranks, or None"
        )
    ranks = dist.get_process_group_ranks(group)
    world = dist.get_world_size()
    if ranks != list(range(world)):
        why = (
            "stages are placed on all ranks, in their order: must be a group of all of them, or "
            "None"
        )
        raise BadInput(f"process_group: ranks {list_some(ranks, 8)} of {world}: {why}")


def require_head_settings(heads: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Raise `BadInput` if `heads` are not settings of the optimizer."""
    if not isinstance(heads, Mapping):
        raise BadInput(
            f"heads: {show(heads)}: must be a mapping of the optimizer's settings, such as {{'lr': "
            f"0.1}}"
        )
    allowed = ", ".join(optimizer.defaults)
    kind = type(optimizer)
    unknown = [key for key in heads if key not in optimizer.defaults]
    raise_faults(
        [f"heads: {show(key)}: must be a setting of {kind.__name__}: {allowed}" for key in unknown]
    )
    # the constructors of PyTorch's own optimizers check values, and have no effect
    if not kind.__module__.startswith("torch.optim."):
        return
    accepted = inspect.signature(kind.__init__).parameters
    settings = {
        key: value for key, value in {**optimizer.defaults, **heads}.items() if key in accepted
    }
    try:
        kind([nn.Parameter(torch.zeros(1, 1))], **settings)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(f"heads: {error}") from error


# ---- faults that are found in the keys of a config

# (pattern, replacement), applied one after another
ARGUMENTS: tuple[tuple[str, str], ...] = (
    (r"^configure: ", ""),
    (r" tools/train\.py CONFIG --set backend\.name=distributed", " your script"),
    (r"^backend\.name: ", "backend: "),
    (r" with backend\.ipu=null and precision=(\w+)", r' with precision="\1"'),
    (r"\bbackend\.name[:=] ?(\w+)", r'backend="\1"'),
    (r"\bbackend\.name\b", "backend"),
    (r"backend: \{name: (\w+)\}", r'backend="\1"'),
    (r"\bbackend\.(device|deadline)\b", r"\1"),
    (r"\bbackend\.(\w+)", r"backend_args.\1"),
    (r"\bgradient_accumulation\b", "microbatches"),
    (r"\bmethod_args(\.|: )warmup\b", "warmup"),
    (r"method_args: \{stash: true\}", 'method_args={"stash": True}'),
    (
        r"method_args: \{recompute: \{segments: \.\.\.\}\}",
        'method_args={"recompute": {"segments": ...}}',
    ),
    (r"^clip\.(scope|norm): ", "clip: "),
    (r"^data: label ", "step: y: label "),
    (r"\bset which one, as in model\.output: (\w+),", r'take one in the loss, as in output["\1"],'),
    (r"; set model\.output", "; let the model return that"),
    (r"^loss: model: ", "loss: None: "),
    (r"\bloss: model\b", "loss=None"),
    (
        r"\bor an import string module:name of a function of the labels",
        "or a function of the labels",
    ),
    (
        r"\bneeds to know the devices: hardware: a name or file, or processes",
        'needs backend="distributed"',
    ),
    (
        r"\bneeds to know the devices: hardware: a name or file",
        "chooses by a hardware description, which a config has",
    ),
    (r"\bmust be null\b", "must be None"),
    (r"\bmust be true\b", "must be True"),
    (r"\bmust be false\b", "must be False"),
    (r": true\b", ": True"),
    (r": false\b", ": False"),
)


def reword(fault: str) -> str:
    """Return a fault of a config in the words of the arguments of `Pipeline`."""
    for pattern, replacement in ARGUMENTS:
        fault = re.sub(pattern, replacement, fault)
    return fault


@contextlib.contextmanager
def name_arguments() -> Iterator[None]:
    """Name the arguments of `Pipeline` in the faults of a `BadInput` that leaves the context,
    instead of the keys of a config.
    """
    try:
        yield
    except BadInput as error:
        error.faults = [PYTHON.say(reword(fault)) for fault in error.faults]
        error.args = ("; ".join(error.faults),)
        raise
