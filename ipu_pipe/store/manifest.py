"""The schema of a checkpoint's manifest: the type of each key, as every version that this one
resumes has written it.
"""

from __future__ import annotations

import os
from typing import Any, Dict, List, Mapping, Optional, Tuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import Annotated

from ipu_pipe.text import show
from ipu_pipe.update.rates import PLATEAU_STATE

Count = Annotated[int, Field(ge=0)]


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _PositionRecord(_Record):
    """The position of a run (`ipu_pipe.report.position`). `best_loss`: the name of `best_value` in
    early checkpoints.
    """

    # the run would continue without what it does not know
    model_config = ConfigDict(strict=True, extra="forbid")

    update: Count
    epoch_loss: float = 0.0
    epoch_updates: Count = 0
    seconds: float = 0.0
    timed_updates: Count = 0
    best_name: str = ""
    best_value: Optional[float] = None
    best_loss: Optional[float] = None
    best_step: Optional[Count] = None
    # a list in JSON
    initial: Annotated[Tuple[Optional[float], Dict[str, Optional[float]]], Field(strict=False)] = (
        None,
        {},
    )
    plateau: Optional[Dict[str, Optional[float]]] = None
    stopped: Optional[str] = None


class _CallbackRecord(_Record):
    name: str
    state: Any


class _Manifest(_Record):
    """The keys of a manifest. Their types are checked here; a resumed run needs those of
    `NEEDED`.
    """

    step: Count = 0
    updates: Count = 0
    keys: Dict[str, Any] = {}
    position: Optional[_PositionRecord] = None
    optimizer: Dict[str, Any] = {}
    callbacks: Optional[List[_CallbackRecord]] = None
    # in the optimizer's groups, which a checkpoint does not have
    written_settings: List[str] = []
    files: Dict[str, str] = {}


# without these a run cannot be resumed
NEEDED = ("step", "updates", "keys", "position", "optimizer", "files")


def list_manifest_faults(manifest: Mapping[str, Any]) -> List[str]:
    """List the faults of a manifest, each with its key and value, at most one a key."""
    try:
        _Manifest.model_validate(manifest)
    except ValidationError as error:
        first_by_key: Dict[str, str] = {}
        for fault in error.errors(include_url=False):
            key = ".".join(map(str, fault["loc"]))
            place = str(fault["loc"][0]) if fault["loc"] else ""
            first_by_key.setdefault(place, f"{key}: {show(fault['input'])}: {fault['msg']}")
        return list(first_by_key.values())
    faults = [
        f"files: {show(name)}: must be the name of a file in the checkpoint's folder"
        for name in manifest.get("files", {})
        # a name with a folder in it could lead out of the checkpoint
        if name in ("", ".", "..") or os.path.basename(name) != name
    ]
    plateau = (manifest.get("position") or {}).get("plateau")
    if plateau is not None:
        faults += [
            f"position.plateau.{key}: missing: must be a number"
            for key in ("rate", *PLATEAU_STATE)
            if plateau.get(key) is None
        ]
    return faults
