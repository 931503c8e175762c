"""Take torchvision out of this Python's environment if it was not built for the installed torch.

To PyTorch's CPU build a package index adds a torchvision for CUDA. Its operators cannot be loaded
there, and `import torchvision` fails; so do timm, and `from transformers import Trainer`, which
imports torchvision wherever it is installed. Without torchvision, transformers works. torchvision's
Python code stays in `ASIDE`, where tests/vision_libraries.py finds it for tests of models.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from importlib import metadata
from pathlib import Path

ASIDE = Path(sys.prefix) / "torchvision_aside"


def set_torchvision_aside() -> None:
    """Move the files of torchvision out of the packages that Python imports, to `ASIDE`."""
    distribution = metadata.distribution("torchvision")
    shutil.rmtree(ASIDE, ignore_errors=True)
    ASIDE.mkdir()
    for name in sorted({file.parts[0] for file in distribution.files or ()}):
        shutil.move(str(distribution.locate_file(name)), str(ASIDE / name))


def main() -> None:
    """Import torchvision, if it is installed; if that fails, take it out and print one line."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except Exception as error:
        pair = (
            f"torchvision {metadata.version('torchvision')} does not fit torch "
            f"{metadata.version('torch')}"
        )
        set_torchvision_aside()
        print(
            f"{pair} ({error}): taken out of {sys.prefix}; timm needs it:"
            " install torch and torchvision from one index by one command"
        )


if __name__ == "__main__":
    main()
