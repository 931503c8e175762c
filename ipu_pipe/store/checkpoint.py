"""Write and read checkpoints: folders `checkpoints/step-K/`, written whole or not at all, without
pickle.

    step-120/model.safetensors       weights and buffers under the names of the model before it was split
             optimizer.safetensors   optimizer state, `parameter/entry`
             manifest.json           position in the run, the keys that decide its numbers, a SHA-256 of each file and of itself

A sharded checkpoint has files of each process, model-00001-of-00004.safetensors and so on
(`shards`). Checkpoints are taken where the schedule drains, so that only the newest weight version
exists. A folder is written under a temporary name and renamed when all its files are on disk: a
checkpoint that exists is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, Collection, Iterator, Mapping, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from ipu_pipe.backends.ranks import read_torch_version
from ipu_pipe.errors import BadInput, RunFault, guard_writing, raise_faults, summarize
from ipu_pipe.files import hash_file, open_file, read_file
from ipu_pipe.local.blocks import HEADS
from ipu_pipe.model.restoring import load_state
from ipu_pipe.store.manifest import list_manifest_faults
from ipu_pipe.text import list_some, show

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
MANIFEST = "manifest.json"
FILES = (MODEL, OPTIMIZER)
_FILE = re.compile(r"(model|optimizer)(-\d{5}-of-\d{5})?\.safetensors")
# schemas 1 and 2 had a state.json, without a manifest and beside one
SCHEMA = 3
# the faults of a checkpoint that are printed; the others are counted
MOST_FAULTS = 5
# earlier versions of torch.load could run a file's code despite weights_only (CVE-2025-32434)
SAFE_TORCH = (2, 6)
_STEP = re.compile(r"step-(\d+)$")
_LEFTOVER = re.compile(r"\.step-\d+\.(part|old)$")
_NO_HASH = "0" * 64
# parts of names that wrappers add: DataParallel and AveragedModel, torch.compile, FSDP, checkpoint_wrapper
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class Checkpoint(NamedTuple):
    """The contents of a checkpoint: tensors on the CPU, and the manifest.

    The manifest has `step`, the `entries` of `save`, and the hashes of the files.
    """

    model: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    manifest: dict[str, Any]


# ---- writing


def save(
    folder: Path,
    step: int,
    model: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor],
    entries: Mapping[str, Any],
) -> Path:
    """Write `folder/step-K` and return it; `entries`: of the manifest, JSON values. Raise
    `RunFault` if the disk refuses.
    """
    with delete_on_error(folder, step), guard_step(folder, step):
        begin_step(folder, step)
        files = {
            name: write_tensors(folder, step, name, part)
            for name, part in zip(FILES, (model, optimizer))
        }
        return finish_step(folder, step, files, entries)


@contextlib.contextmanager
def delete_on_error(folder: Path, step: int) -> Iterator[None]:
    """Delete an unfinished checkpoint if a fault ends its writing."""
    try:
        yield
    except RunFault:
        shutil.rmtree(_name_unfinished(folder, step), ignore_errors=True)
        raise


@contextlib.contextmanager
def guard_step(folder: Path, step: int) -> Iterator[None]:
    """Raise `RunFault` if writing a checkpoint fails."""
    try:
        yield
    # the last three are of JSON, for entries that it cannot hold
    except (OSError, TypeError, ValueError, RecursionError) as error:
        why = f"cannot write the checkpoint: {error}; earlier checkpoints are intact"
        raise RunFault(f"{folder / f'step-{step}'}: {why}") from error


def _name_unfinished(folder: Path, step: int) -> Path:
    return folder / f".step-{step}.part"


def begin_step(folder: Path, step: int) -> None:
    """Make the empty folder in which a checkpoint is written until it is whole."""
    shutil.rmtree(_name_unfinished(folder, step), ignore_errors=True)
    _name_unfinished(folder, step).mkdir(parents=True)


def write_tensors(folder: Path, step: int, name: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """Write a file of an unfinished checkpoint and return its SHA-256."""
    file = _name_unfinished(folder, step) / name
    save_tensors(file, tensors)
    return hash_file(file, "sha256")


def save_tensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file to the disk. Raise `OSError`."""
    contiguous = {}
    storages = set()
    for key, value in tensors.items():
        # older versions of the format have no complex numbers, so these are stored as pairs (..., 2)
        value = torch.view_as_real(value.detach().resolve_conj()) if value.is_complex() else value
        value = value.detach().cpu().contiguous()
        storage = value.untyped_storage().data_ptr()
        # the format refuses two names of one storage (tied weights)
        contiguous[key] = value.clone() if storage in storages else value
        storages.add(storage)
    try:
        save_file(contiguous, file)
    except SafetensorError as error:
        raise OSError(f"{file.name}: {error}") from error
    _flush(file)


def finish_step(
    folder: Path, step: int, files: Mapping[str, str], entries: Mapping[str, Any]
) -> Path:
    """Write the manifest of a checkpoint, rename its folder, and return it; `files`: name ->
    SHA-256.
    """
    final = folder / f"step-{step}"
    unfinished = _name_unfinished(folder, step)
    manifest = {"sha256": _NO_HASH, "schema": SCHEMA, "step": step, **entries, "files": dict(files)}
    (unfinished / MANIFEST).write_text(_insert_hash(json.dumps(manifest, indent=1) + "\n"))
    # before the rename, which may otherwise reach the disk first and name a folder of empty files
    for path in (unfinished / MANIFEST, unfinished):
        _flush(path)
    # os.replace refuses to replace a folder that has files
    old = folder / f".step-{step}.old"
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(final, old)
    os.replace(unfinished, final)
    # last, since it may take long, and a run that is killed meanwhile needs one of the two
    shutil.rmtree(old, ignore_errors=True)
    # a new name is on disk only with the folder that lists it
    for path in (folder, folder.parent):
        _flush(path)
    return final


def _insert_hash(text: str) -> str:
    """Replace the zeros in the manifest's first line by the hash of the whole text."""
    return text.replace(_NO_HASH, hashlib.sha256(text.encode()).hexdigest(), 1)


def _flush(path: Path) -> None:
    """Write a file, or the list of a folder's files, to the disk."""
    is_folder = path.is_dir()
    # Windows opens no folder, and flushes no file that is open for reading alone
    if is_folder and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- the checkpoints of a run


def list_steps(folder: Path) -> list[int]:
    """List the steps of the complete checkpoints in `folder`, ascending."""
    matches = (_STEP.match(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match.group(1)) for match in matches if match)


def delete_leftovers(folder: Path) -> None:
    """Delete the half-written and half-deleted checkpoints of a killed run. Raise `RunFault` if the
    disk refuses.
    """
    with guard_writing(folder):
        for path in list(folder.iterdir()) if folder.is_dir() else ():
            if _LEFTOVER.match(path.name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def prune(folder: Path, keep: int, best: Collection[int | None]) -> None:
    """Delete all checkpoints except the newest `keep` and those of the steps `best`."""
    delete_steps(folder, [step for step in list_steps(folder)[:-keep] if step not in best])


def delete_steps(folder: Path, steps: list[int]) -> None:
    """Delete the checkpoints of these steps. Raise `RunFault` if the disk refuses."""
    for step in steps:
        with guard_writing(folder / f"step-{step}"):
            # rename first, because a half-deleted folder must not look complete
            old = folder / f".step-{step}.old"
            shutil.rmtree(old, ignore_errors=True)
            os.replace(folder / f"step-{step}", old)
            shutil.rmtree(old, ignore_errors=True)


def find_newest(path: Path) -> Path:
    """Return the newest checkpoint of the run in the folder `path`, or `path` itself if it is not
    the folder of a run.

    Raise `BadInput` if the run has no checkpoint.
    """
    steps = list_steps(path / "checkpoints")
    if not steps and os.path.isdir(path / "checkpoints"):
        raise BadInput(f"{path}: has no checkpoint")
    return path / "checkpoints" / f"step-{steps[-1]}" if steps else path


# ---- reading


def load(path: Path) -> Checkpoint:
    """Read the checkpoint folder `path`. Raise `BadInput`, naming the file, if something is missing
    or corrupt.
    """
    manifest = read_manifest(path)
    return Checkpoint(
        _read_files(path, "model", manifest), _read_files(path, "optimizer", manifest), manifest
    )


def _read_files(
    path: Path,
    kind: str,
    manifest: Mapping[str, Any],
) -> dict[str, torch.Tensor]:
    """Read the tensors of a checkpoint's files of one kind, model or optimizer."""
    matches = filter(None, map(_FILE.fullmatch, manifest.get("files", {})))
    files = [match.string for match in matches if match.group(1) == kind]
    return {name: value for file in files for name, value in read_tensors(path / file).items()}


def read_manifest(path: Path, resumes: bool = True) -> dict[str, Any]:
    """Read the manifest of the checkpoint folder `path` and compare the files with their hashes in
    it.

    Raise `BadInput` if they differ, or if a run `resumes` from a checkpoint of another version.
    """
    file = path / MANIFEST
    try:
        text = _read_json_text(file)
        manifest: dict[str, Any] = dict(json.loads(text))
        written = str(manifest.pop("sha256"))
        if (
            len(written) != len(_NO_HASH)
            # its own hash was computed with zeros in its place
            or _insert_hash(text.replace(written, _NO_HASH, 1)) != text
        ):
            raise ValueError("its SHA-256 differs from the recorded one")
        is_known = manifest.get("schema") == SCHEMA
        if resumes and not is_known:
            raise BadInput(
                f"{file}: schema: {manifest.get('schema')}: this version resumes {SCHEMA}: use the "
                f"ipu_pipe that wrote it, "
                f"or begin a new run from the weights (init_from: {path / MODEL})"
            )
        if not is_known:
            # Only the weights of another version's checkpoint are read: its record of a file may
            # have another form than a hash.
            manifest = {"files": dict.fromkeys(dict(manifest.get("files", {})), "")}
        raise_first_faults(file, list_manifest_faults(manifest))
        for name, sha256 in manifest.get("files", {}).items():
            file = path / name
            if not os.path.isfile(file) or (is_known and hash_file(file, "sha256") != sha256):
                raise ValueError("is missing, or its SHA-256 differs from the recorded one")
    except BadInput:
        raise
    except OSError as error:
        raise BadInput(f"{file}: cannot be read: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        match = _STEP.match(path.name)
        earlier = [step for step in list_steps(path.parent) if match and step < int(match.group(1))]
        remedy = (
            f"use an earlier one: --resume-from {max(earlier)}"
            if earlier
            else "there is no earlier one"
        )
        if not (path / MANIFEST).is_file() and (path / "state.json").is_file():
            # Early versions of ipu_pipe wrote this file and no manifest.
            remedy = f"begin a new run from its weights (init_from: {path / MODEL})"
        raise BadInput(f"{file}: corrupt checkpoint: {error}; {remedy}") from None
    return manifest


def _read_json_text(file: Path) -> str:
    """Return the text of a JSON file of a checkpoint. Raise ValueError or `OSError`."""
    if not os.path.isfile(file):
        raise ValueError("the file is missing")
    return read_file(file).decode("utf-8")


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Read the weights of a checkpoint folder, of a run's newest checkpoint, or of a file (see
    `read_tensors`).

    Raise `BadInput` if a file of a checkpoint differs from its recorded hash.
    """
    path = find_newest(path)
    if os.path.isdir(path):
        return _read_files(path, "model", read_manifest(path, resumes=False))
    # a file that is named itself may belong to a checkpoint, which has its hash
    if _FILE.fullmatch(path.name) and os.path.isfile(path.parent / MANIFEST):
        read_manifest(path.parent, resumes=False)
    return read_tensors(path)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a plain state dict from a .safetensors file, or from a file of torch.save without
    running its pickled code.

    Raise `BadInput` if the file has other contents, or if this version of torch might run its code.
    """
    try:
        # tried alone, because a reader of a format would call a missing file a wrong one
        open_file(path).close()
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file") from None
    except OSError as error:
        raise BadInput(
            f"{path}: cannot be read as a state dict: {error.strerror or error}"
        ) from None
    if path.suffix != ".safetensors" and read_torch_version() < SAFE_TORCH:
        raise BadInput(
            f"{path}: this torch ({torch.__version__}) could run code in such a file, torch 2.6 "
            f"and later do not: must be a "
            ".safetensors file, as safetensors.torch.save_file writes it there"
        )
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    # the readers of the formats raise many types of errors
    except Exception as error:
        raise BadInput(
            f"{path}: cannot be read as a state dict: {summarize(error)[:120]}"
        ) from None
    if (
        not isinstance(loaded, dict)
        or not loaded
        or not all(isinstance(v, torch.Tensor) for v in loaded.values())
    ):
        keys = f", but {list_some(list(loaded))}" if isinstance(loaded, dict) else ""
        raise BadInput(f"{path}: is not a plain state dict (names to tensors){keys}")
    kinds = {name: _find_odd_kind(value) for name, value in loaded.items()}
    faults = [
        f"{show(name)}: is {kind}: must be a dense tensor" for name, kind in kinds.items() if kind
    ]
    faults += [
        f"{show(name)}: is a key of type {type(name).__name__}: must be text"
        for name in loaded
        if type(name) is not str
    ]
    raise_first_faults(path, faults)
    return loaded


def _find_odd_kind(tensor: torch.Tensor) -> str:
    """Return what a tensor is if its values cannot be copied into a parameter, else ""."""
    if tensor.is_nested:
        return "nested"
    if tensor.is_quantized:
        return "quantized"
    if tensor.is_meta:
        return "without values (on the meta device)"
    return "" if tensor.layout == torch.strided else str(tensor.layout).rpartition(".")[2]


# ---- loading weights into a model


class Loaded(NamedTuple):
    """The names that `load_weights` did not load: `left_out`, name in the file -> reason, and
    `new`, names of the model.
    """

    left_out: dict[str, str]
    new: list[str]


def load_weights(
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    source: str,
    heads_too: bool = True,
    strict: bool = True,
) -> Loaded:
    """Copy a state dict into `model`. Raise `BadInput`, naming the `source`, if they do not fit:
    nothing is copied then.

    `strict`: all names and shapes must agree; otherwise those that agree are loaded. `heads_too`:
    auxiliary heads of local losses must agree too; otherwise they are loaded if they are present
    and fit. A tied weight may be present under only one of its names.
    """
    state, fitting, loaded = _match_weights(model, tensors, source, heads_too, strict)
    load_state(model, {**state, **fitting})
    return loaded


def check_weights(model: nn.Module, tensors: Mapping[str, torch.Tensor], source: str) -> None:
    """Raise `BadInput`, naming the `source`, if `load_weights` would refuse a state dict."""
    _match_weights(model, tensors, source, heads_too=True, strict=True)


def _match_weights(
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    source: str,
    heads_too: bool,
    strict: bool,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Loaded]:
    """Return the model's state, the tensors that fit it, and which do not; arguments as of
    `load_weights`.
    """
    state = model.state_dict()
    saved = tensors
    pairs = {
        name
        for name, value in tensors.items()
        if name in state and state[name].is_complex() and not value.is_complex()
    }
    tensors = {
        name: _join_pairs(value) if name in pairs else value for name, value in tensors.items()
    }
    heads = {name: value for name, value in state.items() if name.startswith(HEADS)}
    # a model without heads can load a checkpoint with heads, because they are for training only
    if not heads or not heads_too:
        fitting = {n: v for n, v in tensors.items() if n in heads and heads[n].shape == v.shape}
        tensors = {
            **{n: v for n, v in tensors.items() if not n.startswith(HEADS)},
            **heads,
            **fitting,
        }
    left_out = {
        name: "the model has no such parameter or buffer"
        + (f", but {_unwrap(name)}, without its wrapper" if _unwrap(name) in state else "")
        for name in tensors
        if name not in state
    }
    names_by_parameter: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_by_parameter.setdefault(parameter, []).append(name)
    # the model's state has every name of a tied weight, and a file may have only one
    tied: dict[str, torch.Tensor] = {}
    for names in names_by_parameter.values():
        present = [name for name in names if name in tensors]
        for name in present[1:]:
            if not _are_equal(tensors[name], tensors[present[0]]):
                left_out[name] = f"differs from {present[0]}, which is the same weight of the model"
        tied.update({name: tensors[present[0]] for name in names if present})
    tensors = {**tied, **tensors}
    for name in state:
        if name in tensors and state[name].shape != tensors[name].shape:
            left_out[name] = (
                f"shape {tuple(tensors[name].shape)}, the model has {tuple(state[name].shape)}"
            )
        # a copy would leave out the imaginary part
        elif name in tensors and tensors[name].is_complex() and not state[name].is_complex():
            left_out[name] = "is complex, the model's is real"
    fitting = {name: value for name, value in tensors.items() if name not in left_out}
    # a file of which nothing fits is of another model, whatever was allowed
    if strict or not fitting:
        wrapper = describe_wrapper(state, saved)
        if wrapper:
            raise BadInput(f"{source}: {wrapper}")
        missing = [f"{name}: missing, the model needs it" for name in state if name not in tensors]
        raise_first_faults(source, missing + [f"{name}: {why}" for name, why in left_out.items()])
    return state, fitting, Loaded(left_out, [name for name in state if name not in fitting])


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two tensors are equal, or this process's parts of two that are sharded."""
    # torch compares DTensors over all processes, and those of other stages do not have these
    one, other = (t.to_local() if hasattr(t, "to_local") else t for t in (one, other))
    # a weight of another process is NaN under both names, which equals nothing
    return one.data_ptr() == other.data_ptr() or torch.equal(one, other)


def describe_wrapper(state: Mapping[str, Any], tensors: Mapping[str, Any], remedy: str = "") -> str:
    """Return what a wrapper has added to the names of `tensors`, or to those of the model's
    `state`, and the remedy, by default how to rename; "" if they differ in something else.
    """
    why = "as wrappers such as DistributedDataParallel and torch.compile save it"
    prefix = _find_prefix(state, tensors)
    if prefix:
        what = f"every name begins with {prefix}"
        short = f"name[{len(prefix)}:]"
    else:
        wrapped = [name for name in tensors if name not in state and _unwrap(name) in state]
        parts = {part for name in wrapped for part in name.split(".")}
        added = [part for part in WRAPPERS if part in parts]
        what = f"{list_some(wrapped, 1)}: has {' and '.join(added)} in its name" if wrapped else ""
        short = rf're.sub(r"\b({"|".join(added)})\.", "", name)'
    if what:
        rename = f"leave it out: {{{short}: value for name, value in weights.items()}}"
        return f"{what}, {why}: {remedy or rename}"
    unknown = {name for name in tensors if name not in state}
    wrapped = [name for name in state if name not in tensors and _unwrap(name) in unknown]
    inside = remedy or "take the model inside the wrapper"
    return (
        f"the model is wrapped: {_unwrap(wrapped[0])} is its {list_some(wrapped, 1)}: {inside}"
        if wrapped
        else ""
    )


def _unwrap(name: str) -> str:
    """Return a name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _find_prefix(state: Mapping[str, Any], tensors: Mapping[str, Any]) -> str:
    """Return the prefix of all names without which a name is one of the model's; "" if there is
    none.
    """
    # a wrapper prefixes all names, so that none would be right
    if any(name in state for name in tensors):
        return ""
    for name in tensors:
        parts = name.split(".")
        for i in range(1, len(parts)):
            prefix = ".".join(parts[:i]) + "."
            if name[len(prefix) :] in state and all(other.startswith(prefix) for other in tensors):
                return prefix
    return ""


def _join_pairs(value: torch.Tensor) -> torch.Tensor:
    """Return the complex numbers whose parts are in the last dimension; other tensors unchanged."""
    is_paired = value.is_floating_point() and value.dim() > 0 and value.shape[-1] == 2
    return torch.view_as_complex(value.contiguous()) if is_paired else value


def raise_first_faults(source: object, faults: list[str]) -> None:
    """Raise `BadInput` with the first faults, `source` before each, and the number of the others;
    return if there are none.
    """
    more = [f"{len(faults) - MOST_FAULTS} more such faults"] if len(faults) > MOST_FAULTS else []
    raise_faults([f"{source}: {fault}" for fault in faults[:MOST_FAULTS] + more])
