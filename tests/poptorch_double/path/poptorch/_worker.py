"""The process that fills an AsynchronousDataAccessor's ring of shared memory, and this process's end of it.

here      begin 1 | slot 0, 1, 2 |                 | slot 0 (read, given back)
worker                           | ready 0, 1, 2   |           | ready 0 ... end
"""

from __future__ import annotations

import contextlib
from multiprocessing import connection
from typing import Any, List

import torch
from torch import multiprocessing

from poptorch._errors import make_py_error, make_unmodelled_error
from poptorch.enums import SharingStrategy

STARTS = {SharingStrategy.Fork: "fork", SharingStrategy.ForkServer: "forkserver"}
PRELOADED = [
    "torch",
    "ipu_pipe.backends.ipu.feed",
    "pytest",
]  # by the server, for the time that every fork of it saves


def _list_tensors(batch: Any) -> List[torch.Tensor]:
    assert not isinstance(batch, torch.Tensor), "the double models batches of several tensors"
    tensors = list(batch)
    for place, tensor in enumerate(tensors):
        assert isinstance(tensor, torch.Tensor), (
            f"Tensor at index {place} is not a torch tensor. AsynchronousDataAccessor expects data to be organised as a "
            "flat 1D container of tensors."
        )
    return tensors


def serve_batches(end: Any, dataset: Any, slots: int) -> None:
    """Fill the ring, as the worker process. The first batch gives the ring its shapes, so it is
    loaded before any request."""
    with contextlib.suppress(KeyboardInterrupt, EOFError):
        source = (dataset[index] for index in range(len(dataset)))
        first: Any = next(source, None)
        if first is None:
            raise make_py_error("The Dataset is empty")
        shapes = _list_tensors(first)
        ring = [
            [torch.empty_like(tensor).share_memory_() for tensor in shapes] for _ in range(slots)
        ]
        end.send(ring)
        turn = 0
        while True:
            order, number = end.recv()
            if order == "stop":
                return
            if order == "begin":
                turn = number
                continue
            batch, first = (next(source, None) if first is None else first), None
            if batch is None:
                end.send((turn, None, 0))
                continue
            tensors = _list_tensors(batch)
            for place, tensor in zip(ring[number], tensors):
                assert len(tensor) <= len(place), (
                    "a batch larger than the first has no room in the ring"
                )
                place[: len(tensor)].copy_(tensor)
            end.send((turn, number, len(tensors[0])))


class Worker:
    """The worker process, its ring of `slots` batches, and the slot that is being read."""

    def __init__(self, dataset: Any, slots: int, strategy: Any) -> None:
        if strategy not in STARTS:
            raise make_unmodelled_error("a worker that is spawned")
        context = multiprocessing.get_context(STARTS[strategy])
        if strategy == SharingStrategy.ForkServer:
            context.set_forkserver_preload(PRELOADED)
        self._here, there = context.Pipe()
        self._process = context.Process(
            target=serve_batches, args=(there, dataset, slots), daemon=True
        )
        self._process.start()
        there.close()
        try:
            self._ring = self._here.recv()
        except (EOFError, OSError):
            self._ring = None
        if self._ring is None:
            raise make_py_error(
                "AsynchronousDataAccessor worker thread failed to start (Check above for details)"
            )
        self._turn, self._slot = 0, None  # type: int, Optional[int]

    def begin(self) -> None:
        """Request all batches from the first one on."""
        self._turn, self._slot = self._turn + 1, None
        self._here.send(("begin", self._turn))
        for slot in range(len(self._ring)):
            self._here.send(("slot", slot))

    def take(self) -> Any:
        """Return the next batch, whose memory is overwritten once the next one is requested, or
        None at the end."""
        if self._slot is not None:
            # PopTorch overwrites it sooner or later; the double at once
            for tensor in self._ring[self._slot]:
                tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
            self._here.send(("slot", self._slot))
            self._slot = None
        turn = None
        while turn != self._turn:
            connection.wait([self._here, self._process.sentinel])
            assert self._here.poll(), "An error occurred in the data fetcher"
            try:
                turn, slot, count = self._here.recv()
            except (EOFError, OSError):
                raise AssertionError("An error occurred in the data fetcher") from None
        self._slot = slot
        if slot is None:
            return None
        return [tensor[:count] if tensor.dim() else tensor for tensor in self._ring[slot]]

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._here.send(("stop", 0))
        self._process.join(10)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()
