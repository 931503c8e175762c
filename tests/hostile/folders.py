"""Damage run folders: replace outputs by pipes, links and folders, add leftovers; then resume, overwrite or start a run there."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from tests.hostile.cases import PUT, Bases, Case, damage_file, replace_file
from tests.hostile.checkpoints import make_resume_case

LEFT = [
    "checkpoints/.step-4.old",
    "checkpoints/.step-6.part",
    "checkpoints/step-99",
    "checkpoints/step-",
    "checkpoints/junk",
    "x",
]


def make_folder_case(rng: random.Random, folder: Path, bases: Bases) -> Case:
    """Make a case that trains in a damaged run folder."""
    run = folder / "run"
    shutil.copytree(bases.run, run)
    files = sorted(path for path in run.iterdir() if path.is_file())
    mutations = []
    for _ in range(rng.choice([1, 1, 2])):
        how = rng.random()
        if how < 0.6:
            file = rng.choice(files)
            is_whole = file.is_file() and not file.is_symlink()
            mutations.append(damage_file(file, rng) if is_whole else "nothing")
        elif how < 0.8:
            left = run / rng.choice(LEFT)
            if not left.exists() and left.parent.is_dir():
                PUT[rng.choice(["folder", "empty", "pipe"])](left)
            mutations.append(f"{left.name} left over")
        else:
            old = run / "checkpoints"
            if old.is_dir() and not old.is_symlink():
                shutil.move(str(old), str(folder / "moved"))
                mutations.append(replace_file(old, rng.choice(["nothing", "empty", "dead link"])))
    mutation = ", ".join(mutations)
    if rng.random() < 0.6:
        return make_resume_case(folder, bases, mutation)
    out = rng.choice(["run", "run/", "run/checkpoints", "run/config.yaml", "run/.."])
    argv = [str(bases.end / "config.yaml"), "--out", out]
    argv += rng.choice([["--overwrite"], ["--overwrite"], []])
    return Case("train", [*argv, "--set", "steps=2"], mutation)
