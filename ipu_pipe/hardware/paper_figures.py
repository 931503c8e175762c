"""The papers' memory figures, computed from the method and the sizes of the stages. Nothing is
measured.

Symbols: P stages, counted from 1 as i in the papers' formulas and from 0 as s elsewhere; N
microbatches per update; |w_i| the weights of stage i and W of all; c copies of the weights that the
synchronous method holds.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Sequence, Union

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.hardware.memory import count_kept_microbatches
from ipu_pipe.schedule.methods import Method, Timeline

Sizes = Union[Sequence[float], NDArray[Any]]
# keys of the figures with recomputation
RECOMPUTE_FIGURES = (
    "activation_bytes_with_recompute",
    "stash_microbatches_with_recompute",
    "recompute_ratio_counted",
    "recompute_ratio_order",
)


def compute_pipedream_ratio(
    weights_per_stage: Sizes, copies: int, accumulate: int, rounded: bool
) -> float:
    """Return PipeDream's weight and optimizer memory, 1 for the synchronous method: (c - 1 + sum_i
    |w_i| tau_i / W) / c.

    Stage i keeps tau_i = (2(P-i)+1)/N versions of the weights, `rounded` up as in PipeMare's Table
    1, or not as in its Table 2; c = `copies`, not counting T2's accumulator. This is PipeMare's
    estimate for PipeDream, on its own (dataflow) schedule: versions.count_weight_copies counts
    those of the schedule in use.
    """
    weights = np.asarray(weights_per_stage, np.float64)
    # (P,): 2 (P - i) + 1 of stage i
    ages = 2 * np.arange(len(weights) - 1, -1, -1) + 1
    # minus the floor of the negative is the ceiling, without a float that could be a little too
    # large
    tau = -(-ages // accumulate) if rounded else ages / accumulate
    return float((copies - 1 + (weights * tau).sum() / weights.sum()) / copies)


def compute_worker_footprint(
    weight_bytes: float,
    activation_bytes: float,
    input_bytes: float,
    depth: int,
    microbatches: int,
    recompute: bool,
) -> dict[str, float | None]:
    """Return the bytes of weights and activations on the fullest worker, by method (Narayanan et
    al. 2021, section 3).

    `depth` d, `microbatches` m per batch. v|W|/d weights, v = 2 versions for PipeDream-2BW and 1
    for the others, without gradients and optimizer state, plus the activations of the n
    microbatches in flight (GPipe m; 2BW and Flush d, Flush at most m): n A_total/d, or with
    recomputation n A_input + A_total/d for the microbatch being computed. For one microbatch,
    A_total are the activations of the model and A_input enters one stage. 2BW needs m >= d and is
    None otherwise.
    """

    def sum_worker(versions: int, in_flight: int) -> float:
        stored = (
            input_bytes * in_flight + activation_bytes / depth
            if recompute
            else activation_bytes / depth * in_flight
        )
        return versions * weight_bytes / depth + stored

    return {
        "gpipe": sum_worker(1, microbatches),
        "pipedream_flush": sum_worker(1, min(depth, microbatches)),
        # two versions of the weights, for any number of stages
        "pipedream_2bw": sum_worker(2, depth) if microbatches >= depth else None,
    }


class PipelineSizes(NamedTuple):
    """Sizes and counts by stage from which the papers' figures follow.

    `weight_bytes` of one version, `saved_bytes` that one microbatch leaves there, `input_bytes` that
    enter with it; `in_flight` microbatches and `weight_copies` of the schedule. `moments` of the
    optimizer; `t2`: the accumulators that it and other rules keep. `accumulate`: microbatches per
    update.
    """

    weight_bytes: Sizes
    saved_bytes: Sizes
    input_bytes: Sizes
    moments: int
    t2: int
    method: Method
    accumulate: int
    in_flight: Sequence[int]
    weight_copies: Sequence[int]


def compute_paper_figures(pipeline: PipelineSizes) -> dict[str, Any]:
    """Return the figures of summary.json's "memory"; those without a meaning are None.

    - weight_optimizer_copies: the mean over the weights, older live versions included; weight_optimizer_ratio: to the
      synchronous method's, which holds one version, its gradient and moments and no accumulator: c
      = 2 for SGD, 3 with momentum, 4 with Adam, so that T2's accumulator gives 1.33 and 1.25
      (PipeMare, Table 2); weight_optimizer_bytes: on all stages.
    - pipedream_ratio, pipedream_ratio_rounded: `compute_pipedream_ratio` of these stages, whatever the method.
    - activation_bytes: on all stages; stash_microbatches: by stage; the figures with recomputation:
      `_compute_recompute_figures`.
    - footprint_per_worker: `compute_worker_footprint`, A_input being the greatest of `input_bytes`.
    """
    weights, saved, entering = (
        np.asarray(sizes, np.float64)
        for sizes in (pipeline.weight_bytes, pipeline.saved_bytes, pipeline.input_bytes)
    )
    in_flight = np.asarray(pipeline.in_flight, np.int64)
    versions = np.asarray(pipeline.weight_copies, np.int64)
    P = len(weights)
    # 2: the weights and their gradient
    synchronous = 2 + pipeline.moments
    # the one version in the synchronous count makes room for all of the schedule
    total = (weights * (synchronous + pipeline.t2 - 1 + versions)).sum()
    copies = float(total / weights.sum())
    ratio, ratio_rounded = (
        compute_pipedream_ratio(weights, synchronous, pipeline.accumulate, rounded)
        if P > 1
        else None
        for rounded in (False, True)
    )
    sizes = float(weights.sum()), float(saved.sum()), float(entering.max())
    without, with_recompute = (
        compute_worker_footprint(*sizes, P, pipeline.accumulate, recompute)
        for recompute in (False, True)
    )
    return {
        "weight_optimizer_copies": copies,
        "weight_optimizer_ratio": copies / synchronous,
        "weight_optimizer_bytes": int(total),
        "pipedream_ratio": ratio,
        "pipedream_ratio_rounded": ratio_rounded,
        "activation_bytes": int((saved * in_flight).sum()),
        "stash_microbatches": in_flight.tolist(),
        **_compute_recompute_figures(pipeline, saved, entering),
        "footprint_per_worker": {
            name: {"with_recompute": with_recompute[name], "without_recompute": without[name]}
            for name in without
        },
    }


def _compute_recompute_figures(
    pipeline: PipelineSizes, saved: NDArray[np.float64], entering: NDArray[np.float64]
) -> dict[str, Any]:
    """Return the figures with recomputation, whether or not this run recomputes; None for other
    schedules than dataflow.

    recompute_ratio_counted: quotient of the two sums of microbatches; recompute_ratio_order: that
    of their orders P^(3/2) and P^2 (PipeMare, Tables 4 and 5), 0.097 for 107 stages.
    """
    P = len(saved)
    if pipeline.method.pipeline is not Timeline.DATAFLOW or P <= 1:
        return dict.fromkeys(RECOMPUTE_FIGURES)
    method = pipeline.method
    # as the paper recomputes: by segments, by default the square root of P
    inputs, activations = count_kept_microbatches(
        pipeline.in_flight, False, method.segments or 0, method.turn
    )
    stored = inputs + activations
    return {
        "activation_bytes_with_recompute": int((entering * inputs + saved * activations).sum()),
        "stash_microbatches_with_recompute": stored.tolist(),
        "recompute_ratio_counted": float(stored.sum() / np.sum(pipeline.in_flight)),
        "recompute_ratio_order": 1 / math.sqrt(P),
    }
