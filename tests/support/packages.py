"""Packages that tests put before the installed ones."""

from __future__ import annotations

from pathlib import Path


def write_broken_torchvision(folder: Path) -> None:
    """Write a torchvision 0.1.2 that fails to import as one does that was built for another torch."""
    record = folder / "torchvision-0.1.2.dist-info"
    (folder / "torchvision").mkdir()
    record.mkdir()
    code = 'raise RuntimeError("operator torchvision::nms does not exist")\n'
    (folder / "torchvision" / "__init__.py").write_text(code)
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.1.2\n")
    (record / "RECORD").write_text(f"torchvision/__init__.py,,\n{record.name}/METADATA,,\n{record.name}/RECORD,,\n")
