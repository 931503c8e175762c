"""Predict Megatron's tensor parallelism in closed form, for comparison with pipelines; no backend of this library runs it.

    t devices divide every matrix; w = devices / t such groups are replicas. Of each unit with weights (a Transformer block)
    every pass ends its two halves, attention and perceptron, with an all-reduce of the activations:

    batch = g (passes / t + 2 (forward, backward, and forward again) all-reduces of each unit's output among t)
            + all-reduce of the gradients / t among w + update / t

Source: Shoeybi et al. 2019 (Megatron-LM), section 3. Norms, residuals and dropout, which every device does in whole, are counted
as divided, and no message overlaps with compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional

import numpy as np

from ipu_pipe.hardware.description import compute_all_reduce_seconds, count_sharing, find_level
from ipu_pipe.hardware.memory import KeptCounts, compute_stage_memory
from ipu_pipe.hardware.precision import PRECISIONS
from ipu_pipe.hardware.unit_costs import Unit
from ipu_pipe.plan.prediction import Problem, Sums
from ipu_pipe.text import format_bytes

# all-reduces of a unit in each pass
ALL_REDUCES = 2


@dataclass(frozen=True)
class TensorParallel:
    """A configuration of tensor parallelism over `ways` devices and `width` replicas with its predicted figures.

    Activations are computed again unit by unit. `communication`: the share of the time that all-reduces take.
    """

    ways: int
    width: int
    micro_batch_size: int
    gradient_accumulation: int
    samples_per_second: float
    communication: float
    memory_bytes: float


def predict_tensor_parallel(problem: Problem, devices: int, ways: int, batch: int) -> Optional[TensorParallel]:
    """Return the fastest microbatch's prediction for updates of `batch` samples, None if none fits the memory."""
    width = devices // ways
    sizes = [1 << k for k in range((batch // width).bit_length())]
    options = [_predict(problem, ways, width, size, batch // width // size) for size in sizes]
    return max((one for one in options if one is not None), key=lambda one: one.samples_per_second, default=None)


def describe_tensor_parallel(prediction: Optional[TensorParallel]) -> str:
    """Return a prediction in words."""
    if prediction is None:
        return "tensor parallelism (not run by this library): no microbatch fits the memory"
    return (
        f"tensor parallelism (not run by this library), {prediction.ways} devices x {prediction.width} replicas, microbatch"
        f" {prediction.micro_batch_size} x {prediction.gradient_accumulation}: {prediction.samples_per_second:.4g} samples/s,"
        f" {prediction.communication:.0%} of the time in all-reduces, {format_bytes(int(prediction.memory_bytes))} on each device"
    )


def _predict(problem: Problem, ways: int, width: int, samples: int, accumulate: int) -> Optional[TensorParallel]:
    sums, end = Sums(problem, samples), len(problem.units)
    parameters = round(float(sums.parameters[-1]) / ways)
    largest = float(np.diff(sums.activations).max()) / ways
    whole = Unit("", 0.0, 0.0, parameters, 0.0, largest, sums.number_bytes)
    memory = compute_stage_memory(
        whole, float(sums.entering[:end].sum()), KeptCounts(1, 1, 1), precision=problem.precision, samples=samples,
        moments=problem.moments, device=problem.hardware.device,
    )  # fmt: skip
    if float(memory.total) > problem.memory_bytes:
        return None
    with_weights = np.diff(sums.parameters) > 0
    messages: List[float] = (sums.entering[1:] * with_weights).tolist()
    # forward, recomputation and backward
    passes = 3
    communicate = sum(passes * ALL_REDUCES * _reduce(problem, ways, size) for size in messages if size)
    compute = (2 * float(sums.forward[-1]) + float(sums.backward[-1])) / ways
    gradients = _reduce_gradients(problem, ways, width, parameters * PRECISIONS[problem.precision].gradient)
    seconds = accumulate * (compute + communicate) + gradients + float(sums.update[-1]) / ways
    rate = samples * accumulate * width / seconds
    share = (accumulate * communicate + gradients) / seconds
    return TensorParallel(ways, width, samples, accumulate, rate, share, float(memory.total))


def _reduce(problem: Problem, ways: int, size: float) -> float:
    """Return the seconds of an all-reduce among neighbours; groups side by side share no link."""
    level = find_level(problem.hardware, range(ways))
    return 0.0 if level is None else compute_all_reduce_seconds(level, size, ways)


def _reduce_gradients(problem: Problem, ways: int, width: int, size: float) -> float:
    """Return the seconds of the all-reduces of the gradients, among the same part of every group, all parts at a time."""
    devices = range(0, ways * width, ways)
    level = find_level(problem.hardware, devices)
    if level is None:
        return 0.0
    sharing = count_sharing(problem.hardware, [(one, (one + ways) % (ways * width)) for one in range(ways * width)])
    return compute_all_reduce_seconds(level, size, width, max(sharing))
