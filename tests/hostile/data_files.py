"""Damage or replace the images that a run reads."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from tests.hostile.cases import Bases, Case, damage_file, draw_short_run, write_config


def _write_images(root: Path, rng: random.Random) -> None:
    from PIL import Image

    for part in ("train", "val"):
        for label in ("a", "b"):
            (root / part / label).mkdir(parents=True)
            for number in range(4):
                picture = Image.new("RGB", (rng.choice([8, 16]), 8), (number * 20, 0, 0))
                picture.save(root / part / label / f"{number}.{rng.choice(['png', 'jpg', 'jpeg'])}")


def make_data_file_case(rng: random.Random, folder: Path, bases: Bases) -> Case:
    """Make a case of a run that reads a damaged image, or a folder of images without one."""
    images = folder / "images"
    _write_images(images, rng)
    paths = sorted(images.rglob("*"))
    files = [path for path in paths if path.is_file()]
    folders = [path for path in paths if path.is_dir()]
    mutation = damage_file(rng.choice(files), rng)
    if rng.random() < 0.2:
        shutil.rmtree(rng.choice(folders))
        mutation += ", a folder gone"
    args = {"inputs": 192, "layers": 4, "classes": 2}
    write_config(
        folder, data={"name": "image_folder", "root": "images", "size": 8}, micro_batch_size=2, gradient_accumulation=2,
        method="gpipe", model={"entry": "models.mlp:mlp", "args": args},
    )  # fmt: skip
    return Case("train", draw_short_run(rng), mutation)
