"""Count the files and functions of the library that one update passes through, in small runs; tests/house.py calls this.

    python -m tests.house_runs emulator|processes     prints one line of JSON

The run is configs/mlp_digits.yaml by `pipedream` with one microbatch per update. An update is counted on rank 0 from the end of
one update's callback to the beginning of the next one's, late in the run, when everything that happens once has happened.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
from collections import OrderedDict
from pathlib import Path
from types import FrameType
from typing import Any, Dict, Set, Tuple

import torch
from torch import nn

import ipu_pipe
from models.mlp import mlp

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = str(ROOT / "ipu_pipe") + os.sep
LOOP = LIBRARY + "run" + os.sep  # the loop around an update is not counted
SETTINGS = [
    "steps=20", "method=pipedream", "gradient_accumulation=1", "log={every: 1000, tensorboard: false}",
    "checkpoint={every: 1000}", "evaluate={every: 1000, subset: 128}", "data.subset=768",
]  # fmt: skip
COUNTED = 10  # the update that is counted, far from where the pipeline runs empty


class Tally:
    """Files and functions of the library that are entered between `start` and `stop`."""

    def __init__(self) -> None:
        self.functions: Set[Tuple[str, int]] = set()

    def start(self) -> None:
        """Begin to count, in this thread and in those that start from now on."""
        threading.setprofile(self._enter)
        sys.setprofile(self._enter)

    def stop(self) -> None:
        """Stop counting."""
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    @property
    def files(self) -> Set[str]:
        """Return the files entered."""
        return {name for name, _ in self.functions}

    def _enter(self, frame: FrameType, event: str, argument: Any) -> None:
        name, is_named = (
            frame.f_code.co_filename,
            not frame.f_code.co_name.startswith("<"),
        )  # no comprehension, no lambda
        if event == "call" and is_named and name.startswith(LIBRARY) and not name.startswith(LOOP):
            self.functions.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))


class ForwardCounter(nn.Sequential):
    """A sequential model that counts its forwards."""

    forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ForwardCounter.forwards += 1
        return super().forward(x)


class UpdateTally(ipu_pipe.Callback):
    """Tally one update, and read the count of forwards before the first one."""

    def __init__(self) -> None:
        self.tally, self.forwards = Tally(), 0

    def on_log(self, now: ipu_pipe.Moment) -> None:
        """Read the count of forwards after the evaluation before training."""
        if now.step == 0:
            self.forwards = ForwardCounter.forwards

    def on_step(self, now: ipu_pipe.Moment) -> None:
        """Start or stop the tally where its update begins or ends."""
        self.tally.stop()
        if now.step == COUNTED:
            self.tally.start()


def count_update(folder: str, *settings: str) -> UpdateTally:
    """Train and return the callback with its counts."""
    torch.set_num_threads(1)
    config = ipu_pipe.load_config(ROOT / "configs" / "mlp_digits.yaml", [*SETTINGS, *settings])
    tally = UpdateTally()
    # ranks must have the same model
    torch.manual_seed(0)
    ipu_pipe.train(
        config,
        folder,
        model=ForwardCounter(OrderedDict(mlp().named_children())),
        callbacks=[tally],
        quiet=True,
    )
    return tally


def count_building() -> Tally:
    """Build the job of a run and return the tally of it."""
    from ipu_pipe.run.build import build

    config, tally = ipu_pipe.load_config(ROOT / "configs" / "mlp_digits.yaml", SETTINGS), Tally()
    tally.start()
    build(config)
    tally.stop()
    return tally


def train_counted_rank(rank: int, folder: str, port: int, queue: Any) -> None:
    """Train as one of two ranks; rank 0 puts its counts into `queue`."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
    )
    update = count_update(folder, "backend={name: distributed}", "stages=2")
    if rank == 0:
        queue.put((len(update.tally.files), len(update.tally.functions)))


def measure_emulator() -> Dict[str, int]:
    """Return the measures of building a job and of an update on the emulator."""
    building = count_building()
    with tempfile.TemporaryDirectory() as folder:
        update = count_update(folder)
    return {
        "files in building a job": len(building.files),
        "files in one update, emulator": len(update.tally.files),
        "forwards before the first update": update.forwards,
    }


def measure_processes() -> Dict[str, int]:
    """Return the measures of an update on two processes."""

    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        ranks = [
            context.Process(target=train_counted_rank, args=(rank, folder, port, queue))
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(120)
        files, functions = queue.get(timeout=1)
    return {
        "files in one update, processes": files,
        "functions in one update, processes": functions,
    }


if __name__ == "__main__":
    print(json.dumps(measure_emulator() if sys.argv[1] == "emulator" else measure_processes()))
