"""Double of the DataLoader as this library uses it: whole calls of a data set, made ahead by a
worker process (see _worker)."""

from __future__ import annotations

import atexit
from typing import Any, Dict, Iterable, Optional, Sequence, Union

import torch
from torch.utils.data import Sampler

from poptorch._errors import make_unmodelled_error
from poptorch._signatures import follow_api
from poptorch._worker import Worker
from poptorch.enums import DataLoaderMode, SharingStrategy
from poptorch.options import Options


class DataLoader(torch.utils.data.DataLoader):
    """torch's loader without a batch size; a worker process loads the items. It freezes the
    options."""

    @follow_api("DataLoader", unchecked=["batch_size", "dataset"])
    def __init__(
        self,
        options: "Options",
        dataset: "torch.utils.data.Dataset",
        batch_size: int = 1,
        shuffle: bool = None,
        num_workers: int = 0,
        drop_last: bool = True,
        persistent_workers: Optional[bool] = None,
        auto_distributed_partitioning: bool = True,
        mode: "DataLoaderMode" = DataLoaderMode.Sync,
        async_options: Optional[Dict[str, Any]] = None,
        rebatched_worker_size: Optional[int] = None,
        batch_sampler: Optional[Union[Sampler[Sequence], Iterable[Sequence]]] = None,
        **kwargs,
    ) -> None:
        self._accessor: Optional[_Accessor] = None
        if (
            batch_size is not None
            or mode != DataLoaderMode.Async
            or auto_distributed_partitioning
            or shuffle
        ):
            raise make_unmodelled_error(
                "a loader other than an asynchronous one of whole calls, in order"
            )
        options._freeze()
        # torch refuses drop_last, which is PopTorch's default, beside batch_size=None
        super().__init__(dataset, batch_size=None, shuffle=False, drop_last=drop_last)
        self._accessor = _Accessor(self, **(async_options or {}))

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
        dataset: Union["torch.utils.data.Dataset", DataLoader],
        buffer_size: int = 3,
        miss_sleep_time_in_ms: float = 0.1,
        load_indefinitely: bool = True,
        early_preload: bool = False,
        sharing_strategy: "SharingStrategy" = SharingStrategy.ForkServer,
        rebatched_size: Optional[int] = None,
    ) -> None:
        self._worker: Optional[Worker] = None
        assert buffer_size >= 1, "the ring buffer needs a place"
        if load_indefinitely:
            raise make_unmodelled_error("a worker that begins anew by itself")
        self._worker = Worker(dataset.dataset, buffer_size, sharing_strategy)
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
