"""A strict stand-in for PopTorch 3.4 on a machine without IPUs: importable as `poptorch`, `popdist` and `pva`.

    poptorch = poptorch_double.install(monkeypatch)    # in a test, which undoes it; or the fixture `poptorch`
    PYTHONPATH=tests/poptorch_double/path python tools/train.py ...      # in a process of its own

It refuses what PopTorch's front end or compiler refuses, with the same messages, and what fails silently there.
It runs the wrapped model on the CPU with PopTorch's batch splitting, accumulation, output modes and weight copies, and
records all calls in `poptorch.recorded`. api.json holds the signatures as data; nothing here ran on an IPU.
Where a fact is not confirmed, marked [U] in the comments, the double does the stricter thing.

Environment variables of the double, for a process of its own:

    POPTORCH_DOUBLE_IPUS         IPUs of the machine (as many as the largest model alone needs; 0: no hardware)
    POPTORCH_DOUBLE_FAIL         faults: EVENT:CALL:ERROR[:ACTION],...   execute:3:RecoverableError:LINK_RESET
    POPTORCH_DOUBLE_ALONE        1: a process of several trains without averaging gradients with the others
    POPDIST_NUM_INSTANCES, POPDIST_INSTANCE_INDEX, POPDIST_NUM_LOCAL_REPLICAS    the settings of poprun
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Dict, Iterator

import pytest

from ipu_pipe.backends.ipu.placement import initialize_popdist

PATH = str(Path(__file__).resolve().parent / "path")
PACKAGES = ("poptorch", "popdist", "pva")
_loaded: Dict[str, ModuleType] = {}  # imported once, for the time that it saves


def list_double_modules() -> Dict[str, ModuleType]:
    return {
        name: module for name, module in sys.modules.items() if name.partition(".")[0] in PACKAGES
    }


def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make `import poptorch`, `popdist` and `pva` give the doubles, as if just imported; return `poptorch`.

    The import path, the modules and the environment are put back when the test ends. Modules that imported `poptorch` at
    their top keep what they got.
    """
    remove_modules()
    monkeypatch.setenv("RDMAV_FORK_SAFE", "1")  # importing sets it, as PopTorch does
    monkeypatch.syspath_prepend(PATH)
    if not _loaded:
        with contextlib.redirect_stderr(sys.__stderr__):  # a test's capture may be no file
            for name in ("poptorch", "popdist.poptorch", "pva"):
                importlib.import_module(name)
        _loaded.update(list_double_modules())
        remove_modules()
    for name, module in _loaded.items():
        monkeypatch.setitem(sys.modules, name, module)
    forget_records()
    return _loaded["poptorch"]


def forget_records() -> None:
    """Reset the double: no recorded calls, and no device in use."""
    poptorch, device = _loaded["poptorch"], _loaded["poptorch._device"]
    poptorch.recorded.__init__()
    device.ipus_by_holder.clear()
    device.holder_by_id.clear()
    device.largest[:] = [0]
    _loaded["popdist"]._initialised = False
    initialize_popdist.cache_clear()


def remove_modules() -> None:
    for name in list_double_modules():
        del sys.modules[name]


@pytest.fixture
def poptorch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the double, fresh for one test."""
    yield install(monkeypatch)
    remove_modules()
