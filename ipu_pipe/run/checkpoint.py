"""The manifest of a checkpoint: what each of its files must hold, whose run it is, and a seal over itself.

`manifest.json` begins with the SHA-256 of its own bytes, taken with zeros in the hash's place: no byte of it can differ unseen.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Collection, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
from pydantic import BeforeValidator, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from typing_extensions import Annotated

from ipu_pipe.config.values import Section, Whole
from ipu_pipe.data.hashes import hash_file
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.local.blocks import HEADS
from ipu_pipe.model.restoring import load_state
from ipu_pipe.text import show

MANIFEST = "manifest.json"
SCHEMA = 2
_HEAD = '{\n "sha256": "'
_BLANK = "0" * 64


def _hexadecimal(value: Any) -> str:
    if isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef"):
        return value
    raise ValueError("must be a SHA-256 in hexadecimal")


Digest = Annotated[str, BeforeValidator(_hexadecimal)]


class FileRecord(Section):
    """A file beside the manifest."""

    bytes: Whole
    sha256: Digest


class Manifest(Section):
    """`step`: updates done; `updates`: those of the whole run; `stages`: how many parameters each stage had; `keys`: those
    that decide the numbers, see ipu_pipe.config.compare, and `keys_sha256` the hash of them."""

    sha256: Digest
    layout: Annotated[int, Field(alias="schema")]
    step: Whole
    updates: Whole
    stages: List[Whole]
    files: Dict[str, FileRecord]
    keys_sha256: Digest
    keys: Dict[str, Any]


class Origin(NamedTuple):
    """Whose a checkpoint is, for `write`: as in Manifest."""

    keys: Mapping[str, Any]
    updates: int
    stages: Sequence[int]


NOBODY = Origin({}, 0, ())  # weights that no run will go on from


def write_manifest(folder: Path, step: int, files: Sequence[str], origin: Origin) -> Path:
    """Write the manifest of `files` in `folder`. Raises OSError."""
    records = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": hash_file(folder / name, "sha256")} for name in files
    }
    body = {
        "schema": SCHEMA, "step": step, "updates": origin.updates, "stages": list(origin.stages), "files": records,
        "keys_sha256": _keys_hash(origin.keys), "keys": dict(origin.keys),
    }  # fmt: skip
    path = folder / MANIFEST
    path.write_text(seal_manifest(body))
    return path


def seal_manifest(body: Mapping[str, Any]) -> str:
    """The manifest's text for everything in it but its own hash."""
    text = json.dumps({"sha256": _BLANK, **body}, indent=1) + "\n"
    return text.replace(_BLANK, hashlib.sha256(text.encode()).hexdigest(), 1)


def _keys_hash(keys: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()


def read_manifest(path: Path) -> Manifest:
    """The manifest in the file `path`, as it was written. Raises BadInput."""
    corrupt = f"{path}: corrupt checkpoint"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from None
    begin, end = len(_HEAD), len(_HEAD) + len(_BLANK)
    blank = data[:begin] + _BLANK.encode() + data[end:]
    if hashlib.sha256(blank).hexdigest().encode() != data[begin:end]:
        raise BadInput(f"{corrupt}: its SHA-256 is not the one it says{_way_out(path.parent)}")
    try:
        body = json.loads(data)
        if body.get("schema") != SCHEMA:
            raise BadInput(f"{path}: schema: {body.get('schema')}: this version reads schema 1 and {SCHEMA}")
        found = Manifest.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise BadInput(f"{corrupt}: {key}: {first['msg'].replace('Value error, ', '')}") from None
    except (ValueError, AttributeError, RecursionError) as error:
        raise error if isinstance(error, BadInput) else BadInput(f"{corrupt}: {error}") from None
    if found.keys_sha256 != _keys_hash(found.keys):
        raise BadInput(f"{corrupt}: keys_sha256: is not the hash of keys")
    return found


def check_files(folder: Path, files: Mapping[str, Tuple[int, str]]) -> None:
    """Whether the files are those of the manifest, (bytes, SHA-256) by name; bytes -1: not known. Raises BadInput."""
    for name, (size, digest) in files.items():
        file = folder / name
        if not os.path.isfile(file):
            raise BadInput(f"{file}: corrupt checkpoint: the file is missing")
        try:
            differs = (size >= 0 and file.stat().st_size != size) or hash_file(file, "sha256") != digest
        except OSError as error:
            raise BadInput(f"{file}: cannot be read: {error.strerror or error}") from None
        if differs:
            told = f"{file}: corrupt checkpoint: its SHA-256 is not the one that was saved"
            raise BadInput(told + _way_out(folder))


def _way_out(folder: Path) -> str:
    """What to do instead: the earlier checkpoints beside this one."""
    name = folder.name
    own = int(name[5:]) if name.startswith("step-") and name[5:].isdigit() else 0
    others = [int(p.name[5:]) for p in folder.parent.glob("step-*") if p.name[5:].isdigit()]
    earlier = [step for step in others if step < own]
    return f"; use an earlier one: --resume-from {max(earlier)}" if earlier else "; there is no earlier one"


TENSORS = ("model", "optimizer")
STATE = "state.json"
FILES = (*(f"{name}.safetensors" for name in TENSORS), STATE)
EARLIER_KEYS = {"position", "optimizer", "schema", "step", "sha256"}  # of state.json of schema 1
WRAPPED = ("module.", "_orig_mod.")  # before the names of a model inside DataParallel or torch.compile
SHOWN = 5  # faults told of one checkpoint; the others are counted
SAFE_TORCH = (2, 6)  # before it torch.load could run a file's code in spite of weights_only (CVE-2025-32434)
_NAME = re.compile(r"step-(\d+)$")
_LEFTOVER = re.compile(r"\.step-(\d+)\.(part|old)$")


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds. `state`: position and plain values; tensors are on the CPU; `manifest`: None in the earlier
    layout, which does not say whose it is."""

    model: Dict[str, torch.Tensor]
    optimizer: Dict[str, torch.Tensor]
    state: Dict[str, Any]
    manifest: Optional[Manifest]


def save(
    folder: Path,
    step: int,
    model: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor],
    state: Dict[str, Any],
    origin: Origin = NOBODY,
) -> Path:
    """Write `folder/step-K` and return it. `state` must be JSON. Raises RunFault if the disk refuses."""
    final, temporary, old = folder / f"step-{step}", folder / f".step-{step}.part", folder / f".step-{step}.old"
    try:
        _delete(temporary)
        temporary.mkdir(parents=True)
        for name, tensors in zip(TENSORS, (model, optimizer)):
            # clones, since two names may share one storage (tied weights), which the format refuses
            save_file(
                {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()},
                temporary / f"{name}.safetensors",
            )
        text = json.dumps({**state, "schema": SCHEMA, "step": step}, indent=1)
        (temporary / STATE).write_text(text)
        write_manifest(temporary, step, FILES, origin)
        for file in (*temporary.iterdir(), temporary):
            _flush(file)
        if final.exists():  # the same position reached again; killed between the two renames, `tidy` finds both
            _delete(old)
            os.replace(final, old)
        os.replace(temporary, final)
        for path in (folder, folder.parent):
            _flush(path)
        _delete(old)
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        _delete(temporary)
        if old.exists() and not final.exists():
            with contextlib.suppress(OSError):  # else `tidy` does
                os.replace(old, final)
        raise RunFault(f"{final}: cannot write the checkpoint: {error}; earlier checkpoints are whole") from error
    return final


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _delete(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def list_steps(folder: Path) -> List[int]:
    """Steps of the complete checkpoints in `folder`, ascending."""
    found = (_NAME.match(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match.group(1)) for match in found if match)


def list_resumable(folder: Path) -> List[int]:
    """Steps of the checkpoints that a run can go on from, ascending: the complete ones, or, where there are none, the one that
    `tidy` would bring back."""
    whole = _whole_leftover(folder) if not list_steps(folder) else None
    return [whole[0]] if whole else list_steps(folder)


def tidy(folder: Path) -> None:
    """Clear away what a killed run left: half-written and half-deleted checkpoints. Where no other checkpoint is there, one of
    them that is whole is brought back: a kill between the two renames of `save` loses nothing. Raises RunFault."""
    try:
        whole = _whole_leftover(folder) if not list_steps(folder) else None
        if whole:
            os.replace(whole[1], folder / f"step-{whole[0]}")
        for _, path in _leftovers(folder):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    except OSError as error:
        raise RunFault(f"{folder}: cannot clear away unfinished checkpoints: {error}") from error


def _leftovers(folder: Path) -> List[Tuple[int, Path]]:
    """Unfinished checkpoints, the newest first."""
    found = [(_LEFTOVER.match(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(((int(match.group(1)), path) for match, path in found if match), reverse=True)


def _whole_leftover(folder: Path) -> Optional[Tuple[int, Path]]:
    for step, path in _leftovers(folder):
        try:
            _verified(path)
        except BadInput:
            continue
        return step, path
    return None


def prune(folder: Path, keep: int, best: Optional[int], others: Collection[int] = ()) -> None:
    """Delete all but the newest `keep` checkpoints, the one of step `best` and those of `others`."""
    delete_steps(folder, [step for step in list_steps(folder)[:-keep] if step != best and step not in others])


def delete_steps(folder: Path, doomed: List[int]) -> None:
    """Delete the checkpoints of these steps. Raises RunFault."""
    try:
        for step in doomed:
            old = folder / f".step-{step}.old"  # renamed first: a half-deleted folder must not look complete
            _delete(old)
            os.replace(folder / f"step-{step}", old)
            _delete(old)
    except OSError as error:
        raise RunFault(f"{folder / f'step-{step}'}: cannot be deleted: {error.strerror or error}") from error


def load(path: Path) -> Checkpoint:
    """Read the checkpoint folder `path`. Raises BadInput, naming the file, where something is missing or corrupt."""
    found, state = _verified(path)
    model, optimizer = (read_tensors(path / f"{name}.safetensors") for name in TENSORS)
    return Checkpoint(model, optimizer, state, found)


def find_newest(path: Path) -> Path:
    """The newest checkpoint of the run whose folder `path` is; `path` itself where it is no such folder. Raises BadInput where
    the run has none."""
    done = list_steps(path / "checkpoints")
    if not done and os.path.isdir(path / "checkpoints"):
        raise BadInput(f"{path}: holds no checkpoint")
    return path / "checkpoints" / f"step-{done[-1]}" if done else path


def read_weights(path: Path) -> Dict[str, torch.Tensor]:
    """The weights of a checkpoint folder, of a run's newest checkpoint, or of a file, as `read_tensors`. Files of a checkpoint
    must be what was saved."""
    path = find_newest(path)
    if os.path.isdir(path):
        _verified(path)
        path = path / f"{TENSORS[0]}.safetensors"
    elif path.name in FILES and os.path.isfile(path.parent / MANIFEST):
        _verified(path.parent)
    return read_tensors(path)


def _verified(path: Path) -> Tuple[Optional[Manifest], Dict[str, Any]]:
    """The manifest and state of the checkpoint folder `path`, all of whose files are what was saved. Raises BadInput."""
    if not os.path.isfile(path / MANIFEST):
        return None, _earlier(path)
    found = read_manifest(path / MANIFEST)
    if set(found.files) != set(FILES):
        raise BadInput(f"{path / MANIFEST}: files: {', '.join(found.files)}: must be {', '.join(FILES)}")
    check_files(path, {name: (record.bytes, record.sha256) for name, record in found.files.items()})
    state = _read_state(path)
    if state.get("step") != found.step:
        raise BadInput(f"{path / STATE}: step: {state.get('step')}: manifest.json says {found.step}")
    return found, state


def _earlier(path: Path) -> Dict[str, Any]:
    """The state of a checkpoint of the earlier layout, whose state.json nothing protects."""
    file = path / STATE
    if not os.path.isfile(file):
        raise BadInput(f"{path}: not a checkpoint: it has no {MANIFEST} and no {STATE}")
    state = _read_state(path)
    schema, hashes = state.get("schema"), state.get("sha256")
    if schema == SCHEMA:
        raise BadInput(f"{path / MANIFEST}: corrupt checkpoint: the file is missing")
    if schema != 1:
        raise BadInput(f"{file}: schema: {schema}: this version reads schema 1 and {SCHEMA}")
    names = {f"{name}.safetensors" for name in TENSORS}
    if set(state) != EARLIER_KEYS or not isinstance(hashes, dict) or set(hashes) != names:
        raise BadInput(f"{file}: corrupt checkpoint: its keys must be {', '.join(sorted(EARLIER_KEYS))}")
    check_files(path, {name: (-1, str(digest)) for name, digest in hashes.items()})
    return state


def _read_state(path: Path) -> Dict[str, Any]:
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        if not isinstance(state, dict):
            raise ValueError("must be a mapping")
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path / STATE}: corrupt checkpoint: {error}") from None
    return state


def read_tensors(path: Path) -> Dict[str, torch.Tensor]:
    """Tensors of a plain state dict: a .safetensors file, or one by torch.save (read without running its pickle's code, and
    so by a torch alone that is safe against it)."""
    if not os.path.isfile(path):  # pathlib raises where the folder cannot be read
        raise BadInput(f"{path}: no such file")
    if path.suffix != ".safetensors" and read_torch_version() < SAFE_TORCH:
        raise BadInput(
            f"{path}: this torch ({torch.__version__}) could run code in such a file, torch 2.6 and later do not: give a "
            ".safetensors file, made there by safetensors.torch.save_file({name: tensor.clone() for name, tensor in "
            "torch.load(FILE, map_location='cpu', weights_only=True).items()}, NEW_FILE)"
        )
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # many kinds, from the format's reader and from pickle's
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise BadInput(f"{path}: cannot be read as a state dict: {reason}") from None
    if not _is_plain(loaded):
        inside = [key for key, value in loaded.items() if _is_plain(value)] if isinstance(loaded, dict) else []
        there = f": there is one inside, at {show(inside[0])}: save that alone" if inside else ""
        raise BadInput(f"{path}: holds no plain state dict (names to tensors){there}")
    return loaded


def _is_plain(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(each, torch.Tensor) for each in value.values())


def read_torch_version() -> Tuple[int, ...]:
    """(major, minor) of the torch that is running."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


class Loaded(NamedTuple):
    """`left_out`: names in a state dict that found no place in the model, with the reason; `new`: names in the model that keep
    their own values."""

    left_out: Dict[str, str]
    new: List[str]


def load_weights(
    model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], place: str, heads_too: bool = True, strict: bool = True
) -> Loaded:
    """Copy a state dict into `model`; all names and shapes must agree if `strict`, else those that do are taken. `place` names
    the source in the error. `heads_too` false: auxiliary heads are taken where they are there and fit, and stay as they are
    otherwise. A weight with several names may be there under one of them."""
    own = model.state_dict()
    heads = {name: value for name, value in own.items() if name.startswith(HEADS)}
    if not heads or not heads_too:  # auxiliary heads only train
        fits = {n: v for n, v in tensors.items() if n in heads and heads[n].shape == v.shape}
        tensors = {**{n: v for n, v in tensors.items() if not n.startswith(HEADS)}, **heads, **fits}
    odd = {name: "the model has no such parameter or buffer" for name in tensors if name not in own}
    for names in _tied(model):
        given = [name for name in names if name in tensors]
        for name in given[1:]:
            if not torch.equal(tensors[name], tensors[given[0]]):
                odd[name] = f"differs from {given[0]}, which is the same weight of the model"
        tensors = {**{name: tensors[given[0]] for name in names if given}, **tensors}
    for name in own:
        if name in tensors and own[name].shape != tensors[name].shape:
            odd[name] = f"shape {tuple(tensors[name].shape)}, the model has {tuple(own[name].shape)}"
    fits = {name: value for name, value in tensors.items() if name not in odd}
    if strict or not fits:
        missing = [f"{name}: missing, the model needs it" for name in own if name not in tensors]
        prefix = next((p for p in WRAPPED if tensors and all(name.startswith(p) for name in tensors)), None)
        if prefix is not None and odd:
            raise BadInput(
                f"{place}: all names begin with {prefix}, a wrapper's: save the state dict of the model inside it"
            )
        raise_faults(place, missing + [f"{name}: {why}" for name, why in odd.items()])
    load_state(model, {**own, **fits})
    return Loaded(odd, [name for name in own if name not in fits])


def _tied(model: torch.nn.Module) -> List[List[str]]:
    """The names of each weight that has several."""
    found: Dict[int, List[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return [names for names in found.values() if len(names) > 1]


def raise_faults(place: object, faults: List[str]) -> None:
    """Raise BadInput where there are faults: the first few, `place` before each, and how many more there are."""
    more = [f"{len(faults) - SHOWN} more such faults"] if len(faults) > SHOWN else []
    if faults:
        raise BadInput([f"{place}: {fault}" for fault in faults[:SHOWN] + more])
