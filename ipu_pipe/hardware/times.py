"""Seconds that a unit's passes and updates take on a device: predicted from FLOPs and bytes, or between sizes that were measured.

A pass is two kinds of operations, one after the other. Products (of matrices, convolutions) take as long as their arithmetic at
the rate that training reaches, or the traffic of the weights, whichever is more (the roofline of Williams et al. 2009): a forward
reads them, a backward too, and it reads and writes the sums of their gradients; so small microbatches are slow where weights are
many. All else (norms, activation functions, sums) has no arithmetic to speak of: it takes as long as what it moves, each
operation's tensors read and written once. Where that was not counted (torch 2.0, units written by hand) the traffic of
activations is estimated beside the weights': a forward writes what is kept and reads it once, a backward moves it twice as often.

The roofline holds operation by operation: sum the seconds of units, rather than asking for those of a stage that joins them.
"""

from __future__ import annotations

from typing import NamedTuple

from ipu_pipe.hardware.description import Hardware
from ipu_pipe.hardware.precision import PRECISIONS
from ipu_pipe.hardware.units import Unit

MOMENTS = {"sgd": 0, "momentum": 1, "adam": 2}  # copies of the weights in an optimizer's state


class Passes(NamedTuple):
    """Seconds of a microbatch; the backward without a recomputation, which takes another forward."""

    forward: float
    backward: float


def pass_seconds(unit: Unit, hardware: Hardware, precision: str, samples: int) -> Passes:
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
    return Passes(forward + scale * unit.forward_moved / bandwidth, backward + scale * unit.backward_moved / bandwidth)


def _between(unit: Unit, samples: int) -> Passes:
    """On the line through the two measured sizes next to `samples`; in proportion to one alone."""
    points = sorted(unit.measured)
    if len(points) == 1:
        scale = samples / points[0].samples
        return Passes(scale * points[0].forward, scale * points[0].backward)
    above = next((i for i, point in enumerate(points) if point.samples >= samples), len(points) - 1)
    a, b = points[max(above - 1, 0)], points[max(above, 1)]
    share = (samples - a.samples) / (b.samples - a.samples)
    return Passes(
        max(a.forward + share * (b.forward - a.forward), 0.0), max(a.backward + share * (b.backward - a.backward), 0.0)
    )


def state_bytes(precision: str, optimizer: str) -> int:
    """Of a weight: what an optimizer (of MOMENTS) keeps beside it, the master copy of a mixed precision included."""
    sizes = PRECISIONS[precision]
    return MOMENTS[optimizer] * sizes.state + sizes.master


def update_seconds(unit: Unit, hardware: Hardware, precision: str, optimizer: str, streamed: bool = False) -> float:
    """Of an update of a unit's weights: memory traffic alone. Weights, state and master copy are read and written, gradients
    read. `optimizer`: of MOMENTS. `streamed`: state and master copy come from streaming memory before that, and go back."""
    sizes, state = PRECISIONS[precision], state_bytes(precision, optimizer)
    traffic = 2 * (sizes.weight + state) + sizes.gradient
    seconds = unit.update_seconds or unit.parameters * traffic / hardware.device.bandwidth
    if streamed:
        assert hardware.device.streaming_bandwidth is not None
        seconds += 2 * unit.parameters * state / hardware.device.streaming_bandwidth.value
    return seconds


def boundary_bytes(unit: Unit, precision: str, samples: int) -> float:
    """What a microbatch takes to the next stage if one ends with `unit`, and its gradient takes back."""
    return samples * unit.output_bytes * PRECISIONS[precision].activation / unit.number_bytes
