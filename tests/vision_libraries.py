"""Import `torchvision` and `timm` through here, for tests of their models.

Beside PyTorch's CPU build, torchvision from a package index fails to import, and `make install` sets it
aside (tools/check_torchvision.py). Its models need only its Python code, so tests train them with that code
and with empty definitions of the two operators that it looks for when it is imported. Users have no such
definitions: tests that do what users do run in a process that does not import this module.

    python -m tests.vision_libraries SCRIPT [ARGUMENT ...]     # run a script with these libraries
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

if importlib.util.find_spec("timm") is None:
    # the kind that `pytest.importorskip` skips
    raise ModuleNotFoundError("timm is not installed")
ASIDE = Path(sys.prefix) / "torchvision_aside"  # as in tools/check_torchvision.py
_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")  # must live as long as its definitions


def _define_operators() -> bool:
    """Define the two operators if torchvision's own library cannot be loaded. Return whether
    they were defined."""
    signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.submodule_search_locations is None:
        return False
    try:
        torch.ops.load_library(f"{spec.submodule_search_locations[0]}/_C.so")
    except OSError:
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):  # this module may be imported again
                _LIBRARY.define(name + signature)
        return True
    return False


def __getattr__(name: str) -> Any:
    """Import both libraries at the first use of one: it takes seconds, which tests of others do without."""
    if name not in __all__:
        raise AttributeError(name)
    # Restore the path: otherwise processes of other tests would inherit it, without the definitions.
    sys.path.append(str(ASIDE))
    try:
        lacks_operators = _define_operators()
        import timm
        import torchvision
    finally:
        sys.path.remove(str(ASIDE))
    globals().update(LACKS_OPERATORS=lacks_operators, timm=timm, torchvision=torchvision)
    return globals()[name]


__all__ = ["LACKS_OPERATORS", "timm", "torchvision"]  # noqa: F822

if __name__ == "__main__":
    __getattr__("timm")
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
