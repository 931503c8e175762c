"""What a launcher (torchrun, poprun) tells a process by environment variables, read and checked here alone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import List, Mapping, Optional, Tuple

GREATEST = 10**6  # ranks


@dataclass(frozen=True)
class Launched:
    """One of `world` processes. `local_rank`: that on its machine, None where nobody said. `address`, `port`: where rank 0 (or
    the launcher, `has_agent`) keeps what the processes tell each other before they are joined. `faults`: a line for each variable
    that makes no sense, which is taken as not set."""

    rank: int = 0
    world: int = 1
    local_rank: Optional[int] = None
    local_world: int = 1
    address: Optional[str] = None
    port: Optional[int] = None
    has_agent: bool = False
    attempt: int = 0
    is_one_of_several: bool = False  # a launcher started it, be it alone
    faults: Tuple[str, ...] = ()


def read(environment: Optional[Mapping[str, str]] = None) -> Launched:
    """What the environment (default: this process's) says. A variable that is empty is one that is not set."""
    given = {key: value for key, value in (os.environ if environment is None else environment).items() if value.strip()}
    faults: List[str] = []

    def whole(key: str, default: int, first: int, last: int, what: str) -> int:
        text = given.get(key, str(default)).strip()
        if text.isascii() and text.isdecimal() and len(text) < 10 and first <= int(text) <= last:
            return int(text)
        faults.append(f"{key}: {text[:40]}: must be {what}, as a launcher such as torchrun sets it")
        return default

    world = whole("WORLD_SIZE", 1, 1, GREATEST, "a whole number of processes, at least 1")
    if faults:
        rank = whole("RANK", 0, 0, GREATEST, "a whole number from 0")
    else:
        below = world - 1 if "WORLD_SIZE" in given else GREATEST
        rank = whole("RANK", 0, 0, below, f"a whole number from 0 to {below}, below WORLD_SIZE")
    for key, other, alone in (("RANK", "WORLD_SIZE", rank > 0), ("WORLD_SIZE", "RANK", world > 1)):
        if alone and other not in given:
            faults.append(f"{key}: {given[key]}: set without {other}: a launcher sets both: unset it, or set both")
    local_world = whole("LOCAL_WORLD_SIZE", 1, 1, GREATEST, "a whole number of processes, at least 1")
    local = whole("LOCAL_RANK", 0, 0, GREATEST, "a whole number from 0") if "LOCAL_RANK" in given else None
    port = whole("MASTER_PORT", 0, 1, 65535, "a port from 1 to 65535") if "MASTER_PORT" in given else None
    return Launched(
        rank, world, local, local_world, given.get("MASTER_ADDR"), port or None,
        given.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        whole("TORCHELASTIC_RESTART_COUNT", 0, 0, GREATEST, "a whole number"),
        "RANK" in given and "WORLD_SIZE" in given, tuple(faults),
    )  # fmt: skip


def announce(rank: int, world: int) -> None:
    """Where a launcher tells by other ways which of its processes this is: have it read here, and by what it starts."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
