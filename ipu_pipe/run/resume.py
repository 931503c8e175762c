"""A checkpoint and the run that goes on from it: whether it is this run's, and whole in what it says and holds."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple

import torch

from ipu_pipe.backends.interface import MARK
from ipu_pipe.config.compare import compare_deciding, list_length_dependent, select_deciding
from ipu_pipe.config.faults import show_value
from ipu_pipe.config.schema import Config
from ipu_pipe.errors import BadInput
from ipu_pipe.job.evaluation import EvaluationResult, Position
from ipu_pipe.job.record import Job
from ipu_pipe.model.calling import call
from ipu_pipe.model.nests import copied
from ipu_pipe.model.probe import undisturbed
from ipu_pipe.report.provenance import compare_data
from ipu_pipe.run import checkpoint
from ipu_pipe.run.checkpoint import Checkpoint, Origin
from ipu_pipe.run.folder import read_starts

_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # the user's, which a trial must not run


def describe_origin(job: Job) -> Origin:
    """Whose the checkpoints of `job` are."""
    return Origin(select_deciding(job.config.to_dict()), job.updates, [len(stage.parameters) for stage in job.part.stages])


def choose_step(folder: Path, step: Optional[int]) -> int:
    """The step of the checkpoint to go on from: the newest or the one of `step`; 0 if there is none. Raises BadInput."""
    try:
        found = checkpoint.list_resumable(folder)
    except OSError as error:
        raise BadInput(f"--resume: {folder}: {error.strerror or error}") from None
    if step is None:
        return found[-1] if found else 0
    if step not in found:
        there = ", ".join(map(str, found)) if found else "none at all"
        raise BadInput(f"--resume-from: {step}: {folder} holds no such checkpoint, there are {there}")
    return step


def check_run(job: Job, held: Checkpoint, path: Path) -> None:
    """Refuse (BadInput) a checkpoint that is not this run's, or whose position or optimizer state cannot be."""
    own = describe_origin(job)
    faults = _key_faults(job.config, held, own) or _position_faults(job, held, int(path.name.partition("-")[2]))
    if not faults:
        faults = _model_faults(job, held) + _optimizer_faults(job, held, own)
    checkpoint.raise_faults(path, faults)


def read_data_record(out: Path) -> Dict[str, Any]:
    """What the run in the folder `out` read of its data when it was last started, as far as its record says it."""
    starts = read_starts(out)
    found = starts[-1].get("data") if starts and isinstance(starts[-1], dict) else None
    return found if isinstance(found, dict) else {}


def check_data(job: Job, out: Path) -> None:
    """Refuse (BadInput) to go on with other data than the run in the folder `out` has read so far."""
    faults = compare_data(job, read_data_record(out), job.read or {})
    if faults:
        more = f", and {len(faults) - 1} more such" if len(faults) > 1 else ""
        raise BadInput(
            f"--resume: {out / 'record.json'}: {faults[0]}{more}: the data of a run cannot change: put it back as it was, "
            "or begin another run (--overwrite, or another --out)"
        )


def read_position(held: Checkpoint) -> Position:
    """How far the run had come."""
    saved = held.state["position"]
    return Position(**{**saved, "initial": EvaluationResult.from_saved(saved["initial"])})


# ---- whose it is


def _key_faults(config: Config, held: Checkpoint, own: Origin) -> List[str]:
    if held.manifest is None:  # the earlier layout: only the run's config.yaml says it
        return []
    faults = [
        f"{key}: saved with {show_value(a)}, this run has {show_value(b)}: it is another run's checkpoint"
        for key, a, b in compare_deciding(held.manifest.keys, own.keys)
    ]
    if held.manifest.updates > own.updates:
        faults.append(f"steps: saved in a run of {held.manifest.updates}, this one has {own.updates}: may only grow")
    follows = list_length_dependent(config) if own.updates > held.manifest.updates else []
    if follows:
        faults.append(
            f"steps: saved in a run of {held.manifest.updates}, this one has {own.updates}, at other rates from the beginning: "
            f"only a run that began with {' and '.join(follows)} can grow; with new rates, begin one from its weights (init_from)"
        )
    return faults


# ---- how far it had come


def _is_whole(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_real(value: Any) -> bool:
    fits = isinstance(value, int) and abs(value) < 2**63  # what floats can be added to
    return isinstance(value, float) or (fits and not isinstance(value, bool))


def _flat(pair: List[Any]) -> List[Any]:
    """A loss and what metrics there are, in earlier checkpoints the accuracy alone."""
    return [pair[0], *pair[1].values()] if isinstance(pair[1], dict) else pair


def _position_faults(job: Job, held: Checkpoint, step: int) -> List[str]:
    """What cannot be in the position, which stands for `step` updates done."""
    place, saved = f"{checkpoint.STATE}: position", held.state.get("position")
    known = {field.name for field in fields(Position)}
    if not isinstance(saved, dict) or set(saved) != known:
        return [f"{place}: its keys must be {', '.join(sorted(known))}"]
    if not isinstance(held.state.get("optimizer"), dict):
        return [f"{checkpoint.STATE}: optimizer: must be a mapping"]
    update, averaged = saved["update"], job.averaged
    if not _is_whole(update, 1, job.updates):
        return [f"{place}.update: {update}: must be a whole number from 1 to the run's {job.updates}"]
    if {update, step} != {held.state.get("step")}:
        return [f"{place}.update: {update}: the checkpoint is of step {step}"]
    within = (update - 1) % averaged + 1
    best, loss, initial = saved["best_step"], saved["best_loss"], saved["initial"]
    sane = {
        "epoch_updates": (
            saved["epoch_updates"] == within,
            f"must be {within}, after {update} updates of {averaged} an epoch",
        ),
        "epoch_loss": (_is_real(saved["epoch_loss"]), "must be a number"),
        "seconds": (_is_real(saved["seconds"]) and 0 <= saved["seconds"] < math.inf, "must be a number >= 0"),
        "timed_updates": (_is_whole(saved["timed_updates"], 0, update), f"must be a whole number from 0 to {update}"),
        "best_step": (
            (best is None and loss is None) or (_is_whole(best, 1, update) and _is_real(loss)),
            f"must be a whole number from 1 to {update} with a best_loss, or both null",
        ),
        "initial": (
            isinstance(initial, list) and len(initial) == 2 and all(v is None or _is_real(v) for v in _flat(initial)),
            "must be a loss and metrics by name, each a number or null",
        ),
    }
    return [f"{place}.{key}: {saved[key]}: {allowed}" for key, (fits, allowed) in sane.items() if not fits]


# ---- what it holds


def _model_faults(job: Job, held: Checkpoint) -> List[str]:
    """Tensors of another precision; names and shapes are checked where they are loaded."""
    with job.numbers.whole():
        own = job.model.state_dict()
    return [
        f"model: {name}: is {_kind(value)}, this run has {_kind(own[name])}"
        for name, value in held.model.items()
        if name in own and own[name].shape == value.shape and own[name].dtype != value.dtype
    ]


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).rpartition('.')[2]} {tuple(value.shape)}"
    return type(value).__name__


def _optimizer_faults(job: Job, held: Checkpoint, own: Origin) -> List[str]:
    """Entries that this run's optimizer and rules do not keep, or keep otherwise, and those that are missing."""
    saved: Dict[str, Dict[str, Any]] = defaultdict(dict)
    for key, value in [*held.optimizer.items(), *held.state["optimizer"].items()]:
        name, _, entry = key.rpartition("/")
        if value is not None:  # of what is not kept some versions of torch say None
            saved[name][entry] = value
    if any(entry.startswith(f"{MARK}:") for entries in saved.values() for entry in entries):
        return []  # PopTorch's, which it reads as a whole; other backends refuse it
    parameters = job.get_trained()
    trained = {id(p) for group in job.groups for p in group["params"]}
    faults = [f"optimizer: {name}: the model has no parameter of that name" for name in saved if name not in parameters]
    faults += [
        f"optimizer: {name}: this run does not train it"
        for name in saved
        if id(parameters.get(name)) not in trained | {id(None)}
    ]
    silent = []  # parameters of which there is nothing
    for name, (kept, ruled) in _kept(job, parameters, held.state["position"]["update"]).items():
        entries = saved.get(name, {})
        same_stages = held.manifest is not None and list(held.manifest.stages) == list(own.stages)
        needed = {**kept, **(ruled if same_stages else {})}  # a rule's entries follow its stage's lag
        known = {**needed, **dict.fromkeys(job.rules.list_known_entries(), parameters[name])}
        found = _entry_faults(name, entries, needed, known)
        if not entries and found:
            silent.append((name, found))
        else:
            faults += found
    if silent:
        moved = _moved(job)
        faults += [fault for name, found in silent if name in moved for fault in found]
    return faults


def _entry_faults(
    name: str, saved: Mapping[str, Any], needed: Mapping[str, Any], known: Mapping[str, Any]
) -> List[str]:
    faults = [f"optimizer: {name}/{entry}: missing, this run keeps one" for entry in needed if entry not in saved]
    for entry, value in saved.items():
        if entry not in known:
            faults.append(f"optimizer: {name}/{entry}: this run's optimizer and rules keep no such entry")
        elif not _alike(value, known[entry]):
            faults.append(f"optimizer: {name}/{entry}: is {_kind(value)}, this run has {_kind(known[entry])}")
    return faults


def _alike(saved: Any, own: Any) -> bool:
    if isinstance(saved, torch.Tensor) and isinstance(own, torch.Tensor):
        return saved.shape == own.shape and saved.dtype == own.dtype
    return type(saved) is type(own) or (_is_real(saved) and _is_real(own))


def _kept(
    job: Job, parameters: Mapping[str, torch.nn.Parameter], update: int
) -> Dict[str, Tuple[Dict[str, Any], Dict[str, Any]]]:
    """What the optimizer keeps of each trained parameter and what the rules do after `update` updates, by entry, as values
    alike in shape and type. Parameters of an optimizer that cannot be tried are left out."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    settings = {id(p): group for group in job.optimizer.param_groups for p in group["params"]}
    found: Dict[str, Tuple[Dict[str, Any], Dict[str, Any]]] = {}
    for group in job.groups:
        entries = job.rules.entries(group["stage"]) if update > job.rules.switch else []
        for parameter in group["params"]:
            kept = _tried(job.optimizer, parameter, settings.get(id(parameter), job.optimizer.param_groups[0]))
            if kept is not None:
                found[names[id(parameter)]] = kept, dict.fromkeys(entries, parameter)
    return found


def _tried(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, settings: Mapping[str, Any]
) -> Optional[Dict[str, Any]]:
    """The entries that an optimizer like this one keeps of such a parameter, from a step of its own on zeros."""
    own = torch.nn.Parameter(torch.zeros_like(parameter))
    own.grad = torch.zeros_like(own)
    trial = object.__new__(type(optimizer))
    kept = optimizer.state.get(parameter, {}).items()
    begun = {key: value.detach().clone() if isinstance(value, torch.Tensor) else value for key, value in kept}
    trial.__dict__.update(optimizer.__dict__)
    trial.param_groups, trial.state = [{**settings, "params": [own]}], defaultdict(dict, {own: begun} if begun else {})
    trial.__dict__.update({hooks: OrderedDict() for hooks in _STEP_HOOKS})
    try:
        trial.step()
    except Exception:  # an optimizer of the user's own that wants more than this
        return None
    return {key: _shape_of(value) for key, value in trial.state.get(own, {}).items() if value is not None}


def _shape_of(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value


def _moved(job: Job) -> List[str]:
    """Names of the parameters that get a gradient from the run's first microbatch."""
    with undisturbed(job.model):
        job.model.train()
        x, y = job.example
        with torch.enable_grad():
            job.loss(call(job.model, copied(x)), copied(y)).backward()
        moved = [name for name, parameter in job.model.named_parameters() if parameter.grad is not None]
        job.model.zero_grad(set_to_none=True)
    return moved


def make_state(at: Position, plain: Dict[str, Any]) -> Dict[str, Any]:
    """What state.json says."""
    return {"position": asdict(at), "optimizer": plain}
