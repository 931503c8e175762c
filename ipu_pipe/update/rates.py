"""Learning-rate schedules: pure functions of the update index, so that a resumed run continues them exactly."""

from __future__ import annotations

import math
from typing import Any


def rate(settings: Any, base: float, k: int, updates: int, updates_per_epoch: int) -> float:
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
        return base * factor * settings.gamma ** sum(k >= epoch * updates_per_epoch for epoch in settings.milestones)
    return base * factor
