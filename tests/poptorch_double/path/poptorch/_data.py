"""DataLoader and AsynchronousDataAccessor; what the latter's process does is in _worker."""

from __future__ import annotations

import atexit
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Union

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from poptorch._errors import py_error
from poptorch._record import recorded
from poptorch._signatures import typed
from poptorch._worker import Worker
from poptorch.enums import DataLoaderMode, SharingStrategy
from poptorch.options import Options


class _SubDataset(Dataset):
    """One process's contiguous part; shuffled as a whole, with one seed in all processes."""

    def __init__(self, dataset: Any, options: Options, step: int, drop_last: bool) -> None:
        self._dataset = dataset
        processes, rank = options.Distributed.numProcesses, options.Distributed.processId
        count = len(dataset)
        if drop_last:
            each = step * (count // (step * processes))
            self._begin, self._length = rank * each, min(each, count - rank * each)
        else:
            sizes = [count // processes + (count % processes > p) for p in range(processes)]
            self._begin, self._length = sum(sizes[:rank]), sizes[rank]
        self._leftovers = count % self._length if drop_last and self._length else 0
        self._shift = 0
        seed = options.random_seed if options.exists("random_seed") else 0
        self._generator = torch.Generator().manual_seed(seed)
        self._order: Optional[torch.Tensor] = None

    def shuffle(self) -> None:
        self._order = torch.randperm(len(self._dataset), generator=self._generator)
        self._shift = self._leftovers - self._shift  # what was left out comes in the next time

    def __len__(self) -> int:
        return int(self._length)

    def __getitem__(self, index: int) -> Any:
        place = index + self._begin + self._shift
        return self._dataset[place if self._order is None else int(self._order[place])]


class DataLoader(torch.utils.data.DataLoader):
    """torch's, with batches of micro-batch x deviceIterations x replicas x gradientAccumulation; freezes the options."""

    @typed("DataLoader", unchecked=["batch_size", "dataset"])
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
        self._accessor: Optional[AsynchronousDataAccessor] = None
        self._sampled = batch_sampler is not None
        processes = options.Distributed.numProcesses
        partitioned = auto_distributed_partitioning and processes > 1
        if self._sampled:
            if batch_size != 1 or shuffle:
                raise py_error("`batch_sampler` option is mutually exclusive with batch_size, shuffle.")
            if partitioned:
                raise py_error("`batch_sampler` option is mutually exclusive with auto_distributed_partitioning=True.")
            batch_size = getattr(batch_sampler, "batch_size", batch_size)
        assert batch_size is None or (isinstance(batch_size, int) and batch_size >= 1), (
            f"Unexpected type {type(batch_size)} for option batch_size. Expected {int}, at least 1"
        )
        options._freeze()
        self._rebatched_drop_last = drop_last
        self._shuffles_parts = False
        replicas = options.replication_factor // options.input_group_size
        per_call = options.device_iterations * replicas * options.Training.gradient_accumulation
        self._combines = 1 if batch_size is None else per_call
        self._combined = None if batch_size is None else batch_size * per_call
        if batch_size is not None:
            self._poptorch_options = options  # without a batch size PopTorch's has none, and a worker is sent none
        if isinstance(dataset, IterableDataset):
            assert not partitioned, "auto_distributed_partitioning not supported for IterableDataset"
            if num_workers > 1 and "worker_init_fn" not in kwargs:
                recorded.warn(
                    f"IterableDataset used with num_workers={num_workers} but no worker_init_fn specified: as a result the "
                    f"DataLoader will return {num_workers} times each element in the dataset"
                )
        elif not self._sampled:
            self._warn_of_leftovers(len(dataset), processes, drop_last)
            if partitioned:
                assert not shuffle or options.exists("random_seed"), (
                    "When using auto_distributed_partitioning you must set poptorch.Options.randomSeed() to ensure that "
                    "tensors are in the same order in all processes."
                )
                assert self._combined is not None, (
                    "batch_size=None not allowed when using auto_distributed_partitioning."
                )
                dataset = _SubDataset(dataset, options, self._combined, drop_last)
                self._shuffles_parts, shuffle = bool(shuffle), False
        rebatched = None
        size = self._combined
        has_rest = mode == DataLoaderMode.Async and not drop_last and self._combined is not None and self._combined > 1
        if mode == DataLoaderMode.AsyncRebatched or has_rest:
            rebatched, drop_last = self._combined, False
            if rebatched_worker_size is not None:
                assert self._combined is not None and rebatched_worker_size <= self._combined, (
                    f"The rebatched_worker_size ({rebatched_worker_size}) must be <= to the combined batch size "
                    f"({self._combined})"
                )
                size = rebatched_worker_size
        persistent = num_workers > 0 if persistent_workers is None else persistent_workers
        arguments: Dict[str, Any] = {"num_workers": num_workers, "persistent_workers": persistent, **kwargs}
        if self._sampled:
            super().__init__(dataset, batch_sampler=batch_sampler, **arguments)
        else:  # torch refuses drop_last, which is PopTorch's default, beside batch_size=None
            super().__init__(dataset, batch_size=size, shuffle=bool(shuffle), drop_last=drop_last, **arguments)
        if mode != DataLoaderMode.Sync:
            given = async_options or {}
            assert "rebatched_size" not in given, (
                "You cannot use DataLoaderMode.AsyncRebatched and manually specify the rebatched_size in async_options"
            )
            self._accessor = AsynchronousDataAccessor(self, **given, rebatched_size=rebatched)

    def _warn_of_leftovers(self, count: int, processes: int, drop_last: bool) -> None:
        if drop_last or self._combined is None or count % (self._combined * processes) == 0:
            return
        each = self._combined * processes
        recorded.warn(
            f"The number of elements in the dataset ({count}) is not divisible by the number of elements processed per step "
            f"({each}) and drop_last=False. The last tensor will have a batch size of {count % each}. To avoid having to "
            "handle this special case switch to drop_last=True"
        )

    def __len__(self) -> int:
        if self._accessor is None or not self._accessor.rebatched_size:
            return super().__len__()
        count, size = len(self.dataset), self._accessor.rebatched_size
        return count // size if self._rebatched_drop_last else -(-count // size)

    @property
    def combinedBatchSize(self) -> Optional[int]:
        return self._combined

    @property
    def options(self) -> Options:
        return self._poptorch_options

    @typed("DataLoader.terminate")
    def terminate(self) -> None:
        if self._accessor is not None:
            self._accessor.terminate()

    def __del__(self) -> None:
        if getattr(self, "_accessor", None) is not None:
            self.terminate()

    def __iter__(self) -> Any:
        if self._shuffles_parts:
            self.dataset.shuffle()
        if self._accessor is not None:
            return iter(self._accessor)
        batches = super().__iter__()
        return self._joined(batches) if self._sampled and self._combines > 1 else batches

    def _joined(self, batches: Iterator[Any]) -> Iterator[Any]:
        """So many of a sampler's batches as a call has micro-batches."""
        held: List[Any] = []
        for batch in batches:
            held.append(batch)
            if len(held) == self._combines:
                yield [torch.cat(parts) for parts in zip(*held)]
                held = []
        if held and not self._rebatched_drop_last:
            yield [torch.cat(parts) for parts in zip(*held)]


class AsynchronousDataAccessor:
    """A ring buffer of batches, filled by a process of its own: the tensors of a batch are overwritten once the next is asked
    for, in the double at once, with values that show (NaN, or -1)."""

    @typed("AsynchronousDataAccessor", unchecked=["dataset"])
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
        self.rebatched_size = rebatched_size
        loader = dataset if isinstance(dataset, DataLoader) else None
        if loader is not None and loader._accessor is not None:
            raise py_error(
                "The DataLoader already uses an AsynchronousDataAccessor internally. Either use the existing one or set "
                "mode='poptorch.DataLoaderMode.Sync' in the DataLoader."
            )
        if loader is not None and not loader._sampled and not loader.drop_last and rebatched_size is None:
            assert loader.combinedBatchSize in (None, 1), (
                "The 'drop_last=False' option from the DataLoader only works if 'rebatched_size' is specified too."
            )
        assert rebatched_size is None or rebatched_size > 1, "rebatched_size must be None or greater than 1"
        self._dataset = dataset
        self._ended = False
        self._load_indefinitely = load_indefinitely
        self._worker = Worker(dataset, rebatched_size, buffer_size, sharing_strategy)
        atexit.register(self.terminate)

    @typed("AsynchronousDataAccessor.terminate")
    def terminate(self) -> None:
        if self._worker is not None:
            self._worker.stop()
        self._worker = None

    def __del__(self) -> None:
        self.terminate()

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> "AsynchronousDataAccessor":
        assert self._worker is not None, "the worker has been terminated"
        assert self._load_indefinitely or not self._ended, "the worker has ended: load_indefinitely is off"
        self._worker.begin()
        return self

    def __next__(self) -> Any:
        assert self._worker is not None, "the worker has been terminated"
        batch = self._worker.take()
        if batch is None:
            self._ended = True
            raise StopIteration
        return batch
