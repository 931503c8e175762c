"""Clip gradients by their norm, in the same way on all backends.

stage            each stage by its own norm
global           all stages by the global norm, if the pipeline is empty before every update
delayed_global   all stages by the global norm of an earlier update (`DelayedGlobalNorm`)
"""

from __future__ import annotations

import math
from typing import Callable, Iterable, Mapping, Sequence

import torch

from ipu_pipe.refusals import Argument
from ipu_pipe.schedule.table import Kind, Schedule


def explain_stage_scope(norm: float, stages: int) -> str:
    """Return the remedy for a global `norm` that is not known: clipping by stage, with the norm
    that bounds all stages alike.
    """
    by_stage = norm / math.sqrt(stages)
    return (
        f"{Argument('clip', (float(f'{by_stage:.4g}'), 'stage'))} (norm / sqrt(stages): together "
        f"{stages} stages stay within {norm:g})"
    )


# added to a norm, as in torch's own clipping
MARGIN = 1e-6


# a parameter with a gradient -> the norm of it
ComputeNorm = Callable[[torch.Tensor], torch.Tensor]


def compute_plain_norm(parameter: torch.Tensor) -> torch.Tensor:
    """Return the Euclidean norm of a parameter's gradient."""
    return torch.linalg.vector_norm(parameter.grad)  # type: ignore[arg-type]


def compute_gradient_norms(
    parameters: Iterable[torch.Tensor], compute: ComputeNorm = compute_plain_norm
) -> list[torch.Tensor]:
    """Return the Euclidean norm of each gradient that is not None, by `compute`.

    Each tensor has its own kernel call, so that the same kernels run whether or not a stage has its
    own process; torch's clipping would take all tensors of a GPU at once.
    """
    return [compute(p) for p in parameters if p.grad is not None]


def clip_to_norm(
    norm: float, parameters: Iterable[torch.Tensor], norms: Sequence[torch.Tensor]
) -> None:
    """Scale gradients so that the norm over all tensors of `norms`, which may be more than these
    gradients, is at most `norm`.
    """
    if not norms:
        return
    # the norm of the norms is that of all gradients
    total = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
    # a comparison in Python would wait for the GPU, which torch's own clipping avoids, too
    _multiply(parameters, torch.clamp(norm / (total + MARGIN), max=1.0))


def _multiply(parameters: Iterable[torch.Tensor], scale: float | torch.Tensor) -> None:
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(scale.to(p.grad.device) if isinstance(scale, torch.Tensor) else scale)


def compute_norm(
    parameters: Iterable[torch.Tensor], compute: ComputeNorm = compute_plain_norm
) -> float | None:
    """Return the Euclidean norm of all gradients of these parameters, None if there is none."""
    norms = compute_gradient_norms(parameters, compute)
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else None


class DelayedGlobalNorm:
    """Clip asynchronous methods by a global norm.

    A stage updates before the other stages have their gradients. So it uses the norm of the newest
    update that all stages have done before any of them does this one, `lag` updates back. Right
    after a drain there is none, and the stage's own norm is used.
    """

    def __init__(self, norm: float, schedule: Schedule) -> None:
        self._norm = norm
        self._schedule = schedule
        self.lag = _find_common_lag(schedule)
        self._totals: dict[int, float] = {}

    def get_source(self, k: int) -> int | None:
        """Return the update whose global norm clips update k, None if the stage's own norm does."""
        begin, _ = self._schedule.get_drain_interval(k)
        return k - self.lag if k - self.lag >= begin else None

    def is_needed(self, k: int) -> bool:
        """Return whether the norm of update k clips a later update."""
        return k + self.lag < self._schedule.get_drain_interval(k)[1]

    def remember(self, k: int, norms: Sequence[float | None]) -> None:
        """Store the global norm of update k; `norms`: the norms of the stages."""
        self._totals[k] = math.sqrt(sum(n * n for n in norms if n is not None))
        # no later update asks for one that old
        self._totals.pop(k - 2 * self.lag - 1, None)

    def clip(self, k: int, parameters: Sequence[torch.Tensor], norm: float | None) -> None:
        """Scale a stage's gradients of update k; `norm`: the stage's own norm."""
        source = self.get_source(k)
        clipping_norm = norm if source is None else self._totals[source]
        if clipping_norm is not None:
            _multiply(parameters, min(self._norm / (clipping_norm + MARGIN), 1.0))


def _find_common_lag(schedule: Schedule) -> int:
    """Return the least lag such that all stages have done update k - lag before any stage does
    update k, for any k.
    """
    longest = max(schedule.stretches, key=lambda part: part.microbatches)
    first = longest.first_microbatch // schedule.accumulate
    count = min(longest.microbatches // schedule.accumulate, 4 * schedule.stages + 8)
    slots = schedule.slots(Kind.UPDATE, first, first + count)
    earliest = slots.min(axis=0)
    latest = slots.max(axis=0)
    for lag in range(1, count):
        if (latest[:-lag] < earliest[lag:]).all():
            return lag
    # in a stretch this short no update has another to take a norm from
    return max(count, 1)


class OtherStages:
    """The interface to the norms of stages on other ranks; this class is for a process that has all
    stages.
    """

    def gather_norms(self, norms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the norm of every parameter's gradient in the order of the stages; `norms`: those
        of this process's stages.
        """
        return list(norms)

    def send(self, k: int, norms: Mapping[int, float | None]) -> None:
        """Send the norms of this process's stages of update k to other ranks; None means that a
        stage has no gradient.
        """

    def receive(self, k: int) -> dict[int, float | None]:
        """Return the norms of the other stages of update k."""
        return {}

    def discard(self, k: int) -> None:
        """Receive the norms of update k, which are no longer needed."""


class GradientClipping:
    """Clip the gradients of this process's stages: `clip(k)` clips update k; it is None for no
    clipping.
    """

    def __init__(
        self,
        clip: tuple[float, str] | None,
        stages: Mapping[int, Sequence[torch.nn.Parameter]],
        schedule: Schedule,
        others: OtherStages | None = None,
        compute: ComputeNorm = compute_plain_norm,
    ) -> None:
        """`clip`: (norm, scope), None for no clipping; `stages`: stage -> parameters, for this
        process's stages. `compute`: of shards, the norm over all of them.
        """
        self._compute = compute
        self._clip = clip
        self._stages = stages
        self._count = schedule.stages
        self._others = others or OtherStages()
        # update -> stage -> norm, until the later update that uses it
        self._norms: dict[int, dict[int, float | None]] = {}
        self.clip: Callable[[int], None] | None = None if clip is None else self._clip_gradients
        self.delayed: DelayedGlobalNorm | None = None
        if clip is not None and clip[1] == "delayed_global":
            self.delayed = DelayedGlobalNorm(clip[0], schedule)

    def _clip_gradients(self, k: int) -> None:
        """Scale the gradients of update k."""
        assert self._clip is not None
        norm, scope = self._clip
        if self.delayed is not None:
            self._clip_by_delayed_norm(self.delayed, k)
        elif scope == "global":
            parameters = [p for stage in self._stages.values() for p in stage]
            clip_to_norm(
                norm,
                parameters,
                self._others.gather_norms(compute_gradient_norms(parameters, self._compute)),
            )
        else:
            for stage in self._stages.values():
                clip_to_norm(norm, stage, compute_gradient_norms(stage, self._compute))

    def discard_rest(self) -> None:
        """Receive the norms that later updates would have needed, after a run that ended early."""
        # in the order in which the other ranks have sent them
        for k in sorted(self._norms):
            self._others.discard(k)
        self._norms.clear()

    def _clip_by_delayed_norm(self, delayed: DelayedGlobalNorm, k: int) -> None:
        # before they are scaled, since later updates are clipped by these
        norms = {s: compute_norm(ps, self._compute) for s, ps in self._stages.items()}
        source = delayed.get_source(k)
        if source is not None:
            # received as late as possible: all stages have done that update by now, so nothing
            # waits
            at_source = {**self._norms.pop(source), **self._others.receive(source)}
            delayed.remember(source, [at_source.get(s) for s in range(self._count)])
        for s, parameters in self._stages.items():
            delayed.clip(k, parameters, norms[s])
        if delayed.is_needed(k):
            self._norms[k] = norms
            self._others.send(k, norms)
