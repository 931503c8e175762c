"""Let commands read something that is not a small regular file: a pipe, a device, a folder or a huge file.

tests/test_user_faults.py passes paths that no file can have.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from tests.hostile.cases import IRREGULAR, Bases, Case, replace_file, write_config

ROWS, DRY_RUN = "--stages 4 --microbatches 4", "train config.yaml --dry-run --set"
# command lines, and the file that they read
READERS = {
    f"schedule rows {ROWS} --file odd.csv": "odd.csv",
    f"schedule gpipe {ROWS} --file odd.csv": "odd.csv",
    "train odd.yaml --dry-run": "odd.yaml",
    f"{DRY_RUN} method=rows method_args.file=odd.csv": "odd.csv",
    f"{DRY_RUN} hardware=odd.yaml": "odd.yaml",
    f"{DRY_RUN} extends=odd.yaml": "odd.yaml",
    f"{DRY_RUN} init_from=odd.safetensors": "odd.safetensors",
    f"{DRY_RUN} init_from=odd.pt": "odd.pt",
    "train config.yaml --evaluate odd.safetensors": "odd.safetensors",
    "train config.yaml --evaluate odd.pt": "odd.pt",
    "plan config.yaml --hardware odd.yaml": "odd.yaml",
    "rehearse odd.yaml": "odd.yaml",
    "rehearse config.yaml --set hardware=odd.yaml": "odd.yaml",
    "collect config.yaml --steps 0 --out out --set hardware=odd.yaml": "odd.yaml",
    "stability odd.yaml --samples 8 --iterations 9": "odd.yaml",
    "reproduce odd.yaml --rows nothing": "odd.yaml",
    "analyze odd.json": "odd.json",
    "analyze odd.trace --json": "odd.trace",
    "analyze run --against odd.json.gz": "odd.json.gz",
    "export odd --to new.safetensors": "odd",
    "predict odd": "odd",
    f"{DRY_RUN} data.root=data data.name=cifar10": "data/cifar-10-batches-bin/data_batch_1.bin",
    f"{DRY_RUN} data.root=data data.name=mnist": "data/mnist/train-images-idx3-ubyte",
    f"{DRY_RUN} data.root=data data.name=shakespeare": "data/shakespeare/shakespeare.txt",
    f"{DRY_RUN} data.root=data data.name=translation": "data/translation/english.txt",
    f"{DRY_RUN} data.root=data data.name=verses": "data/translation/english.txt",
}


def make_named_file_case(rng: random.Random, folder: Path, bases: Bases) -> Case:
    """Make a case of a command that reads something which is not a regular file."""
    line = rng.choice(list(READERS))
    file = folder / READERS[line]
    file.parent.mkdir(parents=True, exist_ok=True)
    mutation = replace_file(file, rng.choice(IRREGULAR))
    tool, *argv = line.split()
    if "run" in argv:
        shutil.copytree(bases.end, folder / "run")
    write_config(folder)
    return Case(tool, argv, mutation)
