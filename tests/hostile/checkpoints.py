"""Damage checkpoints in their bytes, JSON values and lists of files; then resume or evaluate them.

An accepted checkpoint must be the saved one: a resumed run ends with the weights and figures of the uninterrupted run.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import List, Optional

from safetensors.torch import load_file

from tests.hostile.cases import Bases, Case, change_value, damage_file

LAST = "checkpoints/step-6"


def find_difference(end: Path, run: Path) -> Optional[str]:
    """Return the first difference of the finished `run` from `end` in weights, optimizer state and figures, or None."""
    for name in ("model.safetensors", "optimizer.safetensors"):
        if not (run / LAST / name).is_file():
            return f"no {LAST}/{name}"
        ours, theirs = load_file(run / LAST / name), load_file(end / LAST / name)
        if ours.keys() != theirs.keys() or any(
            ours[key].dtype != theirs[key].dtype or ours[key].tolist() != theirs[key].tolist()
            for key in ours
        ):
            return f"{LAST}/{name} differs from the uninterrupted run's"
    ours, theirs = (json.loads((folder / "summary.json").read_text()) for folder in (run, end))
    for key in ("steps", "samples", "initial", "final"):
        if ours[key] != theirs[key]:
            return f"summary.json: {key}: {ours[key]}, was {theirs[key]}"
    return None


def make_resume_case(folder: Path, bases: Bases, mutation: str) -> Case:
    """Make the case that resumes `folder`/run."""
    argv = ["run/config.yaml", "--out", "run", "--resume"]
    if not (folder / "run" / "config.yaml").is_file():
        argv[0] = str(bases.end / "config.yaml")
    return Case("train", argv, mutation, lambda output: find_difference(bases.end, folder / "run"))


def list_checkpoints(run: Path) -> List[Path]:
    """Return the checkpoints of a run, the newest last."""
    folders = (run / "checkpoints").glob("step-*")
    return sorted(folders, key=lambda path: int(path.name.split("-")[1]))


def _damage_json(path: Path, rng: random.Random) -> str:
    """Change one value in a JSON file, or damage it again."""
    try:
        content = json.loads(path.read_text())
    except ValueError:
        return damage_file(path, rng)
    place = change_value(content, rng)
    path.write_text(json.dumps(content))
    return f"{path.name}: {place} changed"


def make_checkpoint_case(rng: random.Random, folder: Path, bases: Bases) -> Case:
    """Make a case that resumes, evaluates or predicts with a damaged checkpoint."""
    shutil.copytree(bases.run, folder / "run")
    *earlier, newest = list_checkpoints(folder / "run")
    mutations = []
    for _ in range(rng.choice([1, 1, 1, 2])):
        files = sorted(p for p in newest.iterdir() if p.is_file() and not p.is_symlink())
        if not files:
            break
        file, how = rng.choice(files), rng.random()
        if how < 0.5 and file.suffix == ".json":
            mutations.append(_damage_json(file, rng))
        elif how < 0.6:
            other = rng.choice([*earlier, bases.end / LAST]) / file.name
            shutil.copyfile(other, file)
            mutations.append(f"{file.name} of {other.parent.name}")
        elif how < 0.65:
            names = ["step-5", "step-4000000000", "step-0", "step-04", "step-x"]
            newest = newest.rename(newest.with_name(rng.choice(names)))
            mutations.append(f"called {newest.name}")
            break
        else:
            mutations.append(damage_file(file, rng))
    mutation, use = ", ".join(mutations), rng.random()
    if use < 0.65:
        return make_resume_case(folder, bases, mutation)
    if use < 0.75:
        return Case("predict", [rng.choice(["run", f"run/checkpoints/{newest.name}"])], mutation)
    known = json.loads((bases.end / "evaluated.json").read_text())

    def find_evaluation_difference(text: str) -> Optional[str]:
        figures = json.loads(text)
        is_same = all(figures[key] == known[key] for key in ("test_loss", "test_accuracy"))
        return None if is_same else f"evaluated as {figures}, was {known}"

    argv = ["run/config.yaml", "--evaluate", f"run/checkpoints/{newest.name}"]
    return Case("train", argv, mutation, find_evaluation_difference)
