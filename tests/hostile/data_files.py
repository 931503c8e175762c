"""Damage or replace the files that a run reads: images, and initial weights."""

from __future__ import annotations

import copy
import random
import shutil
from pathlib import Path
from typing import Any, Dict

import yaml

from tests.hostile.cases import BASE, Bases, Case, damage_file
from tests.hostile.checkpoints import LAST


def _write_images(root: Path, rng: random.Random) -> None:
    from PIL import Image

    for part in ("train", "val"):
        for label in ("a", "b"):
            (root / part / label).mkdir(parents=True)
            for number in range(4):
                picture = Image.new("RGB", (rng.choice([8, 16]), 8), (number * 20, 0, 0))
                picture.save(root / part / label / f"{number}.{rng.choice(['png', 'jpg', 'jpeg'])}")


def make_data_file_case(rng: random.Random, folder: Path, bases: Bases) -> Case:
    """Make a case of a run that reads a damaged file."""
    config: Dict[str, Any] = copy.deepcopy(BASE)
    if rng.random() < 0.5:
        _write_images(folder / "images", rng)
        config["data"] = {"name": "image_folder", "root": "images", "size": 8}
        config["model"]["args"].update(inputs=192, classes=2)
        config.update(micro_batch_size=2, gradient_accumulation=2, method="gpipe")
        files = sorted(path for path in (folder / "images").rglob("*") if path.is_file())
        mutation = damage_file(rng.choice(files), rng)
        if rng.random() < 0.2:
            shutil.rmtree(
                rng.choice([path for path in (folder / "images").rglob("*") if path.is_dir()])
            )
            mutation += ", a folder gone"
    else:
        import torch
        from safetensors.torch import load_file

        file = folder / rng.choice(["begin.safetensors", "begin.pt"])
        source = bases.end / LAST / "model.safetensors"
        if file.suffix == ".pt":
            torch.save(load_file(source), file)
        else:
            shutil.copyfile(source, file)
        mutation = damage_file(file, rng)
        config["init_from"] = file.name
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    run = ["--out", "run", "--set", "steps=2"]
    argv = ["config.yaml", *(["--dry-run"] if rng.random() < 0.5 else run)]
    return Case("train", argv, mutation)
