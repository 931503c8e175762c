"""A job's optimizer as poptorch.optim's, and its state in checkpoints."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn

from ipu_pipe.backends.interface import MARK
from ipu_pipe.errors import BadInput
from ipu_pipe.job.ipu.config import IpuConfig
from ipu_pipe.model.stages import Partition

# PopTorch's optimizers, and which of their tensors may be float16
ACCUMULATORS = {
    "SGD": ("accum_type", "velocity_accum_type"),
    "Adam": ("accum_type", "first_order_momentum_accum_type", "second_order_momentum_accum_type"),
}
ACCUMULATORS["AdamW"] = ACCUMULATORS["RMSprop"] = ACCUMULATORS["Adam"]
_SETTINGS = {
    "SGD": ("lr", "momentum", "dampening", "weight_decay"),
    "Adam": ("lr", "betas", "eps", "weight_decay"),
    "AdamW": ("lr", "betas", "eps", "weight_decay"),
    "RMSprop": ("lr", "alpha", "eps", "weight_decay", "momentum"),
}


def translate(
    optimizer: torch.optim.Optimizer,
    names: Mapping[Any, str],
    own: Mapping[str, nn.Parameter],
    ipu: IpuConfig,
    clip_norm: Optional[float] = None,
) -> Any:
    """The poptorch.optim optimizer that does what torch.optim's does. `names`: of its parameters; `own`: those on the IPU by the
    same names, others are left out. Of its settings the rate alone may change later: the others are constants of the graph."""
    import poptorch

    kind = type(optimizer).__name__
    groups: List[Dict[str, Any]] = []
    for group in optimizer.param_groups:
        chosen = [own[names[p]] for p in group["params"] if p in names and names[p] in own]
        if chosen:
            groups.append({"params": chosen, "stage": group["stage"], **_settings(kind, group)})
    if not groups:
        raise BadInput("model: it has no parameter that needs a gradient here: nothing to train")
    given: Dict[str, Any] = {key: value for key, value in groups[0].items() if key not in ("params", "stage")}
    if kind == "RMSprop":
        given["centered"] = bool(optimizer.param_groups[0]["centered"])
    constant = [key for key in given if key not in ("lr", "centered")]
    if ipu.loss_scaling != 1.0:
        given["loss_scaling"] = ipu.loss_scaling
    if ipu.use_combined_accum:
        given["use_combined_accum"] = True
        if ipu.loss_scaling != 1.0:
            given["velocity_scaling"] = ipu.loss_scaling  # PopTorch copies it for the separate variant alone
    for key in ACCUMULATORS[kind]:
        if getattr(ipu, key) == "float16":
            given[key] = torch.float16
    if clip_norm is not None:
        given["max_grad_norm"] = float(clip_norm)
    made = getattr(poptorch.optim, kind)(groups, **given)
    for key in constant:
        made.variable_attrs.markAsConstant(key)
    return made


def set_rates(optimizer: Any, rates: Any) -> bool:
    """Set every group's rate to its stage's of `rates` (P,); whether any changed."""
    changed = False
    for group in optimizer.param_groups:
        rate = float(rates[group["stage"]])
        changed = changed or group["lr"] != rate
        group["lr"] = rate
    return changed


def _settings(kind: str, group: Mapping[str, Any]) -> Dict[str, Any]:
    found: Dict[str, Any] = {}
    for key in _SETTINGS[kind]:
        value = group[key]
        found[key] = tuple(float(one) for one in value) if key == "betas" else float(value)
    return found


# ---- its state in checkpoints

SECTIONS = ("ipu_state", "ipu_param")


def read_state(optimizer: Any) -> Optional[Dict[str, Dict[str, Any]]]:
    """Copies of what a PopTorch optimizer holds, by PopTorch's names; None where it keeps nothing from update to update."""
    held = optimizer.state_dict()
    found = {
        section: {key: _copied(value) for key, value in (held.get(section) or {}).items() if value is not None}
        for section in SECTIONS
    }
    return found if found["ipu_state"] else None


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def export_state(held: Mapping[str, Any], names: Sequence[str]) -> Tuple[Dict[str, torch.Tensor], Dict[str, Any]]:
    """(tensors, plain values) of a PopTorch optimizer's state dict for a checkpoint, `parameter/poptorch:section:key`. PopTorch's
    keys stay as they are; an entry lies with the parameter whose name its key ends in, else with the first."""
    tensors: Dict[str, torch.Tensor] = {}
    plain: Dict[str, Any] = {}
    longest = sorted(names, key=len, reverse=True)
    for section in SECTIONS:
        for key, value in (held.get(section) or {}).items():
            owner = next((name for name in longest if key.endswith(name)), names[0])
            place = f"{owner}/{MARK}:{section}:{key.replace('/', '|')}"
            if isinstance(value, torch.Tensor):
                tensors[place] = value
            else:
                plain[place] = list(value) if isinstance(value, tuple) else value
    return tensors, plain


def import_state(optimizer: torch.optim.Optimizer) -> Optional[Dict[str, Dict[str, Any]]]:
    """What a checkpoint put into the job's optimizer, as PopTorch's own; None where there is none. Raises BadInput for the state
    of torch's own optimizers, which PopTorch does not read."""
    found: Dict[str, Dict[str, Any]] = {section: {} for section in SECTIONS}
    foreign = False
    for state in optimizer.state.values():
        for entry, value in state.items():
            mark, _, rest = str(entry).partition(":")
            if mark == MARK:
                section, _, key = rest.partition(":")
                found[section][key.replace("|", "/")] = tuple(value) if isinstance(value, list) else value
            else:
                foreign = foreign or value is not None
    if foreign:
        raise BadInput(
            "--resume: the checkpoint's optimizer state is torch.optim's, of which PopTorch can load none: go on "
            "with the backend that wrote it, or start anew from its weights (init_from: .../model.safetensors)"
        )
    return found if found["ipu_state"] else None


def state_bytes(tensors: Mapping[str, torch.Tensor], part: Partition) -> List[int]:
    """Bytes of optimizer state by stage, from `export_state`'s tensors."""
    held, stage_of = [0] * len(part), part.stage_of()
    for place, value in tensors.items():
        name = place.rpartition("/")[0]
        if name in stage_of and f"{MARK}:ipu_state:" in place:
            held[stage_of[name]] += value.numel() * value.element_size()
    return held
