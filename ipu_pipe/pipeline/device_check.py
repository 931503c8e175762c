"""Check the device that a run names, before anything trains on it."""

from __future__ import annotations

from ipu_pipe.config.backend_facts import BACKEND_FACTS
from ipu_pipe.errors import BadInput
from ipu_pipe.model.devices import DeviceKind, get_kind, list_accelerators
from ipu_pipe.text import find_alias


def require_device(name: str) -> DeviceKind:
    """Return the kind of device that `backend.device` names. Raise `BadInput` if torch has none
    here.
    """
    kind = get_kind(name)
    if kind.is_available():
        return kind
    if kind.is_cuda:
        raise BadInput("backend.device: cuda: this machine has no usable CUDA device: use cpu")
    known = " or ".join(["cpu", *(one.name for one in list_accelerators())])
    meant = name if name in BACKEND_FACTS else find_alias(name, BACKEND_FACTS)
    hint = f"; did you mean backend.name={meant}?" if meant else ""
    raise BadInput(f"backend.device: {name}: torch has no such device here: must be {known}{hint}")
