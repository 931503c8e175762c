"""Start processes as forks of a server that has imported torch once, which saves seconds for each process."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

from torch.distributed import TCPStore

ROOT = Path(__file__).resolve().parents[1]
PRELOADED = [
    "torch", "torch._dynamo", "torch.distributed", "pytest", "sklearn.datasets", "ipu_pipe.cli.train", "ipu_pipe.run.train",
    "ipu_pipe.backends.processes.engine", "ipu_pipe.backends.emulator.engine", "ipu_pipe.data.sets",
]  # fmt: skip
# seconds for the other ranks, after one has failed, before they are ended as torchrun does
PATIENCE = 6.0


class CommandOutput(NamedTuple):
    """Exit code and output of a command. Of several ranks: the first code that is not 0, and all output joined."""

    code: int
    printed: str
    error: str


def get_fork_server() -> ForkServerContext:
    """Return the context that forks processes from the server. The first process starts the server."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOADED)
    return server


def make_rank_environment(rank: int, ranks: int, port: int) -> Dict[str, str]:
    """Return the environment variables with which a launcher starts a rank."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip


def fork_ranks(
    ranks: int,
    work: Callable[..., None],
    *arguments: Any,
    seconds: float = 120,
    of: Any = multiprocessing.get_context("fork"),  # noqa: B008
) -> None:
    """Run `work(rank, *arguments)` for each rank in a fork of this process, or of the server `of`; assert exit codes 0."""
    processes = [of.Process(target=work, args=(r, *arguments)) for r in range(ranks)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(seconds)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()


def run_ranks(
    ranks: int, command: str, arguments: Sequence[str], seconds: float = 240, **variables: str
) -> CommandOutput:
    """Run `tools/COMMAND.py` on `ranks` ranks; as under torchrun, a failure of one ends the others. `variables`: environment."""
    # it outlives its ranks, as torchrun's store does
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    environments = [
        {**make_rank_environment(rank, ranks, store.port), **variables} for rank in range(ranks)
    ]
    return _run_commands(command, arguments, environments, seconds)


def run_command(
    command: str, *arguments: str, seconds: float = 240, **variables: str
) -> CommandOutput:
    """Run `tools/COMMAND.py` in a separate process."""
    return _run_commands(command, arguments, [variables], seconds)


ENDS = (".out", ".err")


def _run_commands(
    command: str, arguments: Sequence[str], environments: List[Dict[str, str]], seconds: float
) -> CommandOutput:
    """Run a command in a process for each environment."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(number) for number in range(len(environments))]
        processes = [
            start_command(command, arguments, file, variables)
            for file, variables in zip(files, environments)
        ]
        _wait_for_processes(processes, seconds)
        outputs = ["".join(file.with_suffix(end).read_text() for file in files) for end in ENDS]
    codes = [process.exitcode for process in processes]
    assert None not in codes
    return CommandOutput(next((code for code in codes if code), 0), *outputs)


def start_command(
    command: str, arguments: Sequence[str], output: Path, variables: Optional[Dict[str, str]] = None
) -> BaseProcess:
    """Start `tools/COMMAND.py` in a separate process, which prints into `output`.out and `output`.err."""
    process = get_fork_server().Process(
        target=run_forked_command, args=(command, list(arguments), str(output), variables or {})
    )
    process.start()
    return process


def _wait_for_processes(processes: List[BaseProcess], seconds: float) -> None:
    until = time.monotonic() + seconds
    while any(process.is_alive() for process in processes) and time.monotonic() < until:
        if any(process.exitcode for process in processes):
            until = min(until, time.monotonic() + PATIENCE)
        time.sleep(0.01)
    for process in processes:
        if process.is_alive():
            process.terminate()
        process.join()


def run_forked_command(
    command: str, arguments: List[str], output: str, variables: Dict[str, str]
) -> None:
    """Run the command in this fork as a new Python process would. It prints into `output`.out and .err."""
    for number, end in zip((1, 2), ENDS):
        os.dup2(os.open(output + end, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.update(variables, OMP_NUM_THREADS="1")
    sys.path[:0] = (
        variables.get("PYTHONPATH", "").split(os.pathsep) if "PYTHONPATH" in variables else []
    )
    os.chdir(ROOT)
    import torch

    torch.set_num_threads(1)
    sys.argv = [f"tools/{command}.py", *arguments]
    from ipu_pipe import cli

    try:
        cli.run(command)
    finally:
        atexit._run_exitfuncs()  # a fork skips them
