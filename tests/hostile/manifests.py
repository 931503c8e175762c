"""Forge manifests of checkpoints: change values, then recompute the seal."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any, Callable, Dict, List

from tests.hostile.cases import NESTED, Bases, Case, draw_value
from tests.hostile.checkpoints import list_places

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


def _change_files(manifest: Dict[str, Any], rng: random.Random) -> str:
    how = rng.choice(["odd", "outside", "hash"])
    if how == "odd":
        manifest["files"] = rng.choice(ODD)
    elif how == "outside":
        manifest["files"][rng.choice(OUTSIDE)] = rng.choice(list(manifest["files"].values()))
    else:
        manifest["files"][rng.choice(list(manifest["files"]))] = rng.choice(ODD)
    return f"files: {how}"


def _change_section(manifest: Dict[str, Any], rng: random.Random) -> str:
    key = rng.choice("optimizer position callbacks keys updates step schema files".split())
    manifest[key] = rng.choice([rng.choice(ODD), draw_value(rng)])
    return key


def _change_inside(manifest: Dict[str, Any], rng: random.Random) -> str:
    place = rng.choice(list_places(manifest))
    section: Any = manifest
    for key in place[:-1]:
        section = section[key]
    section[place[-1]] = rng.choice([rng.choice(ODD), draw_value(rng)])
    return ".".join(map(str, place))


def _change_initial(manifest: Dict[str, Any], rng: random.Random) -> str:
    name = rng.choice(["initial", "initial.1", "plateau", "best_step", "more", "best_value"])
    if name == "initial.1":
        manifest["position"]["initial"][1] = rng.choice(ODD)
    else:
        manifest["position"][name] = rng.choice(ODD)
    return f"position.{name}"


CHANGES: List[Callable[[Dict[str, Any], random.Random], str]] = [
    _change_files, _change_section, _change_section, _change_inside, _change_inside, _change_initial,
]  # fmt: skip
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
    mutation = rng.choice(CHANGES)(manifest, rng)
    write_sealed(newest / "manifest.json", manifest)
    tool, *argv = rng.choice(LINES).split()
    return Case(tool, argv, mutation)
