"""The launcher of this process (torchrun, poprun): its environment variables, and the end of a
process that it started.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
from dataclasses import dataclass
from typing import Mapping

MOST_RANKS = 10**6
# exit code of a process whose launcher is gone
ORPHANED = 1
WATCHDOG_THREAD = "ipu_pipe orphans"
WATCHDOG_SECONDS = 0.5
# this process and its parent, before torch is imported: if the launcher exits meanwhile, the process
# gets another parent
_STARTED = (os.getpid(), os.getppid())


@dataclass(frozen=True)
class Launch:
    """What a launcher says to one of `world` processes.

    local_rank: the rank on its machine; None where the launcher does not say it.
    address, port: where rank 0 (or the launcher, `has_agent`) keeps the store for the rendezvous.
    attempt: how often the launcher has restarted its processes.
    job: an id of the launcher's run; "" where it does not say one.
    is_one_of_several: a launcher started this process, even if it is the only one.
    faults: a line for each variable that makes no sense; it counts as not set.
    """

    rank: int = 0
    world: int = 1
    local_rank: int | None = None
    local_world: int = 1
    address: str | None = None
    port: int | None = None
    has_agent: bool = False
    attempt: int = 0
    job: str = ""
    is_one_of_several: bool = False
    faults: tuple[str, ...] = ()


def read_launch(environment: Mapping[str, str] | None = None) -> Launch:
    """Read the launcher's variables from the environment (default: this process's). An empty one
    counts as not set.
    """
    source = os.environ if environment is None else environment
    variables = {key: value for key, value in source.items() if value.strip()}
    faults: list[str] = []

    def read_integer(key: str, default: int, first: int, last: int, what: str) -> int:
        text = variables.get(key, str(default)).strip()
        # int() would also take signs, underscores and the digits of other scripts
        if text.isascii() and text.isdecimal() and len(text) < 10 and first <= int(text) <= last:
            return int(text)
        faults.append(f"{key}: {text[:40]}: must be {what}, as a launcher such as torchrun sets it")
        return default

    processes = "a whole number of processes, at least 1"
    world = read_integer("WORLD_SIZE", 1, 1, MOST_RANKS, processes)
    # a wrong WORLD_SIZE says nothing about the highest rank
    if faults:
        rank = read_integer("RANK", 0, 0, MOST_RANKS, "a whole number from 0")
    else:
        last = world - 1 if "WORLD_SIZE" in variables else MOST_RANKS
        rank = read_integer(
            "RANK", 0, 0, last, f"a whole number from 0 to {last}, below WORLD_SIZE"
        )
    for key, other, is_one_of_several in (
        ("RANK", "WORLD_SIZE", rank > 0),
        ("WORLD_SIZE", "RANK", world > 1),
    ):
        if is_one_of_several and other not in variables:
            faults.append(
                f"{key}: {variables[key]}: set without {other}: a launcher sets both: unset it, or "
                f"set both"
            )
    job = variables.get("TORCHELASTIC_RUN_ID", "").strip()
    # torchrun's default without --rdzv-id
    if job == "none":
        job = f"{socket.gethostname()} {os.getppid()}"
    has_local = "LOCAL_RANK" in variables
    has_port = "MASTER_PORT" in variables
    return Launch(
        rank,
        world,
        local_world=read_integer("LOCAL_WORLD_SIZE", 1, 1, MOST_RANKS, processes),
        local_rank=read_integer("LOCAL_RANK", 0, 0, MOST_RANKS, "a whole number from 0")
        if has_local
        else None,
        address=variables.get("MASTER_ADDR"),
        port=read_integer("MASTER_PORT", 0, 1, 65535, "a port from 1 to 65535") or None
        if has_port
        else None,
        has_agent=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=read_integer("TORCHELASTIC_RESTART_COUNT", 0, 0, MOST_RANKS, "a whole number"),
        job=job,
        is_one_of_several="RANK" in variables and "WORLD_SIZE" in variables,
        faults=tuple(faults),
    )


def describe_end(output: str) -> str:
    """Return how the rank ended that torchrun saw end first, from torchrun's own output; the last
    line of the output, '' if it is empty, where torchrun reports no rank.
    """
    # each rank has a block, the first to end the last one; below it is a ruler
    ends = re.findall(r"rank +: (\d+).*\s+exitcode +: (-?\d+)", output)
    if ends:
        rank, code = ends[-1]
        return f"rank {rank} ended with exit code {code} and reported no error"
    return "".join(output.strip().splitlines()[-1:])


def announce_rank(rank: int, world: int) -> None:
    """Set the variables for `read_launch` and for child processes, where a launcher says by other
    means which process this is.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))


def end_with(parent: int, line: str = "") -> None:
    """End this process when its parent, the process `parent`, is gone, however that ended; print
    `line` then.

    Nothing else would end it, and it would go on writing. Linux's signal at a parent's death comes
    at the death of the thread that started the child, too early; so a thread looks at the parent,
    since the process may be busy. Safe to call twice.
    """
    if all(thread.name != WATCHDOG_THREAD for thread in threading.enumerate()):
        # a daemon: Python waits for every other thread before it exits
        threading.Thread(
            target=_watch, args=(parent, line), name=WATCHDOG_THREAD, daemon=True
        ).start()


def end_with_launcher() -> None:
    """End this process when the launcher that started it is gone."""
    process, parent = _STARTED
    # a forked process has the numbers of the one that it was forked from
    parent = parent if process == os.getpid() else os.getppid()
    end_with(parent, "error: the launcher of this process has exited, so this process exits")


def _watch(parent: int, line: str) -> None:
    # an orphan gets another parent
    while os.getppid() == parent:
        time.sleep(WATCHDOG_SECONDS)
    try:
        if line:
            print(line, file=sys.stderr, flush=True)
    # standard error may have gone with the launcher; sys.exit would end this thread alone
    finally:
        os._exit(ORPHANED)
