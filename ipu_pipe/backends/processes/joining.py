"""How the processes of a run find one another: within the deadline, and only if all were asked for the same.

rank 0 (or the launcher) keeps a store at MASTER_ADDR:MASTER_PORT
[1] each rank puts there what it was asked for: config, options, versions
[2] each waits until all the others' are there, and compares them with its own
[3] only then the process group is made, which would wait for a missing rank without a word
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from datetime import timedelta
from typing import Any, Callable, Dict, List, Mapping, NoReturn, Sequence, TypeVar, Union

import torch
import torch.distributed as dist

from ipu_pipe import __version__
from ipu_pipe.config.compare import flatten
from ipu_pipe.config.schema import Config
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.launcher import Launch
from ipu_pipe.text import list_some

POLL = 0.05  # seconds between looks at the store
LINGER = 2.0  # seconds at most that the store stays for the others to read why it ends
OWN_TO_A_MACHINE = ("data.root", "backend.threads")  # what ranks may have of their own
ANSWER = LINGER + 1.0  # seconds in which a store that is there answers
LONGEST = 1e7  # seconds, of a wait: torch counts them in milliseconds
WARM_UP = 6.0  # seconds that a wait may take besides the deadline until the first step is done, in which ranks load

Asked = Dict[str, Any]
Result = TypeVar("Result")


def what_is_asked(config: Config, options: Mapping[str, object]) -> Asked:
    """All that every rank must have alike, by name, as JSON holds it."""
    settings = {key: value for key, value in flatten(config.to_dict()).items() if key not in OWN_TO_A_MACHINE}
    versions = {"version of ipu_pipe": __version__, "version of torch": str(torch.__version__)}
    given = {key: value if isinstance(value, (bool, type(None))) else str(value) for key, value in options.items()}
    return dict(json.loads(json.dumps({**versions, **given, **settings})))


def differing(ours: Asked, theirs: Asked, rank: int, other: int) -> List[str]:
    """A line for each thing that two ranks were asked for differently, the same whichever of them tells it."""
    if other < rank:
        return differing(theirs, ours, other, rank)
    return [
        f"{key}: rank {rank} has {_shown(ours, key)}, rank {other} has {_shown(theirs, key)}: all must be asked for the same"
        for key in {**ours, **theirs}
        if key not in ours or key not in theirs or ours[key] != theirs[key]
    ]


def _shown(asked: Asked, key: str) -> str:
    return json.dumps(asked[key])[:80] if key in asked else "nothing"


def wait_limit(deadline: float, is_warm: bool = False) -> timedelta:
    """How long a wait may take, as torch takes it."""
    return timedelta(seconds=min(deadline + (0.0 if is_warm else WARM_UP), LONGEST))


def answer_within(seconds: float, ask: Callable[[], Result]) -> Result:
    """`ask()`, which may wait for a store without end (torch waits so for one whose process is stopped). Raises TimeoutError."""
    found: List[Result] = []
    raised: List[Exception] = []

    def asking() -> None:
        try:
            found.append(ask())
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=asking, name="ipu_pipe asking", daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not found:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return found[0]


def meet(where: Launch, limit: float, asked: Asked) -> Any:
    """The store of a run whose ranks are all there, asked for the same. Raises BadInput where they were not, RunFault where one
    is missing after `limit` seconds."""
    try:
        return answer_within(limit + ANSWER, lambda: _meet(where, limit, asked))
    except TimeoutError as error:
        raise RunFault(
            f"rank {where.rank}: rank 0 is at {_place(where)} but does not answer within {limit:g} s"
        ) from error


def keeper_is_there(where: Launch) -> bool:
    """Whether somebody listens where the store is. Asking a store that is gone makes torch print its own stack."""
    try:
        with socket.create_connection((str(where.address), int(where.port or 0)), timeout=ANSWER):
            return True
    except OSError:
        return False


def _meet(where: Launch, limit: float, asked: Asked) -> Any:
    end = time.monotonic() + limit
    store = _store(where, limit)
    try:
        if store.add(f"came/{where.rank}", 1) > 1:
            raise BadInput(f"RANK: {where.rank}: two processes have it: each of {where.world} must have its own")
        _wait_for_all(store, where, end, limit, {**asked, "WORLD_SIZE": where.world})
    except (BadInput, RunFault) as error:
        _end_for_all(store, where, error)
    except RuntimeError as error:  # what torch's store raises
        raise RunFault(
            f"{_place(where)}: rank 0, which keeps the store there, left before all ranks had come"
        ) from error
    return store


def _wait_for_all(store: Any, where: Launch, end: float, limit: float, asked: Asked) -> None:
    store.set(f"asked/{where.rank}", json.dumps(asked))
    missing = [rank for rank in range(where.world) if rank != where.rank]
    while missing:
        for rank in list(missing):
            if store.check([f"asked/{rank}"]):
                faults = differing(asked, json.loads(store.get(f"asked/{rank}")), where.rank, rank)
                if faults:
                    raise BadInput(faults)
                missing.remove(rank)
        if missing and store.check(["over"]):
            told = json.loads(store.get("over"))
            raise BadInput(told["faults"]) if told["is_input"] else RunFault(told["faults"][0])
        if missing and time.monotonic() > end:
            raise RunFault(
                f"rank {where.rank}: {_named(missing)} of {where.world} did not come to {_place(where)} within {limit:g} s "
                f"(backend.deadline and {WARM_UP:g} more): is it started, with the same MASTER_ADDR and MASTER_PORT?"
            )
        if missing:
            time.sleep(POLL)


def _end_for_all(store: Any, where: Launch, error: Union[BadInput, RunFault]) -> NoReturn:
    """Raise `error` on this rank and, through the store, on those that still wait; the first one tells it."""
    faults = error.faults if isinstance(error, BadInput) else [str(error)]
    with contextlib.suppress(RuntimeError):  # the store may be gone
        store.set("over", json.dumps({"faults": faults, "is_input": isinstance(error, BadInput)}))
        error.is_reported = store.add("told", 1) > 1
        store.add("read", 1)
        if where.rank == 0 and not where.has_agent:  # the store ends with this process
            until = time.monotonic() + LINGER
            here = sum(store.check([f"asked/{rank}"]) for rank in range(where.world))
            while store.add("read", 0) < here and time.monotonic() < until:
                time.sleep(POLL)
    raise error


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {list_some(ranks, 8)}"


def _place(where: Launch) -> str:
    return f"{where.address}:{where.port} (MASTER_ADDR:MASTER_PORT)"


def _store(where: Launch, limit: float) -> Any:
    assert where.address is not None and where.port is not None
    keeps = where.rank == 0 and not where.has_agent
    if keeps:
        _refuse_used_port(where)
    else:
        _wait_for_keeper(where, limit)
    try:
        store = dist.TCPStore(
            where.address, where.port, where.world, keeps, timedelta(seconds=limit), wait_for_workers=False
        )
    except (RuntimeError, ValueError) as error:
        raise RunFault(f"{_place(where)}: cannot be joined: {' '.join(str(error).split())[:200]}") from error
    return dist.PrefixStore(f"ipu_pipe/{where.attempt}", store)


def _refuse_used_port(where: Launch) -> None:
    """Before torch tries, which says it in many lines."""
    with socket.socket() as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            own.bind(("", where.port))
            own.listen(1)
        except OSError as error:
            raise RunFault(
                f"MASTER_PORT: {where.port}: cannot be used on this machine: {error.strerror or error}: another run, or a second"
                " process with RANK 0, may have it"
            ) from error


def _wait_for_keeper(where: Launch, limit: float) -> None:
    """Until somebody listens where the store will be."""
    end = time.monotonic() + limit
    while True:
        try:
            left = max(end - time.monotonic(), POLL)
            with socket.create_connection((str(where.address), int(where.port or 0)), timeout=left):
                return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > end:
                said = (error.strerror if isinstance(error, OSError) else None) or str(error)
                raise RunFault(
                    f"rank {where.rank}: rank 0 did not come to {_place(where)} within {limit:g} s (backend.deadline and "
                    f"{WARM_UP:g} more): {said}"
                ) from error
        time.sleep(4 * POLL)
