"""Translate a job's optimizer to poptorch.optim, change its rates and loss scaling, and save and
load its state.
"""

from __future__ import annotations

from typing import Any, Iterator, Mapping, NamedTuple, Sequence

import torch

from ipu_pipe.backends.interface import POPTORCH_PREFIX
from ipu_pipe.backends.ipu.wrapping import Wrapped, get_unsplit_name
from ipu_pipe.errors import BadInput, raise_faults
from ipu_pipe.job.overrides import NOT_SETTINGS
from ipu_pipe.model.stages import Partition
from ipu_pipe.refusals import name_key
from ipu_pipe.replay.run import Run
from ipu_pipe.text import list_some
from ipu_pipe.update.apply import UpdateRules
from ipu_pipe.update.optimizer import KINDS, list_kinds

# optimizer -> the settings of a group that PopTorch gets, with the type that it expects
_ADAM = {
    "lr": float,
    "betas": lambda pair: tuple(map(float, pair)),
    "eps": float,
    "weight_decay": float,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": float, "momentum": float, "weight_decay": float, "nesterov": bool},
    "adam": _ADAM,
    "adamw": _ADAM,
    "rmsprop": {
        "lr": float,
        "alpha": float,
        "eps": float,
        "weight_decay": float,
        "momentum": float,
    },
}


def translate_optimizer(run: Run, wrapped: Wrapped, first_update: int) -> Any:
    """Return the poptorch.optim optimizer that equals the run's, for the parameters of `wrapped`.

    Only the learning rate and the loss scaling may change later; the other settings are constants
    of the graph.
    """
    import poptorch

    ipu = run.options.ipu
    optimizer = run.optimizer
    trained = {get_unsplit_name(name): p for name, p in wrapped.named_parameters()}
    names = {p: name for name, p in run.model.named_parameters() if name in trained}
    (kind,), groups = list_kinds(optimizer), []
    for group in optimizer.param_groups:
        # a decoupled block has a part of the parameters
        chosen = [trained[names[p]] for p in group["params"] if p in names]
        if chosen:
            settings = {key: convert(group[key]) for key, convert in SETTINGS[kind].items()}
            # by these `set_rates` finds the group's learning rate
            place = {key: group[key] for key in ("stage", "member")}
            groups.append({"params": chosen, **place, **settings})
    if not groups:
        raise BadInput("model: it has no parameter that needs a gradient here: nothing to train")
    # defaults, which each group overrides
    settings = {key: groups[0][key] for key in SETTINGS[kind]}
    if kind == "rmsprop":
        settings["centered"] = bool(optimizer.param_groups[0]["centered"])
    if ipu.use_combined_accum:
        settings["use_combined_accum"] = True
    if ipu.changes_loss_scaling or ipu.get_loss_scaling(0) != 1.0:
        settings["loss_scaling"] = ipu.get_loss_scaling(first_update)
        # without use_combined_accum PopTorch uses the loss scaling instead
        if ipu.use_combined_accum:
            settings["velocity_scaling"] = ipu.get_loss_scaling(0)
    types = ipu.optimizer_options.model_dump().items()
    settings.update({name: getattr(torch, value) for name, value in types})
    if run.clip is not None:
        settings["max_grad_norm"] = float(run.clip[0])
    # poptorch.optim has the class names of torch.optim
    names_of_kinds = {one: optimizer_class.__name__ for optimizer_class, one in KINDS.items()}
    translated = getattr(poptorch.optim, names_of_kinds[kind])(groups, **settings)
    for key in SETTINGS[kind]:
        if key != "lr":
            translated.variable_attrs.markAsConstant(key)
    return translated


def set_rates(optimizer: Any, rules: UpdateRules, k: int) -> bool:
    """Set the learning rate of every group to that of update k; return whether any rate changed."""
    before = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = rules.get_settings(k, group)["lr"]
    return before != [group["lr"] for group in optimizer.param_groups]


def list_changed_settings(
    compiled: Mapping[str, Any], settings: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a fault for each of the settings besides the learning rate that differs from that of a
    group with which the graph is compiled.
    """
    for key, value in settings.items():
        if key in compiled and key not in ("lr", *NOT_SETTINGS) and value != compiled[key]:
            why = (
                f"PopTorch compiled it as a constant, {compiled[key]}: only the learning rate "
                f"may change"
            )
            yield f"optimizer.{key}: {value}: {why}"


def require_compiled_settings(optimizer: torch.optim.Optimizer, rules: UpdateRules, k: int) -> None:
    """Raise `BadInput` if a setting of update k besides the learning rate differs from that with
    which the graph is compiled.

    `optimizer`: the job's, with the settings of the time when it was built.
    """
    for group in optimizer.param_groups:
        raise_faults(list(list_changed_settings(group, rules.get_settings(k, group)))[:1])


def update_optimizer(
    executor: Any, optimizer: Any, rules: UpdateRules, k: int, loss_scaling: float
) -> None:
    """Set the learning rates of update k and the loss scaling for the next call if they change.

    The executor must be attached: PopTorch asserts that detached state is not changed on both
    sides.
    """
    changed = set_rates(optimizer, rules, k)
    if loss_scaling != optimizer.loss_scaling:
        saved = read_state(optimizer)
        optimizer.loss_scaling = loss_scaling
        # PopART stores velocities multiplied by the scaling, so they are rescaled
        write_state(executor, optimizer, saved)
    elif changed:
        executor.setOptimizer(optimizer)


# ---- the optimizer's state in checkpoints

# entries of a checkpoint, each under POPTORCH_PREFIX
STATE = "ipu_state"
SCALE = "velocity_scaling"
# PopART's prefixes of SGD's velocity, without and with use_combined_accum
VELOCITIES = ("Accl1___", "Accl___")
# in faults
LOADED = "optimizer: the state that was loaded"
NEW_START = "start anew from its weights (init_from: .../model.safetensors, or a new optimizer)"
GO_ON = f"go on with the {name_key('backend.ipu')} keys that it was written with, or {NEW_START}"


class IpuState(NamedTuple):
    """PopTorch's optimizer state by PopART's names, and the factor of SGD's stored velocities
    (PopART's velocity scaling, compoundscalarhelper.hpp).
    """

    tensors: dict[str, torch.Tensor]
    scale: float


def read_state(optimizer: Any) -> IpuState | None:
    """Return a copy of the state of a PopTorch optimizer, None if it has no state."""
    tensors = optimizer.state_dict().get(STATE) or {}
    scale = 1.0
    if isinstance(optimizer, torch.optim.SGD):
        combined = optimizer.use_combined_accum  # type: ignore[attr-defined]
        if combined:
            scale = optimizer.param_groups[0]["velocity_scaling"]
        else:
            scale = optimizer.loss_scaling  # type: ignore[attr-defined]
    return (
        IpuState({key: value.detach().cpu().clone() for key, value in tensors.items()}, scale)
        if tensors
        else None
    )


def write_state(executor: Any, optimizer: Any, saved: IpuState | None) -> None:
    """Give the optimizer with the state `saved` to a compiled and attached executor, with
    velocities in its own scale.

    Raise `BadInput` if a name is missing or a shape differs, of which PopTorch would only warn.
    """
    present = read_state(optimizer)
    if present is not None:
        saved = saved or IpuState({}, 1.0)
        loaded = saved.tensors
        # names without "___" belong to the loss scaling; SGD's other variant has other names
        missing = [
            name
            for name, value in present.tensors.items()
            if "___" in name and (name not in loaded or loaded[name].shape != value.shape)
        ]
        if missing:
            some = list_some(missing, 2)
            raise BadInput(f"{LOADED} has no {some} of the shape that this run keeps: {GO_ON}")
        state = {}
        for name, value in present.tensors.items():
            tensor = loaded.get(name, value)
            # from the scale of the run that saved it to this run's
            if name.startswith(VELOCITIES):
                tensor = tensor.float() * (present.scale / saved.scale)
            # a state in half precision keeps its dtype
            state[name] = tensor.to(value.dtype)
        optimizer.load_state_dict({**optimizer.get_state_dict(), STATE: state})
    executor.setOptimizer(optimizer)


def export_state(
    saved: IpuState | None, names: Sequence[str]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return (tensors, plain values) of PopTorch's state for a checkpoint, with keys
    `parameter/poptorch:section:name`.

    PopART's names are not translated. An entry belongs to the parameter whose name it ends with,
    else to the first one.
    """
    if saved is None:
        return {}, {}
    # the longest first, because one name may be the end of another, as weight of block.weight
    longest = sorted(names, key=len, reverse=True)

    def make_key(section: str, key: str) -> str:
        owner = next((name for name in longest if key.endswith(name)), names[0])
        # the last slash divides the parameter's name from the entry's
        return f"{owner}/{POPTORCH_PREFIX}:{section}:{key.replace('/', '|')}"

    return {make_key(STATE, key): value for key, value in saved.tensors.items()}, {
        make_key(SCALE, ""): saved.scale
    }


def import_state(optimizer: torch.optim.Optimizer) -> IpuState | None:
    """Remove the state that a checkpoint put into the job's optimizer and return it; None if there
    is none.

    Raise `BadInput` for the state of torch's own optimizers, which PopTorch cannot load.
    """
    tensors = {}
    scale = 1.0
    for state in optimizer.state.values():
        for entry, value in state.items():
            prefix, section, key = (*str(entry).split(":", 2), "", "")[:3]
            if prefix != POPTORCH_PREFIX and value is not None:
                raise BadInput(
                    f"{LOADED} is torch.optim's, of which PopTorch can load none: go on with the "
                    f"backend that wrote it, or {NEW_START}"
                )
            if section == STATE:
                tensors[key.replace("|", "/")] = value
            elif section == SCALE:
                scale = float(value)
    # torch's optimizer cannot use PopTorch's entries
    optimizer.state.clear()
    return IpuState(tensors, scale) if tensors else None


def count_state_bytes(tensors: Mapping[str, torch.Tensor], part: Partition) -> list[int]:
    """Count the bytes of optimizer state of each stage; `tensors`: the tensors of
    `export_state`.
    """
    sizes = [0] * len(part)
    stage_of = part.stage_of()
    for key, value in tensors.items():
        name = key.rpartition("/")[0]
        if name in stage_of:
            sizes[stage_of[name]] += value.numel() * value.element_size()
    return sizes
