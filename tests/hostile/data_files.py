"""Files of data and of weights to begin with: images and state dicts, damaged or something else in their place."""

from __future__ import annotations

import copy
import random
import shutil
from pathlib import Path
from typing import Any, Dict

import yaml

from tests.hostile.cases import BASE, Bases, Case, damage_file
from tests.hostile.checkpoints import LAST


def _images(root: Path, rng: random.Random) -> None:
    from PIL import Image

    for part in ("train", "val"):
        for label in ("a", "b"):
            (root / part / label).mkdir(parents=True)
            for number in range(4):
                picture = Image.new("RGB", (rng.choice([8, 16]), 8), (number * 20, 0, 0))
                picture.save(root / part / label / f"{number}.{rng.choice(['png', 'jpg', 'jpeg'])}")


def make(rng: random.Random, folder: Path, bases: Bases) -> Case:
    """Return a run that reads a damaged file."""
    config: Dict[str, Any] = copy.deepcopy(BASE)
    if rng.random() < 0.5:
        _images(folder / "images", rng)
        config["data"] = {"name": "image_folder", "root": "images", "size": 8}
        config["model"]["args"].update(inputs=192, classes=2)
        config.update(micro_batch_size=2, gradient_accumulation=2, method="gpipe")
        files = sorted(path for path in (folder / "images").rglob("*") if path.is_file())
        what = damage_file(rng.choice(files), rng)
        if rng.random() < 0.2:
            shutil.rmtree(
                rng.choice([path for path in (folder / "images").rglob("*") if path.is_dir()])
            )
            what += ", a folder gone"
    else:
        import torch
        from safetensors.torch import load_file

        file = folder / rng.choice(["begin.safetensors", "begin.pt"])
        source = bases.end / LAST / "model.safetensors"
        if file.suffix == ".pt":
            torch.save(load_file(source), file)
        else:
            shutil.copyfile(source, file)
        what = damage_file(file, rng)
        config["init_from"] = file.name
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    argv = (
        ["config.yaml", "--dry-run"]
        if rng.random() < 0.5
        else ["config.yaml", "--out", "run", "--set", "steps=2"]
    )
    return Case("train", argv, what)
