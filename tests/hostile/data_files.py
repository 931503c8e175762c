"""Damage or replace the files that a run reads: images, and initial weights."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any, Dict

from tests.hostile.cases import Bases, Case, damage_file, write_config
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
    config: Dict[str, Any] = {}
    if rng.random() < 0.5:
        _write_images(folder / "images", rng)
        config = {
            "data": {"name": "image_folder", "root": "images", "size": 8}, "micro_batch_size": 2, "gradient_accumulation": 2,
            "method": "gpipe", "model": {"entry": "models.mlp:mlp", "args": {"inputs": 192, "layers": 4, "classes": 2}},
        }  # fmt: skip
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
    write_config(folder, **config)
    run = ["--out", "run", "--set", "steps=2"]
    argv = ["config.yaml", *(["--dry-run"] if rng.random() < 0.5 else run)]
    return Case("train", argv, mutation)
