"""What a piece of a model costs, whatever it runs on: the record from which times, memory and plans are made.

A model is a row of units, which run one after another; stages are consecutive units, and a stage of them is a unit again
(`joined`). Whoever counts (on meta tensors) or measures a model fills the records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Sequence, Tuple

from ipu_pipe.hardware.description import Hardware
from ipu_pipe.hardware.precision import PRECISIONS


class MeasuredPasses(NamedTuple):
    """Seconds that the passes of a unit took for a microbatch of so many `samples`."""

    samples: int
    forward: float
    backward: float  # without a recomputation


@dataclass(frozen=True)
class Unit:
    """A module, or a few, before which a stage may begin; `name` is that at which it would.

    FLOPs (a multiplication and an addition are two) and bytes are for one sample. `output_bytes`: what crosses to the next
    device if a stage ends with this unit, whatever else passes by included. `activation_bytes`: what is kept from the forward
    for the backward, weights and `also_kept` apart: that are pairs (k, bytes) of what it keeps and units before it keep too, the
    last of them k before, so that a stage which begins behind that one keeps it as well (most often its input).
    `forward_moved`, `backward_moved`: what operations without FLOPs (norms, activation functions, sums) read and write; both
    0: not counted. All these are sizes of numbers of `number_bytes`, and scale with the precision. `parameters`: how many
    trained numbers it owns (a weight used twice is the first unit's). `measured`: what its passes took, for one or more sizes
    of microbatch; empty: not measured, and times come from FLOPs and bytes. `update_seconds`: of its weights' update, where
    measured.
    """

    name: str
    forward_flops: float
    backward_flops: float
    parameters: int
    output_bytes: float
    activation_bytes: float
    number_bytes: int = 4
    measured: Tuple[MeasuredPasses, ...] = ()
    update_seconds: float = 0.0
    forward_moved: float = 0.0
    backward_moved: float = 0.0
    also_kept: Tuple[Tuple[int, float], ...] = ()


def join_units(units: Sequence[Unit]) -> Unit:
    """Consecutive units as one, such as a stage: sums, the name of the first, the output of the last. It is measured for the
    sizes of microbatch for which all are."""
    assert units and len({unit.number_bytes for unit in units}) == 1
    by_size = [{each.samples: each for each in unit.measured} for unit in units]
    sizes = sorted(set.intersection(*(set(own) for own in by_size)))
    return Unit(
        units[0].name,
        sum(unit.forward_flops for unit in units),
        sum(unit.backward_flops for unit in units),
        sum(unit.parameters for unit in units),
        units[-1].output_bytes,
        sum(unit.activation_bytes for unit in units)
        + sum(size for i, unit in enumerate(units) for back, size in unit.also_kept if back > i),
        units[0].number_bytes,
        tuple(
            MeasuredPasses(size, sum(own[size].forward for own in by_size), sum(own[size].backward for own in by_size))
            for size in sizes
        ),
        sum(unit.update_seconds for unit in units),
        sum(unit.forward_moved for unit in units),
        sum(unit.backward_moved for unit in units),
    )


MOMENTS = {"sgd": 0, "momentum": 1, "adam": 2}  # copies of the weights in an optimizer's state


class UnitSeconds(NamedTuple):
    """Seconds of a microbatch; the backward without a recomputation, which takes another forward."""

    forward: float
    backward: float


def compute_pass_seconds(unit: Unit, hardware: Hardware, precision: str, samples: int) -> UnitSeconds:
    """Of a microbatch of `samples`. A unit that was measured takes what was measured, whatever the hardware."""
    if unit.measured:
        return _between(unit, samples)
    rate, bandwidth, sizes = hardware.rate(precision), hardware.device.bandwidth, PRECISIONS[precision]
    scale = samples * sizes.activation / unit.number_bytes
    counted = unit.forward_moved or unit.backward_moved
    activations = 0.0 if counted else 2 * scale * unit.activation_bytes
    weights, gradients = unit.parameters * sizes.weight, unit.parameters * sizes.gradient
    forward = max(samples * unit.forward_flops / rate, (weights + activations) / bandwidth)
    backward = max(samples * unit.backward_flops / rate, (weights + 2 * gradients + 2 * activations) / bandwidth)
    return UnitSeconds(
        forward + scale * unit.forward_moved / bandwidth, backward + scale * unit.backward_moved / bandwidth
    )


def _between(unit: Unit, samples: int) -> UnitSeconds:
    """On the line through the two measured sizes next to `samples`; in proportion to one alone."""
    points = sorted(unit.measured)
    if len(points) == 1:
        scale = samples / points[0].samples
        return UnitSeconds(scale * points[0].forward, scale * points[0].backward)
    above = next((i for i, point in enumerate(points) if point.samples >= samples), len(points) - 1)
    a, b = points[max(above - 1, 0)], points[max(above, 1)]
    share = (samples - a.samples) / (b.samples - a.samples)
    return UnitSeconds(
        max(a.forward + share * (b.forward - a.forward), 0.0), max(a.backward + share * (b.backward - a.backward), 0.0)
    )


def count_state_bytes(precision: str, optimizer: str) -> int:
    """Of a weight: what an optimizer (of MOMENTS) keeps beside it, the master copy of a mixed precision included."""
    sizes = PRECISIONS[precision]
    return MOMENTS[optimizer] * sizes.state + sizes.master


def compute_update_seconds(
    unit: Unit, hardware: Hardware, precision: str, optimizer: str, streamed: bool = False
) -> float:
    """Of an update of a unit's weights: memory traffic alone. Weights, state and master copy are read and written, gradients
    read. `optimizer`: of MOMENTS. `streamed`: state and master copy come from streaming memory before that, and go back."""
    sizes, state = PRECISIONS[precision], count_state_bytes(precision, optimizer)
    traffic = 2 * (sizes.weight + state) + sizes.gradient
    seconds = unit.update_seconds or unit.parameters * traffic / hardware.device.bandwidth
    if streamed:
        assert hardware.device.streaming_bandwidth is not None
        seconds += 2 * unit.parameters * state / hardware.device.streaming_bandwidth.value
    return seconds


def compute_boundary_bytes(unit: Unit, precision: str, samples: int) -> float:
    """What a microbatch takes to the next stage if one ends with `unit`, and its gradient takes back."""
    return samples * unit.output_bytes * PRECISIONS[precision].activation / unit.number_bytes
