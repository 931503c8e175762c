"""The optimizer's state, the rules' entries in it included: its bytes, and its way into a checkpoint and back."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Tuple, cast

import torch
from torch import nn

from ipu_pipe.errors import BadInput


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
        counts_there = bool(group.get("fused") or group.get("capturable"))  # others keep step counts on the CPU
        for entry, value in state.items():
            if isinstance(value, torch.Tensor):
                state[entry] = value.to(parameter.device if entry != "step" or counts_there else "cpu")
        optimizer.state[parameter] = state
