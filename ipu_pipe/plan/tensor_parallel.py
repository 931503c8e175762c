"""Predict Megatron's tensor parallelism in closed form, for comparison with pipelines; no backend
of this library runs it.

t devices divide every matrix; w = devices / t such groups are replicas. In each unit with weights
(a Transformer block) every pass (forward, forward again, backward) ends its two halves, attention
and MLP, with an all-reduce of the activations:

    seconds of an update = g (compute / t + 3 passes * 2 * sum over units of all-reduce(unit's
    output, among t))
                           + all-reduce(gradients / t, among w) + update / t             g: microbatches per update

Source: Shoeybi et al. 2019 (Megatron-LM), section 3. Norms, residuals and dropout, which every
device does in whole, are counted as divided, and no message overlaps with compute.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ipu_pipe.hardware.description import compute_all_reduce_seconds, count_sharing, find_level
from ipu_pipe.hardware.memory import KeptCounts, compute_stage_memory
from ipu_pipe.hardware.precision import PRECISIONS
from ipu_pipe.hardware.unit_costs import Unit
from ipu_pipe.plan.candidates import list_powers_of_two
from ipu_pipe.plan.prediction import Problem, UnitSums
from ipu_pipe.text import format_bytes

# all-reduces of a unit in each pass
ALL_REDUCES = 2


@dataclass(frozen=True)
class TensorParallel:
    """A configuration of tensor parallelism over `ways` devices (t) and `width` replicas (w) with
    its predicted figures.

    Activations are computed again unit by unit. `communication`: the share of the time that
    all-reduces take.
    """

    ways: int
    width: int
    micro_batch_size: int
    gradient_accumulation: int
    samples_per_second: float
    communication: float
    memory_bytes: float


def predict_tensor_parallel(
    problem: Problem, devices: int, ways: int, batch: int
) -> TensorParallel | None:
    """Return the fastest microbatch's prediction for updates of `batch` samples, None if none fits
    the memory.
    """
    width = devices // ways
    sizes = list_powers_of_two(batch // width)
    predictions = [_predict(problem, ways, width, size, batch // width // size) for size in sizes]
    fitting = [prediction for prediction in predictions if prediction is not None]
    return max(fitting, key=lambda prediction: prediction.samples_per_second, default=None)


def describe_tensor_parallel(prediction: TensorParallel | None) -> str:
    """Return a prediction in words."""
    if prediction is None:
        return "tensor parallelism (not run by this library): no microbatch fits the memory"
    return (
        f"tensor parallelism (not run by this library), {prediction.ways} devices x "
        f"{prediction.width} replicas, microbatch"
        f" {prediction.micro_batch_size} x {prediction.gradient_accumulation}: "
        f"{prediction.samples_per_second:.4g} samples/s,"
        f" {prediction.communication:.0%} of the time in all-reduces, "
        f"{format_bytes(int(prediction.memory_bytes))} on each device"
    )


def _predict(
    problem: Problem, ways: int, width: int, samples: int, accumulate: int
) -> TensorParallel | None:
    sums = UnitSums(problem, samples)
    end = len(problem.units)
    parameters = round(float(sums.parameters[-1]) / ways)
    # one unit is recomputed at a time, from its input, and all inputs are kept
    largest = float(np.diff(sums.activations).max()) / ways
    part = Unit("", 0.0, 0.0, parameters, 0.0, largest, sums.number_bytes)
    memory = compute_stage_memory(
        part,
        float(sums.entering[:end].sum()),
        # one version of the weights and one microbatch, since there is no pipeline
        KeptCounts(1, 1, 1),
        precision=problem.precision,
        samples=samples,
        moments=problem.moments,
        device=problem.hardware.device,
    )
    if float(memory.total) > problem.memory_bytes:
        return None
    with_weights = np.diff(sums.parameters) > 0
    # what enters the next unit is what this one's halves reduce
    messages: list[float] = (sums.entering[1:] * with_weights).tolist()
    # forward, recomputation and backward
    passes = 3
    communicate = sum(
        passes * ALL_REDUCES * _compute_reduce_seconds(problem, ways, size)
        for size in messages
        # a unit without weights is not divided, and reduces nothing
        if size
    )
    # 2: a recomputation is another forward
    compute = (2 * float(sums.forward[-1]) + float(sums.backward[-1])) / ways
    gradients = _compute_gradient_seconds(
        problem, ways, width, parameters * PRECISIONS[problem.precision].gradient
    )
    seconds = accumulate * (compute + communicate) + gradients + float(sums.update[-1]) / ways
    rate = samples * accumulate * width / seconds
    share = (accumulate * communicate + gradients) / seconds
    return TensorParallel(ways, width, samples, accumulate, rate, share, float(memory.total))


def _compute_reduce_seconds(problem: Problem, ways: int, size: float) -> float:
    """Return the seconds of an all-reduce of `size` bytes among `ways` neighbouring devices, whose
    links no other group uses.
    """
    level = find_level(problem.hardware, range(ways))
    # one device reduces nothing
    return 0.0 if level is None else compute_all_reduce_seconds(level, size, ways)


def _compute_gradient_seconds(problem: Problem, ways: int, width: int, size: float) -> float:
    """Return the seconds of the all-reduces of the gradients, among the same part of every group,
    all parts at a time.
    """
    # groups are of neighbours, so that equal parts of two groups are `ways` devices apart
    level = find_level(problem.hardware, range(0, ways * width, ways))
    if level is None:
        return 0.0
    count = ways * width
    sharing = count_sharing(
        problem.hardware, [(device, (device + ways) % count) for device in range(count)]
    )
    return compute_all_reduce_seconds(level, size, width, max(sharing))
