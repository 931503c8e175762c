"""Run folders: outputs damaged, swapped for pipes, links, folders; left-overs; then resumed, overwritten or started in."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

from tests.hostile.cases import Bases, Case, damage_file
from tests.hostile.checkpoints import resumed

LEFT = [
    "checkpoints/.step-4.old",
    "checkpoints/.step-6.part",
    "checkpoints/step-99",
    "checkpoints/step-",
    "checkpoints/junk",
    "x",
]


def make(rng: random.Random, folder: Path, bases: Bases) -> Case:
    """Return a run folder that is not as the run left it."""
    run = folder / "run"
    shutil.copytree(bases.run, run)
    files = sorted(path for path in run.iterdir() if path.is_file())
    said = []
    for _ in range(rng.choice([1, 1, 2])):
        how = rng.random()
        if how < 0.6:
            file = rng.choice(files)
            said.append(
                damage_file(file, rng) if file.is_file() and not file.is_symlink() else "nothing"
            )
        elif how < 0.8:
            left = run / rng.choice(LEFT)
            if not left.exists() and left.parent.is_dir():
                kind = rng.choice(["folder", "file", "pipe"])
                if kind == "pipe":
                    os.mkfifo(left)
                else:
                    left.mkdir() if kind == "folder" else left.touch()
            said.append(f"{left.name} left over")
        else:
            old = run / "checkpoints"
            if old.is_dir() and not old.is_symlink():
                how_else = rng.choice(["gone", "file", "link"])
                shutil.move(str(old), str(folder / "moved"))
                if how_else == "file":
                    old.write_text("x")
                elif how_else == "link":
                    old.symlink_to("nowhere")
                said.append(f"checkpoints: {how_else}")
    what = ", ".join(said)
    if rng.random() < 0.6:
        return resumed(folder, bases, what)
    argv = [
        str(bases.end / "config.yaml"),
        "--out",
        rng.choice(["run", "run/", "run/checkpoints", "run/config.yaml", "run/.."]),
    ]
    how_started = rng.choice([["--overwrite"], ["--overwrite"], []])
    return Case("train", [*argv, *how_started, "--set", "steps=2"], what)
