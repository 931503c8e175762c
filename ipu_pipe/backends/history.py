"""Weight versions in one process: what each pass of a microbatch must find in the parameters, and what is kept for later.

Two ways to put a version where a pass reads it:

  overwriting   the forward and the backward of a microbatch read different versions. Autograd saved the parameters'
                storage in the forward, so the backward's version is *written into that storage* in between:
                    [1] write w_f   [2] forward   [3] write w_b   [4] backward   [5] the optimizer steps w_b -> w_b+1
  swapping      both passes read one version (weight stashing, 2BW). The parameters are *pointed at* its tensors for
                both passes and nothing is copied; the update then leaves the old tensors alone and steps a copy.

A version is kept only while a microbatch to come reads it. Writing goes through `parameter.data`, which does not count as
an in-place change for autograd: that is the point, and is allowed to these methods alone.
"""

from __future__ import annotations

from typing import Dict, List, Sequence

import numpy as np
import torch

from ipu_pipe.versions import VersionTable

Tensors = List[torch.Tensor]


class ReadPlan:
    """The version table by microbatch, read ahead in windows: which versions a microbatch reads, which are read later."""

    def __init__(self, table: VersionTable, microbatches: int, accumulate: int, reach: int) -> None:
        self._table, self.microbatches, self._accumulate = table, microbatches, accumulate
        self._reach = reach  # microbatches after which no version older than the newest now is read
        self._start = self._stop = 0

    def _window(self, microbatch: int) -> int:
        """Offset of `microbatch` in the window at hand, moved on if need be."""
        if not self._start <= microbatch < self._stop:
            self._start = microbatch
            self._stop = min(microbatch + max(512, 2 * self._accumulate), self.microbatches)
            last = min(self._stop + self._reach, self.microbatches)
            self._forward = self._table.forward(self._start, last)
            self._backward = self._table.backward(self._start, self._stop)
        return microbatch - self._start

    def forward(self, microbatch: int) -> np.ndarray:
        """Version that each stage's forward of `microbatch` reads, shape (P,)."""
        offset = self._window(microbatch)
        return self._forward[:, offset]

    def backward(self, microbatch: int) -> np.ndarray:
        """Version that each stage's backward of `microbatch` reads, shape (P,)."""
        offset = self._window(microbatch)
        return self._backward[:, offset]

    def oldest(self, microbatch: int) -> np.ndarray:
        """Oldest version of each stage that `microbatch` and those after it read, shape (P,); none at the run's end."""
        if microbatch >= self.microbatches:
            return np.full(len(self._forward), np.iinfo(np.int64).max)
        return self.forward(microbatch)

    def read_later(self, version: int, after: int) -> np.ndarray:
        """Per stage, whether a forward of a microbatch later than `after` reads `version`. Shape (P,), bool."""
        start = self._window(after) + 1
        later = self._forward[:, start : start + self._reach]
        first = (later < version).sum(axis=1)  # versions never decrease along a stage
        if later.shape[1] == 0:
            return np.zeros(len(later), dtype=bool)
        inside = np.minimum(first, later.shape[1] - 1)
        return later[np.arange(len(later)), inside] == version


class Unversioned:
    """Methods in which every pass reads the newest weights: nothing to do."""

    peak_bytes = 0

    def forward(self, versions: np.ndarray) -> None:
        """Before a forward."""

    def backward(self, versions: np.ndarray) -> None:
        """Before a backward."""

    def release(self, versions: np.ndarray) -> None:
        """After a microbatch; `versions`: the oldest that are read from now on."""

    def before_update(self, keep: np.ndarray) -> None:
        """Before the optimizer steps; `keep`: whether each stage's newest version will be read later."""

    def rest(self) -> None:
        """Put the newest weights into the parameters."""


class _Kept(Unversioned):
    """Versions kept by stage, with a pool of tensors to reuse (fresh memory costs more than copying into old)."""

    def __init__(self, stages: Sequence[Sequence[torch.nn.Parameter]], version: int = 0) -> None:
        self._parameters = [list(stage) for stage in stages]
        self._newest = np.full(len(stages), version, dtype=np.int64)
        self._loaded = self._newest.copy()
        self._oldest = self._newest.copy()  # that is read from now on
        self._kept: List[Dict[int, Tensors]] = [{} for _ in stages]
        self._pool: List[List[Tensors]] = [[] for _ in stages]
        self._size = [sum(p.numel() * p.element_size() for p in stage) for stage in stages]
        self._held = 0
        self.peak_bytes = 0

    def versions_held(self) -> List[int]:
        """Versions that each stage holds besides those in its parameters."""
        return [len(kept) for kept in self._kept]

    def _fresh(self, stage: int) -> Tensors:
        self._held += self._size[stage]
        self.peak_bytes = max(self.peak_bytes, self._held)
        if self._pool[stage]:
            return self._pool[stage].pop()
        return [torch.empty_like(p.data) for p in self._parameters[stage]]

    def _drop(self, stage: int, version: int) -> None:
        tensors = self._kept[stage].pop(version, None)
        if tensors is not None:
            self._held -= self._size[stage]
            if len(self._pool[stage]) < 2:
                self._pool[stage].append(tensors)

    def release(self, versions: np.ndarray) -> None:
        for stage in np.flatnonzero(versions > self._oldest).tolist():
            for version in [v for v in self._kept[stage] if v < versions[stage] and v != self._newest[stage]]:
                self._drop(stage, version)
        self._oldest[:] = np.minimum(versions, self._newest)

    def backward(self, versions: np.ndarray) -> None:
        self.forward(versions)

    def rest(self) -> None:
        self.forward(self._newest)


class Overwriting(_Kept):
    """Versions written into the parameters' own storage."""

    def __init__(self, stages: Sequence[Sequence[torch.nn.Parameter]], version: int = 0) -> None:
        super().__init__(stages, version)
        self._home = [[p.data for p in stage] for stage in self._parameters]

    def forward(self, versions: np.ndarray) -> None:
        to: Tensors = []
        values: Tensors = []
        save_to: Tensors = []
        save: Tensors = []
        for stage in np.flatnonzero(versions != self._loaded).tolist():
            kept = self._kept[stage]
            here = int(self._loaded[stage])
            if here not in kept:  # the newest, about to be overwritten
                kept[here] = self._fresh(stage)
                save_to += kept[here]
                save += self._home[stage]
            to += self._home[stage]
            values += kept[int(versions[stage])]
        copy_all(save_to, save)
        copy_all(to, values)
        self._loaded[:] = versions

    def before_update(self, keep: np.ndarray) -> None:
        self.rest()
        to: Tensors = []
        values: Tensors = []
        for stage, newest in enumerate(self._newest.tolist()):
            if not keep[stage]:
                self._drop(stage, newest)
            elif newest not in self._kept[stage]:
                self._kept[stage][newest] = self._fresh(stage)
                to += self._kept[stage][newest]
                values += self._home[stage]
        copy_all(to, values)
        self._newest += 1
        self._loaded[:] = self._newest


class Swapping(_Kept):
    """Parameters pointed at the tensors of the version both passes read."""

    def forward(self, versions: np.ndarray) -> None:
        for stage in np.flatnonzero(versions != self._loaded).tolist():
            kept, here = self._kept[stage], int(self._loaded[stage])
            if here == self._newest[stage]:
                kept[here] = [p.data for p in self._parameters[stage]]
            self._point(stage, kept[int(versions[stage])])
        self._loaded[:] = versions

    def _point(self, stage: int, tensors: Tensors) -> None:
        for parameter, tensor in zip(self._parameters[stage], tensors):
            parameter.data = tensor

    def before_update(self, keep: np.ndarray) -> None:
        self.rest()
        to: Tensors = []
        values: Tensors = []
        for stage in np.flatnonzero(keep).tolist():
            old = [p.data for p in self._parameters[stage]]
            new = self._fresh(stage)
            self._kept[stage][int(self._newest[stage])] = old
            self._point(stage, new)
            to += new
            values += old
        copy_all(to, values)
        for stage in np.flatnonzero(
            ~keep
        ).tolist():  # stepped in place: the parameters' tensors become the next version
            self._kept[stage].pop(int(self._newest[stage]), None)
        self._newest += 1
        self._loaded[:] = self._newest


def copy_all(to: Tensors, values: Tensors) -> None:
    """Write `values` into the storages of `to`, in one call where this PyTorch has one (2.1 and later)."""
    if not to:
        return
    if hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(to, values)
    else:
        for target, value in zip(to, values):
            target.copy_(value)
