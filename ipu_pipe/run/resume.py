"""Resume a run: choose its checkpoint, check that run and data are the same, and load it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

import torch

from ipu_pipe.backends.interface import POPTORCH_PREFIX, CheckpointState
from ipu_pipe.backends.ranks import run_on_main
from ipu_pipe.config.compare import compare_deciding, list_length_dependent, select_deciding
from ipu_pipe.errors import BadInput, locate_faults
from ipu_pipe.job.evaluation import EvaluationResult
from ipu_pipe.job.record import PlannedJob
from ipu_pipe.model.precision import get_user_loss
from ipu_pipe.model.randomness import restore_random_states
from ipu_pipe.pipeline.flow import Flow
from ipu_pipe.pipeline.state import SavedState, check_loss, check_tensors
from ipu_pipe.refusals import show_in_config
from ipu_pipe.report.position import Position
from ipu_pipe.report.provenance import compare_data
from ipu_pipe.run.callbacks import Callbacks
from ipu_pipe.store import checkpoint
from ipu_pipe.store.checkpoint import Checkpoint
from ipu_pipe.store.folder import read_starts
from ipu_pipe.store.manifest import NEEDED
from ipu_pipe.text import list_some
from ipu_pipe.update.optimizer import keeps_elementwise
from ipu_pipe.update.rates import import_plateau

# of the entries of a loss which is a module, among those of the optimizer in a checkpoint
LOSS = "loss:"
COMPLEX = (torch.complex64, torch.complex128)


def join_loss(state: CheckpointState) -> CheckpointState:
    """Return a state for a checkpoint's files, with the tensors of the loss among the optimizer's."""
    loss = {
        f"{LOSS}/{name}": value
        for name, value in state.loss.items()
        if isinstance(value, torch.Tensor)
    }
    return state._replace(optimizer={**state.optimizer, **loss})


def _split_loss(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the tensors of the optimizer and those of the loss, by its own names."""
    loss = {key.split("/", 1)[1]: t for key, t in tensors.items() if key.startswith(f"{LOSS}/")}
    return {key: t for key, t in tensors.items() if not key.startswith(f"{LOSS}/")}, loss


def make_manifest(
    job: PlannedJob, position: Position, optimizer: Mapping[str, Any], callbacks: Sequence[Any]
) -> dict[str, Any]:
    """Return the manifest of a checkpoint without its files.

    Its `updates` and `keys` identify the run: its length, and the keys of its config that decide
    its numbers. `optimizer`: the plain values of the optimizer's state; `callbacks`: the states of
    the callbacks.
    """
    identity = {"updates": job.updates, "keys": select_deciding(job.config.to_dict())}
    return {
        **identity,
        "position": asdict(position),
        "optimizer": dict(optimizer),
        "callbacks": list(callbacks),
    }


def choose_step(folder: Path, step: int | None, option: str = "--resume-from") -> int:
    """Return `step` if it is not None, else the newest step in `folder`, 0 if there is none. Raise
    `BadInput`.
    """
    try:
        steps = checkpoint.list_steps(folder)
    except OSError as error:
        raise BadInput(f"--resume: {folder}: {error.strerror or error}") from None
    if step is not None and step not in steps:
        present = ", ".join(map(str, steps)) or "none"
        raise BadInput(f"{option}: {step}: {folder} has no such checkpoint, there are {present}")
    return steps[-1] if step is None and steps else step or 0


def restore(
    job: PlannedJob, flow: Flow, out: Path, say: Callable[[str], None], callbacks: Callbacks
) -> Position:
    """Load the checkpoint that `job` resumes from into its flow and callbacks, and return its
    position.

    Raise `BadInput` if the checkpoint belongs to another run, or is damaged.
    """
    path = out / "checkpoints" / f"step-{job.done}"
    if not job.done:
        say("the run ended before its first checkpoint: it starts from the beginning")
        return Position()
    saved = checkpoint.load(path)
    # only the main process reads the data here, so its random states must not change
    with restore_random_states():
        run_on_main(lambda: check_run(job, out, saved))
    state = convert_checkpoint(saved)
    flow.load(state)
    if state.loss:
        loss = get_user_loss(job.loss)
        # a checkpoint has the tensors of a loss alone (`join_loss`)
        loss.load_state_dict({**loss.state_dict(), **state.loss})
    callbacks.load(saved.manifest.get("callbacks"))
    # a copy, of which a key is renamed below
    position = dict(saved.manifest["position"])
    # old checkpoints compare by test loss only
    if "best_loss" in position:
        position["best_value"] = position.pop("best_loss")
    if job.plateau is not None and position.get("plateau") is not None:
        import_plateau(job.plateau, position["plateau"])
    say(f"resuming after update {job.done} from {path}")
    return Position(**{**position, "initial": EvaluationResult(*position["initial"])})


def convert_checkpoint(saved: Checkpoint) -> SavedState:
    """Return a checkpoint as a state of a pipeline, which drained there. The settings of its
    optimizer are functions of the update.
    """
    step = saved.manifest["step"]
    tensors, loss = _split_loss(saved.optimizer)
    plain = saved.manifest["optimizer"]
    return SavedState(saved.model, tensors, plain, loss, None, step, [step])


def check_run(job: PlannedJob, out: Path, saved: Checkpoint) -> None:
    """Raise `BadInput` if the checkpoint in the run's folder `out`, from which `job` resumes,
    belongs to another run.

    It does if the keys that decide the numbers, the length, the tensors or the data differ.
    """
    path = out / "checkpoints" / f"step-{job.done}"
    missing = [f"{key}: missing" for key in NEEDED if saved.manifest.get(key) is None]
    # first, because the comparisons read these entries
    checkpoint.raise_first_faults(path / checkpoint.MANIFEST, missing)
    checkpoint.raise_first_faults(path, _compare_keys(job, saved.manifest, path))
    with locate_faults(path):
        _check_state(job, convert_checkpoint(saved))
    written = saved.manifest.get("written_settings")
    if written:
        raise BadInput(
            f"--resume: {path}: optimizer: keeps {list_some(written)} outside of its parameters' "
            f"entries, which a checkpoint lacks: begin a new run from its weights (init_from: "
            f"{path / checkpoint.MODEL}), or train in a loop of your own, whose "
            f"Pipeline.state_dict() has them"
        )
    # after the other checks: it reads the data
    faults = compare_data(job, read_data_record(out), job.data_fingerprints or {})
    why = (
        "the data of a run cannot change: restore them, or begin another run (--overwrite, or "
        "another --out)"
    )
    checkpoint.raise_first_faults(
        f"--resume: {out / 'record.json'}", [f"{fault}: {why}" for fault in faults]
    )


def _compare_keys(job: PlannedJob, manifest: Mapping[str, Any], path: Path) -> list[str]:
    """List the differences of the keys that decide the numbers, and the faults of the two runs'
    lengths.
    """
    keys = select_deciding(job.config.to_dict())
    faults = [
        f"{key}: saved with {show_in_config(a)}, this run has {show_in_config(b)}: it is another "
        f"run's checkpoint"
        for key, a, b in compare_deciding(manifest["keys"], keys)
    ]
    step = manifest["step"]
    updates = manifest["updates"]
    # a folder of another name would be resumed at another update
    if path.name != f"step-{step}":
        faults.append(f"step: the checkpoint is of step {step}: rename the folder")
    if manifest["position"]["update"] != step:
        faults.append(
            f"position.update: {manifest['position']['update']}: must be the step, {step}"
        )
    lengths = f"steps: saved in a run of {updates}, this one has {job.updates}"
    growing = list_length_dependent(job.config)
    if updates > job.updates:
        faults.append(f"{lengths}: may only grow")
    elif updates < job.updates and growing:
        remedy = (
            f"only a run that began with {' and '.join(growing)} can grow; begin a new run "
            f"from its weights (init_from)"
        )
        faults.append(f"{lengths}, which changes its rates from the beginning: {remedy}")
    return faults


def _check_state(job: PlannedJob, state: SavedState) -> None:
    """Raise `BadInput` if the tensors of a checkpoint do not fit this run's model, optimizer and
    loss.
    """
    is_poptorchs = any(f"/{POPTORCH_PREFIX}:" in key for key in state.optimizer)
    if is_poptorchs and not job.config.backend.facts.loads_poptorch_state:
        raise BadInput(
            "optimizer: its state is PopTorch's, which only backend.name poptorch can load: resume "
            "with that, or start a new run from its weights (init_from)"
        )
    check_loss(state.loss, get_user_loss(job.loss))
    # a checkpoint has the masters, of another type than the model's weights
    with job.precision.put_masters_in_place():
        check_tensors(state, job.model, job.get_trained(), keeps_elementwise(job.optimizer))
        present = job.model.state_dict()
    # a pipeline would convert them, and then a resumed run would differ from one that goes through
    others = {
        name: (value.dtype, present[name].dtype)
        for name, value in state.model.items()
        # complex numbers are saved as pairs
        if name in present and present[name].dtype not in (value.dtype, *COMPLEX)
    }
    checkpoint.raise_first_faults(
        "model",
        [f"{name}: is {saved}, this run has {now}" for name, (saved, now) in others.items()],
    )


def read_data_record(out: Path) -> dict[str, Any]:
    """Return the data record of the newest start of the run in the folder `out`, {} if there is
    none.
    """
    starts = read_starts(out)
    data = starts[-1].get("data") if starts and isinstance(starts[-1], dict) else None
    return data if isinstance(data, dict) else {}
