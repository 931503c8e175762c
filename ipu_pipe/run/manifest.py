"""The manifest of a checkpoint: what each of its files must hold, whose run it is, and a seal over itself.

`manifest.json` begins with the SHA-256 of its own bytes, taken with zeros in the hash's place: no byte of it can differ unseen.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence, Tuple

from pydantic import BeforeValidator, Field, ValidationError
from typing_extensions import Annotated

from ipu_pipe.config.values import Section, Whole
from ipu_pipe.data.hashes import file_hash
from ipu_pipe.errors import BadInput

NAME = "manifest.json"
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
    that decide the numbers, see ipu_pipe.config.identity, and `keys_sha256` the hash of them."""

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


def write(folder: Path, step: int, files: Sequence[str], origin: Origin) -> Path:
    """Write the manifest of `files` in `folder`. Raises OSError."""
    records = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": file_hash(folder / name, "sha256")} for name in files
    }
    body = {
        "schema": SCHEMA, "step": step, "updates": origin.updates, "stages": list(origin.stages), "files": records,
        "keys_sha256": _keys_hash(origin.keys), "keys": dict(origin.keys),
    }  # fmt: skip
    path = folder / NAME
    path.write_text(sealed(body))
    return path


def sealed(body: Mapping[str, Any]) -> str:
    """The manifest's text for everything in it but its own hash."""
    text = json.dumps({"sha256": _BLANK, **body}, indent=1) + "\n"
    return text.replace(_BLANK, hashlib.sha256(text.encode()).hexdigest(), 1)


def _keys_hash(keys: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()


def read(path: Path) -> Manifest:
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
            differs = (size >= 0 and file.stat().st_size != size) or file_hash(file, "sha256") != digest
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
