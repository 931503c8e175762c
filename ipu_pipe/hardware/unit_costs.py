"""The cost of a unit: a piece of a model as a record of counts, and the seconds of its passes and
updates on a device.

A model is a row of units, which run one after another; a stage is consecutive units and again a
unit. Units are counted or measured by `model_units`. Seconds are predicted from FLOPs and bytes, or
lie between sizes that were measured.

A pass is two kinds of operations, one after the other. Products (of matrices, convolutions) take as
long as their arithmetic at the rate that training reaches, or the traffic of the weights, whichever
is more (the roofline of Williams et al. 2009): a forward reads them, a backward too, and it reads
and writes the sums of their gradients; so small microbatches are slow where weights are many. All
other operations (norms, activation functions, sums) take as long as what they move, each
operation's tensors read and written once. Where that was not counted (torch 2.0, units written by
hand) the traffic of activations is estimated beside the weights': a forward writes what is kept and
reads it once, a backward moves it twice as often.

The roofline holds operation by operation: sum the seconds of units, rather than asking for those of
a stage that joins them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ipu_pipe.hardware.description import Hardware
from ipu_pipe.hardware.precision import PRECISIONS

# ---- the record


class MeasuredPasses(NamedTuple):
    """Seconds that the passes of a unit took for a microbatch of `samples`."""

    samples: int
    forward: float
    backward: float  # without a recomputation


@dataclass(frozen=True)
class Unit:
    """A module, or a few, before which a stage may begin; `name` is the module at which it would.

    FLOPs (a multiplication and an addition are two) and bytes are for one sample, bytes for numbers
    of `number_bytes`; they scale with the precision.

    parameters: trained numbers that it owns (a weight used twice belongs to the first unit).
    output_bytes: of all tensors sent to the next device if a stage ends with this unit, including
    those that skip it.
    activation_bytes: of the tensors that the forward keeps for the backward, without weights and
    `also_kept`.
    also_kept: pairs (k, bytes) of what previous units keep too, the last of them k units before
    (most often its input), so that a stage which begins after that one keeps it as well.
    forward_moved, backward_moved: bytes that operations without FLOPs read and write; both 0: not
    counted.
    measured: its passes for one or more sizes of microbatch; empty: times come from FLOPs and
    bytes.
    update_seconds: of its weights' update, where measured.
    """

    name: str
    forward_flops: float
    backward_flops: float
    parameters: int
    output_bytes: float
    activation_bytes: float
    number_bytes: int = 4
    measured: tuple[MeasuredPasses, ...] = ()
    update_seconds: float = 0.0
    forward_moved: float = 0.0
    backward_moved: float = 0.0
    also_kept: tuple[tuple[int, float], ...] = ()


# ---- seconds and bytes


class UnitSeconds(NamedTuple):
    """Seconds of a microbatch; the backward without a recomputation, which takes another
    forward.
    """

    forward: float
    backward: float


def compute_pass_seconds(
    unit: Unit, hardware: Hardware, precision: str, samples: int
) -> UnitSeconds:
    """Return the seconds of a microbatch of `samples`. Measured units have their measured time on
    any hardware.
    """
    if unit.measured:
        return _interpolate(unit, samples)
    rate = hardware.find_rate(precision)
    bandwidth = hardware.device.bandwidth
    sizes = PRECISIONS[precision]
    scale = samples * sizes.activation / unit.number_bytes
    counted = unit.forward_moved or unit.backward_moved
    # an estimate, where the traffic was not counted
    activations = 0.0 if counted else 2 * scale * unit.activation_bytes
    weights = unit.parameters * sizes.weight
    gradients = unit.parameters * sizes.gradient
    forward = max(samples * unit.forward_flops / rate, (weights + activations) / bandwidth)
    backward = max(
        samples * unit.backward_flops / rate,
        (weights + 2 * gradients + 2 * activations) / bandwidth,
    )
    return UnitSeconds(
        forward + scale * unit.forward_moved / bandwidth,
        backward + scale * unit.backward_moved / bandwidth,
    )


def _interpolate(unit: Unit, samples: int) -> UnitSeconds:
    """Interpolate between the two measured sizes next to `samples`, or scale a single one in
    proportion.
    """
    points = sorted(unit.measured)  # by samples, their first field
    if len(points) == 1:
        scale = samples / points[0].samples
        return UnitSeconds(scale * points[0].forward, scale * points[0].backward)
    # the measured size at or above; the last one for larger microbatches
    above = next((i for i, point in enumerate(points) if point.samples >= samples), len(points) - 1)
    a = points[max(above - 1, 0)]
    # outside the measured sizes, the line through the two nearest goes on
    b = points[max(above, 1)]
    share = (samples - a.samples) / (b.samples - a.samples)
    return UnitSeconds(
        # a line through noisy times may fall below 0 for small sizes
        max(a.forward + share * (b.forward - a.forward), 0.0),
        max(a.backward + share * (b.backward - a.backward), 0.0),
    )


def count_state_bytes(precision: str, moments: int) -> int:
    """Return the bytes per weight that an optimizer with `moments` (see update.optimizer) keeps,
    the master copy of a mixed precision included."""
    sizes = PRECISIONS[precision]
    return moments * sizes.state + sizes.master


def compute_update_seconds(
    unit: Unit, hardware: Hardware, precision: str, moments: int, streamed: bool = False
) -> float:
    """Return the seconds of an update of a unit's weights, from memory traffic only.

    Weights, state and master copy are read and written, gradients read. `streamed`: state and
    master copy come from streaming memory before that, and go back.
    """
    sizes = PRECISIONS[precision]
    state = count_state_bytes(precision, moments)
    traffic = 2 * (sizes.weight + state) + sizes.gradient
    # a measured update counts on any hardware
    seconds = unit.update_seconds or unit.parameters * traffic / hardware.device.bandwidth
    if streamed:
        assert hardware.device.streaming_bandwidth is not None
        # read from streaming memory, and written back
        seconds += 2 * unit.parameters * state / hardware.device.streaming_bandwidth.value
    return seconds
