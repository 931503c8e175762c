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

# PopTorch's optimizers, and which of their tensors may be float16
ACCUMULATORS = {
    "SGD": ("accum_type", "velocity_accum_type"),
    "Adam": ("accum_type", "first_order_momentum_accum_type", "second_order_momentum_accum_type"),
}
ACCUMULATORS["AdamW"] = ACCUMULATORS["RMSprop"] = ACCUMULATORS["Adam"]
_SETTINGS = {
    "SGD": ("lr", "momentum", "weight_decay", "nesterov"),
    "Adam": ("lr", "betas", "eps", "weight_decay"),
    "AdamW": ("lr", "betas", "eps", "weight_decay"),
    "RMSprop": ("lr", "alpha", "eps", "weight_decay", "momentum"),
}


def translate_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[Any, str],
    own: Mapping[str, nn.Parameter],
    ipu: IpuConfig,
    clip_norm: Optional[float] = None,
) -> Any:
    """Return the poptorch.optim optimizer that does what torch.optim's does. `names`: of its parameters; `own`: those on the IPU
    by the same names, others are left out. Only the learning rate may change later: the other settings are constants of the
    graph."""
    import poptorch

    kind = type(optimizer).__name__
    groups: List[Dict[str, Any]] = []
    for group in optimizer.param_groups:
        chosen = [own[names[p]] for p in group["params"] if p in names and names[p] in own]
        if chosen:
            groups.append({"params": chosen, "stage": group["stage"], **_settings(kind, group)})
    if not groups:
        raise BadInput("model: it has no parameter that needs a gradient here: nothing to train")
    settings: Dict[str, Any] = {key: value for key, value in groups[0].items() if key not in ("params", "stage")}
    if kind == "RMSprop":
        settings["centered"] = bool(optimizer.param_groups[0]["centered"])
    constant = [key for key in settings if key not in ("lr", "centered")]
    if ipu.loss_scaling != 1.0:
        settings["loss_scaling"] = ipu.loss_scaling
    if ipu.use_combined_accum:
        settings["use_combined_accum"] = True
        if ipu.loss_scaling != 1.0:
            settings["velocity_scaling"] = ipu.loss_scaling  # PopTorch copies it for the separate variant alone
    for key in ACCUMULATORS[kind]:
        if getattr(ipu, key) == "float16":
            settings[key] = torch.float16
    if clip_norm is not None:
        settings["max_grad_norm"] = float(clip_norm)
    translated = getattr(poptorch.optim, kind)(groups, **settings)
    for key in constant:
        translated.variable_attrs.markAsConstant(key)
    return translated


def set_rates(optimizer: Any, rates: Any) -> bool:
    """Set every group's rate to its stage's of `rates` (P,); whether any changed."""
    changed = False
    for group in optimizer.param_groups:
        rate = float(rates[group["stage"]])
        changed = changed or group["lr"] != rate
        group["lr"] = rate
    return changed


def _settings(kind: str, group: Mapping[str, Any]) -> Dict[str, Any]:
    settings: Dict[str, Any] = {}
    for key in _SETTINGS[kind]:
        value = group[key]
        if key == "nesterov":
            settings[key] = bool(value)
        else:
            settings[key] = tuple(float(one) for one in value) if key == "betas" else float(value)
    return settings


# ---- its state in checkpoints

STATE, SCALE = "ipu_state", "velocity_scaling"  # entries of a checkpoint, each under MARK
_VELOCITY = {
    False: "Accl1___",
    True: "Accl___",
}  # PopART's prefixes of SGD's velocity: separate, combined with the accumulator


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
    tensors = saved.tensors if saved is not None else {}
    needed = {name: value for name, value in wanted.tensors.items() if "___" in name}  # others: the loss scaling's
    missing = [name for name in needed if name not in tensors]
    wrong = [name for name in needed if name in tensors and tensors[name].shape != needed[name].shape]
    if missing or wrong:
        raise BadInput(
            f"--resume: the checkpoint's optimizer state has {'no' if missing else 'another shape of'} "
            f"{list_some(missing or wrong, 2)}, which this run keeps: {_GO_ON}"
        )
    state = {}
    for name, value in wanted.tensors.items():
        tensor = tensors.get(name, value)
        if saved is not None and saved.scale is not None and name.startswith(tuple(_VELOCITY.values())):
            tensor = tensor.float() * ((wanted.scale or 1.0) / saved.scale)
        state[name] = tensor.to(value.dtype)
    state_dict = optimizer.get_state_dict()
    optimizer.load_state_dict({**state_dict, STATE: state})
    executor.setOptimizer(optimizer)


_ANEW = "start anew from its weights (init_from: .../model.safetensors)"
_GO_ON = f"resume with the backend.ipu keys that it was written with, or {_ANEW}"


def check_state(saved: Optional[IpuState], optimizer: torch.optim.Optimizer, ipu: IpuConfig) -> None:
    """Refuse (BadInput) a checkpoint's state that this run's SGD would misread, before anything compiles."""
    if saved is None or type(optimizer) is not torch.optim.SGD:
        return
    other = _VELOCITY[not ipu.use_combined_accum]
    if any(name.startswith(other) for name in saved.tensors):
        raise BadInput(
            f"backend.ipu.use_combined_accum: {str(ipu.use_combined_accum).lower()}: the checkpoint's velocities are of the "
            f"other variant, which PopTorch would drop: {_GO_ON}"
        )
    if saved.scale is None and ipu.loss_scaling != 1.0:
        raise BadInput(
            f"backend.ipu.loss_scaling: {ipu.loss_scaling}: the checkpoint, of an earlier version, does not say the loss scaling "
            f"of its velocities: {_ANEW}"
        )


def export_state(held: Optional[IpuState], names: Sequence[str]) -> Tuple[Dict[str, torch.Tensor], Dict[str, Any]]:
    """Return (tensors, plain values) of PopTorch's state for a checkpoint, keyed `parameter/poptorch:section:name`. PopART's
    names stay as they are; an entry lies with the parameter whose name it ends in, else with the first."""
    if held is None:
        return {}, {}
    longest = sorted(names, key=len, reverse=True)

    def place(section: str, key: str) -> str:
        owner = next((name for name in longest if key.endswith(name)), names[0])
        return f"{owner}/{MARK}:{section}:{key.replace('/', '|')}"

    return {place(STATE, key): value for key, value in held.tensors.items()}, {place(SCALE, ""): held.scale}


def import_state(optimizer: torch.optim.Optimizer) -> Optional[IpuState]:
    """Return the state that a checkpoint put into the job's optimizer; None where there is none. Raises BadInput for the state
    of torch's own optimizers, which PopTorch does not read."""
    tensors, scale, foreign = {}, None, False
    for state in optimizer.state.values():
        for entry, value in state.items():
            mark, _, rest = str(entry).partition(":")
            section, _, key = rest.partition(":")
            if mark != MARK:
                foreign = foreign or value is not None
            elif section == STATE:
                tensors[key.replace("|", "/")] = value
            elif section == SCALE:
                scale = float(value)
    if foreign:
        raise BadInput(
            "--resume: the checkpoint's optimizer state is torch.optim's, of which PopTorch can load none: go on "
            "with the backend that wrote it, or start anew from its weights (init_from: .../model.safetensors)"
        )
    return IpuState(tensors, scale) if tensors else None


def count_state_bytes(tensors: Mapping[str, torch.Tensor], part: Partition) -> List[int]:
    """Count the bytes of optimizer state by stage, from `export_state`'s tensors."""
    sizes, stage_of = [0] * len(part), part.stage_of()
    for place, value in tensors.items():
        name = place.rpartition("/")[0]
        if name in stage_of:
            sizes[stage_of[name]] += value.numel() * value.element_size()
    return sizes
