"""Sections and checks of a config that belong to folders above this one, found by their names when a config needs them.

A backend keeps its own section and says what it cannot run: adding one touches its folder and a line here.
"""

from __future__ import annotations

import importlib
from typing import Any, Callable, Dict, List, Type

from ipu_pipe.config.values import Section

# key of a config -> "module:class" of its section
SECTIONS = {
    "ipu": "ipu_pipe.backends.ipu.config:IpuConfig",
    "hardware": "ipu_pipe.hardware.description:Hardware",
}
# (config, method, stages) -> faults of that many stages
CHECK_STAGES = "ipu_pipe.backends.ipu.refusals:check_placement"
# (config, method) -> faults, each "key: value: what is allowed"
CHECK_BACKEND = "ipu_pipe.backends.ipu.refusals:check_config"
# (name or file, place in faults) -> description; raises BadInput
READ_HARDWARE = "ipu_pipe.hardware.description:read_hardware"


def find_section(key: str) -> Type[Section]:
    """Return the class of the section that `key` holds."""
    section: Type[Section] = _find(SECTIONS[key])
    return section


def find_sections() -> Dict[str, Type[Section]]:
    """Return the classes of all sections in the table, by key."""
    return {key: find_section(key) for key in SECTIONS}


def check_backend(config: Any, method: Any) -> List[str]:
    """Return why the config's backend cannot run it, one line per fault."""
    check: Callable[[Any, Any], List[str]] = _find(CHECK_BACKEND)
    return check(config, method)


def check_stages(config: Any, method: Any, stages: int) -> List[str]:
    """Return why the config's backend cannot run that many stages, one line per fault."""
    check: Callable[[Any, Any, int], List[str]] = _find(CHECK_STAGES)
    return check(config, method, stages)


def read_hardware(name: str, place: str) -> None:
    """Raise `BadInput` if there is no valid description of hardware of that name or file."""
    _find(READ_HARDWARE)(name, place)


def _find(name: str) -> Any:
    """Import and return `module:name`."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
