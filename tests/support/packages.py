"""Write packages that tests put before the installed ones on the import path."""

from __future__ import annotations

from pathlib import Path


def write_broken_torchvision(folder: Path) -> None:
    """Write a torchvision 0.1.2 that fails to import, as one built for another torch does."""
    info = "torchvision-0.1.2.dist-info"
    files = {
        "torchvision/__init__.py": 'raise RuntimeError("operator torchvision::nms does not exist")\n',
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.1.2\n",
        f"{info}/RECORD": f"torchvision/__init__.py,,\n{info}/METADATA,,\n{info}/RECORD,,\n",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
