"""Double of the DataLoader as this library uses it: whole calls of a data set, made ahead by a
worker process (see _worker)."""

from __future__ import annotations

import atexit
from typing import Any, Optional

import torch

from poptorch._errors import make_unmodelled_error
from poptorch._signatures import API, follow_api
from poptorch._worker import Worker
from poptorch.enums import DataLoaderMode


class DataLoader(torch.utils.data.DataLoader):
    """torch's loader without a batch size; a worker process loads the items. It freezes the
    options."""

    @follow_api("DataLoader", unchecked=["batch_size", "dataset"])
    def __init__(self, options: Any, dataset: Any, *values: Any, **others: Any) -> None:
        names = [param["name"] for param in API["DataLoader"]["params"]]
        chosen = dict(zip(names[2:], values))
        self._accessor: Optional[_Accessor] = None
        is_whole = chosen["batch_size"] is None and chosen["mode"] == DataLoaderMode.Async
        if not is_whole or chosen["auto_distributed_partitioning"] or chosen["shuffle"]:
            raise make_unmodelled_error(
                "a loader other than an asynchronous one of whole calls, in order"
            )
        options._freeze()
        # torch refuses drop_last, which is PopTorch's default, beside batch_size=None
        super().__init__(dataset, batch_size=None, shuffle=False, drop_last=chosen["drop_last"])
        self._accessor = _Accessor(self, **(chosen["async_options"] or {}))

    @follow_api("DataLoader.terminate")
    def terminate(self) -> None:
        if self._accessor is not None:
            self._accessor.terminate()

    def __del__(self) -> None:
        if getattr(self, "_accessor", None) is not None:
            self.terminate()

    def __iter__(self) -> Any:
        assert self._accessor is not None
        return iter(self._accessor)


class _Accessor:
    """Ring buffer of batches that a process fills. The tensors of a batch are overwritten some
    time after the next one is requested, in the double at once, with conspicuous values (NaN, or
    -1)."""

    @follow_api("AsynchronousDataAccessor", unchecked=["dataset"])
    def __init__(
        self,
        loader: Any,
        size: int,
        sleep: float,
        endless: bool,
        early: bool,
        strategy: Any,
        rebatched: Any,
    ) -> None:
        self._worker: Optional[Worker] = None
        assert size >= 1, "the ring buffer needs a place"
        if endless:
            raise make_unmodelled_error("a worker that begins anew by itself")
        self._worker = Worker(loader.dataset, size, strategy)
        atexit.register(self.terminate)

    def terminate(self) -> None:
        if self._worker is not None:
            self._worker.stop()
        self._worker = None

    def __del__(self) -> None:
        self.terminate()

    def __iter__(self) -> "_Accessor":
        assert self._worker is not None, "the worker has been terminated"
        self._worker.begin()
        return self

    def __next__(self) -> Any:
        assert self._worker is not None, "the worker has been terminated"
        batch = self._worker.take()
        if batch is None:
            raise StopIteration
        return batch
