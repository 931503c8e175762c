"""The data loader of PopTorch's calls: it makes the input of each call on demand, or ahead of time
in PopTorch's worker process.

sync     calls[i]                                                   in this process
async    calls[i] -> ring of shared memory -> this process          in the worker, whose errors are raised here
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import tempfile
from typing import Any, Iterator, NoReturn

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from ipu_pipe.backends.ipu.config import DataLoading
from ipu_pipe.backends.ipu.options import IpuOptions, find_member
from ipu_pipe.data import DataSource
from ipu_pipe.data.sources import split_batch
from ipu_pipe.errors import BadInput, RunFault, summarize
from ipu_pipe.refusals import name_key


def convert_input(value: torch.Tensor, precision: str) -> torch.Tensor:
    """Convert a tensor of a microbatch to the precision of the IPU's inputs."""
    if not value.is_floating_point():
        return value
    return value.half() if precision.startswith("16") else value.float()


def convert_label(value: torch.Tensor) -> torch.Tensor:
    """Convert labels of a microbatch: losses are computed in float32, independent of the inputs'
    precision.
    """
    return value.float() if value.is_floating_point() else value


class Calls(Dataset):  # type: ignore[type-arg]
    """Inputs of PopTorch's calls in order: item i holds the samples of updates first + i*D to first
    + (i+1)*D - 1 (D device iterations), for these `replicas`.

    Picklable. In a worker, errors are written to `error_file`, because PopTorch only says that the
    worker exited.
    """

    error_file: str | None = None

    def __init__(
        self,
        data: DataSource,
        options: IpuOptions,
        per_epoch: int | None,
        updates: range,
        replicas: range,
    ) -> None:
        self._data = data
        # the numbers alone, because a worker process gets a copy of this object
        self._precision = options.precision
        self._iterations = options.ipu.device_iterations
        self._accumulation = options.gradient_accumulation
        self._all_replicas = options.replicas
        self._size = options.micro_batch_size
        self._per_epoch = per_epoch
        self._replicas = replicas
        self._first_updates = updates[:: self._iterations]

    def __len__(self) -> int:
        return len(self._first_updates)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            return self._read_call(self._first_updates[index])
        except Exception as error:
            if self.error_file is None:
                raise
            is_input = isinstance(error, BadInput)
            reason = str(error) if is_input or isinstance(error, RunFault) else summarize(error)
            with open(self.error_file, "w") as file:
                json.dump({"bad_input": is_input, "reason": " ".join(reason.split())}, file)
            # the main process prints the error, so the worker prints no traceback
            raise SystemExit(1) from None

    def _read_call(self, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = [
            pair for k in range(first, first + self._iterations) for pair in self._read_update(k)
        ]
        x = torch.cat([convert_input(x, self._precision) for x, _ in pairs])
        return x, torch.cat([convert_label(y) for _, y in pairs])

    def _read_update(self, k: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return inputs and labels of update k, as one pair if the source can read microbatches
        together.
        """
        # a caller's loop gives its microbatches by one number, without epochs
        epoch, within = (0, k) if self._per_epoch is None else divmod(k, self._per_epoch)
        microbatches = range(within * self._accumulation, (within + 1) * self._accumulation)
        indices = [
            m * self._all_replicas + replica for m in microbatches for replica in self._replicas
        ]
        read_together = getattr(self._data, "train_batches", None)
        if read_together is not None:
            return [split_batch(read_together(epoch, indices, self._size))]
        return [split_batch(self._data.train_batch(epoch, i, self._size)) for i in indices]


class Feed:
    """Loads the calls' inputs in order. `close` ends the worker."""

    def __init__(self, calls: Calls, loading: DataLoading, options: Any) -> None:
        self._calls = calls
        self._loader: Any | None = None
        # an iterator of a Dataset would also end at an IndexError raised by the data
        self._source: Iterator[Any] = (calls[i] for i in range(len(calls)))
        if loading.mode == "async":
            self._start(loading, options)

    def _start(self, loading: DataLoading, options: Any) -> None:
        import poptorch

        # asked before a worker starts, which would fail without a line of its own
        try:
            pickle.dumps(self._calls)
        except Exception as error:
            why = f"the data cannot go to another process ({type(error).__name__}): must be sync"
            raise BadInput(f"{name_key('backend.ipu.data_loading.mode')}: async: {why}") from error
        handle, self._calls.error_file = tempfile.mkstemp(prefix="ipu_pipe-", suffix=".json")
        os.close(handle)
        settings = loading.model_dump(exclude={"mode"})
        settings["sharing_strategy"] = find_member(
            poptorch.SharingStrategy, loading.sharing_strategy
        )
        try:
            # drop_last is True by PopTorch's default, which torch refuses without a batch size
            loader: Any = poptorch.DataLoader(
                options,
                self._calls,
                # an item is all of a call already
                batch_size=None,
                shuffle=False,
                drop_last=False,
                # the calls read the samples of this instance's replicas alone
                auto_distributed_partitioning=False,
                mode=poptorch.DataLoaderMode.Async,
                async_options={**settings, "load_indefinitely": False},
            )
            self._loader = loader
            self._source = iter(loader)
        # the worker may have left its error in the file
        except (poptorch.Error, AssertionError, OSError) as error:
            self._raise_fault(error)
        # Ctrl-C while the worker starts must not leave it behind
        except BaseException:
            self.close()
            raise

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (x, y) of the next call. Raise `BadInput` or `RunFault` for an error in the
        worker.
        """
        if self._loader is None:
            return next(self._source)  # type: ignore[no-any-return]
        try:
            x, y = next(self._source)
        except (StopIteration, AssertionError, OSError) as error:
            self._raise_fault(error)
        return x, y

    def _raise_fault(self, error: BaseException) -> NoReturn:
        assert self._calls.error_file is not None
        with open(self._calls.error_file) as file:
            text = file.read()
        self.close()
        if not text:
            why = f"the worker process exited without an error message ({summarize(error)})"
            remedy = (
                "is there room for its buffers in /dev/shm? A smaller "
                "data_loading.buffer_size needs less memory"
            )
            raise RunFault(f"poptorch: loading data: {why}: {remedy}") from error
        cause = json.loads(text)
        if cause["bad_input"]:
            raise BadInput(cause["reason"]) from error
        raise RunFault(f"poptorch: loading data: {cause['reason']}") from error

    def close(self) -> None:
        """End the worker, if there is one."""
        with contextlib.suppress(Exception):
            if self._loader is not None:
                self._loader.terminate()
        self._loader = None
        if self._calls.error_file is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._calls.error_file)
            self._calls.error_file = None


def split_into_calls(
    batches: Iterator[tuple[Any, Any]], rows: int
) -> Iterator[tuple[Any, Any, int]]:
    """Yield the batches as calls of `rows` samples, the last one padded, each with the number of
    samples that count.
    """
    waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
    for batch in batches:
        x, y = (torch.cat(parts) for parts in zip(*waiting, batch))
        # a batch may fill several calls
        while len(x) >= rows:
            yield x[:rows], y[:rows], rows
            x = x[rows:]
            y = y[rows:]
        waiting = [(x, y)]
    for x, y in waiting:
        if len(x):
            yield fill_up(x, rows), fill_up(y, rows), len(x)


def fill_up(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return x with its last sample repeated up to `rows` samples; zeros if it has none."""
    # the device takes one number of rows; what is filled up does not count
    if len(x) >= rows:
        return x[:rows]
    last = x[-1:] if len(x) else x.new_zeros(1, *x.shape[1:])
    last = last.expand(rows - len(x), *x.shape[1:])
    return torch.cat([x, last])


def trim_output(output: Any, count: int) -> Any:
    """Return the first `count` samples of an output, its floats as float32."""
    return tree_map(lambda t: (t.float() if t.is_floating_point() else t)[:count], output)
