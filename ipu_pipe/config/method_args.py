"""The sections of `method_args`: changes of a method's axes, and its update rules."""

from __future__ import annotations

import math
from typing import Any, List, Optional

from pydantic import field_validator, model_validator
from typing_extensions import Annotated, Literal

from ipu_pipe.config.values import (
    Count,
    Delayed,
    Epochs,
    Fraction,
    NotNegative,
    Positive,
    Section,
    integer,
    key_fault,
    to_number,
)


class T1(Section):
    """Learning rates lowered by delay at first (PipeMare, equation 5). `anneal_updates`: K, from the lr_schedule if null."""

    anneal_updates: Optional[Count] = None


class T2(Section):
    """Discrepancy correction (PipeMare). `decay`: D, or `optimal` for the optimum on a quadratic; the default is exp(-2)."""

    decay: Any = math.exp(-2)

    @field_validator("decay")
    @classmethod
    def _validate_decay(cls, value: Any) -> Any:
        share = to_number(value)
        if value == "optimal" or (share is not None and 0 < share < 1):
            return value if value == "optimal" else share
        raise ValueError("must be a number > 0 and < 1, or optimal")


class Warmup(Section):
    """Synchronous training in the first `epochs` (a fraction is rounded to updates)."""

    epochs: Epochs


class Recompute(Section):
    """Activations recomputed in `segments` segments of stages; the square root of the stages if null."""

    segments: Optional[Count] = None


class Hogwild(Section):
    """Delays drawn from an exponential distribution. `max`: the greatest, in updates. `mean`: of all stages or one each; null:
    the stage's delay in the method's pipeline."""

    mean: Any = None
    max: Annotated[int, integer(1, 1_000_000)]

    @field_validator("mean")
    @classmethod
    def _validate_mean(cls, value: Any) -> Any:
        several = isinstance(value, (list, tuple))
        means = [to_number(item) for item in (value if several else [value])]
        if value is None or (means and all(mean is not None and mean >= 0 for mean in means)):
            return value if value is None else means if several else means[0]
        raise ValueError("must be null, a number >= 0, or a list of such, one a stage")


class ConstantDelay(Section):
    """Every forward reads weights `updates` updates older than those to which its gradient is applied."""

    updates: Delayed


class SpikeCompensation(Section):
    """SC_kD with k = `scale`, or any `a` and `b` (pipelined backpropagation)."""

    scale: Positive = 1.0
    a: Optional[NotNegative] = None
    b: Optional[NotNegative] = None

    @model_validator(mode="after")
    def _check_keys(self) -> "SpikeCompensation":
        if (self.a is None) != (self.b is None):
            key, value = ("a", self.a) if self.a is not None else ("b", self.b)
            raise key_fault(key, value, "a and b go together")
        if self.a is not None and self.scale != 1.0:
            raise key_fault("scale", self.scale, "either scale, or a and b")
        return self


class WeightPrediction(Section):
    """Linear weight prediction over `scale` times the delay, by the optimizer's velocity or the last update's difference
    (`form`)."""

    form: Literal["velocity", "difference"] = "velocity"
    scale: Positive = 1.0


class GradientShrinking(Section):
    """Gradients times `factor` to the power of the delay."""

    factor: Fraction


class MethodArgs(Section):
    """Changes of the method's axes, and its update rules; null: the method's own, or none. docs/rules.md has their equations.

    `schedule`: 1f1b, one pass a slot, or dataflow, forward and backward in each step. `turn`: 0 or 1: steps from the last stage's
    forward to its backward, dataflow only. `stash`: true or false: whether backwards read their forward's weights. `hogwild`:
    drawn delays. `constant_delay`: the
    same delay everywhere. `recompute`: activations recomputed by the method's own rule. `warmup`: synchronous at first. `t1`:
    PipeMare's rescheduled rates. `t2`: PipeMare's corrected backward. `spike_compensation`, `weight_prediction`,
    `gradient_shrinking`: see there. `blocks`: of local_chunked: how many, or the names at which they begin. `overlap`: of
    local_overlapping: 1. `layers`: of last_layers: how many stages train. `head`: of local methods: "module:function" that
    makes an auxiliary head. `block_rates`: of each block: what its learning rate is multiplied by. `block_accumulation`: of
    each block: of how many updates' gradients its step is made. `delay_bound`: of randomized_pipedream: the greatest delay;
    null: PipeDream's own. `delays`: of randomized_pipedream: uniform, a constant of each stage, or exactly PipeDream's.
    `order`: of randomized_pipedream: of stages and microbatches. `nag`: of randomized_pipedream: Nesterov's factor.
    `replicas`: of local_sgd: null: as many as stages. `local_steps`: of local_sgd: steps of a replica between two averages.
    """

    # keys of type Any are validated with their method, by ipu_pipe.schedule.methods
    schedule: Any = None
    turn: Any = None
    stash: Any = None
    hogwild: Optional[Hogwild] = None
    constant_delay: Optional[ConstantDelay] = None
    recompute: Optional[Recompute] = None
    warmup: Optional[Warmup] = None
    t1: Optional[T1] = None
    t2: Optional[T2] = None
    spike_compensation: Optional[SpikeCompensation] = None
    weight_prediction: Optional[WeightPrediction] = None
    gradient_shrinking: Optional[GradientShrinking] = None
    blocks: Any = None
    overlap: Any = None
    layers: Any = None
    head: Optional[str] = None
    block_rates: Optional[List[Positive]] = None
    block_accumulation: Optional[List[Count]] = None
    delay_bound: Optional[Annotated[int, integer(0, most=1_000_000, why="so many iterates are kept")]] = None
    delays: Optional[Literal["uniform", "offsets", "schedule"]] = None
    order: Optional[Literal["random", "schedule"]] = None
    nag: Optional[Positive] = None
    replicas: Optional[Annotated[int, integer(1, 4096)]] = None
    local_steps: Optional[Count] = None
