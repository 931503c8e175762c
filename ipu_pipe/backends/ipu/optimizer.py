"""A job's optimizer as poptorch.optim's, and its state in checkpoints."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn

from ipu_pipe.backends.interface import MARK
from ipu_pipe.backends.ipu.config import IpuConfig
from ipu_pipe.errors import BadInput
from ipu_pipe.model.stages import Partition
from ipu_pipe.text import list_some
from ipu_pipe.update.optimizer import get_kind

# PopTorch's optimizers by our names: the settings of a group that are handed on, and the tensors that may be float16
_MOMENTS = ("accum_type", "first_order_momentum_accum_type", "second_order_momentum_accum_type")
SETTINGS = {
    "sgd": ("lr", "momentum", "weight_decay", "nesterov"),
    "adam": ("lr", "betas", "eps", "weight_decay"),
    "adamw": ("lr", "betas", "eps", "weight_decay"),
    "rmsprop": ("lr", "alpha", "eps", "weight_decay", "momentum"),
}
ACCUMULATORS = {kind: ("accum_type", "velocity_accum_type") if kind == "sgd" else _MOMENTS for kind in SETTINGS}


def translate_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[Any, str], own: Mapping[str, nn.Parameter], ipu: IpuConfig,
    clip_norm: Optional[float] = None,
) -> Any:  # fmt: skip
    """Return the poptorch.optim optimizer that does what torch.optim's does. `names`: of its parameters; `own`: those on the IPU
    by the same names, others are left out. Only the learning rate may change later: the other settings are constants of the
    graph."""
    import poptorch

    kind = get_kind(optimizer)
    groups: List[Dict[str, Any]] = []
    for group in optimizer.param_groups:
        chosen = [own[names[p]] for p in group["params"] if p in names and names[p] in own]
        if chosen:
            settings = {key: _convert_setting(key, group[key]) for key in SETTINGS[kind]}
            groups.append({"params": chosen, "stage": group["stage"], **settings})
    if not groups:
        raise BadInput("model: it has no parameter that needs a gradient here: nothing to train")
    settings = {key: groups[0][key] for key in SETTINGS[kind]}
    if kind == "rmsprop":
        settings["centered"] = bool(optimizer.param_groups[0]["centered"])
    if ipu.loss_scaling != 1.0:
        settings["loss_scaling"] = ipu.loss_scaling
    if ipu.use_combined_accum:
        settings["use_combined_accum"] = True
        if ipu.loss_scaling != 1.0:
            settings["velocity_scaling"] = ipu.loss_scaling  # PopTorch copies it for the separate variant alone
    settings.update({key: torch.float16 for key in ACCUMULATORS[kind] if getattr(ipu, key) == "float16"})
    if clip_norm is not None:
        settings["max_grad_norm"] = float(clip_norm)
    translated = getattr(poptorch.optim, type(optimizer).__name__)(groups, **settings)
    for key in SETTINGS[kind]:
        if key != "lr":
            translated.variable_attrs.markAsConstant(key)
    return translated


def _convert_setting(key: str, value: Any) -> Any:
    """Return a setting in the type that PopTorch asks for."""
    if key == "betas":
        return tuple(float(one) for one in value)
    return bool(value) if key == "nesterov" else float(value)


def set_rates(optimizer: Any, rates: Any) -> bool:
    """Set every group's rate to its stage's of `rates` (P,); whether any changed."""
    before = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = float(rates[group["stage"]])
    return before != [group["lr"] for group in optimizer.param_groups]


# ---- its state in checkpoints

STATE, SCALE = "ipu_state", "velocity_scaling"  # entries of a checkpoint, each under MARK
SEPARATE, COMBINED = "Accl1___", "Accl___"  # PopART's prefixes of SGD's velocity, by variant
_ANEW = "start anew from its weights (init_from: .../model.safetensors)"
_GO_ON = f"resume with the backend.ipu keys that it was written with, or {_ANEW}"


class IpuState(NamedTuple):
    """PopTorch's optimizer state by PopART's names, and the factor that SGD's velocities are kept times (PopART's velocity
    scaling, which PopTorch sets to the loss scaling; compoundscalarhelper.hpp). None where a checkpoint does not say it."""

    tensors: Dict[str, torch.Tensor]
    scale: Optional[float]


def read_state(optimizer: Any) -> Optional[IpuState]:
    """Return a copy of the state of a PopTorch optimizer; None where it keeps nothing from update to update."""
    tensors = optimizer.state_dict().get(STATE) or {}
    scale = optimizer.loss_scaling if isinstance(optimizer, torch.optim.SGD) else 1.0  # type: ignore[attr-defined]
    return IpuState({key: value.detach().cpu().clone() for key, value in tensors.items()}, scale) if tensors else None


def write_state(executor: Any, optimizer: Any, saved: Optional[IpuState]) -> None:
    """Put a checkpoint's state into a compiled and attached executor whose optimizer has none yet: all that the executor keeps,
    velocities in its tensor scale. Raises BadInput where a name is missing or a shape differs: PopTorch would only warn."""
    wanted = read_state(optimizer)
    if wanted is None:
        return
    saved = saved or IpuState({}, None)
    needed = {name: value for name, value in wanted.tensors.items() if "___" in name}  # others: the loss scaling's
    unfit = [name for name in needed if name not in saved.tensors or saved.tensors[name].shape != needed[name].shape]
    if unfit:
        raise BadInput(
            f"--resume: the checkpoint's optimizer state has no {list_some(unfit, 2)} of the shape that this run keeps: {_GO_ON}"
        )
    state = {}
    for name, value in wanted.tensors.items():
        tensor = saved.tensors.get(name, value)
        if saved.scale is not None and name.startswith((SEPARATE, COMBINED)):
            tensor = tensor.float() * ((wanted.scale or 1.0) / saved.scale)
        state[name] = tensor.to(value.dtype)
    optimizer.load_state_dict({**optimizer.get_state_dict(), STATE: state})
    executor.setOptimizer(optimizer)


def export_state(
    saved: Optional[IpuState], names: Sequence[str]
) -> Tuple[Dict[str, torch.Tensor], Dict[str, Any]]:
    """Return (tensors, plain values) of PopTorch's state for a checkpoint, keyed `parameter/poptorch:section:name`. PopART's
    names stay as they are; an entry is with the parameter whose name it ends in, else with the first."""
    if saved is None:
        return {}, {}
    longest = sorted(names, key=len, reverse=True)

    def place(section: str, key: str) -> str:
        owner = next((name for name in longest if key.endswith(name)), names[0])
        return f"{owner}/{MARK}:{section}:{key.replace('/', '|')}"

    return {place(STATE, key): value for key, value in saved.tensors.items()}, {place(SCALE, ""): saved.scale}


def import_state(optimizer: torch.optim.Optimizer, ipu: IpuConfig) -> Optional[IpuState]:
    """Return the state that a checkpoint put into the job's optimizer, and take it out of there; None where there is none. Raise
    `BadInput` for the state of torch's own optimizers, which PopTorch does not read, and for velocities that this run's SGD
    would misread."""
    tensors, scale = {}, None
    for state in optimizer.state.values():
        for entry, value in state.items():
            mark, _, rest = str(entry).partition(":")
            section, _, key = rest.partition(":")
            if mark != MARK and value is not None:
                raise BadInput(
                    "--resume: the checkpoint's optimizer state is torch.optim's, of which PopTorch can load none: go on "
                    f"with the backend that wrote it, or {_ANEW}"
                )
            if section == STATE:
                tensors[key.replace("|", "/")] = value
            elif section == SCALE:
                scale = float(value)
    optimizer.state.clear()  # PopTorch's entries mean nothing to it
    if not tensors:
        return None
    if get_kind(optimizer) == "sgd":
        other = SEPARATE if ipu.use_combined_accum else COMBINED
        if any(name.startswith(other) for name in tensors):
            raise BadInput(
                f"backend.ipu.use_combined_accum: {str(ipu.use_combined_accum).lower()}: the checkpoint's velocities are of the "
                f"other variant, which PopTorch would drop: {_GO_ON}"
            )
        if scale is None and ipu.loss_scaling != 1.0:
            raise BadInput(
                f"backend.ipu.loss_scaling: {ipu.loss_scaling}: the checkpoint, of an earlier version, does not say the loss "
                f"scaling of its velocities: {_ANEW}"
            )
    return IpuState(tensors, scale)


def count_state_bytes(tensors: Mapping[str, torch.Tensor], part: Partition) -> List[int]:
    """Count the bytes of optimizer state by stage, from `export_state`'s tensors."""
    sizes, stage_of = [0] * len(part), part.stage_of()
    for place, value in tensors.items():
        name = place.rpartition("/")[0]
        if name in stage_of:
            sizes[stage_of[name]] += value.numel() * value.element_size()
    return sizes
