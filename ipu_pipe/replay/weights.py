"""Weight versions in one process: put the weights that a pass reads into the parameters, and stash
those that are read later.

A pass reads, on each stage, a *view*: a version and the way a rule corrects it
(`ipu_pipe.update.apply`; 0 is the plain weights). There are two ways to put a view into the
parameters:

  overwriting   the forward and the backward of a microbatch read different views. Autograd saved the parameters'
                storage in the forward, so the backward's view is *written into that storage* in
                between:
                    [1] write u_f   [2] forward   [3] write u_b   [4] backward   [5] the optimizer steps w_b -> w_b+1
  swapping      both passes read one view (weight stashing, 2BW). The parameters are *pointed at* its tensors for
                both passes and nothing is copied; the update then leaves the old tensors alone and
                steps a copy.

A corrected view of the newest version is computed when it is read. If a later microbatch will read
a corrected view of a version that is old by then, the view is computed before the update, while the
optimizer's state still belongs to that version. A view is dropped as soon as no later microbatch
reads it. Only this module writes through `parameter.data`, which autograd does not count as an
in-place change.
"""

from __future__ import annotations

from typing import Callable, List, Mapping, NamedTuple, Sequence, Tuple

import numpy as np
import torch

from ipu_pipe.replay.replays import Views
from ipu_pipe.replay.work import Work
from ipu_pipe.schedule.methods import Reads
from ipu_pipe.schedule.table import IntArray
from ipu_pipe.update.apply import PLAIN

Tensors = List[torch.Tensor]
# (target, value) pairs
Copies = List[Tuple[torch.Tensor, torch.Tensor]]
# (stage, code, version) -> pairs (x, c) such that the corrected weights are w + sum of c x
Offset = Callable[[int, int, int], List[Tuple[Tensors, float]]]


class View(NamedTuple):
    """The weights that a pass reads on one stage: a version, and the code of its correction."""

    version: int
    code: int


class WeightStore:
    """The interface of a store, and the store of methods in which every pass reads the newest
    weights: it does nothing.

    `held_bytes`: bytes of tensors besides the newest version's now, pooled tensors included.
    `peak_bytes`: most bytes in use.
    """

    peak_bytes = 0
    held_bytes = 0

    def load(self, views: Views) -> None:
        """Put the views that a pass reads into the parameters."""

    def release(self, oldest: IntArray) -> None:
        """Drop the views that are not read again, after a microbatch; `oldest`: the oldest version
        that is still read, (P,).
        """

    def stash_before_update(
        self, codes_by_stage: Sequence[set[int]], updates: Sequence[int] | None = None
    ) -> None:
        """Stash the views that will be read later, before the optimizer steps the stages `updates`
        (all if None).

        `codes_by_stage`: per stage, the codes with which later passes read the version that is
        about to be superseded.
        """

    def load_newest(self) -> None:
        """Put the newest weights into the parameters."""

    def compute_age(self, stage: int) -> Tensors | None:
        """Return the newest weights of a stage minus the loaded weights, None if the newest are
        loaded.
        """
        return None


class _VersionedStore(WeightStore):
    """Stash views by stage, with a pool of tensors to reuse: new memory costs more than copying
    into old memory.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[torch.nn.Parameter]],
        versions: Sequence[int],
        offset: Offset | None = None,
        masters: Mapping[torch.nn.Parameter, torch.nn.Parameter] | None = None,
    ) -> None:
        """`versions`: the newest version of each stage. `offset`: returns the correction of the
        newest version. `masters`: the exact weights of the parameters that are stored rounded; a
        correction is computed before rounding.
        """
        self._parameters = [list(stage) for stage in stages]
        self._offset = offset
        self._masters = masters or {}
        self._newest = list(versions)
        # the newest weights, uncorrected
        self._plain = Views(np.array(self._newest, np.int64), np.full(len(stages), PLAIN))
        # the views in the parameters
        self._loaded = self._plain
        # the oldest version of each stage that is still read
        self._oldest = self._loaded.versions
        self._stash: list[dict[View, Tensors]] = [{} for _ in stages]
        self._pool: list[list[Tensors]] = [[] for _ in stages]
        self._size = [sum(p.numel() * p.element_size() for p in stage) for stage in stages]
        # `_used_bytes` counts views, `held_bytes` views and the pool
        self._used_bytes = 0
        self.held_bytes = 0
        self.peak_bytes = 0

    def _allocate(self, stage: int) -> Tensors:
        """Return tensors for a view of a stage, of any values, from the pool if it has some."""
        self._used_bytes += self._size[stage]
        self.peak_bytes = max(self.peak_bytes, self._used_bytes)
        if self._pool[stage]:
            return self._pool[stage].pop()
        self.held_bytes += self._size[stage]
        return [torch.empty_like(p.data) for p in self._parameters[stage]]

    def _drop(self, stage: int, view: View) -> None:
        """Remove a view from the stash, if it is there, and put its tensors into the pool."""
        tensors = self._stash[stage].pop(view, None)
        if tensors is not None:
            self._used_bytes -= self._size[stage]
            if len(self._pool[stage]) < 2:
                self._pool[stage].append(tensors)
            else:
                self.held_bytes -= self._size[stage]

    def release(self, oldest: IntArray) -> None:
        for stage in np.flatnonzero(oldest > self._oldest).tolist():
            newest = self._newest[stage]
            for view in [
                v for v in self._stash[stage] if v.version < oldest[stage] and v.version != newest
            ]:
                self._drop(stage, view)
        self._oldest = np.minimum(oldest, self._newest)

    def load_newest(self) -> None:
        self.load(self._plain)

    def load(self, views: Views) -> None:
        versions, codes = views
        loaded = self._loaded
        newest = self._plain.versions
        changed = np.flatnonzero((versions != loaded.versions) | (codes != loaded.codes)).tolist()
        has_newest = (loaded.versions == newest) & (loaded.codes == PLAIN)
        self._put(
            [
                (stage, View(int(versions[stage]), int(codes[stage])), bool(has_newest[stage]))
                for stage in changed
            ]
        )
        self._loaded = views

    def compute_age(self, stage: int) -> Tensors | None:
        if (
            self._loaded.codes[stage] == PLAIN
            and self._loaded.versions[stage] == self._newest[stage]
        ):
            return None
        newest = self._stash[stage][View(self._newest[stage], PLAIN)]
        return (
            list(torch._foreach_sub(newest, [p.data for p in self._parameters[stage]]))
            if newest
            else []
        )

    def _put(self, views: Sequence[tuple[int, View, bool]]) -> None:
        """Put views into the parameters; `views`: (stage, view, whether the parameters hold the
        newest plain weights now).
        """
        raise NotImplementedError

    def _correct(self, stage: int, code: int, tensors: Tensors) -> None:
        """Add the correction of `code` to tensors that hold the plain weights of the newest
        version.
        """
        if code == PLAIN or not tensors:
            return
        assert self._offset is not None
        masters = [self._masters.get(p) for p in self._parameters[stage]]
        exact = [
            w if master is None else master.detach().clone() for w, master in zip(tensors, masters)
        ]
        for x, c in self._offset(stage, code, self._newest[stage]):
            torch._foreach_add_(exact, x, alpha=c)
        rounded = [i for i, master in enumerate(masters) if master is not None]
        copy_all([(tensors[i], exact[i]) for i in rounded])

    def stash_before_update(
        self, codes_by_stage: Sequence[set[int]], updates: Sequence[int] | None = None
    ) -> None:
        self.load(self._plain)
        stages = range(len(self._newest)) if updates is None else updates
        self._stash_views(stages, codes_by_stage)
        for stage in stages:
            self._newest[stage] += 1
        self._plain = self._loaded = Views(np.array(self._newest, np.int64), self._plain.codes)

    def _stash_views(self, stages: Sequence[int], codes_by_stage: Sequence[set[int]]) -> None:
        """Stash views of these stages, whose parameters hold the newest weights and are about to
        change.
        """
        raise NotImplementedError


class OverwritingStore(_VersionedStore):
    """The store that writes views into the parameters' own storage."""

    def _get_storage(self, stage: int) -> Tensors:
        # asked each time: between two calls a caller may give a parameter another tensor
        return [p.data for p in self._parameters[stage]]

    def _put(self, views: Sequence[tuple[int, View, bool]]) -> None:
        saved: Copies = []
        written: Copies = []
        corrected: list[tuple[int, int]] = []
        for stage, view, has_newest in views:
            views_of_stage = self._stash[stage]
            storage = self._get_storage(stage)
            newest = View(self._newest[stage], PLAIN)
            # the newest weights are only in the parameters, which are about to be overwritten
            if newest not in views_of_stage:
                views_of_stage[newest] = self._allocate(stage)
                saved += zip(views_of_stage[newest], storage)
            if view in views_of_stage:
                written += zip(storage, views_of_stage[view])
            else:
                assert view.version == newest.version, (
                    f"stage {stage}: {view} is read but was not stashed"
                )
                if not has_newest:
                    written += zip(storage, views_of_stage[newest])
                corrected.append((stage, view.code))
        # before the writes, which overwrite what is saved here
        copy_all(saved)
        copy_all(written)
        for stage, code in corrected:
            self._correct(stage, code, self._get_storage(stage))

    def _stash_views(self, stages: Sequence[int], codes_by_stage: Sequence[set[int]]) -> None:
        copies: Copies = []
        new: list[tuple[int, int, Tensors]] = []
        for stage in stages:
            codes = codes_by_stage[stage]
            newest = self._newest[stage]
            if PLAIN not in codes:
                self._drop(stage, View(newest, PLAIN))
            for code in codes:
                view = View(newest, code)
                if view not in self._stash[stage]:
                    self._stash[stage][view] = self._allocate(stage)
                    copies += zip(self._stash[stage][view], self._get_storage(stage))
                    new.append((stage, code, self._stash[stage][view]))
        copy_all(copies)
        for stage, code, tensors in new:
            self._correct(stage, code, tensors)


class SwappingStore(_VersionedStore):
    """The store that points the parameters at the tensors of the view that both passes read."""

    def _put(self, views: Sequence[tuple[int, View, bool]]) -> None:
        for stage, view, has_newest in views:
            views_of_stage = self._stash[stage]
            newest = View(self._newest[stage], PLAIN)
            # the parameters alone have these tensors, and are about to be pointed elsewhere
            if has_newest:
                views_of_stage[newest] = [p.data for p in self._parameters[stage]]
            if view not in views_of_stage:
                assert view.version == newest.version, (
                    f"stage {stage}: {view} is read but was not stashed"
                )
                self._stash_corrected(stage, view.code, views_of_stage[newest])
            for parameter, tensor in zip(self._parameters[stage], views_of_stage[view]):
                parameter.data = tensor

    def _stash_corrected(self, stage: int, code: int, plain: Tensors) -> None:
        """Stash a corrected view of the newest version, whose uncorrected weights are `plain`."""
        tensors = self._allocate(stage)
        copy_all(list(zip(tensors, plain)))
        self._correct(stage, code, tensors)
        self._stash[stage][View(self._newest[stage], code)] = tensors

    def _stash_views(self, stages: Sequence[int], codes_by_stage: Sequence[set[int]]) -> None:
        copies: Copies = []
        for stage in stages:
            codes = codes_by_stage[stage]
            views = self._stash[stage]
            newest = self._newest[stage]
            tensors = [p.data for p in self._parameters[stage]]
            for code in codes - {PLAIN}:
                if View(newest, code) not in views:
                    self._stash_corrected(stage, code, tensors)
            for view in [
                v for v in views if v.version == newest and v.code not in codes and v.code != PLAIN
            ]:
                self._drop(stage, view)
            views.pop(View(newest, PLAIN), None)
            # leave the parameters' tensors as they are; the update steps a copy
            if PLAIN in codes:
                views[View(newest, PLAIN)] = tensors
                new = self._allocate(stage)
                for parameter, tensor in zip(self._parameters[stage], new):
                    parameter.data = tensor
                copies += zip(new, tensors)
        copy_all(copies)


def make_weight_store(work: Work, stages: Sequence[int], versions: Sequence[int]) -> WeightStore:
    """Return the weight store for `stages` of a job; `versions`: the newest version of each."""
    if not work.method.reads_old(work.schedule.stages):
        return WeightStore()
    rules = work.rules
    states = rules.stages
    # the memory of a shard is that of its weight, which no other tensor can take the place of
    is_sharded = rules.masters is not None and rules.masters.are_in_weights
    pairs = [] if is_sharded else rules.weight_master_pairs
    weights = {master: weight for weight, master in pairs}
    swaps = work.method.backward_reads is Reads.STASHED and not is_sharded
    store_class = SwappingStore if swaps else OverwritingStore
    return store_class(
        [[weights.get(p, p) for p in states[s].parameters] if s in states else [] for s in stages],
        versions,
        lambda index, code, version: rules.compute_corrections(stages[index], code, version),
        dict(pairs),
    )


def copy_all(copies: Copies) -> None:
    """Write the second tensor of each pair into the storage of the first: in one call with PyTorch
    2.1 and later.
    """
    if not copies:
        return
    if hasattr(torch, "_foreach_copy_"):
        targets, values = zip(*copies)
        torch._foreach_copy_(targets, values)
    else:
        for target, value in copies:
            target.copy_(value)
