"""Checkpoints: folders `checkpoints/step-K/` written whole or not at all, without pickle.

    step-120/model.safetensors       weights and buffers under the unsplit model's names
             optimizer.safetensors   optimizer state, `parameter/entry`
             state.json              position, plain optimizer values, best result so far, SHA-256 of the two files

They are taken where the schedule drains, so no weight version but the newest exists then. A folder is written under
another name and renamed when all of it is on disk; a checkpoint that exists is complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.hashes import file_hash

HEADS = "local_heads"  # the name of auxiliary heads in a model (ipu_pipe.local)

SCHEMA = 1
_NAME = re.compile(r"step-(\d+)$")


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds. `state`: position and plain values; tensors are on the CPU."""

    model: Dict[str, torch.Tensor]
    optimizer: Dict[str, torch.Tensor]
    state: Dict[str, Any]


def save(
    folder: Path,
    step: int,
    model: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor],
    state: Dict[str, Any],
) -> Path:
    """Write `folder/step-K` and return it. `state` must be JSON. Raises RunFault if the disk refuses."""
    final, temporary = folder / f"step-{step}", folder / f".step-{step}.part"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name, tensors in (("model", model), ("optimizer", optimizer)):
            # clones, since two names may share one storage (tied weights), which the format refuses
            save_file(
                {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()},
                temporary / f"{name}.safetensors",
            )
        hashes = {
            f"{n}.safetensors": file_hash(temporary / f"{n}.safetensors", "sha256") for n in ("model", "optimizer")
        }
        text = json.dumps({**state, "schema": SCHEMA, "step": step, "sha256": hashes}, indent=1)
        (temporary / "state.json").write_text(text)
        for file in temporary.iterdir():
            _flush(file)
        if final.exists():  # the same position reached again, after a resume: both hold the same
            shutil.rmtree(final)
        os.replace(temporary, final)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise RunFault(f"{final}: cannot write the checkpoint: {error}; earlier checkpoints are whole") from error
    return final


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def steps(folder: Path) -> List[int]:
    """Steps of the complete checkpoints in `folder`, ascending."""
    found = (_NAME.match(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match.group(1)) for match in found if match)


def prune(folder: Path, keep: int, best: Optional[int]) -> None:
    """Delete all but the newest `keep` checkpoints and the one of step `best`."""
    for step in steps(folder)[:-keep]:
        if step != best:
            doomed = folder / f".step-{step}.old"  # renamed first: a half-deleted folder must not look complete
            os.replace(folder / f"step-{step}", doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def load(path: Path) -> Checkpoint:
    """Read the checkpoint folder `path`. Raises BadInput, naming the file, where something is missing or corrupt."""
    state_file = path / "state.json"
    try:
        state = json.loads(state_file.read_text())
        hashes = dict(state["sha256"])
    except FileNotFoundError:
        raise BadInput(f"{path}: not a checkpoint: it has no state.json") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{state_file}: corrupt checkpoint: {error}") from None
    if state.get("schema") != SCHEMA:
        raise BadInput(f"{state_file}: schema: {state.get('schema')}: this version reads schema {SCHEMA}")
    tensors = {}
    for name in ("model", "optimizer"):
        file = path / f"{name}.safetensors"
        if not file.is_file():
            raise BadInput(f"{file}: corrupt checkpoint: the file is missing")
        if file_hash(file, "sha256") != hashes.get(file.name):
            raise BadInput(
                f"{file}: corrupt checkpoint: its SHA-256 is not the one in state.json; use an earlier checkpoint"
            )
        tensors[name] = read_tensors(file)
    return Checkpoint(tensors["model"], tensors["optimizer"], state)


def read_tensors(path: Path) -> Dict[str, torch.Tensor]:
    """Tensors of a plain state dict: a .safetensors file, or one by torch.save (read without running its pickle's code)."""
    if not os.path.isfile(path):  # pathlib raises where the folder cannot be read
        raise BadInput(f"{path}: no such file")
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # many kinds, from the format's reader and from pickle's
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise BadInput(f"{path}: cannot be read as a state dict: {reason}") from None
    if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise BadInput(f"{path}: holds no plain state dict (names to tensors)")
    return loaded


def load_weights(
    model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], place: str, heads_too: bool = True
) -> None:
    """Copy a state dict into `model`; all names and shapes must agree. `place` names the source in the error. `heads_too` false:
    auxiliary heads are taken where they are there and fit, and stay as they are otherwise."""
    own = model.state_dict()
    if not heads_too:
        heads = {name: value for name, value in own.items() if name.startswith(HEADS)}
        fits = {n: v for n, v in heads.items() if n in tensors and tensors[n].shape == v.shape}
        tensors = {
            **{n: v for n, v in tensors.items() if not n.startswith(HEADS)},
            **heads,
            **{n: tensors[n] for n in fits},
        }
    if not any(name.startswith(HEADS) for name in own):  # auxiliary heads only train
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(HEADS)}
    faults = [f"{place}: {name}: missing, the model needs it" for name in own if name not in tensors]
    faults += [f"{place}: {name}: the model has no such parameter or buffer" for name in tensors if name not in own]
    faults += [
        f"{place}: {name}: shape {tuple(tensors[name].shape)}, the model has {tuple(own[name].shape)}"
        for name in own
        if name in tensors and own[name].shape != tensors[name].shape
    ]
    if faults:
        shown = faults[:5] + ([f"{place}: {len(faults) - 5} more such faults"] if len(faults) > 5 else [])
        raise BadInput(shown)
    model.load_state_dict(dict(tensors))
