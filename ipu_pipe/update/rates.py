"""Learning rates: schedules as pure functions of the update index, so that a resumed run continues them exactly; and what follows
from a rate or a schedule that is given."""

from __future__ import annotations

import math
from typing import Any, Optional, Tuple


def rate(settings: Any, base: float, k: int, updates: int, updates_per_epoch: Optional[int]) -> float:
    """Learning rate of update k of `updates` in all, both counted from 0.

    `settings` has `name`, `warmup_steps` w, `milestones` (in epochs) and `gamma`. With t = (k - w) / (updates - w), the
    share done after the warm-up:

        constant  base                          cosine  base (1 + cos(pi t)) / 2
        step      base gamma^(milestones passed)    linear  base (1 - t)

    times (k + 1) / w during the first w updates.
    """
    w = settings.warmup_steps
    done = min(max(k - w, 0) / max(updates - w, 1), 1.0)
    factor = min((k + 1) / w, 1.0) if w else 1.0
    if settings.name == "cosine":
        return base * factor * (1 + math.cos(math.pi * done)) / 2
    if settings.name == "linear":
        return base * factor * (1 - done)
    if settings.name == "step":
        assert updates_per_epoch is not None  # of data that has epochs
        return base * factor * settings.gamma ** sum(k >= epoch * updates_per_epoch for epoch in settings.milestones)
    return base * factor


def scaled_for_update_size(lr: float, momentum: float, reference: int, size: int) -> Tuple[float, float]:
    """(lr, momentum) for updates of `size` samples from those for `reference` samples: m = m_r^(N/N_r),
    lr = lr_r (1 - m) N / ((1 - m_r) N_r) (Chiley et al. 2019; Kosson et al. 2021, equation 9)."""
    scaled = momentum ** (size / reference) if momentum else 0.0
    return lr * (1 - scaled) * size / ((1 - momentum) * reference), scaled


def anneal_default(first_milestone: Optional[int], warmup: int, updates: int) -> int:
    """K where none is given, in updates: a quarter of the first constant phase of a step schedule, or 5 x the linear warm-up,
    or a quarter of the run (PipeMare, section 3.1)."""
    return max(first_milestone // 4 if first_milestone else 5 * warmup if warmup else math.ceil(updates / 4), 1)
