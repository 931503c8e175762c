"""Inputs of PopTorch's calls in order: made when they are asked for, or ahead of time by PopTorch's worker process.

    sync     calls[i]                            in this process
    async    calls[i] -> ring of shared memory   in the worker -> here, where a fault of the worker is told with its cause
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import tempfile
from typing import Any, Iterator, NoReturn, Optional, Tuple

import torch
from torch.utils.data import Dataset

from ipu_pipe.backends.ipu.model import Calls
from ipu_pipe.backends.ipu.options import DataLoading
from ipu_pipe.data import DataSource
from ipu_pipe.errors import BadInput, RunFault, first_line

STRATEGIES = {
    "shared_memory": "SharedMemory",
    "file_system": "FileSystem",
    "fork": "Fork",
    "forkserver": "ForkServer",
}


class Reporting(Dataset):  # type: ignore[type-arg]
    """Calls in the worker: what goes wrong is written into the file `path`, since PopTorch tells no more than that it ended."""

    def __init__(self, calls: Calls, path: str) -> None:
        self._calls, self._path = calls, path

    def __len__(self) -> int:
        return len(self._calls)

    def __getitem__(self, index: int) -> Tuple[torch.Tensor, torch.Tensor]:
        try:
            return self._calls[index]
        except Exception as error:
            is_input = isinstance(error, BadInput)
            said = str(error) if is_input or isinstance(error, RunFault) else first_line(error)
            with open(self._path, "w") as file:
                json.dump({"bad_input": is_input, "said": " ".join(said.split())}, file)
            raise SystemExit(1) from None  # no traceback beside the line that will tell it


class Feed:
    """The calls' inputs, one after another from the first. `close` ends the worker."""

    def __init__(self, calls: Calls, data: DataSource, loading: DataLoading, options: Any) -> None:
        self._calls, self._next = calls, 0
        self._loader: Optional[Any] = None
        self._source: Optional[Iterator[Any]] = None
        self._report: Optional[str] = None
        if loading.mode == "async":
            self._start(data, loading, options)

    def _start(self, data: DataSource, loading: DataLoading, options: Any) -> None:
        import poptorch

        try:
            pickle.dumps(data)
        except Exception as error:
            raise BadInput(
                "backend.ipu.data_loading.mode: async: the data cannot go to another process "
                f"({type(error).__name__}): must be sync"
            ) from error
        handle, self._report = tempfile.mkstemp(prefix="ipu_pipe-", suffix=".json")
        os.close(handle)
        try:
            self._loader = poptorch.DataLoader(
                options, Reporting(self._calls, self._report), batch_size=None, shuffle=False,
                drop_last=False,  # True is PopTorch's default, which torch refuses without a batch size
                auto_distributed_partitioning=False, mode=poptorch.DataLoaderMode.Async,
                async_options={
                    "buffer_size": loading.buffer_size,
                    "miss_sleep_time_in_ms": float(loading.miss_sleep_time_in_ms),
                    "early_preload": loading.early_preload,
                    "load_indefinitely": False,
                    "sharing_strategy": getattr(poptorch.SharingStrategy, STRATEGIES[loading.sharing_strategy]),
                },
            )  # fmt: skip
            self._source = iter(self._loader)
        except (poptorch.Error, AssertionError, OSError) as error:
            self._tell(error)
        except BaseException:
            self.close()
            raise

    def take(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """(x, y) of the next call. Raises BadInput or RunFault with the worker's fault."""
        if self._source is None:
            self._next += 1
            return self._calls[self._next - 1]
        try:
            x, y = next(self._source)
        except (StopIteration, AssertionError, OSError) as error:
            self._tell(error)
        return x, y

    def _tell(self, error: BaseException) -> NoReturn:
        assert self._report is not None
        with open(self._report) as file:
            text = file.read()
        self.close()
        if not text:
            raise RunFault(
                f"poptorch: loading data: the worker process ended without a word ({first_line(error)}): is there room for "
                "its buffers in /dev/shm? A smaller backend.ipu.data_loading.buffer_size takes less"
            ) from error
        told = json.loads(text)
        kind = BadInput if told["bad_input"] else RunFault
        raise kind(told["said"] if told["bad_input"] else f"poptorch: loading data: {told['said']}") from error

    def close(self) -> None:
        """End the worker, if there is one."""
        if self._loader is not None:
            with contextlib.suppress(Exception):
                self._loader.terminate()
        self._loader = self._source = None
        if self._report is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._report)
            self._report = None
