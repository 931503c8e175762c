"""Forge manifests of checkpoints: change values, then recompute the seal."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any, Dict, List

from tests.hostile.cases import NESTED, Bases, Case, change_value

ZEROS = "0" * 64
OUTSIDE = [
    "../model.safetensors",
    "/etc/passwd",
    "/dev/zero",
    "a\0b",
    "..",
    "",
    ".",
    "model.safetensors/x",
    "a" * 300,
]
# values of other types, some nested as deep as those of a manifest
ODD: List[Any] = [*NESTED, None, True, 0, -1, 1.5, 1e308, "", "text", "3"]


def write_sealed(path: Path, manifest: Dict[str, Any]) -> None:
    """Write a manifest with the SHA-256 of its text."""
    text = json.dumps({**manifest, "sha256": ZEROS}, indent=1) + "\n"
    path.write_text(text.replace(ZEROS, hashlib.sha256(text.encode()).hexdigest(), 1))


def _change_manifest(manifest: Dict[str, Any], rng: random.Random) -> str:
    """Change the list of files, the position or any value. Return a description."""
    files, how = manifest["files"], rng.random()
    if how < 0.15:
        files[rng.choice(OUTSIDE)] = rng.choice([*files.values()])
    elif how < 0.3:
        files[rng.choice([*files])] = rng.choice(ODD)
    elif how < 0.45:
        name = rng.choice(["initial", "plateau", "best_step", "more", "best_value"])
        manifest["position"][name] = rng.choice(ODD)
    elif how < 0.6:
        manifest[rng.choice([*manifest])] = rng.choice(ODD)
    else:
        return change_value(manifest, rng)
    return "files, position or a section"


LINES = [
    "train run/config.yaml --out run --resume", "train run/config.yaml --out run --resume",
    "train run/config.yaml --out run --resume --dry-run", "train run/config.yaml --evaluate run",
    "export run --to w.safetensors", "export run --to w.safetensors --step best", "predict run",
]  # fmt: skip


def make_manifest_case(rng: random.Random, folder: Path, bases: Bases) -> Case:
    """Make a case that resumes, evaluates, exports or predicts with a forged checkpoint."""
    shutil.copytree(bases.run, folder / "run")
    newest = folder / "run" / "checkpoints" / "step-4"
    manifest = json.loads((newest / "manifest.json").read_text())
    mutation = _change_manifest(manifest, rng)
    write_sealed(newest / "manifest.json", manifest)
    tool, *argv = rng.choice(LINES).split()
    return Case(tool, argv, mutation)
