"""Hardware descriptions by name or file: `--hardware NAME|FILE` and a config's `hardware`.

Named ones are the files of configs/hardware/, and `this`, the machine itself, which a command measures into the user's cache.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, Dict, List, Mapping, Union

from pydantic import ValidationError

from ipu_pipe.config.faults import format_faults
from ipu_pipe.config.yaml_files import Origins, note_origin, read_with_origins
from ipu_pipe.errors import BadInput
from ipu_pipe.hardware.description import Hardware
from ipu_pipe.shipped import find_configs
from ipu_pipe.text import find_nearest, show

FOLDER = find_configs() / "hardware"
THIS = "this"
COMMAND = "python tools/measure_hardware.py"


def names() -> List[str]:
    """What can be asked for by name."""
    return [*sorted(path.stem for path in FOLDER.glob("*.yaml")), THIS]


def this_file() -> Path:
    """Where the measured description of this machine is: by its name, since homes are shared by machines."""
    return Path.home() / ".cache" / "ipu_pipe" / "hardware" / f"{socket.gethostname()}.yaml"


def read_hardware(asked: Union[str, Mapping[str, Any]], key: str = "--hardware") -> Hardware:
    """The description that is `asked` for by name or file, or given as a mapping of a file's keys. `key` says in faults who asks.
    Raises BadInput with every fault found."""
    if not isinstance(asked, str):
        origins: Origins = {}
        note_origin(dict(asked), "", key, origins)
        return _checked({"name": "given", **asked}, origins, key)
    path = _file(asked, key)
    origins = {}
    raw = read_with_origins(path, origins)
    return _checked({"name": THIS if asked == THIS else path.stem, **raw}, origins, str(path))


def _file(asked: str, key: str) -> Path:
    if asked == THIS:
        path = this_file()
        if not path.is_file():
            raise BadInput(f"{key}: this: this machine is not measured yet: {COMMAND} writes {path}")
        return path
    if asked in names():
        return FOLDER / f"{asked}.yaml"
    path = Path(asked)
    if path.suffix not in (".yaml", ".yml"):
        near = find_nearest(asked, names())
        hint = f"; did you mean {near}?" if near else ""
        raise BadInput(f"{key}: {show(asked)}: must be one of {', '.join(names())} or a YAML file{hint}")
    return path


def _checked(raw: Dict[str, Any], origins: Origins, place: str) -> Hardware:
    try:
        return Hardware.model_validate(raw)
    except ValidationError as error:
        raise BadInput(format_faults(error.errors(), origins, place, Hardware, {})) from None
