"""The largest stable learning rate of each stage of a run, its margin, and the changes of method
that would raise it.

The theory covers one direction of a quadratic at a time; for a network it is a guide. A rate that
is stable along the sharpest direction is stable along every flatter one
(`ipu_pipe.stability.roots.find_largest_stable_step`); the curvature of a network grows in training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Callable, NamedTuple, Optional, Sequence, Tuple

from ipu_pipe.stability.recurrences import (
    Recurrence,
    compute_discrepancy_decay,
    compute_spike_coefficients,
)
from ipu_pipe.stability.roots import derive_loop_gain, find_largest_stable_step


@dataclass(frozen=True)
class StageDynamics:
    """The update rule of one stage in a run.

    `updates`: its recurrence for curvature 1 and rate 1, whose first read is the forward's. `rate`:
    the greatest learning rate of the stage after all rules. `curvature`: the greatest curvature of
    the model or of the stage, or 1 for rates times curvature.
    """

    index: int
    updates: Recurrence
    rate: float
    curvature: float

    @property
    def delay(self) -> int:
        """The delay of the forward, in updates."""
        return self.updates.reads[0].delay


class Remedy(NamedTuple):
    """A change of method_args or of the optimizer, and the largest stable rate and margin that the
    stage would have with it.
    """

    change: str
    largest_rate: float
    margin: float


class StabilityMargin(NamedTuple):
    """The largest stable rate of a stage, and that rate over its own (`margin`; unstable below 1).
    Best remedy first.
    """

    stage: StageDynamics
    largest_rate: float
    margin: float
    remedies: tuple[Remedy, ...]


def compute_margins(stages: Sequence[StageDynamics]) -> list[StabilityMargin]:
    """Return the margin of each stage, as if the whole sharpest direction lay in that stage."""
    # the largest stable rates for curvature 1; many stages have the same recurrence
    limits: dict[Recurrence, float] = {}

    def find_limit(updates: Recurrence, curvature: float) -> float:
        if updates not in limits:
            limits[updates] = find_largest_stable_step(derive_loop_gain(updates))
        # a stage without weights has no limit
        return limits[updates] / curvature if curvature else math.inf

    margins = []
    for stage in stages:
        largest = find_limit(stage.updates, stage.curvature)
        margin = _compute_margin(largest, stage.rate)
        remedies = []
        for name, change in CHANGES.items():
            changed = change(stage.updates)
            # a rule that changes nothing on this stage is no remedy
            if changed is not None and changed != (stage.updates, 1.0):
                recurrence, rate_factor = changed
                limit = find_limit(recurrence, stage.curvature)
                remedies.append(
                    Remedy(name, limit, _compute_margin(limit, stage.rate * rate_factor))
                )
        # a gain below 1 % is not worth a change
        better = [remedy for remedy in remedies if remedy.margin > margin * 1.01]
        better.sort(key=lambda remedy: -remedy.margin)
        margins.append(StabilityMargin(stage, largest, margin, tuple(better)))
    return margins


def find_largest_joint_rate(
    stages: Sequence[StageDynamics], shares: Sequence[float], base: float, curvature: float
) -> float:
    """Return the largest stable `base` rate with the delays of all stages at once.

    The rates of the stages differ from `base` by constant factors; `shares` are the stages' shares
    of the sharpest direction.
    """
    parts = [
        stage.updates._replace(share=share, rate=stage.rate / base)
        for stage, share in zip(stages, shares)
        if share > 0
    ]
    return find_largest_stable_step(derive_loop_gain(*parts)) / curvature


def _compute_margin(largest: float, rate: float) -> float:
    return largest / rate if rate else math.inf


# ---- changes that may raise the largest stable rate: (the recurrence with the change, the factor of the rate), or None if the
# change does not apply

Change = Callable[[Recurrence], Optional[Tuple[Recurrence, float]]]


def _lower_rate(recurrence: Recurrence) -> tuple[Recurrence, float] | None:
    """Apply T1, as at its first update."""
    return (recurrence, 1 / recurrence.reads[0].delay) if recurrence.reads[0].delay > 1 else None


def _correct_discrepancy(recurrence: Recurrence) -> tuple[Recurrence, float] | None:
    """Apply T2, if the passes read different weights and no other rule corrects this."""
    forward = recurrence.reads[0]
    rest = recurrence.reads[1:]
    if not rest or forward.horizon or any(read.correction for read in rest):
        return None
    reads = tuple(read._replace(correction=float(forward.delay - read.delay)) for read in rest)
    # exp(-2): the default of T2's `decay`, PipeMare's 0.135
    decay = compute_discrepancy_decay(math.exp(-2), forward.delay - rest[0].delay)
    return recurrence._replace(reads=(forward, *reads), decay=decay), 1.0


def _stash_weights(recurrence: Recurrence) -> tuple[Recurrence, float] | None:
    if len(recurrence.reads) < 2:
        return None
    # both passes read one version: what they count adds up to the curvature
    sensitivity = sum(read.sensitivity for read in recurrence.reads)
    return recurrence._replace(
        reads=(recurrence.reads[0]._replace(sensitivity=sensitivity),), decay=0.0
    ), 1.0


def _compensate_spike(recurrence: Recurrence) -> tuple[Recurrence, float] | None:
    # other coefficients of v and g than those of plain momentum are a rule's already
    if (
        not recurrence.momentum
        or not recurrence.reads[0].delay
        or (recurrence.velocity, recurrence.gradient) != (1.0, 0.0)
    ):
        return None
    a, b = compute_spike_coefficients(recurrence.momentum, recurrence.reads[0].delay)
    return recurrence._replace(velocity=a, gradient=b), 1.0


def _predict_weights(recurrence: Recurrence) -> tuple[Recurrence, float] | None:
    forward = recurrence.reads[0]
    if not forward.delay or forward.horizon or any(read.correction for read in recurrence.reads):
        return None
    # a horizon of the whole delay, the scale 1
    predicted = forward._replace(horizon=1.0 * forward.delay, by_velocity=recurrence.momentum > 0)
    return recurrence._replace(reads=(predicted, *recurrence.reads[1:])), 1.0


def _compensate_and_predict(recurrence: Recurrence) -> tuple[Recurrence, float] | None:
    compensated = _compensate_spike(recurrence)
    return None if compensated is None else _predict_weights(compensated[0])


def _drop_momentum(recurrence: Recurrence) -> tuple[Recurrence, float] | None:
    """Drop the momentum, at the rate with which a gradient adds up to the same amount in the
    end.
    """
    # a read by velocity needs the momentum that would be dropped
    if not recurrence.momentum or recurrence.reads[0].by_velocity:
        return None
    rate_factor = recurrence.velocity / (1 - recurrence.momentum) + recurrence.gradient
    return recurrence._replace(momentum=0.0, velocity=1.0, gradient=0.0), rate_factor


# rules by their config key
CHANGES: dict[str, Change] = {
    "t1": _lower_rate,
    "t2": _correct_discrepancy,
    "stash": _stash_weights,
    "spike_compensation": _compensate_spike,
    "weight_prediction": _predict_weights,
    "spike_compensation + weight_prediction": _compensate_and_predict,
    "momentum 0 at lr / (1 - momentum)": _drop_momentum,
}


def describe_margins(margins: Sequence[StabilityMargin]) -> list[str]:
    """Return sentences on the stage with the smallest margin: its distance from the limit, and
    rules that would help.
    """
    worst = min(margins, key=lambda margin: margin.margin)
    plural = "" if worst.stage.delay == 1 else "s"
    subject = f"stage {worst.stage.index} (delay {worst.stage.delay} update{plural})"
    unstable = sum(margin.margin < 1 for margin in margins)
    if worst.margin < 1:
        lines = [
            f"{unstable} of {len(margins)} stages exceed their largest stable learning rate, "
            f"{subject} the most: its rate"
            f" {worst.stage.rate:.3g} is {1 / worst.margin:.3g} times the limit "
            f"{worst.largest_rate:.3g}"
        ]
    else:
        lines = [
            f"no stage exceeds its largest stable learning rate; the closest is {subject}, whose "
            f"rate is 1/{worst.margin:.3g} of the limit"
        ]
    return lines + [
        f"with {r.change} its largest stable rate would be {r.largest_rate:.3g}, {r.margin:.3g} "
        f"times its rate"
        for r in worst.remedies[:3]
    ]
