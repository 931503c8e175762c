"""Replace files that a config or an option names by a pipe, a device, a folder or a huge file.

tests/test_user_faults.py passes paths that no file can have.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any, Dict, List, Tuple

from tests.hostile.cases import IRREGULAR, Bases, Case, replace_file, write_config

ROWS, DRY_RUN = "--stages 4 --microbatches 4", "train config.yaml --dry-run --set"
# command lines that read FILE, and the suffix that they expect
READERS: List[Tuple[str, str]] = [
    (f"schedule rows {ROWS} --file FILE", ".csv"),
    (f"schedule gpipe {ROWS} --file FILE", ".csv"),
    ("train FILE --dry-run", ".yaml"),
    (f"{DRY_RUN} method=rows method_args.file=FILE", ".csv"),
    (f"{DRY_RUN} hardware=FILE", ".yaml"),
    (f"{DRY_RUN} extends=FILE", ".yaml"),
    (f"{DRY_RUN} init_from=FILE", ".safetensors"),
    (f"{DRY_RUN} init_from=FILE", ".pt"),
    ("train config.yaml --evaluate FILE", ".safetensors"),
    ("train config.yaml --evaluate FILE", ".pt"),
    ("plan config.yaml --hardware FILE", ".yaml"),
    ("rehearse FILE", ".yaml"),
    ("rehearse config.yaml --set hardware=FILE", ".yaml"),
    ("collect config.yaml --steps 0 --out out --set hardware=FILE", ".yaml"),
    ("stability FILE --samples 8 --iterations 9", ".yaml"),
    ("reproduce FILE --rows nothing", ".yaml"),
    ("analyze FILE", ".json"),
    ("analyze FILE --json", ".trace"),
    ("analyze run --against FILE", ".json.gz"),
    ("export FILE --to new.safetensors", ""),
    ("predict FILE", ""),
]
# files of sets of data, by the set
DATA = {
    "cifar10": "cifar-10-batches-bin/data_batch_1.bin", "mnist": "mnist/train-images-idx3-ubyte",
    "shakespeare": "shakespeare/shakespeare.txt", "translation": "translation/english.txt",
    "verses": "translation/english.txt",
}  # fmt: skip
# files of a run, read when it is resumed or analyzed
OF_RUN = [
    "config.yaml", "record.json", "metrics.jsonl", "summary.json", "memory.json", "trace.json.gz",
    "checkpoints/step-4/manifest.json", "checkpoints/step-4/model.safetensors",
    "checkpoints/step-4/optimizer.safetensors",
]  # fmt: skip
USERS_OF_RUN = [
    "train config.yaml --out run --resume", "train config.yaml --out run --overwrite --set steps=2", "analyze run",
    "export run --to w.safetensors", "predict run",
]  # fmt: skip


def make_named_file_case(rng: random.Random, folder: Path, bases: Bases) -> Case:
    """Make a case of a command that reads something which is not a regular file."""
    config: Dict[str, Any] = {}
    odd, how = rng.choice(IRREGULAR), rng.random()
    if how < 0.6:
        line, suffix = rng.choice(READERS)
        mutation = replace_file(folder / f"odd{suffix}", odd)
        tool, *argv = line.replace("FILE", f"odd{suffix}").split()
        if "run" in argv:
            shutil.copytree(bases.end, folder / "run")
    elif how < 0.8:
        name = rng.choice(sorted(DATA))
        config["data"] = {"name": name, "root": "data"}
        file = folder / "data" / DATA[name]
        file.parent.mkdir(parents=True)
        mutation = replace_file(file, odd)
        tool, argv = "train", ["config.yaml", "--dry-run"]
    else:
        shutil.copytree(bases.run, folder / "run")
        mutation = replace_file(folder / "run" / rng.choice(OF_RUN), odd)
        tool, *argv = rng.choice(USERS_OF_RUN).split()
    write_config(folder, **config)
    return Case(tool, argv, mutation)
