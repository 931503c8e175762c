"""A run in its turn: in this process, in those that a launcher started, or in processes that it starts itself."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict

from ipu_pipe.backends.ranks import is_distributed
from ipu_pipe.backends.table import get_backend
from ipu_pipe.config.compare import dump_config
from ipu_pipe.config.schema import Config
from ipu_pipe.errors import RunFault
from ipu_pipe.run.folder import read_summary
from ipu_pipe.run.train import train

MARK = "error: "


def starts_processes(config: Config) -> bool:
    """Whether a run of this config needs processes that nobody has started."""
    return not get_backend(config).emulates and not is_distributed()


def turn(config: Config, out: Path, processes: int, overwrite: bool = False) -> Dict[str, Any]:
    """Train by `config` into `out`, on so many processes where they must be started; the run's summary. Raises RunFault where
    one of these fails, with what it says."""
    if not starts_processes(config):
        return train(config, out, overwrite=overwrite, quiet=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(dump_config(config), encoding="utf-8")
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc_per_node", str(processes),
            "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0",
            "-m", "ipu_pipe", "train", str(file), "--out", str(out), *(["--overwrite"] if overwrite else []),
        ]  # fmt: skip
        # what can be imported here can be imported there, and a core each
        path = os.pathsep.join(os.path.abspath(place) for place in sys.path)
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
        done = subprocess.run(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment, errors="replace"
        )
    summary = read_summary(out)
    if done.returncode or summary is None:
        lines = done.stderr.splitlines()
        told = [line[len(MARK) :] for line in lines if line.startswith(MARK)] or lines[-1:]
        raise RunFault(f"{config.method} on {processes} processes: {'; '.join(told) or f'exit code {done.returncode}'}")
    return summary
