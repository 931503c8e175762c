"""Gradients scaled by their norm, alike on all backends: that of a stage, of all stages, or of all some updates ago.

    stage            each stage by its own norm
    global           all stages by that of all: where the pipeline is empty before every update
    delayed_global   all by the norm of the newest update that all have done before any does this one (DelayedGlobalNorm)

The arithmetic is `ipu_pipe.update.clipping`'s. Where stages are in other processes, `Elsewhere` asks these for their norms.
"""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional, Sequence

import torch

from ipu_pipe.backends.work import Work
from ipu_pipe.update import clipping


class Elsewhere:
    """The norms of stages that are in other processes. Here there are none: all stages are in this one."""

    def all_norms(self, own: Sequence[torch.Tensor]) -> List[torch.Tensor]:
        """The norm of every parameter's gradient in the order of the stages, `own` those of the stages here."""
        return list(own)

    def ask(self, k: int) -> Dict[int, Optional[float]]:
        """Norms of the other stages' gradients of update k; None where a stage has no gradient."""
        return {}

    def tell(self, k: int, norms: Mapping[int, Optional[float]]) -> None:
        """Send the others those of the stages here."""

    def forget(self, k: int) -> None:
        """Those of update k are not needed any more."""


class Clipping:
    """Scales the gradients of the stages that are here, at each update."""

    def __init__(self, work: Work, elsewhere: Elsewhere) -> None:
        self._clip, self._depth = work.clip, work.schedule.stages
        self._stages: Dict[int, List[torch.nn.Parameter]] = {
            s: held.parameters for s, held in work.rules.stages.items()
        }
        self._elsewhere = elsewhere
        self._norms: Dict[
            int, Dict[int, Optional[float]]
        ] = {}  # by update and stage, until a later update is clipped by them
        self.delayed: Optional[clipping.DelayedGlobalNorm] = None
        if work.clip is not None and work.clip[1] == "delayed_global":
            self.delayed = clipping.DelayedGlobalNorm(work.clip[0], work.schedule)

    def __call__(self, k: int) -> None:
        """Scale the gradients of update k."""
        if self._clip is None:
            return
        norm, scope = self._clip
        if self.delayed is not None:
            self._by_delayed_norm(self.delayed, k)
        elif scope == "global":
            parameters = [p for stage in self._stages.values() for p in stage]
            clipping.clip_to_norm(norm, parameters, self._elsewhere.all_norms(clipping.compute_gradient_norms(parameters)))
        else:
            for stage in self._stages.values():
                clipping.clip_to_norm(norm, stage, clipping.compute_gradient_norms(stage))

    def forget_rest(self) -> None:
        """Of a run that ends sooner than planned: the norms that later updates would have asked for."""
        for k in sorted(self._norms):
            self._elsewhere.forget(k)
        self._norms.clear()

    def _by_delayed_norm(self, delayed: clipping.DelayedGlobalNorm, k: int) -> None:
        own = {s: clipping.compute_norm(parameters) for s, parameters in self._stages.items()}
        source = delayed.source(k)
        if source is not None:
            norms = {**self._norms.pop(source), **self._elsewhere.ask(source)}
            delayed.remember(source, [norms.get(s) for s in range(self._depth)])
        for s, parameters in self._stages.items():
            delayed.clip(k, parameters, own[s])
        if delayed.is_needed(k):
            self._norms[k] = own
            self._elsewhere.tell(k, own)
