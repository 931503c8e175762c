"""Make runs whose user code misbehaves: callback, model, data, loss, metric, optimizer or scheduler."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Dict

from ipu_pipe.run.callbacks import HOOKS
from tests.hostile.cases import BASE, Bases, Case, write_config
from tests.hostile.faulty import HOW, RAISING

PLACES = [
    "constructor", "forward", "state_dict", "load_state_dict", "train_batch", "test_batches", "train_batches_per_epoch",
    "loss", "metric", "optimizer", "step", "scheduler", "scheduler step", "rate", "empties", "empties later", "renames",
]  # fmt: skip
FAULTY = "tests.hostile.faulty"
# methods of every module: a user's may raise, but return nothing else than PyTorch's own
OF_MODULES = ("state_dict", "load_state_dict")


def make_user_code_case(rng: random.Random, folder: Path, bases: Bases) -> Case:
    """Make a case of a run with one misbehaving object."""
    how = rng.choice([*HOW, "signature", "signature", "signature"])
    after = rng.choice([0, 0, 1, 2, 5, 9, 30])
    if rng.random() < 0.4:
        where = rng.choice([*HOOKS, "state", "load"])
        args = {"where": where, "how": how, "after": after % 3}
        objects: Dict[str, Any] = {
            "callbacks": [{"entry": f"{FAULTY}:make_callback", "args": args}]
        }
    else:
        where = rng.choice(PLACES)
        how = rng.choice([*RAISING]) if where in OF_MODULES else how
        args = {"where": where, "how": how, "after": after}
        objects = {
            "model": {"entry": f"{FAULTY}:Model", "args": args}, "data": {"name": f"{FAULTY}:make_faulty_data"},
            "loss": f"{FAULTY}:loss", "metrics": [f"{FAULTY}:metric"], "optimizer": {"name": f"{FAULTY}:Optimizer", "lr": 0.1},
            "lr_schedule": {"name": f"{FAULTY}:make_scheduler"},
        }  # fmt: skip
    checkpoint = {**BASE["checkpoint"], "background": rng.random() < 0.5}
    sizes = {"stages": 2, "gradient_accumulation": 2, "steps": 4}
    write_config(folder, checkpoint=checkpoint, **sizes, **objects)
    argv = ["config.yaml", "--out", "run"]
    if rng.random() < 0.2:
        argv = ["config.yaml", "--dry-run"]
    return Case("train", argv, f"{where}: {how} after {after}")
