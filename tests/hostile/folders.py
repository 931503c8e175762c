"""Damage run folders: replace outputs by pipes, links and folders, add leftovers; then resume, overwrite or start a run there."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from tests.hostile.cases import IRREGULAR, PUT, Bases, Case, damage_file, replace_file, write_config
from tests.hostile.checkpoints import make_resume_case

LEFT = [
    "checkpoints/.step-4.old",
    "checkpoints/.step-6.part",
    "checkpoints/step-99",
    "checkpoints/step-",
    "checkpoints/junk",
    "x",
]
# command lines that use a run, besides one that resumes it
USERS = [
    "train config.yaml --out run --overwrite --set steps=2", "train config.yaml --out run --set steps=2",
    "train config.yaml --out run/checkpoints --set steps=2", "train config.yaml --out run/config.yaml --overwrite",
    "train config.yaml --out run/.. --overwrite --set steps=2", "analyze run", "export run --to w.safetensors", "predict run",
]  # fmt: skip


def make_folder_case(rng: random.Random, folder: Path, bases: Bases) -> Case:
    """Make a case that uses a damaged run folder."""
    run = folder / "run"
    shutil.copytree(bases.run, run)
    files = sorted(path for path in run.rglob("*") if path.is_file())
    mutations = []
    for _ in range(rng.choice([1, 1, 2])):
        how = rng.random()
        # each once, since it may be a large one afterwards
        file = files.pop(rng.randrange(len(files)))
        if how < 0.2 and file.is_file():
            mutations.append(replace_file(file, rng.choice(IRREGULAR)))
        elif how < 0.6 and file.is_file():
            mutations.append(damage_file(file, rng))
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
    write_config(folder)
    tool, *argv = rng.choice(USERS).split()
    return Case(tool, argv, mutation)
