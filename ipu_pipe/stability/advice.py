"""What a run's stages can bear: the largest stable rate of each, how far the run's own is from it, and which rule would
raise it.

The theory is of one direction of a quadratic at a time; of a network it is a guide. Rates below the limits of the sharpest
direction are stable along every flatter one, too (`ipu_pipe.stability.roots.largest_stable_step`); curvature grows in
training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ipu_pipe.stability.loops import loop_of
from ipu_pipe.stability.recurrences import Recurrence, discrepancy_decay, spike
from ipu_pipe.stability.roots import largest_stable_step


@dataclass(frozen=True)
class Stage:
    """A stage as a run trains it. `updates`: its recurrence, whose sensitivities are multiples of the curvature, its first
    read the forward's, and `rate` 1; `rate`: the greatest learning rate at which it steps, after all rules."""

    index: int
    updates: Recurrence
    rate: float
    curvature: float

    @property
    def delay(self) -> int:
        """Of the forward, in updates."""
        return self.updates.reads[0].delay


class Remedy(NamedTuple):
    """A change of method_args or of the optimizer: the largest stable rate and the margin that the stage would have."""

    change: str
    largest_rate: float
    margin: float


class Verdict(NamedTuple):
    """`margin`: the largest stable rate over the stage's own: below 1 it is unstable. `remedies`: what raises it, best
    first."""

    stage: Stage
    largest_rate: float
    margin: float
    remedies: Tuple[Remedy, ...]


def verdicts(stages: Sequence[Stage]) -> List[Verdict]:
    """Of each stage, were all of the sharpest direction its own."""
    known: Dict[Recurrence, float] = {}

    def limit(updates: Recurrence, curvature: float) -> float:
        if updates not in known:
            known[updates] = largest_stable_step(loop_of(updates))
        return known[updates] / curvature if curvature else math.inf  # a stage without weights

    found = []
    for stage in stages:
        largest = limit(stage.updates, stage.curvature)
        margin = _margin(largest, stage.rate)
        raised = []
        for change, (changed, factor) in _changes(stage.updates).items():
            other = limit(changed, stage.curvature)
            raised.append(Remedy(change, other, _margin(other, stage.rate * factor)))
        better = sorted((r for r in raised if r.margin > margin * 1.01), key=lambda r: -r.margin)
        found.append(Verdict(stage, largest, margin, tuple(better)))
    return found


def together(stages: Sequence[Stage], shares: Sequence[float], base: float, curvature: float) -> float:
    """The largest stable value of the `base` rate, from which the stages' rates differ by constant factors, where each has
    its share of the sharpest direction: all their delays at once."""
    parts = [
        stage.updates._replace(share=share, rate=stage.rate / base) for stage, share in zip(stages, shares) if share > 0
    ]
    return largest_stable_step(loop_of(*parts)) / curvature


def _margin(largest: float, rate: float) -> float:
    return largest / rate if rate else math.inf


def _changes(now: Recurrence) -> Dict[str, Tuple[Recurrence, float]]:
    """What could be changed -> (the recurrence then, what the rate is multiplied by)."""
    found = {}
    for name, change in CHANGES.items():
        made = change(now)
        if made is not None and made != (now, 1.0):
            found[name] = made
    return found


def _predicted(now: Recurrence, scale: float = 1.0) -> Optional[Recurrence]:
    forward = now.reads[0]
    if not forward.delay or forward.horizon:
        return None
    reads = (forward._replace(horizon=scale * forward.delay, by_velocity=now.momentum > 0), *now.reads[1:])
    return now._replace(reads=reads) if not any(read.correction for read in now.reads) else None


def _compensated(now: Recurrence) -> Optional[Recurrence]:
    if not now.momentum or not now.reads[0].delay or (now.velocity, now.gradient) != (1.0, 0.0):
        return None
    a, b = spike(now.momentum, now.reads[0].delay)
    return now._replace(velocity=a, gradient=b)


def _both(now: Recurrence) -> Optional[Recurrence]:
    compensated = _compensated(now)
    return None if compensated is None else _predicted(compensated)


def _corrected(now: Recurrence) -> Optional[Recurrence]:
    """T2 where the passes read different weights and nothing makes up for it."""
    forward, rest = now.reads[0], now.reads[1:]
    if not rest or forward.horizon or any(read.correction for read in rest):
        return None
    reads = tuple(read._replace(correction=float(forward.delay - read.delay)) for read in rest)
    decay = discrepancy_decay(math.exp(-2), forward.delay - rest[0].delay)
    return now._replace(reads=(forward, *reads), decay=decay)


def _stashed(now: Recurrence) -> Optional[Recurrence]:
    if len(now.reads) < 2:
        return None
    whole = sum(read.sensitivity for read in now.reads)
    return now._replace(reads=(now.reads[0]._replace(sensitivity=whole),), decay=0.0)


Change = Callable[[Recurrence], Optional[Tuple[Recurrence, float]]]  # what it is then, what the rate is multiplied by


def _at_the_same_rate(change: Callable[[Recurrence], Optional[Recurrence]]) -> Change:
    def changed(now: Recurrence) -> Optional[Tuple[Recurrence, float]]:
        made = change(now)
        return None if made is None else (made, 1.0)

    return changed


def _without_momentum(now: Recurrence) -> Optional[Tuple[Recurrence, float]]:
    """At the rate with which a gradient adds as much in the end."""
    if not now.momentum or now.reads[0].by_velocity:
        return None
    return now._replace(momentum=0.0, velocity=1.0, gradient=0.0), now.velocity / (1 - now.momentum) + now.gradient


# by what a config calls them
CHANGES: Dict[str, Change] = {
    "t1": lambda now: (now, 1 / now.reads[0].delay) if now.reads[0].delay > 1 else None,
    "t2": _at_the_same_rate(_corrected),
    "stash": _at_the_same_rate(_stashed),
    "spike_compensation": _at_the_same_rate(_compensated),
    "weight_prediction": _at_the_same_rate(_predicted),
    "spike_compensation + weight_prediction": _at_the_same_rate(_both),
    "momentum 0 at lr / (1 - momentum)": _without_momentum,
}


def advice(found: Sequence[Verdict]) -> List[str]:
    """In sentences, the stage with the least margin first: what is unstable, or how far from it, and what helps."""
    worst = min(found, key=lambda verdict: verdict.margin)
    place = f"stage {worst.stage.index} (delay {worst.stage.delay} updates)"
    many = sum(verdict.margin < 1 for verdict in found)
    if worst.margin < 1:
        lines = [
            f"{many} of {len(found)} stages step at more than their largest stable rate; most {place}:"
            f" {worst.stage.rate:.3g} is {1 / worst.margin:.3g} times {worst.largest_rate:.3g}"
        ]
    else:
        lines = [
            f"no stage steps at more than its largest stable rate; nearest is {place}, at 1/{worst.margin:.3g} of it"
        ]
    return lines + [
        f"with {r.change} its largest stable rate would be {r.largest_rate:.3g}, {r.margin:.3g} times its rate then"
        for r in worst.remedies[:3]
    ]
