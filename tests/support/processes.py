"""Run forked ranks, and compare runs on two of them with the emulator."""

from __future__ import annotations

import os
import signal
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Sequence

import torch

import ipu_pipe
from ipu_pipe.config.schema import BackendConfig
from ipu_pipe.errors import end_process
from tests.forked import fork_ranks
from tests.support.runs import assert_same_weights, read_summary

Runs = Mapping[
    str, Callable[[], Dict[str, Any]]
]  # name -> a function of the arguments of `ipu_pipe.train`


def run_in_group(
    ranks: int, work: Callable[..., None], folder: Path, *arguments: Any, seconds: float = 120
) -> None:
    """Call `work(rank, folder, *arguments)` in forked ranks of a group; all must exit with 0."""
    fork_ranks(ranks, _work_in_group, ranks, work, folder, arguments, seconds=seconds)


def end_rank(folder: Path, rank: int) -> None:
    """Record that a rank has finished, then end its process as a script that raises does."""
    (folder / f"{rank}.ended").touch()
    end_process(0)


def wait_for_file(file: Path) -> None:
    """Wait until another process has made a file; fail after two minutes."""
    end = time.monotonic() + 120
    while not file.exists():
        assert time.monotonic() < end, file
        time.sleep(0.02)


def enable_interrupts() -> None:
    """Restore the default handler of SIGINT.

    A shell that runs the tests in the background has interrupts ignored, and children inherit that.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _work_in_group(
    rank: int, ranks: int, work: Callable[..., None], folder: Path, arguments: Sequence[Any]
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    try:
        work(rank, folder, *arguments)
        torch.distributed.barrier()
    except BaseException:
        traceback.print_exc()
        end_process(1)
    end_process(0)


def check_two_processes(folder: Path, runs: Runs) -> None:
    """Assert that two processes and the emulator end with bitwise equal weights and results."""
    for name, make in runs.items():
        ipu_pipe.train(out=folder / "one" / name, quiet=True, **make())
    run_in_group(2, train_on_processes, folder, runs)
    for name in runs:
        one, two = folder / "one" / name, folder / "two" / name
        assert_same_weights(one, two)
        assert read_summary(one)["final"] == read_summary(two)["final"], name


def train_on_processes(rank: int, folder: Path, runs: Runs) -> None:
    """Train each run as one rank of a group of two."""
    for name, make in runs.items():
        arguments = make()
        backend = BackendConfig(name="distributed", deadline=60)
        arguments["config"] = arguments["config"].model_copy(update={"backend": backend})
        ipu_pipe.train(out=folder / "two" / name, quiet=True, **arguments)
