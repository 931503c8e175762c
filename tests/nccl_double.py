"""Test double of nccl: groups of gloo that block where groups of nccl block.

first message     waits until the other ranks use the same group for the first time; a collective waits for an idle GPU
posted receive    occupies the GPU: no kernel may be used for the first time, since loading it waits for an idle GPU
wait()            accepts no limit, which would block the host
"""

from __future__ import annotations

import functools
import threading
from datetime import timedelta
from typing import Any, Dict, List, Optional, Sequence, Set

import torch
import torch.distributed as dist
from torch import nn

PATIENCE = timedelta(seconds=60)


class Transfer:
    """A message in flight, which can be asked whether it is complete."""

    def __init__(self, work: Any) -> None:
        self._failed: Optional[BaseException] = None
        self._thread = threading.Thread(target=self._wait_for_work, args=(work,), daemon=True)
        self._thread.start()

    def _wait_for_work(self, work: Any) -> None:
        try:
            work.wait()
        except BaseException as error:
            self._failed = error

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout: Any = None) -> None:
        assert timeout is None, (
            "nccl's wait with a limit blocks the host, and ends the group after it"
        )
        self._thread.join()
        if self._failed is not None:
            raise self._failed


class NcclDouble:
    """Context manager in which messages of `groups` obey nccl's restrictions; all others are
    gloo's own."""

    def __init__(self, groups: Sequence[Any]) -> None:
        self._groups = list(groups)
        self._touched: Set[int] = set()
        self._posted: List[Transfer] = []
        self._loaded: Set[str] = set()
        self._real: Dict[str, Any] = {}

    def watch(self, piece: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Register hooks that check the first use of the kernels of a stage."""
        if not self._groups:
            return
        piece.register_forward_pre_hook(lambda *_: self._check_first_use("forward"))
        for p in [p for p in piece.parameters() if p.requires_grad][:1]:
            p.register_hook(lambda *_: self._check_first_use("backward"))
        optimizer.register_step_pre_hook(lambda *_: self._check_first_use("update"))

    def _check_first_use(self, what: str) -> None:
        if what not in self._loaded:
            assert not self.count_pending(), (
                f"first {what} while {self.count_pending()} receives are posted: it would wait for an idle GPU"
            )
            self._loaded.add(what)

    def count_pending(self) -> int:
        """Return the number of receives that occupy the GPU."""
        return sum(not transfer.is_completed() for transfer in self._posted)

    def _send_or_receive(
        self, kind: str, tensor: torch.Tensor, other: int, group: Any = None, tag: int = 0
    ) -> Any:
        if not any(group is known for known in self._groups):
            return self._real[kind](tensor, other, group, tag)
        if id(group) not in self._touched:
            dist.barrier(group=group, async_op=True).wait(PATIENCE)
            self._touched.add(id(group))
        transfer = Transfer(self._real[kind](tensor, other, group, tag))
        if kind == "irecv":
            self._posted = [before for before in self._posted if not before.is_completed()] + [
                transfer
            ]
        return transfer

    def _run_collective(
        self, kind: str, *tensors: Any, group: Any = None, async_op: bool = False
    ) -> Any:
        if not any(group is known for known in self._groups):
            return self._real[kind](*tensors, group=group, async_op=async_op)
        assert async_op, "the host would be blocked without a limit"
        if id(group) not in self._touched:
            assert not self.count_pending(), (
                f"first {kind} of a group while {self.count_pending()} receives are posted"
            )
            self._touched.add(id(group))
        return Transfer(self._real[kind](*tensors, group=group, async_op=True))

    def __enter__(self) -> None:
        doubles = {
            "isend": self._send_or_receive,
            "irecv": self._send_or_receive,
            "all_gather": self._run_collective,
            "all_reduce": self._run_collective,
        }
        for kind, double in doubles.items():
            self._real[kind] = getattr(dist, kind)
            setattr(dist, kind, functools.partial(double, kind))

    def __exit__(self, *_: Any) -> None:
        for kind, real in self._real.items():
            setattr(dist, kind, real)
