"""The records of a comparison: `MethodRow`, a method with its trainings by rate and seed, and
`Training`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Mapping

import numpy as np

from ipu_pipe.model.timing import FloatArray

# the share of a training's updates over which losses are averaged
WINDOW = 0.05
BYTES = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes")


@dataclass
class Training:
    """One training of the loop.

    losses: of each update; None: all its microbatches had the weight 0. evaluations: the values
    of each, and as `update` how many updates were made before it. seconds_at: the predicted second
    at which all stages have made each update. stages: the rows of `pipe.memory()`. notes: what was changed for the
    method. diverged: the reason why it ended early, "" if it did not. returned: what the loop
    returned, as JSON. wall_seconds: how long it took here.
    """

    losses: list[float | None] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    seconds_at: list[float] = field(default_factory=list)
    samples_per_update: int = 0
    microbatches: int = 0
    devices: int = 0
    stages: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    diverged: str = ""
    returned: Any = None
    wall_seconds: float = 0.0

    def smooth(self) -> FloatArray:
        """Return the mean loss of the last WINDOW of the updates up to each, infinite where there
        are fewer and where the training has diverged.
        """
        values: list[float] = []
        for loss in self.losses:
            # an update whose microbatches all have the weight 0 has no loss
            last = values[-1] if values else math.inf
            values.append(last if loss is None else loss)
        width = max(1, round(WINDOW * len(values)))
        # a window needs so many losses
        before = [math.inf] * (width - 1)
        means = np.convolve(values, np.ones(width) / width, "valid").tolist() if values else []
        # one more value, which makes the last one, `final`, infinite
        after = [math.inf] if self.diverged else []
        smoothed = np.array(before + means + after, np.float64)
        # NaN would be neither above nor below a goal
        return np.where(np.isfinite(smoothed), smoothed, math.inf)

    def count_samples(self) -> int:
        """Return the samples of its updates."""
        return self.samples_per_update * len(self.losses)

    @property
    def first(self) -> float:
        """Return the mean loss of the first WINDOW of the updates."""
        smoothed = self.smooth()
        return float(next(filter(math.isfinite, smoothed), math.inf))

    @property
    def final(self) -> float:
        """Return the mean loss of the last WINDOW of the updates, infinite if the training
        diverged.
        """
        return float(self.smooth()[-1]) if self.losses else math.inf

    @property
    def has_learned(self) -> bool:
        """Return whether the loss ends no higher than it began."""
        return math.isfinite(self.final) and self.final <= self.first


@dataclass
class MethodRow:
    """A method of a comparison.

    label: its name here. arguments: those of `Pipeline` that it sets, `method` among them. reason:
    why it cannot run, "" if it can. trainings: by multiple of the loop's rate, then by seed. notes:
    sentences on what was changed for it.
    """

    label: str
    arguments: Mapping[str, Any]
    reason: str = ""
    trainings: dict[float, dict[int, Training]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def best(self) -> float:
        """Return the multiple of the loop's rate with the least mean final loss, the smallest if
        all diverged.
        """
        # sorted: min takes the first of equal ones, such as infinite losses
        return min(sorted(self.trainings), key=self.compute_final)

    @property
    def chosen(self) -> list[Training]:
        """Return the trainings at the best rate, in the order of the seeds."""
        return [training for _, training in sorted(self.trainings[self.best].items())]

    @property
    def memory(self) -> list[int]:
        """Return the planned bytes of each stage."""
        return [sum(stage[kind] for kind in BYTES) for stage in self.chosen[0].stages]

    @property
    def staleness(self) -> int:
        """Return the greatest age, in updates, of the weights that a forward reads."""
        return max(int(stage["forward_delay"]) for stage in self.chosen[0].stages)

    def learns_at(self, rate: float) -> bool:
        """Return whether every seed's loss ends no higher than it began at a multiple of the rate."""
        return all(training.has_learned for training in self.trainings[rate].values())

    def compute_final(self, rate: float) -> float:
        """Return the mean final loss at a multiple of the loop's rate, infinite if a seed
        diverged.
        """
        return float(np.mean([training.final for training in self.trainings[rate].values()]))
