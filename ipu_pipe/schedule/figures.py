"""The papers' memory and utilization figures, from the sizes of the stages and the method alone; nothing is measured.

Symbols: P stages, counted from 1 as i in the papers' formulas and from 0 as s elsewhere; N microbatches an update;
|w_i| a stage's weights and W all of them; c copies of the weights that the synchronous method holds. Sizes may be in
any unit, but in `report` they are bytes.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.methods import Method, Pipeline, resolve_method
from ipu_pipe.schedule.runs import IntArray
from ipu_pipe.schedule.segments import segment_ends, segment_heads

Sizes = Union[Sequence[float], NDArray[Any]]

# Weights, gradient and the optimizer's moments.
OPTIMIZER_COPIES = {"sgd": 2, "momentum": 3, "adam": 4}


# ---- weights and optimizer


def weight_optimizer_copies(optimizer: str, t2: bool) -> int:
    """Copies of the weights that one version costs: weights, gradient and moments (sgd 2, momentum 3, adam 4).

    One more for T2's accumulator (or another rule's). PipeMare, Table 2: with T2 4/3 = 1.33 (momentum) and 5/4 = 1.25
    (Adam) of what it is without.
    """
    if not isinstance(optimizer, str) or optimizer not in OPTIMIZER_COPIES:
        raise BadInput(f"optimizer: {optimizer}: must be one of {', '.join(OPTIMIZER_COPIES)}")
    if not isinstance(t2, (bool, np.bool_)):
        raise BadInput(f"t2: {t2}: must be true or false")
    return OPTIMIZER_COPIES[optimizer] + int(t2)


def pipedream_ratio(weights_per_stage: Sizes, copies: int, accumulate: int, rounded: bool) -> float:
    """PipeDream's weight and optimizer memory, 1 for the synchronous method: (c - 1 + sum_i |w_i| tau_i / W) / c.

    tau_i = (2(P-i)+1)/N versions of the weights are kept on stage i, `rounded` up as in PipeMare's Table 1 or not,
    which gives its Table 2; c = `copies`, without T2's. This is the paper's rating of PipeDream, on PipeMare's own
    (dataflow) schedule: versions.weight_copies counts those of the schedule in use.
    """
    weights = _weights("weights_per_stage", weights_per_stage)
    _whole("copies", copies)
    _whole("accumulate", accumulate)
    ages = 2 * np.arange(len(weights) - 1, -1, -1) + 1
    tau = -(-ages // accumulate) if rounded else ages / accumulate
    return float((copies - 1 + (weights * tau).sum() / weights.sum()) / copies)


# ---- activations, PipeMare's recomputation


def recompute_ratio_order(stages: int) -> float:
    """1/sqrt(P), the ratio of the orders P^(3/2) and P^2 (PipeMare, Tables 4 and 5): 0.097 for 107 stages."""
    _whole("stages", stages)
    return 1 / math.sqrt(stages)


class Held(NamedTuple):
    """Microbatches (P,) of which a stage keeps the input only, and of which it keeps its whole activations."""

    inputs: IntArray
    activations: IntArray


def held(in_flight: Sequence[int], segments: int, turn: int) -> Held:
    """What the dataflow schedule keeps with recomputation by segments, counted as `Schedule.max_in_flight` counts.

    Stage s of a segment that ends with stage z recomputes 2(z-s) + `turn` steps before its own backward, and both of
    these steps count: 2(z-s) + `turn` + 1 microbatches' activations, or all that are `in_flight`. The first stage of a
    segment keeps the inputs of the others in flight, until it recomputes them. PipeMare's appendix A.3 leaves out the turn
    and what a step itself works on: turn + 1 fewer on every stage.
    """
    flying = _whole_numbers("in_flight", in_flight)
    _check_turn(turn)
    ends = _ends(len(flying), segments)
    window = 2 * (ends - np.arange(len(flying))) + (turn if len(flying) > 1 else 0) + 1
    activations = np.minimum(flying, window)
    return Held(np.where(segment_heads(ends), flying - activations, 0), activations)


def activation_bytes(
    saved_bytes: Sizes, input_bytes: Sizes, in_flight: Sequence[int], segments: int, turn: int
) -> Tuple[int, int]:
    """Peak bytes of activations, each stage's own, summed, in the dataflow schedule: without and with recomputation.

    `saved_bytes` and `input_bytes` of one microbatch: what a stage keeps for its backward, and what enters it.
    """
    flying = _whole_numbers("in_flight", in_flight)
    saved, entering = _sizes("saved_bytes", saved_bytes, len(flying)), _sizes("input_bytes", input_bytes, len(flying))
    kept = held(in_flight, segments, turn)
    return int((saved * flying).sum()), int((entering * kept.inputs + saved * kept.activations).sum())


def _ends(stages: int, segments: int) -> IntArray:
    _whole("stages", stages)
    _whole("segments", segments, least=0)
    return segment_ends(stages, segments)


# ---- what a worker needs


@dataclass(frozen=True)
class WorkerFootprint:
    """Weights and activations that one worker holds, by method; None where the method cannot be."""

    gpipe: float
    pipedream_flush: float
    pipedream_2bw: Optional[float]


def two_buffered_footprint(
    weight_bytes: float,
    total_activation_bytes: float,
    input_activation_bytes: float,
    depth: int,
    microbatches: int,
    recompute: bool,
) -> WorkerFootprint:
    """Worst case of one worker, `depth` d and m `microbatches` a batch (Narayanan et al. 2021, section 3).

    v|W|/d weights, v = 2 versions for PipeDream-2BW and 1 for the others, without gradients and optimizer state; of the
    n microbatches in flight (GPipe m; 2BW and Flush d, Flush not more than m) the activations n A_total/d, or with
    recomputation n A_input and A_total/d of the one at work. A_total is of the whole model, A_input enters one stage,
    each of one microbatch. 2BW needs m >= d, and is None otherwise.
    """
    for key, size in (
        ("weight_bytes", weight_bytes),
        ("total_activation_bytes", total_activation_bytes),
        ("input_activation_bytes", input_activation_bytes),
    ):
        _real(key, size, least=0)
    _whole("depth", depth)
    _whole("microbatches", microbatches)

    def worker(versions: int, flying: int) -> float:
        share = total_activation_bytes / depth
        activations = share + flying * input_activation_bytes if recompute else flying * share
        return float(versions * weight_bytes / depth + activations)

    return WorkerFootprint(
        gpipe=worker(1, microbatches),
        pipedream_flush=worker(1, min(depth, microbatches)),
        pipedream_2bw=worker(2, depth) if microbatches >= depth else None,
    )


# ---- utilization


def gpipe_utilization(stages: int, microbatches: int) -> float:
    """N/(N+P-1), the busy share of a pipeline that fills and drains for each update (PipeMare, Table 2)."""
    _whole("stages", stages)
    _whole("microbatches", microbatches)
    return microbatches / (microbatches + stages - 1)


def amortized_utilization(phases: Sequence[Tuple[float, float]]) -> float:
    """Of a run in phases (length E, utilization u): sum(E) / sum(E/u).

    Such as asynchronous epochs, u = 1, after synchronous ones (PipeMare, W).
    """
    for length, busy in phases:
        _real("length", length, least=0)
        if not 0 < busy <= 1:
            raise BadInput(f"utilization: {busy}: must be greater than 0 and at most 1")
    total = sum(length for length, _ in phases)
    if not total:
        raise BadInput("phases: of no length: there must be some epochs")
    return total / sum(length / busy for length, busy in phases)


# ---- all of it for one run


def report(
    *,
    weight_bytes: Sizes,
    saved_bytes: Sizes,
    input_bytes: Sizes,
    optimizer: str,
    t2: bool,
    method: Union[str, Method],
    accumulate: int,
    microbatches: int,
    depth: int,
    segments: Optional[int],
    in_flight: Sequence[int],
    weight_copies: Sequence[int],
) -> Dict[str, Any]:
    """What summary.json says under "memory", ready for JSON; None where a figure has no meaning.

    By stage: `weight_bytes` of one version, `saved_bytes` that one microbatch leaves there, `input_bytes` that enter
    with it, `in_flight` and `weight_copies` of the schedule (`Schedule.max_in_flight`, `VersionTable.weight_copies`).
    `method`: a preset's name, or the method itself where its schedule or turn was changed. N = `accumulate`,
    `microbatches` a batch, `depth` of the pipeline for the footprint per worker, `segments` of the recomputation (None
    or 0: the square root of P, rounded), whether or not this run recomputes.

    - weight_optimizer_copies: the mean over the weights, older versions that are alive included;
      weight_optimizer_ratio: to the synchronous method's, which holds one version and no accumulator;
      weight_optimizer_bytes: on all stages.
    - pipedream_ratio, pipedream_ratio_rounded: `pipedream_ratio` of these stages, whatever the method.
    - activation_bytes: on all stages; stash_microbatches: by stage. With recomputation: `held`, on the dataflow
      schedule only; recompute_ratio_counted: quotient of the two sums of microbatches, beside recompute_ratio_order.
    - footprint_per_worker: `two_buffered_footprint`, A_input being the greatest of `input_bytes`.
    """
    weights = _weights("weight_bytes", weight_bytes)
    P = len(weights)
    saved, entering = _sizes("saved_bytes", saved_bytes, P), _sizes("input_bytes", input_bytes, P)
    flying = _whole_numbers("in_flight", in_flight, P)
    versions = _whole_numbers("weight_copies", weight_copies, P)
    method = method if isinstance(method, Method) else resolve_method(method)
    synchronous = weight_optimizer_copies(optimizer, False)
    copies = weight_optimizer_copies(optimizer, t2) - 1 + versions
    rated = [pipedream_ratio(weights, synchronous, accumulate, rounded) if P > 1 else None for rounded in (False, True)]
    mean = float((weights * copies).sum() / weights.sum())
    figures: Dict[str, Any] = {
        "weight_optimizer_copies": mean,
        "weight_optimizer_ratio": mean / synchronous,
        "weight_optimizer_bytes": int((weights * copies).sum()),
        "pipedream_ratio": rated[0],
        "pipedream_ratio_rounded": rated[1],
        "activation_bytes": int((saved * flying).sum()),
        "activation_bytes_with_recompute": None,
        "stash_microbatches": flying.tolist(),
        "stash_microbatches_with_recompute": None,
        "recompute_ratio_counted": None,
        "recompute_ratio_order": None,
    }
    if method.pipeline is Pipeline.DATAFLOW and P > 1:
        kept = held(in_flight, segments or 0, method.turn)
        stash = kept.inputs + kept.activations
        _, figures["activation_bytes_with_recompute"] = activation_bytes(
            saved, entering, in_flight, segments or 0, method.turn
        )
        figures["stash_microbatches_with_recompute"] = stash.tolist()
        figures["recompute_ratio_counted"] = float(stash.sum() / flying.sum())
        figures["recompute_ratio_order"] = recompute_ratio_order(P)
    without, with_recompute = (
        asdict(
            two_buffered_footprint(
                float(weights.sum()), float(saved.sum()), float(entering.max()), depth, microbatches, recompute
            )
        )
        for recompute in (False, True)
    )
    figures["footprint_per_worker"] = {
        name: {"with_recompute": with_recompute[name], "without_recompute": without[name]} for name in without
    }
    return figures


# ---- arguments


def _whole(key: str, value: Any, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise BadInput(f"{key}: {value}: must be a whole number, at least {least}")


def _real(key: str, value: Any, least: float) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or value < least:
        raise BadInput(f"{key}: {value}: must be a finite number, at least {least}")


def _check_turn(turn: Any) -> None:
    if isinstance(turn, bool) or not isinstance(turn, Integral) or turn not in (0, 1):
        raise BadInput(f"turn: {turn}: must be 0 or 1")


def _array(key: str, values: Any, stages: Optional[int]) -> NDArray[Any]:
    made = np.asarray(values)
    if made.ndim != 1 or not len(made) or made.dtype.kind not in "iuf":
        raise BadInput(f"{key}: {values}: must be one number for each stage")
    if stages is not None and len(made) != stages:
        raise BadInput(f"{key}: {len(made)} numbers: must be one for each of {stages} stages")
    return made


def _sizes(key: str, values: Any, stages: Optional[int] = None) -> NDArray[np.float64]:
    """Sizes by stage; float64 holds bytes exactly up to 2^53."""
    made = _array(key, values, stages).astype(np.float64)
    if not np.isfinite(made).all() or (made < 0).any():
        raise BadInput(f"{key}: {values}: must be finite and not negative")
    return made


def _weights(key: str, values: Any) -> NDArray[np.float64]:
    made = _sizes(key, values)
    if not made.sum() > 0:
        raise BadInput(f"{key}: there are no weights on any stage")
    return made


def _whole_numbers(key: str, values: Any, stages: Optional[int] = None) -> IntArray:
    made = _array(key, values, stages)
    if made.dtype.kind == "f" or (made < 1).any():
        raise BadInput(f"{key}: {values}: must be whole numbers, at least 1")
    return made.astype(np.int64)
